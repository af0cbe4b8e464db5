"""Limits: budgets, spending and heartbeats. Deadlines are in `handrail.deadline`, cancellation in `handrail.cancellation`."""

from handrail.limits.budget import UNKNOWN, Budget, BudgetTracker, Reservation
from handrail.limits.heartbeat import Heartbeat, Lease
from handrail.limits.spending import Spending

__all__ = [
    "UNKNOWN",
    "Budget",
    "BudgetTracker",
    "Heartbeat",
    "Lease",
    "Reservation",
    "Spending",
]
