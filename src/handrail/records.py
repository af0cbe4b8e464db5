"""What a journal holds of a run: how it began, what happened in it in order, and where it stands.

And `Journal`, the seam through which it is asked to hold that.

Plain data, so that another process, and a later version, can read it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from handrail.question import Answer, Question

if TYPE_CHECKING:
    from handrail.protocols import Asker

T = TypeVar("T")

RunStatus = Literal["running", "parked", "done", "failed", "cancelled"]
"""`running` also stands for a run whose process has died: its lease tells."""

OVER: frozenset[RunStatus] = frozenset(("done", "failed", "cancelled"))

EntryKind = Literal[
    "model answer",
    "call begun",
    "call tried",
    "inner call",
    "verb",
    "advice",
    "undoing",
    "undone",
    "told",
    "deadline",
    "approval",
]
"""`undoing`: a call is being undone; `undone`: it was, and its key is the call's id. `told`: the model was told so.

`deadline`: where the run's deadline stands, which has been paused for people. `approval`: what was decided there
by something remembered, so that whoever goes through the run again finds it as it stood then.
"""


Mark = tuple[float, str]
"""Where a page ended: when its last row began, or was changed, and its id, since several may be as old."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a run began. It never changes."""

    id: str
    session_id: str
    principal: str
    prompt: str
    """The prompt's name."""
    model: str
    began_at: float
    """Seconds since 1970."""
    begin: bytes = b""
    """What the loop needs to begin again in the same way; only the adapter reads it."""
    app: str = ""
    """Where the prompt is found again: a worker's file, or `module:name`."""
    code: str = ""
    """A digest of the code that app was, to say when it has changed."""
    forked_from: str = ""

    @property
    def mark(self) -> Mark:
        """Where it stands among other runs."""
        return self.began_at, self.id


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it stands."""

    record: RunRecord
    status: RunStatus
    owner: str = ""
    """The process that has it; "" for nobody."""
    leased_until: float = 0.0
    changed_at: float = 0.0
    outcome: bytes = b""
    """What came of it, once it is over; only the adapter reads it."""
    questions: int = 0
    """How many questions of it wait for an answer."""
    stopping: bool = False
    """Has somebody asked the process that has it to cancel it?"""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session of somebody, by its runs."""

    session_id: str
    runs: int
    changed_at: float
    """When a run of it last began, was taken or was let go of."""
    first: RunRecord
    newest: RunRow
    questions: int = 0
    """How many questions of all its runs wait for an answer."""

    @property
    def began_at(self) -> float:
        return self.first.began_at

    @property
    def mark(self) -> Mark:
        """Where it stands among other sessions."""
        return self.changed_at, self.session_id


class Entry(msgspec.Struct, frozen=True):
    """One thing that happened in a run. Its key is its place in the run, never chance."""

    kind: EntryKind
    key: str
    at: float
    body: bytes


class CommitUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a run that is over, with everything it changed, recorded as one: all of it or none."""

    run_id: str
    call_id: str
    events: Sequence[bytes] = ()
    result: bytes = b""
    effects: Sequence[str] = ()
    files: Sequence[Mapping[str, Any]] = ()
    """What is to be done to each folder once this is recorded: the manifests of its durable forks."""
    session_id: str = ""
    place: str = ""
    """Where in the run it was called: the same whenever the run is gone through again."""
    tool: str = ""
    arguments: str = ""
    status: str = "ok"
    at: float = 0.0
    """When it began, in seconds since 1970."""
    seconds: float = 0.0
    reads: Sequence[str] = ()
    """The slices and paths it read; `slice Plan`, `file docs/a.md`."""
    writes: Sequence[str] = ()
    diff: str = ""
    charged: bool = True
    """Does it count towards a budget of tool calls?"""
    root: str = ""
    """The folder that its paths are of, where that is a real one."""
    decision: str = ""
    """What policies said of it: `allow`, `ask: why`, or `deny`; "" where there were none."""


class Asked(msgspec.Struct, frozen=True):
    """A question of a run, and its answer once there is one."""

    question: Question
    answer: Answer | None = None
    answered_at: float | None = None
    """When the answer was taken, in seconds since 1970; None too where a version that kept no time took it."""


class RunCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a journal holds of a run, to be brought into a journal under an id of its own."""

    row: RunRow
    entries: Sequence[Entry] = ()
    units: Sequence[CommitUnit] = ()
    steps: Sequence[tuple[str, bytes | None]] = ()
    """Settled values by key; None where it is not known whether it happened."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Something a session remembers of its approvals, or that it was taken back."""

    session_id: str
    principal: str
    kind: Literal["remembered", "revoked"]
    id: str
    """That of the decision, for both kinds."""
    at: float
    body: bytes
    """The fact, as sessions write facts."""


