"""`Queue`: the journal protocol for runs that wait for workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from handrail.records import RunRecord, RunRow, WorkerRow


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

    async def stopping(self) -> Sequence[str]:
        """Return the ids of the runs that this process owns and that somebody has asked to cancel."""
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
