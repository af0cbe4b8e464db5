"""Copies of items that a handler could change in place.

A frozen item may hold a list, and a plain class is not frozen at all. If a handler changed such an item in place, the
change would remain even if the call failed. So a call reads copies. Whether the items of a type are copied is decided once,
from the type and its annotations. Facts, and items that can't be copied, are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from typing import Any, TypeVar

from handrail.events import Fact
from handrail.protocols import Slice
from handrail.schema.immutability import is_immutable
from handrail.session.items import Readable

T = TypeVar("T")

shared: set[type] = set()
"""The types found so far whose items are not copied: every call may read the items themselves."""
_copied: set[type] = set()


class CopiedSlice(Readable[T]):
    """A slice whose items are copied when they are read."""

    __slots__ = ("_slice",)

    def __init__(self, slice_: Slice[T]) -> None:
        self._slice = slice_

    def get(self, key: Hashable, /) -> T | None:
        return _copy(self._slice.get(key))

    def latest(self) -> T | None:
        return _copy(self._slice.latest())

    def __iter__(self) -> Iterator[T]:
        items: Any = self._slice
        return map(_copy, items)

    def __len__(self) -> int:
        return len(self._slice)


def _copy(item: T) -> T:
    try:
        return copy.deepcopy(item)
    except Exception:
        return item  # it holds something that can't be copied, such as a lock


def readable(kind: type[T], slice_: Slice[T]) -> Slice[T]:
    """Return a slice for a call to read: the slice itself, or one that copies its items if they could be changed in place.

    Call this for types that are not in `shared`.
    """
    if kind not in _copied:
        if issubclass(kind, Fact) or is_immutable(kind):
            shared.add(kind)
            return slice_
        _copied.add(kind)
    return CopiedSlice(slice_)
