"""Limits: budgets, costs and heartbeats. Deadlines are in `handrail.deadline`, cancellation in `handrail.cancellation`."""

from handrail.limits.budget import UNKNOWN, Budget, BudgetTracker, CostTracker, Reservation
from handrail.limits.heartbeat import Heartbeat, Lease

__all__ = [
    "UNKNOWN",
    "Budget",
    "BudgetTracker",
    "CostTracker",
    "Heartbeat",
    "Lease",
    "Reservation",
]
