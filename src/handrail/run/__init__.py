"""Runs: the object of a run, its options, the loop that asks its model, and the gate. `gate.py` describes the steps of a call.

The names of other modules are imported on first use, so that importing `handrail.run.options` does not load the gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from handrail.imports import names_on_first_use

if TYPE_CHECKING:
    from typing import Unpack

    from handrail.prompt import Prompt
    from handrail.protocols import ToolPolicy
    from handrail.run.adapter import Adapter
    from handrail.run.call import ToolCall, Turn, run_turn
    from handrail.run.gate import Gate
    from handrail.run.options import GateArguments
    from handrail.tools import Tool


__all__ = ["Gate", "ToolCall", "Turn", "open_gate", "run_turn"]

if not TYPE_CHECKING:  # a type checker would take every name for one of the package's
    __getattr__ = names_on_first_use(__name__, {"gate": "Gate", "call": "ToolCall Turn run_turn"})


def open_gate(
    tools: Iterable[Tool[Any, Any]] = (),
    *,
    policies: Iterable[ToolPolicy] = (),
    prompt: Prompt[Any] | None = None,
    params: object = None,
    opened: Sequence[str] = (),
    adapter: Adapter | None = None,
    **arguments: Unpack[GateArguments],
) -> Gate:
    """Open a gate for these tools: `await open_gate([weather]).invoke("weather", {"city": "Oslo"})`.

    A call needs approval only if a policy or its handler asks for it, or if it changes files that will later be run automatically.
    With neither a filesystem nor a journal, Handrail writes nothing to disk. Without an environment, it asks nobody.

    To ask the model in a loop of your own, pass a `prompt`: the gate then has the prompt's tools, policies and resources too.
    The prompt is rendered with these `params` and `opened` sections, and `gate.prompt` has its text. With an `adapter`, handlers
    can use `context.adapter`, and the adapter's own options apply unless an argument replaces them. The adapter's workers,
    if it has any, can be called by name.

    If a handler calls this, the gate is part of the handler's call, as with `context.adapter.evaluate`.
    """
    from handrail.run import nested
    from handrail.run.options import check_kinds

    check_kinds(tools=(tools, Iterable, "a list of tools: [weather]"))
    return nested.open_gate(tools, policies, prompt, params, opened, adapter, arguments)