class DecisionBox(Protocol):
    """The decisions that hold for whole sessions. They are no run's, and outlive those that made them."""

    def write(self, decision: Decision, /, *, run_id: str = "") -> None:
        """Record a decision, at once, from any thread; the same one again is harmless.

        `RunBusy` where it was made in a run that another process has.
        """
        ...

    async def read(self, session_id: str, principal: str, /) -> Sequence[Decision]:
        """What was decided in a session of somebody, in order."""
        ...


class TicketBox(Protocol):
    """The tickets that the calls of a journal's runs have given out, and what was done under them.

    Only the owner of a run gives out and closes. Whoever redeems needs no run: it claims, works, and
    deposits what it did, for the owner to take. `TicketError` where that is too late.
    """

    def issue(self, run_id: str, place: str, text: str, /) -> str:
        """Record a ticket that is given out, at once. Returns the text that was first given out there."""
        ...

    async def claim(self, run_id: str, place: str, by: str, again: bool, /) -> bytes:
        """Take a ticket to redeem it, or keep it. Returns what was deposited before, or b"".

        Of one that was cut while it was redeemed nobody knows what came: `OutcomeUnknown`, unless it
        may be done `again`.
        """
        ...

    async def give_back(self, run_id: str, place: str, by: str, /) -> None:
        """Nothing was done under it: somebody else may redeem it."""
        ...

    async def deposit(self, run_id: str, place: str, by: str, body: bytes, /) -> None:
        """Leave what was done under a claimed ticket, if its call still waits for that."""
        ...

    async def close(self, run_id: str, places: Sequence[str], /) -> Mapping[str, bytes]:
        """Take no more deposits there. Returns those there are; b"" where one was claimed and none made."""
        ...


Check = Callable[[Any], object]
"""Refuses a value that does not fit by raising `ToolValidationError`."""
Mask = Callable[[Any], Any]
"""Gives a value as plain JSON with its secrets masked."""


