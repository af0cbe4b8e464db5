"""Regular expressions from a model: one that could take exponential time is refused before it is tried.

Python's engine backtracks and blocks the process meanwhile, so a few characters could hold up everything. That
happens when a part that matches in several ways is repeated: each repetition multiplies the ways. Many such
parts in a row do the same.
"""

from __future__ import annotations

import math
import re
from re import _constants as words  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]  # what re parses with
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]  # the same
from typing import Any

REFUSED = (
    "this pattern could take forever: a repeated group may not contain another repeat or alternatives. "
    "Search for something simpler, such as plain text"
)
_ENDLESS = 20
"""Ways to match assumed for an unbounded repeat: (\\w+ ){3} passes, four of these do not."""
_BOUNDED = 8
"""The most ways to match assumed for a bounded repeat among several in a row."""
_MOST = 100_000


def may_not_end(pattern: str) -> bool:
    """Whether a search with this pattern could take forever on some line."""
    try:
        parsed: Any = parser.parse(pattern)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # it has no types
    except (re.error, RecursionError, OverflowError):
        return False  # not a valid pattern: refused elsewhere
    return math.isinf(_ways(parsed)) or _ways(parsed, in_a_row=True) > _MOST


def _ways(parsed: Any, in_a_row: bool = False) -> float:
    """Roughly how many ways a pattern can match one text; infinity if a repeat makes them too many.

    `in_a_row` leaves out unbounded repeats: many of them take long, but not forever.
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
    """The patterns among an operation's arguments."""
    if isinstance(given, parser.SubPattern):  # pyright: ignore[reportUnknownMemberType]
        return [given]
    if type(given) in (list, tuple):
        return [part for each in given for part in _parts(each)]
    return []
