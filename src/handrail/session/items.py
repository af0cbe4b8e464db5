"""`Items` and `Table`: immutable collections that share structure.

Adding an item returns a new collection at nearly the same small cost for ten items or a million, even if a
hundred forks each add to the same base. The collections are tries with at most 32 branches at each node. Only the nodes
on the path to the new item are copied.

`Log` is a read-only view of a plain log slice, and `CopiedSlice` one whose items are copied when they are read. A frozen item may hold
a list, and a plain class is not frozen at all. If a handler changed such an item in place, the change would remain even if the call
failed. So a call reads copies. Whether the items of a type are copied is decided once, from the type and its annotations. Facts, and
items that can't be copied, are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from handrail.errors import DefinitionError
from handrail.events import Fact
from handrail.protocols import Slice
from handrail.schema.immutability import is_immutable

T = TypeVar("T")

_BITS = 5
_WIDTH = 1 << _BITS
_MASK = _WIDTH - 1


def not_keyed() -> DefinitionError:
    return DefinitionError("this slice has no keys. Declare a key on the type: @kept(key=...).")


class Readable(Generic[T]):
    """The methods for reading that all slices share."""

    __slots__ = ()

    def all(self) -> tuple[T, ...]:
        """Return every item in the order appended; in a keyed slice, in the order the keys were first added."""
        return tuple(self)

    def where(self, predicate: Callable[[T], bool], /) -> tuple[T, ...]:
        """Return the items for which `predicate` is true, in the slice's order."""
        return tuple(item for item in self if predicate(item))

    def get(self, key: Hashable, /) -> T | None:
        """Return the item with this key; None if there is none. Raises `DefinitionError` unless the slice is keyed."""
        raise not_keyed()

    def __iter__(self) -> Iterator[T]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.all() == cast("Readable[Any]", other).all()

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # compared by content, which may be unhashable

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


class Items(Readable[T]):
    """An immutable sequence. Appending to it returns a new one."""

    __slots__ = ("_full", "_tail")

    def __init__(self, items: Iterable[T] = ()) -> None:
        everything = tuple(items)
        full = _NO_BLOCKS
        whole = max(len(everything) - 1, 0) // _WIDTH * _WIDTH
        for start in range(0, whole, _WIDTH):
            full = _with_block(full, everything[start : start + _WIDTH])
        self._full = full
        self._tail = everything[whole:]

    def append(self, item: T) -> Items[T]:
        """Return a copy with one more item."""
        made: Items[T] = _new(Items)
        tail = self._tail
        if len(tail) < _WIDTH:
            made._full = self._full
            made._tail = tail + (item,)  # noqa: RUF005  # twice as fast as (*tail, item)
        else:
            made._full = _with_block(self._full, tail)
            made._tail = (item,)
        return made

    def replace(self, items: Iterable[T]) -> Items[T]:
        """Return a new collection of only these items."""
        return Items(items)

    def latest(self) -> T | None:
        """Return the newest item, or None if there is none."""
        return self._tail[-1] if self._tail else None

    def __iter__(self) -> Iterator[T]:
        _, shift, root = self._full
        yield from _leaves(root, shift)
        yield from self._tail

    def __len__(self) -> int:
        return self._full[0] + len(self._tail)


_new: Callable[[Any], Any] = object.__new__

_Blocks = tuple[int, int, tuple[Any, ...]]
"""The full blocks of 32 items, as the number of items, the root's shift, and the root."""

_NO_BLOCKS: _Blocks = (0, _BITS, ())


def _with_block(blocks: _Blocks, block: tuple[Any, ...]) -> _Blocks:
    size, shift, root = blocks
    if size >> shift >= _WIDTH:
        root, shift = (root,), shift + _BITS
    return size + _WIDTH, shift, _pushed(root, shift, size, block)


