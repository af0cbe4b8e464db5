"""The record of a run: how a run begins, resumes and ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container, Coroutine, Iterable, Sequence
from decimal import Decimal
from typing import Any

import msgspec
import pydantic_core

from handrail.adapter.apps import code_of
from handrail.adapter.conversation import ROOT, Conversation, sendable
from handrail.adapter.requests import begun_runs, check_begun
from handrail.adapter.response import Outcome, PromptResponse
from handrail.adapter.run_lease import STOPPED, deadline_after, leased, note_deadline, stopped
from handrail.adapter.undone_calls import UndoneCalls, forget_undone, undone_in
from handrail.cancellation import open_scope
from handrail.clock import Clock
from handrail.content import Attachment
from handrail.dispatch.frame import Frame
from handrail.dispatch.options import RunOptions
from handrail.errors import (
    DefinitionError,
    PromptEvaluationError,
    RunBusy,
    RunError,
    RunParked,
    ToolValidationError,
    WorkspaceTakenError,
)
from handrail.events import MessageAdded, SectionOpened
from handrail.guard.approval_memory import bring_in, decisions_in, keep_decisions
from handrail.journals import Journal
from handrail.limits import Budget
from handrail.messages import Message, Model, ModelSettings, Usage
from handrail.models.names import reference_to
from handrail.prompt import Prompt, RenderedPrompt
from handrail.records import OVER, CommitUnit, RunRecord, RunRow, RunStatus
from handrail.replay.attachments import attached_to, load, store
from handrail.replay.log import RunLog
from handrail.resources.paths import folder_of
from handrail.resources.startup_files import allowed_in
from handrail.schema import Schema, to_json
from handrail.session import Session
from handrail.session.serialization import decode_item, encode_item, load_imported, save
from handrail.tools import Tool
from handrail.tools.result import clean_text


class RunBegin(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run needs to begin again in the same way."""

    message: str | None
    params: bytes | None
    history: list[Message]
    system: str
    """The rendered prompt. It is sent again unchanged even if the prompt has changed since."""
    tools: list[str]
    opened: list[str]
    temperature: float | None
    max_tokens: int | None
    deadline: float | None
    pauses: bool  # whether the deadline pauses while people answer
    budget: dict[str, int | Decimal] | None
    base: bytes | None
    """The session's state when the run began; None if it can be restored from an earlier run in the journal."""
    folder: str = ""  # the folder of the run's files, or `workspace:NAME`; "" for other files
    startup_files: list[str] = []
    """The patterns of the startup files that the run's calls may change without a separate approval."""
    offered: dict[str, str] = {}  # the description and JSON Schema of each tool
    model_settings: ModelSettings | None = None
    added: list[str] = []  # the names of the tools that this run has in addition to the prompt's
    events: list[bytes] = []
    """In a copy of a run: the events that earlier runs committed in the session since `base`. Those runs are not copied."""
    said: list[Message] = []  # the messages of the runs whose events are in `events`
    shown: list[str] = []  # the sections that were opened in the runs whose events are in `events`
    trace_id: str = ""  # the trace id that the run was given, if any
    models: dict[str, str] = {}  # the models that replace those in the files of workers, by worker
    denied: list[bytes] = []  # in a copy: the original session's remembered denials, and its revocations
    attachments: list[Attachment] = []  # the files that the run's worker was given, as references
    attached: list[Attachment] = []  # the attachments of the run's message, as references
    sources: dict[str, str] = {}  # the files that name the servers of the run's tools, and a digest of each


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, and what it adds to its session, as the journal records it."""

    text: str = ""
    output: bytes = b"null"
    stop_reason: str = ""
    usage: Usage = Usage()
    cost: Decimal | None = None
    error: str = ""
    phase: str = ""
    messages: list[Message] = []  # the messages that the run added to its session's conversation
    opened: list[str] = []  # the sections that the run's model opened; later runs show them in full


def decode_begin(record: RunRecord) -> RunBegin:
    return msgspec.msgpack.decode(record.begin, type=RunBegin)


def decode_outcome(row: RunRow) -> RunOutcome:
    return msgspec.msgpack.decode(row.outcome, type=RunOutcome) if row.outcome else RunOutcome()


# --- begin ---------------------------------------------------------------------------------------------


async def begin_run(
    journal: Journal,
    frame: Frame,
    prompt: Prompt[Any],
    rendered: RenderedPrompt[Any],
    options: RunOptions,
    model: Model,
) -> None:
    """Record a new run before it does anything. Raises `DefinitionError` if importing its `app` raises `ImportError`."""
    app = options.app
    try:
        code = code_of(app)
    except ImportError as error:
        raise DefinitionError(
            f"app is {app!r}, which can't be imported: {error}. Give it as module:name, importable wherever the "
            "run is resumed, or leave it out."
        ) from error
    session = frame.session
    attachments: Sequence[Attachment] = getattr(options.workers, "attachments", ())
    await _heed_undone(journal, session, frame.log)
    await keep_decisions(session, journal)
    deadline, budget = frame.deadline, frame.budget
    tools: list[Any] = [*rendered.tools, *options.tools]
    begin = RunBegin(
        message=None if options.message is None else clean_text(options.message),
        params=None if options.params is None else encode_item(options.params, session.id),
        history=[sendable(each) for each in options.history],
        system=rendered.text,
        tools=[tool.name for tool in rendered.tools],
        opened=list(options.opened),
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        model_settings=options.model_settings,
        deadline=None if deadline is None else deadline.at.timestamp(),
        pauses=deadline is not None and deadline.pauses_for_people,
        budget=None if budget is None else dict(budget.left()),
        base=await _base(journal, session),
        folder=folder_of(frame.world.filesystem),
        startup_files=allowed_in(frame.world.filesystem),
        offered={tool.name: offer_of(tool) for tool in tools},
        added=[tool.name for tool in options.tools],
        trace_id=options.trace_id or "",
        models={name: reference_to(each) for name, each in getattr(options.workers, "models", {}).items()},
        attachments=list(attachments),
        attached=list(options.attachments),
        sources=dict(each.source for each in tools if getattr(each, "source", None)),
    )
    await journal.runs.begin(
        RunRecord(
            id=frame.run_context.run_id,
            session_id=session.id,
            principal=session.principal,
            prompt=prompt.name,
            model=reference_to(model),
            began_at=frame.began_at.timestamp(),
            begin=msgspec.msgpack.encode(begin),
            app=app,
            code=code,
        )
    )
    await store(journal, frame.run_context.run_id, attachments)
    said = (fact.message for fact in session[MessageAdded].all())
    await store(journal, frame.run_context.run_id, [*options.attachments, *attached_to(said)])


async def _base(journal: Journal, session: Session) -> bytes | None:
    """Return the session's state; None if it can be restored from an earlier run in this journal."""
    first = await journal.runs.list(session_id=session.id, limit=1)
    if first and not first[0].record.has_begun:
        first = await begun_runs(journal, session.id)
    return None if first else save(session)


