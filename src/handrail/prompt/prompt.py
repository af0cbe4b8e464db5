"""`Prompt`: instructions, tools and policies in one tree, as an immutable value that is checked when it is created."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import FunctionType, UnionType
from typing import TYPE_CHECKING, Any, Generic, cast, overload

import msgspec
from pydantic import BaseModel
from typing_extensions import TypeVar

from handrail.concurrency.deadline import Deadline
from handrail.errors import DefinitionError, PromptDefinitionError, PromptRenderError
from handrail.messages import DEFAULT_SETTINGS, ModelSettings
from handrail.prompt.compact import AT_THE_WINDOW, Compact
from handrail.prompt.rendering import (
    OPENER,
    AnyTool,
    Planned,
    RenderedPrompt,
    Tree,
    Words,
    all_of,
    check_policy_names,
    check_tool_names,
    examples_of,
    plan,
    resolved,
)
from handrail.prompt.section import (
    LiveSection,
    ParamsReader,
    Section,
    as_sections,
    check_placeholders,
    check_sections,
    check_tools,
    fields_of,
    prompt_policies,
    shown,
    walk,
)
from handrail.protocols import SessionView, ToolPolicy
from handrail.schema import Schema
from handrail.schema.problems import describe
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool
from handrail.tools.definition import problem_with_limit
from handrail.tools.signature import caller_namespace
from handrail.tools.toolbox import out_of_scope

if TYPE_CHECKING:
    from handrail.prompt.overrides import Overrides
    from handrail.resources import Binding

OutputT = TypeVar("OutputT", default=Any)

log = logging.getLogger("handrail.prompt")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_MOST_CACHED = 64
"""Maximum number of cached renderings of one prompt. Each is for a different set of opened sections."""


class Checked(msgspec.Struct, frozen=True):
    """The values that are derived from a prompt's definition when it is checked."""

    params_type: Any
    reader: ParamsReader
    used: frozenset[str]
    """The fields of the params that the prompt's texts use."""
    paths: frozenset[str]
    plans: tuple[Planned, ...]
    tools: tuple[AnyTool, ...]
    examples: str
    output_schema: Schema[Any] | None
    is_fixed: bool
    """Whether every rendering of the prompt is the same, except for the opened sections and the deadline."""
    is_live: bool
    """Whether the tools of a section can change during a run."""
    needs_files: str
    """The class of the first section that needs files, by name; "" if none does."""


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False)
class Prompt(Generic[OutputT]):
    """Instructions, tools and policies in one tree.

    `Prompt("guide", "Answer briefly.", tools=[weather])` has one section without a heading. Texts and sections
    can be mixed: `Prompt("guide", ["Answer briefly.", FileTools()])`. With `output=Report` it is a
    `Prompt[Report]`, and the model's answer is a `Report`. Any type with a schema will do: `int`, `list[City]`, `City | str`. The prompt's policies decide on every tool; a section's
    policies decide on the tools of the section and of the sections inside it.

    The constructor raises `PromptDefinitionError` if the definition is invalid, and `ToolDefinitionError` if a tool is
    incomplete.
    """

    name: str
    sections: tuple[Section[Any], ...]
    tools: tuple[Tool[Any, Any], ...]
    output: type[OutputT] | None
    """The type of the answer, which can be any type that a schema describes; None for plain text."""
    policies: tuple[ToolPolicy, ...]
    feedback: tuple[Any, ...]
    completion: tuple[Any, ...]
    resources: tuple[Binding[Any], ...]
    overrides: Overrides | None
    model_settings: ModelSettings
    """Settings for the model in this prompt's runs. A run's own settings take precedence."""
    compact: Compact
    """When and how the conversations of this prompt's runs are compacted."""
    result_limit: int | None
    """Largest number of characters of a result that the model is shown whole; None for no limit. A tool's own limit takes precedence."""

    search: bool
    """Whether the model finds the prompt's tools by searching, rather than being sent all of them with each request."""

    params_type: Any = dataclasses.field(init=False, repr=False, compare=False)
    """The type of the params, which all sections share, or None if no section takes params."""
    _checked: Checked = dataclasses.field(init=False, repr=False, compare=False)
    _cached: dict[frozenset[str], RenderedPrompt[OutputT]] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    @overload
    def __init__(
        self: Prompt[None],
        name: str,
        sections: str | Sequence[str | Section[Any]],
        *,
        tools: Iterable[Tool[Any, Any]] = (),
        output: None = None,
        policies: Iterable[ToolPolicy] = (),
        feedback: Iterable[Any] = (),
        completion: Iterable[Any] = (),
        resources: Iterable[Binding[Any]] = (),
        overrides: Overrides | None = None,
        model_settings: ModelSettings = ...,
        compact: Compact = ...,
        result_limit: int | None = ...,
        search: bool = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        sections: str | Sequence[str | Section[Any]],
        *,
        tools: Iterable[Tool[Any, Any]] = (),
        output: type[OutputT],
        policies: Iterable[ToolPolicy] = (),
        feedback: Iterable[Any] = (),
        completion: Iterable[Any] = (),
        resources: Iterable[Binding[Any]] = (),
        overrides: Overrides | None = None,
        model_settings: ModelSettings = ...,
        compact: Compact = ...,
        result_limit: int | None = ...,
        search: bool = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Prompt[Any],
        name: str,
        sections: str | Sequence[str | Section[Any]],
        *,
        tools: Iterable[Tool[Any, Any]] = (),
        output: UnionType,
        policies: Iterable[ToolPolicy] = (),
        feedback: Iterable[Any] = (),
        completion: Iterable[Any] = (),
        resources: Iterable[Binding[Any]] = (),
        overrides: Overrides | None = None,
        model_settings: ModelSettings = ...,
        compact: Compact = ...,
        result_limit: int | None = ...,
        search: bool = ...,
    ) -> None: ...
    def __init__(
        self,
        name: str,
        sections: Any,
        *,
        tools: Any = (),
        output: Any = None,
        policies: Any = (),
        feedback: Any = (),
        completion: Any = (),
        resources: Any = (),
        overrides: Any = None,
        model_settings: Any = DEFAULT_SETTINGS,
        compact: Any = AT_THE_WINDOW,
        result_limit: Any = None,
        search: Any = False,
    ) -> None:
        given = {
            "name": name,
            "sections": as_sections(sections),
            "tools": tools,
            "output": output,
            "policies": policies,
            "feedback": feedback,
            "completion": completion,
            "resources": resources,
            "overrides": overrides,
            "model_settings": model_settings,
            "compact": compact,
            "result_limit": result_limit,
            "search": search,
        }
        for field, value in given.items():
            object.__setattr__(self, field, value)
        checked = _check(cast("Prompt[Any]", self))
        object.__setattr__(self, "params_type", checked.params_type)
        object.__setattr__(self, "_checked", checked)
        object.__setattr__(self, "_cached", {})

    def __hash__(self) -> int:
        return hash(self.name)

    def extended(self, sections: Sequence[Section[Any]]) -> Prompt[OutputT]:
        """Return a copy of the prompt with these sections after its own.

        Raises `PromptDefinitionError` if the copy would be invalid, for example if two sections have the same key.
        """
        given: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init
        }
        given["sections"] = (*self.sections, *sections)
        return cast("Prompt[OutputT]", Prompt(**given))

    async def connect(self, principal: str = "local") -> None:
        """Connect the live sections, whose tools come from an MCP server, for example. A run does this before it renders the prompt.

        Raises a `HandrailError` if a section's tools are not available and the run can't begin without them.
        """
        if not self._checked.is_live:
            return
        for _, section in walk(self.sections):
            if isinstance(section, LiveSection):
                await section.connect(principal)

    @property
    def needs_files(self) -> str:
        """The class of the first section that needs files, by name; "" if none does."""
        return self._checked.needs_files

    def render(
        self,
        params: Any = None,
        *,
        session: SessionView | None = None,
        opened: Collection[str] = (),
        deadline: Deadline | None = None,
        principal: str | None = None,
    ) -> RenderedPrompt[OutputT]:
        """Render the prompt for a model.

        `params` is an instance of the sections' params type, or a mapping with its fields. `opened` lists the paths
        of sections to show in full. Summaries that contain one of them are opened too. Disabled sections stay hidden.
        Live sections list the tools of `principal`; by default, of the session's principal.

        Raises `PromptRenderError` if the params are invalid, if `opened` has an unknown path, or if a condition can't be
        evaluated. Raises `PromptDefinitionError` if two enabled tools, or two different policies, have the same name.
        """
        checked = self._checked
        opened = (opened,) if isinstance(opened, str) else opened
        if not checked.is_fixed:
            owner = principal or ("local" if session is None else session.principal)
            return self._rendered(params, session, opened, deadline, owner)
        if params is not None:
            checked.reader.read(params)
        key = frozenset(opened)
        found = self._cached.get(key)
        if found is None:
            found = self._rendered(None, None, key, None, "local")
            if len(self._cached) < _MOST_CACHED:
                self._cached[key] = found
        return found if deadline is None else dataclasses.replace(found, deadline=deadline)

    def _rendered(
        self,
        params: Any,
        session: SessionView | None,
        opened: Collection[str],
        deadline: Deadline | None,
        principal: str,
    ) -> RenderedPrompt[OutputT]:
        checked = self._checked
        taken = checked.reader.read(params)
        unknown = [path for path in opened if path not in checked.paths]
        if unknown:
            known = ", ".join(map(repr, sorted(checked.paths)))
            raise PromptRenderError(
                self.name, f"{unknown[0]!r} in `opened` is not a section", f"Its sections are {known}."
            )
        values = {name: getattr(taken, name) for name in checked.used}
        nodes = resolved(self.name, checked.plans, values, {"params": taken, "session": session}, principal)
        tree = Tree(
            self.name,
            nodes,
            checked.tools,
            checked.examples,
            self.policies,
            checked.output_schema,
            self.search,
        )
        return tree.rendered(tree.summaries(opened), deadline)


