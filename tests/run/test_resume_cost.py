"""What it costs to resume a run."""

import asyncio
from typing import Any

from handrail import Adapter, Agent, MemoryJournal, ScriptedModel, ToolCall, tool
from handrail.runs import fork
from support.steps import steps_of


@tool(effect="pure")
async def add(number: int) -> str:
    """Add."""
    return str(number)


def resumed(calls: int) -> int:
    """Return how many functions are called to resume a run after this many calls."""
    journal = MemoryJournal()
    script = [ToolCall("add", {"number": number}) for number in range(calls)]
    agent = Agent(ScriptedModel([*script, "done"]), "Add.", tools=[add])

    async def begin() -> str:
        await agent.run("Go.", run_id="r", journal=journal)
        return (await fork(journal, "r", calls)).record.id

    async def go_on(run_id: str) -> Any:
        return await Adapter(ScriptedModel(["done"])).resume(run_id, agent.prompt, journal=journal)

    run_id = asyncio.run(begin())
    return steps_of(lambda: asyncio.run(go_on(run_id)))


def test_the_cost_of_resuming_a_run_is_proportional_to_its_length():
    """A run that is four times as long takes four times as many steps to resume."""
    resumed(10)  # imports and makes what is made once
    assert resumed(400) < 4.2 * resumed(100)