class Journal(Protocol):
    """The record a run resumes from.

    A unit that changes files is committed by `commit`, before any file is changed, and then either
    `applied` or taken back by `void`; one found neither applied nor void after a crash is finished.
    """

    @property
    def id(self) -> str:
        """Which journal this is; the same whenever it is opened again."""
        ...

    @property
    def synced(self) -> bool:
        """Whether what is recorded outlives a power cut, and files are to be synced too."""
        ...

    @property
    def key(self) -> bytes:
        """What questions and tickets are signed with; the same whenever it is opened again."""
        ...

    @property
    def tickets(self) -> TicketBox:
        """What was given out to other processes, and what they did with it."""
        ...

    @property
    def decisions(self) -> DecisionBox:
        """What was decided for whole sessions."""
        ...

    # Runs.

    async def begin(self, run: RunRecord, /) -> None:
        """Record a new run and take it; `RunError` where there is one of this id."""
        ...

    async def take(self, run_id: str, /) -> RunRow:
        """Take a run over to go on with it: `RunBusy` where another process has it."""
        ...

    async def keep(self, run_id: str, /) -> bool:
        """Renew the lease; `RunBusy` where another process has taken the run. True: it is to be cancelled."""
        ...

    async def stop(self, run_id: str, /) -> None:
        """Ask the process that has a run to cancel it: its next `keep` says so. `RunUnknown` where there is none."""
        ...

    async def leave(self, run_id: str, status: RunStatus, outcome: bytes = b"", /) -> None:
        """Let go of a run, and say where it stands."""
        ...

    async def run(self, run_id: str, /) -> RunRow:
        """A run as it stands; `RunUnknown` where there is none."""
        ...

    async def runs(
        self,
        *,
        session_id: str | None = None,
        principal: str | None = None,
        limit: int = 100,
        before: Mark | None = None,
    ) -> Sequence[RunRow]:
        """Runs, of everybody or of one, the newest first; of a session all of them, the oldest first.

        The next page is what is `before` the mark of the last one's record.
        """
        ...

    async def sessions(
        self, principal: str, /, *, limit: int = 100, before: Mark | None = None
    ) -> Sequence[SessionRow]:
        """The sessions somebody has runs in, those first that were changed last; paged as runs are."""
        ...

    async def note(self, run_id: str, entry: Entry, /, *, from_outside: bool = False) -> None:
        """Record something that happened in a run this process has; from outside, in one that nobody has."""
        ...

    async def entries(self, run_id: str, /) -> Sequence[Entry]:
        """What happened in a run, in order."""
        ...

    async def marks(self, session_id: str, /) -> Sequence[tuple[str, Entry]]:
        """Which calls of a session were undone, and of which the model was told, with the runs these are of."""
        ...

    async def bring(self, copy: RunCopy, /) -> None:
        """Take a run in that was recorded elsewhere, or under another id; `RunError` where there is one of its id.

        Nobody has it here, whoever had it where it comes from.
        """
        ...

    async def forget(self, run_ids: Sequence[str], /) -> None:
        """Keep nothing of these runs any more."""
        ...

    # Steps and questions.

    async def step(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        """Run `function` for this key until it succeeds once; afterwards give its recorded value.

        It is reserved before and settled after. One found reserved, because the process ended in
        between, is decided by `unsettled`, where that is given: its value settles it.
        """
        ...

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        """Record a question, put it to whoever is there, and wait for its answer.

        The answer may come from there, from `answer`, or not at all: then its outcome says so. An
        answer whose value `check` refuses is not taken. Of one with secrets in it what `mask` gives is
        recorded; asked again, such a question is asked anew.
        """
        ...

    def answer(self, answer: Answer, /) -> None:
        """Take an answer. The first wins, a repeat is harmless, anything else is `AnswerRefused`.

        So is one with a secret in it where whoever asked does not wait in this process: nothing could keep it.
        """
        ...

    async def questions(
        self, run_id: str | None = None, /, *, principal: str | None = None
    ) -> Sequence[Question]:
        """What waits for an answer, of one run or of all, from everybody or from one, oldest first."""
        ...

    async def asked(self, run_id: str, /) -> Sequence[Asked]:
        """The questions of a run that wait or were answered, oldest first."""
        ...

    async def steps(self, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        """What a run did once: the keys and their settled values, None where it is not known."""
        ...

    async def withdraw(self, prefix: str, /, *, alone: bool = False) -> None:
        """Forget the questions without an answer whose ids begin like this; `alone`, the one of this id."""
        ...

    async def sleep(self, until: datetime, /) -> None: ...
    async def spawn(self, run_id: str, function: Callable[[], Awaitable[T]], /) -> T:
        """Run a child run under its own id, so that it can be cancelled by it."""
        ...

    def cancel(self, run_id: str, /) -> None:
        """Stop a spawned run."""
        ...

    # Commits.

    async def commit(self, unit: CommitUnit, /) -> None:
        """Record everything one call changed, all of it or nothing."""
        ...

    async def applied(self, unit: CommitUnit, /) -> None:
        """Note that the files of a unit are as it says."""
        ...

    async def void(self, unit: CommitUnit, /) -> None:
        """Take a unit back whose files could not be changed: it was never committed."""
        ...

    async def unapplied(self) -> Sequence[CommitUnit]:
        """The units, of all runs, whose files nobody has noted as applied, in order."""
        ...

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        """What was committed in a run, in order."""
        ...

    async def load_session(self, session_id: str, /) -> Sequence[CommitUnit]:
        """What was committed in all runs of a session, in order."""
        ...

    async def later(self, unit: CommitUnit, /) -> Sequence[CommitUnit]:
        """What was committed after this, in all runs, and was not undone, in order."""
        ...
