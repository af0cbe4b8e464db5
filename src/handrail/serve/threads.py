"""`Threads`: all conversations of a journal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.ids import NewId, random_id
from handrail.journals import Journal
from handrail.question import Question
from handrail.records import RunRow
from handrail.runs import list_runs, show
from handrail.serve.feed import Feed
from handrail.serve.naming import named_by, session_id_of
from handrail.serve.source import Source
from handrail.serve.thread import Setup, Thread

log = logging.getLogger("handrail.serve")

_MOST_KEPT = 256
"""How many threads without a run are kept in memory; the journal has the others."""
_MOST_RESUMED = 100_000
"""How many runs of a process before this one are looked at when it starts, the newest."""


class Threads:
    """Finds threads, begins what a process before this one left, and parks everything at the end."""

    def __init__(
        self,
        source: Source,
        journal: Journal,
        *,
        park_after: float | None = 300.0,
        look_every: float | None = 2.0,
        most_kept: int = _MOST_KEPT,
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
        ended: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.source = source
        self.journal = journal
        self._setup = Setup(source, journal, park_after, new_id, clock, parked=self._was_parked)
        self._ended = ended  # told of every event that ends a leg of a run
        self._most_kept = most_kept
        self._look_every = look_every
        self._boot = new_id()[:8]
        self._feeds = itertools.count(1)
        self._kept: OrderedDict[tuple[str, str], Thread] = OrderedDict()
        self._known: WeakValueDictionary[tuple[str, str], Thread] = WeakValueDictionary()
        """All that are in memory: also those that are kept no more while somebody reads their feed."""
        self._waiting: dict[tuple[str, str], dict[str, Question]] = {}
        """Parked runs by their threads, and what each waits for."""
        self._looking: asyncio.Task[None] | None = None
        self._going: set[asyncio.Task[None]] = set()

    @property
    def stopping(self) -> bool:
        return self._setup.stopping

    @property
    def parked(self) -> int:
        """How many runs of this app are left to the journal until somebody answers."""
        return len(self._waiting)

    def thread(self, principal: str, id: str) -> Thread:
        """The thread of this id, of this principal: nobody else's can be named."""
        key = (principal, id)
        thread = self._known.get(key)
        if thread is None:
            session_id_of(principal, id)
            feed = Feed(f"{self._boot}{next(self._feeds)}", ended=self._ended)
            thread = self._known[key] = Thread(id, principal, self._setup, feed)
        self._kept[key] = thread
        self._kept.move_to_end(key)
        self._drop_idle()
        return thread

    def find(self, principal: str, id: str) -> Thread | None:
        """The thread, if it is in memory."""
        return self._known.get((principal, id))

    def running(self) -> Sequence[Thread]:
        """Those with a run in this process."""
        return [thread for thread in list(self._known.values()) if thread.live is not None]

    def kept(self) -> int:
        """How many are in memory."""
        return len(self._kept)

    # From one process to the next.

    async def start(self) -> None:
        """Finish what a process that was killed had begun: files first, then its runs.

        Runs of other apps in the same journal are left alone, and so are those that wait for somebody.
        """
        recover = getattr(self.source.files, "recover", None)
        if recover is not None:
            await recover(self.journal)
        standing = await list_runs(
            self.journal, standing=("interrupted", "parked"), limit=_MOST_RESUMED, clock=self._setup.clock
        )
        for line in reversed(standing):  # the oldest first
            key = self._mine(line.row)
            if key is None:
                continue
            if line.standing == "parked" and await self._waits(line.row):
                waits = await self.journal.questions.open(line.id)
                self._waiting[key] = {each.id: each for each in waits}
            else:
                await self._go_on(key)
        if self._look_every is not None:
            self._looking = asyncio.get_running_loop().create_task(self._keep_looking(self._look_every))

    async def stop(self, grace: float = 5.0) -> None:
        """Leave every run to the journal. What comes to rest within `grace` seconds does; the rest is cut."""
        self._setup.stopping = True
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await asyncio.gather(*(thread.park(grace) for thread in self.running()))

    async def look(self) -> None:
        """Go on with parked runs that were answered from elsewhere, or whose questions have expired."""
        if not self._waiting or self.stopping:
            return
        open_now = {each.id for each in await self.journal.questions.open()}
        now = self._setup.clock.now()
        for key, waits in list(self._waiting.items()):
            expired = any(each.expires_at is not None and each.expires_at <= now for each in waits.values())
            if expired or not waits.keys() <= open_now:
                self._waiting.pop(key, None)
                await self._go_on(key, stays=expired)

    async def _keep_looking(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await self.look()
            except Exception:
                log.exception("could not look for answers from elsewhere; it is tried again")

    async def _go_on(self, key: tuple[str, str], *, stays: bool = False) -> None:
        try:
            await self.thread(*key).go_on(stays=stays)
        except Exception:
            log.exception("the run of thread %s could not be gone on with", key[1])

    def _mine(self, row: RunRow) -> tuple[str, str] | None:
        """The thread that a run is of, if it is one of this app."""
        key = named_by(row.record.session_id)
        if key is None or key[0] != row.record.principal or not self.source.owns(row.record):
            return None
        return key

    async def _waits(self, row: RunRow) -> bool:
        """Is there nothing to do in a parked run before somebody answers?"""
        if not row.questions:
            return False
        calls = (await show(self.journal, row.record.id)).calls
        answered = (
            call.status == "open"
            and call.questions
            and all(each.answer is not None for each in call.questions)
            for call in calls
        )
        return not any(answered)

    def _was_parked(self, thread: Thread, questions: Collection[Question], answered: bool) -> None:
        if self.stopping:
            return
        key = (thread.principal, thread.id)
        self._waiting[key] = {each.id: each for each in questions}
        if answered:
            going = asyncio.get_running_loop().create_task(self._go_on(key))
            self._going.add(going)
            going.add_done_callback(self._going.discard)

    def _drop_idle(self) -> None:
        over = len(self._kept) - self._most_kept
        if over > 0:
            idle = [key for key, thread in self._kept.items() if thread.is_idle]
            for key in idle[:over]:
                del self._kept[key]
