"""A run as a tree: model answers, their calls, and what happened inside these calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from handrail.content import Attachment
from handrail.errors import SessionUnknown
from handrail.events import ToolInvoked
from handrail.journal.protocol import Journal
from handrail.journal.records import (
    OVER,
    CommitUnit,
    Entry,
    QuestionRecord,
    QueuedMessage,
    RunRow,
    SpawnedRun,
)
from handrail.messages import AssistantMessage, Compaction, Message, ToolMessage, Traits, Usage
from handrail.models.prices import tariff_of
from handrail.question import Question
from handrail.resources.directory.recovery import Unapplied
from handrail.run.answer import FailedRequest, RecordedAnswer, RecordedCompaction, total
from handrail.run.place import RUN, Place
from handrail.run.record.begin import RunBegin, RunOutcome, decode_begin, decode_outcome
from handrail.run.record.format import InnerCall, Tried, text_of
from handrail.run.record.lineage import retold
from handrail.run.record.recorded_session import load_session
from handrail.runs.catalog import Standing, children, standing_of
from handrail.runs.reversal import unapplied
from handrail.session import Session
from handrail.session.serialization import name_of


class CallNode(msgspec.Struct, kw_only=True):
    """One call with the calls, questions and nested runs inside it."""

    place: Place
    tool: str
    id: str = ""
    arguments: str = ""
    """The arguments as JSON, or as the model wrote them, with secrets masked; "" if they are not recorded."""
    status: str = "open"
    """The status with which the call ended; `open` if it has not ended.

    A call without a recorded end in a run that is over was `cancelled`, unless the run's record says more.
    """
    at: float | None = None
    """When the call or anything recorded inside it first began, in seconds since 1970; None if unknown."""
    seconds: float | None = None
    message: str = ""
    """The text of the call's result, as a model is shown it; "" if none is recorded."""
    attachments: Sequence[Attachment] = ()
    """References to the files that the call returned."""
    diff: str = ""
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    effects: Sequence[str] = ()
    """The call's external effects that remain, and that `undo` does not reverse.

    While the call around it is open, the effects that would be compensated are left out.
    """
    decision: str = ""
    undone: bool = False
    """Whether the call was undone with `undo`."""
    compensated: bool = False
    """Whether the call's compensation has undone its external effect."""
    rolled_back: bool = False
    """Whether the call's changes were dropped with those of a call around it, which failed, was run again or never ended."""
    spawned: Sequence[SpawnedRun] = ()
    """The background runs that the call has begun."""
    verbs: list[str] = []
    """The recorded verbs that the call's handler used, in order."""
    questions: list[QuestionRecord] = []
    calls: list[CallNode] = []
    runs: list[Nested] = []

    @property
    def was_not_approved(self) -> bool:
        """Whether the call was denied after a policy had asked for approval."""
        return self.status == "denied" and self.decision.startswith("ask")


class Turn(msgspec.Struct, kw_only=True):
    """One model answer with its calls. Unless it belongs to a nested run, its number is a `step` that `fork` takes."""

    number: int
    at: float
    seconds: float
    text: str
    model: str
    usage: Usage | None
    cost: Decimal | None
    """The cost in US dollars, as recorded or from the price table; None if the price or the usage is unknown."""
    failed: tuple[FailedRequest, ...] = ()
    """The earlier requests for this answer, which failed or were not used."""
    attachments: Sequence[Attachment] = ()
    """References to the pictures, sounds and other files that the model made."""
    calls: list[CallNode] = []
    compaction: Compaction | None = None
    """How the conversation was compacted before the answer; None if it was not."""
    summaries: tuple[FailedRequest, ...] = ()
    """The requests for a summary before the answer."""


class Nested(msgspec.Struct, kw_only=True):
    """A run that was started inside a call, with its model answers."""

    place: Place
    name: str
    turns: list[Turn] = []
    calls: list[CallNode] = []
    """The run's calls that can't be assigned to one of its answers."""


class BackgroundRun(msgspec.Struct, frozen=True):
    """A background run that a run has begun, with its open questions."""

    row: RunRow
    standing: Standing
    questions: Sequence[Question]