# --- checks of a new prompt ------------------------------------------------------------------------


def _check(prompt: Prompt[Any]) -> Checked:
    """Check a new prompt, convert its lists to tuples, and return the derived values.

    Raises `DefinitionError` if the prompt, or a tool in it, is invalid.
    """
    check = _Check(prompt)
    check.name()
    check.parts()
    params_type = check.params_type()
    plans = check.texts(params_type)
    check.names(plans)
    check.policy_scopes(plans)
    words = check.overrides(params_type)
    if words is not None:
        plans = check.overridden_texts(params_type, words)
    tools = tuple((words or Words()).tool(tool) for tool in prompt.tools)
    every = tuple(all_of(plans))
    is_live = any(isinstance(one.section, LiveSection) for one in every)
    if not is_live:
        names = {tool.name for tool in (*tools, *(tool for one in every for tool in one.tools))}
        for one in every:
            one.section.note_tools(names)
    return Checked(
        params_type=params_type,
        reader=ParamsReader(prompt.name, params_type, check.namespace),
        used=_named(every),
        paths=frozenset(one.path for one in every),
        plans=plans,
        tools=tools,
        examples=examples_of(tools),
        output_schema=check.output(),
        is_fixed=params_type is None
        and all(one.enabled.is_fixed and one.visibility.is_fixed for one in every)
        and not is_live,
        is_live=is_live,
        needs_files=next((type(one.section).__name__ for one in every if one.section.needs_files), ""),
    )


