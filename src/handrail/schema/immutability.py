"""Immutability: whether a type's annotations show that its values can't be changed in place."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    SupportsIndex,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from pydantic import BaseModel

_IMMUTABLE = (
    *(str, bytes, int, float, bool, complex, type(None), decimal.Decimal, PurePath, enum.Enum),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)


def is_immutable(annotation: Any) -> bool:
    """Return whether a type's annotations show that its values can't be changed.

    A type that refers to itself is judged by its other fields.
    """
    return _is_immutable(annotation, {})


def _is_immutable(annotation: Any, seen: dict[Any, bool]) -> bool:
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


_HINT = "It is read-only, because it is shared. Change a copy of it: copy.deepcopy(...)."


def _refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(_HINT)


class ReadOnlyDict(dict[str, Any]):
    """A dict that can't be changed. It is a `dict`, so that JSON encoders and type checks accept it; a deep copy is plain."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = cast("Callable[..., NoReturn]", _refuse)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that can't be changed."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = cast(
        "Callable[..., NoReturn]", _refuse
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(value, memo) for value in self]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return ReadOnlyList, (list(self),)


def read_only(value: Any) -> Any:
    """Copy plain data so that nothing in it can be changed, at any depth. Objects of other classes are kept as they are."""
    if isinstance(value, ReadOnlyDict | ReadOnlyList):
        return value
    if isinstance(value, Mapping):
        return ReadOnlyDict({key: read_only(each) for key, each in cast("Mapping[Any, Any]", value).items()})
    if isinstance(value, list):
        return ReadOnlyList(map(read_only, cast("list[Any]", value)))
    if type(value) is tuple:
        return tuple(map(read_only, cast("tuple[Any, ...]", value)))
    if isinstance(value, set):
        return frozenset(cast("set[Any]", value))
    return bytes(value) if isinstance(value, bytearray) else value
