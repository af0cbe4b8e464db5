"""`RenderedPrompt`: a prompt as a model sees it. This module also opens sections that are shown as summaries."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Generic, cast

import msgspec
from typing_extensions import TypeVar

from handrail.concurrency.deadline import Deadline
from handrail.content import Attachment
from handrail.errors import PromptDefinitionError, PromptValidationError, ToolValidationError
from handrail.messages import Offered, Sent
from handrail.prompt.section import Condition, LiveSection, Section, Template, condition_of, template_of
from handrail.protocols import ToolPolicy
from handrail.schema import Schema, to_json
from handrail.schema.problems import Problem
from handrail.tools import ProviderTool, Tool, ToolExample
from handrail.tools.toolbox import NO_TOOLS, Toolbox, without_late

OPENER = "open_sections"
"""The name of the built-in tool that opens sections shown as summaries."""

AnyTool = Tool[Any, Any]


class SectionNode(msgspec.Struct, frozen=True):
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
    children: tuple[SectionNode, ...]
    attachments: tuple[Attachment, ...] = ()
    live: Callable[[], tuple[AnyTool, ...]] | None = None
    """Returns the current tools, if they can change during a run; otherwise None."""
    search: bool | None = None
    """Whether the model finds the section's tools by searching; None if the prompt says so."""
    listed: tuple[AnyTool, ...] = ()
    """The tools that a live section lists, including those that are left out of `tools`."""
    skill: str = ""
    """The name of the skill that the section is; "" if it is none."""

    def refreshed(self) -> SectionNode:
        """Return the node with the current tools of live sections; the node itself if nothing has changed."""
        listed = self.listed if self.live is None else self.live()
        children = tuple(child.refreshed() for child in self.children)
        if listed is self.listed and all(map(operator.is_, children, self.children)):
            return self
        tools = self.tools if self.live is None else listed
        return msgspec.structs.replace(self, tools=tools, listed=listed, children=children)

    def limited_to(self, tools: Container[int]) -> SectionNode:
        """Return the node with those of its tools that have one of these ids, and its children likewise."""
        return msgspec.structs.replace(
            self,
            tools=tuple(tool for tool in self.tools if id(tool) in tools),
            children=tuple(child.limited_to(tools) for child in self.children),
        )


class Planned(msgspec.Struct, frozen=True):
    """One of a prompt's sections, with its templates parsed. It is made when the prompt is defined, so that rendering parses none."""

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
    ) -> SectionNode | None:
        """Return the section with its placeholders filled in; None if it is disabled.

        `given` has the params and the session. Live sections list the tools of `principal`. Raises `PromptRenderError` if a condition can't be evaluated.
        """
        section = self.section
        if not self.enabled.evaluate(prompt, self.path, given):
            return None
        visibility = self.visibility.evaluate(prompt, self.path, given)
        live = partial(section.current_tools, principal) if isinstance(section, LiveSection) else None
        listed = () if live is None else live()
        return SectionNode(
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
            section.search,
            listed,
            section.skill,
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
) -> tuple[SectionNode, ...]:
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


OutputT = TypeVar("OutputT", default=Any)


class ScopedPolicy(msgspec.Struct, frozen=True):
    """A policy and the names of the tools on which it decides. None stands for every tool in the prompt.

    A policy is also told about the successful calls of tools outside its scope, unless it is a `ChangePolicy` and not a
    `ResultsNoter`. The scope includes the tools of sections that are still closed, so opening a section does not change the policies.
    """

    policy: ToolPolicy
    tools: frozenset[str] | None

    def decides_on(self, tool: str) -> bool:
        """Return whether a call to this tool needs the policy's permission."""
        return self.tools is None or tool in self.tools


class ClosedSection(msgspec.Struct, frozen=True):
    """A section that is shown as a summary."""

    path: str
    title: str


