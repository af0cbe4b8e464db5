"""Kinds of values: their names for error messages, the counts that keywords take, and those that pydantic does not write by itself."""

import re
from pathlib import PurePath
from typing import Any, cast

import pydantic_core

_TAKES_AN = re.compile(r"_*(?!eu|one|uni|use|uu|ur[il]|ut)[aeiou]", re.IGNORECASE)
"""Matches a type's name that begins with a vowel sound. `UserContext` and `URL` do not."""


def describe_kind(value: object) -> str:
    """Return the name of a value's type with its indefinite article, such as `an int` or `a str`."""
    name = type(value).__name__
    return f"{'an' if _TAKES_AN.match(name) else 'a'} {name}"


def as_count(value: object) -> int | None:
    """Return the value of a keyword such as `maxLength` as a count, or None if it is not one. 2.0 is 2, as in JSON Schema."""
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return int(cast("float", value)) if is_whole and cast("float", value) >= 0 else None


def write_path(value: object) -> str:
    """Write a path as text, as pydantic's `fallback`: it knows only `Path`, and not `PurePath`. Refuses other values."""
    if isinstance(value, PurePath):
        return str(value)
    raise pydantic_core.PydanticSerializationError(f"Unable to serialize unknown type: {type(value)}")


def to_plain(value: object) -> Any:
    """Return a value as plain data. Raises `PydanticSerializationError` if that is not possible."""
    return pydantic_core.to_jsonable_python(value, fallback=write_path)
