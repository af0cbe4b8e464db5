"""Background runs: begun by a call's commit and by nothing else; each end is told once, and budgets stay exact."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Agent, Budget, Prompt, ScriptedModel, Session, ToolCall, ToolContext, tool
from handrail.errors import RunUnknown
from handrail.events import BackgroundEnded, BackgroundStarted
from handrail.fleet import FleetApp, Runner
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, RunRow
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.messages import ModelRequest, UserMessage
from handrail.run.limits import BudgetTracker
from handrail.run.record.begin import decode_outcome
from handrail.runs import children, messages, send
from support import PATIENCE
from support.background_app import HELPER, HOST, host


@asynccontextmanager
async def working(journal: Journal, *apps: str) -> AsyncGenerator[None]:
    """Run a worker until the block ends."""
    runner = Runner(journal, [FleetApp.load(app) for app in apps or (HELPER, HOST)])
    stop = asyncio.Event()
    task = asyncio.ensure_future(runner.run(stop, grace=PATIENCE))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE)


async def until(journal: Journal, run_id: str, statuses: Any = OVER) -> RunRow:
    async with asyncio.timeout(PATIENCE):
        while (row := await journal.runs.get(run_id)).status not in statuses:
            await asyncio.sleep(0.005)
    return row


def asked(**arguments: Any) -> str:
    return json.dumps({"message": "hello", **arguments})


def said(response: Any) -> list[str]:
    return [each.text for each in response.messages if isinstance(each, UserMessage)]


async def test_a_run_begins_with_the_commit_of_the_call_and_has_a_session_of_its_own():
    journal = MemoryJournal()
    events: list[Any] = []
    session = Session(id="s")
    session.dispatcher.subscribe(BackgroundStarted, events.append)
    response = await host.run(asked(), journal=journal, run_id="r", session=session, app=HOST)
    [child] = await children(journal, "r")
    assert (child.record.id, child.status, child.record.prompt) == (response.text, "queued", "helper")
    assert child.record.session_id == child.record.id
    assert child.record.parent is not None
    assert (child.record.parent.run_id, child.record.principal) == ("r", session.principal)
    assert [(each.background_id, each.message) for each in events] == [(response.text, "hello")]
    async with working(journal):
        row = await until(journal, child.record.id)
    assert decode_outcome(row).text == "hello"


async def test_a_call_that_is_rolled_back_begins_nothing():
    journal = MemoryJournal()
    response = await host.run(asked(outcome="fail"), journal=journal, run_id="r", app=HOST)
    assert "it fails after it has begun one" in response.text
    assert await children(journal, "r") == ()
    assert [each.record.id for each in await journal.runs.list()] == ["r"]


async def test_a_crash_before_the_commit_begins_nothing_and_the_resumed_run_begins_it_once(tmp_path: Path):
    path = tmp_path / "runs.db"
    program = f"""
from handrail import SqliteJournal
from support.background_app import HOST, host
host.run({asked(outcome="die")!r}, journal=SqliteJournal({str(path)!r}), run_id="r", app=HOST).wait()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "BACKGROUND_DIES": "1"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=environment)
    assert await process.wait() == 9
    journal = SqliteJournal(path)
    assert [each.record.id for each in await journal.runs.list()] == ["r"]
    response = await host.resume("r", journal=journal)
    assert [each.record.id for each in await children(journal, "r")] == [response.text]
    journal.close()


def outer(**inner: Any) -> tuple[Any, Any]:
    """Return a tool that calls `start` inside its own call, and fails if told so."""

    @tool(effect="idempotent")
    async def around(fails: bool, context: ToolContext) -> str:
        """Begin one in an inner call."""
        result = await context.call("start", message="hello", **inner)
        if fails:
            raise ValueError("it fails afterwards")
        return result.message or str(result.value)

    return around, host.prompt.tools[0]


@pytest.mark.parametrize("fails", [False, True])
async def test_what_an_inner_call_begins_begins_with_the_outermost_commit(fails: bool):
    journal = MemoryJournal()
    prompt = Prompt("outer", "You host.", tools=outer())
    model = ScriptedModel([ToolCall("around", {"fails": fails}), "done"])
    await Adapter(model, journal=journal).evaluate(prompt, "go", run_id="r")
    assert len(await children(journal, "r")) == (0 if fails else 1)


class Waiting:
    """A model that begins a background run, waits until it is let go, calls `look`, and ends."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = list(arguments)
        self.go = asyncio.Event()
        self.requests: list[ModelRequest] = []

    async def answer(self, request: ModelRequest) -> ToolCall | str:
        self.requests.append(request)
        if self.arguments:
            return ToolCall("start", self.arguments.pop(0))
        await self.go.wait()
        return "done"

    @property
    def told(self) -> list[str]:
        return [
            each.text
            for each in self.requests[-1].messages
            if isinstance(each, UserMessage) and "background run" in each.text
        ]


def hosted(model: Waiting, **options: Any) -> Any:
    return Agent(ScriptedModel(model.answer), host.prompt, **options)


async def ended(journal: Journal, run_id: str) -> RunRow:
    """Wait until the first child of a run has ended, and return its row."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(RunUnknown):
                found = await children(journal, run_id)
                if found and found[0].status in OVER:
                    return found[0]
            await asyncio.sleep(0.005)


