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

import msgspec
import pytest

from handrail import (
    Adapter,
    Agent,
    BackgroundTools,
    Budget,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    WorkerRegistry,
    Workspace,
    tool,
)
from handrail.errors import RunUnknown
from handrail.events import BackgroundEnded, BackgroundStarted
from handrail.fleet import FleetApp, Runner
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, CommitUnit, Parent, RunRecord, RunRow, SpawnedRun
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.messages import BackgroundEnd, ModelRequest, ToolMessage, UserMessage
from handrail.run.limits import BudgetTracker
from handrail.run.record.begin import decode_outcome
from handrail.run.record.lineage import retold
from handrail.runs import children, messages, send, undo
from handrail.testing import Person
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


async def test_an_end_and_a_persons_words_are_told_as_two_messages():
    """The words come first, as the person's; the end is the run's own message, and the record tells the same."""
    journal, model = MemoryJournal(), Waiting(asked())
    async with working(journal, HELPER):
        running = asyncio.ensure_future(hosted(model).run("go", journal=journal, run_id="r", app=HOST))
        child = await ended(journal, "r")
        await send(journal, "r", "hurry")
        model.go.set()
        response = await running
    told = [each for each in response.messages if isinstance(each, UserMessage)][1:]
    [words, end] = told
    assert (words.text, words.by_run, words.midway, words.ends) == ("hurry", False, True, ())
    assert (end.text, end.by_run) == (model.told[0], True)
    assert end.ends == (BackgroundEnd(child.record.id, "helper", "done", "hello"),)
    record = await journal.runs.get("r")
    assert [each for each in await retold(journal, record) if isinstance(each, UserMessage)][1:] == told


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


async def test_the_share_of_a_call_that_fails_is_not_charged():
    tracker = BudgetTracker(Budget(tool_calls=5))
    message = asked(outcome="fail", tool_calls=3)
    await host.run(message, journal=MemoryJournal(), run_id="r", budget=tracker, app=HOST)
    assert tracker.left() == {"tool_calls": 4}


@pytest.mark.parametrize("applied", [True, False])
async def test_a_call_that_changes_files_begins_a_run_once_they_are_in_place(applied: bool):
    """If its files can't be changed after all, the call counts as never committed, and so it begins nothing."""
    journal = MemoryJournal()
    record = RunRecord(id="r", session_id="s", principal="p", prompt="host", model="m", began_at=1.0)
    parent = Parent(run_id="r", call_id="c")
    child = msgspec.structs.replace(record, id="child", app=HELPER, request=b"?", parent=parent)
    await journal.runs.begin(record)
    unit = CommitUnit(run_id="r", call_id="c", files=[{"root": "/"}], spawned=(SpawnedRun(child),))
    await journal.calls.commit(unit)
    assert await children(journal, "r") == ()
    await (journal.calls.applied(unit) if applied else journal.calls.void(unit))
    assert [each.record.id for each in await children(journal, "r")] == (["child"] if applied else [])
    await journal.calls.applied(unit)


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
        ({"agent": "nobody"}, "neither a worker of this run nor named as an agent"),
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


async def test_undoing_the_call_cancels_what_it_has_begun_and_says_what_that_had_done():
    journal = MemoryJournal()
    await host.run(asked(), journal=journal, run_id="r", session="s", app=HOST)
    [child] = await children(journal, "r")
    [unit] = await journal.calls.load("r")
    done = await undo(journal, "r", unit.call_id)
    assert (await journal.runs.get(child.record.id)).status == "cancelled"
    assert not any(child.record.id in each for each in done.stands)


async def test_undoing_the_call_names_what_the_background_run_has_changed(tmp_path: Path):
    journal = MemoryJournal()
    await host.run(
        asked(message="keep this", files=str(tmp_path)), journal=journal, run_id="r", session="s", app=HOST
    )
    async with working(journal, HELPER):
        child = await ended(journal, "r")
    assert (tmp_path / "kept").read_text() == "this"
    [unit] = await journal.calls.load("r")
    done = await undo(journal, "r", unit.call_id)
    assert f"file kept (by the background run {child.record.id})" in done.stands
    response = await host.run("thanks", journal=journal, run_id="r2", session="s", app=HOST)
    assert any(f"by the background run {child.record.id}" in each for each in said(response))


