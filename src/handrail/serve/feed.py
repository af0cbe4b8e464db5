"""`Feed`: the events of one thread, encoded once, for any number of readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

_MOST_ITEMS = 4096
_MOST_BYTES = 4 * 2**20


class Event(NamedTuple):
    """One AG-UI event."""

    data: dict[str, Any]
    nested: bool = False
    """Is it about an agent inside a call? Clients of before 1.0 can't read these."""


class Item(NamedTuple):
    """An event on its place in the feed."""

    number: int
    data: bytes
    nested: bool
    ends: str
    """The leg that ends with it; "" for none."""


class FellBehind(Exception):
    """A reader wants what is kept no more: it needs a snapshot."""


class Feed:
    """What happened in a thread, newest last, as far back as is kept.

    Each reader has a place of its own, and nobody waits for a reader: one that is slow falls out of what
    is kept, and is told so. `boot` tells the numbers of this process from those of one before it.
    """

    def __init__(self, boot: str, *, most_items: int = _MOST_ITEMS, most_bytes: int = _MOST_BYTES) -> None:
        self._boot = boot
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._last = 0
        self._most_items, self._most_bytes = most_items, most_bytes
        self._changed: asyncio.Future[None] | None = None

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._last

    def id_of(self, number: int) -> str:
        return f"{self._boot}-{number}"

    def number_of(self, id: str) -> int | None:
        """The place an id stands for; None where it is not one of this process, or kept no more."""
        boot, _, number = id.rpartition("-")
        if boot != self._boot or not number.isdecimal() or len(number) > 18:
            return None
        found = int(number)
        return found if self._oldest() - 1 <= found <= self._last else None

    def append(self, events: Iterable[Event]) -> None:
        """Add events, and wake whoever waits for one."""
        for event in events:
            self._last += 1
            data = event.data
            ends = str(data.get("runId", "")) if data["type"] == "RUN_FINISHED" else ""
            if data["type"] == "RUN_ERROR":
                ends = "*"
            item = Item(self._last, msgspec.json.encode(data), event.nested, ends)
            self._items.append(item)
            self._bytes += len(item.data)
        while len(self._items) > self._most_items or (
            self._bytes > self._most_bytes and len(self._items) > 1
        ):
            self._bytes -= len(self._items.popleft().data)
        if self._changed is not None:
            if not self._changed.done():
                self._changed.set_result(None)
            self._changed = None

    async def after(self, number: int, seconds: float | None = None) -> Sequence[Item]:
        """The events after a place; waits for one, at most so long, and then has none."""
        if number >= self._last:
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._changed}, timeout=seconds)
        if number < self._oldest() - 1:
            raise FellBehind
        skip = number - self._oldest() + 1
        return [self._items[at] for at in range(skip, len(self._items))]

    def _oldest(self) -> int:
        return self._items[0].number if self._items else self._last + 1
