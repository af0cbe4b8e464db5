"""`Narrator`: lets watchers in other processes follow the legs that this process executes. `Broadcast`: the feed of one leg."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from handrail import runs
from handrail.clock import Clock
from handrail.errors import HandrailError
from handrail.journal.protocol import Broadcasts, Journal, Watcher
from handrail.journal.records import RunRow
from handrail.run.host import Voters
from handrail.run.place import is_in_run
from handrail.serve.agui.wire_events import Event
from handrail.serve.feed import Feed
from handrail.serve.live_run import LiveRun
from handrail.serve.principals import parse_session_id
from handrail.serve.sources import Source
from handrail.serve.thread import Setup, Thread
from handrail.serve.thread_messages import messages_in, nested_messages_in, render_thread
from handrail.serve.watch import Opening, Said

if TYPE_CHECKING:
    from handrail.run.response import RunStream


log = logging.getLogger("handrail.serve")

_PAUSE = 0.05
"""Minimum seconds between two batches. The first event after a pause is written at once."""
_MOST_WAITING = 4096
"""Maximum number of events that wait to be written. Beyond that, they are dropped, and the watchers join again."""


class Broadcast(Feed):
    """The feed of a leg whose readers are in other processes. While nobody watches, new events are dropped.

    Batches are numbered, and written one after another, at least `pause` seconds apart. The run does not wait for
    them. If a batch can't be written, its number is missing, and the watchers join again.
    """

    def __init__(
        self,
        broadcasts: Broadcasts,
        session_id: str,
        run_id: str,
        leg: int,
        *,
        opening: Callable[[], Opening],
        pause: float = _PAUSE,
    ) -> None:
        super().__init__("")
        self.session_id = session_id
        self._broadcasts = broadcasts
        self._run_id = run_id
        self._leg = leg
        self._opening = opening
        self._every = pause
        self._number = 0
        self._joined: dict[str, int] = {}
        """The watchers by id, each with the number of the last join for which it got an opening."""
        self._said: list[Said] = []
        self._count = 0
        self._writing: asyncio.Task[None] | None = None

    def append(self, events: Iterable[Event]) -> None:
        """Add events to the next batch, if somebody watches."""
        if not self._joined:
            return
        found = list(events)
        if not found:
            return
        self._count += len(found)
        if self._count > _MOST_WAITING:
            self._drop()
        elif self._said and self._said[-1].opening is None:
            self._said[-1].events.extend(found)
        else:
            self._add(Said(found))

    def watch(self, watchers: Sequence[Watcher]) -> None:
        """Replace the watchers. Each watcher that has joined since its last opening gets a new opening."""
        if not watchers:
            self._joined.clear()
            return
        if not self._joined and self._number:
            self._number += 1  # a number is skipped, because events were dropped while nobody watched
        known, self._joined = self._joined, {each.id: each.joins for each in watchers}
        for each in watchers:
            if known.get(each.id, 0) < each.joins:
                self._add(Said(opening=self._opening(), watcher=each.id, join=each.joins))

    async def finish(self) -> None:
        """Wait until everything is written."""
        while self._writing is not None:
            await asyncio.wait({self._writing})

    def _add(self, said: Said) -> None:
        self._said.append(said)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    def _drop(self) -> None:
        self._said.clear()
        self._count = 0
        self._number += 1

    async def _write(self) -> None:
        try:
            while self._said:
                said, self._said, self._count = self._said, [], 0
                self._number += 1
                try:
                    body = msgspec.json.encode(said)
                    await self._broadcasts.add(self.session_id, self._run_id, self._leg, self._number, body)
                except HandrailError as error:
                    log.log(
                        error.retry_level,
                        "could not broadcast events of run %s; its watchers join again",
                        self._run_id,
                        exc_info=True,
                    )
                await asyncio.sleep(self._every)
        finally:
            self._writing = None


class Narration:
    """A leg of a thread's run, and its broadcast. The run is executed in the session and environment of `live`."""

    def __init__(self, thread: Thread, live: LiveRun, broadcast: Broadcast, over: Callable[[], None]) -> None:
        self.live = live
        self.broadcast = broadcast
        self._thread = thread
        self._over = over
        self._task: asyncio.Task[None] | None = None

    def begin(self, stream: RunStream[Any], leg: str) -> None:
        """Start to execute the run and to broadcast its events. The caller may await the stream's response too."""
        self._task = asyncio.get_running_loop().create_task(self._thread.execute(self.live, stream, leg))

    async def finish(self) -> None:
        """Wait until the leg is over and its events are written. Does not raise the run's errors."""
        try:
            if self._task is not None:
                await asyncio.wait({self._task})
                self._task.exception()
                await self.live.over()
            await self.broadcast.finish()
        finally:
            self._over()


