"""Logs come back with a resumed run, a forked run, a continued conversation and a run on another worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import (
    Adapter,
    LaterEnvironment,
    Prompt,
    RateLimitPolicy,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    runs,
    tool,
)
from handrail.errors import HandrailError, RunParked, TransientError
from handrail.events import MessageAdded, ToolInvoked, ToolRolledBack
from handrail.guard.rate_limit import RateCell
from handrail.journal.sqlite import MemoryJournal
from handrail.run.redemption import redeem
from handrail.session import SliceRules, kept
from support.parked_runs import Resting, answer_to
from support.rig import Note


@kept(kind="log")
@dataclass(frozen=True)
class Tried:
    """A log entry, which stays even if the call fails."""

    what: str


@dataclass(frozen=True)
class Bought:
    """An event that changes state and is counted in a log."""

    what: str


@kept(kind="log", reducers={Bought: lambda log, event: log.append(_receipt(event))})
@dataclass(frozen=True)
class Receipt:
    what: str


@kept(reducers={Bought: lambda state, event: state.append(_owned(event))})
@dataclass(frozen=True)
class Owned:
    what: str


def _receipt(event: Bought) -> Receipt:
    return Receipt(event.what)


def _owned(event: Bought) -> Owned:
    return Owned(event.what)


class Pick(BaseModel):
    number: int


@tool(effect="staged")
async def attempt(what: str, context: ToolContext) -> ToolResult[str]:
    """Log something; fail unless told otherwise."""
    context.session.dispatch(Tried(what))
    context.session.dispatch(Note(what))
    return ToolResult.ok(what) if what.startswith("good") else ToolResult.error(f"no {what}")


@tool(effect="staged")
async def ask(context: ToolContext) -> str:
    """Log something and ask somebody."""
    context.session.dispatch(Tried("asked"))
    assert context.wait_for is not None
    return str((await context.wait_for("pick", {}, Pick)).number)


@tool(effect="staged")
async def delegate(context: ToolContext) -> str:
    """Make a call that fails and one that succeeds."""
    context.session.dispatch(Tried("before"))
    await context.call("attempt", what="bad inner")
    await context.call("attempt", what="good inner")
    context.session.dispatch(Tried("after"))
    return "delegated"


@tool(effect="staged")
async def buy(what: str, context: ToolContext) -> ToolResult[str]:
    """Buy something; fail unless told otherwise."""
    context.session.dispatch(Bought(what))
    return ToolResult.ok(what) if what.startswith("good") else ToolResult.error("no")


class Desk:
    """A prompt on a recorded model, which every leg opens anew, as another process would."""

    def __init__(self, folder: Path, *script: Any, tools: Any = (), policies: Any = ()) -> None:
        self.path = folder / "runs.db"
        self.model = ScriptedModel([*script])
        self.prompt = Prompt("p", "Do.", tools=[attempt, ask, delegate, buy, *tools], policies=list(policies))

    def adapter(self) -> Adapter:
        self.journal = SqliteJournal(self.path, watch=None)
        return Adapter(self.model, journal=self.journal, environment=LaterEnvironment())

    async def park(self, **options: Any) -> None:
        """Begin a run, let it be parked, and answer its questions."""
        with pytest.raises(RunParked) as parked:
            await self.adapter().evaluate(self.prompt, "go", run_id="run", **options)
        for question in parked.value.questions:
            self.journal.questions.answer(answer_to(question))
        self.journal.close()

    async def resume(self, run_id: str = "run", **options: Any) -> Session:
        return (await self.adapter().resume(run_id, self.prompt, **options)).session

    async def session(self, session_id: str, **options: Any) -> Session:
        """Load the session as another process would."""
        return await runs.session(
            SqliteJournal(self.path, watch=None), session_id, principal="local", **options
        )


def tried(session: Session) -> list[str]:
    return [each.what for each in session[Tried].all()]


def ends(session: Session) -> list[tuple[str, ...]]:
    return [(*each.path, each.status) for each in session[ToolInvoked].all()]


LOGGED = ["bad", "good", "before", "bad inner", "good inner", "after", "asked"]


async def test_logs_come_back_with_a_resumed_run(tmp_path: Path):
    """What finished calls logged, failed or not, and how nested calls ended, is there after resume, and each once."""
    script = [
        ToolCall("attempt", {"what": "bad"}),
        ToolCall("attempt", {"what": "good"}),
        ToolCall("delegate"),
        ToolCall("ask"),
        "done",
    ]
    desk = Desk(tmp_path, *script)
    await desk.park(session=Session(id="s"))
    session = await desk.resume()
    assert sorted(tried(session)) == sorted(LOGGED)
    assert ends(session) == [
        ("attempt", "error"),
        ("attempt", "ok"),
        ("delegate", "attempt", "error"),
        ("delegate", "attempt", "ok"),
        ("delegate", "ok"),
        ("ask", "ok"),
    ]
    assert [each.text for each in session[Note].all()] == ["good", "good inner"]
    loaded = await desk.session("s")
    assert tried(loaded) == tried(session)
    assert ends(loaded) == ends(session)
    assert [each.tool for each in loaded[ToolRolledBack].all()] == [
        each.tool for each in session[ToolRolledBack].all()
    ]


async def test_a_log_has_the_order_in_which_calls_ended(tmp_path: Path):
    """After a resume, the log of a call comes where the call ended; within a call, the order is that of the events."""
    desk = Desk(
        tmp_path, ToolCall("delegate"), ToolCall("attempt", {"what": "good"}), ToolCall("ask"), "done"
    )
    await desk.park()
    session = await desk.resume()
    assert tried(session) == ["bad inner", "good inner", "before", "after", "good", "asked"]


async def test_what_only_new_calls_log_is_published_by_a_resumed_run(tmp_path: Path):
    """A restored log entry is not published again."""
    desk = Desk(tmp_path, ToolCall("attempt", {"what": "good"}), ToolCall("ask"), "done")
    await desk.park()
    heard: list[object] = []
    bus = Session().dispatcher
    bus.subscribe(Tried, heard.append)
    await desk.resume(bus=bus)
    assert heard == [Tried("asked")]


async def test_logs_come_back_in_a_continued_conversation(tmp_path: Path):
    """A second run in another process, and the session that it leaves, have what the first one logged."""
    seen: list[list[str]] = []

    @tool(effect="read")
    async def look(context: ToolContext) -> str:
        """Read the log."""
        seen.append([each.what for each in context.session[Tried].all()])
        return "seen"

    desk = Desk(tmp_path, ToolCall("delegate"), "first", ToolCall("look"), "second", tools=[look])
    await desk.adapter().evaluate(desk.prompt, "go", run_id="one", session=Session(id="s"))
    await desk.adapter().evaluate(desk.prompt, "on", run_id="two", session=await desk.session("s"))
    assert seen == [["bad inner", "good inner", "before", "after"]]
    loaded = await desk.session("s")
    assert tried(loaded) == seen[0]
    assert ends(loaded)[-2:] == [("delegate", "ok"), ("look", "ok")]


async def test_a_forked_run_has_the_logs_up_to_its_step(tmp_path: Path):
    """A fork from a step has what the calls before that step logged, and what earlier runs of the session did."""
    desk = Desk(
        tmp_path,
        *(ToolCall("attempt", {"what": "bad one"}), "first"),
        *(ToolCall("attempt", {"what": "bad two"}), ToolCall("attempt", {"what": "good three"}), "second"),
        "forked",
    )
    await desk.adapter().evaluate(desk.prompt, "go", run_id="one", session=Session(id="s"))
    await desk.adapter().evaluate(desk.prompt, "on", run_id="two", session=await desk.session("s"))
    await runs.fork(desk.journal, "two", 1, "three")
    session = await desk.resume("three")
    assert tried(session) == ["bad one", "bad two"]
    assert [each.tool for each in session[ToolInvoked].all()] == ["attempt", "attempt"]
    assert tried(await desk.session("three")) == ["bad one", "bad two"]


async def test_a_copied_run_keeps_its_logs(tmp_path: Path):
    """An exported and imported run has its logs."""
    desk = Desk(tmp_path, ToolCall("delegate"), "done")
    await desk.adapter().evaluate(desk.prompt, "go", run_id="run", session=Session(id="s"))
    await runs.export(desk.journal, "run", tmp_path / "run.jsonl")
    elsewhere = MemoryJournal()
    await runs.import_(elsewhere, tmp_path / "run.jsonl")
    session = await runs.session(elsewhere, "s", principal="local")
    assert tried(session) == ["bad inner", "good inner", "before", "after"]


async def test_a_log_that_the_session_began_with_stays(tmp_path: Path):
    """Logs from before the first run come back too, also if the caller passes a session with its own rules."""
    rules = {Note: SliceRules("log")}
    before = Session(id="s", slices=rules)
    before.dispatch(Note("early"))
    before.dispatch(Tried("earlier"))
    desk = Desk(tmp_path, ToolCall("attempt", {"what": "bad"}), "done")
    await desk.adapter().evaluate(desk.prompt, "go", run_id="run", session=before)
    again = await desk.session("s", session=Session(id="s", slices=rules))
    assert tried(again) == tried(before) == ["earlier", "bad"]
    assert [each.text for each in again[Note].all()] == ["early", "bad"]
    assert len(again[MessageAdded]) == len(before[MessageAdded])


async def test_an_event_of_state_and_log_is_restored_in_each_once(tmp_path: Path):
    """If an event goes into state and into a log, only the log has the event of a failed call."""
    script = [ToolCall("buy", {"what": "good"}), ToolCall("buy", {"what": "bad"}), ToolCall("ask"), "done"]
    desk = Desk(tmp_path, *script)
    await desk.park(session=Session(id="s"))
    for session in (await desk.resume(), await desk.session("s")):
        assert [each.what for each in session[Owned].all()] == ["good"]
        assert [each.what for each in session[Receipt].all()] == ["good", "bad"]


async def test_the_log_of_a_call_that_was_undone_stays(tmp_path: Path):
    """`runs.undo` takes back a call's state, not what it logged."""
    desk = Desk(tmp_path, ToolCall("buy", {"what": "good"}), "done")
    await desk.adapter().evaluate(desk.prompt, "go", run_id="run", session=Session(id="s"))
    [unit] = await desk.journal.calls.load("run")
    await runs.undo(desk.journal, "run", unit.call_id)
    session = await desk.session("s")
    assert not session[Owned].all()
    assert [each.what for each in session[Receipt].all()] == ["good"]


