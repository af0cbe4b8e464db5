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

import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

import msgspec

from handrail.errors import DefinitionError, ReducerError
from handrail.events import Fact
from handrail.schema.problems import describe_kind
from handrail.session.items import Items, Table

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

    def __post_init__(self) -> None:
        if self.kind not in ("state", "log"):
            raise DefinitionError(f"the kind of a slice is {self.kind!r}. Use kind='state' or kind='log'.")
        if self.key is not None and not callable(self.key):
            raise DefinitionError(
                f"the key of a slice is {self.key!r}, not a function. "
                "Pass a function of the item: key=lambda item: item.id."
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
    rules = SliceRules(kind, key, dict(reducers or {}))

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
