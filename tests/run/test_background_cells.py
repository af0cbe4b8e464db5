"""Background runs together with what else may happen to a run: it waits, continues in another process or on a worker, or is nested.

In each case the end is told once, and the budget is what it would be if nothing had happened in between.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Budget,
    Handoff,
    LaterEnvironment,
    Parked,
    PostgresJournal,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    WorkerRegistry,
)
from handrail.errors import RunParked
from handrail.fleet import FleetApp, Runner, Submission, submit
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, RunRow
from handrail.messages import ModelRequest, ToolMessage, UserMessage
from handrail.run.record.begin import decode_outcome
from handrail.runs import children
from support import PATIENCE, postgres
from support.background_app import HELPER, TRAVELLER, traveller
from support.parked_runs import answer_to

TEXT = "5 calls left, told 1"
"""The answer of the traveller, who may make nine calls: three of its own, and one of the background run are made."""


async def work_until(journal: Journal, run_id: str, statuses: Any, *apps: str) -> RunRow:
    """Run a worker until a run has one of these statuses. Returns its row."""
    stop = asyncio.Event()
    working = asyncio.ensure_future(Runner(journal, [FleetApp.load(app) for app in apps]).run(stop))
    async with asyncio.timeout(PATIENCE):
        while (row := await journal.runs.get(run_id)).status not in statuses:
            await asyncio.sleep(0.005)
    stop.set()
    await asyncio.wait_for(working, PATIENCE)
    return row


async def answer_all(journal: Journal, run_id: str) -> None:
    [question] = await journal.questions.open(run_id)
    value: Any = {"text": "the ace"} if question.kind == "handoff" else {"approved": True}
    journal.questions.answer(answer_to(question, value))


async def test_it_ends_while_the_run_that_began_it_waits_for_an_approval(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "runs.db")
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    with pytest.raises(RunParked):
        await traveller.run("go", run_id="r", app=TRAVELLER, budget=Budget(tool_calls=9), **options)
    [child] = await children(journal, "r")
    await work_until(journal, child.record.id, OVER, HELPER)
    await answer_all(journal, "r")
    assert (await traveller.resume("r", **options)).text == TEXT
    journal.close()


async def test_it_waits_for_an_approval_itself(tmp_path: Path):
    """The policy of the helper asks about `book`, and the question waits in the journal for the principal of both runs."""
    journal = SqliteJournal(tmp_path / "runs.db")
    app = FleetApp.load("support.background_app:host")
    parent = (await submit(journal, app, '{"message": "book 1a"}')).record
    await work_until(journal, parent.id, OVER, "support.background_app:host")
    [child] = await children(journal, parent.id)
    await work_until(journal, child.record.id, ["parked"], HELPER)
    [question] = await journal.questions.open(principal=parent.principal)
    assert question.run_id == child.record.id
    await answer_all(journal, child.record.id)
    row = await work_until(journal, child.record.id, OVER, HELPER)
    assert decode_outcome(row).text == "booked 1a"
    journal.close()


PROGRAM = """
import sys
from handrail import Budget, LaterEnvironment, SqliteJournal
from handrail.errors import RunParked
from support.background_app import TRAVELLER, traveller
options = {"journal": SqliteJournal(sys.argv[1]), "environment": LaterEnvironment()}
if sys.argv[2] == "begin":
    try:
        traveller.run("go", run_id="r", app=TRAVELLER, budget=Budget(tool_calls=9), **options).wait()
    except RunParked:
        print("parked")
else:
    print(traveller.resume("r", **options).wait().text)
