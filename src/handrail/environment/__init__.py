"""Who is on the other side. Anything with `run_mode` and `ask` is an environment."""

from handrail.environment.agent import AgentEnvironment
from handrail.environment.headless import HeadlessEnvironment
from handrail.environment.later import LaterEnvironment
from handrail.environment.terminal import Screen, Terminal

__all__ = ["AgentEnvironment", "HeadlessEnvironment", "LaterEnvironment", "Screen", "Terminal"]
