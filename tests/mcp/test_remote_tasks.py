"""Tests for calls through `McpTools` that a server answers with a task. The task is polled, answered, cancelled and resumed."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    UserContext,
    tool,
)
from handrail.errors import RunParked
from handrail.events import Progress
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import McpTools, ToolServer, remote_tasks, tasks
from handrail.messages import ToolMessage
from handrail.session import Session
from handrail.testing import Person
from support import PATIENCE, importing_support
from support.mcp_served import jobs, serving
from support.parked_runs import answer_to

RUN = "run"

TASK = {"mcp.task"}


@dataclass
class Work:
    """The state of a test's server: its events, its journal, and how often `slow` was entered."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    entered: int = 0
    journal: MemoryJournal = field(default_factory=MemoryJournal)

    async def status(self) -> str:
        """Return the status of the server's only task."""
        [row] = await self.journal.runs.list()
        return row.status


@asynccontextmanager
async def server(work: Work, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[str]:
    """Serve tools whose calls are tasks. Yields the address."""

    @tool(effect="read", capabilities=TASK)
    async def slow(word: str, *, context: ToolContext) -> str:
        """Take long."""
        work.entered += 1
        await context.report_progress("half-way")
        await work.go.wait()
        return f"{word} is done"

    @tool(effect="read", capabilities=TASK)
    async def order(*, context: UserContext) -> str:
        """Ask for a size."""
        return f"size {await context.wait_for('size', {}, int)}"

    @tool(effect="read", capabilities=TASK)
    def fail() -> str:
        """Fail."""
        raise ValueError("no luck")

    get = tasks.Tasks._state  # pyright: ignore[reportPrivateUsage]

    async def polled(self: Any, *given: Any) -> Any:
        work.polled.set()
        return await get(self, *given)

    monkeypatch.setattr(tasks.Tasks, "_state", polled)
    monkeypatch.setattr(tasks, "_POLL_MS", 10)
    served = ToolServer(Prompt("jobs", "Work.", tools=[slow, order, fail]), journal=work.journal)
    async with serving(served) as url:
        yield url
    work.go.set()
    await served.calls.stop()


async def run(section: McpTools, *calls: ToolCall, **options: Any) -> list[str]:
    """Make the calls in one run, and return the results that the model received."""
    model = ScriptedModel([*calls, "Done."])
    await Adapter(model).evaluate(Prompt("guide", ["Go.", section]), "hi", **options)
    return told_to(model)


def told_to(model: ScriptedModel) -> list[str]:
    messages = model.requests[-1].messages
    return [one.text for each in messages if isinstance(each, ToolMessage) for one in each.results]


def on_progress(take: Callable[[Progress], None]) -> Session:
    session = Session()
    session.dispatcher.subscribe(Progress, take)
    return session


async def test_a_task_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's status messages become its call's progress, and the task's result becomes the call's result."""
    work = Work()
    messages: list[str] = []

    def take(progress: Progress) -> None:
        messages.append(progress.message)
        work.go.set()

    async with server(work, monkeypatch) as url, jobs(url) as section:
        calls = [ToolCall("slow", {"word": "it"}), ToolCall("fail", {})]
        told = await run(section, *calls, session=on_progress(take))
    assert told[0] == "it is done"
    assert "no luck" in told[1]
    assert messages == ["half-way"]


async def test_a_task_may_take_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout of a call does not apply while its task is working."""
    work = Work()
    loop = asyncio.get_running_loop()
    clock = loop.time

    def set_forward(progress: Progress) -> None:
        monkeypatch.setattr(loop, "time", lambda: clock() + 1000)
        loop.call_soon(loop.call_soon, work.go.set)

    async with server(work, monkeypatch) as url, jobs(url, timeout=500) as section:
        told = await run(section, ToolCall("slow", {"word": "it"}), session=on_progress(set_forward))
    assert told == ["it is done"]


async def test_a_task_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's question is asked in the call's environment, and the server is told if the person declines."""
    work = Work()
    async with server(work, monkeypatch) as url, jobs(url) as section:
        person = Person(answers={"mcp.form": {"value": 4}})
        told = await run(section, ToolCall("order", {}), environment=person)
        declined = await run(section, ToolCall("order", {}), environment=Person())
    assert told == ["size 4"]
    assert [question.payload["server"] for question in person.questions] == ["jobs"]
    assert "declined" in declined[0]


async def test_a_cancelled_call_cancels_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a call is cancelled, the server is told to cancel the task."""
    work = Work()
    async with server(work, monkeypatch) as url, jobs(url) as section:
        running = asyncio.ensure_future(run(section, ToolCall("slow", {"word": "it"})))
        await asyncio.wait_for(work.polled.wait(), PATIENCE)
        running.cancel()
        await asyncio.wait([running])
        assert await work.status() == "cancelled"


async def test_a_parked_run_leaves_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a run is parked because of a task's question, the task is not cancelled. The resumed run gives it the answer."""
    work = Work()
    async with server(work, monkeypatch) as url, jobs(url) as section:
        prompt = Prompt("guide", ["Go.", section])
        model = ScriptedModel([ToolCall("order", {}), "Done."])
        adapter = Adapter(model, journal=SqliteJournal(tmp_path / "runs.db"))
        with pytest.raises(RunParked) as parked:
            await adapter.evaluate(prompt, "hi", run_id=RUN, environment=LaterEnvironment())
        assert await work.status() == "running"
        journal = adapter.options.journal
        assert journal is not None
        journal.questions.answer(answer_to(parked.value.questions[0], {"value": 4}))
        await adapter.resume(RUN, prompt, environment=LaterEnvironment())
        assert await work.status() == "done"
    assert told_to(model) == ["size 4"]


async def test_a_task_that_requires_what_nobody_can_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that asks too often fails its call, and is cancelled."""
    monkeypatch.setattr(remote_tasks, "MAX_ASKED", 0)
    work = Work()
    async with server(work, monkeypatch) as url, jobs(url) as section:
        told = await run(section, ToolCall("order", {}), environment=Person())
        assert await work.status() == "cancelled"
    assert "it asked more than 0 times" in told[0]


async def test_a_resumed_run_continues_with_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `kill -9`, the resumed run waits for the task that the call started. The call is not made again."""
    work = Work()
    path = tmp_path / "runs.db"
    async with server(work, monkeypatch) as url:
        words = [str(Path(__file__).with_name("task_client.py")), url, str(path)]
        program = await asyncio.create_subprocess_exec(sys.executable, *words, env=importing_support())
        await asyncio.wait_for(work.polled.wait(), PATIENCE)
        program.send_signal(signal.SIGKILL)
        await program.wait()
        work.go.set()
        model = ScriptedModel(["Done."])
        async with jobs(url) as section:
            prompt = Prompt("guide", ["Go.", section])
            response = await Adapter(model).resume(RUN, prompt, journal=SqliteJournal(path))
    assert response.text == "Done."
    assert told_to(model) == ["it is done"]
    assert work.entered == 1
