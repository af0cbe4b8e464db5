"""Slices: their kinds, keys and reducers, which events go into which slice, and the types that recorded items may name.

An item is recorded with the name of its type. Whoever wrote the record chose that name, so it is only ever compared with
types that this process already has, and a type decodes items only if it belongs to one of these:

- Handrail's own facts and records,
- the built-in types of plain data,
- types that code has declared, with `@kept`, as the event of a reducer, or in `slices=`,
- modules that are not installed packages, and packages that import Handrail: an app and its plugins.

The types of other installed packages are left out, because decoding some of them runs code that the data chooses.
`pydantic.ImportString`, for example, imports what it is given.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, Literal, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

import msgspec

from handrail.errors import DefinitionError, ReducerError
from handrail.events import Fact
from handrail.protocols import Slice
from handrail.schema.immutability import is_immutable
from handrail.schema.problems import describe_kind

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
    """An immutable sequence. Appending to it returns a new one, at nearly the same small cost for ten items or a million.

    Even if a hundred forks each add to the same base. The sequence is a trie with at most 32 branches at each node, and only the
    nodes on the path to the new item are copied.
    """

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
    """A slice whose items are copied when they are read.

    A frozen item may hold a list, and a plain class is not frozen at all. If a handler changed such an item in place, the change
    would remain even if the call failed. Whether the items of a type are copied is decided once, from the type and its
    annotations. Facts, and items that can't be copied, are shared.
    """

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


K = TypeVar("K", bound=type)

_declared: WeakSet[type] = WeakSet((bool, bytes, dict, float, frozenset, int, list, set, str, tuple))
_local: WeakValueDictionary[str, type] = WeakValueDictionary()
"""Types defined inside functions, whose items this process has encoded. No other process can find them.

They are for tests and throwaway runs.
"""
_own: dict[str, bool] = {}
"""The modules that are known to belong to apps and plugins. A module that does not may still import Handrail later."""


def declare(kind: K) -> K:
    """Let recorded items name this type. This can be used as a decorator."""
    _declared.add(kind)
    return kind


def name_of(kind: type) -> str:
    """Return the name by which recorded items name a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_kind(kind: type) -> bool:
    """Return whether recorded items may name this type."""
    module = kind.__module__
    if _own.get(module) or kind in _declared or "<locals>" in kind.__qualname__:
        return True
    if module.partition(".")[0] == "handrail":
        return issubclass(kind, Fact | msgspec.Struct)
    if _is_own(module):
        _own[module] = True
        return True
    return False


def remember(kind: type, name: str) -> None:
    """Let this process find a type that is defined inside a function, by its name."""
    if "<locals>" in name:
        _local[name] = kind


def kind_named(name: str) -> type | None:
    """Return the type with this name, if recorded items may name it; None if there is none. Imports and runs nothing."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:]:
            found = _members(found).get(part)
        if isinstance(found, type) and name_of(found) == name:
            return found if is_kind(found) else None
    return _local.get(name)


def _members(owner: object) -> Mapping[str, object]:
    """Return what a module or class contains, without `__getattr__` or a lazy loader, which could import something."""
    if issubclass(type(owner), type):
        return type.__getattribute__(cast(type, owner), "__dict__")
    return object.__getattribute__(owner, "__dict__") if issubclass(type(owner), ModuleType) else {}


def _is_own(name: str) -> bool:
    """Return whether a module is not from an installed package, or is from one that imports Handrail."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return False
    file = _members(sys.modules.get(name)).get("__file__")
    folder = os.path.dirname(os.path.abspath(file)) if isinstance(file, str) else ""
    if name == "__main__" or (folder and not _is_installed(folder)):
        return True
    modules = [each for key, each in tuple(sys.modules.items()) if key == top or key.startswith(f"{top}.")]
    return any(_is_ours(value) for module in modules for value in tuple(_members(module).values()))


def _is_ours(value: object) -> bool:
    """Return whether a module's global is one of Handrail's modules, classes or functions, or an instance of such a class."""
    kind = type(value)
    if issubclass(kind, type | FunctionType):
        named = cast(type, value).__module__
    else:
        named = _members(value).get("__name__") if issubclass(kind, ModuleType) else kind.__module__
    return str(named).partition(".")[0] == "handrail"