"""


async def test_it_is_resumed_in_another_process(tmp_path: Path):
    """One process begins the run, another one executes the background run, and a third one resumes the run."""
    path = tmp_path / "runs.db"

    async def process(mode: str) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = (sys.executable, "-c", PROGRAM, str(path), mode)
        pipe = asyncio.subprocess.PIPE
        begun = await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe)
        said, _ = await begun.communicate()
        return said.decode()

    assert await process("begin") == "parked\n"
    journal = SqliteJournal(path)
    [child] = await children(journal, "r")
    await work_until(journal, child.record.id, OVER, HELPER)
    await answer_all(journal, "r")
    journal.close()
    assert await process("resume") == f"{TEXT}\n"


async def test_workers_with_postgresql_execute_both(tmp_path: Path):
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(postgres.KEY)
    journal = PostgresJournal(postgres.new_url(), key_file=key)
    asked = Submission("go", budget=Budget(tool_calls=9))
    run_id = (await submit(journal, FleetApp.load(TRAVELLER), asked)).record.id
    await work_until(journal, run_id, ["parked"], TRAVELLER)
    [child] = await children(journal, run_id)
    await work_until(journal, child.record.id, OVER, HELPER)
    await answer_all(journal, run_id)
    row = await work_until(journal, run_id, OVER, TRAVELLER)
    assert decode_outcome(row).text == TEXT
    assert (await journal.runs.verify()).altered == []
    journal.close()


@dataclass
class Nothing:
    pass


@dataclass
class Offer:
    text: str


TOOLS = '''
from handrail import Budget, ToolContext, tool
from support.background_app import HELPER


@tool(effect="idempotent")
async def begin_one(context: ToolContext) -> str:
    """Begin one."""
    return context.spawn(HELPER, "add 1", budget=Budget(tool_calls=3)).id
'''


def delegating(folder: Path) -> tuple[Prompt[Any], Adapter]:
    """Return a prompt with a handoff that calls a worker, which begins a background run, and its adapter, as in a new process."""
    folder.mkdir(exist_ok=True)
    (folder / "tools.py").write_text(TOOLS)
    front = "---\ndescription: Begins one.\ntools: [begin_one]\npolicies: []\n---\nYou begin one."
    (folder / "beginner.md").write_text(front)
    trick = Handoff("pick_card", "Let the other side pick a card.", params=Nothing, effect="idempotent")

    @trick.before
    async def deal(params: Nothing, *, context: ToolContext) -> Parked[Offer, Offer]:
        said = await context.call_worker("beginner", "Begin one.")
        return Parked(Offer(str(said)), Offer("a card"))

    @trick.after
    async def settle(kept: Offer, pick: Offer, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(kept.text)

    def answer(request: ModelRequest) -> ToolCall | str:
        last = request.messages[-1]
        if "You begin one." in request.system and not isinstance(last, ToolMessage):
            return ToolCall("begin_one")
        if isinstance(last, ToolMessage) or "begin" not in last.text:
            return last.text
        return ToolCall("pick_card", {})

    adapter = Adapter(ScriptedModel(answer), workers=WorkerRegistry(folder))
    return Prompt("host", "You delegate.", tools=[trick]), adapter


async def test_it_is_begun_in_a_worker_inside_a_handoff(tmp_path: Path):
    """It begins when the whole handoff has committed, after the other side has answered, and once."""
    journal = SqliteJournal(tmp_path / "runs.db")
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    prompt, adapter = delegating(tmp_path / "workers")
    limits = Budget(tool_calls=9)
    with pytest.raises(RunParked):
        await adapter.evaluate(prompt, "begin", run_id="r", session="s", budget=limits, **options)
    assert await children(journal, "r") == ()
    await answer_all(journal, "r")
    prompt, adapter = delegating(tmp_path / "workers")
    response = await adapter.resume("r", prompt, **options)
    [child] = await children(journal, "r")
    assert child.record.id in response.text
    row = await work_until(journal, child.record.id, OVER, HELPER)
    assert decode_outcome(row).text == "2"
    again = await adapter.evaluate(prompt, "go on", run_id="r2", session="s", **options)
    told = [each.text for each in again.messages if isinstance(each, UserMessage)]
    assert sum("(helper) is done: 2" in each for each in told) == 1
    journal.close()
