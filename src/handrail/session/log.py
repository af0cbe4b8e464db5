"""`Log`: what a plain log slice holds when it is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from handrail.session.items import not_keyed

T = TypeVar("T")


class Log(Generic[T]):
    """The items of a log at the moment it was read, oldest first.

    What is logged later is not in it: like every slice, it never changes. It shares the session's
    own list, which only ever grows, so reading costs the same however long the log is.
    """

    __slots__ = ("_items", "_size")

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._size = len(items)

    def latest(self) -> T | None:
        """The newest item, or None."""
        return self._items[self._size - 1] if self._size else None

    def all(self) -> tuple[T, ...]:
        """Every item, oldest first."""
        return tuple(self)

    def where(self, predicate: Callable[[T], bool], /) -> tuple[T, ...]:
        """The items for which `predicate` is true, oldest first."""
        return tuple(item for item in self if predicate(item))

    def get(self, key: Hashable, /) -> T | None:
        raise not_keyed()

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._size)

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"Log({list(self)!r})"
