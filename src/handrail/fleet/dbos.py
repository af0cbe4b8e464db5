"""`DbosDispatcher`: DBOS starts the legs, one workflow for each, on its own queues.

Needs `pip install 'handrail[dbos]'`. A workflow has no steps, because the journal records what happens in it. DBOS's queues,
rate limits, priorities, versions and dashboards apply to legs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.fleet.dispatcher import (
    Execute,
    leg_id,
    missing_engine,
    next_leg,
    queue_name,
    run_of_leg,
    sealed_leg,
)
from handrail.journal.protocol import Journal
from handrail.journal.records import RunRow

try:
    from dbos import DBOS, DBOSClient, EnqueueOptions, Serializer, SetWorkflowID
    from dbos._serialization import DefaultSerializer
except ModuleNotFoundError as error:
    raise missing_engine("dbos", error) from None

_NAME, _LEG = "handrail", "handrail.leg"
"""The names of the application and of its only workflow in DBOS."""
_VERSION = "handrail-1"
"""The application version for DBOS. It never changes, because each version of an app has its own queue."""


class _Legs(Serializer):
    """Stores the arguments of a leg, and the text of an exception, as JSON, and reads nothing else."""

    class _Stored(msgspec.Struct, forbid_unknown_fields=True):
        args: tuple[str, ...] = ()
        kwargs: dict[str, str] = {}
        error: str | None = None

    def name(self) -> str:
        return "handrail"

    def serialize(self, data: Any) -> str:
        stored = {"error": str(data)} if isinstance(data, BaseException) else data
        return msgspec.json.encode(msgspec.convert(stored or {}, self._Stored)).decode()

    def deserialize(self, serialized_data: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        stored = msgspec.json.decode(serialized_data, type=self._Stored)
        if stored.error is not None:
            return RuntimeError(stored.error)
        return {"args": stored.args, "kwargs": stored.kwargs}


def _refuse_pickle(cls: DefaultSerializer, serialized_data: str) -> Any:
    raise ValueError("pickled data from DBOS's tables is not read, because reading it could run code")


DefaultSerializer.deserialize = _refuse_pickle
"""Each row of DBOS's tables names the format in which it is read. Whatever `serializer` DBOS is given, a row could still name
its default format, which is pickle. So pickle is refused for all rows that this process reads."""


class DbosDispatcher:
    """Starts legs of a journal's runs with DBOS, which keeps its tables in the database at `url`.

    Only one dispatcher can work in a process. Once this module is imported, DBOS reads no pickled data in this process, and a
    workflow that was not enqueued with the journal's key starts nothing.

    - `poll`: seconds between DBOS's polls of its queues.
    """

    _current: ClassVar[DbosDispatcher | None] = None

    def __init__(self, url: str, journal: Journal, *, poll: float = 0.2, clock: Clock = SYSTEM_CLOCK) -> None:
        self._url = url
        self._journal = journal
        self._poll = poll
        self._clock = clock
        self._execute: Execute | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = asyncio.Event()
        self._threads = ThreadPoolExecutor(1, "handrail-dbos")
        self._begun: dict[str, str] = {}
        """The workflows that were already running when this process last woke their runs, by run id."""

    async def submit(self, run: RunRow, /, at: float | None = None) -> None:
        """Enqueue the first leg. With `at`, DBOS delays it until then.

        This also works in a process that is not a worker, and creates DBOS's tables if no worker has done so yet.
        """
        await self._in_thread(lambda: self._submit(run, at))

    def _submit(self, run: RunRow, at: float | None) -> None:
        options: EnqueueOptions = {
            "workflow_name": _LEG,
            "queue_name": queue_name(run.queue),
            "workflow_id": next_leg(run),
        }
        if at is not None:
            options["delay_seconds"] = max(0.0, at - self._clock.now().timestamp())
        if not self._ready.is_set():
            DBOS.migrate(self._url)
        client = DBOSClient(system_database_url=self._url, application_name=_NAME, serializer=_Legs())
        try:
            client.enqueue(options, sealed_leg(run, self._journal))
        finally:
            client.destroy()

    async def wake(self, run: RunRow, /) -> None:
        """Enqueue the next leg once DBOS is launched, unless it already waits in its queue or has just started.

        A lost leg is cancelled first, because DBOS counts it as running.
        """
        await self._ready.wait()
        await self._in_thread(lambda: self._wake(run))

    def _wake(self, run: RunRow) -> None:
        """Enqueue the next leg, unless it already waits in its queue or has just started.

        DBOS starts nothing twice under one id. So a leg that has ended without claiming its run is enqueued under a new id.
        A leg that this process finds running for the second time would have claimed its run by now, so the leg's process must
        be gone. The leg is cancelled, and enqueued under a new id.
        """
        if run.owner and run.legs:
            DBOS.cancel_workflow(leg_id(run, run.legs))
        leg, begun = next_leg(run), self._begun.pop(run.record.id, "")
        for attempt in itertools.count():
            id = f"{leg}.{attempt}" if attempt else leg
            found = DBOS.get_workflow_status(id)
            if found is None:
                with SetWorkflowID(id):
                    DBOS.enqueue_workflow(queue_name(run.queue), _leg, sealed_leg(run, self._journal))
                return
            if found.status == "PENDING":
                if begun != id:
                    self._begun[run.record.id] = id
                    return
                DBOS.cancel_workflow(id)
            elif found.status == "DELAYED":
                DBOS.cancel_workflow(id)  # delayed too long, because the submitting process's clock is behind
            elif found.status == "ENQUEUED":
                return

    def _in_thread(self, work: Callable[[], object]) -> Awaitable[object]:
        """Call DBOS in the dispatcher's own thread. On the event loop, DBOS would replace the loop's default executor."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def work(self, execute: Execute, queues: Sequence[str], limit: int, /) -> None:
        """Launch DBOS, execute the legs that it starts, and shut it down when cancelled.

        Raises `DefinitionError` if another dispatcher is at work in this process.
        """
        if DbosDispatcher._current is not None:
            raise DefinitionError(
                "this process already has a DbosDispatcher. Use one worker in each process."
            )
        DbosDispatcher._current = self
        self._execute, self._loop = execute, asyncio.get_running_loop()
        names = [queue_name(queue) for queue in queues]
        try:
            await self._in_thread(lambda: self._launch(names, limit))
            self._ready.set()
            await asyncio.Event().wait()
        finally:
            self._ready.clear()
            DbosDispatcher._current = None
            await asyncio.shield(self._in_thread(DBOS.destroy))

    def _launch(self, names: Sequence[str], limit: int) -> None:
        DBOS(
            config={
                "name": _NAME,
                "system_database_url": self._url,
                "application_version": _VERSION,
                # DBOS restarts the workflows of the executor with this name, and a new name has none. Handrail restarts
                # lost legs itself, once their leases expire.
                "executor_id": self._journal.owner,
                "log_level": "ERROR",
                "serializer": _Legs(),
            }
        )
        DBOS.listen_queues(list(names))
        DBOS.launch()
        for name in names:
            DBOS.register_queue(name, worker_concurrency=limit, polling_interval_sec=self._poll)

    async def execute_here(self, leg: object) -> None:
        """Execute a leg on the worker's event loop. DBOS runs workflows on a different one."""
        run_id = run_of_leg(leg, self._journal)
        if run_id is None:
            return
        assert self._execute is not None, "DBOS starts workflows while it is launched"
        assert self._loop is not None, "DBOS starts workflows while it is launched"
        started = asyncio.run_coroutine_threadsafe(self._execute(run_id), self._loop)
        await asyncio.wrap_future(started)

    @classmethod
    def current(cls) -> DbosDispatcher | None:
        """Return the dispatcher that is at work in this process, or None if there is none."""
        return cls._current


@DBOS.workflow(name=_LEG, max_recovery_attempts=None)
async def _leg(leg: object) -> None:
    """Execute a leg, if a dispatcher is at work. DBOS counts the leg as finished even if the run is only parked."""
    worker = DbosDispatcher.current()
    if worker is not None:
        await worker.execute_here(leg)
