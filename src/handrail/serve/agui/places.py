"""Where calls stand in a run, so that a question or a nested run can be told to belong to one.

A client knows the calls that a model asked for. What a call does inside itself (inner calls, acts of a
handoff) it does not know as calls, so whatever is about those is put under the call around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from handrail.place import Place
from handrail.question import Question


class Holder(NamedTuple):
    """The call that a client may be told something belongs to."""

    call_id: str
    run_id: str
    """The run whose model asked for the call."""


CallAt = Callable[[Place], str | None]
"""The id of the call of a model at a place of the run; None where none is."""


def place_of_question(question: Question) -> Place:
    """The place of the question `ID.2~1?1`, without the run's id."""
    return Place.from_id(question.id, question.run_id)


def holder(place: Place, root: str, call_at: CallAt) -> Holder | None:
    """The nearest call of a model at or around a place."""
    for each in (place, *place.parents):
        found = call_at(each) if each.kind == "call" else None
        if found is not None:
            return Holder(found, each.run.id(root))
    return None


def outermost(place: Place, root: str, call_at: CallAt) -> Holder | None:
    """The call of the run itself that a place lies in: all that a client knows that sees no nested runs."""
    call = place.outermost_call
    found = None if call is None else call_at(call)
    return None if found is None else Holder(found, root)
