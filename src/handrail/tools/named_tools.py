"""The tools that a policy names, and the errors for a policy that would guard nothing.

A policy that decides only on certain tools lists their names in an attribute `named_tools`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from handrail.errors import DefinitionError
from handrail.protocols import ToolPolicy
from handrail.spelling import nearest


def named_tools_of(policy: ToolPolicy) -> frozenset[str]:
    """Return the names that a policy lists in `named_tools`; empty if it lists none."""
    return frozenset(getattr(policy, "named_tools", None) or ())


def check_named_tools(policies: Iterable[ToolPolicy], tools: Collection[str]) -> None:
    """Raise `DefinitionError` if a policy names a tool that does not exist, but one with a very similar name does."""
    for policy in policies:
        named = named_tools_of(policy)
        for name in sorted(named.difference(tools)):
            near = nearest(name, [tool for tool in tools if tool not in named], cutoff=0.8)
            if near is not None:
                raise DefinitionError(
                    f"policy {policy.name!r}: there is no tool {name!r}. Did you mean {near!r}?"
                )


def out_of_scope(
    policy: ToolPolicy, scope: Collection[str], places: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return a problem and a hint if a section's policy names a tool outside its scope; None otherwise.

    `places` says in words which section has each tool of the prompt, or that the prompt itself has it.
    """
    for name in sorted(named_tools_of(policy).difference(scope)):
        place = places.get(name)
        owner = f"of {place}" if place is not None else "that no section has"
        problem = (
            f"its policy {policy.name!r} names the tool {name!r} {owner}, but decides only on the section's own "
            "tools, so it would guard nothing"
        )
        near = None if place is not None else nearest(name, places.keys() - named_tools_of(policy))
        before = (
            f"Declare it in {place}, or"
            if place is not None and place.startswith("section")
            else "Declare it"
        )
        hint = f"{before} on the prompt: Prompt(..., policies=[...])."
        return problem, hint if near is None else f"Did you mean {near!r}? {hint}"
    return None
