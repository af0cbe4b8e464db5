"""The names are those of OpenTelemetry's conventions, as their packages know them. Each difference has its reason here."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import files
from pathlib import Path
from types import ModuleType

from handrail.telemetry import names
from support import ROOT

NEWER = {
    "gen_ai.skill.name": "the conventions' refinements of execute_tool for skills, which no package has yet",
    "gen_ai.skill.description": "as above",
    "gen_ai.skill.resource.name": "as above",
}
"""Names that no package has yet."""


def of(module: ModuleType) -> set[str]:
    return {value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}


OURS = of(names)


def known() -> set[str]:
    """Return every name that the packages of OpenTelemetry's conventions have."""
    found = of(import_module("opentelemetry.util.genai._instruments"))
    for file in files("opentelemetry-semantic-conventions") or ():
        if re.search(r"(attributes|metrics)/\w+_(attributes|metrics)\.py$", str(file)):
            module = ".".join(file.with_suffix("").parts)
            found |= of(import_module(module))
    for file in files("opentelemetry-util-genai") or ():
        if file.suffix == ".py":
            found |= set(re.findall(r'"([a-z]+(?:[._][a-z]+)+)"', file.read_text()))
    return found


def test_every_name_is_ours_or_the_conventions():
    """A name that does not begin with `handrail.` is one of the conventions, in its newest form."""
    foreign = {each for each in OURS if not each.startswith(("handrail", "https://"))}
    values = {names.CHAT, names.INVOKE_AGENT, names.EXECUTE_TOOL, names.OTHER}
    assert foreign - values - known() == set(NEWER)


def test_every_name_is_used():
    """No name is there that no span, attribute or metric has."""
    sources = [each for each in (ROOT / "src").rglob("*.py") if each != Path(str(names.__file__))]
    text = "\n".join(each.read_text() for each in sources)
    constants = {name for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert {name for name in constants if not re.search(rf"\bnames\.{name}\b", text)} == set()


def test_operations_are_the_conventions():
    """The operations are among those that the conventions know."""
    known = import_module(
        "opentelemetry.semconv._incubating.attributes.gen_ai_attributes"
    ).GenAiOperationNameValues
    assert {names.CHAT, names.INVOKE_AGENT, names.EXECUTE_TOOL} <= {each.value for each in known}


def test_what_has_no_name_is_other():
    """The value for what has no name of its own is the one that the conventions use for an error's type."""
    attributes = import_module("opentelemetry.semconv.attributes.error_attributes")
    assert attributes.ErrorTypeValues.OTHER.value == names.OTHER


def test_the_newest_names_are_used():
    """Names that were replaced in the newest conventions are not used in their old form."""
    assert names.USAGE_CACHE_WRITE_INPUT_TOKENS == "gen_ai.usage.cache_write.input_tokens"
    assert names.CONVERSATION_COMPACTED == "gen_ai.conversation.compacted"
    assert {names.EXECUTE_TOOL_DURATION, names.INVOKE_AGENT_DURATION, names.INVOKE_WORKFLOW_DURATION} == {
        "gen_ai.execute_tool.duration",
        "gen_ai.invoke_agent.duration",
        "gen_ai.invoke_workflow.duration",
    }
    assert not OURS & {
        "gen_ai.system",
        "gen_ai.usage.cache_creation.input_tokens",
        "gen_ai.usage.prompt_tokens",
        "gen_ai.usage.completion_tokens",
    }
