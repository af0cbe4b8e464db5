"""A run's tree says which calls and effects no longer stand: those compensated, rolled back or cancelled."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolContext, TransientError, tool
from handrail.cli import runs_view as view
from handrail.cli.runs_view import print_item
from handrail.errors import PromptEvaluationError
from handrail.messages import AssistantMessage
from handrail.models import ModelUnavailable
from handrail.run.adapter import Retry
from handrail.run.record.begin import decode_outcome
from handrail.runs import CallNode, RunTree, cancel, show
from handrail.serve.snapshots import run_tree
from support.operations import close_when
from support.recorded import Recorder, call, note, send
from support.stepwise_workers import FAILS, models, team, to, written


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


class Hanging:
    """Whether a hanging call has made its inner calls."""

    reached = asyncio.Event()


async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
    if params.seat == "stuck":
        raise ValueError("the desk is closed")


@tool(effect="compensable", compensate=unbook)
async def book(seat: str) -> str:
    """Book a seat."""
    return f"booked {seat}"


@tool
async def trip(seat: str, then: str, context: ToolContext) -> str:
    """Note the seat, book it, and send a mail. Then end, fail or hang."""
    await context.call("note", text=seat)
    await context.call("book", seat=seat)
    await context.call("send", text=seat)
    if then == "fail":
        raise ValueError("no hotel")
    if then == "hang":
        Hanging.reached.set()
        await asyncio.Event().wait()
    return "booked all"


@tool
async def tour(context: ToolContext) -> str:
    """Make a trip, and fail."""
    await context.call("trip", seat="1", then="end")
    raise ValueError("no guide")


TRAVEL = Prompt("travel", "Travel.", tools=[note, book, send, trip, tour])


def inside(tree: RunTree) -> dict[str, CallNode]:
    """Return the only call of a run and the calls inside it, by tool."""
    assert len(tree.turns[0].calls) == 1
    return {each.tool: each for each in tree.calls}


def marks(calls: dict[str, CallNode]) -> dict[str, list[str]]:
    return {
        name: [mark for mark in ("undone", "compensated", "rolled_back") if getattr(each, mark)]
        for name, each in calls.items()
    }


async def test_the_calls_of_a_failed_call_are_compensated_or_rolled_back(recorder: Recorder):
    """What was compensated is not listed as a lasting effect. The compensation is shown below the call that it undid."""
    await recorder.run("r", call("trip", seat="1", then="fail"), "end", prompt=TRAVEL)
    calls = inside(await show(recorder.journal, "r"))
    assert marks(calls) == {
        "trip": [], "note": ["rolled_back"], "book": ["compensated"], "book.undo": [], "send": [],
    }  # fmt: skip
    assert (calls["book"].effects, calls["send"].effects) == ([], ["send"])
    assert calls["book"].status == "ok"
    assert calls["book"].calls == [calls["book.undo"]]


async def test_the_terminal_shows_the_marks(recorder: Recorder, capsys: pytest.CaptureFixture[str]):
    """A mark follows the call, and only the effects that remain are said to be impossible to undo."""
    await recorder.run("r", call("trip", seat="1", then="fail"), "end", prompt=TRAVEL)
    print_item(view.run_tree(await show(recorder.journal, "r"), full=False))
    shown = capsys.readouterr().out
    ended = {mark: re.findall(rf"✓ (\S+) .*  {mark}", shown) for mark in ("compensated", "rolled back")}
    assert ended == {"compensated": ["book"], "rolled back": ["note"]}
    assert re.findall(r"can't be undone: (\S+)", shown) == ["send"]


@pytest.mark.parametrize(
    ("raised", "tries", "requests", "error"),
    [
        (ModelUnavailable("x:y", "Overloaded", status=529), 2, "Overloaded", "model 'x:y': Overloaded (status 529)"),
        (KeyError("my own bug"), 1, "KeyError: 'my own bug'", "KeyError: 'my own bug'"),
    ],
    ids=["model", "code"],
)  # fmt: skip
async def test_a_run_that_ends_without_an_answer_shows_the_requests_for_it(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], raised: Exception, tries: int, requests: str, error: str
):  # fmt: skip
    """The last step of such a run has a time and the requests that failed, in the terminal and on the page. The error is whole."""
    script = ScriptedModel([call("note", text="a"), *[raised] * 2], name="a:1")
    adapter = Adapter(script, journal=recorder.journal, retry=Retry(attempts=2, first_wait=0.0))
    with pytest.raises((PromptEvaluationError, KeyError)):
        await adapter.evaluate(Prompt("a-long-name-" * 5, "Do.", tools=[note]), "go", run_id="r")
    tree = await show(recorder.journal, "r")
    last = run_tree(tree)["turns"][-1]
    assert (last["number"], last["answered"]) == (2, False)
    assert last["failed"] == [{"model": "a:1", "error": requests}] * tries
    assert (last["at"], last["seconds"]) >= (tree.turns[0].at, 0)
    print_item(view.run_tree(tree, full=False))
    shown = capsys.readouterr().out
    assert re.search(r"step 2 .* · no answer", shown)
    assert shown.count(f"✗ a:1: {requests}") == tries
    assert error in shown.splitlines()[-1]
    assert tree.steps == 1  # `fork` takes answers only


async def test_what_a_compensation_could_not_undo_stands(recorder: Recorder):
    """If a compensation fails, its error is shown below the call, whose effect remains."""
    await recorder.run("r", call("trip", seat="stuck", then="fail"), "end", prompt=TRAVEL)
    calls = inside(await show(recorder.journal, "r"))
    assert marks(calls)["book"] == []
    assert calls["book"].effects == ["book"]
    assert (calls["book.undo"].status, "the desk is closed" in calls["book.undo"].message) == ("error", True)


async def test_the_calls_of_a_successful_call_stand(recorder: Recorder):
    """Nothing is marked, and all external effects remain."""
    await recorder.run("r", call("trip", seat="1", then="end"), "end", prompt=TRAVEL)
    calls = inside(await show(recorder.journal, "r"))
    assert not any(marks(calls).values())
    assert [list(calls[name].effects) for name in ("trip", "book", "send")] == [
        ["book", "send", "trip"], ["book"], ["send"],
    ]  # fmt: skip


async def test_a_call_two_levels_below_the_failed_one_is_compensated(recorder: Recorder):
    """The calls in between list the effects that remain, without those that were compensated."""
    await recorder.run("r", call("tour"), "end", prompt=TRAVEL)
    calls = inside(await show(recorder.journal, "r"))
    assert marks(calls)["book"] == ["compensated"]
    assert marks(calls)["note"] == marks(calls)["trip"] == ["rolled_back"]
    assert calls["trip"].effects == ["send", "trip"]


async def test_a_cancelled_call_says_so_and_what_became_of_its_calls(recorder: Recorder):
    """A cancelled run has no open call. The timeline has the same marks."""
    Hanging.reached = asyncio.Event()
    going = asyncio.ensure_future(recorder.run("r", call("trip", seat="1", then="hang"), prompt=TRAVEL))
    await Hanging.reached.wait()
    calls = inside(await show(recorder.journal, "r"))
    assert not any(marks(calls).values())  # nothing is decided yet
    assert (calls["trip"].status, calls["book"].effects, calls["send"].effects) == ("open", [], ["send"])
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    tree = await show(recorder.journal, "r")
    calls = inside(tree)
    assert marks(calls)["book"] == ["compensated"]
    assert marks(calls)["note"] == ["rolled_back"]
    assert (calls["book"].effects, calls["send"].effects) == ([], ["send"])
    trip = calls["trip"]
    assert (trip.status, "Could not be undone: send" in trip.message) == ("cancelled", True)
    assert trip.seconds is not None
    (shown,) = run_tree(tree)["turns"][0]["calls"]
    assert [(each["tool"], each["compensated"], each["rolled_back"]) for each in shown["calls"]] == [
        ("note", False, True), ("book", True, False), ("send", False, False),
    ]  # fmt: skip
    said = decode_outcome(tree.row).messages
    assert trip.id in [call.id for each in said if isinstance(each, AssistantMessage) for call in each.calls]


async def test_only_the_last_attempt_of_a_call_counts(recorder: Recorder):
    """What the calls of an earlier attempt changed was rolled back, although the call succeeded in the end."""

    @tool(effect="staged")
    async def twice(context: ToolContext) -> str:
        """Note something, and fail at the first attempt."""
        await context.call("note", text=str(context.invocation.attempt))
        if context.invocation.attempt == 1:
            raise TransientError("busy", retry_after=0)
        return "noted"

    await recorder.run("r", call("twice"), "end", prompt=Prompt("p", "Do.", tools=[note, twice]))
    tree = await show(recorder.journal, "r")
    notes = tree.turns[0].calls[0].calls
    assert [(each.message, each.rolled_back) for each in notes] == [("noted 1", True), ("noted 2", False)]


async def interrupt(recorder: Recorder, seat: str = "1") -> None:
    """Record a run whose process ends while its call hangs."""
    Hanging.reached = asyncio.Event()
    adapter = recorder.adapter(call("trip", seat=seat, then="hang"))
    await close_when(Hanging.reached, adapter.evaluate(TRAVEL, "go", run_id="r"))


async def test_what_a_resumed_run_compensates_is_marked(recorder: Recorder):
    """After a crash nothing is decided. The resumed run compensates the inner calls of the interrupted call, and the tree says so."""
    await interrupt(recorder)
    tree = await show(recorder.journal, "r")
    calls = inside(tree)
    assert not any(marks(calls).values())
    assert (calls["book"].effects, calls["send"].effects) == ([], ["send"])
    await recorder.adapter("end").resume("r", TRAVEL)
    calls = inside(await show(recorder.journal, "r"))
    assert marks(calls)["book"] == ["compensated"]
    assert marks(calls)["note"] == ["rolled_back"]
    assert (calls["book"].effects, calls["send"].effects) == ([], ["send"])


async def test_a_run_that_nobody_executes_is_cancelled_without_compensation(recorder: Recorder):
    """The effects of an interrupted call remain if its run is cancelled instead of resumed, and its call ends as cancelled."""
    await interrupt(recorder)
    await cancel(recorder.journal, "r")
    calls = inside(await show(recorder.journal, "r"))
    assert marks(calls)["book"] == []
    assert calls["book"].effects == ["book"]
    assert (calls["trip"].status, "outcome is unknown" in calls["trip"].message) == ("cancelled", True)


@pytest.mark.parametrize(("outer", "expected"), [("", []), ("limits: {requests: 4}", ["compensated"])])
async def test_commit_each_inside_a_call_that_fails(recorder: Recorder, outer: str, expected: list[str]):
    """Calls of a `commit: each` worker stand if only the worker fails, and are reversed if a call around it fails."""
    said = models(
        main=[to("outer")], outer=[to("steps"), call("notes")], steps=[written("a"), call("book", room="1")]
    )
    registry = team(recorder.base, outer=outer, steps=FAILS)
    await registry.run(
        "main", "go", models=said, journal=recorder.journal, filesystem=recorder.files, run_id="r"
    )
    calls = {each.tool: each for each in (await show(recorder.journal, "r")).calls}
    assert calls["steps"].status == "error"
    assert marks(calls)["book"] == expected
    assert marks(calls)["write"] == (["rolled_back"] if expected else [])