WORKERS = {
    "host.md": """---
description: Hosts.
tools: [begin_one]
workers: [helper]
commit: each
policies: []
---
You begin one.""",
    "helper.md": """---
description: Helps.
model: scripted_helper:model
policies: []
---
You help.""",
    "scripted_helper.py": """
from handrail import ScriptedModel
from support.background_app import help

model = ScriptedModel(help)
""",
    "tools.py": '''
from handrail import ToolContext, tool


@tool(effect="idempotent")
async def begin_one(context: ToolContext) -> str:
    """Begin one."""
    return context.spawn("helper", "hello").id
''',
}


@pytest.mark.parametrize("commit", ["each", "whole"])
async def test_a_worker_begins_another_by_name_and_under_commit_each_with_the_call_itself(
    commit: str, tmp_path: Path
):
    """With `commit: each` the background run has begun although the worker fails later; otherwise it has not."""
    for name, text in WORKERS.items():
        (tmp_path / name).write_text(text if commit == "each" else text.replace("commit: each\n", ""))

    def answer(request: ModelRequest) -> ToolCall | str:
        if "You begin one." in request.system:
            if len(request.messages) > 1:
                raise ValueError("the model fails")
            return ToolCall("begin_one")
        return "done" if len(request.messages) > 1 else ToolCall("host", {"input": "go"})

    journal = MemoryJournal()
    workers = WorkerRegistry(tmp_path)
    adapter = Adapter(ScriptedModel(answer), journal=journal, workers=workers)
    await adapter.evaluate(Prompt("root", "You delegate.", tools=[workers.tool("host")]), "go", run_id="r")
    begun = await children(journal, "r")
    assert [each.record.app for each in begun] == ([str(tmp_path / "helper.md")] if commit == "each" else [])
    if begun:
        async with working(journal, str(tmp_path / "helper.md")):
            assert decode_outcome(await ended(journal, "r")).text == "hello"


def local(*arguments: str, message: str = "") -> tuple[Waiting, Any]:
    model = Waiting(*arguments)
    return model, hosted(model)


async def test_without_a_journal_a_task_of_this_process_carries_it_out_and_its_end_is_told():
    model, agent = local(asked())
    session, events = Session(), list[Any]()
    session.dispatcher.subscribe(BackgroundEnded, events.append)
    session.dispatcher.subscribe(BackgroundStarted, lambda _: model.go.set())
    response = await agent.run("go", session=session)
    async with asyncio.timeout(PATIENCE):
        while not any("is done: hello" in each for each in said(response)):
            await asyncio.sleep(0)
            response = await agent.run("again", session=session)
    assert sum("is done: hello" in each for each in said(response)) == 1


async def test_without_a_journal_a_call_that_fails_begins_nothing():
    model, agent = local(asked(outcome="fail"))
    model.go.set()
    session, events = Session(), list[Any]()
    session.dispatcher.subscribe(BackgroundStarted, events.append)
    await agent.run("go", session=session)
    assert events == []


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_model_begins_lists_waits_for_and_cancels_background_runs(recorded: bool):
    """The tools of `BackgroundTools` work with and without a journal, in the runs of one session."""
    journal = MemoryJournal() if recorded else None
    results: list[str] = []

    def answer(request: ModelRequest) -> ToolCall | str:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            results.append(last.text)
            return "done"
        asked = [each.text for each in request.messages if each.text.startswith("background_")]
        name, _, arguments = asked[-1].partition(" ")
        return ToolCall(name, arguments)

    section = BackgroundTools({"helper": HELPER})
    agent = Agent(ScriptedModel(answer), [section])
    session = Session(id="s")

    async def call(name: str, **arguments: Any) -> str:
        await agent.run(f"{name} {json.dumps(arguments)}", session=session, journal=journal)
        return results[-1]

    async with working(journal, HELPER) if journal else contextlib.nullcontext():
        id = (await call("background_start", agent="helper", message="hello")).split()[3]
        assert await call("background_wait", id=id) == "hello"
        assert json.loads(await call("background_list")) == {id: "helper done"}
        assert "over" in await call("background_say", id=id, text="more")
        assert "It is cancelled" in await call("background_cancel", id=id)
        assert f"These were begun: {id}" in await call("background_wait", id="other")
        assert "refused" in await call("background_start", agent=HELPER, message="hello")