class Tree:
    """All enabled sections in one rendering, whether they are shown in full or not."""

    __slots__ = (
        "_by_path",
        "every_tool",
        "examples",
        "live",
        "nodes",
        "output_schema",
        "own_policies",
        "policies",
        "prompt",
        "result_limit",
        "search",
        "searched",
        "secretive",
        "tools",
    )

    def __init__(
        self,
        prompt: str,
        nodes: Sequence[SectionNode],
        tools: Sequence[AnyTool],
        examples: str,
        policies: Sequence[ToolPolicy],
        output_schema: Schema[Any] | None,
        search: bool = False,
    ) -> None:
        every = [*tools, *(tool for node in _all_of(nodes) for tool in node.tools)]
        kept = without_late(every)
        if kept is not every:
            ids = {id(tool) for tool in kept}
            nodes = [node.limited_to(ids) for node in nodes]
        self.prompt = prompt
        self.nodes = tuple(nodes)
        self.tools = tuple(tools)
        self.examples = examples
        self.output_schema = output_schema
        self._by_path = {node.path: node for node in _all_of(nodes)}
        check_tool_names(
            prompt,
            [("the prompt itself", tools)]
            + [(f"section {node.path!r}", node.tools) for node in _all_of(nodes)],
        )
        self.own_policies = policies
        self.policies = self._scoped(policies)
        self.live = any(node.live is not None for node in self._by_path.values())
        self.every_tool = (*self.tools, *(tool for node in self._by_path.values() for tool in node.tools))
        self.search = search
        by_search = [
            node for node in self._by_path.values() if (search if node.search is None else node.search)
        ]
        found = [self.tools if search else (), *(node.tools for node in by_search)]
        self.searched = (
            frozenset(id(tool) for group in found for tool in group) if search or by_search else None
        )
        self.result_limit = max((tool.result_limit or 0 for tool in self.every_tool), default=0)
        answers = output_schema is not None and output_schema.secret
        self.secretive = answers or any(tool.secret for tool in self.every_tool)

    def _scoped(self, policies: Sequence[ToolPolicy]) -> tuple[ScopedPolicy, ...]:
        """Return each policy once, with the names of the tools on which it decides.

        These are the tools of the sections that declare it and of the sections inside them. A policy of the prompt itself
        decides on every tool.
        """
        scopes: dict[int, tuple[ToolPolicy, frozenset[str] | None]] = {}
        for policy in policies:
            scopes[id(policy)] = (policy, None)
        for node in self._by_path.values():
            below = frozenset(tool.name for one in _all_of([node]) for tool in one.tools)
            for policy in node.policies:
                _, so_far = scopes.get(id(policy), (policy, frozenset[str]()))
                scopes[id(policy)] = (policy, None if so_far is None else so_far | below)
        check_policy_names(self.prompt, [policy for policy, _ in scopes.values()])
        return tuple(ScopedPolicy(policy, scope) for policy, scope in scopes.values())

    def refreshed(self) -> Tree:
        """Return the tree with the current tools of live sections; the tree itself if nothing has changed."""
        nodes = tuple(node.refreshed() for node in self.nodes)
        if all(map(operator.is_, nodes, self.nodes)):
            return self
        return Tree(
            self.prompt, nodes, self.tools, self.examples, self.own_policies, self.output_schema, self.search
        )

    def summaries(self, paths: Iterable[str]) -> frozenset[str]:
        """Return the paths of all summaries among these sections and the sections that contain them."""
        wanted = {prefix for path in paths for prefix in _prefixes(path)}
        return frozenset(path for path in wanted if path in self._by_path and self._by_path[path].is_summary)

    def check_openable(
        self, paths: Sequence[str], opened: frozenset[str], closed: Sequence[ClosedSection]
    ) -> None:
        problems: list[Problem] = []
        for path in paths:
            if path not in self._by_path:
                problems.append(Problem("", f"there is no section {path!r}"))
            elif self.summaries([path]) <= opened:
                problems.append(Problem("", f"section {path!r} is already open"))
        if not paths:
            problems.append(Problem("", "no section is named"))
        if problems:
            can = ", ".join(repr(section.path) for section in closed)
            hint = f"Sections that can be opened: {can}." if can else "Every section is shown in full."
            said = f"{'; '.join(map(str, problems))}. {hint}"
            raise ToolValidationError(said, [*problems, Problem("", hint)])

    def outermost(self, paths: frozenset[str]) -> list[SectionNode]:
        """Return the sections with these paths, in declaration order, without those that are inside another of them."""
        return [
            node
            for path, node in self._by_path.items()
            if path in paths and not paths & set(_prefixes(path)[:-1])
        ]

    def rendered(self, opened: frozenset[str], deadline: Deadline | None) -> RenderedPrompt[Any]:
        """Return the prompt with these summaries opened."""
        shown = list(_shown(self.nodes, opened))
        blocks = [text_of(node, opened) for node in self.nodes]
        if self.examples:
            blocks.append(f"## Examples\n\n{self.examples}")
        tools = [*self.tools, *(tool for node in shown if _is_open(node, opened) for tool in node.tools)]
        handled = tuple(tool for tool in tools if tool.handler is not None)
        return RenderedPrompt(
            text="\n\n".join(block for block in blocks if block),
            tools=handled,
            output_schema=self.output_schema,
            deadline=deadline,
            policies=self.policies,
            closed=tuple(
                ClosedSection(node.path, node.title) for node in shown if not _is_open(node, opened)
            ),
            opened=opened,
            provider_tools=tuple(tool for tool in tools if isinstance(tool, ProviderTool)),
            attachments=tuple(each for node in shown if _is_open(node, opened) for each in node.attachments),
            offer=Offer(handled),
            _tree=self,
        )


