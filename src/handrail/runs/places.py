"""Places in a run: `.2` its second call, `.2~1.1` the first verb of the first try at that, `.2~1/1` a run nested there.

Answers of the model are `#1`, `.2~1/1#1`; what advisers said is `@1`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OF_A_CALL = re.compile(r"\.(\d+)")


class Parent(NamedTuple):
    """What a place lies in: a call, or a nested run."""

    place: str
    is_run: bool


def call_number(place: str) -> int | None:
    """The how-manieth call of the run a place belongs to; None for what belongs to the run itself."""
    found = _OF_A_CALL.match(place)
    return None if found is None else int(found[1])


def parent_of(place: str) -> Parent | None:
    """Around which place this one is; None for a call of the run itself."""
    cut = max(place.rfind("."), place.rfind("/"))
    if cut < 1 or not place[cut + 1 :].isdecimal():
        return None
    around = place[:cut]
    head, tilde, tries = around.rpartition("~")
    if tilde and tries.isdecimal():
        return Parent(head, False)
    return Parent(around, True)
