"""Limits: budgets, heartbeats and cancellation. Deadlines are words, and live in `handrail.deadline`."""

from handrail.limits.budget import UNKNOWN, Budget, BudgetTracker, Reservation
from handrail.limits.cancellation import Cancellation
from handrail.limits.heartbeat import Heartbeat, Lease
from handrail.limits.spending import Spending

__all__ = [
    "UNKNOWN",
    "Budget",
    "BudgetTracker",
    "Cancellation",
    "Heartbeat",
    "Lease",
    "Reservation",
    "Spending",
]
