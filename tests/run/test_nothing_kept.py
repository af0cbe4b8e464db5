"""Calls that are over leave nothing in memory except their facts in the session's log."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from handrail import ToolContext, tool
from handrail.journal.local import LocalQuestions
from handrail.question import Question
from handrail.run import open_gate
from handrail.run.gate import Gate
from run.kept_objects import Ending, endings, left_to_the_collector, measure
from support import PATIENCE
from support.parked_runs import answer_to

COUNT = 10_000 if os.environ.get("HANDRAIL_DEEP") else 25


@pytest.mark.parametrize("ending", endings(), ids=lambda ending: ending.name)
def test_calls_leave_only_their_facts(ending: Ending) -> None:
    """After many calls with the same ending, only Handrail's facts remain, and the 100 kB documents are freed."""
    kept = asyncio.run(measure(ending, COUNT))
    # From Python 3.13 on, asyncio keeps the newest cancellation that a task group caught, with its frames.
    newest = 1 if sys.version_info >= (3, 13) and ending.name == "failed in a group" else 0
    assert all(count <= newest for count in kept.objects.values()), kept.objects
    assert kept.kept_bytes < COUNT * 10_000
    assert all(count <= newest for count in kept.after_session.values()), kept.after_session
    assert kept.after_session_bytes < 100_000 + COUNT * 100 + newest * 500_000


@pytest.mark.parametrize("ending", endings(), ids=lambda ending: ending.name)
def test_calls_are_freed_at_once(ending: Ending) -> None:
    """A call that is over is in no reference cycle, however it ended, so it is freed without the garbage collector."""
    assert not asyncio.run(left_to_the_collector(ending, 5))


def test_a_cancelled_operation_is_freed_at_once() -> None:
    """An operation that a handler started in a task, and cancelled, is in no reference cycle."""

    async def starts(context: ToolContext) -> str:
        task = asyncio.ensure_future(context.signal.wait())
        await asyncio.sleep(0)
        task.cancel()
        return ""

    async def invoke(gate: Gate) -> None:
        await gate.invoke("work", {})
        await asyncio.sleep(0)

    work = tool(name="work", description="Work.", effect="staged")(starts)
    ending = Ending("an operation was cancelled", "ok", work, invoke)
    assert not asyncio.run(left_to_the_collector(ending, 5))


async def test_steps_of_calls_that_are_over_are_forgotten() -> None:
    """Without a journal, a value that `once` has settled is kept until its outermost call ends, and no longer."""
    done: list[str] = []

    @tool(effect="irreversible")
    async def pay(name: str, context: ToolContext) -> int:
        """Pay once, although `once` is called several times with the same key."""
        for _ in range(2):
            await context.once("pay", lambda: done.append(name))
        if name == "slow":
            await go.wait()
            await context.once("pay", lambda: done.append(name))
        return steps_in(context)

    @tool(effect="irreversible")
    async def outer(name: str, context: ToolContext) -> int:
        """Pay in an inner call."""
        await context.once("first", lambda: done.append(name))
        return (await context.call("pay", name=name)).unwrap()

    go = asyncio.Event()
    gate = open_gate([pay, outer])
    slow = asyncio.ensure_future(asyncio.wait_for(gate.invoke("pay", {"name": "slow"}), PATIENCE))
    while not done:
        await asyncio.sleep(0)
    for number in range(20):
        assert (await gate.invoke("pay", {"name": str(number)})).value == 2  # its own and the slow call's
        assert (await gate.invoke("outer", {"name": str(number)})).value == 3
    go.set()
    assert (await slow).value == 1
    assert sorted(done) == sorted(["slow", *[str(n) for n in range(20)] * 3])


def steps_in(context: ToolContext) -> int:
    """Return how many steps the run of this call keeps."""
    source: Any = context
    return len(source._source.run.world.steps._steps)


def numbered(number: int) -> Question:
    return Question(
        id=f"q{number}",
        kind="input",
        name="pick",
        message="Which?",
        payload={},
        schema={"type": "integer"},
        digest=f"digest of {number}",
        principal="ada",
        asked_by=("tool",),
        call_id="call",
        run_id="run",
        asked_at=datetime(2026, 1, 1, tzinfo=UTC),
        expires_at=None,
    )


async def test_questions_that_are_over_are_forgotten() -> None:
    """Without a journal, the last hundred finished questions and every open one are kept."""
    desk = LocalQuestions()
    first = asyncio.ensure_future(desk.ask(numbered(0)))
    await asyncio.sleep(0)
    for number in range(1, 251):
        asking = asyncio.ensure_future(desk.ask(numbered(number)))
        await asyncio.sleep(0)
        answer = answer_to(numbered(number), 1)
        desk.answer(answer)
        assert (await asking).value == 1
        desk.answer(answer)  # repeating it is harmless
    assert [each.id for each in await desk.open()] == ["q0"]
    assert len(await desk.history("run")) == 101
    desk.answer(answer_to(numbered(0), 1))
    assert (await first).value == 1
