"""Compensations and probes have a transaction, events and a record, but no policy, approval, budget or deadline applies to them."""

import asyncio
from typing import Any

import msgspec
import pytest

from handrail import Budget, MemoryJournal, ToolContext, tool
from handrail.concurrency.deadline import Deadline
from handrail.errors import PromptEvaluationError
from handrail.events import ToolInvoked, ToolResumed, ToolRolledBack, ToolStarted
from handrail.journal.records import Entry, RunRecord
from handrail.protocols import PolicyDecision
from handrail.run.place import RUN
from handrail.run.record.format import Begun
from handrail.run.record.log import RunLog
from handrail.testing import VirtualClock
from support.rig import Rig, leave_traces
from support.texts import OUTCOME_UNKNOWN, WAS_DONE

pytestmark = pytest.mark.virtual_time


def tools_of_a_trip(undo: Any) -> list[Any]:
    """Return the tools `book`, `trip` and `note`. `trip` books, waits for the given seconds and fails."""

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


async def test_a_compensation_commits_beside_the_call_that_failed() -> None:
    """A compensation's changes are kept, although its outer call has failed."""
    rig = Rig(tools_of_a_trip(unbook))
    await rig.call("trip", seconds=0)
    assert rig.notes == ["unbooked"]
    assert rig.paths == ["unbooked.txt"]
    assert rig.rolled_back("trip")[0].compensated == ("book",)


async def test_a_compensation_that_fails_is_rolled_back() -> None:
    """If a compensation fails, its files and state are rolled back, and the result says what could not be undone."""

    async def fail(params: Any, value: Any, *, context: ToolContext) -> None:
        leave_traces(context, "unbooked")
        raise OSError("the airline is closed")

    rig = Rig(tools_of_a_trip(fail))
    result = await rig.call("trip", seconds=0)
    assert "book (compensating it failed: OSError: the airline is closed)" in result.message
    rig.assert_untouched()
    assert [event.tool for event in rig.of(ToolRolledBack)] == ["book.undo", "trip"]
    rig.assert_paired()


async def test_a_compensation_has_its_events_inside_the_call_it_undoes() -> None:
    """A compensation's start and end are published before the failed call's end."""
    rig = Rig(tools_of_a_trip(unbook))
    await rig.call("trip", seconds=0)
    assert [event.tool for event in rig.of(ToolStarted)] == ["trip", "book", "book.undo"]
    assert [event.tool for event in rig.of(ToolInvoked)] == ["book", "book.undo", "trip"]
    (undone,) = [event for event in rig.of(ToolInvoked) if event.tool == "book.undo"]
    assert undone.path == ("trip", "book.undo")
    assert undone.status == "ok"
    assert undone.params.what == "seat"
    rig.assert_paired()


async def test_a_compensation_is_recorded() -> None:
    """A compensation is recorded as a call with its own place."""
    journal = MemoryJournal()
    rig = Rig(tools_of_a_trip(unbook), journal=journal)
    await rig.call("trip", seconds=0)
    (unit,) = await journal.calls.load(rig.gate.run.run_context.run_id)
    assert (unit.place, unit.tool, unit.status) == (".1~1.1-", "book.undo", "ok")
    assert unit.arguments == '{"what":"seat"}'
    assert len(unit.events) == 1


async def test_no_policy_and_nobody_is_asked_about_a_compensation() -> None:
    """Neither policies nor people are asked about a compensation, but the calls that it makes are checked as usual."""
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


async def test_a_compensation_costs_nothing_of_the_budget_and_is_not_numbered() -> None:
    """A compensation does not count against the budget, and does not change the next call's id."""
    rig = Rig(tools_of_a_trip(unbook), budget=Budget(tool_calls=2))
    await rig.call("trip", seconds=0)
    assert rig.status("book.undo") == "ok"
    assert rig.gate.run.costs.tracker.spent()["tool_calls"] == 2

    rig = Rig(tools_of_a_trip(unbook))
    run_id = rig.gate.run.run_context.run_id
    await rig.call("trip", seconds=0)
    await rig.call("note", text="next")
    ids = [event.call_id for event in rig.of(ToolStarted)]
    assert ids == [f"{run_id}.1", f"{run_id}.1.1", f"{run_id}.1.1.undo", f"{run_id}.2"]


async def test_a_compensation_runs_after_the_deadline_and_in_a_cancelled_run() -> None:
    """A compensation and the calls that it makes run after the deadline and in a cancelled run."""
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


async def test_a_compensation_is_not_undone_itself() -> None:
    """A compensation and what it settled are not undone if an outer call fails too."""
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


# --- probes --------------------------------------------------------------------------------------

FLIGHT = RUN.child(1)
"""The place of the interrupted call."""


def flying(probe: Any) -> tuple[list[Any], list[str]]:
    """Return the tools `fly`, with this probe, and `note`, and a list of the destinations that `fly` has flown to."""
    flown: list[str] = []

    @tool(effect="irreversible", probe=probe)
    async def fly(to: str) -> str:
        """Fly."""
        flown.append(to)
        return to

    @tool(effect="irreversible")
    async def note(text: str) -> None:
        """Note something."""

    return [fly, note], flown


