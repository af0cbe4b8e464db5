"""Limits on the number of values in a call's arguments, so that parsing them never takes long.

Arguments are parsed on the event loop. Parsing a long text is fast, but an invalid value takes fifty times as long as
a valid one. Integers beyond 64 bits can be chosen so that building a set of them takes quadratic time.
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
    return any(True for _ in islice(_values_in(value), limit, limit + 1))


def check_size(data: str | bytes) -> None:
    """Raise `ToolValidationError` if JSON text contains too many values, or too many large integers.

    Text that is not JSON passes, because parsing reports it.
    """
    if _most_values(data) <= MOST_BIG_INTEGERS:
        return
    try:
        given = pydantic_core.from_json(data)
    except ValueError:
        return  # parsing will report what is wrong
    values = big = 0
    for value in _values_in(given):
        values += 1
        big += isinstance(value, int) and not -_BEYOND <= value < _BEYOND
    for number, most, what in (
        (values, MOST_VALUES, "values"),
        (big, MOST_BIG_INTEGERS, "integers beyond 64 bits"),
    ):
        if number > most:
            raise ToolValidationError(
                f"the arguments contain {number:,} {what}, and the limit is {most:,}. Send fewer, or write them to "
                "a file and pass its path."
            )


def _most_values(data: str | bytes) -> int:
    """Return the most values that JSON text can contain: each value, or its key, is first or follows `,`, `[` or `{`."""
    if isinstance(data, bytes):
        return 1 + data.count(b",") + data.count(b"[") + data.count(b"{")
    return 1 + data.count(",") + data.count("[") + data.count("{")


def _values_in(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, dict):
            waiting.extend(cast("dict[str, Any]", each).values())
        elif isinstance(each, list):
            waiting.extend(cast("list[Any]", each))
