"""The effect table: one test per cell for concurrency, retries and composition.

Policies are tested in test_policies.py, previews in test_preview.py, and crashes in test_crash_recovery.py.
"""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest

from handrail import Deadline, ToolContext, ToolResult, TransientError, tool
from handrail.events import ToolInvoked, ToolStarted
from handrail.protocols import PolicyDecision
from handrail.run.call import ToolCall, run_turn
from handrail.testing import VirtualClock
from handrail.tools import EFFECTS, Effect
from support.rig import Note, Rig, leave_traces, nothing, staged

pytestmark = pytest.mark.virtual_time

EFFECT_NAMES: tuple[Effect, ...] = get_args(Effect)
RETRIED = {
    "pure": True,
    "read": True,
    "staged": True,
    "idempotent": True,
    "compensable": False,
    "irreversible": False,
}
SERIALISABLE = {"pure", "read", "staged"}


async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
    """Do nothing, as the compensation of tools that require one."""


def options_for(effect: Effect) -> dict[str, Any]:
    return {"effect": effect, "compensate": undo} if effect == "compensable" else {"effect": effect}


@pytest.mark.parametrize("effect", EFFECT_NAMES)
async def test_beside_others(effect: Effect) -> None:
    """Two calls with the same effect run concurrently in one turn."""
    meeting = asyncio.Barrier(2)

    @tool(**options_for(effect))
    async def meet() -> None:
        """Wait for the other call."""
        async with asyncio.timeout(5):
            await meeting.wait()

    rig = Rig([meet])
    turn = await run_turn(rig.gate, [ToolCall("meet"), ToolCall("meet")])
    assert [result.success for result in turn.results] == [True, True]


@pytest.mark.parametrize("effect", EFFECT_NAMES)
@pytest.mark.parametrize("fails", [1, 2, 3])
async def test_retried_on_a_transient_failure(effect: Effect, fails: int) -> None:
    """A call is retried at most twice, only if its effect allows it, from a clean state and with the same key."""
    attempts: list[tuple[int, str, str]] = []

    @tool(**options_for(effect))
    async def flaky(context: ToolContext) -> int:
        """Fail a few times."""
        invocation = context.invocation
        attempts.append((invocation.attempt, invocation.idempotency_key, context.call_id))
        if EFFECTS[effect].writes:
            leave_traces(context, "a")
        if len(attempts) <= fails:
            raise TransientError("busy", retry_after=30)
        return invocation.attempt

    rig = Rig([flaky])
    began = asyncio.get_running_loop().time()
    result = await rig.call("flaky")
    tries = min(fails, 2) + 1 if RETRIED[effect] else 1
    assert len(attempts) == tries
    assert [number for number, _, _ in attempts] == list(range(1, tries + 1))
    assert len({(key, call_id) for _, key, call_id in attempts}) == 1
    assert asyncio.get_running_loop().time() - began == 30 * (tries - 1)
    assert result.success == (tries == fails + 1)
    if result.success and EFFECTS[effect].writes:
        assert rig.notes == ["a"]
    else:
        rig.assert_untouched()
    assert len(rig.of(ToolStarted)) == len(rig.of(ToolInvoked)) == 1
    assert rig.of(ToolInvoked)[0].attempts == tries


async def test_nothing_but_a_transient_error_is_retried() -> None:
    """An error that is not transient is not retried."""
    count = 0

    async def fails(text: str, context: ToolContext) -> None:
        nonlocal count
        count += 1
        raise ConnectionError("reset")

    rig = Rig([staged(fails)])
    await rig.call("work", text="a")
    assert count == 1


async def test_no_retry_past_the_deadline() -> None:
    """A transient error is final if the wait before the retry would pass the deadline."""

    async def busy(text: str, context: ToolContext) -> None:
        raise TransientError("busy", retry_after=60)

    clock = Rig([]).gate.run.clock
    rig = Rig([staged(busy)], deadline=Deadline.after(30, clock=clock))
    began = asyncio.get_running_loop().time()
    result = await rig.call("work", text="a")
    assert "busy" in result.message
    assert asyncio.get_running_loop().time() == began