class _Check:
    """Checks the definition of a new prompt."""

    def __init__(self, prompt: Prompt[Any]) -> None:
        self.prompt = prompt
        self.place = f"prompt {prompt.name!r}"
        self.namespace = caller_namespace()

    def error(self, problem: str, hint: str, path: str | None = None) -> PromptDefinitionError:
        return PromptDefinitionError(self.at(path) if path else self.place, problem, hint)

    def at(self, path: str) -> str:
        return f"{self.place}, section {path!r}"

    def name(self) -> None:
        name: Any = self.prompt.name
        if not isinstance(name, str) or not _NAME.match(name):
            raise self.error(f"the name {name!r} is not allowed", "Use 1 to 64 letters, digits, '_' and '-'.")

    def parts(self) -> None:
        prompt, place = self.prompt, self.place
        sections: Any = prompt.sections
        if isinstance(sections, Section):
            raise self.error("sections is a single section", "Pass a list of sections, or a string.")
        if not sections:
            raise self.error("it is empty", "Pass a string, or at least one section.")
        settings: Any = prompt.model_settings
        if not isinstance(settings, ModelSettings):
            raise self.error(
                f"model_settings is {shown(settings)}", "Pass a ModelSettings: ModelSettings(effort='low')."
            )
        if not isinstance(prompt.compact, Compact):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise self.error(f"compact is {shown(prompt.compact)}", "Pass a Compact: Compact(by='summary').")
        problem = problem_with_limit(prompt.result_limit)
        if problem:
            raise self.error(*problem)
        parts = {
            "sections": check_sections(place, "sections", sections),
            "tools": check_tools(place, prompt.tools),
            "policies": prompt_policies(place, prompt.policies),
            "feedback": self.having(
                "feedback",
                ("advise", "name", "cap", "trigger"),
                "Pass feedback providers; see FeedbackProvider.",
            ),
            "completion": self.having(
                "completion", ("missing", "name", "cap"), "Pass checkers; see CompletionChecker."
            ),
            "resources": self.having("resources", ("provide",), "Pass Binding(Protocol, provider)."),
        }
        for field, value in parts.items():
            object.__setattr__(prompt, field, value)

    def having(self, field: str, members: Sequence[str], hint: str) -> tuple[Any, ...]:
        """Return one of the prompt's lists as a tuple.

        Raises `PromptDefinitionError` if an item is a class, lacks a member, or has an invalid cap.
        """
        found = tuple(getattr(self.prompt, field))
        for index, one in enumerate(found):
            missing = [member for member in members if not hasattr(one, member)]
            if isinstance(one, type) or members[0] in missing:
                raise self.error(f"{field}[{index}] is {shown(one)}", hint)
            if missing:
                raise self.error(f"{field}[{index}] is {shown(one)}, which has no {missing[0]!r}", hint)
            cap = getattr(one, "cap", 1)
            if type(cap) is not int or cap < 0:
                raise self.error(
                    f"the cap of {field}[{index}] is {cap!r}", "Use a whole number of at least 0."
                )
        return found

    def params_type(self) -> Any:
        """Return the sections' params type; None if no section takes params.

        Raises `PromptDefinitionError` if two sections take different types.
        """
        found: Any = None
        where = ""
        for path, section in walk(self.prompt.sections):
            kind = section.params_type
            if kind is None or kind is found:
                continue
            if found is not None:
                raise self.error(
                    f"section {where!r} takes {describe(found)} and section {path!r} takes {describe(kind)}",
                    "A prompt has one params type: put the fields of both into one class.",
                )
            found, where = kind, path
        return found

    def texts(self, params_type: Any) -> tuple[Planned, ...]:
        """Plan the sections, and check their placeholders.

        Raises `PromptDefinitionError` if a placeholder has no field, if a condition takes params and no section declares
        their type, or if no text uses a field and no condition can read it.
        """
        plans = plan(self.prompt.sections, Words())
        fields = fields_of(params_type)
        for one in all_of(plans):
            check_placeholders(self.at(one.path), "template", one.body, fields, params_type)
            if one.summary is not None:
                check_placeholders(self.at(one.path), "summary", one.summary, fields, params_type)
            if params_type is None and (one.enabled.takes_params or one.visibility.takes_params):
                raise self.error(
                    "a function takes the params, and no section declares their type",
                    "Write MarkdownSection[Params](...), where Params is a dataclass or a pydantic model.",
                    one.path,
                )
        unused = _unused(plans, fields)
        if unused:
            raise self.error(
                f"no section uses the field {unused[0]!r} of {describe(params_type)}",
                f"Write ${unused[0]} where it belongs, or remove the field.",
            )
        return plans

    def names(self, plans: Sequence[Planned]) -> None:
        """Check the names of tools and policies.

        Among those that are always enabled, two tools with the same name raise `PromptValidationError`, and two different
        policies with the same name raise `PromptDefinitionError`. So does any tool named `OPENER`, if a section may be shown as
        a summary.
        """
        always = list(_always_enabled(plans))
        places = [("the prompt itself", self.prompt.tools)]
        check_tool_names(self.prompt.name, places + [(f"section {one.path!r}", one.tools) for one in always])
        in_sections = [policy for one in always for policy in one.section.policies]
        check_policy_names(self.prompt.name, [*self.prompt.policies, *in_sections])
        every = list(all_of(plans))
        if not any(one.visibility.may_be("summary") for one in every):
            return
        for place, tools in places + [(f"section {one.path!r}", one.tools) for one in every]:
            if any(tool.name == OPENER for tool in tools):
                raise self.error(
                    f"a tool of {place} is called {OPENER!r}, like the built-in tool that opens sections",
                    "Give it another name.",
                )

    def policy_scopes(self, plans: Sequence[Planned]) -> None:
        """Raise `PromptDefinitionError` if a policy names a tool that is outside all sections that declare the policy.

        A policy of the prompt itself may name any tool.
        """
        for_all = {id(policy) for policy in self.prompt.policies}
        where = {tool.name: "the prompt itself" for tool in self.prompt.tools}
        declared: dict[int, list[tuple[str, ToolPolicy, set[str]]]] = {}
        for one in all_of(plans):
            where.update((tool.name, f"section {one.path!r}") for tool in one.tools)
            below = {tool.name for each in all_of([one]) for tool in each.tools}
            for policy in one.section.policies:
                if id(policy) not in for_all:
                    declared.setdefault(id(policy), []).append((one.path, policy, below))
        for places in declared.values():
            path, policy, _ = places[0]
            scope = {name for _, _, below in places for name in below}
            if (wrong := out_of_scope(policy, scope, where)) is not None:
                raise self.error(*wrong, path)

    def output(self) -> Schema[Any] | None:
        output: Any = self.prompt.output
        if output is None:
            return None
        if isinstance(output, BaseModel | FunctionType) or (
            dataclasses.is_dataclass(output) and not isinstance(output, type)
        ):
            raise self.error(f"output is {shown(output)}", "Pass the type of the answer: output=Report.")
        try:
            return Schema(output, self.namespace)
        except DefinitionError as error:
            problem, hint = error.parts
            raise self.error(f"its output: {problem}", hint) from error.__cause__

    def overrides(self, params_type: Any) -> Words | None:
        """Return the prompt's texts with overrides applied, or None if the prompt has no `overrides`.

        Logs a warning about overrides that are not applied. Raises `PromptDefinitionError` if the prompt's `overrides`, or
        its file, is invalid.
        """
        if self.prompt.overrides is None:
            return None
        if not hasattr(self.prompt.overrides, "apply"):
            raise self.error(f"overrides is {shown(self.prompt.overrides)}", 'Pass Overrides("folder").')
        words = self.prompt.overrides.apply(self.prompt, params_type)
        unapplied = [report for report in words.reports if report.state != "applied"]
        if unapplied:
            reports = "; ".join(str(report) for report in unapplied)
            log.warning("%s: overrides in %s that are not applied: %s", self.place, words.file, reports)
        return words

    def overridden_texts(self, params_type: Any, words: Words) -> tuple[Planned, ...]:
        plans = plan(self.prompt.sections, words)
        unused = _unused(plans, fields_of(params_type))
        if unused:
            file = cast("Overrides", self.prompt.overrides).file_of(self.prompt)
            raise self.error(
                f"with the overrides in {file} no section uses the field {unused[0]!r}",
                f"Keep ${unused[0]} in one of the texts.",
            )
        return plans


def _named(plans: Sequence[Planned]) -> frozenset[str]:
    texts = [text for one in plans for text in (one.body, one.summary) if text is not None]
    return frozenset(name for text in texts for name in text.names)


def _unused(plans: Sequence[Planned], fields: frozenset[str]) -> list[str]:
    """Return the fields that no text uses. Empty if a condition takes the params, because it may read any field."""
    every = list(all_of(plans))
    if any(condition.may_read_params for one in every for condition in (one.enabled, one.visibility)):
        return []
    return sorted(fields - _named(every))


def _always_enabled(plans: Sequence[Planned]) -> Iterator[Planned]:
    for one in plans:
        if one.enabled.is_fixed and one.enabled.may_be(True):
            yield one
            yield from _always_enabled(one.children)
