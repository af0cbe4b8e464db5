"""Plans: a prompt's tree with its templates parsed and its overrides applied.

A plan is built when its prompt is defined, so that rendering does not parse templates again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from handrail.content import Attachment
from handrail.prompt.section import Condition, LiveSection, Section, condition_of
from handrail.prompt.template import Template, template_of
from handrail.protocols import ToolPolicy
from handrail.schema import to_json
from handrail.tools import Tool, ToolExample

OPENER = "open_sections"
"""The name of the built-in tool that opens sections shown as summaries."""

AnyTool = Tool[Any, Any]


class Node(msgspec.Struct, frozen=True):
    """One enabled section in one rendering, with all placeholders filled in."""

    path: str
    title: str
    heading: str
    body: str
    summary: str
    examples: str
    is_summary: bool
    """Whether the section is shown as a summary until it is opened."""
    tools: tuple[AnyTool, ...]
    policies: tuple[ToolPolicy, ...]
    children: tuple[Node, ...]
    attachments: tuple[Attachment, ...] = ()
    live: Callable[[], tuple[AnyTool, ...]] | None = None
    """Returns the current tools, if they can change during a run; otherwise None."""
    listed: tuple[AnyTool, ...] = ()
    """The tools that a live section lists, including those that are left out of `tools`."""

    def refreshed(self) -> Node:
        """Return the node with the current tools of live sections; the node itself if nothing has changed."""
        listed = self.listed if self.live is None else self.live()
        children = tuple(child.refreshed() for child in self.children)
        if listed is self.listed and all(map(operator.is_, children, self.children)):
            return self
        tools = self.tools if self.live is None else listed
        return msgspec.structs.replace(self, tools=tools, listed=listed, children=children)

    def limited_to(self, tools: Container[int]) -> Node:
        """Return the node with those of its tools that have one of these ids, and its children likewise."""
        return msgspec.structs.replace(
            self,
            tools=tuple(tool for tool in self.tools if id(tool) in tools),
            children=tuple(child.limited_to(tools) for child in self.children),
        )


class Planned(msgspec.Struct, frozen=True):
    """One of a prompt's sections, with its templates parsed."""

    section: Section[Any]
    path: str
    heading: str
    enabled: Condition
    visibility: Condition
    body: Template
    summary: Template | None
    tools: tuple[AnyTool, ...]
    examples: str
    children: tuple[Planned, ...]

    def resolve(
        self, prompt: str, values: Mapping[str, Any], given: Mapping[str, Any], principal: str
    ) -> Node | None:
        """Return the section with its placeholders filled in; None if it is disabled.

        `given` has the params and the session. Live sections list the tools of `principal`. Raises `PromptRenderError` if a condition can't be evaluated.
        """
        section = self.section
        if not self.enabled.evaluate(prompt, self.path, given):
            return None
        visibility = self.visibility.evaluate(prompt, self.path, given)
        live = partial(section.current_tools, principal) if isinstance(section, LiveSection) else None
        listed = () if live is None else live()
        return Node(
            self.path,
            section.title,
            self.heading,
            self.body.fill(values),
            "" if self.summary is None else self.summary.fill(values),
            self.examples,
            visibility == "summary",
            self.tools if live is None else listed,
            tuple(section.policies),
            resolved(prompt, self.children, values, given, principal),
            cast("tuple[Attachment, ...]", section.attachments),
            live,
            listed,
        )


class Words:
    """A prompt's texts as written in the code. A subclass applies overrides."""

    def body(self, path: str, section: Section[Any]) -> str:
        return section.template

    def summary(self, path: str, section: Section[Any]) -> str | None:
        return section.summary

    def tool(self, tool: AnyTool) -> AnyTool:
        return tool


def plan(
    sections: Sequence[Section[Any]], words: Words, above: str = "", depth: int = 0
) -> tuple[Planned, ...]:
    """Create the plan of a tree of sections by parsing its templates. `words` provides the texts."""
    made: list[Planned] = []
    for section in sections:
        path = f"{above}{section.key}"
        summary = words.summary(path, section)
        tools = tuple(words.tool(tool) for tool in section.tools)
        made.append(
            Planned(
                section,
                path,
                section.heading(depth),
                condition_of(section, "enabled"),
                condition_of(section, "visibility"),
                template_of(words.body(path, section)),
                None if summary is None else template_of(summary),
                tools,
                examples_of(tools),
                plan(section.children, words, f"{path}.", depth + 1),
            )
        )
    return tuple(made)


def resolved(
    prompt: str, plans: Sequence[Planned], values: Mapping[str, Any], given: Mapping[str, Any], principal: str
) -> tuple[Node, ...]:
    """Return the enabled sections of a plan, with all placeholders filled in.

    Raises `PromptRenderError` if a condition can't be evaluated.
    """
    nodes = (one.resolve(prompt, values, given, principal) for one in plans)
    return tuple(node for node in nodes if node is not None)


def all_of(plans: Sequence[Planned]) -> Iterator[Planned]:
    """Yield every section of a plan, in declaration order."""
    for one in plans:
        yield one
        yield from all_of(one.children)


def examples_of(tools: Sequence[AnyTool]) -> str:
    """Format the examples of the tools that have a handler, as text for a model."""
    words = [
        (tool.name, example_words(tool, example))
        for tool in tools
        if tool.handler is not None
        for example in tool.examples
    ]
    return "\n".join(
        f"- {name}: {one['description']}\n  input: {one['input']}\n  output: {one['output']}"
        for name, one in words
    )


def example_words(tool: AnyTool, example: ToolExample[Any, Any]) -> dict[str, str]:
    """Format an example: its description, and its input and output as JSON."""
    given: Any = example.input
    sent = to_json(cast(object, given)) if isinstance(given, Mapping) else tool.dump(given)
    return {
        "description": example.description,
        "input": sent.decode(),
        "output": to_json(example.output).decode(),
    }
