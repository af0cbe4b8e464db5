"""`Journal`: the durable record from which runs are resumed, split into roles.

Each role is a small protocol, so code that only asks questions depends on `Questions` alone. One contract test suite
covers every implementation.

While a process holds the lease of a run, other processes add nothing to the run but answers, votes, deposits, withdrawals of
questions, messages and requests to cancel. A process that has lost its lease to another gets `RunBusy`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import msgspec

from handrail.clock import Clock
from handrail.errors import HandrailError
from handrail.journal.records import (
    Amounts,
    CommitUnit,
    Decision,
    Entry,
    Holdings,
    Mark,
    QuestionRecord,
    QueuedMessage,
    RunCopy,
    RunRecord,
    RunRow,
    RunStatus,
    SessionRow,
    SessionTurn,
    SpendRaise,
    SpendState,
    SpendWindow,
    TakenTurn,
    Verification,
    WorkerRow,
    WorkspaceFile,
    WorkspaceLine,
    WorkspaceRow,
)
from handrail.question import Answer, Question, Vote

if TYPE_CHECKING:
    from handrail.concurrency.cancellation import Pending
    from handrail.protocols import Asker


class Queue(Protocol):
    """Runs that wait for a worker, and the workers.

    A worker may take a submitted run that is *due*: a queued or parked run whose time has come, a parked run that was woken or
    has an answered question, or a run whose owner is gone. Of the queued runs of a session whose time has come,
    only the oldest is due, and only while no other run of the session is starting, running or parked. At most one submitted
    run of a session has an owner at a time.
    """

    async def submit(
        self,
        run: RunRecord,
        /,
        *,
        at: float | None = None,
        host: str = "",
        key: str = "",
        blobs: Sequence[bytes] = (),
    ) -> RunRow:
        """Record a run for a worker to begin, as `queued`, and return its row.

        It is due at the time `at`, or now. With `host`, only workers on that host may take it. The `blobs` that its request
        refers to are stored together with it. If the principal has already submitted a run with this `key`, nothing is
        recorded, and the row of that run is returned. Raises `DefinitionError` if the run has no app, and `RunError` if its id
        is in use.
        """
        ...

    async def claim(
        self,
        queues: Sequence[str],
        /,
        *,
        host: str = "",
        run_id: str | None = None,
        besides: Collection[str] = (),
    ) -> RunRow | None:
        """Take the lease on the run in these queues that has been due longest, or return None if no run can be taken.

        Returns the run's previous row, with the new counts of legs and deaths. Runs that are pinned to a host other
        than `host` are left alone. So are the runs in `besides`, which this process still executes, although another
        process may have taken them over.

        With `run_id`, only that run is considered. If it can't be taken, but has no owner and is not over, its count of legs
        increases all the same, so that its next leg has a new number. Raises `RunUnknown` if there is no such run.
        """
        ...

    async def due(
        self, queues: Sequence[str] | None = None, /, *, host: str | None = None, limit: int = 100
    ) -> Sequence[RunRow]:
        """Return the runs that workers may take now, longest due first. None stands for any queue, and for any host."""
        ...

    async def wake(self, run_id: str, /, at: float | None = None) -> None:
        """Make a run due at the time `at`, or now. Does nothing if another process owns the run or the run is over.

        If this process owns the run, no worker takes it before this process has left it. Raises `RunUnknown` if there is no
        such run.
        """
        ...

    async def adopt(self, run_id: str, queue: str, /) -> None:
        """Move a run to a different queue, so that a different version of its code continues it.

        Raises `RunUnknown` if there is no such run.
        """
        ...

    async def cancel(self, run_id: str, outcome: bytes, /) -> bool:
        """Cancel a queued run, and record this outcome. Returns False if the run is not queued, or if a process holds its lease.

        The run's lease is not taken, so this works even while a worker has another run of the session. Raises `RunUnknown`
        if there is no such run.
        """
        ...

    async def signalled(self) -> Sequence[str]:
        """Return the ids of the runs that this process owns and that have signals: a request to cancel them, or messages."""
        ...

    def changes(self) -> int | None:
        """Return a number that changes whenever another process has changed the journal; None if only the database could tell."""
        ...

    async def wait(self, seconds: float, /) -> None:
        """Wait until the journal may have changed, but at most this many seconds."""
        ...

    async def announce(self, worker: WorkerRow, /, *, seconds: float) -> None:
        """Record, for this many seconds, that this process is a worker. With 0 seconds, remove the record."""
        ...

    async def workers(self) -> Sequence[WorkerRow]:
        """Return the workers that are alive."""
        ...


T = TypeVar("T")

Check = Callable[[Any], object]
"""A function that raises `ToolValidationError` if a value is invalid."""
Mask = Callable[[Any], Any]
"""A function that returns a value as plain JSON with its secrets masked."""


Choose = Callable[[Sequence[QueuedMessage]], tuple[Sequence[str], Entry] | None]
"""A function that chooses which messages are told. It returns their ids and the entry that records it."""


class Runs(Protocol):
    """Runs and the leases on them. One run at a time works on a session: it has the session's turn while its lease is held."""

    async def begin(self, run: RunRecord, /, *, followed: SessionTurn | None = None) -> SessionTurn:
        """Record a new run, take its lease and its session's next turn, and return that turn.

        If the id is that of a queued run that this process has taken, that run begins with this record, and keeps its request.

        `followed` is the last turn that the session in memory includes; None if it includes none. Raises `RunError` if the id
        is in use, `SessionBusy` while another run has the turn, and `SessionOutdated` if there was a turn since.
        """
        ...

    async def turn(self, session_id: str, principal: str, /) -> SessionTurn | None:
        """Return the current or last turn of a principal's session, which is loaded next; None if it has had none."""
        ...

    async def take(self, run_id: str, /, *, turn: TakenTurn = "new") -> RunRow:
        """Take the lease of a run, to resume it. Returns the run's previous row, with the new counts of legs and deaths.

        A run that is not over gets its session's next turn. `"same"` excludes other runs too, but leaves sessions in memory
        up to date, and `"none"` leaves the turn to the run that has it.

        Raises `RunUnknown` if there is no such run, `RunBusy` while another process holds it, and `SessionBusy` while a
        different run has the turn.
        """
        ...

    async def keep(self, *run_ids: str) -> Mapping[str, int | HandrailError]:
        """Renew the leases of several runs. For each run, return its signals, such as `CANCEL`, or an error.

        The error is `RunBusy` if this process does not own the run, `RunUnknown` if there is no such run, and `JournalAltered`
        if its record was altered. The other runs are renewed nevertheless. It is `JournalUpgraded`, for every run, if the journal
        was upgraded and this version may not write to it any more.
        """
        ...

    async def stop(self, run_id: str, /) -> None:
        """Ask the owner of a run to cancel it. The owner's next `keep` returns `CANCEL` for the run.

        Raises `RunUnknown` if there is no such run.
        """
        ...

    async def leave(
        self,
        run_id: str,
        status: RunStatus,
        outcome: bytes = b"",
        /,
        *,
        due_at: float | None = None,
        all_told: bool = False,
    ) -> None:
        """Release the lease and record the run's status. If the run is over, its open questions are deleted.

        Raises `RunBusy` if this process does not own the run, and `RunUnknown` if there is no such run.

        With `all_told`, a run that would be over raises `MessagesWaiting` instead if messages wait for it.

        A request to cancel the run stays until the run is over, or until another process resumes it with `take`.

        A submitted run that is not over is due for a worker at `due_at`, or earlier if one of its questions is answered or
        somebody wakes it. Without `due_at`, a `queued` run is due at once. If somebody has asked to cancel the run, it is due
        within a second.
        """
        ...

    async def get(self, run_id: str, /) -> RunRow:
        """Return the current row of a run. Raises `RunUnknown` if there is no such run."""
        ...

    async def list(
        self,
        *,
        session_id: str | None = None,
        principal: str | None = None,
        limit: int = 100,
        before: Mark | None = None,
    ) -> Sequence[RunRow]:
        """Return a page of runs, newest first. To get the next page, pass the mark of this page's last record as `before`.

        With `session_id`, return all runs of that session, oldest first, or only the oldest if `limit` is 1. With
        `principal`, return only that principal's runs. Runs whose rows were altered are left out.
        """
        ...

    async def sessions(
        self, principal: str, /, *, limit: int = 100, before: Mark | None = None
    ) -> Sequence[SessionRow]:
        """Return a page of a principal's sessions, most recently changed first.

        To get the next page, pass the mark of this page's last session as `before`.
        """
        ...

    async def add(self, copy: RunCopy, /) -> None:
        """Record a copy of a run, without an owner. Raises `RunError` if the id is in use.

        A fork names its source, which is verified first; any other copy is marked as imported and unverified.
        """
        ...

    async def verify(self, run_id: str | None = None, /) -> Verification:
        """Check a run and its session, or the whole journal, for changes made by anything other than Handrail.

        Raises `RunUnknown` if there is no such run, and `JournalAltered` if the run's row was altered. `take` makes the same
        check, and so does `add` for the source of a fork. Methods that return records for a resume, an answer or an undo
        check at least the run. All of these raise the first `JournalAltered`.
        """
        ...

    async def forget(
        self, run_ids: Sequence[str], /, *, finished: bool = False, dry: bool = False
    ) -> Sequence[str]:
        """Delete these runs with everything recorded for them, and the decisions of sessions that then have no run.

        With `finished`, a session is left alone unless these are all its runs, each of them is over, has no owner and nothing
        left to apply, and none has begun a background run that is not over. A session from which something else has removed a run is
        left alone too, since deleting it would hide that. Returns the ids of the deleted runs or, with `dry`, of those
        that would be deleted.
        """
        ...


