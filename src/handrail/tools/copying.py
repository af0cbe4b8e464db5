"""Copies of params for policies to look at, so that nothing they do reaches the handler."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Copy = Callable[[Any], Any]

_UNCHANGEABLE = (
    str,
    bytes,
    int,
    float,
    bool,
    complex,
    type(None),
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    PurePath,
    enum.Enum,
)


def quick_copy(params: Any, namespace: Mapping[str, Any]) -> Copy | None:
    """How to copy params of this type without parsing again; None where only parsing is safe.

    That is where every field holds something that can't be changed: then the fields can be shared,
    and a frozen one need not be copied at all.
    """
    if not isinstance(params, type) or not dataclasses.is_dataclass(params) or hasattr(params, "__slots__"):
        return None
    try:
        hints = get_type_hints(params, localns=dict(namespace), include_extras=True)
    except (NameError, TypeError):
        return None
    if not all(_unchangeable(hints[field.name]) for field in dataclasses.fields(params)):
        return None
    frozen: bool = getattr(params, "__dataclass_params__").frozen  # noqa: B009  # not in the type stubs
    return _itself if frozen else _shallow


def _itself(params: Any) -> Any:
    return params


def _shallow(params: Any) -> Any:
    kind: Any = type(params)
    copied: Any = object.__new__(kind)
    copied.__dict__ = {**params.__dict__}
    return copied


def _unchangeable(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _unchangeable(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return all(_unchangeable(one) for one in get_args(annotation))
    if origin is Literal:
        return True
    return isinstance(annotation, type) and issubclass(annotation, _UNCHANGEABLE)