@lru_cache(maxsize=1024)
def _is_installed(folder: str) -> bool:
    """Return whether a folder is in one that packages were installed in."""
    return any(
        each.name in ("site-packages", "dist-packages") or any(each.glob("*.dist-info"))
        for each in (Path(folder), *Path(folder).parents)
    )


SliceKind = Literal["state", "log"]
"""A change to *state* is undone if the call that made it fails; a *log* keeps what happened, whatever the outcome."""

Contents = Items[Any] | Table[Any]
Reducer = Callable[[Any, Any], Any]
"""A function `(slice, event) -> slice`. It must be pure, since it may run again when a call commits, and fast, since it runs under a lock."""

F = TypeVar("F", bound=type)

_RULES = "__handrail_slice__"


@dataclass(frozen=True, slots=True)
class SliceRules:
    """Rules for how a session stores the items of one type."""

    kind: SliceKind = "state"
    key: Callable[[Any], Hashable] | None = None
    """A function that returns an item's key. An appended item replaces an earlier one with the same key.

    Without such a function, appending an item replaces nothing.
    """
    reducers: Mapping[type, Reducer] = field(default_factory=dict[type, Reducer])
    """The slice's reducers, by event type.

    An event that no slice has a reducer for is appended to the slice of its own type. An event whose
    type is a log is also appended to that log, unless the log has a reducer for it.
    """
    upgrade: Callable[[Any], Any] | None = None
    """A function that returns an item for the JSON value of one that was recorded before the type was changed.

    It is only called for an item that no longer matches the type, and only if it is declared on the type, with `@kept`.
    """

    def __post_init__(self) -> None:
        if self.kind not in ("state", "log"):
            raise DefinitionError(f"the kind of a slice is {self.kind!r}. Use kind='state' or kind='log'.")
        if self.key is not None and not callable(self.key):
            raise DefinitionError(
                f"the key of a slice is {self.key!r}, not a function. "
                "Pass a function of the item: key=lambda item: item.id."
            )
        if self.upgrade is not None and not callable(self.upgrade):
            raise DefinitionError(
                f"the upgrade of a slice is {self.upgrade!r}, not a function. "
                "Pass a function of the recorded value: upgrade=lambda value: Todo(value['text'])."
            )
        for event, reducer in self.reducers.items():
            check_reducer(event, reducer)

    def empty(self) -> Contents:
        return Items() if self.key is None else Table(self.key)

    @property
    def is_plain_log(self) -> bool:
        """Whether items are only ever appended, so that a list is enough."""
        return self.kind == "log" and self.key is None and not self.reducers


def check_reducer(event: object, reducer: object) -> None:
    """Raise `DefinitionError` unless `event` is a type and `reducer` is a function."""
    if not isinstance(event, type):
        raise DefinitionError(f"a reducer handles a type of event, not {event!r}. Pass the event's class.")
    if not callable(reducer):
        raise DefinitionError(
            f"the reducer for {event.__name__} is {describe_kind(reducer)}. "
            "Pass a function: (slice, event) -> slice."
        )


_DEFAULT = SliceRules()
_LOG = SliceRules("log")


def kept(
    nothing: None = None,
    /,
    *,
    kind: SliceKind = "state",
    key: Callable[[Any], Hashable] | None = None,
    reducers: Mapping[type, Reducer] | None = None,
    upgrade: Callable[[Any], Any] | None = None,
) -> Callable[[F], F]:
    """Declare on a type how a session stores its items, as in `@kept(key=lambda todo: todo.id)`.

    The arguments are the fields of `SliceRules`.
    """
    given: Any = nothing
    if isinstance(given, str):
        raise DefinitionError(
            f"@kept({given!r}) has an argument without a name. Write @kept(kind={given!r})."
        )
    if given is not None:
        name = getattr(given, "__name__", repr(given))
        raise DefinitionError(
            f"@kept above {name} has no arguments. Write @kept(kind=...), or leave it out: items are state by default."
        )
    rules = SliceRules(kind, key, dict(reducers or {}), upgrade)

    def mark(type_: F) -> F:
        setattr(type_, _RULES, rules)
        declare(type_)
        for event in rules.reducers:
            declare(event)
            slices = _marked.setdefault(event, [])
            if type_ not in slices:
                slices.append(type_)
        return type_

    return mark


