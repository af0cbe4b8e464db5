"""Runs at rest: who is notified, when a run may be parked, and what parking by force interrupts."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from handrail import (
    Adapter,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import RunParked
from handrail.events import (
    ApprovalDecided,
    MessageAdded,
    PromptExecuted,
    QuestionAnswered,
    QuestionAsked,
    ToolInvoked,
    ToolRolledBack,
    ToolStarted,
)
from handrail.guard.policy import CapabilityPolicy
from handrail.journal.protocol import Journal
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ModelPart, ModelRequest, ToolMessage
from handrail.run.record.parking import Parking
from handrail.session import Dispatcher
from support.examples import at_most
from support.parked_runs import NUMBER, Resting, answer_to
from support.rig import Note
from support.texts import OUTCOME_UNKNOWN

ENDS = (ToolInvoked, QuestionAnswered, ApprovalDecided, PromptExecuted)


class Pick(BaseModel):
    number: int


class Going:
    """A run that a test can begin, answer and resume, with a record of its events."""

    def __init__(self, tools: Any, *script: Any, journal: Journal | None = None, **options: Any) -> None:
        self.there = Resting()
        self.journal: Journal = journal or MemoryJournal()
        self.model = ScriptedModel(list(script))
        self.adapter = Adapter(self.model, journal=self.journal, environment=self.there)
        self.prompt = Prompt("p", "Do.", tools=tools, **options)
        self.heard: list[object] = []

    def _bus(self) -> Dispatcher:
        bus = Dispatcher()
        bus.subscribe(object, self.heard.append)
        return bus

    def begin(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.adapter.evaluate(self.prompt, "go", run_id="run", bus=self._bus()))

    def resume(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.adapter.resume("run", self.prompt, bus=self._bus()))

    async def until_asked(self) -> None:
        """Wait until the run has an open question, and has had time to notice that it is at rest."""
        while not await self.journal.questions.open("run"):
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)

    async def answer(self, value: Any = NUMBER) -> None:
        """Answer the oldest open question."""
        self.journal.questions.answer(answer_to((await self.journal.questions.open("run"))[0], value))

    def rolled_back(self) -> list[str]:
        return [each.tool for each in self.heard if isinstance(each, ToolRolledBack)]

    def ends(self) -> list[object]:
        return [each for each in self.heard if isinstance(each, ENDS)]


@tool(effect="staged")
async def ask(context: ToolContext) -> int:
    """Ask somebody for a number."""
    assert context.wait_for is not None
    return (await context.wait_for("pick", {}, Pick)).number


@tool
async def phone(context: ToolContext) -> int:
    """Ask somebody for a number, in a call that can't be rerun."""
    assert context.wait_for is not None
    return (await context.wait_for("pick", {}, Pick)).number


async def test_a_run_at_rest_is_reported_and_continues_in_memory():
    """If a run at rest is not parked, an answer reaches the handler that waits, which is not rerun."""
    going = Going([ask], [ToolCall("ask"), ToolCall("ask")], "done")
    run = going.begin()
    await going.there.until_rest()
    await going.answer()
    await going.there.until_rest()  # one call has got its answer and ended, so the run is at rest again
    assert len(await going.journal.questions.open("run")) == 1
    await going.answer()
    assert (await run).text == "done"
    assert going.there.rested == [True, True]
    assert [type(each).__name__ for each in going.heard].count("ToolStarted") == 2


async def test_it_is_told_again_where_a_handler_asks_again():
    @tool(effect="staged")
    async def twice(context: ToolContext) -> int:
        """Ask twice."""
        assert context.wait_for is not None
        first = (await context.wait_for("pick", {}, Pick)).number
        return first + (await context.wait_for("pick", {}, Pick)).number

    going = Going([twice], ToolCall("twice"), "done")
    run = going.begin()
    for _ in range(2):
        await going.there.until_rest()
        await going.answer()
    assert (await run).text == "done"
    assert going.there.rested == [True, True]


async def test_it_does_not_rest_while_anything_is_at_work():
    """A run is not at rest while a concurrent call is still working."""
    go = asyncio.Event()
    at_work = asyncio.Event()

    @tool(effect="pure")
    async def work() -> str:
        """Work until the test lets it end."""
        at_work.set()
        await go.wait()
        return "worked"

    going = Going([ask, work], [ToolCall("ask"), ToolCall("work")], "done")
    run = going.begin()
    await at_work.wait()
    await going.until_asked()
    assert (going.there.rested, going.there.parking and going.there.parking.park()) == ([], False)
    go.set()
    await going.there.until_rest()
    await going.answer()
    assert (await run).text == "done"
    assert going.there.rested == [True]


