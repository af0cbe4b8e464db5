"""What an adapter and its evaluations were given, checked before anything begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from handrail.adapter.output import ANSWER_TOOL
from handrail.dispatch.frame import Frame, check_tool
from handrail.dispatch.opening import check_kinds
from handrail.errors import DefinitionError
from handrail.messages import Model
from handrail.prompt import OPENER, Prompt
from handrail.prompt.section import walk
from handrail.protocols import EventBus, Filesystem, WorkerSource
from handrail.session import Session
from handrail.tools import Tool


def given_to_evaluate(arguments: dict[str, Any]) -> dict[str, Any]:
    """What an evaluation was given, checked where it can be before it begins."""
    del arguments["self"]
    prompt, params, message = arguments.pop("prompt"), arguments["params"], arguments["message"]
    if not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"evaluate takes a Prompt, not a {type(prompt).__name__}. "
            'Write `evaluate(Prompt("guide", "Answer briefly."), "the message")`.'
        )
    if isinstance(params, str):
        one_message(params, message)
    check_kinds(session=(arguments["session"], Session, "a Session"))
    check_asking(arguments["temperature"], arguments["max_tokens"])
    return arguments


def one_message(params: str, message: str | None) -> str:
    """The user's message, where it was given once."""
    if message is not None:
        raise DefinitionError(
            "two messages were given: a string as params is the user's message, and so is `message`. "
            "Give one of them."
        )
    return params


def check_asking(temperature: Any, max_tokens: Any) -> None:
    """How a model is asked: refused here, where a provider would do so in the middle of a run."""
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


def given_to_resume(arguments: dict[str, Any]) -> dict[str, Any]:
    """What resuming a run was given, beside the run."""
    for name in ("self", "run_id", "prompt"):
        del arguments[name]
    return arguments


def check_added(prompt: Prompt[Any], tools: Sequence[Tool[Any, Any]]) -> None:
    """Tools that are added to one run are tools, under names that nothing else there has."""
    if not tools:
        return
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