_marked: dict[type, list[type]] = {}
"""Maps each event type to the slices whose own declaration has a reducer for it."""


def is_only_logged(fact: type) -> bool:
    """Return whether facts of this type go into their own log only, unless a session has rules of its own.

    That is so if neither the type nor a slice declares otherwise.
    """
    return _RULES not in fact.__dict__ and fact not in _marked and issubclass(fact, Fact)


def slices_marked_for(event: type) -> list[type]:
    """Return the slices whose own declaration has a reducer for this event type."""
    return [slice_ for slice_ in _marked.get(event, ()) if event in rules_of(slice_).reducers]


def rules_of(type_: type) -> SliceRules:
    """Return the declared rules of a type. By default, Handrail's facts are logs and everything else is state.

    Raises `DefinitionError` if `@kept(reducers=...)` decorated a class that another decorator then replaced.
    """
    own = type_.__dict__.get(_RULES)
    if isinstance(own, SliceRules):
        if any(type_ not in _marked.get(event, ()) for event in own.reducers):
            raise DefinitionError(
                f"{type_.__name__} was decorated with @kept, and another decorator, such as @dataclass(slots=True), then "
                "replaced the class. Put @kept above the other decorators."
            )
        return own
    return _LOG if issubclass(type_, Fact) else _DEFAULT


def append(contents: Contents, event: Any) -> Contents:
    """Append the event itself as an item. This is the default reducer."""
    return contents.append(event)


State = dict[type, Contents]
"""Maps types to slices. A state is never modified once a session or fork has it; a change creates a new one."""

EMPTY: Items[object] = Items()


class Target:
    """A slice into which an event goes, with its reducer."""

    __slots__ = ("is_log", "is_plain_log", "reducer", "rules", "slice")

    def __init__(self, slice_: type, reducer: Reducer, rules: SliceRules) -> None:
        self.slice = slice_
        self.reducer = reducer
        self.rules = rules
        self.is_log = rules.kind == "log"
        self.is_plain_log = rules.is_plain_log

    def reduce(self, contents: Contents | None, event: object) -> Contents:
        """Return the slice with the event reduced into it.

        Raises `ReducerError` if the reducer raises or does not return a slice of the same class.
        """
        try:
            before = self.rules.empty() if contents is None else contents
            changed = self.reducer(before, event)
        except (Exception, GeneratorExit) as error:
            raise ReducerError(_name_of(self.reducer), event, error) from error
        if type(changed) is not type(before):
            wrong = TypeError(
                f"it returned {describe_kind(changed)}, not the slice: use slice.append or slice.replace"
            )
            raise ReducerError(_name_of(self.reducer), event, wrong)
        return changed


class Route:
    """All targets of one event type, grouped once instead of at every dispatch."""

    __slots__ = ("appends_to", "logs", "plain_logs", "reduced_logs", "state", "targets")

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = tuple(targets)
        self.state = tuple(target for target in targets if not target.is_log)
        self.logs = tuple(target for target in targets if target.is_log)
        self.plain_logs = tuple(target.slice for target in self.logs if target.is_plain_log)
        self.reduced_logs = tuple(target for target in self.logs if not target.is_plain_log)
        self.appends_to = self._only_appends_to()
        """The slice of the only target, if it is state without a key and events are simply appended to it; otherwise None."""

    def _only_appends_to(self) -> type | None:
        if len(self.targets) != 1:
            return None
        only = self.targets[0]
        simple = only.reducer is append and only.rules.key is None and not only.is_log
        return only.slice if simple else None


def reduce_into(state: Mapping[type, Contents], event: object, targets: Sequence[Target]) -> State:
    """Return the new slices of these targets. Raises `ReducerError` if a reducer fails."""
    return {target.slice: target.reduce(state.get(target.slice), event) for target in targets}


def _name_of(reducer: Reducer) -> str:
    return getattr(reducer, "__qualname__", repr(reducer))