class Offer:
    """The tools of a rendering as its runs need them. Each form is made when a run first needs it, and shared by all further runs."""

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        self._tools = tools

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools by name. Raises `DefinitionError` if two of them have the same name, or one is incomplete."""
        return NO_TOOLS.plus(self._tools)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple([tool.name for tool in self._tools])

    @cached_property
    def sent(self) -> Sent[Offered]:
        """The tools as models are sent them, with their encoding for each wire. It is shared, so copy it before you add to it."""
        return Sent([Offered(tool) for tool in self._tools])


@dataclasses.dataclass(frozen=True)  # no slots, because calling a subscripted generic class sets an attribute
class RenderedPrompt(Generic[OutputT]):
    """A prompt as a model sees it. It is immutable: `open` and `refreshed` create new ones."""

    text: str
    tools: tuple[AnyTool, ...]
    """The tools of the prompt and of the enabled sections that are shown in full, in declaration order.

    Tools without a handler, such as `provider_tools`, are left out.
    """
    output_schema: Schema[OutputT] | None
    deadline: Deadline | None
    policies: tuple[ScopedPolicy, ...]
    """The policies of the prompt and of every enabled section, whether shown in full or not."""
    closed: tuple[ClosedSection, ...]
    """The sections shown as summaries."""
    opened: frozenset[str]
    """The paths of the opened summaries. To get this prompt again, call `render` with them and the same params and session."""
    provider_tools: tuple[ProviderTool, ...]
    """The tools that the model's provider runs itself, from the prompt and from the sections shown in full."""
    attachments: tuple[Attachment, ...]
    """The attachments of the sections that are shown in full, in declaration order."""
    offer: Offer = dataclasses.field(repr=False, compare=False)
    """`tools`, as runs need them."""
    _tree: Tree = dataclasses.field(repr=False, compare=False)

    @property
    def secretive(self) -> bool:
        """Whether the output, or the arguments of any tool, can contain a secret. Tools that are not shown count too."""
        return self._tree.secretive

    @property
    def searches(self) -> bool:
        """Whether the model finds some of the tools by searching."""
        return self._tree.searched is not None

    def is_searched(self, tool: AnyTool) -> bool:
        """Return whether the model finds this tool by searching. Tools with secret parameters are always listed, so that secrets are
        masked by the name under which they were written."""
        return self._tree.searched is not None and id(tool) in self._tree.searched and not tool.secret

    @property
    def live(self) -> bool:
        """Whether the tools of a section can change during the run."""
        return self._tree.live

    def refreshed(self) -> RenderedPrompt[OutputT]:
        """Return the prompt with the current tools of live sections, and the same text.

        Returns the prompt itself if nothing has changed. A tool that a server has added is left out if another tool has its name.
        Raises `PromptValidationError` if two tools now have the
        same name.
        """
        tree = self._tree.refreshed()
        if tree is self._tree:
            return self
        return dataclasses.replace(tree.rendered(self.opened, self.deadline), text=self.text)

    @property
    def every_tool(self) -> tuple[AnyTool, ...]:
        """The prompt's tools and those of all enabled sections, including sections that are closed."""
        return self._tree.every_tool

    @property
    def result_limit(self) -> int:
        """The largest limit that one of these tools has for its results; 0 if none has one."""
        return self._tree.result_limit

    def open(self, paths: Sequence[str]) -> Opening[OutputT]:
        """Show these sections in full, together with any closed sections that contain them.

        Their children keep their own visibility. Conditions are not evaluated again, because this continues
        the same rendering. If a path is unknown or already open, or if there is no path, nothing is opened, and this
        raises a `ToolValidationError` that tells the model what can be opened.
        """
        paths = [paths] if isinstance(paths, str) else list(paths)
        tree = self._tree
        tree.check_openable(paths, self.opened, self.closed)
        opened = self.opened | tree.summaries(paths)
        rendered: RenderedPrompt[OutputT] = tree.rendered(opened, self.deadline)
        shown_before = {tool.name for tool in self.tools}
        new = tree.outermost(opened - self.opened)
        text = "\n\n".join(text_of(node, opened) for node in new)
        tools = tuple(tool for tool in rendered.tools if tool.name not in shown_before)
        attachments = tuple(each for each in rendered.attachments if each not in self.attachments)
        skills = tuple((node.skill, node.summary) for node in new if node.skill)
        return Opening(text, tools, rendered, attachments, skills)


