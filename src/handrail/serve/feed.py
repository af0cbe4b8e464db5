"""`Feed`: the events of one thread, encoded once, for any number of readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from handrail.serve.agui.wire_events import Event

__all__ = ["Event", "Feed", "FellBehind", "Item"]

_MOST_ITEMS = 4096
_MOST_BYTES = 4 * 2**20
_AT_ONCE = 256
"""How many events a reader gets at a time, so that one that is far behind does not hold a copy of all."""
_STARTED = b'"RUN_STARTED"'
_PAUSE = 0.02
"""Seconds between wake-ups of readers. Waking every viewer for every token would be too expensive."""


class Item(NamedTuple):
    """An event and its position in the feed."""

    number: int
    data: bytes
    nested: bool
    ends: str
    """The leg that ends with this event; "" for none, `*` for any."""
    plain: bytes | None = None
    """What clients from before protocol 1.0 get instead, if it differs."""

    @property
    def older(self) -> bytes | None:
        """The event for a client from before protocol 1.0; None if it gets nothing."""
        if self.plain is not None:
            return self.plain
        return None if self.nested else self.data


class FellBehind(Exception):
    """A reader asked for events that are no longer kept. It needs a snapshot."""


class Feed:
    """The events of a thread, oldest first, as far back as they are kept.

    Each reader has its own position, and nothing waits for a reader: a slow one falls behind what is kept
    and is told so. A reader that is waiting gets all that arrives, however much. The first event after a
    pause is delivered at once, those that follow closely in batches. `boot` distinguishes the ids of this
    feed from those of any other, in this process or an earlier one.
    """

    def __init__(
        self,
        boot: str,
        *,
        most_items: int = _MOST_ITEMS,
        most_bytes: int = _MOST_BYTES,
        pause: float = _PAUSE,
        ended: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._boot = boot
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._last = 0
        self._most_items, self._most_bytes = most_items, most_bytes
        self._pause = pause
        self._ended = ended  # called with every event that ends a leg
        self._changed: asyncio.Future[None] | None = None
        self._waiting: dict[object, int] = {}
        """The positions of waiting readers. Events after them are kept until the readers have been woken."""
        self._timer: asyncio.TimerHandle | None = None
        self._woken_at = float("-inf")
        self.owner: object = None
        """The thread of this feed, which a reader keeps in memory through it."""

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._last

    @property
    def size(self) -> tuple[int, int]:
        """How many events are kept, and their size in bytes."""
        return len(self._items), self._bytes

    def id_of(self, number: int) -> str:
        return f"{self._boot}-{number}"

    def number_of(self, id: str) -> int | None:
        """The position of an id; None if it is not of this feed, or no longer kept."""
        boot, _, number = id.rpartition("-")
        if boot != self._boot or not (number.isascii() and number.isdecimal()) or len(number) > 18:
            return None
        found = int(number)
        return found if self._oldest() - 1 <= found <= self._last else None

    def append(self, events: Iterable[Event]) -> None:
        """Add events, and wake waiting readers."""
        before = self._last
        for event in events:
            data = event.data
            ends = str(data.get("runId", "")) if data["type"] == "RUN_FINISHED" else ""
            if data["type"] == "RUN_ERROR":
                ends = "*"
            if ends and self._ended is not None:
                self._ended(data)
            plain = None if event.plain is None else msgspec.json.encode(event.plain)
            item = Item(self._last + 1, msgspec.json.encode(data), event.nested, ends, plain)
            self._last += 1  # only now: an event that can't be encoded takes no position
            self._items.append(item)
            self._bytes += _size(item)
        while self._is_too_much() and self._items[0].number <= min(
            self._waiting.values(), default=self._last
        ):
            self._bytes -= _size(self._items.popleft())
        if self._last > before and self._changed is not None:
            self._wake_soon()

    def forget(self) -> None:
        """Drop all events. Readers fall behind, and earlier ids become invalid."""
        self._items.clear()
        self._bytes = 0
        self._last += 1
        if self._changed is not None:
            self._wake_soon()

    def since(self, number: int, most: int | None = None) -> Sequence[Item]:
        """The events after a position that are available now, at most `most`."""
        skip = number - self._oldest() + 1
        if skip < 0:
            raise FellBehind
        end = len(self._items) if most is None else min(len(self._items), skip + most)
        return [self._items[at] for at in range(skip, end)]

    def before_leg(self, leg: str, number: int) -> int:
        """The position just before a leg starts, searched after `number`; `number` itself if it is not found."""
        oldest = self._oldest()
        for at in range(len(self._items) - 1, max(number - oldest, -1), -1):
            data = self._items[at].data
            if _STARTED in data:
                told = msgspec.json.decode(data)
                if told["type"] == "RUN_STARTED" and told["runId"] == leg:
                    return oldest + at - 1
        return number

    async def after(self, number: int, seconds: float | None = None) -> Sequence[Item]:
        """The next events after a position. Waits up to `seconds` for one, and then returns none."""
        if number >= self._last:
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            waits = object()
            self._waiting[waits] = number
            try:
                await asyncio.wait({self._changed}, timeout=seconds)
            finally:
                del self._waiting[waits]
        return self.since(number, _AT_ONCE)

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
        waited, self._changed = self._changed, None
        if waited is not None and not waited.done():
            waited.set_result(None)

    def _is_too_much(self) -> bool:
        many = len(self._items)
        return many > self._most_items or (many > 1 and self._bytes > self._most_bytes)

    def _oldest(self) -> int:
        return self._items[0].number if self._items else self._last + 1


def _size(item: Item) -> int:
    return len(item.data) + len(item.plain or b"")