class Calls(Protocol):
    """The record of what happened in runs: committed calls, and entries for everything else.

    A unit that changes files is recorded by `commit` before any file changes, and is then either
    `applied` or taken back by `void`. After a crash, recovery finishes a unit that is neither.
    """

    async def commit(self, unit: CommitUnit, /) -> None:
        """Record everything that one call changed, atomically."""
        ...

    def commit_now(self, unit: CommitUnit, /) -> bool:
        """Record a call that changes no files in the caller's thread, if this can't block.

        Returns False if nothing was recorded and `commit` must be awaited instead. Raises `DefinitionError` if a value in the call
        can't be recorded, and `RunBusy` if the run is recorded and this process does not own it.
        """
        ...

    def commit_soon(self, unit: CommitUnit, /) -> Pending[bool] | None:
        """Begin to record a call that changes no files. Returns None if `commit` must be awaited instead.

        The pending value is True once the call is recorded, and False if nothing was recorded and `commit` must be awaited
        instead. Waiting for it raises `RunBusy` if the run is recorded and this process does not own it. Raises
        `DefinitionError` at once if a value in the call can't be recorded.
        """
        ...

    async def applied(self, unit: CommitUnit, /) -> None:
        """Record that a unit's file changes have been applied."""
        ...

    async def void(self, unit: CommitUnit, /) -> None:
        """Take back a unit whose files could not be changed. It then counts as never committed. Does nothing if it was applied."""
        ...

    async def unapplied(self) -> Sequence[CommitUnit]:
        """Return the units of all runs that still have to be applied, in order.

        Units that this process is applying are left out, and so are those of runs that were altered or that another live
        process owns.
        """
        ...

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        """Return the units of a run that are not void, in order."""
        ...

    async def load_session(self, session_id: str, /) -> Sequence[CommitUnit]:
        """Return the units of a session that are not void, in order."""
        ...

    async def history(self, session_id: str, /) -> Sequence[tuple[str, CommitUnit | Entry]]:
        """Return what `load_session` returns and the `entries` of the session's runs, in the order in which all were recorded.

        Each comes with the id of its run.
        """
        ...

    async def later(self, unit: CommitUnit, /) -> Sequence[CommitUnit]:
        """Return the units that were committed after this one, in any run, and are neither void nor undone, in order."""
        ...

    async def note(self, run_id: str, entry: Entry, /, *, from_outside: bool = False) -> None:
        """Record an entry in a run that this process owns; with `from_outside`, in a run whose lease no process holds.

        Raises `RunBusy` for any other run, and `RunUnknown` if there is no such run.
        """
        ...

    async def entries(self, run_id: str, /) -> Sequence[Entry]:
        """Return the newest entry of each kind and key in a run, in the order in which they were recorded."""
        ...

    async def marks(self, session_id: str, /) -> Sequence[tuple[str, Entry]]:
        """Return the newest `undone` and the newest `told` entry for each key in the runs of a session, each with its run's id."""
        ...


