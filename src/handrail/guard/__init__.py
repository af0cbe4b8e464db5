"""Policies, approvals, feedback and completion: whether a call may run, and whether a run may end."""

from handrail.guard.approval import Broker
from handrail.guard.feedback import (
    BudgetFeedback,
    CommandPassing,
    CompletionChecker,
    DeadlineFeedback,
    FeedbackProvider,
    FilesThere,
    OutputFilled,
    RunState,
    Trigger,
    all_of,
    any_of,
)
from handrail.guard.policy import CapabilityPolicy, SequentialDependencyPolicy
from handrail.guard.rate_limit import RateLimitPolicy
from handrail.guard.read_before_write import ReadBeforeWritePolicy
from handrail.guard.remembered import ApprovalMemory, approvals_of
from handrail.question import ask

__all__ = [
    "ApprovalMemory",
    "Broker",
    "BudgetFeedback",
    "CapabilityPolicy",
    "CommandPassing",
    "CompletionChecker",
    "DeadlineFeedback",
    "FeedbackProvider",
    "FilesThere",
    "OutputFilled",
    "RateLimitPolicy",
    "ReadBeforeWritePolicy",
    "RunState",
    "SequentialDependencyPolicy",
    "Trigger",
    "all_of",
    "any_of",
    "approvals_of",
    "ask",
]
