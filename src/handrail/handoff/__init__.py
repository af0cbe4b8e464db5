"""Handoffs: tools in three acts. In the second act, a person or a model can decide."""

from handrail.handoff.acts import Parked
from handrail.handoff.halves import run_as_agent
from handrail.handoff.handoff import Handoff

__all__ = ["Handoff", "Parked", "run_as_agent"]
