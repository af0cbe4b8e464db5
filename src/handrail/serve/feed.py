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
"""How many events a reader is given at a time: one that is far behind does not hold all of them again."""
_STARTED = b'"RUN_STARTED"'
_PAUSE = 0.02
"""Readers are woken at most this often, in seconds: a token each would cost every viewer a wake-up."""


class Item(NamedTuple):
    """An event on its place in the feed."""

    number: int
    data: bytes
    nested: bool
    ends: str
    """The leg that ends with it; "" for none, `*` for whichever is open."""
    plain: bytes | None = None
    """What clients of before protocol 1.0 get in its place, where it is to be something else."""

    @property
    def older(self) -> bytes | None:
        """The event for a client of before 1.0; None where it gets nothing."""
        if self.plain is not None:
            return self.plain
        return None if self.nested else self.data


class FellBehind(Exception):
    """A reader wants what is kept no more: it needs a snapshot."""


class Feed:
    """What happened in a thread, newest last, as far back as is kept.

    Each reader has a place of its own, and nobody waits for a reader: one that is slow falls out of what
    is kept, and is told so. One that waits for what comes next gets it, however much comes at once. The first event after a silence is told at once, those that follow it closely
    together. `boot` tells the numbers of this feed from those of any other, of this process or of one before it.
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
        self._ended = ended  # told of every event that ends a leg
        self._changed: asyncio.Future[None] | None = None
        self._waiting: dict[object, int] = {}
        """The places of the readers that wait. What comes after them stays until they are woken, however much it is."""
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self.owner: object = None
        """Whose feed it is. A reader keeps it alive by this, and is found by whoever comes next."""

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._last

    @property
    def size(self) -> tuple[int, int]:
        """How many events are kept, and how many bytes they take."""
        return len(self._items), self._bytes

    def id_of(self, number: int) -> str:
        return f"{self._boot}-{number}"

    def number_of(self, id: str) -> int | None:
        """The place an id stands for; None where it is not one of this feed, or kept no more."""
        boot, _, number = id.rpartition("-")
        if boot != self._boot or not (number.isascii() and number.isdecimal()) or len(number) > 18:
            return None
        found = int(number)
        return found if self._oldest() - 1 <= found <= self._last else None

    def append(self, events: Iterable[Event]) -> None:
        """Add events, and wake whoever waits for one."""
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
            self._last += (
                1  # only now: one that can't be encoded has no place, and the next is found on its own
            )
            self._items.append(item)
            self._bytes += _size(item)
        while self._is_too_much() and self._items[0].number <= min(
            self._waiting.values(), default=self._last
        ):
            self._bytes -= _size(self._items.popleft())
        if self._last > before and self._changed is not None:
            self._tell_soon()

    def forget(self) -> None:
        """Keep nothing of what happened. Whoever reads it has fallen behind; no id of before is a place any more."""
        self._items.clear()
        self._bytes = 0
        self._last += 1
        if self._changed is not None:
            self._tell_soon()

    def since(self, number: int, most: int | None = None) -> Sequence[Item]:
        """The events after a place, as far as they are there now, at most so many."""
        skip = number - self._oldest() + 1
        if skip < 0:
            raise FellBehind
        end = len(self._items) if most is None else min(len(self._items), skip + most)
        return [self._items[at] for at in range(skip, end)]

    def before_leg(self, leg: str, number: int) -> int:
        """The place right before a leg begins, looked for after a place; that place where it is not found."""
        oldest = self._oldest()
        for at in range(len(self._items) - 1, max(number - oldest, -1), -1):
            data = self._items[at].data
            if _STARTED in data:
                told = msgspec.json.decode(data)
                if told["type"] == "RUN_STARTED" and told["runId"] == leg:
                    return oldest + at - 1
        return number

    async def after(self, number: int, seconds: float | None = None) -> Sequence[Item]:
        """The next events after a place; waits for one, at most so long, and then has none."""
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

    def _tell_soon(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = self._told_at + self._pause
        if loop.time() >= next_at:
            self._tell()
        elif self._timer is None:
            self._timer = loop.call_at(next_at, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_at = asyncio.get_running_loop().time()
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
