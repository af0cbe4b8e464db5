"""Patterns from strangers: one that could take for ever is refused before it is tried.

Python's engine tries alternatives by going back, without letting anything else run meanwhile, so a model
could hold up the whole process with a few characters. What makes that possible is something that fits in
several ways inside something that is repeated: each round multiplies the ways there are.
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
_MOST = 100_000


def may_not_end(pattern: str) -> bool:
    """Could a search for it take for ever on some line?"""
    try:
        parsed: Any = parser.parse(pattern)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # it has no types
    except (re.error, RecursionError, OverflowError):
        return False  # refused elsewhere, as no pattern at all
    return math.isinf(_ways(parsed))


def _ways(parsed: Any) -> float:
    """In how many ways it can fit one text, roughly; infinity where rounds of a repeat make them too many."""
    ways = 1.0
    for what, given in parsed:
        if what in (words.MAX_REPEAT, words.MIN_REPEAT):  # pyright: ignore[reportUnknownMemberType]
            ways *= _ways_of_repeat(*given)
        elif what is words.BRANCH:  # pyright: ignore[reportUnknownMemberType]
            ways *= sum(_ways(each) for each in _parts(given))
        else:
            ways *= math.prod(_ways(each) for each in _parts(given))
    return ways


def _ways_of_repeat(least: Any, most: Any, repeated: Any) -> float:
    endless = most is words.MAXREPEAT  # pyright: ignore[reportUnknownMemberType]
    inside = _ways(repeated)
    if inside > 1 and (endless or most * math.log(inside) > math.log(_MOST)):
        return math.inf
    return (1.0 if endless else inside**most) * (_ENDLESS if endless else most - least + 1)


def _parts(given: Any) -> list[Any]:
    """The patterns that are in an operation's arguments."""
    if isinstance(given, parser.SubPattern):  # pyright: ignore[reportUnknownMemberType]
        return [given]
    if type(given) in (list, tuple):
        return [part for each in given for part in _parts(each)]
    return []
