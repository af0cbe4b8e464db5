"""Compensations and probes have the gate's transaction, events and record, but are exempt from its other steps."""

import asyncio
from typing import Any

import pytest

from handrail import Budget, MemoryJournal, ToolContext, tool
from handrail.deadline import Deadline
from handrail.errors import PromptEvaluationError
from handrail.events import ToolInvoked, ToolRolledBack, ToolStarted
from handrail.protocols import PolicyDecision
from handrail.testing import VirtualClock, run_virtual
from support.rig import Rig, leave_traces


def tools_of_a_trip(undo: Any) -> list[Any]:
    """Make `trip`, which books, waits for the given seconds and fails, and the tools that it uses."""

    @tool(effect="compensable", compensate=undo)
    async def book(what: str) -> str:
        """Book."""
        return what

    @tool(effect="irreversible")
    async def trip(seconds: float, context: ToolContext) -> None:
        """Book, then fail."""
        await context.call("book", what="seat")
        await asyncio.sleep(seconds)
        raise ValueError("there is no hotel")

    @tool(effect="irreversible")
    async def note(text: str) -> None:
        """Note something."""

    return [book, trip, note]


async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
    leave_traces(context, "unbooked")


def test_a_compensation_commits_beside_the_call_that_failed() -> None:
    """A compensation's changes are kept although those of the failed call are rolled back."""

    async def main() -> None:
        rig = Rig(tools_of_a_trip(unbook))
        await rig.call("trip", seconds=0)
        assert rig.notes == ["unbooked"]
        assert rig.paths == ["unbooked.txt"]
        assert rig.rolled_back("trip")[0].compensated == ("book",)

    run_virtual(main)


def test_a_compensation_that_fails_is_rolled_back() -> None:
    """If a compensation fails, its files and state are rolled back, and the result says what could not be undone."""

    async def main() -> None:
        async def fail(params: Any, value: Any, *, context: ToolContext) -> None:
            leave_traces(context, "unbooked")
            raise OSError("the airline is closed")

        rig = Rig(tools_of_a_trip(fail))
        result = await rig.call("trip", seconds=0)
        assert "book (compensating it failed: OSError: the airline is closed)" in result.message
        rig.assert_untouched()
        assert [event.tool for event in rig.of(ToolRolledBack)] == ["book.undo", "trip"]
        rig.assert_paired()

    run_virtual(main)


def test_a_compensation_has_its_events_inside_the_call_it_undoes() -> None:
    """A compensation's start and end are published before the end of the failed call."""

    async def main() -> None:
        rig = Rig(tools_of_a_trip(unbook))
        await rig.call("trip", seconds=0)
        assert [event.tool for event in rig.of(ToolStarted)] == ["trip", "book", "book.undo"]
        assert [event.tool for event in rig.of(ToolInvoked)] == ["book", "book.undo", "trip"]
        (undone,) = [event for event in rig.of(ToolInvoked) if event.tool == "book.undo"]
        assert undone.path == ("trip", "book.undo")
        assert undone.status == "ok"
        assert undone.params.what == "seat"
        rig.assert_paired()

    run_virtual(main)


def test_a_compensation_is_recorded() -> None:
    """A compensation is recorded as a call at its own place, before the call that failed."""

    async def main() -> None:
        journal = MemoryJournal()
        rig = Rig(tools_of_a_trip(unbook), journal=journal)
        await rig.call("trip", seconds=0)
        (unit,) = await journal.calls.load(rig.gate.frame.run_context.run_id)
        assert (unit.place, unit.tool, unit.status) == (".1~1.1-", "book.undo", "ok")
        assert unit.arguments == '{"what":"seat"}'
        assert len(unit.events) == 1

    run_virtual(main)


def test_no_policy_and_nobody_is_asked_about_a_compensation() -> None:
    """Neither policies nor people are asked about a compensation, but calls that it makes are checked as usual."""

    async def main() -> None:
        checked: list[str] = []
        told: list[str] = []

        class Watches:
            name = "watches"

            def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
                checked.append(tool.name)
                return PolicyDecision.allow()

            def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
                told.append(tool.name)

        async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
            await context.call("note", text="unbooked")

        rig = Rig(tools_of_a_trip(undo), policies=[Watches()], approvals="strict")
        await rig.call("trip", seconds=0)
        assert rig.status("book.undo") == "ok"
        assert checked == ["trip", "book", "note"]
        assert told == ["book", "note"]

    run_virtual(main)


def test_a_compensation_costs_nothing_of_the_budget_and_is_not_numbered() -> None:
    """A compensation does not count against the budget, and does not change the id of the next call."""

    async def main() -> None:
        rig = Rig(tools_of_a_trip(unbook), budget=Budget(tool_calls=2))
        await rig.call("trip", seconds=0)
        assert rig.status("book.undo") == "ok"
        assert rig.gate.frame.costs.tracker.spent()["tool_calls"] == 2

        rig = Rig(tools_of_a_trip(unbook))
        run_id = rig.gate.frame.run_context.run_id
        await rig.call("trip", seconds=0)
        await rig.call("note", text="next")
        ids = [event.call_id for event in rig.of(ToolStarted)]
        assert ids == [f"{run_id}.1", f"{run_id}.1.1", f"{run_id}.1.1.undo", f"{run_id}.2"]

    run_virtual(main)


def test_a_compensation_runs_after_the_deadline_and_in_a_cancelled_run() -> None:
    """A compensation and the calls it makes run after the deadline and in a cancelled run."""

    async def main() -> None:
        undone: list[str] = []

        async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
            await context.call("wait")
            undone.append(value)

        @tool(effect="irreversible")
        async def wait() -> None:
            """Take a while."""
            await asyncio.sleep(5)

        clock = VirtualClock()
        rig = Rig([*tools_of_a_trip(undo), wait], clock=clock, deadline=Deadline.after(1, clock=clock))
        with pytest.raises(PromptEvaluationError, match="deadline"):
            await rig.call("trip", seconds=60)
        assert undone == ["seat"]
        assert rig.status("book.undo") == "ok"
        rig.assert_paired()

        rig = Rig([*tools_of_a_trip(undo), wait])
        call = asyncio.ensure_future(rig.call("trip", seconds=1))
        await asyncio.sleep(3)  # the trip has failed and is being compensated
        rig.gate.cancel()
        await asyncio.wait({call})
        assert undone == ["seat", "seat"]
        assert rig.status("wait") == "ok"
        rig.assert_paired()

    run_virtual(main)


def test_a_compensation_is_not_undone_itself() -> None:
    """A compensation and what it settled are not undone when an outer call fails too."""

    async def main() -> None:
        undone: list[str] = []

        async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
            await context.once("refund", lambda: undone.append(value))

        @tool(effect="irreversible")
        async def plan(context: ToolContext) -> None:
            """Plan a trip that fails, and fail."""
            await context.call("trip", seconds=0)
            raise ValueError("no plan")

        rig = Rig([*tools_of_a_trip(undo), plan])
        result = await rig.call("plan")
        assert undone == ["seat"]
        assert "no plan" in result.message
        assert "Could not be undone" not in result.message
        rig.assert_paired()

    run_virtual(main)
