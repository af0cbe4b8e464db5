"""Feedback: advice for the model after its calls, on a trigger and up to a cap."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from handrail.deadline import Deadline, is_span
from handrail.errors import DefinitionError
from handrail.protocols import Filesystem, SessionView

CAP = 3
"""How often a provider or checker may speak in one run, by default."""


class RunState(msgspec.Struct, frozen=True):
    """What feedback providers and completion checkers see of a run."""

    session: SessionView
    calls: int
    """The number of tool calls so far."""
    seconds: float
    """How long the run has taken so far."""
    given: int
    """How often this provider or checker has spoken in this run."""
    deadline: Deadline | None = None
    left: Mapping[str, float] = {}
    """What is left of each limited unit of the budget."""
    spent: Mapping[str, float] = {}
    filesystem: Filesystem | None = None
    text: str = ""
    """The answer, if there is one yet."""
    output: Any = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """When advice is due: every `calls` calls, every `seconds` seconds, or after an event of a type.

    Checked after each turn of calls. One of them is enough.
    """

    calls: int | None = None
    seconds: float | None = None
    event: type | None = None

    def __post_init__(self) -> None:
        if self.calls is None and self.seconds is None and self.event is None:
            raise DefinitionError("a trigger without a condition never fires. Give calls, seconds, or event.")
        if self.calls is not None and self.calls < 1:
            raise DefinitionError(f"every {self.calls!r} calls is never. Give a whole number of at least 1.")
        if self.seconds is not None and not is_span(self.seconds):
            raise DefinitionError(f"every {self.seconds!r} seconds is not a time. Give a positive number.")


class FeedbackProvider(Protocol):
    """Gives advice after a call. An exception in it is reported, and the run continues."""

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
    """Tells the model how much time is left, once for each of these numbers of seconds."""

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
        return f"About {max(left, 0):.0f} seconds are left. Do what matters most, and finish."


@dataclass(frozen=True, slots=True)
class BudgetFeedback:
    """Tells the model what is left of its budget, once for each of these fractions spent."""

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
        return f"This much is left of the budget: {left}. Do what matters most, and finish."


def _fraction(state: RunState, unit: str) -> float:
    spent, left = state.spent.get(unit, 0.0), max(state.left[unit], 0.0)
    return spent / (spent + left) if spent + left else 1.0
