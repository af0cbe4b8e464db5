"""Code mode in a run whose tools are found by searching: scripts call them by their own names, without `call_tool`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    CodeMode,
    LaterEnvironment,
    MemoryFilesystem,
    MemoryJournal,
    Prompt,
    ScriptedModel,
    Skills,
    Tool,
    ToolCall,
    tool,
)
from handrail.errors import RunParked
from handrail.messages import ToolMessage, Traits
from support.parked_runs import answer_to

WIRES = pytest.mark.parametrize(
    "traits", [None, Traits(loads_deferred=True)], ids=["fixed tools", "deferred tools"]
)
mailed: list[str] = []


@tool(capabilities={"mail.send"})
async def send_mail(to: str) -> str:
    """Send a letter by electronic mail."""
    mailed.append(to)
    return f"sent to {to}"


def chore(number: int) -> Tool[Any, Any]:
    @tool(name=f"chore-{number}", effect="pure", description=f"Does chore number {number}.")
    async def run(size: int) -> int:
        return number * size

    return run


CHORES = [chore(number) for number in range(100)]


def script(text: str) -> ToolCall:
    return ToolCall("run_script", {"script": text})


async def told(*calls: ToolCall, sections: Any = (), **options: Any) -> tuple[list[str], ScriptedModel]:
    """Make these calls in one run with a hundred tools, and return what the model is told of each."""
    model = ScriptedModel([*calls, "Done."], traits=options.pop("traits", None))
    prompt = Prompt("p", ["Work.", CodeMode(), *sections], tools=[*CHORES, send_mail], search=True, **options)
    await Adapter(model, filesystem=MemoryFilesystem({})).evaluate(prompt, "go")
    messages = model.requests[-1].messages
    return [each.results[0].text for each in messages if isinstance(each, ToolMessage)], model


def listed(model: ScriptedModel) -> list[str]:
    return [each.tool.name for each in model.requests[0].tools if not each.deferred]


@WIRES
async def test_scripts_call_searched_tools_by_their_names(traits: Traits | None):
    """A script calls two of a hundred tools that no request lists. `run_script` itself is listed, and found by nobody."""
    texts, model = await told(
        ToolCall("search_tools", {"query": "chore 7"}),
        script("await chore_7(size=2) + await chore_8(size=1)"),
        traits=traits,
    )
    assert texts[1] == "22"
    fixed = ["run_script", "search_tools", *(["call_tool"] if traits is None else [])]
    assert listed(model) == fixed
    assert "chore" not in model.requests[0].system


@WIRES
@pytest.mark.parametrize(
    "text",
    [
        'await call_tool(name="chore-7", arguments={"size": 2})',
        'await search_tools(query="chore")',
        'await chore_7(size="much")',
        "await chore_100(size=1)",
    ],
    ids=["call_tool", "search_tools", "a wrong type", "an unknown tool"],
)
async def test_what_scripts_cannot_call_is_refused(text: str, traits: Traits | None):
    """The tools of the search are for the model. A script that calls them is refused before anything happens."""
    mailed.clear()
    texts, _ = await told(script(f'await send_mail(to="ann")\n{text}'), traits=traits)
    assert texts[0].startswith("The script was not run: a check found mistakes in it.")
    assert mailed == []


async def test_a_tool_that_is_called_like_that_of_the_search_is_a_function():
    """In a run without a search, the names of its tools are free."""

    @tool(effect="pure")
    async def search_tools(garage: str) -> str:
        """Find hammers and saws."""
        return f"a saw in {garage}"

    model = ScriptedModel([script('await search_tools(garage="mine")'), "Done."])
    await Adapter(model).evaluate(Prompt("p", ["Work.", CodeMode()], tools=[search_tools]), "go")
    assert model.requests[-1].messages[-1].text == "a saw in mine"


@WIRES
async def test_an_approval_in_a_script_shows_the_searched_tool(traits: Traits | None):
    """A script parks at a searched tool. The question shows the tool, and it is called once, in another process."""
    mailed.clear()
    journal = MemoryJournal()
    rules = CapabilityPolicy({"mail.send": "ask"})
    prompt = Prompt("p", ["Work.", CodeMode()], tools=[*CHORES, send_mail], search=True, policies=[rules])
    turns = [script('await chore_1(size=1)\nawait send_mail(to="ann")'), "Done."]
    with pytest.raises(RunParked) as parked:
        await Adapter(ScriptedModel(turns, traits=traits), journal=journal).evaluate(
            prompt, "go", environment=LaterEnvironment()
        )
    (question,) = parked.value.questions
    assert (question.name, question.payload["arguments"]) == ("send_mail", {"to": "ann"})
    journal.questions.answer(answer_to(question, {"approved": True}))
    model = ScriptedModel(turns[1:], traits=traits)
    await Adapter(model, journal=journal).resume(parked.value.run_id, prompt, environment=LaterEnvironment())
    assert model.requests[-1].messages[-1].text == "sent to ann"
    assert mailed == ["ann"]


@WIRES
async def test_skills_scripts_and_search_together(traits: Traits | None, tmp_path: Path):
    """The tools that the sections of skills and scripts name stay listed. One script reads a skill's file and calls a searched tool."""
    (tmp_path / "mending").mkdir()
    (tmp_path / "mending/SKILL.md").write_text("---\nname: mending\ndescription: Mends.\n---\nRead it.\n")
    (tmp_path / "mending/sizes.txt").write_text("3\n")
    texts, model = await told(
        ToolCall("open_sections", {"sections": ["skills.mending"]}),
        script(
            'page = await read_skill_file(skill="mending", path="sizes.txt")\n'
            "await chore_5(size=3) if '3' in page else page"
        ),
        sections=[Skills(tmp_path)],
        traits=traits,
    )
    assert "Read it." in texts[0]
    assert texts[1] == "15"
    assert {"run_script", "read_skill_file", "open_sections", "search_tools"} <= set(listed(model))
    assert not any(name.startswith("chore") for name in listed(model))


def test_a_thousand_tools_leave_the_request_as_it_is():
    """Neither the prompt nor the tool list of a run with scripts grows with the tools that are searched."""

    def size(tools: list[Tool[Any, Any]]) -> int:
        model = ScriptedModel([script("1"), "Done."])
        prompt = Prompt("p", ["Work.", CodeMode()], tools=tools, search=True)
        Adapter(model).evaluate(prompt, "go").wait()
        sent = [each.tool.json_schema for each in model.requests[-1].tools]
        return len(model.requests[-1].system) + len(msgspec.json.encode(sent))

    assert size(CHORES) == size(CHORES[:1])
