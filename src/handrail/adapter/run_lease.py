"""Run lease: acquire, renew, release."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from datetime import UTC, datetime

import msgspec

from handrail.clock import Clock
from handrail.deadline import Deadline
from handrail.dispatch.frame import Frame
from handrail.errors import JournalError, RunBusy
from handrail.journals import Journal
from handrail.place import RUN
from handrail.records import Entry, RunRow
from handrail.replay.log import RunLog

log = logging.getLogger("handrail.adapter")

STOPPED = "cancelled by somebody else"
"""The reason for a cancellation that another process requested."""

_held: set[tuple[int, str]] = set()
_keepers: dict[tuple[int, str], Callable[[], Awaitable[object]]] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def acquire_in_process(journal: Journal, run_id: str) -> Generator[None]:
    """Hold a run in this process. Raises `RunBusy` if it is already held here.

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
async def acquire_run(journal: Journal, run_id: str) -> AsyncGenerator[RunRow]:
    """Acquire a run to resume it. Raises `RunBusy` if it is held in this process or by another one.

    On exit it is released unchanged, unless it has ended or was parked meanwhile.
    """
    with acquire_in_process(journal, run_id):
        row = await journal.runs.take(run_id)
        try:
            yield row
        finally:
            with contextlib.suppress(RunBusy, JournalError):  # already released, or the journal failed
                await asyncio.shield(
                    asyncio.ensure_future(journal.runs.leave(run_id, row.status, row.outcome))
                )


@contextlib.asynccontextmanager
async def leased(journal: Journal, frame: Frame) -> AsyncGenerator[None]:
    """Renew the run's lease during the block, and record when its deadline is paused or moved.

    The run is cancelled if somebody asks for that. If another process takes it over, it stops here without
    recording an end. It also records no end if the block fails because the connection to the journal is lost. In both
    cases the run can be resumed, as if its process had ended.
    """
    run_id = frame.run_context.run_id
    deadline = frame.deadline
    if deadline is not None and deadline.pauses_for_people and frame.log.resumed:
        await note_deadline(journal, run_id, deadline, frame.clock, paused=False)  # no longer paused
    noted = None if deadline is None else deadline.at

    async def renew() -> bool:
        """Renew the lease, and return whether the run goes on."""
        nonlocal noted
        try:
            if await journal.runs.keep(run_id):
                frame.cancellation.cancel(STOPPED)
                return False
            if deadline is not None and (deadline.paused or deadline.at != noted):
                noted = deadline.at
                await note_deadline(journal, run_id, deadline, frame.clock, paused=deadline.paused)
        except RunBusy:
            frame.log.close()
            frame.cancellation.cancel("another process has taken over the run")
            return False
        except JournalError:
            log.warning("the lease of run %s could not be renewed; will retry", run_id, exc_info=True)
        return True

    async def keep() -> None:
        while True:
            await asyncio.sleep(journal.lease / 10)
            if not await renew():
                return

    keeper = asyncio.get_running_loop().create_task(keep())
    _keepers[id(journal), run_id] = renew
    try:
        yield
    except JournalError as error:
        if error.is_lost:
            frame.log.close()
        raise
    finally:
        del _keepers[id(journal), run_id]
        keeper.cancel()


async def renew_now(journal: Journal, run_id: str) -> None:
    """Renew a run's lease now, so that the run is cancelled at once if somebody has requested that.

    Does nothing unless this process executes the run.
    """
    renew = _keepers.get((id(journal), run_id))
    if renew is not None:
        await renew()


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
