"""`Feed`: a thread's events, each encoded once. `EventStream` sends them as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.serve.agui.wire_events import Event
from handrail.serve.limits import Limits, Quota
from handrail.serve.metrics import EVENTS_SENT, FIRST_EVENT, Metrics
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import STARTED

__all__ = ["Event", "Feed", "FellBehind", "Item"]

_MOST_ITEMS = 4096
_MOST_BYTES = 4 * 2**20
_AT_ONCE = 256
"""Maximum number of events that a reader gets at a time, so that a slow reader never holds a copy of all of them."""
_STARTED = b'"RUN_STARTED"'
_PAUSE = 0.02
"""Minimum seconds between wake-ups. Waking every reader for every token would be too expensive."""


class Item(NamedTuple):
    """An event and its position in the feed."""

    number: int
    data: bytes
    older: bytes | None
    """The data for older clients, from before protocol 1.0, or None if they are sent nothing."""
    ends: str
    """The id of the leg that this event ends, "" if it ends none, or "*" if it ends whichever leg is open."""

    @property
    def size(self) -> int:
        return len(self.data) + (0 if self.older is self.data else len(self.older or b""))


class Portion(list[Item]):
    """Events that follow one another, as a reader gets them."""

    def __init__(self, items: Iterable[Item], id_of: Callable[[int], str]) -> None:
        super().__init__(items)
        self._id_of = id_of
        self._encoded: dict[bool, bytes] = {}

    def encoded(self, nested: bool) -> bytes:
        """Return the portion as server-sent events, which are encoded once for all readers who get it."""
        found = self._encoded.get(nested)
        if found is None:
            data = ((each.number, each.data if nested else each.older) for each in self)
            found = b"".join([encode(each, self._id_of(number)) for number, each in data if each is not None])
            self._encoded[nested] = found
        return found

    def until_end(self, leg: str) -> Portion | None:
        """Return the part of the portion up to the event that ends a leg, or None if no event ends it."""
        for at, item in enumerate(self, 1):
            if item.ends in (leg, "*"):
                return Portion(self[:at], self._id_of) if at < len(self) else self
        return None


class FellBehind(Exception):
    """Raised when a reader asks for events that the feed no longer keeps. The reader needs a snapshot."""


class Alarm:
    """Ends the waits of many readers in which nothing happens, with one timer for all waits that end at about the same time.

    A wait ends after its time, or up to a thirtieth of it later.
    """

    def __init__(self) -> None:
        self._waits: dict[float, dict[asyncio.Future[None], None]] = {}

    def set(self, wait: asyncio.Future[None], seconds: float) -> float:
        """Complete the future after some time, and return the key with which `clear` prevents that."""
        step = seconds / 30
        at = math.ceil((wait.get_loop().time() + seconds) / step) * step
        found = self._waits.get(at)
        if found is None:
            found = self._waits[at] = {}
            wait.get_loop().call_at(at, self._ring, at)
        found[wait] = None
        return at

    def clear(self, wait: asyncio.Future[None], at: float) -> None:
        if at in self._waits:
            self._waits[at].pop(wait, None)

    def _ring(self, at: float) -> None:
        for wait in self._waits.pop(at):
            if not wait.done():
                wait.set_result(None)


class Feed:
    """The most recent events of a thread, oldest first.

    Each reader has its own position, and nothing waits for a reader. A reader whose next event is no longer kept
    gets `FellBehind`. While a reader waits, every event that arrives is kept until the reader wakes or `forget` is
    called. The first event after a pause is delivered at once, and events that closely follow it are delivered in
    batches. `boot` is part of every event id, and distinguishes the ids of this feed from those of any other feed, in
    this process or an earlier one.
    """

    def __init__(
        self,
        boot: str,
        *,
        most_items: int = _MOST_ITEMS,
        most_bytes: int = _MOST_BYTES,
        pause: float = _PAUSE,
        ended: Callable[[Mapping[str, Any]], None] | None = None,
        alarm: Alarm | None = None,
    ) -> None:
        self._boot = boot
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._last = 0
        self._most_items, self._most_bytes = most_items, most_bytes
        self._pause = pause
        self._ended = ended  # called with every event that ends a leg
        self._alarm = alarm or Alarm()  # an app's feeds share one
        self._waiting: dict[asyncio.Future[None], int] = {}
        """The positions of the waiting readers. Events after these positions are kept until the readers have been woken."""
        self._woken: dict[asyncio.Future[None], int] = {}
        """The positions of the readers that have been woken and have not read yet."""
        self._portion: tuple[int, Portion] | None = None
        """A position and the events after it, which several readers at that position get. None after every new event."""
        self._timer: asyncio.TimerHandle | None = None
        self._woken_at = float("-inf")
        self.followers = 0
        """The number of readers that follow the feed, whether they are waiting or not."""
        self.owner: object = None
        """The feed's thread. Through this reference, a reader of the feed keeps the thread in memory."""

    @property
    def last(self) -> int:
        """The position after the newest event: the event's number, plus one for each later call to `forget`."""
        return self._last

    @property
    def size(self) -> tuple[int, int]:
        """The number of events that are kept, and their total size in bytes."""
        return len(self._items), self._bytes

    def id_of(self, number: int) -> str:
        return f"{self._boot}-{number}"

    def number_of(self, id: str) -> int | None:
        """Return the position that an event id names, or None if the id is not this feed's or the next event is no longer kept."""
        boot, _, number = id.rpartition("-")
        if boot != self._boot or not (number.isascii() and number.isdecimal()) or len(number) > 18:
            return None
        found = int(number)
        return found if self._oldest() - 1 <= found <= self._last else None

    def append(self, events: Iterable[Event]) -> None:
        """Add events and wake the waiting readers. If the feed is then too large, drops old events that no waiting reader needs."""
        before = self._last
        for event in events:
            data = event.data
            ends = str(data.get("runId", "")) if data["type"] == "RUN_FINISHED" else ""
            if data["type"] == "RUN_ERROR":
                ends = "*"
            if ends and self._ended is not None:
                self._ended(data)
            encoded = msgspec.json.encode(data)
            older = encoded if event.older is data else None
            if event.plain is not None:
                older = msgspec.json.encode(event.plain)
            item = Item(self._last + 1, encoded, older, ends)
            self._last += 1  # counted only now, so that an event that can't be encoded takes no position
            self._items.append(item)
            self._bytes += item.size
        self._portion = None
        while self._is_too_much() and self._items[0].number <= self._first_needed():
            self._bytes -= self._items.popleft().size
        if self._last > before and self._waiting:
            self._wake_soon()

    def forget(self) -> None:
        """Drop all events. Readers get `FellBehind`, and earlier ids become invalid."""
        self._items.clear()
        self._portion = None
        self._bytes = 0
        self._last += 1
        if self._waiting:
            self._wake_soon()

    def since(self, number: int, most: int | None = None) -> Sequence[Item]:
        """Return at most `most` of the events after a position, without waiting for more.

        Raises `FellBehind` if the next event is no longer kept.
        """
        skip = number - self._oldest() + 1
        if skip < 0:
            raise FellBehind
        end = len(self._items) if most is None else min(len(self._items), skip + most)
        return [self._items[at] for at in range(skip, end)]

    def before_leg(self, leg: str, number: int) -> int:
        """Return the position just before a leg's start, or `number` if the feed has no start of this leg after `number`."""
        oldest = self._oldest()
        for at in range(len(self._items) - 1, max(number - oldest, -1), -1):
            data = self._items[at].data
            if _STARTED in data:
                told = msgspec.json.decode(data)
                if told["type"] == "RUN_STARTED" and told["runId"] == leg:
                    return oldest + at - 1
        return number

    async def after(self, number: int, seconds: float | None = None) -> Portion:
        """Return the next events after a position, at most 256 at a time.

        If there are none yet, waits about `seconds` for one, or without limit if `seconds` is None. Returns an
        empty portion if none arrives in that time. Raises `FellBehind` if the next event is no longer kept.
        """
        if number >= self._last:
            wait = asyncio.get_running_loop().create_future()
            self._waiting[wait] = number
            rings_at = None if seconds is None else self._alarm.set(wait, seconds)
            try:
                await wait
            finally:
                if rings_at is not None:
                    self._alarm.clear(wait, rings_at)
                self._waiting.pop(wait, None)
                self._woken.pop(wait, None)
        if self._portion is not None and self._portion[0] == number:
            return self._portion[1]
        portion = Portion(self.since(number, _AT_ONCE), self.id_of)
        if self.followers > 1:
            self._portion = number, portion
        return portion

    @contextlib.contextmanager
    def followed(self) -> Generator[None]:
        """Count one more reader in `followers` during the block."""
        self.followers += 1
        try:
            yield
        finally:
            self.followers -= 1
            if self.followers < 2:
                self._portion = None

    def _first_needed(self) -> int:
        """Return the first position whose next event a waiting reader has not got yet."""
        positions = itertools.chain(self._waiting.values(), self._woken.values())
        return min(positions, default=self._last)

    def _wake_soon(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = self._woken_at + self._pause
        if loop.time() >= next_at:
            self._wake()
        elif self._timer is None:
            self._timer = loop.call_at(next_at, self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._woken_at = asyncio.get_running_loop().time()
        for wait in self._waiting:
            if not wait.done():
                wait.set_result(None)
        self._woken |= self._waiting
        self._waiting.clear()

    def _is_too_much(self) -> bool:
        many = len(self._items)
        return many > self._most_items or (many > 1 and self._bytes > self._most_bytes)

    def _oldest(self) -> int:
        return self._items[0].number if self._items else self._last + 1


PING_SECONDS = 15.0
PING = b": ping\n\n"
_FELL_BEHIND = {
    "type": "RUN_ERROR",
    "message": "More events arrived at once than the server keeps for a reader. The run continues: load the thread again.",
    "code": "FellBehind",
}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def encode(data: bytes, id: str = "") -> bytes:
    """Encode one server-sent event. Lines end in a bare newline, because AG-UI clients can't read other line endings."""
    head = f"id: {id}\n".encode() if id else b""
    return b"%sdata: %s\n\n" % (head, data)


async def follow(
    feed: Feed,
    number: int,
    *,
    before: Sequence[Event] = (),
    leg: str = "",
    until: int | None = None,
    nested: bool = True,
    ping: float = PING_SECONDS,
) -> AsyncGenerator[bytes]:
    """Yield encoded events: those in `before`, then those in the feed after a position.

    The events end when `leg` ends or at position `until`, if either is given. If none arrives for
    `ping` seconds, yields a ping. With `nested=False`, events are encoded for clients from before protocol 1.0. A
    reader whose next event is no longer kept is disconnected, and gets a snapshot when it returns. If the reader
    follows one leg, it is first sent an error event, because an AG-UI client does not reconnect on its own and
    would take the disconnection for the end of the leg.
    """
    with feed.followed():
        first = _encode_all(before, nested)
        if first:
            yield first
        while until is None or number < until:
            try:
                portion = await feed.after(number, ping)
            except FellBehind:
                if leg:
                    yield _encode_all([Event(_FELL_BEHIND)], nested)
                return
            if not portion:
                yield PING
                continue
            number = portion[-1].number
            last = portion.until_end(leg) if leg else None
            chunk = (last or portion).encoded(nested)
            if chunk or last is not None:
                yield chunk
            if last is not None:
                return


async def send_all(events: Sequence[Event], *, nested: bool = True) -> AsyncGenerator[bytes]:
    """Yield all events as one chunk. With `nested=False`, they are encoded for clients from before protocol 1.0."""
    yield _encode_all(events, nested)


def _encode_all(events: Sequence[Event], nested: bool) -> bytes:
    """Encode events for a client. If `nested` is False, encodes them for clients from before protocol 1.0."""
    data = (each.data if nested else each.older for each in events)
    return b"".join(encode(msgspec.json.encode(each)) for each in data if each is not None)


class Streams:
    """A server's open streams. Enforces each principal's quota, and can end all streams."""

    def __init__(self, limits: Limits, metrics: Metrics, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._quota = Quota(
            limits.streams,
            "TooManyStreams",
            "you have as many open streams as the server allows. Close one first.",
        )
        self._open: set[EventStream] = set()
        self._closed = False
        self.metrics = metrics
        self.clock = clock

    @property
    def count(self) -> int:
        return self._quota.total

    def take(self, principal: str) -> contextlib.ExitStack:
        """Take a slot for one more stream, which ends when it is closed.

        Raises `RequestRefused` if the quota is used up or the server is stopping.
        """
        if self._closed:
            raise RequestRefused(503, "Stopping", "the server is stopping. Try again soon.", retry_after=5.0)
        self._quota.take(principal)
        slot = contextlib.ExitStack()
        slot.callback(self._quota.give_back, principal)
        return slot

    def add(self, stream: EventStream) -> None:
        self._open.add(stream)
        if self._closed:  # `close` was called after this stream took its slot
            stream.end()

    def discard(self, stream: EventStream) -> None:
        self._open.discard(stream)

    def close(self) -> None:
        """End every stream, and refuse new ones. Readers who return to the next process get a snapshot."""
        self._closed = True
        for stream in list(self._open):
            stream.end()


class EventStream:
    """A response that streams events until they end, the reader disconnects, or `end` is called.

    If the server cancels the response, the stream ends without raising an error. The guard ends it when its reader may no
    longer read.
    """

    def __init__(self, streams: Streams, slot: contextlib.ExitStack, chunks: AsyncGenerator[bytes]) -> None:
        self._streams = streams
        self._slot = slot
        self._chunks = chunks
        self._scope: asyncio.Timeout | None = None
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
        watcher.add_done_callback(self._disconnected)
        self._streams.add(self)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(None) as self._scope:
                    if not self._ended:
                        await self._pump(scope, send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.discard(self)
            self._scope = None
            watcher.remove_done_callback(self._disconnected)
            watcher.cancel()
            self._slot.close()
            await self._chunks.aclose()

    def end(self) -> None:
        """End the response without sending further events."""
        ended, self._ended = self._ended, True
        if self._scope is not None and not ended:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _disconnected(self, watcher: asyncio.Task[None]) -> None:
        self.end()

    async def _pump(self, scope: Scope, send: Send) -> None:
        metrics, first = self._streams.metrics, True
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if chunk != PING:
                # JSON contains no empty lines, so each one ends an event
                metrics.add(EVENTS_SENT, chunk.count(b"\n\n"))
                if first:
                    first = False
                    metrics.record(FIRST_EVENT, self._streams.clock.monotonic() - scope[STARTED])


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