def _pushed(node: tuple[Any, ...], shift: int, index: int, block: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a node with one more block, whose first item has this index. Only the nodes above the block are copied."""
    if shift == _BITS:
        return node + (block,)  # noqa: RUF005  # twice as fast as (*node, block)
    slot = (index >> shift) & _MASK
    if slot < len(node):
        return node[:slot] + (_pushed(node[slot], shift - _BITS, index, block),)  # noqa: RUF005  # faster, too
    return node + (_pushed((), shift - _BITS, index, block),)  # noqa: RUF005  # faster, too


def _leaves(node: tuple[Any, ...], shift: int) -> Iterator[Any]:
    if shift == _BITS:
        for block in node:
            yield from block
    else:
        for child in node:
            yield from _leaves(child, shift - _BITS)


class Table(Readable[T]):
    """An immutable table of items by key. An item with a known key replaces the old one, and takes its place in the order.

    `key` returns an item's key. Iteration follows the order in which the keys were first added.
    """

    __slots__ = ("_key", "_order", "_root", "_size")

    def __init__(self, key: Callable[[T], Hashable]) -> None:
        self._key = key
        self._root: _Node = {}
        self._order: Items[Hashable] = Items()
        self._size = 0

    def append(self, item: T) -> Table[T]:
        """Return a copy with this item, which replaces an item with the same key."""
        key = self._key(item)
        found = _find(self._root, key)
        made = cast(Table[T], object.__new__(Table))
        made._key = self._key
        made._root = _put(self._root, 0, hash(key), key, item)
        made._order = self._order if found is not _NOTHING else self._order.append(key)
        made._size = self._size + (found is _NOTHING)
        return made

    def replace(self, items: Iterable[T]) -> Table[T]:
        """Return a new table of only these items, with the same key function."""
        made = Table(self._key)
        for item in items:
            made = made.append(item)
        return made

    def get(self, key: Hashable, /) -> T | None:
        """Return the item with this key, or None if there is none."""
        found = _find(self._root, key)
        return None if found is _NOTHING else cast(T, found)

    def latest(self) -> T | None:
        """Return the item with the most recently added key, or None if there is none."""
        key = self._order.latest()
        return None if self._size == 0 else self.get(key)

    def __iter__(self) -> Iterator[T]:
        for key in self._order:
            yield cast(T, _find(self._root, key))

    def __len__(self) -> int:
        return self._size


_NOTHING = object()

_Node = dict[int, Any]
"""Maps a slot to a deeper node, or to a leaf with the items of all keys that have the same hash."""


class _Leaf:
    __slots__ = ("code", "items")

    def __init__(self, code: int, items: dict[Hashable, Any]) -> None:
        self.code = code
        self.items = items


def _find(node: _Node, key: Hashable) -> Any:
    code = hash(key)
    shift = 0
    while True:
        child = node.get((code >> shift) & _MASK)
        if child is None:
            return _NOTHING
        if isinstance(child, _Leaf):
            return child.items.get(key, _NOTHING) if child.code == code else _NOTHING
        node = child
        shift += _BITS


def _put(node: _Node, shift: int, code: int, key: Hashable, item: Any) -> _Node:
    """Return a copy of the node with the item added. A node has at most 32 slots, so copying is cheap."""
    slot = (code >> shift) & _MASK
    child = node.get(slot)
    if child is None:
        placed: Any = _Leaf(code, {key: item})
    elif not isinstance(child, _Leaf):
        placed = _put(child, shift + _BITS, code, key, item)
    elif child.code == code:
        placed = _Leaf(code, {**child.items, key: item})
    else:
        moved: _Node = {(child.code >> (shift + _BITS)) & _MASK: child}
        placed = _put(moved, shift + _BITS, code, key, item)
    return {**node, slot: placed}


class Log(Readable[T]):
    """A view of a log with the items that it had when the view was created, oldest first.

    Later items are not included: like every slice, the view never changes. It shares the session's own list,
    which only grows, so the cost of creating a view does not depend on the log's length.
    """

    __slots__ = ("_items", "_size")

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._size = len(items)

    def latest(self) -> T | None:
        """Return the newest item, or None if there is none."""
        return self._items[self._size - 1] if self._size else None

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._size)

    def __len__(self) -> int:
        return self._size


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
