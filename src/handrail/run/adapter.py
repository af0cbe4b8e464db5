"""`Adapter`: runs a prompt on a model until the model is done, and `Retry`, `Throttle` and `Settings`: how it asks the model."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from weakref import WeakKeyDictionary

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.operation import Operation
from handrail.concurrency.threads import forget_closed
from handrail.errors import DefinitionError, ModelError
from handrail.ids import Chance, random_fraction
from handrail.messages import DEFAULT_SETTINGS, Model, ModelSettings, is_choice, is_model
from handrail.models.prices import Tariff, tariff_of, window_of
from handrail.prompt import OPENER, Prompt
from handrail.prompt.section import walk
from handrail.protocols import EventBus, Filesystem, WorkerSource
from handrail.run.current_call import call_around, check_given, refuse_inside_call
from handrail.run.large_results import READER
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
from handrail.run.response import ANSWER_TOOL, PromptResponse, RunStream
from handrail.schema.problems import describe_kind
from handrail.session import Dispatcher, Session
from handrail.tools import Tool
from handrail.tools.toolbox import check_tool

if TYPE_CHECKING:
    from handrail.context import PromptModel
    from handrail.journal.local import LocalMessages
    from handrail.resources.bindings import Binding
    from handrail.run.call import Attempt
    from handrail.run.entry import CallAdapter
    from handrail.run.run import Run


@dataclass(frozen=True, slots=True)
class Retry:
    """Determines when a request is retried after a transient failure.

    Waits double each time, up to `longest_wait`, with jitter. If the provider says how long to wait, that wait is used, made
    longer by up to a tenth; if it exceeds `longest_wait`, the request is not retried. Nothing is retried past the run's deadline.
    """

    attempts: int = 5
    first_wait: float = 0.5
    longest_wait: float = 60.0
    chance: Chance = random_fraction

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise DefinitionError(f"attempts is {self.attempts!r}. Pass an integer of at least 1.")
        waits = (self.first_wait, self.longest_wait)
        if not all(type(each) in (int, float) for each in waits) or not 0 <= waits[0] <= waits[1]:
            raise DefinitionError(
                f"first_wait is {self.first_wait!r}, and longest_wait is {self.longest_wait!r}. "
                "Pass numbers of at least 0, with first_wait not greater than longest_wait."
            )

    def wait_after(self, attempt: int, error: ModelError) -> float | None:
        """Return the number of seconds until the next attempt; None to give up."""
        if not error.transient or attempt >= self.attempts:
            return None
        wanted = error.retry_after
        if wanted is not None and 0 <= wanted < math.inf:
            return wanted * (1 + self.chance() / 10) if wanted <= self.longest_wait else None
        highest = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt - 1, 64))
        return highest * (1 + self.chance()) / 2


class Throttle:
    """Limits how many requests run at once in each event loop, and how many start per minute altogether.

    If a provider asks for a pause, the throttle also holds back new requests for that long. All runs of an adapter share
    its throttle, and several adapters can share one.
    """

    def __init__(
        self, *, at_once: int | None = None, per_minute: float | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if at_once is not None and (type(at_once) is not int or at_once < 1):
            raise DefinitionError(
                f"at_once={at_once!r} is not a valid limit. Pass a whole number of at least 1."
            )
        if per_minute is not None and (
            type(per_minute) not in (int, float) or not 0 < per_minute < float("inf")
        ):
            raise DefinitionError(
                f"per_minute={per_minute!r} is not a valid rate. Pass a positive number, or leave it out."
            )
        self._at_once = at_once
        self._spacing = 0.0 if per_minute is None else 60.0 / per_minute
        self._clock = clock
        self._next = 0.0
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def hold(self, seconds: float) -> None:
        """Hold back new requests for this many seconds."""
        self._next = max(self._next, self._clock.monotonic() + seconds)

    async def enter(self) -> None:
        """Wait until a request may be sent. Once this has returned, call `leave` when the request has ended."""
        if self._at_once is not None:
            loop = asyncio.get_running_loop()
            slot = self._slots.get(loop)
            if slot is None:
                forget_closed(self._slots)
                slot = self._slots[loop] = asyncio.Semaphore(self._at_once)
            await slot.acquire()
        if not self._next and not self._spacing:
            return
        try:
            now = self._clock.monotonic()
            begin = max(now, self._next)
            self._next = begin + self._spacing
            if begin > now:
                await asyncio.sleep(begin - now)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Mark a request as ended, so that another may be sent."""
        if self._at_once is not None:
            self._slots[asyncio.get_running_loop()].release()