async def test_the_end_is_told_once_before_the_next_step_and_the_run_does_not_end_before():
    journal, model = MemoryJournal(), Waiting(asked())
    events: list[Any] = []
    session = Session(id="s")
    session.dispatcher.subscribe(BackgroundEnded, events.append)
    async with working(journal, HELPER):
        running = asyncio.ensure_future(
            hosted(model).run("go", journal=journal, run_id="r", session=session, app=HOST)
        )
        child = await ended(journal, "r")
        model.go.set()
        await running
    assert len(model.told) == 1
    assert model.told[0].endswith("(helper) is done: hello")
    [message] = await messages(journal, "r")
    assert (message.child, message.end, message.state) == (child.record.id, "done", "told")
    assert [each.end.child for each in events] == [child.record.id]


async def test_an_end_after_the_parents_opens_the_next_run_of_the_session():
    journal = MemoryJournal()
    await host.run(asked(), journal=journal, run_id="r", session="s", app=HOST)
    async with working(journal, HELPER):
        await ended(journal, "r")
    response = await host.run("thanks", journal=journal, run_id="r2", session="s", app=HOST)
    assert sum("is done: hello" in each for each in said(response)) == 1
    again = await host.run("thanks again", journal=journal, run_id="r3", session="s", app=HOST)
    assert sum("is done: hello" in each for each in said(again)) == 1
    assert [each.state for each in await messages(journal, "r2")] == ["told"]
    assert (await journal.runs.verify()).altered == []


async def test_wake_submits_the_next_run_if_the_parent_is_over():
    journal = MemoryJournal()
    await host.run(asked(wake=True), journal=journal, run_id="r", session="s", app=HOST)
    async with working(journal):
        await ended(journal, "r")
        async with asyncio.timeout(PATIENCE):
            while len(rows := await journal.runs.list(session_id="s")) < 2:
                await asyncio.sleep(0.005)
        row = await until(journal, rows[1].record.id)
    assert row.record.app == HOST
    assert "is done: hello" in decode_outcome(row).text


async def test_wake_submits_nothing_while_the_parent_works():
    journal, model = MemoryJournal(), Waiting(asked(wake=True))
    async with working(journal, HELPER):
        running = asyncio.ensure_future(
            hosted(model).run("go", journal=journal, run_id="r", session="s", app=HOST)
        )
        await ended(journal, "r")
        model.go.set()
        await running
    assert len(await journal.runs.list(session_id="s")) == 1
    assert len(model.told) == 1


@pytest.mark.parametrize(("message", "calls"), [("hello", 0), ("add 1", 1)])
async def test_the_share_is_charged_and_what_is_left_comes_back(message: str, calls: int):
    """In the end the parent has spent its own call and those of the background run."""
    journal, tracker = MemoryJournal(), BudgetTracker(Budget(tool_calls=5))
    model = Waiting(asked(message=message, tool_calls=3))
    async with working(journal, HELPER):
        running = asyncio.ensure_future(
            hosted(model).run("go", journal=journal, run_id="r", budget=tracker, app=HOST)
        )
        await ended(journal, "r")
        assert tracker.left() == {"tool_calls": 1}
        model.go.set()
        await running
    assert len(model.told) == 1
    assert tracker.left() == {"tool_calls": 4 - calls}


async def test_a_share_that_is_not_left_is_refused_and_nothing_is_lost():
    journal = MemoryJournal()
    response = await host.run(
        asked(tool_calls=9), journal=journal, run_id="r", budget=Budget(tool_calls=5), app=HOST
    )
    assert "its share is not left" in response.text
    response = await host.run(asked(), journal=journal, run_id="r2", budget=Budget(tool_calls=5), app=HOST)
    assert "Pass budget=Budget(tool_calls=...)" in response.text
    assert [*await children(journal, "r"), *await children(journal, "r2")] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"agent": "nobody"}, "neither a worker of this run nor an agent in a module"),
        ({"agent": "no_such_module:agent"}, "there is no module 'no_such_module'"),
        ({"agent": "support.background_app:nothing"}, "has no Agent or Prompt called 'nothing'"),
        ({"files": "/no/such/folder"}, "there is no folder '/no/such/folder'"),
        ({"message": " "}, "it is asked nothing"),
    ],
)
async def test_what_cant_be_begun_is_refused_by_name(arguments: Any, problem: str):
    journal = MemoryJournal()
    response = await host.run(asked(**arguments), journal=journal, run_id="r", app=HOST)
    assert problem in response.text
    assert await children(journal, "r") == ()


async def test_the_policies_of_the_parent_decide_too():
    journal = MemoryJournal()
    await host.run(asked(message="pay rent"), journal=journal, run_id="r", app=HOST)
    async with working(journal, HELPER):
        child = await ended(journal, "r")
    [unit] = await journal.calls.load(child.record.id)
    assert unit.status == "denied"


async def test_policies_that_a_worker_cant_find_again_are_named():
    response = await host.run(asked(), journal=MemoryJournal(), run_id="r")
    assert "the policy 'capability' decides about it" in response.text
    assert "app='module:name'" in response.text


async def test_a_message_to_a_background_run_is_told_to_it():
    journal = MemoryJournal()
    response = await host.run(asked(), journal=journal, run_id="r", app=HOST)
    await send(journal, response.text, "goodbye")
    async with working(journal, HELPER):
        child = await ended(journal, "r")
    assert decode_outcome(child).text == "goodbye"
