"""Evaluations inside a call: the adapter bound to the call, and the verb `prompt_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from handrail.adapter.conversation import Conversation
from handrail.adapter.loop import run_in
from handrail.adapter.response import Output, PromptResponse, respond
from handrail.adapter.settings import Settings, one_message
from handrail.context import PromptModel
from handrail.dispatch.frame import Frame
from handrail.dispatch.options import RunOptions, check_value
from handrail.errors import DefinitionError
from handrail.guard.outer_policy import own_policies
from handrail.messages import Model
from handrail.operation import Operation
from handrail.prompt import Prompt
from handrail.protocols import NestedArguments
from handrail.schema import Schema
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.adapter.adapter import Adapter
    from handrail.dispatch.attempt import Attempt

OutputT = TypeVar("OutputT")

_NO_SYSTEM = "You are part of a program. Answer exactly what is asked."


class CallAdapter:
    """The adapter as one call sees it. Evaluations with it are part of the call.

    They use the call's session, bus, resources, broker, journal, deadline, budget and place in the tree.
    Limits passed here can only be tighter. Each evaluation has its own conversation.
    """

    __slots__ = ("_adapter", "_call", "_settings")

    def __init__(self, adapter: Adapter, settings: Settings, attempt: Attempt) -> None:
        self._adapter = adapter
        self._settings = settings
        self._call = attempt

    @property
    def streams(self) -> bool:
        """Whether the model's text is published as events while it is being written."""
        return self._settings.streaming

    def evaluate(
        self,
        prompt: Prompt[OutputT],
        params: object = None,
        /,
        *,
        message: str | None = None,
        model: Model | str | None = None,
        **arguments: Unpack[NestedArguments],
    ) -> Operation[PromptResponse[OutputT]]:
        """Run another prompt inside this call, and return its response."""
        self._call.home.check()
        if isinstance(params, str):
            params, message = None, one_message(params, message)
        check_value("message", message)
        options = RunOptions(params=params, message=message)
        return self.run(prompt, options.updated("evaluate", NestedArguments, arguments), model)

    def run(
        self,
        prompt: Prompt[OutputT],
        given: RunOptions,
        model: Model | str | None = None,
        levels: int | None = None,
    ) -> Operation[PromptResponse[OutputT]]:
        """Run a prompt inside this call, with the call's options except for those in `given`.

        It has the call's workers unless `given` has others. `levels` limits how deep its calls may nest.
        """
        attempt = self._call
        attempt.home.check()
        settings = self._settings
        if model is not None or given.temperature is not None:
            settings = settings.override(model=model, temperature=given.temperature)
        _check_bound(attempt, prompt)
        verb = f"evaluate {prompt.name}"
        number = attempt.next_verb(verb)

        async def evaluate() -> PromptResponse[OutputT]:
            frame, conversation = await _nest(attempt, number, verb, prompt, given, levels)
            frame.model.adapter = self._bind  # an agent's adapter may differ from its caller's
            async with nullcontext() if given.workers is None else given.workers.enter(frame):
                await prompt.connect()
                rendered = prompt.render(
                    given.params, session=attempt.session, opened=given.opened, deadline=frame.deadline
                )
                outcome = await run_in(
                    self._adapter, frame, settings, conversation, prompt, rendered, given.message
                )
            return respond(outcome, frame)

        return Operation(evaluate, f"evaluate({prompt.name!r})", attempt.home)

    def _bind(self, attempt: Attempt) -> CallAdapter:
        """Bind the same adapter to a call of a run nested in this call."""
        return CallAdapter(self._adapter, self._settings, attempt)


def prompt_model_of(adapter: Adapter, settings: Settings, attempt: Attempt) -> PromptModel:
    """Return the `prompt_model` verb of one call."""

    def verb(
        prompt: str,
        schema: Any,
        *,
        system: str | None = None,
        model: Model | str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Operation[Any]:
        attempt.home.check()
        wanted: Schema[Any] = Schema(schema)
        asked = Prompt(
            "prompt_model",
            (system or _NO_SYSTEM).replace("$", "$$"),
            tools=tools,
            policies=own_policies(attempt.frame.policies),
        )
        chosen = settings
        if model is not None or temperature is not None or on_text is not None:
            streams = True if on_text is not None else None
            chosen = settings.override(model=model, temperature=temperature, streaming=streams)
        number = attempt.next_verb("prompt_model")

        async def ask() -> Any:
            frame, conversation = await _nest(attempt, number, "prompt_model", asked)
            outcome = await run_in(
                adapter,
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

        return Operation(ask, "prompt_model", attempt.home)

    return verb


def _check_bound(attempt: Attempt, prompt: Prompt[Any]) -> None:
    """Raise `DefinitionError` if a nested prompt has resources that the outer run does not bind."""
    unbound = [
        each.protocol.__name__
        for each in prompt.resources
        if not attempt.frame.world.resources.binds(each.protocol)
    ]
    if unbound:
        raise DefinitionError(
            f"prompt {prompt.name!r} has resources of its own ({', '.join(unbound)}), but a run inside a call uses those of the "
            "run around it. Bind them there: evaluate(..., resources=[...])."
        )


async def _nest(
    attempt: Attempt,
    number: int,
    verb: str,
    prompt: Prompt[Any],
    given: RunOptions = RunOptions(),  # noqa: B008  # frozen
    levels: int | None = None,
) -> tuple[Frame, Conversation]:
    """Create a frame and a conversation inside the call, with ids derived from the call's id."""
    outer = attempt.frame
    options = outer.options.nested(given, outer.costs.tracker, attempt.depth + 1, levels, outer.policies)
    frame = Frame.nested(attempt, number, options, prompt)
    await frame.log.note_verb(attempt.place.child(number), verb)
    return frame, Conversation(frame.session, frame.run_context.run_id)
