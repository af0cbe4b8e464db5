"""An app whose model has things looked up in the background, and waits at the gate `wait` until it is told the answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from handrail import Adapter, Agent, Prompt, ScriptedModel, SqliteJournal, ToolCall, ToolContext, tool
from handrail.fleet import FleetApp, Runner
from handrail.journal.records import OVER
from handrail.messages import ModelRequest
from handrail.serve.sources import PromptSource
from support import PATIENCE
from support.served import PlayedModel, said, wait_at

RESEARCHER = "support.researched_app:researcher"
TIMETABLE = """Five trains run to the sea on weekdays:

| from | at | change |
| --- | --- | --- |
| Central | 6:12, 8:12 | none |
| Central | 10:40 | in **Oldham** |
| West | 12:05, 15:05 | none |

The 10:40 does not run on Mondays, and a seat has to be booked for the 15:05."""


def know(request: ModelRequest) -> str:
    question = request.messages[-1].text
    if "boats" in question:
        raise RuntimeError("the timetable of the boats is not online")
    return TIMETABLE if "trains" in question else "It rains on Friday only."


researcher: Agent[Any] = Agent(ScriptedModel(know), "Look things up.", name="researcher")


@tool(effect="idempotent")
async def look_up(question: str, context: ToolContext) -> str:
    """Look something up in the background."""
    context.spawn(RESEARCHER, question)
    return "It is being looked up."


def questions(*asked: str) -> list[ToolCall]:
    return [ToolCall("look_up", {"question": each}) for each in asked]


PLAYS = {
    "Take me to the sea.": [
        said(
            "I have three things looked up.",
            *questions("Which trains run?", "Will it rain?", "And the boats?"),
        ),
        said("Meanwhile I pack.", ToolCall("wait_at", {"gate": "wait"})),
        *[said("Take the 8:12 on Thursday.")] * 3,  # the ends may be told one by one
    ],
}


def source() -> PromptSource:
    prompt: Prompt[Any] = Prompt("host", "Plan a journey.", tools=[look_up, wait_at])
    return PromptSource(prompt, Adapter(PlayedModel(PLAYS)))


def research(folder: Path) -> None:
    """Execute the background runs in the journal of a folder, until all have ended."""
    asyncio.run(_research(folder))


async def _research(folder: Path) -> None:
    journal = SqliteJournal(folder / "runs.db")
    stop = asyncio.Event()
    task = asyncio.ensure_future(Runner(journal, [FleetApp.load(RESEARCHER)]).run(stop, grace=PATIENCE))
    async with asyncio.timeout(PATIENCE):
        while any(row.record.parent and row.status not in OVER for row in await journal.runs.list()):
            await asyncio.sleep(0.005)
    stop.set()
    await task
    journal.close()
