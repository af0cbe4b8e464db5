"""`ProcrastinateDispatcher`: procrastinate starts the legs, one job for each, from its table in PostgreSQL.

Needs `pip install 'handrail[procrastinate]'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from handrail.fleet.dispatcher import Execute, missing_engine, next_leg, queue_name, run_of_leg, sealed_leg
from handrail.journal.protocol import Journal
from handrail.journal.records import RunRow

try:
    import psycopg
    from procrastinate import App, PsycopgConnector
    from procrastinate.exceptions import AlreadyEnqueued, ConnectorException
except ModuleNotFoundError as error:
    raise missing_engine("procrastinate", error) from None

log = logging.getLogger("handrail.fleet")

_TASK = "handrail.leg"
_PAUSE = 0.5
"""Seconds to wait before a lost connection to the database is opened again."""
_WORKER_SECONDS = 5.0
"""Seconds between procrastinate's polls of its table. NOTIFY wakes it earlier."""


class ProcrastinateDispatcher:
    """Starts legs of a journal's runs with procrastinate. Its tables are in the database at `url`, and are created if needed.

    A job that was not written with the journal's key starts nothing.
    """

    def __init__(self, url: str, journal: Journal, *, poll: float = _WORKER_SECONDS) -> None:
        self._journal = journal
        self._poll = poll
        self._app = App(connector=PsycopgConnector(conninfo=url))
        self._execute: Execute | None = None
        self._ready = asyncio.Event()
        self._app.task(name=_TASK)(self._leg)

    async def _leg(self, leg: object) -> None:
        assert self._execute is not None, "jobs start while the worker works"
        run_id = run_of_leg(leg, self._journal)
        if run_id is not None:
            await self._execute(run_id)

    async def submit(self, run: RunRow, /, at: float | None = None) -> None:
        """Do nothing, because workers look in the journal for due runs and wake them."""

    async def wake(self, run: RunRow, /) -> None:
        """Add a job for the next leg, unless one is already waiting. Waits until `work` has a connection.

        A lost job does not block later legs, because each leg has its own lock.
        """
        await self._ready.wait()
        with contextlib.suppress(AlreadyEnqueued):
            task = self._app.configure_task(_TASK, queue=queue_name(run.queue), queueing_lock=next_leg(run))
            await task.defer_async(leg=sealed_leg(run, self._journal))

    async def work(self, execute: Execute, queues: Sequence[str], limit: int, /) -> None:
        """Execute the legs that procrastinate starts, until cancelled.

        A lost connection to the database is opened again. If the first connection can't be opened, the error is raised.
        """
        self._execute = execute
        has_worked = False
        while True:
            try:
                async with self._app.open_async():
                    if not await self._app.check_connection_async():
                        with contextlib.suppress(
                            ConnectorException
                        ):  # a different worker has just created the tables
                            await self._app.schema_manager.apply_schema_async()
                    self._ready.set()
                    has_worked = True
                    await self._app.run_worker_async(
                        queues=[queue_name(queue) for queue in queues],
                        concurrency=limit,
                        fetch_job_polling_interval=self._poll,
                        install_signal_handlers=False,
                        delete_jobs="successful",
                    )
            except (ConnectorException, psycopg.Error):
                if not has_worked:
                    raise
                log.warning("the connection to procrastinate's database was lost; will retry", exc_info=True)
            finally:
                self._ready.clear()
            await asyncio.sleep(_PAUSE)