class RunTree(msgspec.Struct, kw_only=True):
    """A run with the model answers, calls and questions that its journal has recorded."""

    row: RunRow
    standing: Standing
    begin: RunBegin
    outcome: RunOutcome
    turns: list[Turn]
    calls: list[CallNode]
    """The run's calls, including inner ones, in the order of the outermost calls that contain them."""
    questions: list[QuestionRecord]
    """The run's open, answered and declined questions."""
    usage: Usage
    cost: Decimal | None
    emitted: Mapping[str, Sequence[Any]] = {}
    """The newest events that tools emitted while the run was served, by call id, as plain data."""
    unapplied: Sequence[Unapplied] = ()
    """The run's calls whose recorded file changes are not applied, and why."""
    messages: Sequence[QueuedMessage] = ()
    """What was said to the run while it worked, in the order in which it was accepted."""
    children: Sequence[BackgroundRun] = ()
    """The background runs that the run has begun, oldest first."""

    @property
    def steps(self) -> int:
        """The number of model answers, without those of nested runs."""
        return len(self.turns)


def answers_in(entries: Iterable[Entry]) -> Mapping[Place, RecordedAnswer]:
    """Return the model answers of the run itself, without those of nested runs, by their places."""
    return {
        place: msgspec.msgpack.decode(entry.body, type=RecordedAnswer)
        for entry in entries
        if entry.kind == "model answer" and (place := Place.parse(entry.key)).parent == RUN
    }


async def show(journal: Journal, run_id: str) -> RunTree:
    """Return the tree of a run, with its turns, calls, times, costs, diffs and questions.

    Raises `RunUnknown` if there is no such run, and `JournalAltered` if its records were altered.
    """
    row = await journal.runs.get(run_id)
    tree = _Builder(
        row,
        await journal.calls.entries(run_id),
        await journal.calls.load(run_id),
        await journal.questions.history(run_id),
    ).tree(standing_of(row))
    return msgspec.structs.replace(
        tree,
        unapplied=await unapplied(journal, run_id),
        messages=await journal.messages.list(run_id),
        children=[
            BackgroundRun(each, standing_of(each), await journal.questions.open(each.record.id))
            for each in await children(journal, run_id)
        ],
    )


