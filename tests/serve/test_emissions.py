"""Tests that a snapshot includes the events that tools emitted: while a run is live, when it is parked, and after a restart."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail import ToolContext, UserContext, tool
from handrail.serve.snapshots import thread_snapshot
from support.served_threads import App, Held, give, over, plan, served, settle


@dataclass(frozen=True)
class Found:
    """An event that a tool emits."""

    pages: int


@tool(effect="read")
async def search(pages: int, context: ToolContext) -> str:
    """Search, and emit an event for each page."""
    for page in range(pages):
        context.emit(Found(page))
    return "searched"


@tool(effect="read")
async def delegate(context: ToolContext) -> str:
    """Let another tool search."""
    context.emit(Found(-1))
    await context.call("search", pages=1)
    return "delegated"


@tool(effect="read")
async def consult(context: UserContext) -> str:
    """Emit, then ask a person."""
    context.emit(Found(7))
    return str(await context.wait_for("which", {}))


def shown(snapshot: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Return the tool of each call that emitted events, with the types and page numbers of those events."""
    return sorted(
        (each[0]["tool"], [(one["type"], one["event"]["pages"]) for one in each])
        for each in snapshot["emitted"].values()
    )


async def snapshot_of(app: App) -> list[tuple[str, list[Any]]]:
    return shown(await thread_snapshot(app.journal, app.thread()))


async def test_the_events_of_calls_and_inner_calls_survive_a_restart(tmp_path: Path) -> None:
    """A thread's snapshot shows the events of each call and inner call separately, even after a restart."""
    expected = [
        ("delegate", [("Found", -1)]),
        ("search", [("Found", 0)]),
        ("search", [("Found", 0), ("Found", 1)]),
    ]
    async with served(tmp_path, tools=[search, delegate]) as app:
        await app.thread().say(plan([["delegate", {}], ["search", {"pages": 2}]], "ok"))
        await over(app.thread())
        assert await snapshot_of(app) == expected
        await app.restart()
        assert await snapshot_of(app) == expected


async def test_only_the_newest_events_of_a_call_are_kept(tmp_path: Path) -> None:
    async with served(tmp_path, tools=[search]) as app:
        await app.thread().say(plan([["search", {"pages": 120}]], "ok"))
        await over(app.thread())
        [(_, kept)] = await snapshot_of(app)
        assert kept == [("Found", page) for page in range(20, 120)]


async def test_a_call_that_has_not_ended_shows_its_events(tmp_path: Path) -> None:
    """A snapshot taken while a call works, waits or is parked includes the events that the run's calls have emitted so far."""
    held = Held()
    async with served(tmp_path, tools=[search, consult, held.tool]) as app:
        run_id = await app.thread().say(
            plan([["search", {"pages": 1}]], [["hold", {}]], [["consult", {}]], "ok")
        )
        await held.has_begun.wait()
        while not any(entry.kind == "emitted" for entry in await app.journal.calls.entries(run_id)):
            await asyncio.sleep(0)  # wait until the events of the ended call are recorded
        assert await snapshot_of(app) == [("search", [("Found", 0)])]
        held.may_end.set()
        await settle(app.thread())
        expected = [("consult", [("Found", 7)]), ("search", [("Found", 0)])]
        assert await snapshot_of(app) == expected
        await app.restart(grace=30)
        assert await snapshot_of(app) == expected
        [question] = await app.thread().questions()
        await give(app.thread(), question, "this one")
        await over(app.thread())
        assert await snapshot_of(app) == expected  # the call was rerun, but its events are not shown twice
