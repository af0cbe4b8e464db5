"""Recorded calls are MCP tasks: clients query, answer and cancel them, and a new process resumes them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import mcp_types as wire
import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    Prompt,
    ScriptedModel,
    ToolContext,
    ToolResult,
    UserContext,
    tool,
)
from handrail.clock import SystemClock
from handrail.errors import QuestionTimedOut
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import ToolServer, tasks
from handrail.mcp.calls import LiveCall
from mcp import Client, MCPError
from support.mcp_tasks import TasksClient, TaskSession

TASK = {"mcp.task"}


class Work:
    """The event that a test's tools wait for, and how often they were entered."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.entered = 0


def prompt_of(work: Work) -> Prompt[Any]:
    @tool(effect="read", capabilities=TASK)
    async def slow(word: str, *, context: ToolContext) -> str:
        """Take long."""
        work.entered += 1
        await context.report_progress("half-way", done=1, total=2)
        await work.go.wait()
        return f"{word} is done"

    @tool(effect="read", capabilities=TASK)
    async def order(*, context: UserContext) -> str:
        """Ask for two things at once."""
        work.entered += 1
        size, colour = await asyncio.gather(
            context.wait_for("size", {}, int), context.wait_for("colour", {}, str)
        )
        return f"{size} {colour}"

    @tool(effect="read", capabilities=TASK)
    async def hurry(*, context: UserContext) -> str:
        """Ask for two things, the first of which has an hour's time."""
        work.entered += 1
        try:
            size = await context.wait_for("size", {}, int, timeout=3600)
        except QuestionTimedOut:
            size = 0
        return f"{size} {await context.wait_for('colour', {}, str)}"

    @tool(capabilities={"mcp.task", "mail"})
    async def send(*, context: ToolContext) -> str:
        """Send something."""
        return "sent"

    @tool(effect="read", capabilities=TASK)
    def fail() -> ToolResult[str]:
        """Fail."""
        return ToolResult.error("It did not work.")

    @tool(effect="read", capabilities={"mcp.task.required"})
    def required() -> str:
        """Return at once, as a task."""
        return "done"

    @tool(effect="read")
    async def wait(*, context: ToolContext) -> str:
        """Wait."""
        await work.go.wait()
        return "waited"

    policies = [CapabilityPolicy({"mail": "ask", "mcp.task": "allow", "mcp.task.required": "allow"})]
    return Prompt("jobs", "Work.", tools=[slow, order, hurry, send, fail, required, wait], policies=policies)


@asynccontextmanager
async def process(work: Work, journal: Any, has_tasks: bool = True, **options: Any) -> AsyncGenerator[Any]:
    """Serve as a new process would, and yield a client's session. Calls in progress are parked when the block ends."""
    server = ToolServer(prompt_of(work), journal=journal, **options)

    async def never(context: Any, params: Any) -> Any:
        raise AssertionError("the client was asked, but the test gives the answers")

    more: Any = {"extensions": [TasksClient()]} if has_tasks else {}
    async with Client(server.server, mode="2026-07-28", elicitation_callback=never, **more) as client:
        yield TaskSession(client.session)
    await server.calls.stop()


async def test_a_call_is_a_task() -> None:
    """A call returns a new task, which reports the call's progress and ends with its result."""
    work = Work()
    async with process(work, MemoryJournal()) as session:
        made = await session.call("slow", word="it")
        assert (made["resultType"], made["status"]) == ("task", "working")
        while (found := await session.send("tasks/get", taskId=made["taskId"])).get("statusMessage") is None:
            await asyncio.sleep(0)
        assert (found["status"], found["statusMessage"]) == ("working", "half-way")
        work.go.set()
        ended = await session.get(made["taskId"], "completed")
    assert ended["result"]["content"][0]["text"] == "it is done"
    assert ended["resultType"] == "complete"


