"""`Watch`: follows what other processes broadcast about a thread's runs, and passes it on to the thread's feed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, NamedTuple

import msgspec

from handrail.errors import HandrailError, JournalError
from handrail.journal.protocol import Batch, Broadcasts, Journal, Watcher
from handrail.journal.records import OVER
from handrail.serve.agui.wire_events import Event
from handrail.serve.feed import Feed

log = logging.getLogger("handrail.serve")

_WATCH_SECONDS = 15.0
"""Seconds after which a watcher that is not renewed expires."""
_RENEW_SECONDS = 3.0
_LOOK_SECONDS = 2.0
"""Maximum seconds between two reads of the batches, in case a notice was missed."""
_REPLY_SECONDS = 1.0
"""Seconds that a reader who joins waits for the worker's opening. After that, the reader gets only what is recorded."""
_IDLE_SECONDS = 10.0
"""Seconds without a reader after which the watch ends."""
_MOST_LEFT = 100


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an active run, for a watcher that joins."""

    run_id: str
    leg: str
    """The id of the open leg, or "" if no leg is open. Without an open leg, the journal has everything."""
    messages: list[dict[str, Any]] = []
    """The finished messages of the run and of the runs nested in it."""
    state: Any = None
    emitted: dict[str, list[Any]] = {}
    """The events that calls have emitted, by the call's id."""
    open: list[Event] = []
    """The events that show a watcher what is in progress."""


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of a batch: events for all watchers, or an opening for one of them."""

    events: list[Event] = []
    opening: Opening | None = None
    watcher: str = ""
    """The id of the watcher that the opening is for."""
    join: int = 0
    """The number of the watcher's last join when the opening was made."""


def decode(body: bytes) -> list[Said]:
    """Decode a batch."""
    return msgspec.json.decode(body, type=list[Said])


class Joined(NamedTuple):
    """An opening, and the position in the feed after which the events that follow it begin."""

    opening: Opening
    last: int


