"""Policies that decide on some of a prompt's tools only."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from handrail.context import ToolContext
from handrail.protocols import PolicyDecision, ToolPolicy
from handrail.tools import Tool, ToolResult


class Scoped:
    """A policy of a section: it decides on the section's tools, and hears of every tool's results."""

    __slots__ = ("_policy", "_tools", "name")

    def __init__(self, policy: ToolPolicy, tools: frozenset[str]) -> None:
        self.name = policy.name
        self._policy = policy
        self._tools = tools

    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision | Awaitable[PolicyDecision]:
        if tool.name not in self._tools:
            return PolicyDecision.allow()
        return self._policy.check(tool, params, context=context)

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        return self._policy.on_result(tool, params, result, context=context)


def within_scope(policy: ToolPolicy, tools: frozenset[str] | None) -> ToolPolicy:
    """The policy for these tools; None means all of them."""
    return policy if tools is None else Scoped(policy, tools)
