"""Limits: budgets, spending and heartbeats. Deadlines are in `handrail.deadline`, cancellation in `handrail.cancellation`."""

from handrail.limits.budget import UNKNOWN, Budget, BudgetTracker, Reservation, Spending
from handrail.limits.heartbeat import Heartbeat, Lease

__all__ = [
    "UNKNOWN",
    "Budget",
    "BudgetTracker",
    "Heartbeat",
    "Lease",
    "Reservation",
    "Spending",
]
