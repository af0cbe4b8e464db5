"""Recorded sessions: a session is rebuilt from the journal as it was before, during or after one of its runs.

Commits are restored in their order, and messages and logs run by run. Logs are in the order in which the calls that logged them ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from handrail.clock import Clock
from handrail.context import RunContext
from handrail.errors import DefinitionError, RunError
from handrail.events import (
    ApprovalRemembered,
    ApprovalRevoked,
    ConversationCompacted,
    Fact,
    MessageAdded,
    ModelResponded,
    PromptExecuted,
    SectionOpened,
    shortened_by,
)
from handrail.guard.remembered import bring_in, decisions_in, keep_decisions
from handrail.ids import span_of, trace_of
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, CommitUnit, Entry, RunRecord, RunRow, SessionTurn
from handrail.messages import Compaction, Message, StopPart, Usage
from handrail.prompt import Prompt, RenderedPrompt
from handrail.prompt.compact import Compact
from handrail.run.answer import RecordedCompaction
from handrail.run.conversation import ROOT, Conversation
from handrail.run.limits import Budget
from handrail.run.options import RunOptions, named, newest
from handrail.run.place import RUN, Place
from handrail.run.record.begin import (
    RunBegin,
    add_history,
    base_of,
    begun_runs,
    decode_begin,
    decode_outcome,
    follow,
)
from handrail.run.record.format import Begun, InnerCall, Tried, end_of
from handrail.run.record.lease import deadline_after
from handrail.run.record.log import RunLog, attached_to, load_attachments
from handrail.run.record.notices import UndoneCalls, undone_in
from handrail.run.run import Run
from handrail.session import Session
from handrail.session.serialization import decode_item, encode_item, load_imported
from handrail.tools import Tool


class _Answer(msgspec.Struct, frozen=True):
    """The facts about a recorded model answer."""

    model: str
    attempt: int
    stop: StopPart
    seconds: float
    usage: Usage | None = None
    cost: Decimal | None = None


_End = CommitUnit | InnerCall | _Answer


class RecordedLogs:
    """The logs of one run, in the order in which the calls that logged them ended.

    Within one call they have the order in which it logged them. The logs of calls that were cut off come last.
    """

    def __init__(
        self, run_id: str, session_id: str, traceparent: str, records: Iterable[CommitUnit | Entry]
    ) -> None:
        self._run_id = run_id
        self._session_id = session_id
        self._traceparent = traceparent
        self._ends: list[tuple[Place, _End]] = []
        self._tried: dict[Place, Tried] = {}
        self._begun: dict[Place, Begun] = {}
        """What calls had logged when their handlers began, by the place of the attempt."""
        for each in records:
            if isinstance(each, CommitUnit):
                self._ends.append((Place.parse(each.place), each))
            elif each.kind == "inner call":
                end = msgspec.msgpack.decode(each.body, type=InnerCall)
                self._ends.append((Place.parse(each.key), end))
            elif each.kind == "model answer":
                self._ends.append((Place.parse(each.key), msgspec.msgpack.decode(each.body, type=_Answer)))
            elif each.kind == "call tried":
                self._tried[Place.parse(each.key)] = msgspec.msgpack.decode(each.body, type=Tried)
            elif each.kind == "call begun":
                self._begun[Place.parse(each.key)] = msgspec.msgpack.decode(each.body, type=Begun)
        self._over = {place for place, end in self._ends if not isinstance(end, _Answer)}

    def restore(self, session: Session, tools: Mapping[str, Tool[Any, Any]] = {}, *, is_over: bool) -> None:
        """Add the run's logs to a session, without publishing anything.

        Unless the run is over, calls that were cut off may be entered again, and log again then, and answers of the model
        are left out where they are replayed. The values in the results of `tools` have their types; those of other tools are
        plain data.
        """
        for each in self._read(is_over, tools):
            session.relog(decode_item(each, session.id) if isinstance(each, bytes) else each)

    def copied(self) -> list[bytes]:
        """Return the logs of a run that is over, in the form in which a journal records them."""
        return [
            each if isinstance(each, bytes) else encode_item(each, self._session_id)
            for each in self._read(True, {})
        ]

    def _read(self, is_over: bool, tools: Mapping[str, Tool[Any, Any]]) -> Iterator[bytes | Fact]:
        for place, end in self._ends:
            if not (is_over or self._is_inside_ended(place)) and _is_repeated(end):
                continue
            context = self._context(place)
            if isinstance(end, _Answer):
                usage = end.usage or Usage(requests=1)
                yield ModelResponded(
                    end.model, end.stop.reason, usage, end.cost, end.seconds, end.attempt, context
                )
            else:
                yield from end.logged
                ended = end_of(end, context, tools)
                yield ended
                if (shortened := shortened_by(ended, ended.result)) is not None:
                    yield shortened
        calls = dict.fromkeys(
            [*self._tried, *(each.parent for each in self._begun if each.parent is not None)]
        )
        for call in calls:
            if call not in self._over:
                yield from self._cut_off(call, is_over or self._is_inside_ended(call))

    def _cut_off(self, call: Place, is_final: bool) -> Sequence[bytes]:
        """Return what a call without an end has logged. Unless this `is_final`, only what its earlier attempts have logged."""
        tried = self._tried.get(call)
        begun = self._begun.get(call.attempt(1 if tried is None else tried.number)) if is_final else None
        if begun is not None:
            return begun.logged
        return () if tried is None else tried.logged

    def _is_inside_ended(self, call: Place) -> bool:
        return any(each in self._over for each in call.parents)

    def _context(self, place: Place) -> RunContext:
        """Return the context of the run that contains a place. Which leg and which worker it was is not recorded."""
        run_id, started = place.run.id(self._run_id), self._traceparent
        trace_id = trace_of(self._run_id, started)
        return RunContext(
            run_id, self._run_id, self._session_id, 1, "", trace_id, span_of(run_id, 1), started
        )

    def run_ended(self, prompt: str, ended: str, usage: Usage, cost: Decimal | None) -> PromptExecuted:
        """Return the end of the run itself."""
        return PromptExecuted(prompt, ended, usage, cost, self._context(RUN))


def _is_repeated(end: _End) -> bool:
    """Return whether a resumed run logs this again: it replays a model's answer, and asks again for a lost secret."""
    return isinstance(end, _Answer) or (isinstance(end, InnerCall) and end.lost)


