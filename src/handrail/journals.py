"""`Journal`: the durable record a run resumes from, split by role.

A journal is its id, its key and its roles. Each role is a small protocol, so code that only asks
questions depends on `Questions` alone. One contract suite holds every implementation.

Only the process that owns a run adds to it. A role raises `RunBusy` in a process whose lease was taken over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from handrail.question import Answer, Question
from handrail.records import (
    CommitUnit,
    Decision,
    Entry,
    Mark,
    QuestionRecord,
    RunCopy,
    RunRecord,
    RunRow,
    RunStatus,
    SessionRow,
)

if TYPE_CHECKING:
    from handrail.protocols import Asker

T = TypeVar("T")

Check = Callable[[Any], object]
"""Rejects an invalid value by raising `ToolValidationError`."""
Mask = Callable[[Any], Any]
"""Returns a value as plain JSON with its secrets masked."""


class Runs(Protocol):
    """Runs and the leases on them."""

    async def begin(self, run: RunRecord, /) -> None:
        """Record a new run and take its lease; `RunError` if the id is in use."""
        ...

    async def take(self, run_id: str, /) -> RunRow:
        """Take the lease of a run to resume it; `RunBusy` while another process holds it.

        Returns the row as it was before.
        """
        ...

    async def keep(self, run_id: str, /) -> bool:
        """Renew the lease; `RunBusy` if another process has taken it. Returns whether to cancel the run."""
        ...

    async def stop(self, run_id: str, /) -> None:
        """Ask the owner of a run to cancel it: its next `keep` returns True. `RunUnknown` if there is no such run."""
        ...

    async def leave(self, run_id: str, status: RunStatus, outcome: bytes = b"", /) -> None:
        """Release the lease and record the run's status. A run that is over has no open questions."""
        ...

    async def get(self, run_id: str, /) -> RunRow:
        """The current row of a run; `RunUnknown` if there is no such run."""
        ...

    async def list(
        self,
        *,
        session_id: str | None = None,
        principal: str | None = None,
        limit: int = 100,
        before: Mark | None = None,
    ) -> Sequence[RunRow]:
        """Runs, newest first, in pages; with a session, all of its runs, oldest first.

        The next page is `before` the mark of the last record of this one.
        """
        ...

    async def sessions(
        self, principal: str, /, *, limit: int = 100, before: Mark | None = None
    ) -> Sequence[SessionRow]:
        """The sessions of a principal, last changed first, in pages."""
        ...

    async def add(self, copy: RunCopy, /) -> None:
        """Record a run copied from elsewhere, or under another id, with no owner; `RunError` if the id is in use."""
        ...

    async def forget(self, run_ids: Sequence[str], /) -> None:
        """Delete these runs with everything recorded for them, and the decisions of sessions left without a run."""
        ...


class Calls(Protocol):
    """What happened in runs: committed calls, and entries for everything else.

    A unit that changes files is committed by `commit` before any file changes, and is then either
    `applied` or taken back by `void`. After a crash, recovery finishes a unit that is neither.
    """

    async def commit(self, unit: CommitUnit, /) -> None:
        """Record everything one call changed, atomically."""
        ...

    async def applied(self, unit: CommitUnit, /) -> None:
        """Record that the files of a unit have been changed."""
        ...

    async def void(self, unit: CommitUnit, /) -> None:
        """Take back a unit whose files could not be changed: it was never committed."""
        ...

    async def unapplied(self) -> Sequence[CommitUnit]:
        """The units of all runs that are neither applied nor void and that no live process is applying, in order."""
        ...

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        """The units of a run, in order."""
        ...

    async def load_session(self, session_id: str, /) -> Sequence[CommitUnit]:
        """The units of all runs of a session, in order."""
        ...

    async def later(self, unit: CommitUnit, /) -> Sequence[CommitUnit]:
        """The units of all runs committed after this one and not undone, in order."""
        ...

    async def note(self, run_id: str, entry: Entry, /, *, from_outside: bool = False) -> None:
        """Record an entry in a run this process owns; with `from_outside`, in a run that nobody owns."""
        ...

    async def entries(self, run_id: str, /) -> Sequence[Entry]:
        """The entries of a run, in order."""
        ...

    async def marks(self, session_id: str, /) -> Sequence[tuple[str, Entry]]:
        """The `undone` and `told` entries of a session, each with its run's id."""
        ...


