"""The tools that a policy names, and the errors for a policy that would guard nothing.

A policy that decides only on certain tools lists their names in an attribute `named_tools`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from handrail.errors import DefinitionError
from handrail.protocols import ToolPolicy
from handrail.text.rendering import escape_line
from handrail.text.spelling import nearest
from handrail.tools.definition import Tool

log = logging.getLogger("handrail")


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


def without_late(
    tools: Sequence[Tool[Any, Any]], others: Iterable[Tool[Any, Any]] = ()
) -> Sequence[Tool[Any, Any]]:
    """Return the tools, except late ones whose name another of them has, or one of `others`. The log names these.

    So a server can't stop an app, or take a name over, by adding a tool with the name of another one. Of several late tools, the
    first keeps the name.
    """
    if not any(tool.is_late for tool in tools):
        return tools
    taken = {tool.name for tool in (*tools, *others) if not tool.is_late}
    kept: list[Tool[Any, Any]] = []
    for tool in tools:
        if not tool.is_late:
            kept.append(tool)
        elif tool.name in taken:
            log.warning(
                "the %s has added a tool %s, which is the name of another tool. The tool is left out.",
                escape_line(tool.origin),
                escape_line(tool.name),
            )
        else:
            taken.add(tool.name)
            kept.append(tool)
    return kept