async def _heed_undone(journal: Journal, session: Session, log: RunLog) -> None:
    """Drop undone calls from the session and remember to tell the model, unless it has been told about all of them."""
    undone = await undone_in(journal, session.id)
    if undone.untold:
        log.untold = undone.untold
        await heed_undone(journal, session, undone)


async def heed_undone(journal: Journal, session: Session, undone: UndoneCalls) -> None:
    """Drop undone calls from a session in memory."""
    runs = await begun_runs(journal, session.id)
    before = decode_begin(runs[0].record).events if runs else ()
    units = await journal.calls.load_session(session.id)
    forget_undone(session, base_of(runs), before, units, undone.calls)


def offer_of(tool: Tool[Any, Any]) -> str:
    """Return a tool's description and JSON Schema as JSON text."""
    return msgspec.json.encode([tool.description, tool.json_schema], order="sorted").decode()


def check_resumed(row: RunRow, prompt: Prompt[Any], files: object, tools: Sequence[Tool[Any, Any]]) -> None:
    """Raise `RunError` if the run has not begun, if the prompt is a different one, or if files or tools are missing."""
    check_begun(row)
    record, begin = row.record, decode_begin(row.record)
    if prompt.name != record.prompt:
        raise RunError(
            record.id,
            f"it began with the prompt {record.prompt!r}, and this is {prompt.name!r}",
            "Pass the prompt that it began with.",
        )
    if begin.folder and files is None:
        raise RunError(
            record.id,
            f"it works on the files in {begin.folder!r}, and no files were passed",
            "Pass filesystem=DirectoryFilesystem(...) or Workspace(...), or --files on the command line.",
        )
    given = {tool.name for tool in tools}
    missing = [name for name in begin.added if name not in given]
    if missing:
        raise RunError(
            record.id,
            f"it began with added tools, and these were not passed: {', '.join(missing)}",
            "Pass them again: resume(..., tools=[...]).",
        )


