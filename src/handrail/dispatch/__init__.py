"""The gate and what it is made of. `gate.py` says what happens to a call."""

from handrail.dispatch.frame import Frame
from handrail.dispatch.gate import Gate
from handrail.dispatch.opening import open_gate
from handrail.dispatch.turn import ToolCall, Turn, run_turn

__all__ = ["Frame", "Gate", "ToolCall", "Turn", "open_gate", "run_turn"]
