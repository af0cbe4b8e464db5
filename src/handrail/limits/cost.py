"""`CostTracker`: the tokens and the money that models used, in a run and in everything nested in it."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from handrail.messages import Usage

_NOTHING = Usage()
_FREE = Decimal(0)


class CostTracker:
    """A running sum, which also counts towards every run above.

    The cost is None once a part of it is unknown: an unknown price is not nothing.
    """

    __slots__ = ("_above", "cost", "usage")

    def __init__(self, above: CostTracker | None = None) -> None:
        self._above = above
        self.usage = _NOTHING
        self.cost: Decimal | None = _FREE

    def add(self, usage: Usage, cost: Decimal | None) -> None:
        """Add one answered request."""
        tracker: CostTracker | None = self
        while tracker is not None:
            tracker.usage += usage
            if cost is None:
                tracker.cost = None
            elif cost and tracker.cost is not None:
                tracker.cost += cost
            tracker = tracker._above

    def spent(self) -> Mapping[str, Decimal]:
        """The same by unit; money is left out where it is unknown."""
        found = {"tokens": Decimal(self.usage.tokens), "requests": Decimal(self.usage.requests)}
        if self.cost is not None:
            found["money"] = self.cost
        return found