class Steps(Protocol):
    """Steps that each succeed at most once."""

    async def run(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        """Run `function`, or return its recorded value if it has already succeeded for this key.

        The key is reserved before the function runs and settled afterwards. If the function fails, a reservation that this
        call made is dropped. If the function is cancelled or its process ends, the reservation stays. The next call with this
        key then calls `unsettled` instead of the function, and settles the key with its value. Without `unsettled`, it runs the
        function again.
        """
        ...

    async def load(self, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        """Return the key and the settled value of each of a run's steps. The value is None if the outcome is unknown."""
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
        """Record a question, put it to the asker, and wait for its answer. A recorded answer that is still valid is returned at once.

        A question that was asked before keeps its expiry. If its time is over, it has timed out.
        The answer may come from the asker or through `answer`. If nobody answers, the returned answer's outcome says why.
        An answer whose value `check` rejects is refused. An answer with secrets is recorded as `mask` returns it, so if the
        question is asked again, it needs a new answer.
        """
        ...

    def answer(self, answer: Answer, /) -> None:
        """Accept an answer. The first one wins and a repeat is harmless; anything else raises `AnswerRefused`.

        The journal's clock decides, in the transaction that records the answer, whether it is in time. The bytes of its attachments
        are recorded in the same transaction.

        Secrets are not recorded. So an answer that may contain one is refused if the asker is not waiting in this process,
        unless it repeats the recorded answer.
        """
        ...

    async def open(self, run_id: str | None = None, /, *, principal: str | None = None) -> Sequence[Question]:
        """Return the open questions of one run, or of all runs, oldest first. With `principal`, return only those to that principal.

        People decide by what they are shown, so each question is returned exactly as it was recorded. If the run of a question
        was altered, raises `JournalAltered` or, without `run_id`, leaves out the questions of that run.
        """
        ...

    async def history(self, run_id: str, /) -> Sequence[QuestionRecord]:
        """Return the open, answered, declined and expired questions of a run, oldest first."""
        ...

    async def withdraw(self, question_id: str, /) -> None:
        """Delete a question if it has no answer."""
        ...

    async def withdraw_all(self, prefix: str, /) -> None:
        """Delete every question without an answer whose id starts with `prefix`."""
        ...


class Votes(Protocol):
    """People's votes on questions that quorums decide."""

    async def cast(self, run_id: str, vote: Vote, /) -> Sequence[Vote]:
        """Record a vote, and return all votes on the question. Casting the same vote twice is harmless.

        Raises `AnswerRefused` if the run did not ask exactly this question, or if the person has voted differently on
        it with the same account, and `JournalAltered` if the run was altered.
        """
        ...

    async def on(self, run_id: str, question_id: str, digest: str, /) -> Sequence[Vote]:
        """Return the votes on exactly this question, oldest first."""
        ...


class Messages(Protocol):
    """Messages that are sent to runs while they work. The principal of a run sends them, edits them and withdraws them."""

    async def send(self, run_id: str, message: QueuedMessage, /) -> RunStatus:
        """Accept a message for a run, and return the run's status. Sending the same message again is harmless.

        Raises `MessageRefused` if the run is over or another principal's, or if the id is in use, and `RunUnknown` if there
        is no such run.
        """
        ...

    async def edit(self, run_id: str, message: QueuedMessage, /) -> None:
        """Replace a message that waits with this one of the same id, which may be `withdrawn`.

        Raises `MessageRefused` if there is no such message, or if it was told or withdrawn, and `RunUnknown` if there is no such run.
        """
        ...

    async def deliver(self, run_id: str, choose: Choose, /) -> None:
        """Record what the model of a run of this process is told.

        `choose` gets the messages that wait, in the order in which they were accepted. It returns the ids of those that are told and
        the entry that records it, or None if nothing is told. The choice and the record are one transaction. Raises `RunBusy` if this
        process does not own the run.
        """
        ...

    async def list(self, run_id: str, /) -> Sequence[QueuedMessage]:
        """Return the messages that were sent to a run, in the order in which they were accepted."""
        ...


class Outbox(Protocol):
    """What each receiver of notifications was told, and is being told, in a form that only the notifier reads.

    A receiver is a digest of its address, so no address is recorded here.
    """

    async def read(self, receivers: Collection[str], /) -> Mapping[str, bytes]:
        """Return the states of these receivers. One that has none, or whose state was altered, is left out."""
        ...

    async def replace(self, receiver: str, before: bytes, after: bytes, /) -> bool:
        """Replace a receiver's state, which is b"" if it has none. Returns False, and changes nothing, if it is not `before`."""
        ...


class Decisions(Protocol):
    """Decisions that apply to whole sessions. They outlive the runs in which they were made."""

    def write(self, decision: Decision, /, *, run_id: str = "") -> None:
        """Record a decision, synchronously, from any thread. Recording it twice is harmless.

        `run_id` is the run in which the decision was made. Raises `RunBusy` if that run is recorded and this process does not own it.
        """
        ...

    async def read(self, session_id: str, principal: str, /) -> Sequence[Decision]:
        """Return a principal's decisions in a session, in order."""
        ...


class Tickets(Protocol):
    """Tickets issued by calls, and the results deposited for them.

    Only the owner of a run issues and closes tickets. A process that redeems a ticket claims it, does the work,
    and deposits the result for the owner to take. `claim` and `deposit` raise `TicketError` if the call no longer waits.
    """

    def issue(self, run_id: str, place: str, text: str, /) -> str:
        """Record a ticket, synchronously. Returns the text that was first issued at this place."""
        ...

    async def claim(self, run_id: str, place: str, by: str, again: bool, /) -> bytes:
        """Claim a ticket to redeem it, or renew the claim. Returns the earlier deposit, or b"" if there is none.

        Raises `TicketError` while another process has the claim. If an earlier redemption was cut short, its outcome is
        unknown: this raises `OutcomeUnknown`, unless the ticket may be redeemed `again`.
        """
        ...

    async def release(self, run_id: str, place: str, by: str, /) -> None:
        """Give up a claim before any work was done, so that another process may claim the ticket."""
        ...

    async def deposit(self, run_id: str, place: str, by: str, body: bytes, /) -> None:
        """Record the result for a claimed ticket. Raises `TicketError` unless `by` still has the claim."""
        ...

    async def close(self, run_id: str, places: Sequence[str], /) -> Mapping[str, bytes]:
        """Stop accepting deposits at these places. Returns the deposits by place; b"" for a claim without a deposit.

        Places that nobody has claimed are left out.
        """
        ...


class Spending(Protocol):
    """What is spent in windows, such as a day of a principal, by the runs of all processes.

    An amount is reserved before it is spent, and the actual amount replaces it afterwards. What a process had reserved when it was
    killed stays counted, because it may have been spent.
    """

    async def reserve(
        self, id: str, amounts: Amounts, caps: Mapping[SpendWindow, Amounts], /
    ) -> SpendState | None:
        """Reserve amounts in all of these windows, in one transaction, and return None.

        If less than that is left of a cap, nothing is reserved, and the state of its window is returned.
        """
        ...

    async def settle(
        self, id: str, amounts: Amounts, warnings: Mapping[SpendWindow, Amounts], /
    ) -> Sequence[SpendState]:
        """Count the actual amounts instead of those that were reserved in these windows. Doing it twice is harmless.

        Returns the windows in which more than these `warnings`, and what the cap was raised by, has now been spent for the
        first time since the last raise.
        """
        ...

    async def add(self, window: SpendWindow, raised: SpendRaise, /) -> SpendState:
        """Record that the cap of a window is raised, and return the new state. Recording it twice is harmless."""
        ...

    async def get(self, window: SpendWindow, /) -> SpendState:
        """Return the state of a window. Raises `JournalAltered` if its row was altered or removed."""
        ...

    async def list(self, *, since: float = 0.0) -> Sequence[SpendState]:
        """Return the windows that end after `since`, in seconds since 1970, oldest first."""
        ...

    async def forget(self, before: float, /) -> None:
        """Delete the windows that ended before this time, with the raises of their caps: the oldest ones, and a limited number at once."""
        ...


class Blobs(Protocol):
    """Bytes that are stored once, named by their SHA-256 digest, and kept as long as a run or a workspace refers to them."""

    async def put(self, data: bytes, /, *, run_id: str) -> str:
        """Store bytes for a run that this process owns, and return their digest.

        Bytes that are already stored are not stored again.
        """
        ...

    async def get(self, digest: str, /) -> bytes:
        """Return the bytes with this digest.

        Raises `BlobNotFoundError` if there are none, and `JournalAltered` if they were changed or removed.
        """
        ...

    async def has(self, digest: str, /) -> bool:
        """Return whether there are bytes with this digest."""
        ...

    async def list(self, run_id: str, /) -> Sequence[str]:
        """Return the digests that a run refers to, sorted. The files of workspaces are not among them."""
        ...


class Upkeep(Protocol):
    """What keeps a journal small, and erases a person from it."""

    async def holdings(self, principal: str, /) -> Holdings:
        """Return what the journal holds of a person. Altered runs are included."""
        ...

    async def erase(self, principal: str, /) -> Holdings:
        """Delete a person's runs, sessions, decisions and those workspaces that only they used, atomically.

        Returns what was held. That something was erased stays recorded, under a keyed digest of the person's name. The chains in
        which their runs and sessions were listed are verified, and then written again without them. Raises `ErasureRefused`, and
        changes nothing, if one of their runs is not over, a process has it, or a call's file changes are not applied. Raises
        `JournalAltered` if one of these chains was altered.
        """
        ...

    async def compact(self) -> bool:
        """Rewrite the journal's file, so that it has no bytes of deleted records, and empty its log.

        Returns False if another process that reads kept the log from being emptied. Does nothing for a database. Raises
        `JournalError` if the disk is full or another process writes all the time.
        """
        ...

    async def is_due(self, duty: str, every: float, /) -> bool:
        """Return whether this process is to do a periodic duty now. One process gets True in `every` seconds."""
        ...


class Workspaces(Protocol):
    """Named trees of files, each at the version that the last commit or undo left.

    One run at a time has a workspace. `Calls.commit` records a call and makes its changes to the workspace atomically. It
    raises `WorkspaceTakenError` if this process no longer has the workspace for the call's run. Files are stored beforehand,
    as blobs.
    """

    async def acquire(self, name: str, run_id: str, /) -> WorkspaceRow:
        """Give a workspace, which is created if it does not exist, to a run of this process.

        Raises `WorkspaceBusy` while another run has it, and `RunBusy` if the run is recorded and this process does not own it. A
        submitted run that was interrupted keeps its workspace until it is over, or waits for an answer or for its due time. A
        run that was not submitted loses its workspace when its process ends.
        """
        ...

    async def release(self, name: str, run_id: str, /) -> None:
        """Release a workspace. Other runs can then take it, unless a worker will continue this run.

        Does nothing if the run or this process does not have the workspace.
        """
        ...

    async def get(self, name: str, /) -> WorkspaceRow | None:
        """Return the row of a workspace, or None if no workspace has this name."""
        ...

    async def list(self) -> Sequence[WorkspaceLine]:
        """Return all workspaces, sorted by name. An altered workspace is listed too, with what was altered."""
        ...

    async def holders(self) -> Mapping[str, str]:
        """Return the ids of the runs that have workspaces, by workspace. Altered workspaces, and those that a new run could take, are left out."""
        ...

    async def files(self, name: str, /, *, since: int = 0) -> Mapping[str, WorkspaceFile | None]:
        """Return the paths that changed after the version `since`, with their states; None for a removed path.

        Raises `JournalAltered` if the row of the workspace or of one of these paths was altered or, with `since=0`, if rows of
        paths were added, removed or set back to an earlier state.
        """
        ...

    async def has(self, digests: Collection[str], /, *, run_id: str) -> Collection[str]:
        """Return the digests whose bytes are stored. From now on, these bytes are kept for this run.

        Raises `RunBusy` if the run is recorded and this process does not own it.
        """
        ...

    async def put(self, blobs: Sequence[bytes], /, *, run_id: str) -> None:
        """Store the bytes of files for a run that this process owns. Bytes that are already stored are not stored again."""
        ...

    async def fetch(self, digests: Collection[str], /) -> Mapping[str, bytes]:
        """Return the bytes with these digests.

        Raises `BlobNotFoundError` if some are not stored, and `JournalAltered` if some were changed.
        """
        ...

    async def undo(self, undone: Sequence[tuple[CommitUnit, Entry]], /) -> None:
        """Reverse the changes of a run's units to workspaces, in the given order, and record each unit's entry in the run. All or nothing.

        Raises `UndoRefused` if a path is no longer as the unit left it or a folder to remove has other files, `WorkspaceBusy`
        while a different run has the workspace, and `RunBusy` if this process does not own the unit's run.
        """
        ...


@runtime_checkable
class Journal(Protocol):
    """The durable record of runs, with a property for each role."""

    @property
    def id(self) -> str:
        """The id of the journal. It is the same each time the journal is opened."""
        ...

    @property
    def path(self) -> str:
        """The path of the journal's file, or the URL of its database without the password; "" or ":memory:" for neither."""
        ...

    @property
    def key(self) -> bytes:
        """The key that signs records, questions and tickets. It is the same each time the journal is opened."""
        ...

    @property
    def owner(self) -> str:
        """The name that identifies this process as an owner of leases."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock that decides when leases, questions and tickets end. For a shared database, it is the database's."""
        ...

    @property
    def lease(self) -> float:
        """How many seconds a process keeps its runs without renewing its lease."""
        ...

    @property
    def synced(self) -> bool:
        """Whether the files that a call changes are synced to disk, so that they survive a power failure as its record does."""
        ...

    @property
    def runs(self) -> Runs: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def calls(self) -> Calls: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def questions(self) -> Questions: ...
    @property
    def decisions(self) -> Decisions: ...
    @property
    def votes(self) -> Votes: ...
    @property
    def outbox(self) -> Outbox: ...
    @property
    def messages(self) -> Messages: ...
    @property
    def tickets(self) -> Tickets: ...
    @property
    def spending(self) -> Spending: ...
    @property
    def blobs(self) -> Blobs: ...
    @property
    def workspaces(self) -> Workspaces: ...
    @property
    def upkeep(self) -> Upkeep: ...
    @property
    def broadcasts(self) -> Broadcasts | None:
        """The live output of runs, or None if other processes can't watch them. Only a journal in PostgreSQL has it."""
        ...

    @property
    def accounts(self) -> Accounts | None:
        """The accounts of servers' users, or None if each server has a file for them. Only a journal in PostgreSQL has them."""
        ...


class Watcher(msgspec.Struct, frozen=True):
    """A process in which somebody watches a session."""

    id: str
    joins: int
    """How many times somebody in this process has joined. After each join, an active run broadcasts its state so far."""


class Batch(msgspec.Struct, frozen=True):
    """The output of one leg of a run during a short interval."""

    position: int
    """Orders the batches of a session."""
    run_id: str
    leg: int
    number: int
    """1-based number of this batch in its leg. A gap in the numbers means that output was lost or left out."""
    body: bytes


class Broadcasts(Protocol):
    """Batches of output, by session. A batch is kept until `sweep` finds it old, or until the session's last watcher leaves.

    A broadcast is not a record, and can be lost. A process that misses one reads the journal's records instead.
    """

    async def watch(self, watcher: Watcher, session_id: str, /, *, seconds: float) -> None:
        """Record that a process watches a session for the next `seconds`, and notify every listener."""
        ...

    async def leave(self, watcher_id: str, session_id: str, /) -> None:
        """Record that a process no longer watches a session, and notify every listener.

        If no other process watches the session, its batches are deleted.
        """
        ...

    async def watchers(self, session_ids: Collection[str], /) -> Mapping[str, Sequence[Watcher]]:
        """Return the watchers of each of these sessions. A session that nobody watches is left out."""
        ...

    async def add(self, session_id: str, run_id: str, leg: int, number: int, body: bytes, /) -> None:
        """Add a batch, and notify every listener."""
        ...

    async def last(self, session_id: str, /) -> int:
        """Return the position of a session's newest batch, or 0 if it has none."""
        ...

    async def read(self, session_id: str, after: int, /) -> Sequence[Batch]:
        """Return the batches of a session after a position, in order. Batches that were altered are left out."""
        ...

    async def sweep(self) -> None:
        """Delete old batches, and watchers whose time ended a while ago."""
        ...

    async def listen(self, heard: Callable[[str, bool], None], /) -> Callable[[], None]:
        """Call `heard(session_id, True)` when a session's watchers have changed, and `heard(session_id, False)` for a new batch.

        The id is "" if notices may have been missed. `heard` is called in another thread. Returns a function that
        unsubscribes it.
        """
        ...


class Account(msgspec.Struct, frozen=True):
    """The account of a user. It contains no usable secret of theirs."""

    name: str
    roles: tuple[str, ...]
    salt: bytes
    hash: bytes
    added_at: float
    """When the user was added, as a timestamp. It tells the account from an earlier one of the same name."""
    removed_at: float | None = None
    """When the user was removed, as a timestamp; None if they were not."""
    notify: tuple[str, ...] = ()
    """The URLs at which the user is told about questions. They may contain secrets, so they are shown to nobody."""


class SignIn(msgspec.Struct, frozen=True):
    """A session that began with a sign-in. It contains digests of its secrets only."""

    id: str
    name: str
    host: str
    issuer: str
    address: str
    began_at: float
    ends_at: float
    secret: bytes
    key: bytes


class Note(msgspec.Struct, frozen=True):
    """An entry of the audit log."""

    at: float
    who: str
    action: str
    address: str
    details: str
    """JSON."""

    def is_about(self, name: str) -> bool:
        """Return whether the entry is by this person, or names them."""
        return name == self.who or name in msgspec.json.decode(self.details, type=dict[str, Any]).values()


class Accounts(Protocol):
    """The accounts of users, their sign-ins, and the audit log. Thread-safe.

    What this process has changed is read at once. A change by another process is read after a moment, and at the latest after
    `refresh`. Methods that read raise `JournalError` if the database does not answer for a while.
    """

    def add(self, account: Account, /) -> bool:
        """Add an account. Returns False, and adds nothing, if there is one of this name. No two accounts have the same name and time."""
        ...

    def tell_at(self, name: str, urls: tuple[str, ...], /) -> bool:
        """Replace the URLs at which a user is told about questions. Returns False if there is no user of this name."""
        ...

    def remove(self, name: str, /) -> bool:
        """Remove an account and end its sessions, atomically. Returns False if there is none of this name."""
        ...

    def all(self) -> Mapping[str, Account]:
        """Return the accounts by name, sorted. A removed one may be among them."""
        ...

    def find(self, name: str, /) -> Account | None:
        """Return the account of this name, which may be a removed one; None if there is none."""
        ...

    def begin(self, sign_in: SignIn, /) -> None:
        """Begin a session, and forget those that have ended."""
        ...

    def session(self, *, secret: bytes = b"", id: str = "") -> SignIn | None:
        """Return the session with the secret of this digest, or with this id; None if there is none. It may have ended."""
        ...

    def sessions(self) -> Sequence[SignIn]:
        """Return all sessions, oldest first. Some may have ended."""
        ...

    def end(self, *, id: str | None = None, name: str | None = None) -> int:
        """End the session with this id, all sessions of this name, or all sessions. Returns how many were deleted."""
        ...

    def note(self, note: Note, /) -> None:
        """Append an entry to the audit log."""
        ...

    def notes(self, *, who: str | None, after: int, limit: int | None) -> Sequence[tuple[int, Note]]:
        """Return the entries numbered above `after`, oldest first, each with its number. With `who`, return only this person's."""
        ...

    def erase(self, name: str, note: Note, /) -> int:
        """Delete the account of this name, its sessions, and the entries of the audit log by this person or naming them, atomically.

        If there was anything, `note` is added to the audit log. Returns the number of deleted entries.
        """
        ...

    def compact(self) -> bool:
        """Rewrite the file of the accounts, if they have one of their own, as `Upkeep.compact` does for a journal."""
        ...

    def refresh(self) -> None:
        """Forget what was read, so that what follows reads the newest accounts and sessions."""
        ...

    def generation(self) -> tuple[Any, ...]:
        """Return a value that changes whenever accounts or sessions change, in any process. It is cheap to read."""
        ...

    def close(self) -> None:
        """Close the file, if the accounts have one of their own."""
        ...
