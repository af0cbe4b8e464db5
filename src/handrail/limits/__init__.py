"""Limits: budgets, costs and heartbeats. Deadlines are in `handrail.deadline`, cancellation in `handrail.cancellation`."""

from handrail.limits.budget import UNKNOWN, Budget, BudgetTracker, Reservation
from handrail.limits.cost import CostTracker
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
