"""A thread's feed as server-sent events, for any number of readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.serve.feed import Event, Feed, FellBehind
from handrail.serve.limits import Limits, Quota
from handrail.serve.metrics import EVENTS_SENT, FIRST_EVENT, Metrics
from handrail.serve.middleware import STARTED
from handrail.serve.refusals import RequestRefused

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
    """One server-sent event. Lines end in a bare newline: AG-UI clients can't read anything else."""
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
    """The events after a position in a feed, until a leg ends or up to a position, else without end.

    A reader that fell behind what the feed keeps is disconnected; when it returns it gets a snapshot. A
    reader of one leg is told first: an AG-UI client does not return by itself and must not take this for the end.
    """
    first = _encode_all(before, nested)
    if first:
        yield first
    while until is None or number < until:
        try:
            items = await feed.after(number, ping)
        except FellBehind:
            if leg:
                yield _encode_all([Event(_FELL_BEHIND)], nested)
            return
        if not items:
            yield PING
        out: list[bytes] = []
        for item in items:
            number = item.number
            data = item.data if nested else item.older
            if data is not None:
                out.append(encode(data, feed.id_of(number)))
            if leg and item.ends in (leg, "*"):
                yield b"".join(out)
                return
        if out:
            yield b"".join(out)


async def send_all(events: Sequence[Event], *, nested: bool = True) -> AsyncGenerator[bytes]:
    """These events, then the end."""
    yield _encode_all(events, nested)


def _encode_all(events: Sequence[Event], nested: bool) -> bytes:
    """The events as a client reads them. Clients from before protocol 1.0 see no nested runs."""
    data = (each.data if nested else each.older for each in events)
    return b"".join(encode(msgspec.json.encode(each)) for each in data if each is not None)


class Streams:
    """The open streams of a server: the quota of each principal, and closing all of them."""

    def __init__(self, limits: Limits, metrics: Metrics, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._quota = Quota(
            limits.streams, "TooManyStreams", "you have as many open streams as allowed. Close one first."
        )
        self._open: set[EventStream] = set()
        self._closed = False
        self.metrics = metrics
        self.clock = clock

    @property
    def count(self) -> int:
        return self._quota.total

    def take(self, principal: str) -> Slot:
        """A slot for one more stream, or `RequestRefused`."""
        if self._closed:
            raise RequestRefused(503, "Stopping", "the server is stopping. Try again soon.", retry_after=5.0)
        self._quota.take(principal)
        return Slot(self._quota, principal)

    def add(self, stream: EventStream) -> None:
        self._open.add(stream)
        if self._closed:  # since it took its slot
            stream.end()

    def discard(self, stream: EventStream) -> None:
        self._open.discard(stream)

    def close(self) -> None:
        """End every stream. Readers can ask for what they did not get."""
        self._closed = True
        for stream in list(self._open):
            stream.end()


class Slot:
    """The slot of one stream in its principal's quota. It is given back once."""

    def __init__(self, quota: Quota, principal: str) -> None:
        self._quota: Quota | None = quota
        self._principal = principal

    def give_back(self) -> None:
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.give_back(self._principal)


class EventStream:
    """A response that streams events until they end, the reader leaves, or `end` is called.

    When the server cancels it, it ends too and raises nothing, because nothing is lost.
    """

    def __init__(self, streams: Streams, slot: Slot, chunks: AsyncGenerator[bytes]) -> None:
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
            self._slot.give_back()
            await self._chunks.aclose()

    def end(self) -> None:
        """Send nothing more."""
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
                metrics.add(EVENTS_SENT, chunk.count(b"\n\n"))  # JSON contains no empty lines
                if first:
                    first = False
                    metrics.record(FIRST_EVENT, self._streams.clock.monotonic() - scope[STARTED])


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