class ResumedRun(msgspec.Struct, frozen=True):
    """Everything that is needed to resume a run."""

    row: RunRow
    begin: RunBegin
    session: Session
    log: RunLog
    later: tuple[CommitUnit, ...]
    """The session's commits since the run began, its own and those of other runs, except those undone since."""
    logs: RecordedLogs
    others: tuple[Recorded, ...]
    """The runs of the session that began while this one was parked."""

    def catch_up(self, tools: Iterable[Tool[Any, Any]] = ()) -> None:
        """Apply the commits and the logs since the run began. A run that continues calls this once its prompt is rendered.

        `tools` are the run's tools, by which the results of their calls are read.
        """
        for unit in self.later:
            _redo(self.session, unit)
        self.logs.restore(self.session, {tool.name: tool for tool in tools}, is_over=False)
        for each in self.others:
            _relog(self.session, each)

    async def begin_again(
        self, run: Run, prompt: Prompt[Any], rendered: RenderedPrompt[Any], conversation: Conversation
    ) -> str:
        """Resume the run. Returns its system text, as it was sent before."""
        self.catch_up((*rendered.tools, *run.options.tools))
        if not len(conversation.messages):  # otherwise, it has the history already
            add_history(run, rendered, conversation)
        await load_attachments(
            self.log.journal, self.log.run_id, attached_to(conversation.messages), some=True
        )
        return self.begin.system

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
            result_limit=options.result_limit or begin.result_limit,
            compact=options.compact or (None if begin.compact is None else Compact.again(*begin.compact)),
            # If the deadline pauses for people, the time that they took to answer does not count.
            deadline=deadline_after(begin.deadline, begin.pauses, row, self.log, options.clock),
            budget=None if limits is None else Budget(**limits),
            spend=newest(named(options.spend, row.record.prompt), begin.spend),
            run_id=row.record.id,
            traceparent=begin.traceparent or None,
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


class Recorded(msgspec.Struct, frozen=True):
    """A run, and what is recorded of it."""

    row: RunRow
    records: list[CommitUnit | Entry]


