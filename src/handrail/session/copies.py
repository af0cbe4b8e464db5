"""Copies of items that a handler could change in place.

A frozen item may hold a list, and a plain class is not frozen at all. If a handler changed such an item in place, the
change would remain even if the call failed. So a call reads copies. Whether the items of a type are copied is decided once,
from the type and its annotations. Facts, and items that can't be copied, are shared.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import types
from collections.abc import Hashable, Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel

from handrail.events import Fact
from handrail.protocols import Slice
from handrail.session.items import Readable

T = TypeVar("T")

_IMMUTABLE = (
    *(str, bytes, int, float, bool, complex, type(None), decimal.Decimal, PurePath, enum.Enum),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)

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
        if issubclass(kind, Fact) or _is_immutable(kind, {}):
            shared.add(kind)
            return slice_
        _copied.add(kind)
    return CopiedSlice(slice_)


def _is_immutable(annotation: Any, seen: dict[Any, bool]) -> bool:
    """Return whether a type's annotations show that its values can't be changed.

    A type that refers to itself is judged by its other fields.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_immutable(arguments[0], seen)
    if origin is Literal or annotation is None:
        return True
    if origin in (Union, types.UnionType, tuple, frozenset):
        return all(each is Ellipsis or _is_immutable(each, seen) for each in arguments)
    if origin is not None or not isinstance(annotation, type):
        return False
    if issubclass(annotation, _IMMUTABLE):
        return True
    kind = cast("type[Any]", annotation)
    return _is_frozen(kind) and _has_immutable_fields(kind, seen)


def _has_immutable_fields(kind: type, seen: dict[Any, bool]) -> bool:
    if kind in seen:
        return True
    seen[kind] = True
    try:
        hints = get_type_hints(kind, include_extras=True)
    except Exception:
        return False  # an annotation can't be resolved: copying is safe
    private = cast("dict[str, Any]", getattr(kind, "__private_attributes__", {}))
    return not private and all(
        _is_immutable(hint, seen)
        for name, hint in hints.items()
        if not name.startswith(("__", "model_")) and "ClassVar" not in str(hint)
    )


def _is_frozen(kind: type) -> bool:
    if dataclasses.is_dataclass(kind):
        return bool(getattr(kind, "__dataclass_params__").frozen)  # noqa: B009  # not in the type stubs
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.frozen
    return issubclass(kind, BaseModel) and bool(kind.model_config.get("frozen"))