# --- run -----------------------------------------------------------------------------------------------


async def carry_out(
    journal: Journal, frame: Frame, conversation: Conversation, work: Coroutine[Any, Any, Outcome]
) -> Outcome:
    """Run `work` under the run's lease, and record how it ends. Errors of `work` are raised.

    Raises `RunParked` if the run was parked, `RunBusy` if another process has taken it over, and
    `PromptEvaluationError` if it was cancelled through the journal.
    """
    run_id = frame.run_context.run_id
    began, shown = len(conversation.messages), len(conversation.opened)
    scope = open_scope(frame.cancellation)
    status: RunStatus = "cancelled"
    due_at: float | None = None
    outcome = RunOutcome(stop_reason="cancelled")
    try:
        async with leased(journal, frame):
            ended = await _unless_parked(journal, frame, work)
        status = "done"
        outcome = RunOutcome(text=ended.text, output=to_json(ended.output), stop_reason=ended.stop_reason)
        return ended
    except RunParked as parked:
        status = "parked"
        due_at = min(
            (each.expires_at.timestamp() for each in parked.questions if each.expires_at), default=None
        )
        raise
    except asyncio.CancelledError:
        if frame.log.closed:
            scope.absorb()
            raise RunBusy(run_id, (await journal.runs.get(run_id)).owner) from None
        if frame.cancellation.reason == STOPPED:
            scope.absorb()
            raise stopped(run_id) from None
        raise
    except (RunBusy, WorkspaceTakenError, GeneratorExit) as error:
        if isinstance(error, GeneratorExit):  # nothing can be awaited any more, as if the process had ended
            frame.log.close()
        elif isinstance(error, WorkspaceTakenError):
            status = "running"  # any process may resume the run
        raise
    except Exception as error:
        status = "failed"
        words = str(error).encode(errors="replace").decode()  # a lone surrogate can't be recorded
        phase = error.phase if isinstance(error, PromptEvaluationError) else ""
        outcome = RunOutcome(stop_reason="failed", error=words, phase=phase)
        raise
    finally:
        outcome = msgspec.structs.replace(
            outcome,
            usage=frame.costs.models.usage,
            cost=frame.costs.models.cost,
            messages=conversation.shown_since(began),
            opened=conversation.opened[shown:],
        )
        if not frame.log.closed or status in ("parked", "running"):
            with contextlib.suppress(RunBusy):
                if status == "parked" and frame.deadline is not None and frame.deadline.pauses_for_people:
                    await note_deadline(journal, run_id, frame.deadline, frame.clock, paused=True)
                encoded = b"" if status in ("parked", "running") else msgspec.msgpack.encode(outcome)
                left = journal.runs.leave(run_id, status, encoded, due_at=due_at)
                await asyncio.shield(asyncio.ensure_future(left))