@pytest.mark.parametrize("effect", ["pure", "read", "staged"])
async def test_a_call_that_can_be_rolled_back_as_a_whole_begins_none(effect: Any):
    @tool(effect=effect)
    async def begin_one(context: ToolContext) -> str:
        """Begin one."""
        return context.spawn(HELPER, "hello").id

    model = ScriptedModel([ToolCall("begin_one"), "done"])
    response = await Agent(model, "Go.", tools=[begin_one]).run("go", journal=MemoryJournal(), run_id="r")
    assert "it may not begin a background run" in model.requests[-1].messages[-1].text
    assert response.text == "done"


async def test_a_policy_between_the_run_and_the_call_is_looked_for_too():
    """A run nested in a call has a policy, and its prompt has no reference by which a worker could find it."""
    inner = Prompt("inner", "Begin.", tools=host.prompt.tools, policies=host.prompt.policies)

    @tool(effect="idempotent")
    async def nest(context: ToolContext) -> str:
        """Let a nested run begin one."""
        return (await context.adapter.evaluate(inner, "go")).text

    def answer(request: ModelRequest) -> ToolCall | str:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return last.text
        return ToolCall("start", {"message": "hello"}) if "Begin." in request.system else ToolCall("nest")

    journal = MemoryJournal()
    agent = Agent(ScriptedModel(answer), "Go.", tools=[nest])
    response = await agent.run("go", journal=journal, run_id="r", app=HOST)
    assert "the policy 'capability' decides about it" in response.text
    assert await children(journal, "r") == ()


async def test_a_handle_says_that_its_run_begins_with_the_commit():
    @tool(effect="idempotent")
    async def wait_at_once(context: ToolContext) -> str:
        """Wait for one that has not begun."""
        return await context.spawn(HELPER, "hello").wait()

    model = ScriptedModel([ToolCall("wait_at_once"), "done"])
    await Agent(model, "Go.", tools=[wait_at_once]).run("go", journal=MemoryJournal(), run_id="r")
    assert "Use `wait` in a later call" in model.requests[-1].messages[-1].text
    agent = Agent(ScriptedModel([ToolCall("wait_at_once"), "done"]), "Go.", tools=[wait_at_once])
    assert "Use `wait` in a later call" in str((await agent.run("go")).messages)


async def test_the_workspace_of_the_run_is_refused(tmp_path: Path):
    journal = SqliteJournal(tmp_path / "runs.db")
    options: Any = {"journal": journal, "filesystem": Workspace("desk"), "app": HOST}
    response = await host.run(asked(files="workspace:desk"), run_id="r", **options)
    assert "one run at a time has a workspace" in response.text
    response = await host.run(asked(files="workspace:other"), run_id="r2", **options)
    assert [each.record.id for each in await children(journal, "r2")] == [response.text]
    journal.close()


async def test_its_questions_are_asked_where_those_of_the_run_are(tmp_path: Path):
    """The helper, on a worker, needs an approval, and the person of the run that has begun it gives it."""
    journal, elsewhere = SqliteJournal(tmp_path / "runs.db"), SqliteJournal(tmp_path / "runs.db")
    model, person = Waiting(asked(message="book 1a")), Person(approve=True)
    async with working(elsewhere, HELPER):
        running = asyncio.ensure_future(
            hosted(model).run("go", journal=journal, run_id="r", app=HOST, environment=person)
        )
        child = await ended(journal, "r")
        model.go.set()
        await running
    assert decode_outcome(child).text == "booked 1a"
    journal.close()
    elsewhere.close()
