"""What a call can evaluate: the adapter bound to it, and the verb `prompt_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from handrail.adapter.conversation import Conversation
from handrail.adapter.given import check_asking, one_message
from handrail.adapter.output import Output
from handrail.adapter.response import PromptResponse, respond
from handrail.adapter.run import Settings
from handrail.context.verbs import PromptModel
from handrail.deadline import Deadline
from handrail.dispatch.frame import Frame
from handrail.dispatch.opening import nested_frame
from handrail.errors import DefinitionError
from handrail.limits import Budget
from handrail.messages import Model
from handrail.models import model_named
from handrail.operation import Operation
from handrail.prompt import Prompt
from handrail.protocols import WorkerSource
from handrail.schema import Schema
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.adapter.adapter import Adapter
    from handrail.dispatch.call import LiveCall

OutputT = TypeVar("OutputT")

_NO_SYSTEM = "You are part of a program. Answer exactly what is asked."


class Bound:
    """The adapter as one call has it: what it evaluates is part of the call.

    It has the call's session, bus, resources, broker, journal, deadline, budget, and its place in the
    tree; limits given here can only be tighter. Each evaluation is a conversation of its own.
    """

    __slots__ = ("_adapter", "_call", "_settings")

    def __init__(self, adapter: Adapter, settings: Settings, call: LiveCall) -> None:
        self._adapter = adapter
        self._settings = settings
        self._call = call

    def evaluate(
        self,
        prompt: Prompt[OutputT],
        params: object = None,
        /,
        *,
        message: str | None = None,
        model: Model | str | None = None,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        temperature: float | None = None,
        opened: Sequence[str] = (),
        workers: WorkerSource | None = None,
    ) -> Operation[PromptResponse[OutputT]]:
        """Run another prompt inside this call, with the call's workers unless others are given."""
        call = self._call
        call.home.check()
        if isinstance(params, str):
            params, message = None, one_message(params, message)
        settings = override(self._settings, model, temperature)
        _check_bound(call, prompt)
        verb = f"evaluate {prompt.name}"
        number = call.next_verb(verb)

        async def evaluate() -> PromptResponse[OutputT]:
            frame, conversation = await _nest(call, number, verb, prompt, deadline, budget)
            with nullcontext() if workers is None else workers.enter(frame):
                rendered = prompt.render(params, session=call.session, opened=opened, deadline=frame.deadline)
                outcome = await self._adapter.run_in(frame, settings, conversation, prompt, rendered, message)
            return respond(outcome, frame)

        return Operation(evaluate, f"evaluate({prompt.name!r})", call.home)


def prompt_model_of(adapter: Adapter, settings: Settings, call: LiveCall) -> PromptModel:
    """The verb `prompt_model` of one call."""

    def verb(
        prompt: str,
        schema: Any,
        *,
        system: str | None = None,
        model: str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Operation[Any]:
        call.home.check()
        wanted: Schema[Any] = Schema(schema)
        asked = Prompt(
            "prompt_model",
            (system or _NO_SYSTEM).replace("$", "$$"),
            tools=tools,
            policies=call.frame.policies,
        )
        chosen = override(settings, model, temperature)
        if on_text is not None:
            chosen = override(chosen, streaming=True)

        number = call.next_verb("prompt_model")

        async def ask() -> Any:
            frame, conversation = await _nest(call, number, "prompt_model", asked, None, None)
            outcome = await adapter.run_in(
                frame,
                chosen,
                conversation,
                asked,
                asked.render(),
                prompt,
                output=Output(wanted),
                on_text=on_text,
            )
            return outcome.output

        return Operation(ask, "prompt_model", call.home)

    return verb


def _check_bound(call: LiveCall, prompt: Prompt[Any]) -> None:
    """A nested run works with the resources of the run around it; one that brings others says so here."""
    unbound = [
        each.protocol.__name__ for each in prompt.resources if not call.frame.resources.binds(each.protocol)
    ]
    if unbound:
        raise DefinitionError(
            f"prompt {prompt.name!r} brings {', '.join(unbound)}, and a run inside a call uses the resources of the "
            "run around it. Bind them there: evaluate(..., resources=[...])."
        )


async def _nest(
    call: LiveCall,
    number: int,
    verb: str,
    prompt: Prompt[Any],
    deadline: Deadline | None,
    budget: Budget | None,
) -> tuple[Frame, Conversation]:
    """A frame and a conversation inside the call, under ids that follow from the call's own."""
    frame = nested_frame(
        call, (), policies=(), number=number, deadline=deadline, budget=budget, prompt=prompt
    )
    if frame.log is not None:
        await frame.log.note_verb(call.attempt_place.child(number), verb)
    return frame, Conversation(frame.session, frame.run_context.run_id)


def override(
    settings: Settings,
    model: Model | str | None = None,
    temperature: float | None = None,
    streaming: bool | None = None,
) -> Settings:
    """The same settings but for what is given."""
    if model is None and temperature is None and streaming is None:
        return settings
    check_asking(temperature, None)
    return Settings(
        settings.model if model is None else model_named(model) if isinstance(model, str) else model,
        retry=settings.retry,
        throttle=settings.throttle,
        temperature=settings.temperature if temperature is None else temperature,
        max_tokens=settings.max_tokens,
        streaming=settings.streaming if streaming is None else streaming,
    )
