"""Types of params: which ones can be used, and how their instances are copied for policies."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel

Copy = Callable[[Any], Any]

_IMMUTABLE = (
    *(str, bytes, int, float, bool, complex, type(None), decimal.Decimal, PurePath, enum.Enum),
    *(datetime.date, datetime.time, datetime.timedelta),
)


def is_record(kind: Any) -> bool:
    """Whether a type is a dataclass or a pydantic model with named fields."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return not getattr(origin, "__pydantic_root_model__", False)
    return isinstance(origin, type) and dataclasses.is_dataclass(cast("type[Any]", origin))


def quick_copy(params: Any, namespace: Mapping[str, Any]) -> Copy | None:
    """How to copy params of this type without parsing again; None where only parsing is safe.

    Fields that are all immutable can be shared, and a frozen dataclass of them need not be copied at all.
    """
    if not isinstance(params, type) or not dataclasses.is_dataclass(params) or hasattr(params, "__slots__"):
        return None
    try:
        hints = get_type_hints(params, localns=dict(namespace), include_extras=True)
    except (NameError, TypeError):
        return None
    if not all(_is_immutable(hints[field.name]) for field in dataclasses.fields(params)):
        return None
    frozen: bool = getattr(params, "__dataclass_params__").frozen  # noqa: B009  # not in the type stubs
    return _share if frozen else _shallow_copy


def _share(params: Any) -> Any:
    return params


def _shallow_copy(params: Any) -> Any:
    copied: Any = object.__new__(params.__class__)
    copied.__dict__ = {**params.__dict__}
    return copied


def _is_immutable(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_immutable(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return all(_is_immutable(one) for one in get_args(annotation))
    if origin is Literal:
        return True
    return isinstance(annotation, type) and issubclass(annotation, _IMMUTABLE)
