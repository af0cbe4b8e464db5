"""Feedback: advice a model is given after its calls, on a trigger and up to a cap."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from handrail.deadline import is_span
from handrail.errors import DefinitionError
from handrail.guard.watching import RunState

CAP = 3
"""How often whoever watches over a run may speak in it, unless told otherwise."""


def checked_cap(cap: int) -> int:
    """How often somebody may speak: a number, refused here and not in the middle of a run."""
    if type(cap) is not int or cap < 0:
        raise DefinitionError(f"cap is {cap!r}. Give a whole number from 0 on.")
    return cap


@dataclass(frozen=True, slots=True)
class Trigger:
    """When advice is due: every so many calls, every so many seconds, or after an event of this type.

    It is looked at after each turn of calls; any of them is enough.
    """

    calls: int | None = None
    seconds: float | None = None
    event: type | None = None

    def __post_init__(self) -> None:
        if self.calls is None and self.seconds is None and self.event is None:
            raise DefinitionError("a trigger without anything never fires. Give calls, seconds, or event.")
        if self.calls is not None and (type(self.calls) is not int or self.calls < 1):
            raise DefinitionError(f"every {self.calls!r} calls is never. Give a whole number of at least 1.")
        if self.seconds is not None and not is_span(self.seconds):
            raise DefinitionError(f"every {self.seconds!r} seconds is no time. Give a positive number.")


class FeedbackProvider(Protocol):
    """Gives advice after a call. One that raises is reported, and the run goes on."""

    @property
    def name(self) -> str: ...
    @property
    def trigger(self) -> Trigger: ...
    @property
    def cap(self) -> int:
        """How often it may speak in one run."""
        ...

    def advise(self, state: RunState, /) -> str | Awaitable[str | None] | None:
        """What to tell the model; None when there is nothing to say."""
        ...


@dataclass(frozen=True, slots=True)
class DeadlineFeedback:
    """Tells the model how much time is left, once at each of these numbers of seconds."""

    at: Sequence[float] = (300.0, 60.0, 15.0)
    name: str = "deadline"
    trigger: Trigger = field(default=Trigger(calls=1))

    @property
    def cap(self) -> int:
        return len(self.at)

    def advise(self, state: RunState, /) -> str | None:
        if state.deadline is None:
            return None
        left = state.deadline.remaining()
        if sum(left <= mark for mark in self.at) <= state.given:
            return None
        return f"About {max(left, 0):.0f} seconds are left. Do what matters most, and come to an end."


@dataclass(frozen=True, slots=True)
class BudgetFeedback:
    """Tells the model what is left of its budget, once at each of these fractions spent."""

    at: Sequence[float] = (0.5, 0.8, 0.95)
    name: str = "budget"
    trigger: Trigger = field(default=Trigger(calls=1))

    @property
    def cap(self) -> int:
        return len(self.at)

    def advise(self, state: RunState, /) -> str | None:
        used = {unit: _fraction(state, unit) for unit in state.left}
        if not used or sum(max(used.values()) >= mark for mark in self.at) <= state.given:
            return None
        left = ", ".join(f"{unit.replace('_', ' ')}: {state.left[unit]:g}" for unit in used)
        return f"This much is left of the budget: {left}. Do what matters most, and come to an end."


def _fraction(state: RunState, unit: str) -> float:
    spent, left = state.spent.get(unit, 0.0), max(state.left[unit], 0.0)
    return spent / (spent + left) if spent + left else 1.0
