"""Kinds of values: their names for error messages, and the counts that keywords take."""

import re
from typing import cast

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
