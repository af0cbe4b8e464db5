"""Evaluations inside a call: the adapter bound to the call, and the verb `prompt_model`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from handrail.concurrency.isolation import Callback
from handrail.concurrency.operation import Operation
from handrail.content import AttachmentSource, attachments_of
from handrail.context import PromptModel
from handrail.guard.outer_policy import own_policies
from handrail.messages import Model
from handrail.prompt import Prompt
from handrail.run.conversation import Conversation
from handrail.run.loop import run_in, with_sections
from handrail.run.nested import nested_run
from handrail.run.options import NestedArguments, RunOptions, check_value
from handrail.run.response import Output, PromptResponse, respond
from handrail.run.run import Run
from handrail.run.settings import Settings, check_added, check_files, one_message, settings_of
from handrail.schema import Schema
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.run.adapter import Adapter
    from handrail.run.attempt import Attempt

OutputT = TypeVar("OutputT")

_NO_SYSTEM = "You are part of a program. Answer exactly what is asked."


class CallAdapter:
    """The adapter as one call sees it. Evaluations with it are part of the call.

    They inherit from the call as `RunOptions.nested` says: limits that are passed to them can only be tighter, and resources
    replace the call's resources of the same protocols. Each evaluation has its own conversation.
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

    def model_or(self, model: Model | str | None) -> Model:
        """Return `model`, which may be given by name. If it is None, return this adapter's model."""
        return self._settings.override(model=model).model if model is not None else self._settings.model

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
        """Run a prompt inside this call. `RunOptions.nested` says how the options in `given` are combined with the call's.

        `levels` limits how deep the run's calls may nest.
        """
        attempt = self._call
        attempt.home.check()
        settings = self._settings
        chosen = settings_of(prompt, given)
        own = (model, given.temperature, given.max_tokens, chosen)
        if any(each is not None for each in own):
            settings = settings.override(
                model=model,
                temperature=given.temperature,
                max_tokens=given.max_tokens,
                model_settings=chosen,
            )
        verb = f"evaluate {prompt.name}"
        number = attempt.next_verb(verb)
        given = given.replace(resources=(*given.resources, *prompt.resources))
        check_added(prompt, given.tools)

        async def evaluate() -> PromptResponse[OutputT]:
            async with nested_run(attempt, number, verb, given, prompt, levels) as run:
                bind_model(run, self._adapter, settings)
                check_files(prompt, run)
                async with nullcontext() if given.workers is None else given.workers.enter(run):
                    await prompt.connect(attempt.session.principal)
                    rendered = prompt.render(
                        given.params, session=attempt.session, opened=given.opened, deadline=run.deadline
                    )
                    conversation = Conversation(run.session, run.run_context.run_id)
                    outcome = await run_in(
                        self._adapter,
                        run,
                        settings,
                        conversation,
                        prompt,
                        rendered,
                        given.message,
                        tools=given.tools,
                        attachments=with_sections(rendered, conversation, given.attachments),
                    )
            return respond(outcome, run, conversation)

        return Operation(evaluate, f"evaluate({prompt.name!r})", attempt.home)


def bind_model(run: Run, adapter: Adapter, settings: Settings) -> None:
    """Let the calls of a run, and the runs nested in them, use the run's adapter and model.

    An environment's own `prompt_model` takes precedence over the run's model.
    """
    settings = settings.inherited()
    run.model.adapter = lambda attempt: CallAdapter(adapter, settings, attempt)
    environment = run.people.environment
    if environment is None or environment.prompt_model is None:
        run.model.prompt_model = lambda attempt: prompt_model_of(adapter, settings, attempt)
    else:
        run.model.prompt_model = environment.prompt_model


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
        attachments: Sequence[AttachmentSource] = (),
        on_text: Callable[[str], object] | None = None,
    ) -> Operation[Any]:
        attempt.home.check()
        wanted: Schema[Any] = Schema(schema)
        attached = attachments_of(attachments)
        asked = Prompt(
            "prompt_model",
            (system or _NO_SYSTEM).replace("$", "$$"),
            tools=tools,
            policies=own_policies(attempt.run.policies),
        )
        chosen = settings
        if model is not None or temperature is not None or on_text is not None:
            streams = True if on_text is not None else None
            chosen = settings.override(model=model, temperature=temperature, streaming=streams)
        number = attempt.next_verb("prompt_model")

        async def ask() -> Any:
            tell = None if on_text is None else Callback(on_text, "on_text")
            async with nested_run(attempt, number, "prompt_model", RunOptions(), asked) as run:
                bind_model(run, adapter, chosen)
                outcome = await run_in(
                    adapter,
                    run,
                    chosen,
                    Conversation(run.session, run.run_context.run_id),
                    asked,
                    asked.render(),
                    prompt,
                    output=Output(wanted),
                    on_text=tell,
                    attachments=attached,
                )
                if tell is not None:
                    await tell.finish()
            return outcome.output

        return Operation(ask, "prompt_model", attempt.home)

    return verb
