"""The rules of what a prompt may be, and what follows from one that is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from handrail.prompt.params import ParamsTaker
from handrail.prompt.plan import AnyTool, Planned, Words, all_of, examples_of, plan
from handrail.schema import Schema
from handrail.tools.signature import caller_namespace

if TYPE_CHECKING:
    from handrail.prompt.definition import Prompt


@dataclass(frozen=True, slots=True)
class Checked:
    """What follows from a prompt's definition."""

    params_type: Any
    taker: ParamsTaker
    used: frozenset[str]
    paths: frozenset[str]
    plans: tuple[Planned, ...]
    tools: tuple[AnyTool, ...]
    examples: str
    output_schema: Schema[Any] | None
    is_fixed: bool
    """Does its rendering depend on nothing but itself?"""


def check_prompt(prompt: Prompt[Any]) -> Checked:
    for field in ("sections", "tools", "policies", "feedback", "completion", "resources"):
        object.__setattr__(prompt, field, tuple(getattr(prompt, field)))
    namespace = caller_namespace()
    words = Words()
    plans = plan(prompt.sections, words)
    every = list(all_of(plans))
    params_type = next((one.section.params_type for one in every if one.section.params_type), None)
    used = frozenset(name for one in every for t in (one.body, one.summary) if t for name in t.names)
    functions = any(callable(c) for one in every for c in (one.section.enabled, one.section.visibility))
    tools = tuple(words.tool(tool) for tool in prompt.tools)
    return Checked(
        params_type=params_type,
        taker=ParamsTaker(prompt.name, params_type, namespace),
        used=used,
        paths=frozenset(one.path for one in every),
        plans=plans,
        tools=tools,
        examples=examples_of(tools),
        output_schema=None if prompt.output is None else Schema(prompt.output, namespace),
        is_fixed=params_type is None and not functions,
    )