class RecordedSession(msgspec.Struct, frozen=True):
    """Everything that is recorded of a session."""

    turn: SessionTurn | None
    runs: list[Recorded]
    commits: list[CommitUnit]
    """The commits that were not undone, in their order. A run may have been parked while another one worked."""
    undone: UndoneCalls

    @property
    def rows(self) -> list[RunRow]:
        return [each.row for each in self.runs]


async def _read(journal: Journal, record: RunRecord) -> RecordedSession:
    id, principal = record.session_id, record.principal
    turn = await journal.runs.turn(id, principal)  # first, so that what is recorded meanwhile counts as later
    history = await journal.calls.history(id)
    rows = await begun_runs(journal, id, principal)
    undone = await undone_in(journal, id, principal)
    records: dict[str, list[CommitUnit | Entry]] = {row.record.id: [] for row in rows}
    commits: list[CommitUnit] = []
    for run_id, each in history:
        if run_id in records:
            records[run_id].append(each)
            if isinstance(each, CommitUnit) and each.call_id not in undone.calls:
                commits.append(each)
    return RecordedSession(turn, [Recorded(row, records[row.record.id]) for row in rows], commits, undone)


async def load_resumed(journal: Journal, row: RunRow, session: Session | None, clock: Clock) -> ResumedRun:
    """Load a recorded run, with the session as it was when the run began.

    Raises `RunError` if an earlier run of the session is not over, if `session` is not empty or has a different id, or if an attachment is missing.
    """
    record = row.record
    recorded = await _read(journal, record)
    session = _fresh(record, recorded.rows, session)
    number = [each.row.record.id for each in recorded.runs].index(record.id)
    earlier, own = recorded.runs[:number], recorded.runs[number]
    for each in earlier:
        if each.row.status not in OVER:
            raise RunError(
                record.id,
                f"the run {each.row.record.id!r} of the same session is not over",
                "Resume or cancel that run first.",
            )
    ids = {each.row.record.id for each in earlier}
    before = list(itertools.takewhile(lambda unit: unit.run_id in ids, recorded.commits))
    _bring_in(session, earlier, before)
    units = tuple(each for each in own.records if isinstance(each, CommitUnit))
    entries = [each for each in own.records if isinstance(each, Entry)]
    asked = await journal.questions.history(record.id)
    was_parked = (row.before or row.status) == "parked"
    earlier = "" if row.legs < 2 else "parked" if was_parked else "lost" if row.deaths else "released"
    made = RunLog(
        *(journal, record.id, clock, entries, units),
        asked=asked,
        resumed=True,
        attempt=row.legs or 1,
        earlier=earlier,
    )
    made.untold = recorded.undone.untold
    begin = decode_begin(record)
    await load_attachments(journal, record.id, [*begin.attachments, *begin.attached])
    others = tuple(recorded.runs[number + 1 :])
    if not others:  # otherwise, it lacks what was said in later runs
        follow(session, journal, recorded.turn)
    later = tuple(recorded.commits[len(before) :])
    return ResumedRun(row, begin, session, made, later, logs_of(row, own.records), others)


async def load_session(
    journal: Journal, row: RunRow, session: Session | None, *, until: str | None = None
) -> Session:
    """Return a session with everything that its runs have committed and that was not undone, their logs, and the messages of finished runs.

    With `until`, later runs than this one are left out.
    """
    recorded = await _read(journal, row.record)
    session = _fresh(row.record, recorded.rows, session)
    ids = [each.row.record.id for each in recorded.runs]
    included = ids if until is None else ids[: ids.index(until) + 1]
    commits = [unit for unit in recorded.commits if unit.run_id in included]
    _bring_in(session, recorded.runs[: len(included)], commits)
    await keep_decisions(session, journal, is_restored=True)
    if len(included) == len(ids):
        follow(session, journal, recorded.turn)
    return session


async def continue_session(journal: Journal | None, session: Session) -> None:
    """Restore into a new session what the journal has of the session with its id.

    Raises `DefinitionError` without a journal, and `RunError` if a run of the session is parked or was interrupted, because
    the conversation lacks what is said in it.
    """
    if journal is None:
        raise DefinitionError(
            f"session={session.id!r} names a session in a journal, and this run has none. "
            f"Pass journal=..., or a session of your own: session=Session(id={session.id!r})."
        )
    rows = await journal.runs.list(session_id=session.id, principal=session.principal)
    for row in rows:
        if row.record.has_begun and row.status not in OVER and not row.held:
            raise _unfinished(row)
    if rows:
        await load_session(journal, rows[0], session)


