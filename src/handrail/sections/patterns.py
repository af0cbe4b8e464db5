"""Patterns from strangers: one that could take for ever is refused before it is tried.

Python's engine tries alternatives by going back, without letting anything else run meanwhile, so a model
could hold up the whole process with a few characters. What makes that possible is something repeated
without end inside something that is repeated without end.
"""

from __future__ import annotations

import re
from re import _constants as words  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]  # what re parses with
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]  # the same
from typing import Any

REFUSED = (
    "this pattern could take for ever: a group that is repeated without end may not hold another such repeat, "
    "nor alternatives. Look for something simpler, such as plain text"
)


def may_not_end(pattern: str) -> bool:
    """Could a search for it take for ever on some line?"""
    try:
        parsed: Any = parser.parse(pattern)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # it has no types
    except (re.error, RecursionError, OverflowError):
        return False  # refused elsewhere, as no pattern at all
    return _nested(parsed, inside=False)


def _nested(parsed: Any, *, inside: bool) -> bool:
    for what, given in parsed:
        repeats = what in (words.MAX_REPEAT, words.MIN_REPEAT) and given[1] is words.MAXREPEAT  # pyright: ignore[reportUnknownMemberType]
        if inside and (repeats or what is words.BRANCH):  # pyright: ignore[reportUnknownMemberType]
            return True
        if any(_nested(each, inside=inside or repeats) for each in _parts(given)):
            return True
    return False


def _parts(given: Any) -> list[Any]:
    """The patterns that are in an operation's arguments."""
    if isinstance(given, parser.SubPattern):  # pyright: ignore[reportUnknownMemberType]
        return [given]
    if type(given) in (list, tuple):
        return [part for each in given for part in _parts(each)]
    return []
