"""`RunLog`: the records that a journal has of one run, and those that the run adds; and the attachments that the records refer to.

The bytes of attachments are blobs of the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.content import Attachment
from handrail.errors import BlobNotFoundError, Diverged, RunBusy, RunError
from handrail.events import LegEnd
from handrail.journal.protocol import Journal
from handrail.journal.records import (
    Amounts,
    CommitUnit,
    Entry,
    EntryKind,
    Order,
    QuestionRecord,
    SpawnedRun,
)
from handrail.messages import Message, ToolMessage, UserMessage
from handrail.question import Answer
from handrail.run.place import Place

T = TypeVar("T")

REMOTE: EntryKind = "remote work"


class _Verb(msgspec.Struct):
    verb: str


class _Charged(msgspec.Struct):
    charged: bool = False


_CHARGED: tuple[EntryKind, ...] = ("call begun", "call tried", "inner call")
"""The kinds of entries that say whether a call was charged."""


_AT_CALLS: tuple[EntryKind, ...] = (
    *("call begun", "call tried", "inner call", "verb", "approval", "remote work", "script"),
    *("model answer", "advice", "correction", "compaction", "attachments"),
)
"""The kinds of entries whose keys are places, which may be inside a call."""
_CALLS = ("call", "compensation", "probe")
"""The kinds of places at which calls are made."""


class _Ended(msgspec.Struct):
    status: str


class Told(msgspec.Struct, frozen=True):
    """The record that a run's model was told what people said along with their answers."""

    questions: list[str]
    message: UserMessage
    messages: list[str] = []
    """The ids of the messages to the run that are part of this one."""
    left: Amounts = {}
    """What the background runs whose ends are told have not spent of the budget."""
    order: Order | None = None
    """What the run was ordered to do; None if nothing."""
    ends: UserMessage | None = None
    """The message that tells the ends of background runs, after what people said; None if there are none."""

    @property
    def said(self) -> Sequence[UserMessage]:
        """The messages that the model was told, in order. An order may come without words."""
        said = [self.message] if self.message.text or self.message.attachments else []
        return said if self.ends is None else [*said, self.ends]


