"""How a run asks its model, and what is checked before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from handrail.adapter.output import ANSWER_TOOL
from handrail.adapter.pacing import Retry, Throttle
from handrail.errors import DefinitionError
from handrail.messages import Model
from handrail.models import model_named
from handrail.models.prices import Tariff, tariff_of
from handrail.prompt import OPENER, Prompt
from handrail.prompt.section import walk
from handrail.protocols import EventBus, Filesystem, WorkerSource
from handrail.session import Session
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.dispatch.frame import Frame


class Settings:
    """How a run asks its model. What is nested in it asks in the same way unless told otherwise."""

    __slots__ = ("max_tokens", "model", "retry", "streaming", "tariff", "temperature", "throttle")

    def __init__(
        self,
        model: Model,
        *,
        retry: Retry,
        throttle: Throttle | None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        streaming: bool = False,
    ) -> None:
        self.model = model
        self.retry = retry
        self.throttle = throttle
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.streaming = streaming
        self.tariff: Tariff = tariff_of(model.name, model.traits)

    def override(
        self,
        *,
        model: Model | str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        streaming: bool | None = None,
    ) -> Settings:
        """These settings but for what is given."""
        check_sampling(temperature, max_tokens)
        if isinstance(model, str):
            model = model_named(model)
        return Settings(
            model or self.model,
            retry=self.retry,
            throttle=self.throttle,
            temperature=self.temperature if temperature is None else temperature,
            max_tokens=max_tokens or self.max_tokens,
            streaming=self.streaming if streaming is None else streaming,
        )


def check_prompt(prompt: object) -> None:
    """Raise `DefinitionError` for what is not a prompt."""
    if not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"evaluate takes a Prompt, not a {type(prompt).__name__}. "
            'Write `evaluate(Prompt("guide", "Answer briefly."), "the message")`.'
        )


def one_message(params: str, message: str | None) -> str:
    """The user's message, where it was given once."""
    if message is not None:
        raise DefinitionError(
            "two messages were given: a string as params is the user's message, and so is `message`. "
            "Give one of them."
        )
    return params


def check_sampling(temperature: Any, max_tokens: Any) -> None:
    """Raise `DefinitionError` here, where a provider would refuse in the middle of a run."""
    if temperature is not None and (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 <= temperature < float("inf")
    ):
        raise DefinitionError(
            f"temperature is {temperature!r}. Give a number from 0 on, or None for the model's own."
        )
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise DefinitionError(
            f"max_tokens is {max_tokens!r}. Give a whole number from 1 on, or None for no bound."
        )


def check_added(prompt: Prompt[Any], tools: Sequence[Tool[Any, Any]]) -> None:
    """Tools that are added to one run are tools, under names that nothing else there has."""
    if not tools:
        return
    from handrail.dispatch.frame import check_tool

    taken = {tool.name for tool in prompt.tools}
    taken.update(tool.name for _, section in walk(prompt.sections) for tool in section.tools)
    taken.update((OPENER, ANSWER_TOOL))
    for tool in tools:
        check_tool(tool)
        if tool.name in taken:
            raise DefinitionError(
                f"a tool {tool.name!r} was added to a run of prompt {prompt.name!r}, which has one of that name. "
                "Rename it."
            )
        taken.add(tool.name)


def check_files(prompt: Prompt[Any], frame: Frame) -> None:
    """Sections whose tools work on files want a run that has some."""
    wanting = [type(section).__name__ for _, section in walk(prompt.sections) if section.needs_files]
    if wanting and frame.filesystem is None and not frame.resources.binds(Filesystem):
        raise DefinitionError(
            f"prompt {prompt.name!r} has {wanting[0]}, and the run has no files. Give it some: "
            "evaluate(..., filesystem=DirectoryFilesystem('folder'))."
        )


def checked_model(model: Any) -> Model:
    if isinstance(model, type) or not all(hasattr(model, member) for member in ("name", "traits", "stream")):
        raise DefinitionError(
            f"{model!r} is not a model. Give one, such as OpenAIModel('gpt-5') or ScriptedModel([...]), "
            "or a name like 'openai:gpt-5'."
        )
    return model


def checked_workers(workers: Any) -> WorkerSource | None:
    if workers is None or callable(getattr(workers, "enter", None)):
        return workers
    raise DefinitionError(f"workers is a {type(workers).__name__}. Give WorkerRegistry(folder).")


def forwarding(session: Session, *buses: EventBus | None) -> Callable[[], None]:
    """Until what is returned is called, whoever listens on one of these hears of the run as well."""
    own = session.dispatcher
    stops = [own.subscribe(object, bus.publish) for bus in buses if bus is not None and bus is not own]

    def stop() -> None:
        for each in stops:
            each()

    return stop
