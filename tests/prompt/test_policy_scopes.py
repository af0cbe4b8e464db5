"""A section's policy that names a tool outside the section is refused, because it would not guard that tool.

A policy that misspells the name of a tool is refused too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from handrail import Adapter, MarkdownSection, Prompt, ScriptedModel, Tool, ToolContext, ToolResult, tool
from handrail.errors import DefinitionError
from handrail.guard import CapabilityPolicy, RateLimitPolicy, SequentialDependencyPolicy
from handrail.protocols import PolicyDecision
from handrail.run import open_gate


@tool
async def build() -> str:
    """Build the program."""
    return "built"


@tool
async def deploy() -> str:
    """Deploy the program."""
    return "deployed"


class Own:
    """A user-defined policy that names its tools."""

    name = "own"

    def __init__(self, *tools: str) -> None:
        self.named_tools = tools

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.deny("never")

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None: ...


NAMING_DEPLOY: list[Any] = [
    SequentialDependencyPolicy({"deploy": {"build"}}),
    RateLimitPolicy(1, 60, tools={"deploy"}),
    Own("deploy"),
]


def section(key: str, *tools: Any, policies: Any = (), children: Any = ()) -> MarkdownSection[Any]:
    return MarkdownSection(key.title(), key, "Text.", tools=tools, policies=policies, children=children)


@pytest.mark.parametrize("policy", NAMING_DEPLOY, ids=lambda policy: policy.name)
def test_a_policy_that_names_a_tool_of_a_different_section_is_refused(policy: Any):
    """A section's policy that names another section's tool is refused.

    The error names the section, the policy, the tool and its place, and says where to declare the policy.
    """
    with pytest.raises(DefinitionError) as caught:
        Prompt("p", [section("dev", build, policies=[policy]), section("ops", deploy)])
    said = str(caught.value)
    assert "prompt 'p', section 'dev'" in said
    assert f"its policy {policy.name!r} names the tool 'deploy' of section 'ops'" in said
    assert "Declare it in section 'ops', or on the prompt: Prompt(..., policies=[...])." in said


@pytest.mark.parametrize("policy", NAMING_DEPLOY, ids=lambda policy: policy.name)
def test_a_policy_of_a_child_that_names_a_tool_of_its_parent_is_refused(policy: Any):
    """A section's policy may not name a tool of the section above it.

    The policy covers only its own section and those below.
    """
    with pytest.raises(DefinitionError, match="names the tool 'deploy' of section 'ops'"):
        Prompt("p", [section("ops", deploy, children=[section("dev", build, policies=[policy])])])


def test_a_policy_of_a_section_that_names_a_tool_of_the_prompt_is_refused():
    """A section's policy may not name a tool of the prompt itself, which belongs to no section."""
    with pytest.raises(DefinitionError, match=r"of the prompt itself, .* Declare it on the prompt"):
        Prompt("p", [section("dev", build, policies=[Own("deploy")])], tools=[deploy])


@pytest.mark.parametrize(("name", "hint"), [("deplyo", "Did you mean 'deploy'?"), ("zzz", "Declare it on")])
def test_a_policy_of_a_section_that_names_no_tool_at_all_is_refused(name: str, hint: str):
    """A section's policy may not name a tool that no section has. The error suggests a similar name or another place."""
    with pytest.raises(DefinitionError) as caught:
        Prompt("p", [section("ops", deploy, policies=[Own(name)])])
    assert f"the tool {name!r} that no section has" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("policy", NAMING_DEPLOY, ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    "where", ["its own section", "above", "both sections", "section and prompt", "prompt"]
)
def test_a_policy_that_covers_the_tools_it_names_is_accepted(policy: Any, where: str):
    """A policy may be declared in the section of the tool it names, above it, in several places or on the prompt."""
    dev = section("dev", build, policies=[policy] if where in ("both sections", "section and prompt") else [])
    ops = section("ops", deploy, policies=[policy] if where in ("its own section", "both sections") else [])
    sections = [section("all", policies=[policy], children=[dev, ops])] if where == "above" else [dev, ops]
    Prompt("p", sections, policies=[policy] if "prompt" in where else [])


def test_a_tool_that_must_come_first_may_be_in_a_different_section():
    """In a section's `SequentialDependencyPolicy`, the tool that must run first may be in a different section."""
    policy = SequentialDependencyPolicy({"deploy": {"build"}})
    Prompt("p", [section("dev", build), section("ops", deploy, policies=[policy])])


@pytest.mark.parametrize(
    "policy",
    [RateLimitPolicy(1, 60), CapabilityPolicy(), SequentialDependencyPolicy({})],
    ids=lambda p: p.name,
)
def test_a_policy_that_names_no_tool_may_be_declared_anywhere(policy: Any):
    """A section's policy that names no tool is accepted."""
    Prompt("p", [section("dev", build, policies=[policy]), section("ops", deploy)])


@pytest.mark.parametrize("how", ["gate", "run"])
def test_a_misspelt_tool_is_refused_once_the_tools_are_known(how: str):
    """A misspelt tool name in a policy of a gate or a prompt is refused when the gate is opened or the run begins."""
    policy, tools = Own("deplyo"), [build, deploy]
    prompt = Prompt("p", "Text.", tools=tools, policies=[policy])
    evaluation = Adapter(ScriptedModel(["Done."])).evaluate(prompt, "hi")
    opens = partial(open_gate, tools, policies=[policy]) if how == "gate" else evaluation.wait
    with pytest.raises(DefinitionError, match=r"there is no tool 'deplyo'\. Did you mean 'deploy'\?"):
        opens()
    evaluation.close()


def test_a_policy_may_name_a_tool_that_a_run_does_not_have():
    """Several prompts can share a policy: it may name a tool that the run does not have, if no tool of the run has a similar name."""
    open_gate([build], policies=[Own("deploy")])
    prompt = Prompt("p", "Text.", tools=[build], policies=[Own("deploy")])
    assert Adapter(ScriptedModel(["Done."])).evaluate(prompt, "hi").wait().text == "Done."