async def test_a_model_asked_beside_a_question_is_at_work():
    """A run with a nested run that waits for a person is not at rest while another nested run waits for its model."""
    go, asked = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedModel):
        async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
            if "slow" in request.system:
                asked.set()
                await go.wait()
            async for part in super().stream(request):
                yield part

    @tool(effect="idempotent")
    async def both(context: ToolContext) -> str:
        """Run two agents at once."""

        async def one(prompt: Prompt[Any]) -> str:
            return (await context.adapter.evaluate(prompt, "go")).text

        quick = one(Prompt("quick", "Be quick.", tools=[ask]))
        return " ".join(await asyncio.gather(quick, one(Prompt("slow", "Be slow."))))

    going = Going([both])
    going.adapter = Adapter(
        Slow([ToolCall("both"), ToolCall("ask"), "slow", "quick", "done"]),
        journal=going.journal,
        environment=going.there,
    )
    run = going.begin()
    await asked.wait()
    await going.until_asked()
    assert going.there.rested == []
    go.set()
    await going.there.until_rest()
    await going.answer()
    assert (await run).text == "done"


async def test_a_handler_that_can_not_be_entered_again_rests_and_is_not_parked():
    going = Going([phone], ToolCall("phone"), "done")
    run = going.begin()
    parking = await going.there.until_rest()
    assert (parking.quiet, parking.may_park, parking.park(), parking.parked) == (True, False, False, False)
    await going.answer()
    assert (await run).text == "done"
    assert going.there.rested == [False]


async def test_a_thread_that_waits_rests_too():
    @tool(effect="staged")
    def pick(context: ToolContext) -> int:
        """Ask, from a thread."""
        assert context.wait_for is not None
        return context.wait_for("pick", {}, Pick).wait().number

    going = Going([pick], ToolCall("pick"), "done")
    run = going.begin()
    parking = await going.there.until_rest()
    assert parking.park()
    with pytest.raises(RunParked):
        await run
    await going.answer()
    assert (await going.resume()).text == "done"


async def test_parked_at_rest_it_says_nothing_that_looks_like_an_end():
    """Parking a run with a nested run, a parallel call and an approval publishes no end for the calls that wait."""

    @tool
    async def send() -> str:
        """Send something."""
        return "sent"

    @tool(effect="staged")
    async def delegate(context: ToolContext) -> str:
        """Let another agent ask for a number."""
        return (await context.adapter.evaluate(Prompt("inner", "Be quick.", tools=[ask]), "go")).text

    going = Going(
        [delegate, send],
        [ToolCall("delegate"), ToolCall("send")],
        ToolCall("ask"),
        "inner",
        "done",
        policies=[CapabilityPolicy()],
    )
    run = going.begin()
    parking = await going.there.until_rest()
    assert parking.park()
    assert parking.park(), "parking a parked run failed"
    with pytest.raises(RunParked) as parked:
        await run
    assert len(parked.value.questions) == 2
    assert going.ends() == []
    assert (await going.journal.runs.get("run")).status == "parked"
    for question in parked.value.questions:
        value = {"approved": True} if question.kind == "approval" else NUMBER
        going.journal.questions.answer(answer_to(question, value))
    going.heard.clear()
    assert (await going.resume()).text == "done"
    invoked = [each for each in going.heard if isinstance(each, ToolInvoked)]
    assert sorted((each.tool, each.status) for each in invoked) == [
        ("ask", "ok"),
        ("delegate", "ok"),
        ("send", "ok"),
    ]


async def test_an_environment_that_raises_at_rest_has_its_run_parked(caplog: pytest.LogCaptureFixture):
    going = Going([ask], ToolCall("ask"), "done")

    def run_waiting(parking: Parking) -> None:
        raise ValueError("no")

    going.there.run_waiting = run_waiting
    with pytest.raises(RunParked):
        await going.begin()
    assert "the environment raised in `run_waiting`" in caplog.text


# --- parking by force --------------------------------------------------------------------------------