class Narrator:
    """Broadcasts the runs that this process executes for threads, leg by leg.

    Nothing is written about a thread that nobody watches.
    """

    def __init__(
        self,
        journal: Journal,
        broadcasts: Broadcasts,
        *,
        park_after: float,
        clock: Clock,
        voters: Voters,
    ) -> None:
        self._journal = journal
        self._broadcasts = broadcasts
        self._setup = partial(Setup, journal=journal, park_after=park_after, clock=clock, voters=voters)
        self._loop = asyncio.get_running_loop()
        self._legs: dict[str, Broadcast] = {}
        """The broadcasts of the current legs, by session id. A session has one leg at a time."""
        self._lock = asyncio.Lock()
        self._looking: set[asyncio.Task[None]] = set()
        self._stop: Callable[[], None] | None = None

    async def narrate(self, source: Source, row: RunRow) -> Narration | None:
        """Prepare to execute and broadcast the next leg of a run. Returns None if the run belongs to no thread."""
        record = row.record
        key = parse_session_id(record.session_id)
        if key is None or key[0] != record.principal:
            return None
        if self._stop is None:
            self._stop = await self._broadcasts.listen(self._heard)
        broadcast = Broadcast(
            self._broadcasts, record.session_id, record.id, row.legs, opening=lambda: _opening(thread, live)
        )
        thread = Thread(key[1], key[0], self._setup(source), broadcast)
        if row.status == "queued":
            live = await thread.begun(record.id)
        else:
            live = await thread.resumed(await runs.show(self._journal, record.id))
        # a worker parks every run that waits, so no run stays in memory with a secret
        live.keeps_secrets = False
        self._legs[record.session_id] = broadcast
        await self._look(record.session_id)
        return Narration(thread, live, broadcast, lambda: self._end(broadcast))

    async def tend(self) -> None:
        """Look up who watches, because notices can be missed and watches expire without a notice."""
        await self._look(*self._legs)

    async def sweep(self) -> None:
        """Delete old batches, and watchers that have expired."""
        await self._broadcasts.sweep()

    def close(self) -> None:
        """Stop listening for watchers."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def _end(self, broadcast: Broadcast) -> None:
        if self._legs.get(broadcast.session_id) is broadcast:
            del self._legs[broadcast.session_id]

    def _heard(self, session_id: str, is_watched: bool) -> None:
        if is_watched:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._look_soon, session_id)

    def _look_soon(self, session_id: str) -> None:
        wanted = (session_id,) if session_id in self._legs else () if session_id else tuple(self._legs)
        if wanted:
            task = self._loop.create_task(self._look(*wanted))
            self._looking.add(task)
            task.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking.discard(task)
        if not task.cancelled():
            task.exception()  # not reported here, because `tend` looks again and raises its errors

    async def _look(self, *session_ids: str) -> None:
        if session_ids:
            async with self._lock:  # so that an older list of watchers can't replace a newer one
                watchers = await self._broadcasts.watchers(session_ids)
                for each in session_ids:
                    if each in self._legs:
                        self._legs[each].watch(watchers.get(each, ()))


def _opening(thread: Thread, live: LiveRun) -> Opening:
    run_id = live.run_id
    if not live.has_started or not live.leg:
        return Opening(run_id=run_id, leg="")
    said = [each for each in messages_in(live.session) if each.run_id == run_id]
    nested = [each for each in nested_messages_in(live.session) if is_in_run(each.run_id, run_id)]
    return Opening(
        run_id=run_id,
        leg=live.leg,
        messages=render_thread(said, nested, {}),
        state=thread.state(),
        emitted={id: list(each) for id, each in live.emissions.by_call().items()},
        open=list(live.open()),
    )
