"""Run lease: acquire, renew, release."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextvars import Context
from datetime import UTC, datetime

import msgspec

from handrail.clock import Clock
from handrail.concurrency.deadline import Deadline
from handrail.errors import HandrailError, JournalError, JournalUpgraded, PromptEvaluationError, RunBusy
from handrail.journal.protocol import Journal
from handrail.journal.records import CANCEL, MESSAGES, Entry, RunRow, TakenTurn
from handrail.journal.sql.leases import give_up
from handrail.run.mailbox import look
from handrail.run.place import RUN
from handrail.run.record.log import RunLog
from handrail.run.run import Run

log = logging.getLogger("handrail.run.adapter")

STOPPED = "cancelled by somebody else"
"""The reason for a cancellation that was requested through the journal."""


def stopped(run_id: str) -> PromptEvaluationError:
    """Return the error that a run raises if it was cancelled through the journal."""
    return PromptEvaluationError(f"run {run_id!r} was {STOPPED}", phase="cancelled", run_id=run_id)


_LOOK_SECONDS = 0.5
"""Seconds between two looks at whether another process has changed the journal, if that costs nothing."""

_held: set[tuple[int, str]] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def acquire_in_process(journal: Journal, run_id: str) -> Generator[None]:
    """Hold a run in this process. Raises `RunBusy` if it is already held with the same journal object.

    A lease excludes other processes; this excludes other tasks and threads.
    """
    mine = (id(journal), run_id)
    with _lock:
        if mine in _held:
            raise RunBusy(run_id, journal.owner)
        _held.add(mine)
    try:
        yield
    finally:
        with _lock:
            _held.discard(mine)


@contextlib.asynccontextmanager
async def acquire_run(journal: Journal, run_id: str, turn: TakenTurn = "new") -> AsyncGenerator[RunRow]:
    """Acquire a run to resume, cancel or undo it, and with it a turn of its session.

    On exit the run is released unchanged, unless it has ended or was parked meanwhile. Raises `RunBusy` if it is held in this
    process or by another one, and `SessionBusy` if it needs a turn and another run has it.
    """
    with acquire_in_process(journal, run_id):
        row = await journal.runs.take(run_id, turn=turn)
        try:
            yield row
        finally:
            left = journal.runs.leave(run_id, row.status, row.outcome, due_at=row.due_at)
            try:
                await asyncio.shield(asyncio.ensure_future(left))
            except RunBusy:
                pass  # already released
            except JournalError:
                give_up(
                    journal.owner
                )  # otherwise, this process could not acquire the run again before the lease ends


def is_executing(journal: Journal, run_id: str) -> bool:
    """Return whether this process has acquired a run with this journal object."""
    return (id(journal), run_id) in _held


@contextlib.asynccontextmanager
async def leased(journal: Journal, run: Run) -> AsyncGenerator[Renewal]:
    """Renew the run's lease during the block, and record its deadline whenever that is paused or moved.

    The run is cancelled if somebody asks for that, and looks for messages if it was sent some. If another process takes the run over,
    or the journal was upgraded and does not let this version write any more, the run stops in this process, and no end is recorded. Nor is an end recorded if the block fails because the connection to the journal is lost. In both cases
    the run can be resumed, as if its process had ended.
    """
    run_id = run.run_context.run_id
    deadline = run.deadline
    if deadline is not None and deadline.pauses_for_people and run.log.resumed:
        await note_deadline(journal, run_id, deadline, run.clock, paused=False)  # no longer paused
    keeper = _Keeper.of(journal, asyncio.get_running_loop())
    keeper.add(run_id, run)
    try:
        yield Renewal(keeper, run)
    except JournalError as error:
        if error.is_lost:
            run.log.close()
        raise
    finally:
        keeper.remove(run_id)


class _Kept:
    """A run whose lease is renewed, and the deadline that was last recorded for it."""

    __slots__ = ("noted", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.noted = None if run.deadline is None else run.deadline.at


class _Keeper:
    """Renews the leases of all runs that one event loop executes with one journal, all of them at once."""

    __slots__ = ("_journal", "_runs", "_task", "loop")

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._journal = journal
        self._runs: dict[str, _Kept] = {}
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, journal: Journal, loop: asyncio.AbstractEventLoop) -> _Keeper:
        """Return the keeper for a journal's runs on an event loop, and create it if there is none."""
        with _lock:
            known = _keepers.get(id(journal), ())
            for each in known:
                if each.loop is loop:
                    return each
            keeper = cls(journal, loop)
            _keepers[id(journal)] = (*known, keeper)
            return keeper

    def has(self, run_id: str) -> bool:
        return run_id in self._runs

    def add(self, run_id: str, run: Run) -> None:
        """Renew the lease of a run from now on."""
        self._runs[run_id] = _Kept(run)
        if self._task is None or self._task.done():
            # A run's context variables must not outlive it, so the task starts without any.
            self._task = self.loop.create_task(self._keep(), context=Context())

    def pause(self, run_id: str) -> None:
        """Do not renew the lease of a run until it is added again."""
        self._runs.pop(run_id, None)

    def remove(self, run_id: str) -> None:
        """Stop renewing the lease of a run."""
        self._runs.pop(run_id, None)
        if not self._runs and self._task is not None:
            with _lock:
                left = tuple(each for each in _keepers.pop(id(self._journal), ()) if each is not self)
                if left:
                    _keepers[id(self._journal)] = left
            task, self._task = self._task, None
            if not self.loop.is_closed():
                task.cancel()

    async def _keep(self) -> None:
        """Renew the leases again and again. In between, look for signals whenever another process has changed the journal."""
        queue, now = self._journal.queue, self.loop.time
        renewed_at, seen = now(), -1
        while True:
            left = renewed_at + self._journal.lease / 10 - now()
            await asyncio.sleep(max(0.0, left if seen is None else min(left, _LOOK_SECONDS)))
            try:
                before, seen = seen, queue.changes()
                if now() >= renewed_at + self._journal.lease / 10:
                    renewed_at = now()
                    await self.renew(list(self._runs))
                elif seen is not None and seen != before:
                    await self.renew(await queue.signalled())
            except Exception:
                log.exception("the leases of this process's runs could not be renewed; will retry")

    async def renew(self, run_ids: Sequence[str]) -> None:
        """Renew leases. Runs that were taken over or that should be cancelled are stopped."""
        asked = {run_id: self._runs[run_id] for run_id in run_ids if run_id in self._runs}
        if not asked:
            return
        try:
            found = await self._journal.runs.keep(*asked)
        except JournalError as error:
            log.log(
                error.retry_level,
                "the leases of %s could not be renewed; will retry",
                ", ".join(asked),
                exc_info=True,
            )
            return
        for run_id, signals in found.items():
            kept = asked[run_id]
            if self._runs.get(run_id) is not kept:
                continue  # the run has ended, and may have been resumed since
            if not await self._goes_on(run_id, kept, signals) and self._runs.get(run_id) is kept:
                del self._runs[run_id]

    async def _goes_on(self, run_id: str, kept: _Kept, signals: int | HandrailError) -> bool:
        """Act on what the journal said about a run. Returns whether the run goes on."""
        run, deadline = kept.run, kept.run.deadline
        if isinstance(signals, JournalError) and not isinstance(signals, JournalUpgraded):
            message = "the lease of run %s could not be renewed; will retry"
            log.log(signals.retry_level, message, run_id, exc_info=signals)
            return True
        if isinstance(signals, HandrailError):
            run.log.close()
            is_late = isinstance(signals, JournalUpgraded)
            run.cancellation.cancel(str(signals) if is_late else "another process has taken over the run")
            return False
        if signals & CANCEL:
            run.cancellation.cancel(STOPPED)
            return False
        if signals & MESSAGES or run.mailbox is not None:
            await look(run, self._journal.messages)
        if deadline is not None and (deadline.paused or deadline.at != kept.noted):
            kept.noted = deadline.at
            try:
                await note_deadline(self._journal, run_id, deadline, run.clock, paused=deadline.paused)
            except RunBusy as error:
                return await self._goes_on(run_id, kept, error)
            except JournalError as error:
                log.log(
                    error.retry_level,
                    "the deadline of run %s could not be recorded; will retry",
                    run_id,
                    exc_info=True,
                )
                kept.noted = None
        return True


