"""The rules of what a prompt may be, and what follows from one that is right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, get_args

from handrail.errors import DefinitionError, PromptDefinitionError
from handrail.prompt.overrides import Overrides
from handrail.prompt.params import ParamsTaker, fields_of, is_record
from handrail.prompt.plan import OPENER, AnyTool, Planned, Words, all_of, examples_of, plan
from handrail.prompt.rendering import check_policy_names, check_tool_names
from handrail.prompt.section import Section, walk
from handrail.prompt.section_checking import (
    check_placeholders,
    policies_of,
    sections_of,
    several,
    shown,
    tools_of,
)
from handrail.resources import Binding
from handrail.schema import Schema
from handrail.schema.wording import describe
from handrail.tools.naming import is_name, mend_for
from handrail.tools.signature import caller_namespace

if TYPE_CHECKING:
    from handrail.prompt.definition import Prompt

log = logging.getLogger("handrail.prompt")


@dataclass(frozen=True, slots=True)
class Checked:
    """What follows from a prompt's definition."""

    params_type: Any
    taker: ParamsTaker
    used: frozenset[str]
    """The fields that its texts name."""
    paths: frozenset[str]
    plans: tuple[Planned, ...]
    tools: tuple[AnyTool, ...]
    examples: str
    output_schema: Schema[Any] | None
    is_fixed: bool
    """Does its rendering depend on nothing but itself?"""


def check_prompt(prompt: Prompt[Any]) -> Checked:
    """Make a new prompt's parts tuples, refuse it with the mend if it is wrong, and say what follows."""
    check = _Check(prompt)
    check.name()
    check.parts()
    params_type = check.params_type()
    plans = check.texts(params_type)
    check.names(plans)
    words = check.overrides(params_type)
    if words is not None:
        plans = check.texts_overridden(params_type, words)
    tools = tuple((words or Words()).tool(tool) for tool in prompt.tools)
    every = tuple(all_of(plans))
    return Checked(
        params_type=params_type,
        taker=ParamsTaker(prompt.name, params_type, check.namespace),
        used=_named(every),
        paths=frozenset(one.path for one in every),
        plans=plans,
        tools=tools,
        examples=examples_of(tools),
        output_schema=check.output(),
        is_fixed=params_type is None
        and all(one.enabled.is_fixed and one.visibility.is_fixed for one in every),
    )