@pytest.mark.parametrize("how", ["result", "task", "failed task", "cancelled task", "error"])
async def test_who_has_the_result_finds_the_call_over(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a client learns that a call has ended, the call has left the server's memory, and counts for no limit."""
    work, ran = Work(), LiveCall._run  # pyright: ignore[reportPrivateUsage]
    work.go.set()

    async def slowly(self: Any, run: Any) -> Any:
        try:
            return await ran(self, run)
        finally:
            for _ in range(20_000):  # the run is recorded, and its task still has something to do
                await asyncio.sleep(0)

    monkeypatch.setattr(LiveCall, "_run", slowly)
    server = ToolServer(prompt_of(work), journal=MemoryJournal())
    more: Any = {"extensions": [TasksClient()]} if "task" in how else {}
    async with Client(server.server, mode="2026-07-28", **more) as client:
        session = TaskSession(client.session)
        if how in ("result", "error"):
            found = await client.call_tool("wait" if how == "result" else "fail", {})
            assert found.is_error is (how == "error")
        else:
            if how == "cancelled task":
                work.go.clear()
            made = await (session.call("fail") if how == "failed task" else session.call("slow", word="it"))
            task = made["taskId"]
            if how == "cancelled task":
                await session.send("tasks/cancel", taskId=task)
            else:
                await session.get(task, "completed")
        assert server.calls.running() == 0


async def test_a_failed_call_is_a_completed_task() -> None:
    """If a tool fails, its task is completed, with an error as its result."""
    async with process(Work(), MemoryJournal()) as session:
        made = await session.call("fail")
        ended = await session.get(made["taskId"], "completed")
    assert ended["result"]["isError"]


async def test_questions_are_answered_one_by_one() -> None:
    """A task has an input request for each open question. The task continues when all of them have been answered."""
    work = Work()
    async with process(work, MemoryJournal()) as session:
        task = (await session.call("order"))["taskId"]
        while len(asked := (await session.get(task, "input_required"))["inputRequests"]) < 2:
            await asyncio.sleep(0)
        size, colour = sorted(asked, key=lambda id: "size" not in asked[id]["params"]["message"])
        given = {size: {"action": "accept", "content": {"value": 4}}}
        acknowledged = await session.send("tasks/update", taskId=task, inputResponses=given)
        assert acknowledged["resultType"] == "complete"
        left = await session.get(task, "input_required")
        assert list(left["inputRequests"]) == [colour]
        given = {colour: {"action": "accept", "content": {"value": "red"}}}
        await session.send("tasks/update", taskId=task, inputResponses=given)
        ended = await session.get(task, "completed")
    assert ended["result"]["content"][0]["text"] == "4 red"
    assert work.entered == 1


class Hands(SystemClock):
    """A clock that a test can set forward."""

    by = timedelta()

    def now(self) -> datetime:
        return super().now() + self.by


async def asks(session: TaskSession, task: str, name: str) -> str:
    """Wait until the task asks nothing but this, and return the key of the question."""
    while True:
        asked = (await session.get(task, "input_required"))["inputRequests"]
        if [name in each["params"]["message"] for each in asked.values()] == [True]:
            return next(iter(asked))
        await asyncio.sleep(0)


@pytest.mark.parametrize("parked", [False, True])
async def test_a_question_of_a_task_expires(parked: bool) -> None:
    """The task goes on, whether its call was in memory or parked, and asks its next question. A late answer changes nothing."""
    work, clock = Work(), Hands()
    journal = MemoryJournal(clock)
    async with process(work, journal) as session:
        task = (await session.call("hurry"))["taskId"]
        size = await asks(session, task, "size")
        if not parked:
            clock.by = timedelta(hours=2)
            given = {size: {"action": "accept", "content": {"value": 4}}}
            await session.send("tasks/update", taskId=task, inputResponses=given)
            await asks(session, task, "colour")
    clock.by = timedelta(hours=2)
    async with process(work, journal) as session:
        if parked:
            given = {size: {"action": "accept", "content": {"value": 4}}}
            await session.send("tasks/update", taskId=task, inputResponses=given)
        colour = await asks(session, task, "colour")
        given = {colour: {"action": "accept", "content": {"value": "red"}}}
        await session.send("tasks/update", taskId=task, inputResponses=given)
        ended = await session.get(task, "completed")
    assert ended["result"]["content"][0]["text"] == "0 red"


async def test_an_approval_of_a_parked_task_expires() -> None:
    """The next request for the task's state resumes it, and its result says that the approval timed out."""
    clock = Hands()
    journal, adapter = MemoryJournal(clock), Adapter(ScriptedModel([]), approval_seconds=3600.0)
    async with process(Work(), journal, adapter=adapter) as session:
        task = (await session.call("send"))["taskId"]
        await session.get(task, "input_required")
    clock.by = timedelta(hours=2)
    async with process(Work(), journal, adapter=adapter) as session:
        ended = await session.get(task, "completed")
    assert ended["result"]["isError"]
    assert "send was not approved (timed out)" in ended["result"]["content"][0]["text"]


async def test_a_task_survives_its_process() -> None:
    """A new process shows the questions of a task, takes their answers, and resumes a task that was running."""
    work, journal = Work(), MemoryJournal()
    async with process(work, journal) as session:
        busy = (await session.call("slow", word="it"))["taskId"]
        task = (await session.call("order"))["taskId"]
        while len((await session.get(task, "input_required"))["inputRequests"]) < 2:
            await asyncio.sleep(0)
    work.go.set()
    async with process(work, journal) as session:
        asked = (await session.get(task, "input_required"))["inputRequests"]
        values = {id: 4 if "size" in each["params"]["message"] else "red" for id, each in asked.items()}
        given = {id: {"action": "accept", "content": {"value": value}} for id, value in values.items()}
        await session.send("tasks/update", taskId=task, inputResponses=given)
        ended = await session.get(task, "completed")
        other = await session.get(busy, "completed")
    assert ended["result"]["content"][0]["text"] == "4 red"
    assert other["result"]["content"][0]["text"] == "it is done"


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_task_is_cancelled(restarts: bool) -> None:
    """A cancelled task stays cancelled, and cancelling it again changes nothing.

    A task that no process executes can be cancelled too.
    """
    work, journal = Work(), MemoryJournal()
    async with process(work, journal) as session:
        task = (await session.call("order"))["taskId"]
        await session.get(task, "input_required")
        if not restarts:
            await session.send("tasks/cancel", taskId=task)
    async with process(work, journal) as session:
        assert (await session.send("tasks/cancel", taskId=task))["resultType"] == "complete"
        assert (await session.send("tasks/get", taskId=task))["status"] == "cancelled"


async def test_clients_without_tasks() -> None:
    """A client that does not support tasks gets its calls' results. It can't query tasks or call a tool that requires them.

    For a client that supports tasks, querying an unknown task gives a different error.
    """
    journal = MemoryJournal()
    async with process(Work(), journal, has_tasks=False) as session:
        found = await session.call("fail")
        assert found["isError"]
        for refused in (session.call("required"), session.send("tasks/get", taskId="x")):
            with pytest.raises(MCPError) as raised:
                await refused
            assert raised.value.error.code == wire.MISSING_REQUIRED_CLIENT_CAPABILITY
    async with process(Work(), journal) as session:
        with pytest.raises(MCPError, match="no such task"):
            await session.send("tasks/get", taskId="x")


async def test_a_call_that_takes_long_becomes_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of any tool becomes a task if it has not ended after `TASK_AFTER` seconds."""
    work = Work()
    async with process(work, MemoryJournal()) as session:
        monkeypatch.setattr(tasks, "TASK_AFTER", 0.0)
        made = await session.call("wait")
        work.go.set()
        ended = await session.get(made["taskId"], "completed")
        monkeypatch.setattr(tasks, "TASK_AFTER", 60.0)
        at_once = await session.call("wait")
    assert ended["result"]["content"] == at_once["content"]