class Watch:
    """Follows a session's broadcasts, from `start` until `stop`, or until nobody has read the feed for a while.

    If batches are missing, or a leg stops without an end because its worker was lost, the feed drops its events. Its
    readers then join again, and get what is recorded or what the next worker broadcasts.
    """

    def __init__(
        self, broadcasts: Broadcasts, journal: Journal, session_id: str, feed: Feed, id: str
    ) -> None:
        self.is_over = False
        self._broadcasts = broadcasts
        self._journal = journal
        self._session_id = session_id
        self._feed = feed
        self._id = id
        self._joins = 0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._position = 0
        self._leg: tuple[str, int] | None = None
        """The run and the leg whose batches are passed on."""
        self._number = 0
        """The number of the last batch of `_leg` that was read."""
        self._is_synced = False
        """Whether the feed's readers have everything from before the next batch."""
        self._is_blind = False
        """Whether the last reader who joined got no opening, and so may not know what is in progress."""
        self._open = ""
        """The id that the worker gave to the open leg; "" if no leg is open."""
        self._left: list[tuple[str, int]] = []
        """Legs that were replaced by later ones. What their workers still broadcast is out of date."""
        self._expected = ""
        self._names: dict[str, str] = {}
        """Maps the id that a leg has at its worker to the id by which this process's readers know the leg."""
        self._joining: dict[int, asyncio.Future[Joined | None]] = {}
        self._heard_at = self._read_at = self._loop.time()

    async def start(self) -> None:
        """Begin to watch. Once this returns, every later batch is read, unless it is lost."""
        if self._starting is None:
            self._starting = self._loop.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        stop = await self._broadcasts.listen(self._heard)
        try:
            self._position = await self._broadcasts.last(self._session_id)
            await self._renew()
        except BaseException:
            stop()
            self.is_over = True
            raise
        self._following = self._loop.create_task(self._follow())
        self._following.add_done_callback(lambda _: stop())

    async def stop(self) -> None:
        """Stop watching."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    def expect(self, leg: str) -> None:
        """Use this id for the next leg that begins, because a reader waits for it. Does nothing for ""."""
        if leg:
            self._expected = leg

    async def join(self) -> Joined | None:
        """Ask the run's worker for an opening. Returns None if no leg is open or the worker does not reply in time."""
        self._read_at = self._loop.time()
        self._joins += 1
        reply = self._joining[self._joins] = self._loop.create_future()
        try:
            await self._renew()
            done, _ = await asyncio.wait({reply}, timeout=_REPLY_SECONDS)
            joined = reply.result() if done else None
            self._is_blind = joined is None
            return joined
        finally:
            self._joining = {join: each for join, each in self._joining.items() if each is not reply}

    def _heard(self, session_id: str, is_watched: bool) -> None:
        if session_id in ("", self._session_id) and not (is_watched and session_id):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._changed.set)

    async def _renew(self) -> None:
        watcher = Watcher(self._id, self._joins)
        await self._broadcasts.watch(watcher, self._session_id, seconds=_WATCH_SECONDS)

    async def _follow(self) -> None:
        renewed_at = self._loop.time()
        try:
            while True:
                self._changed.clear()
                try:
                    for batch in await self._broadcasts.read(self._session_id, self._position):
                        self._position = batch.position
                        self._take(batch)
                    if self._loop.time() - renewed_at >= _RENEW_SECONDS:
                        renewed_at = self._loop.time()
                        if self._is_idle():
                            return self._resync()
                        await self._check()
                except JournalError as error:
                    log.log(
                        error.retry_level, "could not read the broadcasts of a run; will retry", exc_info=True
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._changed.wait()
        except Exception:
            log.exception("stopped watching session %s", self._session_id)
            self._resync()
        finally:
            self.is_over = True
            with contextlib.suppress(HandrailError):
                await asyncio.shield(self._broadcasts.leave(self._id, self._session_id))

    def _is_idle(self) -> bool:
        if self._feed.followers:
            self._read_at = self._loop.time()
        return self._loop.time() - self._read_at > _IDLE_SECONDS

    async def _check(self) -> None:
        """Renew the watch, and delete old broadcasts.

        Makes the readers join again if the last one who joined got no opening, or if a leg stopped without an end.
        """
        await self._renew()
        await self._broadcasts.sweep()
        if self._is_blind:
            self._resync()
        elif self._open and self._loop.time() - self._heard_at > _RENEW_SECONDS:
            rows = await self._journal.runs.list(session_id=self._session_id)
            if not rows or rows[-1].status in OVER or not rows[-1].held:
                self._resync()

    def _take(self, batch: Batch) -> None:
        leg = batch.run_id, batch.leg
        if leg in self._left or (leg == self._leg and batch.number <= self._number):
            return
        if leg != self._leg:
            if self._leg is not None:
                self._left = [*self._left, self._leg][-_MOST_LEFT:]
            if self._open:
                self._resync()  # the worker of the previous leg was lost
            self._leg, self._number = leg, 0
            self._is_synced = batch.number == 1
        elif batch.number != self._number + 1:
            self._resync()
        self._number = batch.number
        self._heard_at = self._loop.time()
        try:
            said = decode(batch.body)
        except msgspec.MsgspecError:  # from a different version of Handrail
            log.warning(
                "can't read the broadcasts of run %s, because its worker has a different version of Handrail",
                batch.run_id,
            )
            return
        for each in said:
            if each.opening is None:
                if self._is_synced:
                    self._feed.append([self._renamed(event) for event in each.events])
            elif each.watcher == self._id:
                self._take_opening(each, each.opening)

    def _take_opening(self, said: Said, opening: Opening) -> None:
        waits = [each for join, each in self._joining.items() if join <= said.join and not each.done()]
        if not waits and not self._is_synced and opening.leg:
            self._feed.forget()  # readers who got no opening when they joined must join again
        self._is_synced, self._open = True, opening.leg
        leg = self._names.get(opening.leg, opening.leg)
        joined = Joined(msgspec.structs.replace(opening, leg=leg), self._feed.last) if leg else None
        for each in waits:
            each.set_result(joined)

    def _renamed(self, event: Event) -> Event:
        """Return an event with the id by which this process's readers know its leg, and note which leg is open."""
        kind, leg = event.data["type"], str(event.data.get("runId", ""))
        if kind == "RUN_STARTED":
            self._open, self._names, self._is_blind = leg, {}, False
            if self._expected:
                self._names, self._expected = {leg: self._expected}, ""
        elif kind in ("RUN_FINISHED", "RUN_ERROR"):
            self._open = ""
        if leg not in self._names:
            return event
        plain: dict[str, Any] | None = event.plain
        if plain is not None and "runId" in plain:
            plain = {**plain, "runId": self._names[leg]}
        return Event({**event.data, "runId": self._names[leg]}, event.nested, plain)

    def _resync(self) -> None:
        """Make the readers join again, because they may have missed something."""
        self._is_synced, self._is_blind, self._open = False, False, ""
        self._feed.forget()
