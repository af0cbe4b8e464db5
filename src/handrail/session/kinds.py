"""Kinds: the types that a session's recorded items may name.

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
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

import msgspec

from handrail.events import Fact

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
