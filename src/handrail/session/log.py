"""`Log`: a read of a plain log slice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

from handrail.session.items import Readable

T = TypeVar("T")


class Log(Readable[T]):
    """The items of a log at the time it was read, oldest first.

    Later items are not in it: like every slice, it never changes. It shares the session's own list,
    which only grows, so reading costs the same however long the log is.
    """

    __slots__ = ("_items", "_size")

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._size = len(items)

    def latest(self) -> T | None:
        """Return the newest item, or None."""
        return self._items[self._size - 1] if self._size else None

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._size)

    def __len__(self) -> int:
        return self._size
