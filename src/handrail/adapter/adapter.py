"""`Adapter`: runs a prompt on a model until it is done."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
from handrail.adapter.given import (
    check_added,
    check_asking,
    check_files,
    checked_model,
    checked_workers,
    forwarding,
    given_to_evaluate,
    given_to_resume,
    one_message,
)
from handrail.adapter.holding import held, taken
from handrail.adapter.loop import run_until_done
from handrail.adapter.masking import Masking
from handrail.adapter.output import Output
from handrail.adapter.pacing import Retry, Throttle
from handrail.adapter.response import Outcome, PromptResponse, respond
from handrail.adapter.run import Run, Settings
from handrail.adapter.stream import RunStream
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.context.verbs import PromptModel
from handrail.deadline import Deadline
from handrail.dispatch.frame import DEPTH_LIMIT, Frame
from handrail.dispatch.opening import open_frame
from handrail.dispatch.parking import Parking
from handrail.errors import DefinitionError, RunError
from handrail.guard.approval import ApprovalMode
from handrail.guard.memory import keep_decisions
from handrail.ids import NewId, random_id
from handrail.journal.runlog import RunLog
from handrail.limits import Budget, BudgetTracker, Lease
from handrail.messages import Message, Model, UserMessage
from handrail.models import model_named
from handrail.operation import Operation
from handrail.prompt import Prompt, RenderedPrompt
from handrail.protocols import ApprovalBroker, Environment, EventBus, Filesystem, WorkerSource
from handrail.records import OVER, Journal
from handrail.resources.registry import Binding
from handrail.session import Dispatcher, Session
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.dispatch.call import LiveCall

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
        environment: Environment | None = None,
        approvals: ApprovalMode | ApprovalBroker | None = None,
        approval_seconds: float | None = None,
        filesystem: Filesystem | None = None,
        resources: Iterable[Binding[Any]] = (),
        journal: Journal | None = None,
        retry: Retry | None = None,
        throttle: Throttle | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        opens_in_place: bool = True,
        depth_limit: int = DEPTH_LIMIT,
        lease: Lease | None = None,
        workers: WorkerSource | None = None,
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
    ) -> None:
        self.model = model_named(model) if isinstance(model, str) else checked_model(model)
        self._environment = environment
        self._approvals: ApprovalMode | ApprovalBroker | None = approvals
        self._approval_seconds = approval_seconds
        self._filesystem = filesystem
        self._resources = tuple(resources)
        if isinstance(journal, str | Path):
            raise DefinitionError(
                f"journal is a {type(journal).__name__}. Open it: journal=SqliteJournal({str(journal)!r})."
            )
        self._journal = journal
        self._retry = retry or Retry()
        self._throttle = throttle
        check_asking(temperature, max_tokens)
        self._temperature = temperature
        self._max_tokens = max_tokens
        self.opens_in_place = opens_in_place
        self._depth_limit = depth_limit
        self._lease = lease
        self._workers = checked_workers(workers)
        self._clock = clock
        self._new_id = new_id

    @property
    def filesystem(self) -> Filesystem | None:
        """The files of its runs, where they are given no others."""
        return self._filesystem

    def with_workers(self, workers: WorkerSource, model: Model | None = None) -> Adapter:
        """The same adapter for runs that have these workers, on another model where one is given."""
        made = copy.copy(self)
        made._workers = workers
        made.model = model or self.model
        return made

    def with_journal(self, journal: Journal) -> Adapter:
        """The same adapter, recording its runs there."""
        made = copy.copy(self)
        made._journal = journal
        return made

    def evaluate(
        self,
        prompt: Prompt[OutputT],
        params: object = None,
        /,
        *,
        message: str | None = None,
        history: Iterable[Message] = (),
        session: Session | None = None,
        bus: EventBus | None = None,
        deadline: Deadline | None = None,
        budget: Budget | BudgetTracker | None = None,
        filesystem: Filesystem | None = None,
        resources: Iterable[Binding[Any]] = (),
        environment: Environment | None = None,
        approvals: ApprovalMode | ApprovalBroker | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        opened: Sequence[str] = (),
        tools: Sequence[Tool[Any, Any]] = (),
        run_id: str | None = None,
        app: str = "",
    ) -> Operation[PromptResponse[OutputT]]:
        """Run the prompt until the model is done.

        `params` fills the prompt's templates; a plain string is the user's message. Evaluated again on
        the same session, the conversation goes on. What is given here goes before what the adapter has.
        `tools` are added to the prompt's for this run alone, under its policies.
        A failing tool never ends a run; what does is raised as `PromptEvaluationError`.
        """
        given = given_to_evaluate(locals())
        return Operation(lambda: self._evaluate(prompt, given), f"evaluate({prompt.name!r})")

    def stream(
        self,
        prompt: Prompt[OutputT],
        params: object = None,
        /,
        *,
        message: str | None = None,
        history: Iterable[Message] = (),
        session: Session | None = None,
        bus: EventBus | None = None,
        deadline: Deadline | None = None,
        budget: Budget | BudgetTracker | None = None,
        filesystem: Filesystem | None = None,
        resources: Iterable[Binding[Any]] = (),
        environment: Environment | None = None,
        approvals: ApprovalMode | ApprovalBroker | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        opened: Sequence[str] = (),
        tools: Sequence[Tool[Any, Any]] = (),
        run_id: str | None = None,
        app: str = "",
    ) -> RunStream[OutputT]:
        """The same run, as a stream of its events: `async for`, or `for` in a script.

        `.response` is the operation that ends in the response. A stream that is left early, or whose
        response is cancelled, cancels the run.
        """
        given = given_to_evaluate(locals())
        given["session"] = session = session or Session(new_id=self._new_id)
        given["run_id"] = run_id or self._new_id()
        return RunStream(
            lambda: self._evaluate(prompt, given, streaming=True),
            session.dispatcher,
            given["run_id"],
            prompt.name,
        )

    def resume(
        self,
        run_id: str,
        prompt: Prompt[OutputT] | None = None,
        /,
        *,
        session: Session | None = None,
        bus: EventBus | None = None,
        filesystem: Filesystem | None = None,
        resources: Iterable[Binding[Any]] = (),
        environment: Environment | None = None,
        approvals: ApprovalMode | ApprovalBroker | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> Operation[PromptResponse[OutputT]]:
        """Go on with a recorded run where it was: parked, or its process ended.

        What is recorded is not done again: answers of the model, calls that are over, effects that
        were settled, answers of people. A run that is over gives what came of it. `prompt` may be left
        out where the run was begun with `app="module:name"`. `session` is an empty one under the old
        id, for slices that have rules of their own. Tools that were added to the run are given again.
        """
        given = given_to_resume(locals())
        return Operation(lambda: self._resume(run_id, prompt, given), f"resume({run_id!r})")

    def resume_stream(
        self,
        run_id: str,
        prompt: Prompt[OutputT] | None = None,
        /,
        *,
        session: Session | None = None,
        bus: EventBus | None = None,
        filesystem: Filesystem | None = None,
        resources: Iterable[Binding[Any]] = (),
        environment: Environment | None = None,
        approvals: ApprovalMode | ApprovalBroker | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> RunStream[OutputT]:
        """The same as a stream of events, from where the record ends.

        Whoever listens to a resumed run, in whatever way, hears nothing of what is recorded: messages,
        answers of the model, calls and nested runs that are over. They are kept in the session. What was
        under way is entered again and says so again, under the same ids: `ToolStarted`, `QuestionAsked`,
        `ApprovalRequested`, and `PromptRendered` when a run comes past its record.
        """
        given = given_to_resume(locals())
        heard = given["heard"] = Dispatcher()
        return RunStream(
            lambda: self._resume(run_id, prompt, given, streaming=True), heard, run_id, f"resume {run_id}"
        )

    async def _evaluate(
        self, prompt: Prompt[OutputT], given: dict[str, Any], streaming: bool = False
    ) -> PromptResponse[OutputT]:
        if isinstance(given["params"], str):
            given["message"] = one_message(given["params"], given["message"])
            given["params"] = None
        bus = given["bus"]
        own = bus if isinstance(bus, Dispatcher) else None
        given["session"] = given["session"] or Session(new_id=self._new_id, dispatcher=own)
        given["run_id"] = given["run_id"] or self._new_id()
        journal = self._journal
        if journal is None:
            return await self._go(prompt, given, streaming, None)
        with held(journal, given["run_id"]):
            log = RunLog(journal, given["run_id"], self._clock)
            return await self._go(prompt, given, streaming, log)

    async def _resume(
        self, run_id: str, prompt: Prompt[Any] | None, given: dict[str, Any], streaming: bool = False
    ) -> PromptResponse[Any]:
        journal = self._journal
        if journal is None:
            raise RunError(
                run_id, "this adapter has no journal", "Give it the one that has the run: journal=."
            )
        row = await journal.run(run_id)
        prompt = prompt or prompt_of(run_id, row.record.app)
        if row.status in OVER:
            return answer_of(row, prompt, await session_after(journal, row, given["session"]))
        check_resumed(row, prompt, given["filesystem"] or self._filesystem, given["tools"])
        async with taken(journal, run_id) as row:
            if row.status in OVER:  # since it was looked at
                return answer_of(row, prompt, await session_after(journal, row, given["session"]))
            recover: Any = getattr(given["filesystem"] or self._filesystem, "recover", None)
            if recover is not None:
                await recover(journal)
            resumed = await go_on(journal, row, given["session"], self._clock)
            await keep_decisions(resumed.session, journal)
            begin = resumed.begin
            given |= {
                "session": resumed.session,
                "params": resumed.params(),
                "message": begin.message,
                "history": begin.history,
                "opened": begin.opened,
                "temperature": begin.temperature,
                "max_tokens": begin.max_tokens,
                "deadline": resumed.deadline(self._clock),
                "budget": resumed.budget(),
                "run_id": run_id,
                "app": row.record.app,
            }
            return await self._go(prompt, given, streaming, resumed.log, resumed)

    async def _go(
        self,
        prompt: Prompt[Any],
        given: dict[str, Any],
        streaming: bool,
        log: RunLog | None,
        resumed: Resumed | None = None,
    ) -> PromptResponse[Any]:
        """One run, new or resumed, from its frame to its response."""
        session: Session = given["session"]
        settings = self._settings(given["temperature"], given["max_tokens"], streaming)
        frame = self._frame(prompt, given, settings, log)
        check_files(prompt, frame)
        check_added(prompt, given["tools"])
        if frame.parking is not None:
            frame.parking.begin()
        conversation = root_conversation(session)
        forward = forwarding(session, given["bus"], given.get("heard"))
        run_id = frame.run_context.run_id
        try:
            with conversation, nullcontext() if self._workers is None else self._workers.enter(frame):
                rendered = prompt.render(
                    given["params"], session=session, opened=given["opened"], deadline=frame.deadline
                )
                if resumed is None:
                    conversation.close_calls(run_id)
                else:
                    resumed.catch_up()
                history = given["history"] = list(given["history"])
                if history and (resumed is None or not len(conversation.messages)):
                    frame.show([*rendered.tools, *given["tools"]], ())  # these say what in it is secret
                    secretive = frame.secretive or rendered.secretive
                    masked = Masking(frame, conversation).message if secretive else None
                    conversation.begin_with(history, run_id, masked)  # else the session was saved with it
                    given["history"] = history if masked is None else [masked(each) for each in history]
                journal = None if log is None else self._journal
                if journal is not None and resumed is None:
                    await begin_run(journal, frame, prompt, rendered, given, self.model.name, given["app"])
                work = self.run_in(
                    frame,
                    settings,
                    conversation,
                    prompt,
                    rendered,
                    given["message"],
                    system=None if resumed is None else resumed.begin.system,
                    tools=given["tools"],
                )
                outcome = await (work if journal is None else carry_out(journal, frame, conversation, work))
        finally:
            forward()
            await frame.resources.close()
        return respond(outcome, frame)

    def _frame(
        self, prompt: Prompt[Any], given: dict[str, Any], settings: Settings, log: RunLog | None
    ) -> Frame:
        environment = given["environment"] or self._environment
        frame = open_frame(
            (),
            session=given["session"],
            policies=(),
            filesystem=given["filesystem"] or self._filesystem,
            resources=[*self._resources, *prompt.resources, *given["resources"]],
            environment=environment,
            approvals=given["approvals"] or self._approvals,
            approval_seconds=self._approval_seconds,
            deadline=given["deadline"],
            budget=given["budget"],
            journal=self._journal,
            lease=self._lease,
            depth_limit=self._depth_limit,
            clock=self._clock,
            new_id=self._new_id,
            prompt=prompt,
            adapter=lambda call: Bound(self, settings, call),
            prompt_model=getattr(environment, "prompt_model", None)
            or (lambda call: prompt_model_of(self, settings, call)),
            run_id=given["run_id"],
            log=log,
        )
        if getattr(environment, "parks", False):
            if log is None:
                raise DefinitionError(
                    f"{type(environment).__name__} parks runs, and that needs a journal. "
                    "Give the adapter one: journal=SqliteJournal('runs.db')."
                )
            frame.parking = Parking(frame, environment)
        return frame

    def _settings(
        self, temperature: float | None = None, max_tokens: int | None = None, streaming: bool = False
    ) -> Settings:
        return Settings(
            self.model,
            retry=self._retry,
            throttle=self._throttle,
            temperature=self._temperature if temperature is None else temperature,
            max_tokens=max_tokens or self._max_tokens,
            streaming=streaming,
        )

    def bound_to(self, call: LiveCall) -> Bound:
        """This adapter as one call has it, whoever opened the call's run."""
        return Bound(self, self._settings(), call)

    def prompt_model_for(self, call: LiveCall) -> PromptModel:
        """The verb `prompt_model` of one call, on this adapter's model."""
        return prompt_model_of(self, self._settings(), call)

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