class Renewal:
    """The renewal of a run's lease, which pauses while the run is about to end."""

    __slots__ = ("_keeper", "_run")

    def __init__(self, keeper: _Keeper, run: Run) -> None:
        self._keeper = keeper
        self._run = run

    def pause(self) -> None:
        self._keeper.pause(self._run.run_context.run_id)

    def resume(self) -> None:
        self._keeper.add(self._run.run_context.run_id, self._run)


_keepers: dict[int, tuple[_Keeper, ...]] = {}
"""The keepers of each journal, by the `id()` of its object: one for each event loop that executes runs with it."""


async def renew_now(journal: Journal, run_id: str) -> None:
    """Renew a run's lease now, so that the run is cancelled at once if somebody has requested that, and hears what it was sent.

    Does nothing unless this process executes the run.
    """
    for each in _keepers.get(id(journal), ()):
        if each.has(run_id):
            if each.loop is asyncio.get_running_loop():
                await each.renew([run_id])
            else:  # only its own loop may cancel the run
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(each.renew([run_id]), each.loop))


# --- deadlines that pause for people ------------------------------------------------------------------


class _Noted(msgspec.Struct, frozen=True):
    """The state of a deadline that can pause: its time, or the seconds left while it is paused."""

    at: float | None
    left: float | None


async def note_deadline(
    journal: Journal, run_id: str, deadline: Deadline, clock: Clock, *, paused: bool
) -> None:
    """Record the state of a deadline for a later resume."""
    noted = _Noted(None, deadline.remaining()) if paused else _Noted(deadline.at.timestamp(), None)
    entry = Entry("deadline", str(RUN), clock.now().timestamp(), msgspec.msgpack.encode(noted))
    await journal.calls.note(run_id, entry)


def deadline_after(
    at: float | None, pauses: bool, row: RunRow, run_log: RunLog, clock: Clock
) -> Deadline | None:
    """Return the deadline of a resumed run; None if it began without one.

    If the deadline pauses for people, it is moved by the time that they took to answer.
    """
    if at is None:
        return None
    if pauses:
        now = clock.now().timestamp()
        noted = run_log.find("deadline", RUN, _Noted)
        if noted is not None and noted.left is not None:
            at = now + noted.left
        elif noted is not None and noted.at is not None:
            at = noted.at
        elif row.status == "parked":
            at += now - row.changed_at
    return Deadline(datetime.fromtimestamp(at, UTC), clock=clock, pauses_for_people=pauses)
