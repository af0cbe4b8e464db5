"""Handoffs: tools in three acts, the same object for a person, a model, or nobody."""

from handrail.handoff.agent import run_as_agent
from handrail.handoff.definition import Handoff
from handrail.handoff.parked import Parked

__all__ = ["Handoff", "Parked", "run_as_agent"]
