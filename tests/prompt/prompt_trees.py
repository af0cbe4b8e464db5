"""Random prompts made from plain data, and an independent computation of which of their sections are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st

from handrail import MarkdownSection, Prompt, Tool, ToolContext, ToolResult


@dataclass(frozen=True)
class Drawn:
    """A section as plain data. Its key and path follow from its position in the tree."""

    enabled: bool
    summary: bool
    by_function: bool
    tools: int
    children: tuple[Drawn, ...]


def sections(children: st.SearchStrategy[tuple[Drawn, ...]]) -> st.SearchStrategy[Drawn]:
    usually = st.sampled_from([True, True, True, False])
    return st.builds(Drawn, usually, st.booleans(), st.booleans(), st.integers(0, 2), children)


def branches(children: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
    return sections(st.lists(children, max_size=3).map(tuple))


leaves = sections(st.just(()))
trees = st.lists(st.recursive(leaves, branches, max_leaves=12), min_size=1, max_size=4)


def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(None)


@cache
def named(name: str) -> Tool[None, None]:
    return Tool(name, f"Tool {name}.", handler)


def made(tree: list[Drawn]) -> Prompt[None]:
    """Return the prompt that a generated tree describes."""
    return Prompt("drawn", [section(one, f"s{index}", "") for index, one in enumerate(tree)])


def section(drawn: Drawn, key: str, above: str) -> MarkdownSection[Any]:
    path = f"{above}{key}"
    enabled, visibility = drawn.enabled, "summary" if drawn.summary else "full"
    return MarkdownSection(
        f"Title {path}.",
        key,
        f"Body {path}.",
        tools=[named(name) for name in tool_names(drawn, path)],
        children=[section(one, f"s{index}", f"{path}.") for index, one in enumerate(drawn.children)],
        enabled=(lambda: enabled) if drawn.by_function else enabled,
        summary=f"Summary {path}.",
        visibility=(lambda: visibility) if drawn.by_function else visibility,
    )


def tool_names(drawn: Drawn, path: str) -> list[str]:
    return [f"{path.replace('.', '_')}-t{index}" for index in range(drawn.tools)]


def walk(tree: list[Drawn] | tuple[Drawn, ...], above: str = "") -> Iterator[tuple[str, Drawn]]:
    """Yield every section with its path."""
    for index, drawn in enumerate(tree):
        path = f"{above}s{index}"
        yield path, drawn
        yield from walk(drawn.children, f"{path}.")


def in_full(tree: list[Drawn], opened: frozenset[str] = frozenset()) -> list[tuple[str, Drawn]]:
    """Return the sections that must be shown in full if the sections in `opened` are open."""
    by_path = dict(walk(tree))
    return [
        (path, drawn)
        for path, drawn in by_path.items()
        if all(by_path[one].enabled and (not by_path[one].summary or one in opened) for one in around(path))
    ]


def enabled(tree: list[Drawn]) -> dict[str, Drawn]:
    """Return the sections that are enabled and whose ancestors are all enabled."""
    by_path = dict(walk(tree))
    return {
        path: drawn for path, drawn in by_path.items() if all(by_path[one].enabled for one in around(path))
    }


def around(path: str) -> list[str]:
    """Return the paths of a section and all its ancestors, outermost first."""
    keys = path.split(".")
    return [".".join(keys[: count + 1]) for count in range(len(keys))]
