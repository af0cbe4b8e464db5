"""Who is on the other side. Anything with `run_mode` and `ask` is an environment.

Each is loaded when it is first asked for: a terminal needs no model, and a model no terminal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.environment.agent import AgentEnvironment
    from handrail.environment.headless import HeadlessEnvironment
    from handrail.environment.later import LaterEnvironment
    from handrail.environment.terminal import Screen, Terminal

__all__ = ["AgentEnvironment", "HeadlessEnvironment", "LaterEnvironment", "Screen", "Terminal"]

_HOMES = {
    "AgentEnvironment": "agent",
    "HeadlessEnvironment": "headless",
    "LaterEnvironment": "later",
    "Screen": "terminal",
    "Terminal": "terminal",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