class Steps(Protocol):
    """Steps that succeed once."""

    async def run(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        """Run `function` until it succeeds once for this key; from then on return its recorded value.

        The key is reserved before and settled after. A key found reserved, because the process ended in
        between, is settled by the value of `unsettled` if that is given.
        """
        ...

    async def load(self, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        """The keys of a run's steps and their settled values, None where the outcome is unknown."""
        ...


class Questions(Protocol):
    """Questions to people, and their answers."""

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        """Record a question, put it to the asker, and wait for its answer.

        The answer may come from the asker, from `answer`, or not at all: then its outcome says so.
        An answer whose value `check` rejects is refused. An answer with secrets is recorded as `mask` returns it;
        asked again, such a question needs a new answer.
        """
        ...

    def answer(self, answer: Answer, /) -> None:
        """Accept an answer. The first wins, a repeat is harmless, anything else is `AnswerRefused`.

        An answer with a secret is refused if the asker does not wait in this process, since it can't be recorded.
        """
        ...

    async def open(self, run_id: str | None = None, /, *, principal: str | None = None) -> Sequence[Question]:
        """The questions without an answer, of one run or of all, oldest first."""
        ...

    async def history(self, run_id: str, /) -> Sequence[QuestionRecord]:
        """The questions of a run that are open or were answered, oldest first."""
        ...

    async def withdraw(self, question_id: str, /) -> None:
        """Delete a question if it has no answer."""
        ...

    async def withdraw_all(self, prefix: str, /) -> None:
        """Delete every question without an answer whose id starts with `prefix`."""
        ...


class Decisions(Protocol):
    """Decisions that hold for whole sessions. They outlive the runs that made them."""

    def write(self, decision: Decision, /, *, run_id: str = "") -> None:
        """Record a decision, synchronously, from any thread. A repeat is harmless.

        `RunBusy` if it was made in a run that another process has taken over.
        """
        ...

    async def read(self, session_id: str, principal: str, /) -> Sequence[Decision]:
        """The decisions of a session of this principal, in order."""
        ...


class Tickets(Protocol):
    """Tickets issued by calls, and the results deposited for them.

    Only the owner of a run issues and closes tickets. A process that redeems one claims it, works, and
    deposits the result for the owner to take. `TicketError` if that is too late.
    """

    def issue(self, run_id: str, place: str, text: str, /) -> str:
        """Record a ticket, synchronously. Returns the text first issued at this place."""
        ...

    async def claim(self, run_id: str, place: str, by: str, again: bool, /) -> bytes:
        """Claim a ticket to redeem it, or renew the claim. Returns the earlier deposit, or b"".

        The outcome of a redemption that was cut short is unknown: `OutcomeUnknown`, unless it may be
        redeemed `again`.
        """
        ...

    async def release(self, run_id: str, place: str, by: str, /) -> None:
        """Give a claim up without having done anything, so that another process may claim the ticket."""
        ...

    async def deposit(self, run_id: str, place: str, by: str, body: bytes, /) -> None:
        """Record the result for a claimed ticket, if its call still waits for it."""
        ...

    async def close(self, run_id: str, places: Sequence[str], /) -> Mapping[str, bytes]:
        """Accept no more deposits at these places. Returns the deposits; b"" where a claim left none."""
        ...


class Blobs(Protocol):
    """Bytes kept once, named by their SHA-256 digest, for as long as a run refers to them."""

    async def put(self, data: bytes, /, *, run_id: str) -> str:
        """Keep bytes for a run this process owns and return their digest. A repeat stores nothing new."""
        ...

    async def get(self, digest: str, /) -> bytes:
        """The bytes with this digest; `BlobNotFoundError` if there are none."""
        ...

    async def has(self, digest: str, /) -> bool:
        """Whether there are bytes with this digest."""
        ...

    async def list(self, run_id: str, /) -> Sequence[str]:
        """The digests a run refers to, sorted."""
        ...


class Journal(Protocol):
    """The durable record of runs."""

    @property
    def id(self) -> str:
        """Identifies the journal; the same each time it is opened."""
        ...

    @property
    def key(self) -> bytes:
        """Signs questions and tickets; the same each time it is opened."""
        ...

    @property
    def owner(self) -> str:
        """Identifies this process as the owner of leases."""
        ...

    @property
    def synced(self) -> bool:
        """Whether records survive a power cut, and files must be synced too."""
        ...

    @property
    def runs(self) -> Runs: ...
    @property
    def calls(self) -> Calls: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def questions(self) -> Questions: ...
    @property
    def decisions(self) -> Decisions: ...
    @property
    def tickets(self) -> Tickets: ...
    @property
    def blobs(self) -> Blobs: ...


@runtime_checkable
class Recoverable(Protocol):
    """Files whose commits are finished from the journal after a crash."""

    def recover(self, journal: Journal, /) -> Awaitable[object]:
        """Apply what the journal recorded and a process that ended did not apply."""
        ...
