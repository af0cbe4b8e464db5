"""Recorded sessions: one run at a time works on a session, whichever object, process and leg it belongs to."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import (
    Adapter,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    runs,
    tool,
)
from handrail.errors import (
    DefinitionError,
    RunBusy,
    RunError,
    RunParked,
    SessionBusy,
    SessionOutdated,
    ToolError,
)
from handrail.events import MessageAdded
from handrail.journal.protocol import Journal
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ToolMessage, UserMessage
from support import journals
from support.operations import close_when
from support.parked_runs import answer_to

KINDS = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.once)]
ME = "local"


@dataclass(frozen=True)
class Booked:
    """A seat that somebody booked. There is only one."""

    who: str


@tool(effect="staged")
async def book(who: str, *, context: ToolContext) -> str:
    """Book the only seat."""
    if context.session[Booked].all():
        raise ToolError("the seat is taken")
    context.session.dispatch(Booked(who))
    return "booked"


class Pick(BaseModel):
    number: int


@tool(effect="staged")
async def ask(context: ToolContext) -> int:
    """Ask somebody for a number."""
    assert context.wait_for is not None
    return (await context.wait_for("pick", {}, Pick)).number


PROMPT = Prompt("p", "Book.", tools=[book, ask])


@pytest.fixture(params=KINDS)
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Provide a function that opens the journal once more, as another process would; in memory, it is the same object."""
    if request.param == "memory":
        memory = MemoryJournal()
        yield lambda: memory
        return
    with journals.of_kind(request.param):
        yield lambda: journals.open_at(tmp_path / "runs.db", watch=0.02)


@pytest.fixture
def journal(opening: Callable[[], Any]) -> Journal:
    return opening()


def adapter(journal: Journal, *answers: Any, **options: Any) -> Adapter:
    return Adapter(ScriptedModel([*answers]), journal=journal, **options)


def booking(journal: Journal, who: str, session: Session, run_id: str) -> Any:
    return adapter(journal, ToolCall("book", {"who": who}), "done").evaluate(
        PROMPT, "Go.", session=session, run_id=run_id
    )


async def booked(journal: Journal, session_id: str = "s") -> list[str]:
    loaded = await runs.session(journal, session_id, principal=ME)
    return [each.who for each in loaded[Booked].all()]


async def begun(journal: Journal, session: Session | None = None) -> None:
    """Record a first run of the session `s`."""
    session = session or Session(id="s")
    await adapter(journal, "hello").evaluate(PROMPT, "Hi.", session=session, run_id="first")


async def test_two_loads_of_a_session_do_not_both_book_its_only_seat(opening: Callable[[], Any]):
    """The load that comes second is refused, and sees the booking once it is loaded again."""
    one, two = opening(), opening()
    await begun(one)
    ada, bob = [await runs.session(each, "s", principal=ME) for each in (one, two)]
    await booking(one, "ada", ada, "ada's")
    with pytest.raises(SessionOutdated, match="load it again"):
        await booking(two, "bob", bob, "bob's")
    await booking(two, "bob", await runs.session(two, "s", principal=ME), "bob's")
    assert await booked(one) == ["ada"]
    assert [(row.record.id, row.status) for row in await one.runs.list(session_id="s")] == [
        ("first", "done"),
        ("ada's", "done"),
        ("bob's", "done"),
    ]


async def test_a_session_continues_in_its_own_object(journal: Journal):
    """An object that includes the last run can be used for the next one, loaded or not."""
    session = Session(id="s")
    await begun(journal, session)
    await booking(journal, "ada", session, "second")
    loaded = await runs.session(journal, "s", principal=ME)
    for number in range(2):
        await adapter(journal, "ok").evaluate(PROMPT, "Hi.", session=loaded, run_id=f"loaded {number}")
    with pytest.raises(SessionOutdated):
        await booking(journal, "bob", session, "third")
    assert await booked(journal) == ["ada"]


