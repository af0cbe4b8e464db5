"""The gate and what it is made of. `gate.py` says what happens to a call.

The names are loaded when they are first used: `RunOptions` alone needs no gate.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.dispatch.frame import Frame
    from handrail.dispatch.gate import Gate
    from handrail.dispatch.opening import open_gate
    from handrail.dispatch.turn import ToolCall, Turn, run_turn

__all__ = ["Frame", "Gate", "ToolCall", "Turn", "open_gate", "run_turn"]

_HOMES = {
    "Frame": "frame",
    "Gate": "gate",
    "ToolCall": "turn",
    "Turn": "turn",
    "open_gate": "opening",
    "run_turn": "turn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