@dataclass(slots=True, eq=False)
class Settings:
    """Determines how a run asks its model. Nested runs inherit these settings, except for `tool_choice`, and may override them."""

    model: Model
    _: KW_ONLY
    retry: Retry
    throttle: Throttle | None
    temperature: float | None = None
    max_tokens: int | None = None
    streaming: bool = False
    model_settings: ModelSettings = DEFAULT_SETTINGS
    opens_in_place: bool = True
    tariff: Tariff = field(init=False)
    is_choice: bool = field(init=False)
    """Whether the model stands for several others, of which one answers."""
    window: int | None = field(init=False)
    """The number of tokens that the model can take; None if that is not known."""

    def __post_init__(self) -> None:
        self.is_choice = is_choice(self.model)
        self.tariff = tariff_of(self.model.name, self.model.traits)
        self.window = window_of(self.model.name, self.model.traits)

    def override(
        self,
        *,
        model: Model | str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        streaming: bool | None = None,
        model_settings: ModelSettings | None = None,
    ) -> Settings:
        """Return these settings with some of them replaced.

        Model settings belong to a model: if `model` is passed, only the `model_settings` passed with it apply.
        """
        check_sampling(temperature, max_tokens)
        if model is temperature is max_tokens is streaming is model_settings is None:
            return self
        around = self.model_settings if model is None else DEFAULT_SETTINGS
        return replace(
            self,
            model=model_of(model) if isinstance(model, str) else model or self.model,
            temperature=self.temperature if temperature is None else temperature,
            max_tokens=max_tokens or self.max_tokens,
            streaming=self.streaming if streaming is None else streaming,
            model_settings=around if model_settings is None else model_settings.over(around),
        )

    def inherited(self) -> Settings:
        """Return the settings that nested runs inherit: all but `tool_choice`, which is about this run's own tools."""
        own = self.model_settings
        if own.tool_choice is None:
            return self
        return replace(self, model_settings=msgspec.structs.replace(own, tool_choice=None))


def settings_of(prompt: Prompt[Any], options: RunOptions) -> ModelSettings | None:
    """Return a run's own model settings, completed by those of its prompt; None if neither has any."""
    own = options.model_settings
    if prompt.model_settings is DEFAULT_SETTINGS:
        return own
    return prompt.model_settings if own is None else own.over(prompt.model_settings)


def check_prompt(prompt: object) -> None:
    """Raise `DefinitionError` if the argument is not a prompt."""
    if not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"evaluate takes a Prompt, not {describe_kind(prompt)}. "
            'Write `evaluate(Prompt("guide", "Answer briefly."), "the message")`.'
        )


def one_message(params: str, message: str | None) -> str:
    """Return the message that was passed as params. Raises `DefinitionError` if `message` was passed as well."""
    if message is not None:
        raise DefinitionError(
            "two messages were passed: a string as params is the user's message, and so is `message`. "
            "Pass only one of them."
        )
    return params


def check_sampling(temperature: Any, max_tokens: Any) -> None:
    """Raise `DefinitionError` for a temperature or a number of tokens that no provider accepts."""
    if temperature is not None and (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 <= temperature < float("inf")
    ):
        raise DefinitionError(
            f"temperature is {temperature!r}. Pass a number of at least 0, or None for the model's default."
        )
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise DefinitionError(
            f"max_tokens is {max_tokens!r}. Pass a whole number of at least 1, or None for no bound."
        )


def check_added(prompt: Prompt[Any], tools: Sequence[Tool[Any, Any]]) -> None:
    """Raise `DefinitionError` unless the tools added to a run are valid and have unique names."""
    if not tools:
        return
    taken = {tool.name for tool in prompt.tools}
    taken.update(tool.name for _, section in walk(prompt.sections) for tool in section.tools)
    taken.update((OPENER, ANSWER_TOOL, READER))
    for tool in tools:
        check_tool(tool)
        if tool.name in taken:
            raise DefinitionError(
                f"a tool {tool.name!r} was added to a run of prompt {prompt.name!r}, but the name is taken by another tool of "
                "the run. Rename it."
            )
        taken.add(tool.name)