async def test_a_new_session_with_a_recorded_id_is_refused(journal: Journal):
    await begun(journal)
    with pytest.raises(SessionOutdated, match=r"handrail\.runs\.session\(journal, 's'"):
        await booking(journal, "ada", Session(id="s"), "second")
    assert [row.record.id for row in await journal.runs.list(session_id="s")] == ["first"]


class Held:
    """A run that is inside a call until the test lets it go on."""

    def __init__(self, journal: Journal, session: Session, run_id: str) -> None:
        self.inside, self.go = asyncio.Event(), asyncio.Event()

        @tool(effect="staged")
        async def slow(context: ToolContext) -> str:
            """Book slowly."""
            self.inside.set()
            await self.go.wait()
            context.session.dispatch(Booked("slow"))
            return "ok"

        self.prompt = Prompt("p", "Book.", tools=[book, ask, slow])
        going = adapter(journal, ToolCall("slow"), "done").evaluate(
            self.prompt, "Go.", session=session, run_id=run_id
        )
        self.task = asyncio.ensure_future(going)

    async def __aenter__(self) -> "Held":
        await asyncio.wait(
            [self.task, asyncio.ensure_future(self.inside.wait())], return_when="FIRST_COMPLETED"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        await asyncio.wait([self.task])


async def test_a_session_in_use_is_refused_with_the_run_and_process_that_has_it(opening: Callable[[], Any]):
    one, two = opening(), opening()
    await begun(one)
    async with Held(one, await runs.session(one, "s", principal=ME), "held") as held:
        loaded = await runs.session(two, "s", principal=ME)
        with pytest.raises(SessionBusy, match="or cancel it") as caught:
            await booking(two, "bob", loaded, "bob's")
        assert (caught.value.session, caught.value.run_id, caught.value.owner) == ("s", "held", one.owner)
        with pytest.raises(SessionBusy):
            await booking(one, "eve", await runs.session(one, "s", principal=ME), "eve's")
    await held.task
    with pytest.raises(SessionOutdated):  # it was loaded before the run had committed
        await booking(two, "bob", loaded, "bob's")
    assert await booked(two) == ["slow"]


async def test_a_parked_run_leaves_the_session_and_sees_what_happened_meanwhile(opening: Callable[[], Any]):
    """A run that was parked reads what other runs have committed since, so it does not book the seat again."""
    one, two = opening(), opening()
    asking = adapter(one, ToolCall("ask"), ToolCall("book", {"who": "ada"}), "done")
    with pytest.raises(RunParked) as parked:
        await asking.evaluate(
            PROMPT, "Go.", session=Session(id="s"), run_id="ada's", environment=LaterEnvironment()
        )
    await booking(two, "bob", await runs.session(two, "s", principal=ME), "bob's")
    one.questions.answer(answer_to(parked.value.questions[0], {"number": 1}))
    response = await asking.resume("ada's", PROMPT)
    assert await booked(one) == ["bob"]
    assert [each.who for each in response.session[Booked].all()] == ["bob"]
    with pytest.raises(SessionOutdated):  # it lacks what was said in the other run
        await booking(one, "eve", response.session, "eve's")


async def test_what_a_parked_run_has_committed_is_in_the_session_that_is_loaded(journal: Journal):
    asking = adapter(journal, ToolCall("book", {"who": "ada"}), ToolCall("ask"), "done")
    with pytest.raises(RunParked):
        await asking.evaluate(
            PROMPT, "Go.", session=Session(id="s"), run_id="ada's", environment=LaterEnvironment()
        )
    await booking(journal, "bob", await runs.session(journal, "s", principal=ME), "bob's")
    assert await booked(journal) == ["ada"]


async def test_a_session_continues_in_the_object_of_a_resumed_run(journal: Journal):
    asking = adapter(journal, ToolCall("ask"), ToolCall("book", {"who": "ada"}), "done")
    with pytest.raises(RunParked) as parked:
        await asking.evaluate(
            PROMPT, "Go.", session=Session(id="s"), run_id="ada's", environment=LaterEnvironment()
        )
    journal.questions.answer(answer_to(parked.value.questions[0], {"number": 1}))
    response = await asking.resume("ada's", PROMPT)
    await booking(journal, "bob", response.session, "bob's")
    again = await asking.resume("ada's", PROMPT)  # an older run, so the session is as it was then
    with pytest.raises(SessionOutdated):
        await booking(journal, "eve", again.session, "eve's")
    assert await booked(journal) == ["ada"]


async def test_a_parked_run_is_not_resumed_while_another_works_on_its_session(opening: Callable[[], Any]):
    one, two = opening(), opening()
    asking = adapter(one, ToolCall("ask"), "done")
    with pytest.raises(RunParked) as parked:
        await asking.evaluate(
            PROMPT, "Go.", session=Session(id="s"), run_id="asks", environment=LaterEnvironment()
        )
    one.questions.answer(answer_to(parked.value.questions[0], {"number": 1}))
    async with Held(two, await runs.session(two, "s", principal=ME), "held"):
        with pytest.raises(SessionBusy):
            await asking.resume("asks", PROMPT)
        row = await one.runs.get("asks")
        assert (row.status, row.owner) == ("parked", "")
    assert (await asking.resume("asks", PROMPT)).text == "done"


async def test_a_parked_run_can_be_cancelled_while_another_works_on_its_session(opening: Callable[[], Any]):
    one, two = opening(), opening()
    with pytest.raises(RunParked):
        await adapter(one, ToolCall("ask")).evaluate(
            PROMPT, "Go.", session=Session(id="s"), run_id="asks", environment=LaterEnvironment()
        )
    async with Held(two, await runs.session(two, "s", principal=ME), "held") as held:
        assert (await runs.cancel(one, "asks")).status == "cancelled"
    assert held.task.result().text == "done"


async def test_a_call_is_not_undone_while_a_run_works_on_its_session(opening: Callable[[], Any]):
    one, two = opening(), opening()
    await booking(one, "ada", Session(id="s"), "ada's")
    (unit,) = await one.calls.load("ada's")
    session = await runs.session(one, "s", principal=ME)
    async with Held(one, session, "held"):
        with pytest.raises(RunBusy):
            await runs.undo(two, "ada's", unit.call_id)


async def test_an_undo_leaves_sessions_in_memory_usable(journal: Journal):
    """A session in memory drops the undone call when it is next evaluated, as ever."""
    session = Session(id="s")
    await booking(journal, "ada", session, "ada's")
    (unit,) = await journal.calls.load("ada's")
    before = await journal.runs.get("ada's")
    await runs.undo(journal, "ada's", unit.call_id)
    after = await journal.runs.get("ada's")
    assert (after.status, after.legs, after.owner) == (before.status, before.legs, "")
    await booking(journal, "bob", session, "bob's")
    assert await booked(journal) == ["bob"]


async def test_sessions_of_different_principals_share_nothing_but_their_id(journal: Journal):
    """Neither what one principal has committed nor what was said is in the other's session."""
    for who in ("ada", "bob"):
        await booking(journal, who, Session(id="s", principal=who), f"{who}'s")
    for who in ("ada", "bob"):
        loaded = await runs.session(journal, "s", principal=who)
        assert [each.who for each in loaded[Booked].all()] == [who]
        assert {each.run_id for each in loaded[MessageAdded].all()} == {f"{who}'s"}


async def test_an_undo_concerns_the_session_of_its_principal_only(journal: Journal):
    """It is not refused because of what somebody else has committed since, and undoes nothing of theirs, even if call ids are equal.

    Their model is not told about it.
    """
    sessions = {who: Session(id="s", principal=who) for who in ("ada", "bob")}
    for who, session in sessions.items():
        await booking(journal, who, session, f"{who}'s")
    mine, theirs = [(await journal.calls.load(f"{who}'s"))[0] for who in ("ada", "bob")]
    assert mine.call_id == theirs.call_id
    assert await runs.undo_problems(journal, "s", principal="ada") == {}
    await runs.undo(journal, "ada's", mine.call_id, session=sessions["ada"])
    assert sessions["ada"][Booked].all() == ()
    assert (await runs.session(journal, "s", principal="ada"))[Booked].all() == ()
    loaded = await runs.session(journal, "s", principal="bob")
    assert [each.who for each in loaded[Booked].all()] == ["bob"]
    model = ScriptedModel(["ok"])
    await Adapter(model, journal=journal).evaluate(PROMPT, "And?", session=loaded)
    assert not [each for each in model.requests[0].messages if "undone" in each.text]


async def test_a_conversation_continues_by_its_id(opening: Callable[[], Any]):
    """A run with the id of a session begins it, and in another process continues it with everything that was said and committed."""
    one, two = opening(), opening()
    first = await adapter(one, ToolCall("book", {"who": "ada"}), "done").evaluate(PROMPT, "Go.", session="s")
    second = await adapter(two, "ok").evaluate(PROMPT, "And?", session="s")
    assert [message.text for message in second.messages if not isinstance(message, ToolMessage)] == [
        "Go.", "", "done", "And?", "ok",
    ]  # fmt: skip
    assert second.messages[: len(first.messages)] == first.messages
    assert [each.who for each in second.session[Booked].all()] == ["ada"]
    streamed = adapter(one, "so").stream(PROMPT, "So?", session="s")
    assert [event.message.text async for event in streamed if isinstance(event, MessageAdded)] == [
        "So?",
        "so",
    ]


async def test_a_conversation_with_an_unfinished_run_is_not_continued_by_its_id(journal: Journal):
    """The model would not know what was said in a run that is parked or was interrupted. The error names the run and both ways on."""
    with pytest.raises(RunParked) as parked:
        await adapter(journal, ToolCall("ask"), environment=LaterEnvironment()).evaluate(
            PROMPT, "Go.", session="s", run_id="first"
        )
    model = ScriptedModel(["ok", "so"])
    with pytest.raises(RunError, match=r"waits for an answer.* `resume\('first'\)`, or cancel it") as refused:
        await Adapter(model, journal=journal).evaluate(PROMPT, "And?", session="s")
    assert (refused.value.run_id, model.requests) == ("first", [])
    journal.questions.answer(answer_to(parked.value.questions[0], {"number": 1}))
    await adapter(journal, "done", environment=LaterEnvironment()).resume("first", PROMPT)
    response = await Adapter(model, journal=journal).evaluate(PROMPT, "And?", session="s")
    assert [message.text for message in response.messages if isinstance(message, UserMessage)] == [
        "Go.",
        "And?",
    ]


async def test_a_conversation_whose_run_was_interrupted_goes_on_once_that_is_cancelled(journal: Journal):
    """A process that ended during a run leaves it to be resumed or cancelled."""
    waiting = asyncio.Event()

    @tool(effect="staged")
    async def hang() -> None:
        """Wait for ever."""
        waiting.set()
        await asyncio.Event().wait()

    left = adapter(journal, ToolCall("hang")).evaluate(
        Prompt("p", "Book.", tools=[hang]), "Go.", session="s", run_id="first"
    )
    await close_when(waiting, left)
    await journal.runs.leave("first", "running")
    with pytest.raises(RunError, match="was interrupted"):
        await adapter(journal, "ok").evaluate(PROMPT, "And?", session="s")
    await runs.cancel(journal, "first")
    response = await adapter(journal, "ok").evaluate(PROMPT, "And?", session="s")
    said = [message.text for message in response.messages if not isinstance(message, ToolMessage)]
    assert said == ["Go.", "", "And?", "ok"]


async def test_an_id_without_a_journal_is_refused():
    """Without a journal there is nothing to continue, and the next run with the same id would silently begin anew."""
    with pytest.raises(DefinitionError, match="journal"):
        await Adapter(ScriptedModel(["hello"])).evaluate(PROMPT, "Hi.", session="s")


async def test_a_new_session_with_a_recorded_id_is_told_both_ways(journal: Journal):
    """It is neither continued nor begun anew unasked, and the error names how to do each."""
    await begun(journal)
    with pytest.raises(SessionOutdated) as refused:
        await booking(journal, "ada", Session(id="s"), "ada's")
    assert "session='s'" in str(refused.value)
    assert "another id" in str(refused.value)
