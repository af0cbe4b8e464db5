"""`OuterPolicy`: what a run denies stays denied in the runs nested in it, however they are started."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from typing import Any

from handrail.context import ToolContext
from handrail.errors import DefinitionError
from handrail.guard.policy import ChangePolicy
from handrail.guard.rate_limit import RateLimitPolicy
from handrail.protocols import PolicyDecision, ToolPolicy
from handrail.tools import Tool, ToolResult


class OuterPolicy:
    """A policy of an outer run, as it applies in a run nested in it: what it denies stays denied.

    Calls about which it would ask are left to the nested run's own policies.
    """

    __slots__ = ("name", "policy")

    def __init__(self, policy: ToolPolicy) -> None:
        self.name = policy.name
        self.policy = policy

    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision | Awaitable[PolicyDecision]:
        decision = self.policy.check(tool, params, context=context)
        return _unless_asks(decision) if isinstance(decision, PolicyDecision) else self._check_later(decision)

    async def _check_later(self, waiting: Awaitable[PolicyDecision]) -> PolicyDecision:
        return _unless_asks(await waiting)

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        if isinstance(self.policy, ChangePolicy):
            return None  # the outer call asks about these changes before it commits
        return self.policy.on_result(tool, params, result, context=context)


def _unless_asks(decision: PolicyDecision) -> PolicyDecision:
    return PolicyDecision.allow() if decision.kind == "ask" else decision


def outer_policies(policies: Iterable[ToolPolicy]) -> tuple[OuterPolicy, ...]:
    """Return the policies of a run as they apply in the runs nested in it."""
    return tuple(policy if isinstance(policy, OuterPolicy) else OuterPolicy(policy) for policy in policies)


def with_outer(own: tuple[ToolPolicy, ...], outer: Iterable[OuterPolicy]) -> tuple[ToolPolicy, ...]:
    """Return a nested run's own policies, followed by those of the runs around it. A policy in both is its own only.

    Raises `DefinitionError` if an outer policy has the same name as a different rate limit of the nested run.
    """
    for each in outer:
        alike = next((one for one in own if one.name == each.name), None)
        if isinstance(alike, RateLimitPolicy) and alike is not each.policy:
            raise DefinitionError(
                f"a nested run and a run around it each have a rate limit named {each.name!r}, and would share its "
                f"counts. Rename one of them: RateLimitPolicy(..., name='nested_rate')."
            )
    return (*own, *(each for each in outer if not any(each.policy is one for one in own)))


def own_policies(policies: Iterable[ToolPolicy]) -> tuple[ToolPolicy, ...]:
    """Return the policies that a run has itself, without those of the runs around it."""
    return tuple(policy for policy in policies if not isinstance(policy, OuterPolicy))
