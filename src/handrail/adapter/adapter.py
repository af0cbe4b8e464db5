"""`Adapter`: runs a prompt on a model until it is done."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from handrail.adapter.bound import Bound, one_message, prompt_model_of
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
from handrail.adapter.output import Output
from handrail.adapter.pacing import Retry, Throttle
from handrail.adapter.response import Outcome, PromptResponse, respond
from handrail.adapter.run import Run, Settings
from handrail.adapter.stream import RunStream
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.context.verbs import PromptModel
from handrail.deadline import Deadline
from handrail.dispatch.frame import DEPTH_LIMIT, Frame
from handrail.dispatch.opening import check_kinds, open_frame
from handrail.dispatch.parking import Parking
from handrail.errors import DefinitionError, RunError
from handrail.events import PromptExecuted, PromptRendered
from handrail.guard.approval import ApprovalMode
from handrail.ids import NewId, random_id
from handrail.journal.runlog import RunLog
from handrail.limits import Budget, BudgetTracker, Lease
from handrail.messages import Message, Model, UserMessage
from handrail.models import model_named
from handrail.operation import Operation
from handrail.prompt import Prompt, RenderedPrompt
from handrail.prompt.section import walk
from handrail.protocols import ApprovalBroker, Environment, EventBus, Filesystem, WorkerSource
from handrail.records import OVER, Journal
from handrail.resources.registry import Binding
from handrail.session import Dispatcher, Session

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
        self.model = model_named(model) if isinstance(model, str) else _checked_model(model)
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
        self._temperature = temperature
        self._max_tokens = max_tokens
        self.opens_in_place = opens_in_place
        self._depth_limit = depth_limit
        self._lease = lease
        self._workers = _checked_workers(workers)
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
        run_id: str | None = None,
        app: str = "",
    ) -> Operation[PromptResponse[OutputT]]:
        """Run the prompt until the model is done.

        `params` fills the prompt's templates; a plain string is the user's message. Evaluated again on
        the same session, the conversation goes on. What is given here goes before what the adapter has.
        A failing tool never ends a run; what does is raised as `PromptEvaluationError`.
        """
        given = _given(locals())
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
        run_id: str | None = None,
        app: str = "",
    ) -> RunStream[OutputT]:
        """The same run, as a stream of its events: `async for`, or `for` in a script.

        `.response` is the operation that ends in the response. A stream that is left early, or whose
        response is cancelled, cancels the run.
        """
        given = _given(locals())
        given["session"] = session = session or Session(new_id=self._new_id)
        given["run_id"] = run_id or self._new_id()
        return RunStream(
            lambda: self._evaluate(prompt, given, streaming=True), session, given["run_id"], prompt.name
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
    ) -> Operation[PromptResponse[OutputT]]:
        """Go on with a recorded run where it was: parked, or its process ended.

        What is recorded is not done again: answers of the model, calls that are over, effects that
        were settled, answers of people. A run that is over gives what came of it. `prompt` may be left
        out where the run was begun with `app="module:name"`. `session` is an empty one under the old
        id, for slices that have rules of their own.
        """
        given = {
            "session": session,
            "bus": bus,
            "filesystem": filesystem,
            "resources": resources,
            "environment": environment,
            "approvals": approvals,
        }
        return Operation(lambda: self._resume(run_id, prompt, given), f"resume({run_id!r})")

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
        self, run_id: str, prompt: Prompt[Any] | None, given: dict[str, Any]
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
        check_resumed(row, prompt, given["filesystem"] or self._filesystem)
        async with taken(journal, run_id) as row:
            if row.status in OVER:  # since it was looked at
                return answer_of(row, prompt, await session_after(journal, row, given["session"]))
            recover: Any = getattr(given["filesystem"] or self._filesystem, "recover", None)
            if recover is not None:
                await recover(journal)
            resumed = await go_on(journal, row, given["session"], self._clock)
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
            return await self._go(prompt, given, False, resumed.log, resumed)

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
        _check_files(prompt, frame)
        conversation = root_conversation(session)
        forward = _forwarding(session, given["bus"])
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
                if resumed is None or not len(conversation.messages):
                    conversation.begin_with(given["history"], run_id)  # else the session was saved with it
                if log is None or self._journal is None:
                    outcome = await self.run_in(
                        frame, settings, conversation, prompt, rendered, given["message"]
                    )
                else:
                    if resumed is None:
                        await begin_run(
                            self._journal, frame, prompt, rendered, given, self.model.name, given["app"]
                        )
                    system = None if resumed is None else resumed.begin.system
                    work = self.run_in(
                        frame, settings, conversation, prompt, rendered, given["message"], system=system
                    )
                    outcome = await carry_out(self._journal, frame, conversation, work)
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
            frame.parking = Parking(frame)
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
    ) -> Outcome:
        """One run, root or nested, from its rendered prompt to its end."""
        run_id = frame.run_context.run_id
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
        if frame.told.get(PromptRendered, True):
            names = tuple(tool.name for tool in rendered.tools)
            frame.publish(PromptRendered(prompt.name, rendered.text, names, frame.run_context))
        conversation.add(UserMessage(NO_MESSAGE if message is None else message), run_id)
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
            spending = frame.spending
            frame.session.record(
                PromptExecuted(prompt.name, ended, spending.usage, spending.cost, frame.run_context)
            )


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
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
    return arguments


def _check_files(prompt: Prompt[Any], frame: Frame) -> None:
    """Sections whose tools work on files want a run that has some."""
    wanting = [type(section).__name__ for _, section in walk(prompt.sections) if section.needs_files]
    if wanting and frame.filesystem is None and not frame.resources.binds(Filesystem):
        raise DefinitionError(
            f"prompt {prompt.name!r} has {wanting[0]}, and the run has no files. Give it some: "
            "evaluate(..., filesystem=DirectoryFilesystem('folder'))."
        )


def _checked_model(model: Any) -> Model:
    if isinstance(model, type) or not all(hasattr(model, member) for member in ("name", "traits", "stream")):
        raise DefinitionError(
            f"{model!r} is not a model. Give one, such as OpenAIModel('gpt-5') or ScriptedModel([...]), "
            "or a name like 'openai:gpt-5'."
        )
    return model


def _checked_workers(workers: Any) -> WorkerSource | None:
    if workers is None or callable(getattr(workers, "enter", None)):
        return workers
    raise DefinitionError(f"workers is a {type(workers).__name__}. Give WorkerRegistry(folder).")


def _forwarding(session: Session, bus: EventBus | None) -> Callable[[], None]:
    """While this lasts, whoever listens on `bus` hears of the run as well."""
    if bus is None or bus is session.dispatcher:
        return lambda: None
    return session.dispatcher.subscribe(object, bus.publish)
