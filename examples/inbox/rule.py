"""A rule that approves small bills, for runs in which nobody can be asked."""

from __future__ import annotations

from collections.abc import Callable

from handrail.context import Approval
from handrail.protocols import ApprovalRequest

MOST = 500
"""The largest bill that is approved, in euros. A person has to look at a larger one."""


class SmallBills:
    """Approves bills of a whole number of euros up to a limit, and denies everything else."""

    shows_previews = True

    def __init__(self, tell: Callable[[ApprovalRequest, Approval], None]) -> None:
        self._tell = tell

    async def decide(self, request: ApprovalRequest, /) -> Approval:
        amount = str(request.arguments.get("sum", "")).removesuffix(" euros")
        small = False
        if request.tool != "book_bill":
            reason = f"{request.tool} is not about a bill, so somebody has to look at it"
        elif not amount.isdecimal():
            reason = "the sum is not a whole number of euros, so somebody has to look at it"
        elif small := int(amount) <= MOST:
            reason = f"a bill of at most {MOST} euros"
        else:
            reason = f"more than {MOST} euros, so somebody has to look at it"
        approval = Approval(small, reason, "the example's rule", "approved" if small else "denied")
        self._tell(request, approval)
        return approval