class RunLog:
    """The records of a run, found by place, and the records that the run adds.

    Places are numbered, so a resumed run finds its records under the same places. If a verb finds the record of a
    different verb at its place, the run has diverged.
    """

    __slots__ = (
        "_charged",
        "_charged_in",
        "_clock",
        "_closed",
        "_finished",
        "_found",
        "_inside",
        "_spawning",
        "_started",
        "_verbs",
        "asked",
        "attempt",
        "earlier",
        "is_kept",
        "journal",
        "remarks",
        "resumed",
        "run_id",
        "told",
        "unrecorded",
        "untold",
    )

    def __init__(
        self,
        journal: Journal | None,
        run_id: str,
        clock: Clock,
        entries: Iterable[Entry] = (),
        units: Iterable[CommitUnit] = (),
        *,
        asked: Iterable[QuestionRecord] = (),
        resumed: bool = False,
        attempt: int = 1,
        earlier: LegEnd = "",
    ) -> None:
        self.journal: Journal = cast(Any, journal)
        self.run_id = run_id
        self.resumed = resumed
        self.attempt = attempt
        """1 until the run is resumed, and then the number of its legs (see `RunRow.legs`)."""
        self.earlier: LegEnd = earlier
        """How the run's earlier leg ended; "" if this is its first."""
        self.is_kept = journal is not None
        """Whether there is a journal. Runs without a journal use `NO_LOG`."""
        self._closed = False
        self.untold: Mapping[str, Any] = {}
        """The session's undone calls that its model has not been told about."""
        self.asked: Mapping[str, QuestionRecord] = {each.question.id: each for each in asked}
        """The questions of the run that were open, answered or declined when the record was loaded."""
        self.remarks: Mapping[str, Answer] = {
            id: each.answer for id, each in self.asked.items() if each.answer and each.answer.has_remark
        }
        """The answers whose remarks the model had not been told when the record was loaded, by question id."""
        self.unrecorded: list[bytes] = []
        """What calls without a recorded end have logged. The run's outcome records it; in a parked run it is dropped."""
        self._started: frozenset[str] | None = None
        self._clock = clock
        self._found: dict[tuple[EntryKind, str], bytes] = {
            (each.kind, each.key): each.body for each in entries
        }
        for (kind, _), body in self._found.items():
            if kind == "remark":
                told = msgspec.msgpack.decode(body, type=Told).questions
                self.remarks = {id: each for id, each in self.remarks.items() if id not in told}
        self._finished = {unit.place: unit for unit in units}
        self._spawning = [(Place.parse(unit.place), unit) for unit in self._finished.values() if unit.spawned]
        self._verbs: dict[str, str] = {
            key: body.decode() if kind == "verb" else msgspec.msgpack.decode(body, type=_Verb).verb
            for (kind, key), body in self._found.items()
            if kind in ("verb", "inner call")
        }
        self._inside: dict[Place | None, list[tuple[EntryKind | Literal["ticket"], Place, bytes]]] = {}
        """Model answers, compactions, inner calls and tickets, grouped by the outermost call that contains them; None for the run itself."""
        for (kind, key), body in self._found.items():
            if kind in ("model answer", "compaction", "inner call"):
                self._put(kind, Place.parse(key), body)
        for key, verb in self._verbs.items():
            if verb == "ticket":
                self._put("ticket", Place.parse(key), b"")
        self.told: frozenset[str] = frozenset(
            key
            for (kind, _), body in self._found.items()
            if kind == "parked"
            for key in msgspec.msgpack.decode(body, type=list[str])
        )
        """The keys of the facts that earlier legs published about calls that were unfinished when the run was parked."""
        self._charged = frozenset(self._find_charged())
        self._charged_in = Counter(
            str(each) for call in self._charged for each in Place.parse(call).parents if each.kind == "run"
        )

    @property
    def closed(self) -> bool:
        """Whether recording has stopped, for example because the run is parked or another process has taken it over."""
        return self._closed

    def close(self) -> None:
        """Stop recording."""
        self._closed = self.is_kept  # all runs without a journal share one log

    def _put(self, kind: EntryKind | Literal["ticket"], place: Place, body: bytes) -> None:
        self._inside.setdefault(place.outermost_call, []).append((kind, place, body))

    def _under(self, kind: str, call: Place) -> Iterator[tuple[int, Place, bytes]]:
        """Yield the records of this kind inside the attempts at a call, each as attempt number, place and body."""
        for each, place, body in self._inside.get(call.outermost_call, ()):
            attempt = place.attempt_at(call) if each == kind else None
            if attempt is not None:
                yield attempt, place, body

    def bodies_under(self, kind: EntryKind, call: Place, before: int | None = None) -> Iterator[bytes]:
        """Yield the answers or compactions in runs nested in a call; with `before`, only those in attempts with a lower number."""
        for attempt, _, body in self._under(kind, call):
            if before is None or attempt < before:
                yield body

    def find(self, kind: EntryKind, place: Place, type: type[T]) -> T | None:
        """Return the value of this kind that the loaded record has at this place; None if it has none."""
        body = self._found.get((kind, str(place)))
        return None if body is None else msgspec.msgpack.decode(body, type=type)

    def has(self, kind: EntryKind, place: Place) -> bool:
        """Return whether the loaded record has a value of this kind at this place."""
        return (kind, str(place)) in self._found

    def has_begun(self, run: Place) -> bool:
        """Return whether the run itself, or the run nested at this place, had begun when the record was loaded."""
        return self.resumed and (run.parent is None or self.has("verb", run.parent.child(run.number)))

    def _find_charged(self) -> Iterator[str]:
        """Yield the places of the calls that were charged. A call with several records is yielded several times."""
        for place, unit in self._finished.items():
            if unit.charged:
                yield place
        for (kind, key), body in self._found.items():
            if kind in _CHARGED and msgspec.msgpack.decode(body, type=_Charged).charged:
                call = Place.parse(key)
                yield str(call.parent if call.kind == "attempt" else call)

    def was_charged(self, call: Place) -> bool:
        """Return whether the budget had been charged for the call when the record was loaded."""
        return str(call) in self._charged

    def charged_in(self, run: Place) -> int:
        """Return how many calls in a run, and in the runs nested in it, had been charged when the record was loaded."""
        return self._charged_in[str(run)]

    def had_started(self, call: Place) -> bool:
        """Return whether the loaded record has anything at this call or inside it, so that an earlier leg had started it."""
        if self._started is None:
            places = [Place.parse(key) for kind, key in self._found if kind in _AT_CALLS]
            places += [Place.from_id(id, self.run_id) for id in self.asked]
            self._started = frozenset(
                str(each) for place in places for each in (place, *place.parents) if each.kind in _CALLS
            )
        return str(call) in self._started or str(call) in self._finished

    def begun_inside(self, call: Place) -> Iterator[Place]:
        """Yield the calls inside a call that had begun, and were not over, when the record was loaded."""
        prefix = call.prefix()
        for kind, key in self._found:
            if kind == "call begun" and key.startswith(prefix):
                inner = Place.parse(key).parent
                if inner is not None and inner != call and not self.is_over(inner):
                    yield inner

    def is_over(self, call: Place) -> bool:
        """Return whether the call at this place was over when the record was loaded."""
        return str(call) in self._finished or self.has("inner call", call)

    def was_being_undone(self, call: Place) -> bool:
        """Return whether a compensation of this call had begun when the record was loaded."""
        return self.has("call begun", call.compensation.attempt(1))

    def was_undone(self, call: Place) -> bool:
        """Return whether a compensation of this call had succeeded when the record was loaded."""
        unit = self._finished.get(str(call.compensation))
        ended = unit or self.find("inner call", call.compensation, _Ended)
        return ended is not None and ended.status == "ok"

    def finished(self, call: Place) -> CommitUnit | None:
        """Return the unit of a finished call; None if the call is not over, or is recorded as a part of its outer call."""
        return self._finished.get(str(call))

    def committed_inside(self, call: Place) -> list[CommitUnit]:
        """Return the units of the successful calls inside a call that were committed separately and changed something."""
        inside = (unit for place, unit in self._finished.items() if place.startswith(call.prefix()))
        return [unit for unit in inside if unit.status == "ok" and unit.has_changed]

    def spawned_under(self, call: Place, before: int | None = None) -> Iterator[SpawnedRun]:
        """Yield the background runs that a call and the calls inside it have begun; with `before`, only those in attempts with a lower number."""
        for place, unit in self._spawning:
            attempt = before or 0 if place == call else place.attempt_at(call)
            if attempt is not None and (before is None or attempt < before):
                yield from unit.spawned

    def under(self, call: Place) -> list[bytes]:
        """Return the records of the finished inner calls of a call and of the runs nested in it."""
        return [body for _, _, body in self._under("inner call", call)]

    def tickets_under(self, call: Place) -> list[str]:
        """Return the places where a call, and anything nested in it, issued tickets."""
        return [str(place) for _, place, _ in self._under("ticket", call)]

    async def note(self, kind: EntryKind, place: Place, value: Any) -> bool:
        """Record a value, and wait until it is durable. Returns False and records nothing if the log is closed, or there is no journal."""
        if self._closed or not self.is_kept:
            return False
        await self._add(kind, str(place), msgspec.msgpack.encode(value))
        return True

    async def note_remote(self, call: Place, id: str) -> None:
        """Record the id of the work that an attempt at a call has started elsewhere, unless the log is closed.

        Returns once the record is durable.
        """
        if await self.note(REMOTE, call, id):
            self._found[REMOTE, str(call)] = msgspec.msgpack.encode(id)

    def find_remote(self, call: Place) -> str | None:
        """Return the id of the work that an attempt at a call has started elsewhere; None if there is none."""
        return self.find(REMOTE, call, str)

    def check_verb(self, place: Place, verb: str) -> None:
        """Raise `Diverged` if the record has a different verb at this place."""
        was = self._verbs.get(str(place))
        if was is not None and was != verb:
            raise Diverged(self.run_id, str(place), was, verb)

    async def note_verb(self, place: Place, verb: str) -> None:
        """Record which verb is used at a place, before the verb's value is recorded.

        Does nothing if the log is closed, if there is no journal, or if a verb is already recorded there.
        """
        if self._closed or not self.is_kept:
            return
        key = str(place)
        if key not in self._verbs:
            self._verbs[key] = verb
            await self._add("verb", key, verb.encode())

    async def _add(self, kind: EntryKind, key: str, body: bytes) -> None:
        try:
            await self.journal.calls.note(self.run_id, Entry(kind, key, self.now(), body))
        except RunBusy:
            self._closed = True
            raise

    def now(self) -> float:
        return self._clock.now().timestamp()


