"""Handoffs: tools in three acts, the second of which is played by a person, by a model, or by neither."""

from handrail.handoff.acts import Parked
from handrail.handoff.agent_run import run_as_agent
from handrail.handoff.handoff import Handoff

__all__ = ["Handoff", "Parked", "run_as_agent"]