async def _unless_parked(journal: Journal, frame: Frame, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Return the outcome of `work`. If the run was parked, raises `RunParked` instead, even if `work` failed, except with `RunBusy`."""
    scope = open_scope(frame.cancellation)
    try:
        ended = await work
        if not frame.parked:
            return ended
    except RunBusy:
        raise
    except (Exception, asyncio.CancelledError):
        if not frame.parked:
            raise
    scope.absorb()
    run_id = frame.run_context.run_id
    raise RunParked(run_id, await journal.questions.open(run_id))


# --- resume --------------------------------------------------------------------------------------------


class ResumedRun(msgspec.Struct, frozen=True):
    """Everything that is needed to resume a run."""

    row: RunRow
    begin: RunBegin
    session: Session
    log: RunLog
    own: tuple[CommitUnit, ...]
    """The run's own commits, except those undone since. `catch_up` applies them to the session."""

    def catch_up(self) -> None:
        """Apply the run's own commits to the session. A run that continues calls this once its prompt has been rendered."""
        for unit in self.own:
            _redo(self.session, unit)

    def options(self, options: RunOptions) -> RunOptions:
        """Return the options that were passed now, with the recorded session, params, message, limits and settings of the run."""
        begin, row = self.begin, self.row
        limits: Any = begin.budget
        return options.replace(
            session=self.session,
            params=self.params(),
            message=begin.message,
            attachments=tuple(begin.attached),
            history=tuple(begin.history),
            opened=tuple(begin.opened),
            temperature=begin.temperature,
            max_tokens=begin.max_tokens,
            model_settings=begin.model_settings,
            # If the deadline pauses for people, the time that they took to answer does not count.
            deadline=deadline_after(begin.deadline, begin.pauses, row, self.log, options.clock),
            budget=None if limits is None else Budget(**limits),
            run_id=row.record.id,
            trace_id=begin.trace_id or None,
            app=row.record.app,
            workers=self._workers(options.workers),
        )

    def _workers(self, workers: Any) -> Any:
        """Return the run's workers, with its attachments. Raises `RunError` if it has attachments, but no worker was passed."""
        attachments = tuple(self.begin.attachments)
        if not attachments:
            return workers
        if not hasattr(workers, "with_attachments"):
            raise RunError(
                self.row.record.id,
                "it is the run of a worker that was given attachments, and it was resumed without its worker",
                "Resume it with WorkerRegistry(...).resume(name, run_id).",
            )
        return workers.with_attachments(attachments)

    def params(self) -> Any:
        given = self.begin.params
        return None if given is None else decode_item(given, self.session.id)


async def load_resumed(journal: Journal, row: RunRow, session: Session | None, clock: Clock) -> ResumedRun:
    """Load a recorded run, with the session as it was when the run began.

    Raises `RunError` if an earlier run of the session is not over, if `session` is not empty or has a different id, or if an attachment is missing.
    """
    record = row.record
    units = await journal.calls.load_session(record.session_id)
    runs = await begun_runs(journal, record.session_id)
    undone = await undone_in(journal, record.session_id)
    session = _fresh(record, runs, session)
    for earlier in runs:
        if earlier.record.id == record.id:
            break
        if earlier.status not in OVER:
            raise RunError(
                record.id,
                f"the run {earlier.record.id!r} of the same session is not over",
                "Resume or cancel that run first.",
            )
        _bring_in(session, earlier, units, undone.calls)
    own = tuple(unit for unit in units if unit.run_id == record.id)
    entries, asked = await journal.calls.entries(record.id), await journal.questions.history(record.id)
    made = RunLog(journal, record.id, clock, entries, own, asked=asked, resumed=True, attempt=row.legs or 1)
    made.untold = undone.untold
    standing = tuple(unit for unit in own if unit.call_id not in undone.calls)
    begin = decode_begin(record)
    await load(journal, record.id, [*begin.attachments, *begin.attached])
    return ResumedRun(row, begin, session, made, standing)


async def session_after(journal: Journal, row: RunRow, session: Session | None) -> Session:
    """Return the session after a finished run, with the messages of that run and of earlier ones, and their commits that were not undone."""
    record = row.record
    units = await journal.calls.load_session(record.session_id)
    runs = await begun_runs(journal, record.session_id)
    undone = await undone_in(journal, record.session_id)
    session = _fresh(record, runs, session)
    for each in runs:
        _bring_in(session, each, units, undone.calls)
        if each.record.id == record.id:
            break
    await keep_decisions(session, journal)
    return session


async def session_before(journal: Journal, row: RunRow, session: Session | None) -> Session:
    """Return the session as it was before its first run."""
    session = _fresh(row.record, await begun_runs(journal, row.record.session_id), session)
    await keep_decisions(session, journal)
    return session


def _bring_in(session: Session, row: RunRow, units: Iterable[CommitUnit], undone: Container[str]) -> None:
    """Apply a finished run's messages, opened sections and commits to a session. Commits that were undone are left out."""
    for unit in units:
        if unit.run_id == row.record.id and unit.call_id not in undone:
            _redo(session, unit)
    outcome = decode_outcome(row)
    _say_again(session, row.record.id, outcome.messages, outcome.opened)


def _fresh(record: RunRecord, runs: Iterable[RunRow], session: Session | None) -> Session:
    """Return the session as it was before its first run, restored into `session` if given. Raises `RunError` if that is not empty or has a different id."""
    base = base_of(runs)
    if session is None and base is not None:
        session = load_imported(base)
    elif session is None:
        session = Session(id=record.session_id, principal=record.principal)
    elif session.id != record.session_id or session.state or session.logs():
        raise RunError(
            record.id,
            f"the session {session.id!r} that was passed is not empty or has another id",
            f"Pass a new one: Session(id={record.session_id!r}, ...), or none.",
        )
    elif base is not None:
        for kind, contents in (before := load_imported(base, session.rules)).state.items():
            session.load_slice(kind, contents.all())
        for fact in before[MessageAdded].all():
            session.keep(fact)  # the history that the session began with
        bring_in(session, decisions_in(base))
    first = next(iter(runs), None)
    if first is not None and first.record.begin:
        begin = decode_begin(first.record)
        for event in begin.events:
            session.redo(decode_item(event, session.id))
        _say_again(session, first.record.id, begin.said, begin.shown)
        bring_in(session, [decode_item(fact, session.id) for fact in begin.denied])
    return session


def _say_again(session: Session, run_id: str, messages: Iterable[Message], opened: Iterable[str]) -> None:
    """Add an earlier run's messages and opened sections to a session's conversation."""
    for message in messages:
        session.keep(MessageAdded(ROOT, message, run_id))
    for path in opened:
        session.keep(SectionOpened(ROOT, path, run_id))


def base_of(runs: Iterable[RunRow]) -> bytes | None:
    """Return the saved session as it was before its first run in this journal; None if it was not saved."""
    bases = (decode_begin(each.record).base for each in runs if each.record.begin)
    return next((base for base in bases if base is not None), None)


def _redo(session: Session, unit: CommitUnit) -> None:
    for event in unit.events:
        session.redo(decode_item(bytes(event), session.id))


def answer_of(row: RunRow, prompt: Prompt[Any], session: Session) -> PromptResponse[Any]:
    """Return the response of a finished run. Raises `PromptEvaluationError` if the run failed or was cancelled."""
    outcome = decode_outcome(row)
    if row.status != "done":
        problem = outcome.error or f"it was {row.status}"
        raise PromptEvaluationError(problem, phase=outcome.phase or row.status, run_id=row.record.id)
    output: Any = pydantic_core.from_json(outcome.output)
    if prompt.output is not None:
        with contextlib.suppress(
            ToolValidationError
        ):  # the type has changed since: keep the output as it was recorded
            schema: Schema[Any] = Schema(prompt.output)
            output = schema.parse(outcome.output)
    return PromptResponse(
        outcome.text, output, outcome.usage, outcome.cost, row.record.id, outcome.stop_reason, session
    )
