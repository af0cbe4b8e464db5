"""A thread's feed as server-sent events, for any number of readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RequestRefused
from handrail.serve.feed import Event, Feed, FellBehind
from handrail.serve.limits import Limits, Places
from handrail.serve.metrics import Metrics
from handrail.serve.middleware import BEGAN, Receive, Scope, Send

PING_SECONDS = 15.0
PING = b": ping\n\n"
_BEHIND = {
    "type": "RUN_ERROR",
    "message": "More happened at once than is kept for a reader. The run goes on: look at the thread again.",
    "code": "FellBehind",
}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def encoded(data: bytes, id: str = "") -> bytes:
    """One event on the wire. Lines end in a bare newline: clients of AG-UI can't read anything else."""
    head = f"id: {id}\n".encode() if id else b""
    return b"%sdata: %s\n\n" % (head, data)


async def lines(
    feed: Feed,
    number: int,
    *,
    before: Sequence[Event] = (),
    leg: str = "",
    until: int | None = None,
    nested: bool = True,
    ping: float = PING_SECONDS,
) -> AsyncGenerator[bytes]:
    """What comes after a place in a feed, until a leg ends, or up to a place; without both, until the reader goes.

    A reader that has fallen out of what is kept is sent away: it comes again, and gets a snapshot. One of a
    leg is told so: a client of AG-UI does not come again by itself, and must not take this for the end.
    """
    told = _of(before, nested)
    if told:
        yield b"".join(told)
    while until is None or number < until:
        try:
            items = await feed.after(number, ping)
        except FellBehind:
            if leg:
                yield b"".join(_of([Event(_BEHIND)], nested))
            return
        if not items:
            yield PING
        out: list[bytes] = []
        for item in items:
            number = item.number
            data = item.data if nested else item.older
            if data is not None:
                out.append(encoded(data, feed.id_of(number)))
            if leg and item.ends in (leg, "*"):
                yield b"".join(out)
                return
        if out:
            yield b"".join(out)


async def only(events: Sequence[Event], *, nested: bool = True) -> AsyncGenerator[bytes]:
    """These events, and the end."""
    yield b"".join(_of(events, nested))


def _of(events: Sequence[Event], nested: bool) -> list[bytes]:
    """What a client gets of these: one from before protocol 1.0 sees no nested runs."""
    told = [each.data if nested else each.older for each in events]
    return [encoded(msgspec.json.encode(data)) for data in told if data is not None]


class Streams:
    """The streams that are open: how many a principal has, and how all of them are ended."""

    def __init__(self, limits: Limits, metrics: Metrics, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._places = Places(
            limits.streams, "TooManyStreams", "you have as many streams open as you may. Close one first."
        )
        self._open: set[EventStream] = set()
        self._closed = False
        self.metrics = metrics
        self.clock = clock

    @property
    def count(self) -> int:
        return self._places.total

    def take(self, principal: str) -> Place:
        """A place for one more stream, or `RequestRefused`."""
        if self._closed:
            raise RequestRefused(503, "Stopping", "the server is stopping. Try again soon.", retry_after=5.0)
        self._places.take(principal)
        return Place(self._places, principal)

    def add(self, stream: EventStream) -> None:
        self._open.add(stream)
        if self._closed:  # meanwhile: it had its place already
            stream.end()

    def discard(self, stream: EventStream) -> None:
        self._open.discard(stream)

    def close(self) -> None:
        """End every stream: what its feed holds by now has been sent or can be asked for again."""
        self._closed = True
        for stream in list(self._open):
            stream.end()


class Place:
    """One stream's place, given back once."""

    def __init__(self, places: Places, principal: str) -> None:
        self._places: Places | None = places
        self._principal = principal

    def give_back(self) -> None:
        places, self._places = self._places, None
        if places is not None:
            places.give_back(self._principal)


class EventStream:
    """The answer that sends a stream. It ends with what it sends, when its reader goes, or when it is ended.

    A server that cancels it ends it too. That is no failure: nothing is lost by it, so nothing is raised.
    """

    def __init__(self, streams: Streams, place: Place, chunks: AsyncGenerator[bytes]) -> None:
        self._streams = streams
        self._place = place
        self._chunks = chunks
        self._scope: asyncio.Timeout | None = None
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.get_running_loop().create_task(_until_gone(receive))
        watcher.add_done_callback(self._gone)
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
            watcher.remove_done_callback(self._gone)
            watcher.cancel()
            self._place.give_back()
            await self._chunks.aclose()

    def end(self) -> None:
        """Send nothing more."""
        ended, self._ended = self._ended, True
        if self._scope is not None and not ended:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _gone(self, watcher: asyncio.Task[None]) -> None:
        self.end()

    async def _pump(self, scope: Scope, send: Send) -> None:
        metrics, first = self._streams.metrics, True
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if chunk != PING:
                metrics.events += chunk.count(b"\n\n")  # in JSON no line is empty
                if first:
                    first = False
                    metrics.first_event.add(self._streams.clock.monotonic() - scope[BEGAN])


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
