"""Patterns from strangers: one that could take for ever is refused before it is tried.

Python's engine tries alternatives by going back, without letting anything else run meanwhile, so a model
could hold up the whole process with a few characters. What makes that possible is something that fits in
several ways inside something that is repeated: each round multiplies the ways there are. So does each of many
that stand in a row.
"""

from __future__ import annotations

import math
import re
from re import _constants as words  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]  # what re parses with
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]  # the same
from typing import Any

REFUSED = (
    "this pattern could take for ever: a group that is repeated often, or without end, may not hold another repeat, "
    "nor alternatives. Look for something simpler, such as plain text"
)
_ENDLESS = 20
"""In how many ways a repeat without end is taken to fit: (\\w+ ){3} passes, four of these do not."""
_BOUNDED = 8
"""In how many ways a repeat with an end is taken to fit at most, among those that stand in a row."""
_MOST = 100_000


def may_not_end(pattern: str) -> bool:
    """Could a search for it take for ever on some line?"""
    try:
        parsed: Any = parser.parse(pattern)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # it has no types
    except (re.error, RecursionError, OverflowError):
        return False  # refused elsewhere, as no pattern at all
    return math.isinf(_ways(parsed)) or _ways(parsed, in_a_row=True) > _MOST


def _ways(parsed: Any, in_a_row: bool = False) -> float:
    """In how many ways it can fit one text, roughly; infinity where rounds of a repeat make them too many.

    `in_a_row` leaves out what has no end: many of these take long, and by far not for ever.
    """
    ways = 1.0
    for what, given in parsed:
        if what in (words.MAX_REPEAT, words.MIN_REPEAT):  # pyright: ignore[reportUnknownMemberType]
            ways *= _ways_of_repeat(*given, in_a_row=in_a_row)
        elif what is words.BRANCH:  # pyright: ignore[reportUnknownMemberType]
            ways *= sum(_ways(each, in_a_row) for each in _parts(given))
        else:
            ways *= math.prod(_ways(each, in_a_row) for each in _parts(given))
    return ways


def _ways_of_repeat(least: Any, most: Any, repeated: Any, *, in_a_row: bool) -> float:
    endless = most is words.MAXREPEAT  # pyright: ignore[reportUnknownMemberType]
    inside = _ways(repeated, in_a_row)
    if inside > 1 and (endless or most * math.log(inside) > math.log(_MOST)):
        return math.inf
    if endless:
        return 1.0 if in_a_row else _ENDLESS
    rounds = most - least + 1
    return inside**most * (min(rounds, _BOUNDED) if in_a_row else rounds)


def _parts(given: Any) -> list[Any]:
    """The patterns that are in an operation's arguments."""
    if isinstance(given, parser.SubPattern):  # pyright: ignore[reportUnknownMemberType]
        return [given]
    if type(given) in (list, tuple):
        return [part for each in given for part in _parts(each)]
    return []