async def test_each_attempt_at_a_call_is_logged(tmp_path: Path):
    """What an attempt logged before it was retried is recorded, also if the next attempt is cut off by parking."""
    attempts: list[int] = []

    @tool(effect="staged")
    async def flaky(context: ToolContext) -> str:
        """Fail once, then ask."""
        number = context.invocation.attempt
        attempts.append(number)
        context.session.dispatch(Tried(f"attempt {number}"))
        if number == 1:
            raise TransientError("later", retry_after=0)
        assert context.wait_for is not None
        return str((await context.wait_for("pick", {}, Pick)).number)

    desk = Desk(tmp_path, ToolCall("flaky"), "done", tools=[flaky])
    await desk.park(session=Session(id="s"))
    session = await desk.resume()
    assert attempts == [1, 2, 2]
    assert tried(session) == ["attempt 1", "attempt 2"]
    assert tried(await desk.session("s")) == ["attempt 1", "attempt 2"]
    assert len((await desk.session("s"))[ToolRolledBack]) == 1


async def test_what_a_cancelled_call_logged_stays(tmp_path: Path):
    """A cancelled call has no record of its own. Its log is recorded with the end of its run."""
    begun = asyncio.Event()

    @tool(effect="staged")
    async def hang(context: ToolContext) -> None:
        """Log something and wait forever."""
        context.session.dispatch(Tried("hung"))
        begun.set()
        await asyncio.get_running_loop().create_future()

    desk = Desk(tmp_path, ToolCall("hang"), tools=[hang])
    run = asyncio.ensure_future(
        desk.adapter().evaluate(desk.prompt, "go", run_id="run", session=Session(id="s"))
    )
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    session = await desk.session("s")
    assert tried(session) == ["hung"]
    assert ends(session) == [("hang", "cancelled")]