NO_LOG = RunLog(None, "", SYSTEM_CLOCK)
"""The log of all runs without a journal. It finds nothing, records nothing and is never closed."""


async def store_attachments(journal: Journal, run_id: str, attachments: Iterable[Attachment]) -> None:
    """Store the bytes of attachments as blobs that this run refers to. Attachments without loaded bytes are skipped."""
    for content in contents(attachments):
        await journal.blobs.put(content, run_id=run_id)


def contents(attachments: Iterable[Attachment]) -> list[bytes]:
    """Return the bytes of the attachments that are in memory."""
    return [each.content for each in attachments if each.is_here]


async def load_attachments(
    journal: Journal, run_id: str, attachments: Iterable[Attachment], *, some: bool = False
) -> None:
    """Load the bytes of attachments that are only references. Equal bytes are kept in memory once.

    Attachments with an address are skipped. Raises `RunError` if the bytes of any other one are not in the journal, for example
    because the process ended before it had stored them. With `some`, such an attachment stays a reference instead. Raises
    `JournalAltered` if the bytes were altered.
    """
    found: dict[str, bytes] = {}
    for each in attachments:
        if each.is_here:
            found[each.digest] = each.content
        elif not each.address:
            content = found.get(each.digest)
            try:
                content = await journal.blobs.get(each.digest) if content is None else content
            except BlobNotFoundError:
                if some:
                    continue
                raise RunError(
                    run_id,
                    f"its attachment {each.name!r} is not in the journal. The process may have ended before it was stored",
                    "Start a new run with the attachments.",
                ) from None
            each.load(content)
            found[each.digest] = content


def attached_to(messages: Iterable[Message]) -> Iterator[Attachment]:
    """Yield the attachments of messages, in order."""
    for message in messages:
        if isinstance(message, ToolMessage):
            for result in message.results:
                yield from result.attachments
        else:
            yield from message.attachments
