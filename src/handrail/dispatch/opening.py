"""Opening a gate: a run of its own, with defaults for everything left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Unpack

from handrail.context.source import PromptModel
from handrail.dispatch.frame import Frame
from handrail.dispatch.gate import Gate
from handrail.dispatch.options import GateArguments, RunOptions, check_kinds
from handrail.errors import DefinitionError
from handrail.journal.runlog import RunLog
from handrail.protocols import BoundAdapter, PromptView, ToolPolicy
from handrail.tools import Tool


def open_gate(
    tools: Iterable[Tool[Any, Any]] = (),
    *,
    policies: Iterable[ToolPolicy] = (),
    **arguments: Unpack[GateArguments],
) -> Gate:
    """A gate for these tools: `await open_gate([weather]).invoke("weather", {"city": "Oslo"})`.

    Nothing is asked for unless a policy asks; nothing is written to disk; without an environment
    nobody is there.
    """
    check_kinds(tools=(tools, Iterable, "a list of tools: [weather]"))
    return Gate(open_frame(RunOptions().updated("open_gate", GateArguments, arguments), tools, policies))


def open_frame(
    options: RunOptions,
    tools: Iterable[Tool[Any, Any]] = (),
    policies: Iterable[ToolPolicy] = (),
    *,
    prompt: PromptView | None = None,
    log: RunLog | None = None,
    adapter: Callable[[Any], BoundAdapter] | None = None,
    prompt_model: Callable[[Any], PromptModel] | None = None,
) -> Frame:
    """A run of its own, with its options checked."""
    check_kinds(policies=(policies, Iterable, "a list of policies: [CapabilityPolicy()]"))
    options.check()
    frame = Frame(options, prompt=prompt, log=log, adapter=adapter, prompt_model=prompt_model)
    frame.show(tools, check_policies(policies))
    return frame


def check_policies(policies: Iterable[ToolPolicy]) -> tuple[ToolPolicy, ...]:
    """Check that each policy is complete and has a name of its own."""
    found = tuple(policies)
    for policy in found:
        if not all(hasattr(policy, member) for member in ("name", "check", "on_result")):
            raise DefinitionError(
                f"{policy!r} is not a policy. A policy has a `name`, `check` and `on_result`; see ToolPolicy."
            )
    names = [policy.name for policy in found]
    for name in names:
        if names.count(name) > 1:
            raise DefinitionError(
                f"two policies are called {name!r}, and their state would be mixed. Give one another name."
            )
    return found
