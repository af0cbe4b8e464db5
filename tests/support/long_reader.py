"""An app whose conversation outgrows its window, before and after it waits for an approval.

python long_reader.py FOLDER begin       runs until it waits, in a process of its own
python long_reader.py FOLDER resume      answers, resumes the run, and prints its usage as JSON

Each request is noted in the file that `READER_LOG` names.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from handrail import (
    Adapter,
    CapabilityPolicy,
    Compact,
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
from handrail.messages import ModelRequest, ToolMessage, Usage, UserMessage
from handrail.models.scripted import Reply
from handrail.tools import ToolResult
from support.parked_runs import answer_to

PAGES, ASKS_AFTER = 14, 7
COMPACT = Compact(by="summary", tokens=2_000)


def text_of(page: int) -> str:
    return f"page {page} " + "all alike " * 200


@tool(effect="pure")
async def read(page: int) -> str:
    """Read a page."""
    return text_of(page)


@tool(effect="pure", capabilities=["book"])
async def book(after: int) -> str:
    """Book a seat."""
    return f"booked after {after}"


TOOLS = '''
from handrail import tool
from support.long_reader import text_of


@tool(effect="pure")
async def read(page: int) -> str:
    """Read a page."""
    return text_of(page)


@tool(effect="pure", capabilities=["book"])
async def book(after: int) -> str:
    """Book a seat."""
    return f"booked after {after}"
'''
"""The tools of the worker, which must be in a file of its own."""


def answer(request: ModelRequest) -> Reply:
    """Answer as a model that reads one page after the other and books in the middle. It keeps no state."""
    last, text = request.messages[-1], "\0".join(each.text for each in request.messages)
    text = re.sub(r"call-[\w-]+", "a call", text)  # ids differ between sessions
    with open(os.environ["READER_LOG"], "a", encoding="utf-8") as log:
        shown = "compacted" if "left out" in text else "whole"
        log.write(f"{shown} {hashlib.sha256(text.encode()).hexdigest()}\n")
    usage = Usage(len(text) // 4, 10, requests=1)
    if isinstance(last, UserMessage) and last.by_run:
        return Reply("The pages are all alike.", usage=usage)
    if "You delegate." in request.system:
        calls = [] if isinstance(last, ToolMessage) else [ToolCall("pick_card", {})]
        return Reply("" if calls else last.text, calls=calls, usage=usage)
    said = re.match(r"(page|booked after) (\d+)", last.text)
    number = int(said[2]) if said else 0
    if said and said[1] == "page" and number == ASKS_AFTER:
        return Reply(calls=[ToolCall("book", {"after": number})], usage=usage)
    if number == PAGES:
        return Reply("All is read.", usage=usage)
    return Reply(calls=[ToolCall("read", {"page": number + 1})], usage=usage)


@dataclass
class Nothing:
    pass


@dataclass
class Offer:
    text: str


def card_trick() -> Handoff[Any, Any]:
    """Return a handoff that lets a worker read everything before it hands over, and again after that."""
    trick = Handoff("pick_card", "Let the other side pick a card.", params=Nothing, effect="idempotent")

    @trick.before
    async def deal(params: Nothing, *, context: ToolContext) -> Parked[Offer, Offer]:
        said = await context.call_worker("reader", "Read it.")
        return Parked(Offer(str(said)), Offer("a card"))

    @trick.after
    async def settle(kept: Offer, pick: Offer, *, context: ToolContext) -> ToolResult[str]:
        again = await context.call_worker("reader", "Read it again.")
        return ToolResult.ok(f"{kept.text} {again} {pick.text}")

    return trick


POLICIES = [CapabilityPolicy({"book": "ask"})]
prompt = Prompt("reader", "You read.", tools=[read, book], policies=POLICIES, compact=COMPACT)
adapter = Adapter(ScriptedModel(answer))


def delegating(folder: Path) -> tuple[Prompt[Any], Adapter]:
    """Return a prompt with a handoff whose halves call a worker, and an adapter that has this worker."""
    folder.mkdir(exist_ok=True)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "reader.md").write_text(
        "---\ndescription: Reads.\ntools: [read, book]\ncompact: {by: summary, tokens: 2000}\n"
        "policies: [capability: {ask: [book]}]\n---\nYou read."
    )
    workers = WorkerRegistry(folder)
    return Prompt("host", "You delegate.", tools=[card_trick()], policies=POLICIES), Adapter(
        ScriptedModel(answer), workers=workers
    )


async def main(folder: Path, mode: str) -> None:
    journal = SqliteJournal(folder / "runs.db")
    options: dict[str, Any] = {"journal": journal, "environment": LaterEnvironment()}
    if mode == "begin":
        try:
            await adapter.evaluate(prompt, "Read it.", run_id="r", **options)
        except RunParked:
            print("parked")
        os._exit(0)
    [question] = await journal.questions.open("r")
    journal.questions.answer(answer_to(question, {"approved": True}))
    response = await Adapter(ScriptedModel(answer), **options).resume("r", prompt)
    print(json.dumps([response.text, msgspec.to_builtins(response.usage)]))
    journal.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
