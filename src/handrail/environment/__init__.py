"""Environments: who answers the questions of a run. Anything with `run_mode` and `ask` is one.

Each is imported on first use: a terminal needs no model, and a model needs no terminal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.environment.agent import AgentEnvironment
    from handrail.environment.terminal import Screen, TerminalEnvironment
    from handrail.environment.unattended import HeadlessEnvironment, LaterEnvironment

__all__ = ["AgentEnvironment", "HeadlessEnvironment", "LaterEnvironment", "Screen", "TerminalEnvironment"]

_MODULES = {
    "AgentEnvironment": "agent",
    "HeadlessEnvironment": "unattended",
    "LaterEnvironment": "unattended",
    "Screen": "terminal",
    "TerminalEnvironment": "terminal",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
