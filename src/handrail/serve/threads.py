"""`Threads`: all conversations of a journal."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from handrail.ids import NewId, random_id
from handrail.records import Journal
from handrail.runs import list_runs
from handrail.serve.feed import Feed
from handrail.serve.source import Source
from handrail.serve.thread import Thread

log = logging.getLogger("handrail.serve")

_MOST_KEPT = 256
"""How many threads without a run are kept in memory; the journal has the others."""


class Threads:
    """Finds threads, begins what a process before this one left, and parks everything at the end."""

    def __init__(
        self,
        source: Source,
        journal: Journal,
        *,
        park_after: float = 300.0,
        most_kept: int = _MOST_KEPT,
        new_id: NewId = random_id,
    ) -> None:
        self.source = source
        self.journal = journal
        self.stopping = False
        self._park_after = park_after
        self._most_kept = most_kept
        self._new_id = new_id
        self._boot = new_id()[:8]
        self._threads: OrderedDict[tuple[str, str], Thread] = OrderedDict()

    def thread(self, principal: str, id: str) -> Thread:
        """The thread of this id, of this principal: nobody else's can be named."""
        key = (principal, id)
        thread = self._threads.get(key)
        if thread is None:
            feed = Feed(f"{self._boot}{len(self._threads)}")
            thread = self._threads[key] = Thread(
                id,
                principal,
                self.source,
                self.journal,
                feed,
                park_after=self._park_after,
                new_id=self._new_id,
            )
            self._drop_idle()
        self._threads.move_to_end(key)
        return thread

    def running(self) -> list[Thread]:
        """Those with a run in this process."""
        return [thread for thread in self._threads.values() if thread.live is not None]

    async def start(self) -> None:
        """Finish what a process that was killed had begun: files first, then its runs."""
        recover = getattr(self.source.files, "recover", None)
        if recover is not None:
            await recover(self.journal)
        for line in await list_runs(self.journal, standing=("interrupted", "parked"), limit=10_000):
            record = line.row.record
            principal, slash, id = record.session_id.partition("/")
            if line.row.questions or not slash or principal != record.principal:
                continue  # it waits for somebody, or is none of ours
            try:
                await self.thread(principal, id).go_on()
            except Exception:
                log.exception("run %s could not be gone on with", record.id)

    async def stop(self, grace: float = 5.0) -> None:
        """Leave every run to the journal. What comes to rest within `grace` seconds does; the rest is cut."""
        self.stopping = True
        await asyncio.gather(
            *(thread.live.park(grace) for thread in self.running() if thread.live is not None)
        )

    def _drop_idle(self) -> None:
        idle = [key for key, thread in self._threads.items() if thread.live is None]
        for key in idle[: max(0, len(idle) - self._most_kept)]:
            del self._threads[key]
