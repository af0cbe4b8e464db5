"""Where calls stand in a run, so that a question or a nested run can be told to belong to one.

A client knows the calls that a model asked for. What a call does inside itself (inner calls, acts of a
handoff) it does not know as calls, so whatever is about those is put under the call around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from handrail.question import Question
from handrail.runs.places import parent_of


class Holder(NamedTuple):
    """The call that a client may be told something belongs to."""

    call_id: str
    run_id: str
    """The run whose model asked for the call."""


CallAt = Callable[[str], str | None]
"""The id of the call of a model at a place of the run; None where none is."""


def place_of_question(question: Question) -> str:
    """The place of the call that asks, without the run's id: `ID.2~1?1` is asked by the call at `.2`."""
    place = question.id.removeprefix(question.run_id)
    cut = max(place.rfind("?"), place.rfind("!"))
    return (place if cut < 0 else place[:cut]).rpartition("~")[0]


def around(place: str, root: str) -> str:
    """The run that a call at this place was made in, by its id."""
    parent = parent_of(place)
    while parent is not None and not parent.is_run:
        parent = parent_of(parent.place)
    return root if parent is None else f"{root}{parent.place}"


def holder(place: str, root: str, call_at: CallAt) -> Holder | None:
    """The nearest call of a model at or around a place."""
    while place:
        found = call_at(place)
        if found is not None:
            return Holder(found, around(place, root))
        parent = parent_of(place)
        if parent is None:
            return None
        place = parent.place
    return None


def outermost(place: str, root: str, call_at: CallAt) -> Holder | None:
    """The call of the run itself that a place lies in: all that a client knows that sees no nested runs."""
    parent = parent_of(place)
    while parent is not None:
        place, parent = parent.place, parent_of(parent.place)
    found = call_at(place)
    return None if found is None else Holder(found, root)
