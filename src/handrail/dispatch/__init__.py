"""The gate and its parts. `gate.py` describes the steps of a call.

Names are imported on first use, so that importing `RunOptions` alone does not load the gate.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Unpack

    from handrail.dispatch.frame import Frame
    from handrail.dispatch.gate import Gate
    from handrail.dispatch.options import GateArguments
    from handrail.dispatch.turn import ToolCall, Turn, run_turn
    from handrail.protocols import ToolPolicy
    from handrail.tools import Tool

__all__ = ["Frame", "Gate", "ToolCall", "Turn", "open_gate", "run_turn"]

_HOMES = {
    "Frame": "frame",
    "Gate": "gate",
    "ToolCall": "turn",
    "Turn": "turn",
    "run_turn": "turn",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def open_gate(
    tools: Iterable[Tool[Any, Any]] = (),
    *,
    policies: Iterable[ToolPolicy] = (),
    **arguments: Unpack[GateArguments],
) -> Gate:
    """Open a gate for these tools: `await open_gate([weather]).invoke("weather", {"city": "Oslo"})`.

    A call needs approval only if a policy asks for it, or if it changes files that will later be run automatically.
    Handrail writes nothing to disk unless a filesystem or a journal is given, and nobody can be asked unless an
    environment is given.
    """
    from handrail.dispatch.frame import open_frame
    from handrail.dispatch.gate import Gate
    from handrail.dispatch.options import GateArguments, RunOptions, check_kinds

    check_kinds(tools=(tools, Iterable, "a list of tools: [weather]"))
    return Gate(open_frame(RunOptions().updated("open_gate", GateArguments, arguments), tools, policies))
