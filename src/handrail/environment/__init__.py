"""Who is on the other side. Anything with `run_mode` and `ask` is an environment."""

from handrail.environment.agent import AgentEnvironment
from handrail.environment.headless import HeadlessEnvironment

__all__ = ["AgentEnvironment", "HeadlessEnvironment"]