def _unfinished(row: RunRow) -> RunError:
    """Return the error for a conversation that can't be continued because of this run."""
    id, session = row.record.id, row.record.session_id
    stands = "was interrupted" if row.status == "running" else "is not finished"
    why = f"it {'waits for an answer' if row.questions else stands}"
    resumes = "let a worker continue it" if row.queue else f"call `resume({id!r})`"
    how = f"Answer it and {resumes}" if row.questions else f"{resumes[0].upper()}{resumes[1:]}"
    return RunError(
        id,
        f"{why}, so the conversation {session!r} can't go on",
        f"{how}, or cancel it: `await handrail.runs.cancel(journal, {id!r})`.",
    )


def _bring_in(session: Session, runs: Iterable[Recorded], units: Iterable[CommitUnit]) -> None:
    """Apply commits, in their order, to a session, and the logs, messages and opened sections of these runs."""
    for unit in units:
        _redo(session, unit)
    for each in runs:
        _relog(session, each)
        outcome = decode_outcome(each.row)
        compactions = compactions_in(each.records).values() if each.row.status in OVER else ()
        _say_again(session, each.row.record.id, outcome.messages, outcome.opened, compactions)


def _relog(session: Session, recorded: Recorded) -> None:
    """Add what a run has logged to a session's logs."""
    row, is_over = recorded.row, recorded.row.status in OVER
    logs = logs_of(row, recorded.records)
    logs.restore(session, is_over=is_over)
    for entry in decode_outcome(row).logged:
        session.relog(decode_item(entry, session.id))
    if is_over:
        session.keep(run_end(row, logs))


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
        before = load_imported(base, session.rules)
        for kind, contents in (*before.state.items(), *before.logs().items()):
            if kind not in (ApprovalRemembered, ApprovalRevoked):
                session.load_slice(kind, contents.all())
        bring_in(session, decisions_in(base))
    first = next(iter(runs), None)
    if first is not None and first.record.begin:
        begin = decode_begin(first.record)
        for event in begin.events:
            session.redo(decode_item(event, session.id))
        for entry in begin.logged:
            session.relog(decode_item(entry, session.id))
        _say_again(session, first.record.id, begin.said, begin.shown, filter(None, [begin.compaction]))
        bring_in(session, [decode_item(fact, session.id) for fact in begin.denied])
    return session


def run_end(row: RunRow, logs: RecordedLogs) -> PromptExecuted:
    """Return the end of a finished run, as it was published."""
    outcome = decode_outcome(row)
    ended = f"failed: {outcome.error}" if outcome.error else outcome.stop_reason
    return logs.run_ended(row.record.prompt, ended, outcome.usage, outcome.cost)


def logs_of(row: RunRow, records: Iterable[CommitUnit | Entry]) -> RecordedLogs:
    """Return what the calls of a run have logged, from the run's records."""
    record = row.record
    return RecordedLogs(record.id, record.session_id, decode_begin(record).traceparent, records)


def compactions_in(records: Iterable[CommitUnit | Entry]) -> Mapping[int, Compaction]:
    """Return the compactions of a run's own conversation, in order, by the number of the answer that each precedes."""
    return {
        place.number: msgspec.msgpack.decode(each.body, type=RecordedCompaction).compaction
        for each in records
        if isinstance(each, Entry)
        and each.kind == "compaction"
        and (place := Place.parse(each.key)).parent == RUN
    }


def _say_again(
    session: Session,
    run_id: str,
    messages: Iterable[Message],
    opened: Iterable[str],
    compactions: Iterable[Compaction],
) -> None:
    """Add an earlier run's messages, opened sections and compactions to a session's conversation."""
    for message in messages:
        session.keep(MessageAdded(ROOT, message, run_id))
    for path in opened:
        session.keep(SectionOpened(ROOT, path, run_id))
    for compaction in compactions:
        session.keep(ConversationCompacted(ROOT, compaction, run_id))


def _redo(session: Session, unit: CommitUnit) -> None:
    for event in unit.events:
        session.redo(decode_item(bytes(event), session.id))