async def interrupted(tools: list[Any], **options: Any) -> Rig:
    """Return a rig whose run was interrupted in its first call, after the handler had begun."""
    journal = MemoryJournal()
    rig = Rig(tools, journal=journal, **options)
    frame = rig.gate.run
    id = frame.run_context.run_id
    await journal.runs.begin(
        RunRecord(id=id, session_id="session", principal="", prompt="", model="", began_at=0.0)
    )
    begun = Entry("call begun", str(FLIGHT.attempt(1)), 0.0, msgspec.msgpack.encode(Begun("fly")))
    frame.log = RunLog(journal, id, frame.clock, [begun], resumed=True)
    return rig


@pytest.mark.parametrize(
    ("happened", "flights", "said"),
    [
        (True, [], f"fly {WAS_DONE}"),
        (False, ["Rome"], ""),
        (None, [], OUTCOME_UNKNOWN),
    ],
)
async def test_a_probe_has_its_events_inside_the_call_that_it_asks_about(
    happened: bool | None, flights: list[str], said: str
) -> None:
    """A probe decides whether the call reruns. Its start and end are published before the call's end."""
    tools, flown = flying(lambda params, *, context: happened)
    rig = await interrupted(tools)
    result = await rig.call("fly", to="Rome")
    assert said in result.message
    assert flown == flights
    assert [event.tool for event in rig.of(ToolResumed)] == ["fly"]
    assert [event.tool for event in rig.of(ToolStarted)] == ["fly.probe"]
    assert [event.tool for event in rig.of(ToolInvoked)] == ["fly.probe", "fly"]
    asked = rig.of(ToolInvoked)[0]
    assert (asked.path, asked.status, asked.result.value) == (("fly", "fly.probe"), "ok", happened)
    assert asked.params.to == "Rome"
    rig.assert_paired()


async def test_a_probe_that_fails_is_rolled_back() -> None:
    """A probe that fails changes nothing, and its call's outcome is unknown."""

    async def fail(params: Any, *, context: ToolContext) -> bool:
        leave_traces(context, "probed")
        raise OSError("the airline is closed")

    tools, flown = flying(fail)
    rig = await interrupted(tools)
    result = await rig.call("fly", to="Rome")
    assert OUTCOME_UNKNOWN in result.message
    assert flown == []
    rig.assert_untouched()
    assert rig.status("fly.probe") == "error"
    assert [event.tool for event in rig.of(ToolRolledBack)] == ["fly.probe"]
    rig.assert_paired()


async def test_a_probe_is_recorded() -> None:
    """A probe is recorded as a call with its own place and with what it changed."""

    def look(params: Any, *, context: ToolContext) -> bool:
        leave_traces(context, "probed")
        return True

    rig = await interrupted(flying(look)[0])
    await rig.call("fly", to="Rome")
    assert rig.notes == ["probed"]
    log = rig.gate.run.log
    unit = (await log.journal.calls.load(log.run_id))[0]
    assert (unit.place, unit.tool, unit.status) == (str(FLIGHT.probe), "fly.probe", "ok")
    assert unit.arguments == '{"to":"Rome"}'
    assert len(unit.events) == 1


async def test_no_policy_and_nobody_is_asked_about_a_probe() -> None:
    """Neither policies nor people are asked about a probe, but the calls that it makes are checked as usual."""
    checked: list[str] = []
    told: list[str] = []

    class Watches:
        name = "watches"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            checked.append(tool.name)
            return PolicyDecision.ask("why not") if tool.name == "fly.probe" else PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            told.append(tool.name)

    async def look(params: Any, *, context: ToolContext) -> bool:
        await context.call("note", text="looking")
        return False

    tools, flown = flying(look)
    rig = await interrupted(tools, policies=[Watches()], approvals="strict")
    await rig.call("fly", to="Rome")
    assert (checked, told, flown) == (["note", "fly"], ["note", "fly"], ["Rome"])


async def test_a_probe_costs_nothing_of_the_budget_and_is_not_numbered() -> None:
    """A probe does not count against the budget, and does not change the next call's id."""
    tools, flown = flying(lambda params, *, context: False)
    rig = await interrupted(tools, budget=Budget(tool_calls=2))
    await rig.call("fly", to="Rome")
    await rig.call("note", text="next")
    assert flown == ["Rome"]
    assert rig.gate.run.costs.tracker.spent()["tool_calls"] == 2
    run_id = rig.gate.run.run_context.run_id
    ids = [event.call_id for event in rig.events if isinstance(event, ToolStarted | ToolResumed)]
    assert ids == [f"{run_id}.1", f"{run_id}.1.probe", f"{run_id}.2"]


async def test_a_probe_runs_after_the_deadline_and_in_a_cancelled_run() -> None:
    """A probe that has begun finishes after the deadline and in a cancelled run, so the outcome is known."""

    async def look(params: Any, *, context: ToolContext) -> bool:
        await asyncio.sleep(5)
        return True

    clock = VirtualClock()
    rig = await interrupted(flying(look)[0], clock=clock, deadline=Deadline.after(1, clock=clock))
    result = await rig.call("fly", to="Rome")
    assert WAS_DONE in result.message
    assert rig.status("fly.probe") == "ok"

    rig = await interrupted(flying(look)[0])
    call = asyncio.ensure_future(rig.call("fly", to="Rome"))
    await asyncio.sleep(3)
    rig.gate.cancel()
    await asyncio.wait({call})
    assert rig.status("fly.probe") == "ok"
    rig.assert_paired()