def check_files(prompt: Prompt[Any], run: Run) -> None:
    """Raise `DefinitionError` if a section needs files and the run has none."""
    wanting = prompt.needs_files
    if wanting and run.world.filesystem is None and not run.world.resources.binds(Filesystem):
        raise DefinitionError(
            f"prompt {prompt.name!r} has {wanting}, but the run has no files. Pass a filesystem: "
            "evaluate(..., filesystem=DirectoryFilesystem('folder'))."
        )


def model_of(model: Any) -> Model:
    """Return a model, or the one that a name stands for. The providers' modules are imported only for a name."""
    if isinstance(model, str):
        from handrail.models.names import model_named

        return model_named(model)
    return checked_model(model)


def checked_model(model: Any) -> Model:
    if not is_model(model):
        raise DefinitionError(
            f"{model!r} is not a model. Pass one, such as OpenAIModel('gpt-5') or ScriptedModel([...]), "
            "or a name like 'openai:gpt-5'."
        )
    return model


def checked_workers(workers: Any) -> WorkerSource | None:
    if workers is None or callable(getattr(workers, "enter", None)):
        return workers
    raise DefinitionError(f"workers is {describe_kind(workers)}. Pass WorkerRegistry(folder).")


def _local_messages(session: Session, options: RunOptions) -> LocalMessages:
    from handrail.journal.local import LocalMessages

    return LocalMessages(session.principal, options.clock)


def forward_events(session: Session, *buses: EventBus | None) -> Callable[[], None]:
    """Publish the session's events on these buses as well. Returns a function that stops this."""
    own = session.dispatcher
    stops = [
        own.subscribe(object, bus.relay if isinstance(bus, Dispatcher) else bus.publish)
        for bus in buses
        if bus is not None and bus is not own
    ]

    def stop() -> None:
        for each in stops:
            each()

    return stop


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
        self._model = model_of(model)
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
        self._opens_in_place = opens_in_place
        self._settings: Settings | None = None
        """Made by the first run, since the price of a model may have to be looked up."""

    @property
    def model(self) -> Model:
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model, self._settings = model, None

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
        heard = _local_messages(session, options) if options.journal is None else None
        options = options.replace(session=session, run_id=run_id, messages=heard)
        return RunStream(
            lambda: self._evaluate(prompt, options, streaming=True),
            session.dispatcher,
            run_id,
            prompt.name,
            heard or options.journal,
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
            lambda: self._resume(run_id, prompt, options, heard),
            heard,
            run_id,
            f"resume {run_id}",
            options.journal,
        )

    def _given(
        self, verb: str, prompt: object, params: object, message: str | None, arguments: RunArguments
    ) -> RunOptions:
        check_prompt(prompt)
        is_text = isinstance(params, str)
        values, text = (None, params) if is_text else (params, message)
        options = self._options.updated(verb, RunArguments, arguments, params=values, message=text)
        if message is not None:
            check_value("message", message)
        check_sampling(options.temperature, options.max_tokens)
        if is_text:
            one_message(params, message)
        return options

    def _evaluate(
        self, prompt: Prompt[OutputT], options: RunOptions, streaming: bool = False
    ) -> Coroutine[Any, Any, PromptResponse[OutputT]]:
        from handrail.run.entry import evaluate

        return evaluate(self, prompt, options, streaming)

    def _resume(
        self, run_id: str, prompt: Prompt[Any] | None, options: RunOptions, heard: EventBus | None = None
    ) -> Coroutine[Any, Any, PromptResponse[Any]]:
        from handrail.run.entry import resume

        return resume(self, run_id, prompt, options, heard)

    def settings(self) -> Settings:
        """Return the settings that this adapter's runs use by default to ask their model. All runs share one object."""
        if self._settings is None:
            self._settings = self._make_settings()
        return self._settings

    def _make_settings(self) -> Settings:
        return Settings(
            self._model,
            retry=self._retry,
            throttle=self._throttle,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
            model_settings=self._model_settings,
            opens_in_place=self._opens_in_place,
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
