"""Tools that are passed to a single run, in addition to its prompt's."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import (
    Adapter,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    UserContext,
    WorkerRegistry,
    tool,
)
from handrail.errors import DefinitionError, RunError, RunParked
from handrail.events import MessageAdded, ToolInvoked
from handrail.guard.policy import CapabilityPolicy
from handrail.messages import ToolMessage
from handrail.runs import replay
from support.parked_runs import answer_to


class Pick(BaseModel):
    number: int


@tool(effect="pure")
async def look() -> str:
    """Look around."""
    return "seen"


@tool(effect="staged")
async def choose(context: ToolContext) -> str:
    """Let somebody choose."""
    assert context.wait_for is not None
    return f"chose {(await context.wait_for('pick', {}, Pick)).number}"


@tool
async def send() -> str:
    """Send something."""
    return "sent"


PROMPT: Prompt[None] = Prompt("p", "Do.", tools=[look], policies=[CapabilityPolicy()])


def offered(model: ScriptedModel) -> list[list[str]]:
    return [[each.tool.name for each in request.tools] for request in model.requests]


async def test_they_are_offered_and_called_in_this_run_only():
    model = ScriptedModel([ToolCall("send"), "one", "two"])
    adapter = Adapter(model)
    response = await adapter.evaluate(PROMPT, "go", tools=[send])
    [invoked] = response.session[ToolInvoked].all()
    assert (invoked.tool, invoked.status) == ("send", "denied"), (
        "the prompt's policies were not applied to an added tool"
    )
    await adapter.evaluate(PROMPT, "go")
    assert offered(model) == [["look", "send"], ["look", "send"], ["look"]]


async def test_one_that_needs_somebody_is_not_offered_where_nobody_is():
    @tool
    async def confirm(context: UserContext) -> str:
        """Return the call's id."""
        return str(context.call_id)

    model = ScriptedModel(["done"])
    await Adapter(model).evaluate(PROMPT, "go", tools=[confirm])
    assert offered(model) == [["look"]]


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ([look], "'look' was added"),
        ([send, send], "'send' was added"),
        ([lambda: None], "is not a tool"),
        ([Tool("final_answer", "Ends it.")], "'final_answer' was added"),
    ],
)
async def test_names_are_checked_against_the_prompts(added: list[Any], words: str):
    with pytest.raises(DefinitionError, match=words):
        await Adapter(ScriptedModel(["done"])).evaluate(PROMPT, "go", tools=added)


async def test_a_resumed_run_is_given_them_again_or_says_which_are_missing(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    model = ScriptedModel([ToolCall("choose"), "done"])
    adapter = Adapter(model, journal=journal, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(PROMPT, "go", run_id="run", tools=[choose])
    journal.questions.answer(answer_to(parked.value.questions[0], {"number": 3}))
    with pytest.raises(RunError, match=r"were not passed: choose\. .*resume\(\.\.\., tools="):
        await adapter.resume("run", PROMPT)
    assert (await journal.runs.get("run")).status == "parked"
    stream = adapter.resume_stream("run", PROMPT, tools=[choose])
    response = await stream.response
    said = [each.message for each in response.session[MessageAdded].all()]
    assert [each.results[0].text for each in said if isinstance(each, ToolMessage)] == ["chose 3"]
    assert offered(model) == [["look", "choose"]] * 2
    assert (await adapter.resume("run", PROMPT)).text == "done", (
        "resuming a finished run needed its added tools"
    )
    assert await replay(journal, "run", PROMPT) is None


async def test_a_workers_run_has_them_too(tmp_path: Path):
    (tmp_path / "helper.md").write_text("---\ndescription: Helps.\npolicies: []\n---\nHelp.\n")
    registry = WorkerRegistry(tmp_path)
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    there, model = LaterEnvironment(), ScriptedModel([ToolCall("choose"), "done"])
    options: Any = {"model": model, "journal": journal, "environment": there, "tools": [choose]}
    with pytest.raises(RunParked) as parked:
        await registry.stream("helper", "go", run_id="run", **options).response
    journal.questions.answer(answer_to(parked.value.questions[0], {"number": 3}))
    assert (await registry.resume("helper", "run", **options)).text == "done"