class Opening(msgspec.Struct, Generic[OutputT], frozen=True):
    """The result of opening sections. The model receives `text` as the result of its call."""

    text: str
    """The text of the newly opened sections."""
    tools: tuple[AnyTool, ...]
    """The tools that are shown for the first time, in declaration order."""
    rendered: RenderedPrompt[OutputT]
    """The complete prompt after the sections were opened."""
    attachments: tuple[Attachment, ...] = ()
    """The attachments that are shown for the first time, in declaration order."""
    skills: tuple[tuple[str, str], ...] = ()
    """The names and the descriptions of the skills that were opened."""


def text_of(node: SectionNode, opened: frozenset[str]) -> str:
    """Return a section's text: in full, or as its summary with a note on how to open it."""
    if _is_open(node, opened):
        examples = f"Examples:\n\n{node.examples}" if node.examples else ""
        blocks = [node.heading, node.body, examples, *(text_of(child, opened) for child in node.children)]
    else:
        import json  # most prompts have no closed sections

        call = json.dumps({"sections": [node.path]})
        blocks = [node.heading, node.summary, f"Call {OPENER} with {call} to see it in full."]
    return "\n\n".join(block for block in blocks if block)


def check_tool_names(prompt: str, places: Iterable[tuple[str, Sequence[AnyTool]]]) -> None:
    """Raise `PromptValidationError` if two tools have the same name."""
    seen: dict[str, str] = {}
    for place, tools in places:
        for tool in tools:
            if tool.name in seen:
                raise PromptValidationError(prompt, tool.name, (seen[tool.name], place))
            seen[tool.name] = place


def check_policy_names(prompt: str, policies: Iterable[ToolPolicy]) -> None:
    """Raise `PromptDefinitionError` if two different policies have the same name.

    The same policy may be declared in several places.
    """
    seen: dict[str, ToolPolicy] = {}
    for policy in policies:
        if seen.setdefault(policy.name, policy) is not policy:
            raise PromptDefinitionError(
                f"prompt {prompt!r}",
                f"two policies are named {policy.name!r}, so they would share their state",
                "Give one of them a different `name`, or declare the same one in both places.",
            )


def _is_open(node: SectionNode, opened: frozenset[str]) -> bool:
    return not node.is_summary or node.path in opened


def _all_of(nodes: Iterable[SectionNode]) -> Iterator[SectionNode]:
    for node in nodes:
        yield node
        yield from _all_of(node.children)


def _shown(nodes: Iterable[SectionNode], opened: frozenset[str]) -> Iterator[SectionNode]:
    """Yield the visible sections. The children of a section that is shown as a summary are not visible."""
    for node in nodes:
        yield node
        if _is_open(node, opened):
            yield from _shown(node.children, opened)


def _prefixes(path: str) -> list[str]:
    """Split `a.b.c` into `a`, `a.b`, `a.b.c`."""
    keys = path.split(".")
    return [".".join(keys[: count + 1]) for count in range(len(keys))]
