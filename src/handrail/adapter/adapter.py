"""`Adapter`: runs a prompt on a model until it is done."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from handrail.adapter.bound import Bound, prompt_model_of
from handrail.adapter.conversation import Conversation, root_conversation
from handrail.adapter.disclosure import opener
from handrail.adapter.durable import (
    Resumed,
    answer_of,
    begin_run,
    carry_out,
    check_resumed,
    go_on,
    prompt_of,
    session_after,
)
from handrail.adapter.holding import held, taken
from handrail.adapter.loop import run_until_done
from handrail.adapter.masking import Masking
from handrail.adapter.options import (
    Settings,
    check_added,
    check_files,
    check_prompt,
    check_sampling,
    checked_model,
    checked_workers,
    forwarding,
    one_message,
)
from handrail.adapter.output import Output
from handrail.adapter.pacing import Retry, Throttle
from handrail.adapter.response import Outcome, PromptResponse, respond
from handrail.adapter.run import Run
from handrail.adapter.stream import RunStream
from handrail.context.verbs import PromptModel
from handrail.dispatch.frame import Frame
from handrail.dispatch.opening import open_frame
from handrail.dispatch.options import HostArguments, ResumeArguments, RunArguments, RunOptions, check_kinds
from handrail.dispatch.parking import Parking
from handrail.errors import DefinitionError, RunError
from handrail.guard.memory import keep_decisions
from handrail.journal.runlog import RunLog
from handrail.messages import Model, UserMessage
from handrail.models import model_named
from handrail.operation import Operation
from handrail.prompt import Prompt, RenderedPrompt
from handrail.protocols import EventBus, Filesystem, WorkerSource
from handrail.records import OVER
from handrail.session import Dispatcher, Session
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt

OutputT = TypeVar("OutputT")

NO_MESSAGE = "Do what the instructions say."
"""What is said to a model where the prompt itself holds all there is to say."""


class Adapter:
    """Runs prompts on a model. One adapter serves any number of runs at once.

    `model` is a model or its name, `provider:name`. Keys come from the environment, never from here.
    """

    def __init__(
        self,
        model: Model | str,
        *,
        retry: Retry | None = None,
        throttle: Throttle | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        opens_in_place: bool = True,
        workers: WorkerSource | None = None,
        **arguments: Unpack[HostArguments],
    ) -> None:
        self.model = model_named(model) if isinstance(model, str) else checked_model(model)
        check_sampling(temperature, max_tokens)
        self._options = RunOptions(workers=checked_workers(workers)).updated(
            "Adapter", HostArguments, arguments
        )
        self._retry = retry or Retry()
        self._throttle = throttle
        self._temperature = temperature
        self._max_tokens = max_tokens
        self.opens_in_place = opens_in_place

    @property
    def filesystem(self) -> Filesystem | None:
        """The files of its runs, where they are given no others."""
        return self._options.filesystem

    def with_workers(
        self, workers: WorkerSource, model: Model | None = None, levels: int | None = None
    ) -> Adapter:
        """The same adapter for runs that have these workers, which may nest this many levels.

        `model` replaces the adapter's where one is given.
        """
        made = copy.copy(self)
        made._options = self._options.replace(workers=workers).tightened(levels=levels)
        made.model = model or self.model
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

        `params` fills the prompt's templates; a plain string is the user's message. Evaluated again on
        the same session, the conversation goes on. Arguments replace what the adapter has.
        A failing tool never ends a run; what does is raised as `PromptEvaluationError`.
        """
        options = self._given("evaluate", prompt, params, message, arguments)
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
        """The same run, as a stream of its events: `async for`, or `for` in a script.

        `.response` is the operation that ends in the response. A stream that is left early, or whose
        response is cancelled, cancels the run.
        """
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
        """Go on with a recorded run where it was: parked, or its process ended.

        What is recorded is not done again: answers of the model, calls that are over, effects that
        were settled, answers of people. A run that is over gives its response again. `prompt` may be left
        out where the run was begun with `app="module:name"`. `session` is an empty one under the old
        id, for slices that have rules of their own. Tools that were added to the run are given again.
        """
        options = self._options.updated("resume", ResumeArguments, arguments)
        return Operation(lambda: self._resume(run_id, prompt, options), f"resume({run_id!r})")

    def resume_stream(
        self, run_id: str, prompt: Prompt[OutputT] | None = None, /, **arguments: Unpack[ResumeArguments]
    ) -> RunStream[OutputT]:
        """The same as a stream of events, from where the record ends.

        Nobody who listens to a resumed run hears what is recorded: messages, answers of the model, calls
        and nested runs that are over. The session has them. A call that was under way is entered again
        and says so again, under the same ids: `ToolStarted`, `QuestionAsked`, `ApprovalRequested`, and
        `PromptRendered` when a run gets past its record.
        """
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
        check_kinds(session=(options.session, Session, "a Session"))
        check_sampling(options.temperature, options.max_tokens)
        if isinstance(params, str):
            params, message = None, one_message(params, message)
        return options.replace(params=params, message=message)

    async def _evaluate(
        self, prompt: Prompt[OutputT], options: RunOptions, streaming: bool = False
    ) -> PromptResponse[OutputT]:
        bus, new_id, journal = options.bus, options.new_id, options.journal
        own = bus if isinstance(bus, Dispatcher) else None
        run_id = options.run_id or new_id()
        session = options.session or Session(new_id=new_id, dispatcher=own)
        options = options.replace(session=session, run_id=run_id)
        if journal is None:
            return await self._go(prompt, options, streaming, None)
        with held(journal, run_id):
            return await self._go(prompt, options, streaming, RunLog(journal, run_id, options.clock))

    async def _resume(
        self, run_id: str, prompt: Prompt[Any] | None, options: RunOptions, heard: EventBus | None = None
    ) -> PromptResponse[Any]:
        journal, session, clock = options.journal, options.session, options.clock
        if journal is None:
            raise RunError(
                run_id, "this adapter has no journal", "Give it the one that has the run: journal=."
            )
        row = await journal.run(run_id)
        prompt = prompt or prompt_of(run_id, row.record.app)
        if row.status in OVER:
            return answer_of(row, prompt, await session_after(journal, row, session))
        check_resumed(row, prompt, options.filesystem, options.tools)
        async with taken(journal, run_id) as row:
            if row.status in OVER:  # since it was looked at
                return answer_of(row, prompt, await session_after(journal, row, session))
            recover: Any = getattr(options.filesystem, "recover", None)
            if recover is not None:
                await recover(journal)
            resumed = await go_on(journal, row, session, clock)
            await keep_decisions(resumed.session, journal)
            return await self._go(
                prompt, resumed.options(options), heard is not None, resumed.log, resumed, heard
            )

    async def _go(
        self,
        prompt: Prompt[Any],
        options: RunOptions,
        streaming: bool,
        log: RunLog | None,
        resumed: Resumed | None = None,
        heard: EventBus | None = None,
    ) -> PromptResponse[Any]:
        """One run, new or resumed, from its frame to its response."""
        settings = self._settings().override(
            temperature=options.temperature, max_tokens=options.max_tokens, streaming=streaming
        )
        frame = self._frame(prompt, options, settings, log)
        check_files(prompt, frame)
        check_added(prompt, options.tools)
        if frame.parking is not None:
            frame.parking.begin()
        session, workers = frame.session, options.workers
        conversation = root_conversation(session)
        forward = forwarding(session, options.bus, heard)
        run_id = frame.run_context.run_id
        try:
            with conversation, nullcontext() if workers is None else workers.enter(frame):
                rendered = prompt.render(
                    options.params, session=session, opened=options.opened, deadline=frame.deadline
                )
                if resumed is None:
                    conversation.close_calls(run_id)
                else:
                    resumed.catch_up()
                history = options.history
                if history and (resumed is None or not len(conversation.messages)):
                    frame.show([*rendered.tools, *options.tools], ())  # these say what in it is secret
                    secretive = frame.secretive or rendered.secretive
                    masked = Masking(frame, conversation).message if secretive else None
                    conversation.begin_with(history, run_id, masked)  # else the session was saved with it
                    if masked is not None:
                        options = options.replace(history=tuple(masked(each) for each in history))
                journal = None if log is None else options.journal
                if journal is not None and resumed is None:
                    await begin_run(journal, frame, prompt, rendered, options, self.model.name)
                work = self.run_in(
                    frame,
                    settings,
                    conversation,
                    prompt,
                    rendered,
                    options.message,
                    system=None if resumed is None else resumed.begin.system,
                    tools=options.tools,
                )
                outcome = await (work if journal is None else carry_out(journal, frame, conversation, work))
        finally:
            forward()
            await frame.resources.close()
        return respond(outcome, frame)

    def _frame(
        self, prompt: Prompt[Any], options: RunOptions, settings: Settings, log: RunLog | None
    ) -> Frame:
        environment = options.environment
        frame = open_frame(
            options.replace(resources=(*options.resources, *prompt.resources)),
            prompt=prompt,
            log=log,
            adapter=lambda call: Bound(self, settings, call),
            prompt_model=(None if environment is None else environment.prompt_model)
            or (lambda call: prompt_model_of(self, settings, call)),
        )
        if environment is not None and environment.parks:
            if log is None:
                raise DefinitionError(
                    f"{type(environment).__name__} parks runs, and that needs a journal. "
                    "Give the adapter one: journal=SqliteJournal('runs.db')."
                )
            frame.parking = Parking(frame, environment)
        return frame

    def _settings(self) -> Settings:
        return Settings(
            self.model,
            retry=self._retry,
            throttle=self._throttle,
            temperature=self._temperature,
            max_tokens=self._max_tokens,
        )

    def bound_to(self, attempt: Attempt) -> Bound:
        """This adapter as one call has it, whoever opened the call's run."""
        return Bound(self, self._settings(), attempt)

    def inside(self, attempt: Attempt) -> Bound:
        """This adapter for a run inside a call of any run. It streams where that run does."""
        around = None if attempt.frame.adapter is None else attempt.adapter
        streams = isinstance(around, Bound) and around.streams
        return Bound(self, self._settings().override(streaming=streams), attempt)

    def prompt_model_for(self, attempt: Attempt) -> PromptModel:
        """The verb `prompt_model` of one call, on this adapter's model."""
        return prompt_model_of(self, self._settings(), attempt)

    async def run_in(
        self,
        frame: Frame,
        settings: Settings,
        conversation: Conversation,
        prompt: Prompt[Any],
        rendered: RenderedPrompt[Any],
        message: str | None,
        *,
        output: Output | None = None,
        on_text: Callable[[str], None] | None = None,
        system: str | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> Outcome:
        """One run, root or nested, from its rendered prompt to its end."""
        if rendered.output_schema is not None:
            output = Output(rendered.output_schema)
        run: Run
        closed = rendered.closed
        extra = [opener(lambda: run.rendered, self.opens_in_place)] if closed else []
        run = Run(
            settings,
            frame,
            conversation,
            rendered,
            prompt_name=prompt.name,
            output=output,
            added=[tool for tool in tools if frame.offers(tool)],
            extra_tools=extra,
            feedback=prompt.feedback,
            completion=prompt.completion,
            on_text=on_text,
        )
        if system is not None:
            run.system = system  # as it was sent before, whatever it would be rendered to now
        for path in conversation.opened:
            if path not in run.rendered.opened and any(each.path == path for each in closed):
                run.open([path])
        frame.task = asyncio.current_task()
        run.begin()
        run.say(UserMessage(NO_MESSAGE if message is None else message))
        ended = "cancelled"
        try:
            outcome = await run_until_done(run)
            ended = outcome.stop_reason
            return outcome
        except Exception as error:
            ended = f"failed: {error}"
            raise
        finally:
            frame.task = None
            frame.cancellation.close()
            if not frame.parked:
                run.end(ended)