@pytest.mark.parametrize("inner", EFFECT_NAMES)
@pytest.mark.parametrize("outer", EFFECT_NAMES)
async def test_effects_compose(outer: Effect, inner: Effect) -> None:
    """A pure, read or staged call may not call a tool with a stronger effect, and the error names that tool."""
    ran: list[str] = []

    @tool(name="inner", **options_for(inner))
    async def inner_tool() -> None:
        """Record that the call was made."""
        ran.append("inner")

    @tool(name="outer", **options_for(outer))
    async def outer_tool(context: ToolContext) -> str:
        """Call the other tool."""
        return (await context.call("inner")).message

    rig = Rig([inner_tool, outer_tool])
    result = await rig.call("outer")
    allowed = outer not in SERIALISABLE or EFFECTS[inner].strength <= EFFECTS[outer].strength
    assert ran == (["inner"] if allowed else [])
    if not allowed:
        assert "outer may not call inner" in result.value
        assert repr(inner) in result.value
        assert rig.status("inner") == "denied"
    rig.assert_paired()


@pytest.mark.parametrize("effect", EFFECT_NAMES)
async def test_stale_read(effect: Effect) -> None:
    """If something that a call read has changed, a `pure`, `read` or `staged` call reruns.

    Any other call commits and reports a stale read.
    """
    runs: list[tuple[list[str], str]] = []

    @tool(**options_for(effect))
    async def look(context: ToolContext) -> str:
        """Read, and let somebody else write."""
        notes = [note.text for note in context.session[Note].all()]
        text = context.filesystem.read("a.txt")
        runs.append((notes, text))
        if len(runs) == 1:
            await rig.call("other", text="new")
        if EFFECTS[effect].writes:
            context.session.dispatch(Note(f"saw {text}"))
        return text

    @tool(effect="staged")
    async def other(text: str, context: ToolContext) -> None:
        """Change what the other call has read."""
        context.session.dispatch(Note(text))
        context.filesystem.write("a.txt", text)

    rig = Rig([look, other])
    rig.files.write("a.txt", "old")
    result = await rig.call("look")
    assert result.success
    (ended,) = [event for event in rig.of(ToolInvoked) if event.tool == "look"]
    if effect in SERIALISABLE:
        assert runs == [([], "old"), (["new"], "new")]
        assert result.value == "new"
        assert ended.stale == ()
        assert rig.notes == (["new", "saw new"] if EFFECTS[effect].writes else ["new"])
    else:
        assert runs == [([], "old")]
        assert result.value == "old"
        assert sorted(ended.stale) == ["Note", "a.txt"]
        assert rig.notes == ["new", "saw old"]
    rig.assert_paired()


