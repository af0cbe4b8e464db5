"""An app that listens: its model calls a tool that needs an approval, and then says what it was told.

python steered.py FOLDER begin       runs until it waits, in a process of its own
python steered.py FOLDER resume      resumes the run, and prints its text and why it stopped, as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    CapabilityPolicy,
    Handoff,
    LaterEnvironment,
    Parked,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    WorkerRegistry,
    tool,
)
from handrail.errors import RunParked
from handrail.messages import Message, ModelRequest, ToolMessage, UserMessage
from handrail.models.scripted import Reply
from handrail.tools import ToolResult

BOOK = '''
from handrail import tool


@tool(effect="pure", capabilities=["book"])
async def book() -> str:
    """Book a seat."""
    return "booked"
'''
POLICIES = [CapabilityPolicy({"book": "ask"})]


@tool(effect="pure", capabilities=["book"])
async def book() -> str:
    """Book a seat."""
    return "booked"


def told(messages: Iterable[Message]) -> list[str]:
    """Return what was said during the run, in the order in which the model was told it."""
    return [each.text for each in messages if isinstance(each, UserMessage) and each.midway]


def answer(request: ModelRequest) -> Reply:
    """Answer as a model that books first, and then says what it was told. It keeps no state."""
    if not any(isinstance(each, ToolMessage) for each in request.messages):
        return Reply(calls=[ToolCall("pick_card" if "You delegate" in request.system else "book", {})])
    return Reply(" / ".join(told(request.messages)) or "Nothing was said.")


@dataclass
class Nothing:
    pass


@dataclass
class Card:
    text: str


def delegating(folder: Path) -> tuple[Prompt[Any], Adapter]:
    """Return a prompt with a handoff whose first half calls a worker, and an adapter that has this worker."""
    trick = Handoff("pick_card", "Let the other side pick a card.", params=Nothing, effect="idempotent")

    @trick.before
    async def deal(params: Nothing, *, context: ToolContext) -> Parked[Card, Card]:
        said = await context.call_worker("booker", "Book it.")
        return Parked(Card(str(said)), Card("a card"))

    @trick.after
    async def settle(kept: Card, pick: Card, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(f"{kept.text} {pick.text}")

    folder.mkdir(exist_ok=True)
    (folder / "tools.py").write_text(BOOK)
    (folder / "booker.md").write_text(
        "---\ndescription: Books.\ntools: [book]\npolicies: [capability: {ask: [book]}]\n---\nYou book."
    )
    adapter = Adapter(ScriptedModel(answer), workers=WorkerRegistry(folder))
    return Prompt("host", "You delegate.", tools=[trick], policies=POLICIES), adapter


prompt = Prompt("listener", "You listen.", tools=[book], policies=POLICIES)
adapter = Adapter(ScriptedModel(answer))


async def main(folder: Path, mode: str) -> None:
    journal = SqliteJournal(folder / "runs.db")
    options: dict[str, Any] = {"journal": journal, "environment": LaterEnvironment()}
    try:
        if mode == "begin":
            response = await adapter.evaluate(prompt, "Begin.", run_id="r", **options)
        else:
            response = await adapter.resume("r", prompt, **options)
    except RunParked as parked:
        print(json.dumps([each.kind for each in parked.questions]), flush=True)
        os._exit(0)  # as if the process had died
    print(json.dumps([response.text, response.stop_reason]))
    journal.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