async def test_work_under_a_ticket_is_logged_with_the_call_that_issued_it(tmp_path: Path):
    """What a redeemed tool logs elsewhere is in the issuing call's session and record, even if that call fails."""

    @tool(effect="staged")
    async def render(page: int, context: ToolContext) -> str:
        """Render a page, here or elsewhere."""
        if page:
            context.session.dispatch(Tried(f"page {page}"))
            return f"page {page}"
        text = context.ticket()
        await redeem(text, {"page": 3}, tool=render, journal=SqliteJournal(desk.path, watch=None))
        raise ValueError("afterwards")

    desk = Desk(tmp_path, ToolCall("render", {"page": 0}), "done", tools=[render])
    response = await desk.adapter().evaluate(desk.prompt, "go", run_id="run", session=Session(id="s"))
    assert tried(response.session) == ["page 3"]
    assert tried(await desk.session("s")) == ["page 3"]


async def test_an_event_that_can_not_be_recorded_is_not_logged(tmp_path: Path):
    """In a run with a journal, an event that can't be saved is refused before it is in the log."""

    @kept(kind="log")
    @dataclass(frozen=True)
    class Odd:
        what: Any

    @tool(effect="staged")
    async def odd(context: ToolContext) -> str:
        """Log something that can't be saved."""
        context.session.dispatch(Odd(1))
        with pytest.raises(HandrailError):
            context.session.dispatch(Odd(object()))
        return "refused"

    desk = Desk(tmp_path, ToolCall("odd"), "done", tools=[odd])
    response = await desk.adapter().evaluate(desk.prompt, "go", run_id="run", session=Session(id="s"))
    assert [each.what for each in response.session[Odd].all()] == [1]
    assert ends(response.session) == [("odd", "ok")]


