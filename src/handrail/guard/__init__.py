"""Whether a call may run: policies and approvals."""

from handrail.guard.approval import Broker
from handrail.guard.policy import (
    CapabilityPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
)

__all__ = [
    "Broker",
    "CapabilityPolicy",
    "RateLimitPolicy",
    "ReadBeforeWritePolicy",
    "SequentialDependencyPolicy",
]