class _Check:
    """Checks one new prompt. Each method is one rule of what a prompt may be."""

    def __init__(self, prompt: Prompt[Any]) -> None:
        self.prompt = prompt
        self.place = f"prompt {prompt.name!r}"
        self.namespace = caller_namespace()

    def refuse(self, problem: str, mend: str, path: str | None = None) -> PromptDefinitionError:
        return PromptDefinitionError(self.at(path) if path else self.place, problem, mend)

    def at(self, path: str) -> str:
        return f"{self.place}, section {path!r}"

    def name(self) -> None:
        name: Any = self.prompt.name
        if not is_name(name):
            raise self.refuse(f"the name {name!r} is not allowed", mend_for(name, "my_prompt"))

    def parts(self) -> None:
        prompt, place = self.prompt, self.place
        sections: Any = prompt.sections
        if isinstance(sections, Section):
            raise self.refuse("sections is one section", "Give a list of sections, or a text.")
        if not sections or isinstance(sections, str):  # a text that says something has become a section
            raise self.refuse("it says nothing", "Give a text, or at least one section.")
        sections = sections_of(place, "sections", sections, Section)
        resources = several(place, "resources", prompt.resources, "bindings")
        for index, one in enumerate(resources):
            if not isinstance(one, Binding):
                raise self.refuse(f"resources[{index}] is {shown(one)}", "Give Binding(Protocol, provider).")
        parts = {
            "sections": sections,
            "tools": tools_of(place, prompt.tools),
            "policies": policies_of(place, prompt.policies),
            "feedback": several(place, "feedback", prompt.feedback, "feedback providers"),
            "completion": several(place, "completion", prompt.completion, "completion checkers"),
            "resources": resources,
        }
        for field, value in parts.items():
            object.__setattr__(prompt, field, value)

    def params_type(self) -> Any:
        """The one type of params that the sections take."""
        found: Any = None
        where = ""
        for path, section in walk(self.prompt.sections):
            kind = section.params_type
            if kind is None or kind is found:
                continue
            if found is not None:
                raise self.refuse(
                    f"section {where!r} takes {describe(found)} and section {path!r} takes {describe(kind)}",
                    "A prompt has one params type: put the fields of both into one class.",
                )
            found, where = kind, path
        return found

    def texts(self, params_type: Any) -> tuple[Planned, ...]:
        """Every placeholder has a field, and every field is used."""
        plans = plan(self.prompt.sections, Words())
        fields = fields_of(params_type)
        for one in all_of(plans):
            check_placeholders(self.at(one.path), "template", one.body, fields, params_type)
            if one.summary is not None:
                check_placeholders(self.at(one.path), "summary", one.summary, fields, params_type)
            if params_type is None and (one.enabled.asks_params or one.visibility.asks_params):
                raise self.refuse(
                    "a function asks for the params, and no section says what they are",
                    "Write MarkdownSection[Params](...), Params being a dataclass or a pydantic model.",
                    one.path,
                )
        unused = _unused(plans, fields)
        if unused:
            raise self.refuse(
                f"no section uses the field {unused[0]!r} of {describe(params_type)}",
                f"Write ${unused[0]} where it belongs, or drop the field.",
            )
        return plans

    def names(self, plans: Sequence[Planned]) -> None:
        """Tools and policies that are always enabled together have different names; the opener's is kept free."""
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
                raise self.refuse(
                    f"a tool of {place} is called {OPENER!r}, which opens the sections shown as summaries",
                    "Give it another name.",
                )

    def output(self) -> Schema[Any] | None:
        output: Any = self.prompt.output
        if output is None:
            return None
        if not is_record(output):
            raise self.refuse(
                f"output is {describe(output) if isinstance(output, type) or get_args(output) else shown(output)}",
                "Give a dataclass or a pydantic model, the class itself; a plain value can be a field of one.",
            )
        try:
            return Schema(output, self.namespace)
        except DefinitionError as error:
            problem, mend = error.in_two
            raise self.refuse(f"its output: {problem}", mend) from error.__cause__

    def overrides(self, params_type: Any) -> Words | None:
        """The tuned words, where there are any; what is not applied is logged."""
        overrides: Any = self.prompt.overrides
        if overrides is None:
            return None
        if not isinstance(overrides, Overrides):
            raise self.refuse(f"overrides is {shown(overrides)}", 'Give Overrides("folder").')
        tuned = overrides.tuned(self.prompt, params_type)
        left_out = [report for report in tuned.reports if report.state != "applied"]
        if left_out:
            said = "; ".join(str(report) for report in left_out)
            log.warning("%s: overrides in %s that are not applied: %s", self.place, tuned.file, said)
        return tuned

    def texts_overridden(self, params_type: Any, words: Words) -> tuple[Planned, ...]:
        plans = plan(self.prompt.sections, words)
        unused = _unused(plans, fields_of(params_type))
        if unused:
            file = cast(Overrides, self.prompt.overrides).file_of(self.prompt)
            raise self.refuse(
                f"with the overrides in {file} no section uses the field {unused[0]!r}",
                f"Keep ${unused[0]} in one of the texts.",
            )
        return plans


def _named(plans: Sequence[Planned]) -> frozenset[str]:
    texts = [text for one in plans for text in (one.body, one.summary) if text is not None]
    return frozenset(name for text in texts for name in text.names)


def _unused(plans: Sequence[Planned], fields: frozenset[str]) -> list[str]:
    every = list(all_of(plans))
    conditions = [condition for one in every for condition in (one.enabled, one.visibility)]
    read = {field for condition in conditions for field in condition.fields_used(fields)}
    return sorted(fields - _named(every) - read)


def _always_enabled(plans: Sequence[Planned]) -> list[Planned]:
    found: list[Planned] = []
    for one in plans:
        if one.enabled.is_fixed and one.enabled.may_be(True):
            found += [one, *_always_enabled(one.children)]
    return found
