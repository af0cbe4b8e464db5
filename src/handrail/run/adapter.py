"""`Adapter`: runs a prompt on a model until the model is done."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from handrail.concurrency.operation import Operation
from handrail.messages import DEFAULT_SETTINGS, Model, ModelSettings
from handrail.models.names import model_named
from handrail.prompt import Prompt
from handrail.protocols import EventBus, Filesystem, WorkerSource
from handrail.run.current_call import call_around, check_given, refuse_inside_call
from handrail.run.options import (
    DEPTH_LIMIT,
    HostArguments,
    ResumeArguments,
    RunArguments,
    RunFiles,
    RunOptions,
    check_kinds,
    check_value,
)
from handrail.run.response import PromptResponse, RunStream
from handrail.run.settings import (
    Retry,
    Settings,
    Throttle,
    check_prompt,
    check_sampling,
    checked_model,
    checked_workers,
    one_message,
)
from handrail.session import Dispatcher, Session

if TYPE_CHECKING:
    from handrail.context import PromptModel
    from handrail.resources.bindings import Binding
    from handrail.run.attempt import Attempt
    from handrail.run.entry import CallAdapter

OutputT = TypeVar("OutputT")


class Adapter:
    """Runs prompts on a model. One adapter serves any number of concurrent runs.

    `model` is a model or its name, `provider:name`. API keys are read from environment variables and never passed as arguments.
    """

    def __init__(
        self,
        model: Model | str,
        *,
        retry: Retry | None = None,
        throttle: Throttle | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        model_settings: ModelSettings | None = None,
        opens_in_place: bool = True,
        workers: WorkerSource | None = None,
        **arguments: Unpack[HostArguments],
    ) -> None:
        self.model = model_named(model) if isinstance(model, str) else checked_model(model)
        check_sampling(temperature, max_tokens)
        check_kinds(
            retry=(retry, Retry, "a Retry, for example Retry(attempts=3)"),
            throttle=(throttle, Throttle, "a Throttle, for example Throttle(at_once=4)"),
        )
        self._options = RunOptions(workers=checked_workers(workers)).updated(
            "Adapter", HostArguments, arguments
        )
        self._retry = retry or Retry()
        self._throttle = throttle
        self._temperature = temperature
        self._max_tokens = max_tokens
        if model_settings is not None:
            check_value("model_settings", model_settings)
        self._model_settings = model_settings or DEFAULT_SETTINGS
        self.opens_in_place = opens_in_place

    @property
    def options(self) -> RunOptions:
        """The options that this adapter's runs have by default."""
        return self._options

    @property
    def filesystem(self) -> Filesystem | RunFiles | None:
        """The files that this adapter's runs use by default; None if there are none."""
        return self._options.filesystem

    @property
    def workers(self) -> WorkerSource | None:
        """The workers that this adapter's runs may call; None if there are none."""
        return self._options.workers

    @property
    def resources(self) -> tuple[Binding[Any], ...]:
        """The resources that this adapter's runs bind, in addition to those of their prompts."""
        return self._options.resources

    @property
    def levels(self) -> int | None:
        """How deep calls may nest in this adapter's runs inside a call; None if only the call's own limit applies."""
        limit = self._options.depth_limit
        return None if limit == DEPTH_LIMIT else limit

    def with_workers(
        self, workers: WorkerSource, model: Model | None = None, levels: int | None = None
    ) -> Adapter:
        """Return a copy of this adapter whose runs may call these workers.

        `model` replaces the adapter's own, if given. `levels` limits how deep calls may nest, unless the adapter's own
        limit is tighter.
        """
        made = copy.copy(self)
        made._options = self._options.replace(workers=workers).tightened(levels=levels)
        return made if model is None else made.with_model(model)

    def with_model(self, model: Model) -> Adapter:
        """Return a copy of this adapter with this model. If it is not the adapter's own model, the `model_settings` are dropped."""
        made = copy.copy(self)
        made.model = checked_model(model)
        if model is not self.model:
            made._model_settings = DEFAULT_SETTINGS
        return made

    def evaluate(
        self,
        prompt: Prompt[OutputT],
        params: object = None,
        /,
        *,
        message: str | None = None,
        **arguments: Unpack[RunArguments],
    ) -> Operation[PromptResponse[OutputT]]:
        """Run the prompt until the model is done.

        `params` fills the prompt's templates; a plain string is the user's message. Evaluating again on the
        same session continues its conversation. `arguments` take precedence over the adapter's own options; resources and
        extras are added to the adapter's. If a tool's handler calls this, the run is part of the handler's call, as with
        `context.adapter.evaluate`.

        If a tool fails, the model is told, and the run continues. Raises `PromptEvaluationError` if the run can't
        continue, for example after a failed request or at a limit, `RunParked` if the run is parked, and `ConversationBusy`
        if another run uses the session.
        """
        options = self._given("evaluate", prompt, params, message, arguments)
        around = call_around()
        if around is not None:
            check_given(around, "evaluate", self._options, arguments)
            return self.inside(around).run(prompt, options, levels=self.levels)
        return Operation(lambda: self._evaluate(prompt, options), f"evaluate({prompt.name!r})")

    def stream(
        self,
        prompt: Prompt[OutputT],
        params: object = None,
        /,
        *,
        message: str | None = None,
        **arguments: Unpack[RunArguments],
    ) -> RunStream[OutputT]:
        """Return a run of the prompt as a stream of events, for `async for`, or `for` in a script.

        `.response` is an operation that returns the response. The run starts when the stream is iterated or the response
        is awaited. Leaving the stream early, or cancelling its response, cancels the run. Raises `DefinitionError` if it is
        called in a tool's handler.
        """
        refuse_inside_call("stream")
        options = self._given("stream", prompt, params, message, arguments)
        session = options.session or Session(new_id=options.new_id)
        run_id = options.run_id or options.new_id()
        options = options.replace(session=session, run_id=run_id)
        return RunStream(
            lambda: self._evaluate(prompt, options, streaming=True), session.dispatcher, run_id, prompt.name
        )

    def resume(
        self, run_id: str, prompt: Prompt[OutputT] | None = None, /, **arguments: Unpack[ResumeArguments]
    ) -> Operation[PromptResponse[OutputT]]:
        """Continue a recorded run that was parked or whose process ended.

        Recorded steps are not repeated: the model's answers, finished calls, settled effects and people's answers.
        Resuming a finished run returns its response, or raises its error, again. `prompt` may be left out if the run
        began with `app="module:name"`. Tools that were added to the run must be passed again. If the session was created
        with its own slice rules, pass `session`: an empty session with the recorded id and the same rules.

        Raises `DefinitionError` if it is called in a tool's handler. The operation raises `RunUnknown` if the journal has no
        such run, `RunBusy` if the run is being executed, and `RunError` if it can't be resumed with what was passed.
        """
        refuse_inside_call("resume")
        options = self._options.updated("resume", ResumeArguments, arguments)
        return Operation(lambda: self._resume(run_id, prompt, options), f"resume({run_id!r})")

    def resume_stream(
        self, run_id: str, prompt: Prompt[OutputT] | None = None, /, **arguments: Unpack[ResumeArguments]
    ) -> RunStream[OutputT]:
        """Continue a recorded run as a stream of events that starts where the record ends.

        Recorded messages, model answers, finished calls and nested runs are not published again, because the session
        already has them. An interrupted call that is entered again publishes `ToolResumed`, and then only what is new: its
        start, questions, approvals and handoffs are not published again. A run publishes `PromptRendered` again once it gets
        past its record. Raises `DefinitionError` if it is called in a tool's handler.
        """
        refuse_inside_call("resume_stream")
        options = self._options.updated("resume_stream", ResumeArguments, arguments)
        heard = Dispatcher()
        return RunStream(
            lambda: self._resume(run_id, prompt, options, heard), heard, run_id, f"resume {run_id}"
        )

    def _given(
        self, verb: str, prompt: object, params: object, message: str | None, arguments: RunArguments
    ) -> RunOptions:
        check_prompt(prompt)
        options = self._options.updated(verb, RunArguments, arguments)
        check_value("message", message)
        check_sampling(options.temperature, options.max_tokens)
        if isinstance(params, str):
            params, message = None, one_message(params, message)
        return options.replace(params=params, message=message)

    async def _evaluate(
        self, prompt: Prompt[OutputT], options: RunOptions, streaming: bool = False
    ) -> PromptResponse[OutputT]:
        from handrail.run.entry import evaluate

        return await evaluate(self, prompt, options, streaming)

    async def _resume(
        self, run_id: str, prompt: Prompt[Any] | None, options: RunOptions, heard: EventBus | None = None
    ) -> PromptResponse[Any]:
        from handrail.run.entry import resume

        return await resume(self, run_id, prompt, options, heard)

    def settings(self) -> Settings:
        """Return the settings that this adapter's runs use by default to ask their model."""
        return Settings(
            self.model,
            retry=self._retry,
            throttle=self._throttle,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
            model_settings=self._model_settings,
            opens_in_place=self.opens_in_place,
        )

    def bound_to(self, attempt: Attempt) -> CallAdapter:
        """Return this adapter bound to a call, even if a different adapter opened the call's run."""
        from handrail.run.entry import CallAdapter

        return CallAdapter(self, self.settings(), attempt)

    def inside(self, attempt: Attempt) -> CallAdapter:
        """Return this adapter bound to a call, for a run inside it. The nested run is streamed if the call's run is."""
        from handrail.run.entry import CallAdapter

        around = None if attempt.run.model.adapter is None else attempt.adapter
        streams = isinstance(around, CallAdapter) and around.streams
        return CallAdapter(self, self.settings().override(streaming=streams), attempt)

    def prompt_model_for(self, attempt: Attempt) -> PromptModel:
        """Return a call's `prompt_model` verb, which uses this adapter's model by default."""
        from handrail.run.entry import prompt_model_of

        return prompt_model_of(self, self.settings(), attempt)
