"""Usage of models: tokens and money, of a run and of everything below it."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

from handrail.messages import Usage

_NOTHING = Usage()
_FREE = Decimal(0)


class Spending:
    """A running total, which also counts towards every run above.

    The cost is None once a part of it is unknown: an unknown price is not zero.
    """

    __slots__ = ("_above", "cost", "usage")

    def __init__(self, above: Spending | None = None) -> None:
        self._above = above
        self.usage = _NOTHING
        self.cost: Decimal | None = _FREE

    def add(self, usage: Usage, cost: Decimal | None) -> None:
        """Add the usage of one answered request."""
        spending: Spending | None = self
        while spending is not None:
            spending.usage += usage
            if cost is None:
                spending.cost = None
            elif cost and spending.cost is not None:
                spending.cost += cost
            spending = spending._above

    def spent(self) -> Mapping[str, Decimal]:
        """The same by unit; money is left out if it is unknown."""
        found = {"tokens": Decimal(self.usage.tokens), "requests": Decimal(self.usage.requests)}
        if self.cost is not None:
            found["money"] = self.cost
        return found
