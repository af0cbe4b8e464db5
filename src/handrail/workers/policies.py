"""The `policies:` of a worker, as the policies of Handrail."""

from __future__ import annotations

from typing import Any

from handrail.errors import DefinitionError
from handrail.guard import (
    CapabilityPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
)
from handrail.protocols import ToolPolicy
from handrail.workers.front_matter import PolicyEntry
from handrail.workers.problem import Refuse


def policies_of(worker: str, given: list[Any] | None, refuse: Refuse) -> tuple[ToolPolicy, ...]:
    """The policies of one worker. State is kept by a policy's name, so each has the worker's in it."""
    if given is None:
        return (CapabilityPolicy(name=f"{worker}.capability"),)
    made: list[ToolPolicy] = []
    for index, entry in enumerate(given):
        where = f"policies[{index}]"
        try:
            policy = _policy(worker, entry, where, refuse)
        except DefinitionError as error:
            refuse(where, *error.parts)
            continue
        if policy is not None and any(each.name == policy.name for each in made):
            refuse(where, f"there are two policies {policy.name!r}", "Make one of them.")
        elif policy is not None:
            made.append(policy)
    return tuple(made)


def _policy(worker: str, entry: Any, where: str, refuse: Refuse) -> ToolPolicy | None:
    if entry == "read_before_write":
        return ReadBeforeWritePolicy()
    if entry == "capability":
        return CapabilityPolicy(name=f"{worker}.capability")
    rules: PolicyEntry = entry
    given = [rules.capability, rules.rate_limit, rules.sequential]
    if sum(each is not None for each in given) != 1:
        refuse(where, "a policy is one of `capability`, `rate_limit` and `sequential`", "Give exactly one.")
        return None
    if rules.rate_limit is not None:
        rate = rules.rate_limit
        return RateLimitPolicy(rate.most, rate.per_seconds, tools=rate.tools, name=f"{worker}.rate_limit")
    if rules.sequential is not None:
        return SequentialDependencyPolicy(rules.sequential, name=f"{worker}.sequential")
    words = rules.capability
    assert words is not None, "one of the three is given"
    verdicts: dict[str, Any] = {}
    for verdict in ("allow", "ask", "deny"):
        for word in getattr(words, verdict):
            if word in verdicts:
                refuse(where, f"{word!r} is given two verdicts", "Keep one of them.")
            verdicts[word] = verdict
    scope = (".",) if words.scope is None else words.scope
    return CapabilityPolicy(verdicts, scope=scope, name=f"{worker}.capability")