async def test_by_force_what_is_at_work_is_cut_and_follows_its_effect():
    """A run with calls at work can be parked only by force. No end is published for its interrupted calls, and finished calls are kept.

    When the run is resumed, an interrupted call is rerun if its effect allows that. Otherwise, its outcome is unknown.
    """
    ran: list[str] = []
    at_work = asyncio.Event()
    hold = True

    def begun(name: str) -> None:
        ran.append(name)
        if len(ran) == 3:
            at_work.set()

    async def work(name: str, context: ToolContext) -> str:
        context.session.dispatch(Note(name))
        begun(name)
        if hold:
            await asyncio.get_running_loop().create_future()
        return name

    @tool(effect="staged")
    async def write(context: ToolContext) -> str:
        """Write."""
        return await work("write", context)

    @tool
    async def send(context: ToolContext) -> str:
        """Send."""
        return await work("send", context)

    @tool(effect="staged")
    async def mark(context: ToolContext) -> str:
        """Add a note to the session."""
        begun("mark")
        context.session.dispatch(Note("mark"))
        return "marked"

    script = [ToolCall("mark"), [ToolCall("write"), ToolCall("send")], "done"]
    going = Going([mark, write, send], *script)
    run = going.begin()
    await at_work.wait()
    assert going.there.parking is not None
    assert not going.there.parking.park()
    assert going.there.parking.park(by_force=True)
    with pytest.raises(RunParked, match="no open question") as parked:
        await run
    assert parked.value.questions == ()
    assert [(each.tool, each.status) for each in going.ends()] == [("mark", "ok")]  # pyright: ignore[reportAttributeAccessIssue]  # all of them are calls
    assert (await going.journal.runs.get("run")).status == "parked"
    hold = False
    response = await going.resume()
    assert response.text == "done"
    assert ran == ["mark", "write", "send", "write"]
    assert {each.text for each in response.session[Note].all()} == {"mark", "write"}
    said = [each.message for each in response.session[MessageAdded].all()]
    results = [each.text for message in said if isinstance(message, ToolMessage) for each in message.results]
    assert results[:2] == ["marked", "write"]
    assert OUTCOME_UNKNOWN in results[2]


async def test_by_force_before_it_has_begun_and_while_the_model_is_asked():
    class Forced(Resting):
        def run_started(self, parking: Parking) -> None:
            super().run_started(parking)
            parking.park(by_force=True)

    going = Going([], "done")
    forced = Forced()
    with pytest.raises(RunParked):
        await going.adapter.evaluate(going.prompt, "go", run_id="run", environment=forced)
    assert going.model.requests == []
    assert (await going.resume()).text == "done"


async def test_a_handler_that_swallows_it_asks_nobody_and_commits_nothing():
    at_work = asyncio.Event()
    seen: list[str] = []

    @tool(effect="staged")
    async def stubborn(context: ToolContext) -> str:
        """Continue after a cancellation, and try to ask a person."""
        context.session.dispatch(Note("stubborn"))
        seen.append("entered")
        if len(seen) > 1:
            return "done at last"
        at_work.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            assert context.wait_for is not None
            try:
                await context.wait_for("pick", {}, Pick)
            except asyncio.CancelledError:
                seen.append("nobody is asked")
        return "went on"

    going = Going([stubborn], ToolCall("stubborn"), "done")
    run = going.begin()
    await at_work.wait()
    assert going.there.parking is not None
    going.there.parking.park(by_force=True)
    with pytest.raises(RunParked):
        await run
    assert seen == ["entered", "nobody is asked"]
    assert await going.journal.calls.load("run") == ()
    response = await going.resume()
    assert [each.text for each in response.session[Note].all()] == ["stubborn"]


async def test_by_force_nothing_is_undone():
    """Parking by force undoes nothing: an inner call's effects stay, and the resumed outer call continues with them."""
    at_work = asyncio.Event()
    world: list[str] = []

    async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
        world.append("taken back")

    @tool(effect="compensable", compensate=take_back)
    async def book() -> str:
        """Book."""
        world.append("booked")
        return "booked"

    @tool(effect="idempotent")
    async def trip(context: ToolContext) -> str:
        """Book, then wait."""
        await context.call("book")
        if not at_work.is_set():
            at_work.set()
            await asyncio.get_running_loop().create_future()
        return "done"

    going = Going([book, trip], ToolCall("trip"), "done")
    run = going.begin()
    await at_work.wait()
    assert going.there.parking is not None
    going.there.parking.park(by_force=True)
    with pytest.raises(RunParked):
        await run
    assert world == ["booked"]
    assert [type(each).__name__ for each in going.heard].count(
        "ToolStarted"
    ) == 2  # no rollback or compensation has started
    assert going.rolled_back() == []
    assert (await going.resume()).text == "done"
    assert world == ["booked"]