class _Builder:
    def __init__(
        self,
        row: RunRow,
        entries: Sequence[Entry],
        units: Sequence[CommitUnit],
        asked: Sequence[QuestionRecord],
    ) -> None:
        self.row = row
        self.entries = entries
        self.units = {Place.parse(unit.place): unit for unit in units}
        self.asked = asked
        self.undone = {entry.key for entry in entries if entry.kind == "undone"}
        self.is_over = row.status in OVER
        self.calls: dict[Place, CallNode] = {}
        self.inner: dict[Place, InnerCall] = {}
        self.attempts: dict[Place, int] = {}
        """The number of the last attempt at each call that was attempted more than once."""
        self.nested: dict[Place, Nested] = {}
        self.turns: dict[Place, list[Turn]] = {}
        self.compactions = {
            entry.key: msgspec.msgpack.decode(entry.body, type=RecordedCompaction)
            for entry in entries
            if entry.kind == "compaction"
        }

    def tree(self, standing: Standing) -> RunTree:
        for entry in self.entries:
            if entry.kind == "model answer":
                self._answer(entry)
        for entry in self.entries:
            if entry.kind == "inner call":
                self._inner(entry)
            elif entry.kind == "verb":
                self._verb(entry)
            elif entry.kind == "call tried":
                self.attempts[Place.parse(entry.key)] = msgspec.msgpack.decode(entry.body, type=Tried).number
        for place in self.units:
            if place.kind != "call":
                self._attach(self._call(place))
        for asked in self.asked:
            self._question(asked)
        for place, nested in self.nested.items():
            nested.turns = self.turns.get(place, [])
        turns = self.turns.get(RUN, [])
        outcome = decode_outcome(self.row)
        if self.is_over:
            self._close(turns, outcome)
        self._settle()
        for call in self.calls.values():
            if call.place.outer is None:
                _reach_back(call)
        summaries = [request for each in self.compactions.values() for request in each.spent]
        usage, cost = total([turn for turns in self.turns.values() for turn in turns], summaries)
        if self.row.outcome:
            usage, cost = outcome.usage, outcome.cost
        return RunTree(
            row=self.row,
            standing=standing,
            begin=decode_begin(self.row.record) if self.row.record.begin else _NOTHING,
            outcome=outcome,
            turns=turns,
            calls=[self.calls[place] for place in sorted(self.calls, key=_order)],
            questions=list(self.asked),
            usage=usage,
            cost=cost,
            emitted={
                entry.key: msgspec.msgpack.decode(entry.body)
                for entry in self.entries
                if entry.kind == "emitted"
            },
        )

    def _answer(self, entry: Entry) -> None:
        place = Place.parse(entry.key)
        run = place.run
        answer = msgspec.msgpack.decode(entry.body, type=RecordedAnswer)
        cost = answer.cost
        if cost is None and answer.usage is not None:
            cost = tariff_of(answer.model, Traits())(answer.usage)
        recorded = self.compactions.get(entry.key)
        compacted: dict[str, Any] = (
            {} if recorded is None else {"compaction": recorded.compaction, "summaries": recorded.spent}
        )
        turn = Turn(
            number=place.number, at=entry.at - answer.seconds, seconds=answer.seconds, text=answer.text,
            model=answer.model, usage=answer.usage, cost=cost, failed=answer.failed,
            attachments=answer.attachments, **compacted,
        )  # fmt: skip
        turns = self.turns.setdefault(run, [])
        made = sum(len(each.calls) for each in turns)
        for ordinal, call in enumerate(answer.calls, made + 1):
            node = self._call(run.child(ordinal), call.name)
            node.arguments = node.arguments or call.arguments
            turn.calls.append(node)
        turns.append(turn)
        if run.parent is not None:
            self._run(run)

    def _call(self, place: Place, tool: str = "") -> CallNode:
        node = self.calls.get(place)
        if node is None:
            unit = self.units.get(place)
            node = CallNode(place=place, tool=tool) if unit is None else self._of_unit(unit)
            self.calls[place] = node
        node.tool = node.tool or tool
        return node

    def _of_unit(self, unit: CommitUnit) -> CallNode:
        return CallNode(
            place=Place.parse(unit.place), id=unit.call_id, tool=unit.tool, arguments=unit.arguments, status=unit.status,
            at=unit.at, seconds=unit.seconds, message=text_of(unit.result), attachments=attached_in(unit.result), diff=unit.diff, reads=unit.reads,
            writes=unit.writes, effects=unit.effects, decision=unit.decision, undone=unit.call_id in self.undone,
            spawned=unit.spawned,
        )  # fmt: skip

    def _inner(self, entry: Entry) -> None:
        inner = msgspec.msgpack.decode(entry.body, type=InnerCall)
        node = self._call(
            Place.parse(entry.key), inner.verb.split(" ")[1] if " " in inner.verb else inner.verb
        )
        node.status, node.seconds, node.message = inner.status, inner.seconds, text_of(inner.result)
        node.attachments = attached_in(inner.result)
        node.at = entry.at - inner.seconds
        node.id = inner.call_id
        self.inner[node.place] = inner
        self._attach(node)

    def _attach(self, node: CallNode) -> None:
        """Attach a call to the call or nested run that contains it, if there is one."""
        outer = node.place.outer
        if outer is None:
            return
        is_run = outer.kind == "run"
        around = self._run(outer) if is_run else self._call(outer)
        listed = [call for turn in self.turns.get(outer, []) for call in turn.calls]
        if node not in around.calls and not (is_run and node in listed):
            around.calls.append(node)

    def _run(self, place: Place) -> Nested:
        nested = self.nested.get(place)
        if nested is None:
            nested = self.nested[place] = Nested(place=place, name="")
            if place.outer is not None:
                outer = self._call(place.outer)
                outer.runs.append(nested)
                if outer.place.outer is not None:
                    self._attach(outer)
        return nested

    def _verb(self, entry: Entry) -> None:
        place = Place.parse(entry.key)
        attempt = place.parent
        if attempt is None or attempt.parent is None:
            return
        verb = entry.body.decode()
        self._call(attempt.parent).verbs.append(verb)
        kind, _, name = verb.partition(" ")
        if kind in ("evaluate", "prompt_model"):
            self._run(attempt.nested_run(place.number)).name = name or kind

    def _question(self, asked: QuestionRecord) -> None:
        call = Place.from_id(asked.question.id, self.row.record.id).outer
        if call is not None:
            by = asked.question.asked_by
            self._call(call, by[-1] if by else "").questions.append(asked)

    def _close(self, turns: Sequence[Turn], outcome: RunOutcome) -> None:
        """Set how the calls ended whose end is not recorded, such as cancelled ones. The run is over."""
        said = outcome.messages
        asked = [call for each in said if isinstance(each, AssistantMessage) for call in each.calls]
        told = {each.id: each.text for one in said if isinstance(one, ToolMessage) for each in one.results}
        ends = {end.call_id: end for end in map(_end_in, outcome.logged) if end is not None}
        # An answer that came last may be recorded without having been added to the conversation.
        for call, named in zip((call for turn in turns for call in turn.calls), asked, strict=False):
            call.id = call.id or named.id
        for call in self.calls.values():
            if call.status == "open":
                end, call.message = ends.get(call.id), told.get(call.id, "")
                call.status = "cancelled" if end is None else end.status
                call.seconds = None if end is None else end.seconds

    def _settle(self) -> None:
        """Set which inner calls were compensated or rolled back, and which of their effects remain."""
        for place, call in self.calls.items():
            if place.kind == "compensation" and call.status == "ok" and place.parent is not None:
                self.calls[place.parent].compensated = True
        for place, inner in self.inner.items():
            call, lasts = self.calls[place], self._lasts(place)
            call.rolled_back = lasts is False and inner.status == "ok" and bool(inner.events or inner.files)
            call.effects = [
                done.what
                for done in inner.settled
                if not (done.tool and (lasts is None or self.calls[Place.parse(done.place)].compensated))
            ]

    def _lasts(self, place: Place) -> bool | None:
        """Return whether what a successful call at this place changed has been committed for good; None if that is still open."""
        if place in self.units or place.kind != "call":
            return True
        around = next(
            (each for each in place.parents if each.kind in ("call", "compensation", "probe")), None
        )
        if around is None:
            return False if self.is_over else None
        outer, status = self._lasts(around), self.calls[around].status
        if around in self.inner and self.inner[around].passed:
            return outer  # inner calls commit past this one
        if status not in ("ok", "open") or (place.attempt_at(around) or 1) < self.attempts.get(around, 1):
            return False
        return outer if status == "ok" or outer is False else None


