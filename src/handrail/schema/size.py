"""Limits on the number of values in JSON text, so that parsing it never takes long.

The values are counted in the text, before any of them is built. A value costs a hundred times as much to build as a
character of a string, and an invalid one fifty times as much again. Integers beyond 64 bits can be chosen so that building
a set of them takes quadratic time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import pydantic_core

from handrail.errors import ToolValidationError

LONG = 10_000
"""Arguments of up to this many characters need no check, because they can't contain enough values to matter."""
MOST_VALUES = 20_000
"""Maximum number of values in the arguments of one call, including those inside lists and objects."""
MOST_BIG_INTEGERS = 1_000
"""Maximum number of integers beyond 64 bits in the arguments of one call."""

_BEYOND = 1 << 63


def exceeds(value: Any, limit: int) -> bool:
    """Return whether a parsed JSON value contains more than `limit` values, counting itself."""
    return any(True for _ in islice(values_in(value), limit, limit + 1))


def count_values(data: bytes, limit: int) -> int:
    """Return the number of values in JSON text, including those inside lists and objects.

    Text with more than `limit` values may get any number above `limit`. Text that is not JSON gets some number. The time
    grows with the length of the text only, and building the values would take many times as long.
    """
    if (most := 1 + sum(data.count(mark) for mark in (b",", b"[", b"{"))) <= limit:
        return most
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * limit:
        return most  # a value has at most four quotes: its own and those of its name
    outside = b"0".join(plain.split(b'"')[::2]).translate(None, b" \t\r\n")
    # each value is the first, or follows a comma or the beginning of a list or object that is not empty
    begun = outside.count(b"[") + outside.count(b"{") - outside.count(b"[]") - outside.count(b"{}")
    return 1 + outside.count(b",") + begun


def check_size(data: str | bytes) -> None:
    """Raise `ToolValidationError` if JSON text contains too many values, or too many large integers.

    Other text that is not JSON passes, because parsing reports it.
    """
    text = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    if (values := count_values(text, MOST_VALUES)) > MOST_VALUES:
        raise _too_many(values, "values", MOST_VALUES)
    if values <= MOST_BIG_INTEGERS:
        return
    try:
        given = pydantic_core.from_json(data)
    except ValueError:
        return  # parsing will report what is wrong
    big = sum(isinstance(each, int) and not -_BEYOND <= each < _BEYOND for each in values_in(given))
    if big > MOST_BIG_INTEGERS:
        raise _too_many(big, "integers beyond 64 bits", MOST_BIG_INTEGERS)


def _too_many(number: int, what: str, most: int) -> ToolValidationError:
    return ToolValidationError(
        f"the arguments contain {number:,} {what}, and the limit is {most:,}. Send fewer, or write them to "
        "a file and pass its path."
    )


def values_in(value: Any) -> Iterator[Any]:
    """Yield a value and every value inside it, at any depth, in no particular order."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, dict):
            waiting.extend(cast("dict[str, Any]", each).values())
        elif isinstance(each, list | tuple):
            waiting.extend(cast("list[Any]", each))


def dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every dict in a value, such as a JSON Schema or a core schema, in no particular order."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield cast("dict[str, Any]", each)
            waiting.extend(cast("dict[str, Any]", each).values())
        elif isinstance(each, list | tuple):
            waiting.extend(cast("list[Any]", each))