async def test_a_call_that_conflicts_with_itself_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose handler makes other calls change what it has read ends in a conflict at last, and the model is told what changed."""
    monkeypatch.setattr("handrail.run.commit._CONFLICTS", 3)

    runs = 0

    @tool(effect="staged")
    async def look(context: ToolContext) -> None:
        """Read what always changes."""
        nonlocal runs
        runs += 1
        context.session[Note].all()
        context.filesystem.write("mine.txt", "x")
        await rig.call("work", text=f"{runs}")

    checks: list[str] = []

    class Counts:
        name = "counts"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            checks.append(tool.name)
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            return None

    rig = Rig([look, staged(nothing)], policies=[Counts()])
    result = await rig.call("look")
    assert runs == 3
    assert checks.count("look") == 3  # policies check each rerun too
    assert rig.status("look") == "conflict"
    assert "Note" in result.message
    assert rig.notes == ["1", "2", "3"]
    assert rig.paths == ["1.txt", "2.txt", "3.txt"]
    rig.assert_paired()


async def test_compensable_inner_calls_are_compensated_in_reverse_order() -> None:
    """When an outer call fails, its compensable inner calls are compensated in reverse order, at any depth.

    Calls that can't be compensated, or whose compensation fails, are listed for the model.
    """
    undone: list[tuple[str, int]] = []

    async def cancel_booking(params: Any, value: int, *, context: ToolContext) -> None:
        if params.what == "broken":
            raise RuntimeError("the airline is closed")
        undone.append((params.what, value))
        context.session.dispatch(Note(f"cancelled {params.what}"))

    @tool(effect="compensable", compensate=cancel_booking)
    async def book(what: str) -> int:
        """Book something."""
        return len(what)

    @tool(effect="irreversible")
    async def mail(to: str) -> None:
        """Send a mail."""

    @tool(effect="irreversible")
    async def trip(fail: bool, context: ToolContext) -> str:
        """Book a trip."""
        leave_traces(context, "trip")
        for what in ("flight", "broken", "hotel"):
            await context.call("book", what=what)
        await context.call("mail", to="me")
        if fail:
            raise RuntimeError("no car")
        return "booked"

    @tool(effect="irreversible")
    async def plan(context: ToolContext) -> ToolResult[Any]:
        """Plan the trip, and fail after it succeeded."""
        await context.call("trip", fail=False)
        return ToolResult.error("changed my mind")

    rig = Rig([book, mail, trip, plan])
    result = await rig.call("trip", fail=True)
    assert undone == [("hotel", 5), ("flight", 6)]
    assert "no car" in result.message
    assert "Could not be undone: mail" in result.message
    assert "broken" not in rig.notes
    assert "the airline is closed" in result.message
    assert rig.notes == ["cancelled hotel", "cancelled flight"]
    assert rig.paths == []
    (rolled_back,) = rig.rolled_back("trip")
    assert rolled_back.compensated == ("book", "book")

    undone.clear()
    planned = await rig.call("plan")
    assert undone == [("hotel", 5), ("flight", 6)]
    assert "changed my mind" in planned.message
    assert "trip" in planned.message
    rig.assert_paired()


async def test_a_compensable_call_whose_commit_fails_is_compensated_itself() -> None:
    """A compensable call is compensated if a policy's `on_result` raises, because its handler has already run."""
    undone: list[str] = []

    async def unbook(params: Any, value: str, *, context: ToolContext) -> None:
        undone.append(value)

    @tool(effect="compensable", compensate=unbook)
    async def book() -> str:
        """Book."""
        return "seat 3"

    class Refuses:
        name = "refuses"

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            raise RuntimeError("too dear")

    rig = Rig([book], policies=[Refuses()])
    result = await rig.call("book")
    assert not result.success
    assert undone == ["seat 3"]


async def test_compensation_is_shielded_from_cancellation() -> None:
    """If a call is cancelled again while it compensates, the compensation finishes before `CancelledError` is raised."""
    undone: list[str] = []

    async def unbook(params: Any, value: str, *, context: ToolContext) -> None:
        await asyncio.sleep(2)
        undone.append(value)

    @tool(effect="compensable", compensate=unbook)
    async def book() -> str:
        """Book."""
        return "seat 3"

    @tool(effect="irreversible")
    async def trip(context: ToolContext) -> None:
        """Book, then hang."""
        await context.call("book")
        await asyncio.sleep(60)

    rig = Rig([book, trip])
    task = asyncio.ensure_future(rig.call("trip"))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(1)
    task.cancel()  # cancelled again during the compensation
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ["seat 3"]
    assert rig.status("trip") == "cancelled"
    rig.assert_paired()


def trip_that_fails(undone: list[str]) -> list[Any]:
    """Return `book` and `trip`, which books a seat and fails after a second. Compensating the booking takes four seconds."""

    async def unbook(params: Any, value: str, *, context: ToolContext) -> None:
        await asyncio.sleep(4)
        undone.append(value)

    @tool(effect="compensable", compensate=unbook)
    async def book() -> str:
        """Book."""
        return "seat 3"

    @tool(effect="irreversible")
    async def trip(context: ToolContext) -> None:
        """Book, then fail."""
        await context.call("book")
        await asyncio.sleep(1)
        raise ValueError("no hotel")

    return [book, trip]


async def test_a_cancel_during_compensation_is_raised_after_it() -> None:
    """A failed call that is cancelled while it compensates raises `CancelledError` after the compensation."""
    undone: list[str] = []
    rig = Rig(trip_that_fails(undone))
    task = asyncio.ensure_future(rig.call("trip"))
    await asyncio.sleep(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ["seat 3"]
    rig.assert_paired()


async def test_a_deadline_that_passes_during_compensation_cancels_nobody() -> None:
    """If the deadline passes while a failed call compensates, the caller gets the failure and is not cancelled."""
    undone: list[str] = []
    clock = VirtualClock()
    rig = Rig(trip_that_fails(undone), clock=clock, deadline=Deadline.after(3, clock=clock))
    failed = await rig.call("trip")
    assert "no hotel" in failed.message
    assert undone == ["seat 3"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
