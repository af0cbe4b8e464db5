"""What comes in the body of a request: read strictly, since nobody who means well sends anything else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
import pydantic_core

from handrail.errors import RequestRefused

T = TypeVar("T")
_DEPTH = 64
_AT = re.compile(r" - at `\$(.*)`$")


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message."""

    text: str


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer to a question."""

    question_id: str
    digest: str
    outcome: Literal["answered", "declined", "cancelled"] = "answered"
    value: Any = None
    reason: str = ""


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token, to get a cookie for."""

    token: str


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty body, or an empty object."""


def read(data: bytes, kind: type[T]) -> T:
    """The body as what it is to be, or `RequestRefused` that says where it is not."""
    value: Any = read_json(data) if data or kind is not Nothing else {}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        found = _AT.search(str(error))
        where = found[1] if found else ""
        what = str(error)[: found.start()] if found else str(error)
        pointer = re.sub(r"\[(\d+)\]|\.", lambda part: "/" + (part[1] or ""), where)
        raise RequestRefused(
            422, "BodyUnfit", f"the body does not fit: {what}", fields=[(pointer, what)]
        ) from None


def read_json(data: bytes) -> Any:
    """A JSON value that can be kept and shown as it is; `RequestRefused` for anything else.

    No name twice in an object, no number that is not finite or has over 64 bits, no half characters,
    no more than 64 levels.
    """
    try:
        pydantic_core.from_json(
            data, allow_inf_nan=False
        )  # UTF-8, whole characters, and not too deep to read
        value: Any = json.loads(
            data, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_float, parse_int=_int
        )
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "BadJson", f"the body can't be read as JSON: {_why(error)}") from None
    if _deeper_than(value, _DEPTH):
        raise RequestRefused(400, "BadJson", f"the body has more than {_DEPTH} levels. Nest it less deeply.")
    return value


def _why(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has the same name twice")
    return made


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON: write null, or a number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**64:
        raise ValueError("a whole number has over 64 bits")
    return value


def _deeper_than(value: Any, levels: int) -> bool:
    """Level by level, so that nothing recurses."""
    here: list[Any] = [value]
    for _ in range(levels + 1):
        inner: list[Any] = []
        for each in here:
            if isinstance(each, dict):
                inner.extend(each.values())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # plain JSON
            elif isinstance(each, list):
                inner.extend(each)  # pyright: ignore[reportUnknownArgumentType]  # plain JSON
        if not inner:
            return False
        here = inner
    return True