class Moments:
    """Counts the points that a run's tools and model pass, and parks the run at a given one."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.park: Callable[[], object] = lambda: None

    async def pass_by(self) -> None:
        for _ in range(3):
            self.count += 1
            if self.count == self.at:
                self.park()
            await asyncio.sleep(0)


@settings(max_examples=at_most(40), deadline=None)
@given(at=st.integers(1, 60), again=st.integers(1, 40))
def test_parking_by_force_at_any_two_moments_gives_the_same_result(at: int, again: int):
    """Wherever a run is parked by force, no recorded work is repeated, no repeatable work is lost, and no call ends twice."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_park_by_force_twice(Path(folder), at, again))


async def _park_by_force_twice(folder: Path, at: int, again: int) -> None:
    moments = Moments(at)
    sent: list[str] = []

    class Model(ScriptedModel):
        async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
            await moments.pass_by()
            said = sum(type(each).__name__ == "AssistantMessage" for each in request.messages)
            script = [ToolCall("mark"), "inner"] if "inner" in request.system else self.answers
            async for part in ScriptedModel([script[said]]).stream(request):
                yield part

        answers: Any = (
            [ToolCall("mark"), ToolCall("delegate"), ToolCall("thread")],
            [ToolCall("send"), ToolCall("mark")],
            "done",
        )

    @tool(effect="staged")
    async def mark(context: ToolContext) -> str:
        """Add a note with the call's id to the session."""
        await moments.pass_by()
        context.session.dispatch(Note(context.call_id))
        return "marked"

    @tool(effect="staged")
    def thread(context: ToolContext) -> str:
        """Mark, from a thread."""
        context.call("mark").wait()
        context.session.dispatch(Note(context.call_id))
        return "marked"

    @tool(effect="idempotent")
    async def delegate(context: ToolContext) -> str:
        """Let another agent leave a mark."""
        await moments.pass_by()
        return (await context.adapter.evaluate(Prompt("inner", "You are inner.", tools=[mark]), "go")).text

    @tool
    async def send(context: ToolContext) -> str:
        """Send."""
        sent.append(context.call_id)
        await moments.pass_by()
        return "sent"

    journal = SqliteJournal(folder / "runs.db", watch=None)
    going = Going([mark, thread, delegate, send], journal=journal)
    going.adapter = Adapter(Model([]), journal=journal, environment=going.there)

    def force() -> None:
        assert going.there.parking is not None
        going.there.parking.park(by_force=True)

    moments.park = force
    parks = 0
    run = going.begin()
    while True:
        try:
            response = await run
            break
        except RunParked:
            parks += 1
            moments.at = moments.count + again if parks == 1 else -1
            run = going.resume()
    journal.close()
    assert response.text == "done"
    said = [each.message for each in response.session[MessageAdded].all() if each.conversation == "root"]
    results = [each for message in said if isinstance(message, ToolMessage) for each in message.results]
    assert [each.text for each in results[:3]] == ["marked", "inner", "marked"]
    assert results[3].text == "sent" or "it is not known" in results[3].text
    assert results[4].text == "marked"
    # A call that was interrupted before its handler began is not rerun, so `sent` may be empty.
    assert len(sent) <= 1
    assert sent or results[3].text != "sent"
    notes = [each.text for each in response.session[Note].all()]
    assert len(notes) == len(set(notes)) == 5
    started = [each.call_id for each in going.heard if isinstance(each, ToolStarted)]
    ended = [each.call_id for each in going.heard if isinstance(each, ToolInvoked)]
    assert len(ended) == len(set(ended))
    assert set(ended) <= set(started)


async def test_a_session_at_rest_is_asked_once(tmp_path: Path):
    """A question that is open when its run is parked stays the same one. That it was asked is published once."""
    going = Going([ask], ToolCall("ask"), "done", journal=SqliteJournal(tmp_path / "runs.db", watch=None))
    run = going.begin()
    (await going.there.until_rest()).park()
    with pytest.raises(RunParked):
        await run
    run = going.resume()
    await going.there.until_rest()
    await going.answer()
    assert (await run).text == "done"
    asked = [each.question_id for each in going.heard if isinstance(each, QuestionAsked)]
    assert asked == ["run.1~1?1"]
    assert [each.question_id for each in (await run).session[QuestionAsked].all()] == asked
    assert isinstance((await run).session, Session)