# --- rates -----------------------------------------------------------------------------------------------


class Wall:
    """A wall clock that a test sets. Its monotonic time says nothing about it, as in another process."""

    def __init__(self) -> None:
        self.at = datetime(2026, 1, 1, tzinfo=UTC)
        self.restarts = 0.0

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.restarts

    def pass_time(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


def counted(session: Session) -> list[str]:
    """Return the calls that a rate limit has counted."""
    return sorted(each.call for each in session[RateCell].all() if each.part == "call")


async def test_a_rate_limit_goes_on_in_every_leg(tmp_path: Path):
    """Calls of earlier legs, failed or not, count until their time is over by the wall clock; a parked call counts once."""
    wall = Wall()
    limit = RateLimitPolicy(3, 60.0, clock=wall)
    bad = ToolCall("attempt", {"what": "bad"})
    good = ToolCall("attempt", {"what": "good"})
    desk = Desk(tmp_path, bad, good, ToolCall("ask"), bad, "first", bad, good, "second", policies=[limit])
    await desk.park(session=Session(id="s"))
    wall.restarts += 1_000_000.0
    wall.pass_time(10)
    session = await desk.resume()
    assert [status for *_, status in ends(session)] == ["error", "ok", "ok", "denied"]
    assert len(counted(session)) == 3
    wall.pass_time(51)
    loaded = await desk.session("s")
    assert counted(loaded) == counted(session)
    response = await desk.adapter().evaluate(desk.prompt, "on", run_id="two", session=loaded)
    assert [status for *_, status in ends(response.session)][4:] == ["error", "ok"]


async def test_the_counts_of_a_rate_limit_are_forked(tmp_path: Path):
    """A fork from a step continues with the counts of the calls before that step."""
    good = ToolCall("attempt", {"what": "good"})
    desk = Desk(
        tmp_path, good, good, "done", good, "again", policies=[RateLimitPolicy(2, 60.0, clock=Wall())]
    )
    await desk.adapter().evaluate(desk.prompt, "go", run_id="one", session=Session(id="s"))
    await runs.fork(desk.journal, "one", 1, "two")
    session = await desk.resume("two")
    assert ends(session) == [("attempt", "ok"), ("attempt", "ok")]
    assert len(counted(session)) == 2
    await runs.fork(desk.journal, "one", 2, "three")
    desk.model = ScriptedModel([good, "again"])
    assert ends(await desk.resume("three"))[-1] == ("attempt", "denied")


async def test_setting_the_clock_back_a_little_frees_nothing():
    """If the wall clock is set back by less than the window, the calls before still count, and are free in time."""
    wall = Wall()
    limit = RateLimitPolicy(1, 60.0, clock=wall)
    good = ToolCall("attempt", {"what": "good"})
    adapter = Adapter(ScriptedModel([good, "1", good, "2", good, "3"]))
    prompt, session = Prompt("p", "Do.", tools=[attempt], policies=[limit]), Session()
    await adapter.evaluate(prompt, "go", session=session)
    wall.pass_time(-5)
    await adapter.evaluate(prompt, "go", session=session)
    wall.pass_time(66)
    await adapter.evaluate(prompt, "go", session=session)
    assert [status for *_, status in ends(session)] == ["ok", "denied", "ok"]


async def test_an_inner_call_that_was_cut_off_with_its_outer_call_still_counts(tmp_path: Path):
    """A call that is not entered again after a crash is counted once, and so are the inner calls that it had begun."""
    begun = asyncio.Event()

    @tool(effect="staged")
    async def inner(context: ToolContext) -> None:
        """Log something and hang."""
        begun.set()
        await asyncio.get_running_loop().create_future()

    @tool(effect="irreversible")
    async def outer(context: ToolContext) -> None:
        """Make a call that succeeds and one that hangs."""
        await context.call("attempt", what="good")
        await context.call("inner")

    limit = RateLimitPolicy(9, 60.0, clock=Wall())
    desk = Desk(tmp_path, ToolCall("outer"), "done", tools=[outer, inner], policies=[limit])
    there = Resting()
    run = asyncio.ensure_future(
        desk.adapter().evaluate(desk.prompt, "go", run_id="run", session=Session(id="s"), environment=there)
    )
    await begun.wait()
    assert there.parking is not None
    assert there.parking.park(by_force=True)  # as if the process ended here
    with pytest.raises(RunParked):
        await run
    session = await desk.resume()
    assert len(counted(session)) == 3
    assert tried(session) == ["good"]
    assert counted(await desk.session("s")) == counted(session)
