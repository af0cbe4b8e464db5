"""`Charge`: what a recorded request to a model used and cost."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal

import msgspec

from handrail.messages import Usage
from handrail.run.limits import Unit

Charged = Mapping[Unit, int | Decimal]
"""The amounts that a budget was charged, by unit."""


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorded request to a model used and cost."""

    usage: Usage | None = None
    """The tokens used; None if the provider did not report them, or the request failed before any answer came."""
    cost: Decimal | None = None
    """The cost in US dollars; None if it is unknown."""
    charged: Charged = {}
    """The amounts that the budget was charged, if the provider did not report the usage; otherwise empty."""

    def spent(self) -> Charged:
        """Return the amounts that a budget is charged for the request."""
        if self.charged or self.usage is None:
            return self.charged or {"requests": 1}
        known: Charged = {"requests": 1, "tokens": self.usage.tokens}
        return known if self.cost is None else {**known, "money": self.cost}


class AnswerCharge(Charge, frozen=True):
    """What a recorded answer used and cost, with the earlier requests for it, which failed or were not used."""

    failed: tuple[Charge, ...] = ()
