"""`Toolbox`: the tools of a prompt or a run, by name, and checks of several tools together."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from handrail.errors import DefinitionError
from handrail.protocols import ToolPolicy
from handrail.text.rendering import escape_line
from handrail.text.spelling import nearest
from handrail.tools.definition import Tool

log = logging.getLogger("handrail")


class Toolbox(msgspec.Struct, frozen=True, eq=False):
    """Checked tools by name. A toolbox never changes, so the runs of a prompt share one."""

    tools: Mapping[str, Tool[Any, Any]] = {}
    open: Mapping[str, Tool[Any, Any]] = {}
    """The tools that have a handler and require no person, model or worker. For these, the gate skips `look_up`."""
    secretive: bool = False
    """Whether any of the tools takes secrets."""
    has_late: bool = False
    """Whether any of the tools may have been added after the prompt was defined."""

    def plus(self, more: Iterable[Tool[Any, Any]]) -> Toolbox:
        """Return a toolbox with these tools as well. Raises `DefinitionError` if one is no tool, is incomplete, or has another's name."""
        tools, open, secretive, late = dict(self.tools), dict(self.open), self.secretive, self.has_late
        for tool in more:
            check_tool(tool)
            tool.check_complete()
            name = tool.name
            if name in tools and tools[name] is not tool and not (tool.spans and tools[name].spans):
                raise DefinitionError(f"two tools are named {name!r}. Rename one of them.")
            tools[name] = tool
            if tool.handler is not None and not tool.needs:
                open[name] = tool
            secretive = secretive or tool.secret
            late = late or tool.is_late
        for name, tool in tools.items():
            if tool.spans:
                tools[name] = open[name] = tool.spanning(tools.values())
        return Toolbox(tools, open, secretive, late)


NO_TOOLS = Toolbox()


def check_tool(given: object) -> None:
    """Raise `DefinitionError` if the argument is not a tool, for example a plain function."""
    if not isinstance(given, Tool):
        name = getattr(given, "__name__", repr(given))
        raise DefinitionError(f"{name} is not a tool. Pass a function decorated with `@tool`, or a `Tool`.")


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