_ENDED = name_of(ToolInvoked)


class _End(msgspec.Struct):
    """How a call ended whose end is recorded only with its run's."""

    call_id: str
    status: str
    seconds: float


class _Logged(msgspec.Struct):
    type: str
    item: msgspec.Raw


def _end_in(logged: bytes) -> _End | None:
    """Return the end of a call, if that is what was logged."""
    found = msgspec.json.decode(logged, type=_Logged)
    return msgspec.json.decode(found.item, type=_End) if found.type == _ENDED else None


_NOTHING = RunBegin(
    message=None, params=None, history=[], system="", tools=[], opened=[], temperature=None, max_tokens=None,
    deadline=None, pauses=False, budget=None, base=None,
)  # fmt: skip


def _reach_back(node: CallNode) -> float | None:
    """If something inside a call began before the call, use that time as the call's start. Returns the start, or None if it is unknown.

    A call that was run again after its run was resumed is recorded with its last start, and an open call has no record.
    """
    turns = [turn for run in node.runs for turn in run.turns]
    inner = [*node.calls, *(call for run in node.runs for call in run.calls)]
    inner += [call for turn in turns for call in turn.calls]
    times = [
        *(asked.question.asked_at.timestamp() for asked in node.questions),
        *(turn.at for turn in turns),
        *(at for at in map(_reach_back, inner) if at is not None),
    ]
    first = min(times, default=None)
    if first is not None and (node.at is None or first < node.at):
        if node.at is not None and node.seconds is not None:
            node.seconds += node.at - first
        node.at = first
    return node.at


def _order(place: Place) -> tuple[int, str]:
    call = place.outermost_call
    return 0 if call is None else call.number, str(place)


class _Attached(msgspec.Struct):
    attachments: tuple[Attachment, ...] = ()


def attached_in(result: bytes) -> tuple[Attachment, ...]:
    """Return references to the attachments of a recorded result."""
    if b'"attachments"' not in result:
        return ()
    return msgspec.json.decode(result, type=_Attached).attachments


async def session(
    journal: Journal, session_id: str, *, principal: str, session: Session | None = None
) -> Session:
    """Return a principal's session, with everything that its runs have committed, and what was said in finished runs.

    A run can begin on the returned session until another run works on the session. Then it must be loaded again. Raises
    `SessionUnknown` if the principal has no run in a session with this id. If the session was created with its own slice rules,
    pass `session`: an empty session with the same id and rules.
    """
    rows = await journal.runs.list(session_id=session_id, principal=principal)
    if not rows:
        raise SessionUnknown(session_id, principal)
    return await load_session(journal, rows[0], session)


async def said(journal: Journal, run_id: str) -> list[Message]:
    """Return the messages that a run has added to its session's conversation so far.

    For an unfinished run they come from the record, in which open calls have no result. Such messages can be shown,
    but can't be sent to a model. Raises `RunError` if the run is unfinished and has begun, and an earlier run of its session
    is not over.
    """
    row = await journal.runs.get(run_id)
    return decode_outcome(row).messages if row.status in OVER else await retold(journal, row)
