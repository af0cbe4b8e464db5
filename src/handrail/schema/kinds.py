"""Kinds of values, named for error messages."""

import re

_TAKES_AN = re.compile(r"_*(?!eu|one|uni|use|uu|ur[il]|ut)[aeiou]", re.IGNORECASE)
"""Matches a type's name that begins with a vowel sound. `UserContext` and `URL` do not."""


def describe_kind(value: object) -> str:
    """Return the name of a value's type with its indefinite article, such as `an int` or `a str`."""
    name = type(value).__name__
    return f"{'an' if _TAKES_AN.match(name) else 'a'} {name}"
