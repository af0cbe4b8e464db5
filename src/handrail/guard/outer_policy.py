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
    """A policy of an outer run, as it applies in nested runs.

    It denies the calls that the policy denies. It allows those that the policy would ask about.
    """

    __slots__ = ("app", "name", "policy")

    def __init__(self, policy: ToolPolicy, app: str = "") -> None:
        self.name = policy.name
        self.policy = policy
        self.app = app
        """A reference to the prompt that has the policy, for the runs that begin in the background; "" if it is not needed."""

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


class OuterChangePolicy(OuterPolicy):
    """A `ChangePolicy` of an outer run, in a nested run whose calls commit separately.

    The outer call has none of these calls' changes when it ends. So the policy judges the changes of each call, as it would
    judge those of the outer call.
    """

    __slots__ = ("_outer",)

    def __init__(self, policy: ToolPolicy, outer: Tool[Any, Any]) -> None:
        super().__init__(policy)
        self._outer = outer
        """The tool of the outer call."""

    def paths_outside(self, tool: Tool[Any, Any], *, context: ToolContext) -> list[str]:
        """Return the paths that a call has changed in its fork and that need approval in the outer run."""
        judge: Any = self.policy
        return judge.paths_outside(self._outer, context=context)

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        return self.policy.on_result(self._outer, None, result, context=context)


def _unless_asks(decision: PolicyDecision) -> PolicyDecision:
    return PolicyDecision.allow() if decision.kind == "ask" else decision


def outer_policies(
    policies: Iterable[ToolPolicy], past: Tool[Any, Any] | None = None
) -> tuple[OuterPolicy, ...]:
    """Return the policies of a run as they apply in the runs nested in it.

    If the calls of the nested run commit separately from their outer call, `past` is the outer call's tool;
    otherwise it is None.
    """
    return tuple(_outer_policy(policy, past) for policy in policies)


def _outer_policy(policy: ToolPolicy, past: Tool[Any, Any] | None) -> OuterPolicy:
    judges = not isinstance(policy, OuterPolicy) or isinstance(policy, OuterChangePolicy)
    own = policy.policy if isinstance(policy, OuterPolicy) else policy
    if past is not None and judges and isinstance(own, ChangePolicy):
        return OuterChangePolicy(own, past)
    return OuterPolicy(own)


def with_outer(own: tuple[ToolPolicy, ...], outer: Iterable[OuterPolicy]) -> tuple[ToolPolicy, ...]:
    """Return a nested run's own policies, followed by those of the runs around it. A policy that is in both appears once.

    Raises `DefinitionError` if an outer policy has the same name as a different rate limit of the nested run.
    """
    for each in outer:
        alike = next((one for one in own if one.name == each.name), None)
        if isinstance(alike, RateLimitPolicy) and alike is not each.policy:
            raise DefinitionError(
                f"the nested run has a rate limit named {each.name!r}, and a run around it has a different policy with "
                f"that name. Policies keep their state under their names, so rename one of them: "
                f"RateLimitPolicy(..., name='nested_rate')."
            )
    return (*own, *(each for each in outer if not any(each.policy is one for one in own)))


def own_policies(policies: Iterable[ToolPolicy]) -> tuple[ToolPolicy, ...]:
    """Return a run's own policies, without those of the runs around it."""
    return tuple(policy for policy in policies if not isinstance(policy, OuterPolicy))
