"""Run ownership: leases, time limits, and the order of a session's runs."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import (
    Adapter,
    Budget,
    Deadline,
    LaterEnvironment,
    PostgresJournal,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.concurrency.cancellation import finish
from handrail.errors import DefinitionError, JournalError, PromptEvaluationError, RunBusy, RunError, RunParked
from handrail.journal.protocol import Journal
from handrail.journal.sqlite import MemoryJournal
from handrail.run import request as attempts
from handrail.runs import cancel
from handrail.sections.files import FileTools
from support import PATIENCE, journals
from support.parked_runs import answer_to


class Pick(BaseModel):
    number: int


@tool(effect="staged")
async def ask(context: ToolContext) -> int:
    """Ask somebody for a number."""
    assert context.wait_for is not None
    return (await context.wait_for("pick", {}, Pick)).number


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.once)])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    if request.param == "memory":
        yield MemoryJournal()
        return
    with journals.of_kind(request.param):
        yield journals.open_at(tmp_path / "runs.db", watch=0.02)


async def as_it_stands(journal: Journal) -> tuple[object, ...]:
    row = await journal.runs.get("run")
    return row.status, row.owner, row.leased_until, row.outcome, row.questions, row.stopping


@pytest.mark.parametrize(("is_lost", "status"), [(True, "running"), (False, "failed")])
async def test_a_run_does_not_end_because_its_journal_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool, status: str
):
    """A run whose journal can't be reached stays `running` and can be resumed. Any other journal error fails the run."""
    journal = MemoryJournal()
    add, model = journal.calls.note, ScriptedModel(["Hello."])

    async def fail(*_: Any) -> None:
        raise JournalError("journal", "it can't be used", "Wait.", is_lost=is_lost)

    monkeypatch.setattr(journal.calls, "note", fail)
    adapter, prompt = Adapter(model, journal=journal), Prompt("p", "Help.")
    with pytest.raises(JournalError):
        await adapter.evaluate(prompt, "Hi.", run_id="run")
    assert (await journal.runs.get("run")).status == status
    monkeypatch.setattr(journal.calls, "note", add)
    if is_lost:
        assert (
            await Adapter(ScriptedModel(["Hello."]), journal=journal).resume("run", prompt)
        ).text == "Hello."


async def test_an_active_run_is_not_resumed_by_its_own_process(journal: Journal):
    """A run that is active in this process can't be resumed before it has ended."""
    at_work, go = asyncio.Event(), asyncio.Event()
    entered: list[str] = []

    @tool
    async def pay() -> str:
        """Pay."""
        entered.append("pay")
        at_work.set()
        await go.wait()
        return "paid"

    prompt = Prompt("p", "Do.", tools=[pay])
    adapter = Adapter(ScriptedModel([ToolCall("pay"), "done"]), journal=journal)
    running = asyncio.ensure_future(adapter.evaluate(prompt, "go", run_id="run"))
    await at_work.wait()
    with pytest.raises(RunBusy):
        await adapter.resume("run", prompt)
    go.set()
    assert (await running).text == "done"
    assert entered == ["pay"]
    assert (await adapter.resume("run", prompt)).text == "done"


async def test_of_two_concurrent_resumes_one_wins(journal: Journal):
    """Of two concurrent resumes, one continues the run, and the other raises `RunBusy`."""
    prompt = Prompt("p", "Do.", tools=[ask])
    script = ScriptedModel([ToolCall("ask"), "done"])
    adapter = Adapter(script, journal=journal, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt, "go", run_id="run")
    journal.questions.answer(answer_to(parked.value.questions[0]))

    async def resume() -> Any:
        return await adapter.resume("run", prompt)

    ends = await asyncio.gather(resume(), resume(), return_exceptions=True)
    assert sorted(type(each).__name__ for each in ends) == ["PromptResponse", "RunBusy"]
    assert len(script.requests) == 2


@dataclass(frozen=True)
class Noted:
    text: str


@pytest.mark.parametrize("is_passed", [False, True])
async def test_the_state_from_before_the_first_run_is_restored(journal: Journal, is_passed: bool):
    """The state that a session had before its first run is restored on resume, even if `resume` gets an empty session."""
    prompt = Prompt("p", "Do.", tools=[ask])
    script = ScriptedModel([ToolCall("ask"), "done"])
    adapter = Adapter(script, journal=journal, environment=LaterEnvironment())
    session = Session(id="s")
    session.dispatch(Noted("before"))
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt, "go", run_id="run", session=session)
    journal.questions.answer(answer_to(parked.value.questions[0]))
    response = await adapter.resume("run", prompt, **({"session": Session(id="s")} if is_passed else {}))
    assert [each.text for each in response.session[Noted].all()] == ["before"]


async def test_a_resume_that_can_not_begin_leaves_the_run_as_it_was(journal: Journal):
    """If a resume fails to start, the run stays parked and unowned, and can still be cancelled."""
    prompt = Prompt("p", "Do.", tools=[ask])
    adapter = Adapter(
        ScriptedModel([ToolCall("ask"), "done"]), journal=journal, environment=LaterEnvironment()
    )
    with pytest.raises(RunParked):
        await adapter.evaluate(prompt, "go", run_id="run", session=Session(id="s"))
    before = await as_it_stands(journal)
    with pytest.raises(RunError, match="is not empty or has another id"):
        await adapter.resume("run", prompt, session=Session(id="another"))
    assert await as_it_stands(journal) == before

    with pytest.raises(DefinitionError, match="has no files"):
        await adapter.resume("run", Prompt("p", ["Do.", FileTools()], tools=[ask]))
    assert await as_it_stands(journal) == before
    assert (await cancel(journal, "run")).status == "cancelled"


async def test_a_cancel_that_can_not_be_done_leaves_the_run_as_it_was(journal: Journal):
    """A run can't be cancelled while an earlier run of its session is unfinished, and the refusal changes nothing."""
    prompt = Prompt("p", "Do.", tools=[ask])
    script = ScriptedModel([ToolCall("ask"), ToolCall("ask")])
    adapter = Adapter(script, journal=journal, environment=LaterEnvironment())
    session = Session()
    for name in ("first", "run"):
        with pytest.raises(RunParked):
            await adapter.evaluate(prompt, "go", run_id=name, session=session)
    before = await as_it_stands(journal)
    with pytest.raises(RunError, match="'first' of the same session"):
        await cancel(journal, "run")
    assert await as_it_stands(journal) == before
    assert (await cancel(journal, "first")).status == "cancelled"
    assert (await cancel(journal, "run")).status == "cancelled"


class Shifted:
    """A wall clock that can be set, as a computer's can."""

    def __init__(self) -> None:
        self.by = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.by

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


async def test_what_people_take_does_not_count_however_often_a_run_is_parked(tmp_path: Path):
    """If a deadline pauses for people, the time that they take does not count, however often the run is parked."""
    clock = Shifted()
    journal = SqliteJournal(tmp_path / "runs.db", clock=clock)
    prompt = Prompt("p", "Do.", tools=[ask])
    script = ScriptedModel([ToolCall("ask"), ToolCall("ask"), ToolCall("ask"), "done"])
    adapter = Adapter(script, journal=journal, environment=LaterEnvironment(), clock=clock)
    deadline = Deadline.after(3600, clock=clock, pauses_for_people=True)
    going: Any = adapter.evaluate(prompt, "go", run_id="run", deadline=deadline)
    for _ in range(3):
        with pytest.raises(RunParked) as parked:
            await going
        clock.by += timedelta(days=3)
        journal.questions.answer(answer_to(parked.value.questions[0]))
        going = adapter.resume("run", prompt)
    assert (await going).text == "done"


async def test_a_resumed_run_keeps_its_budget_and_its_deadline(tmp_path: Path):
    """A resumed run fails if it exceeds the budget or the deadline that it began with."""
    clock = Shifted()
    journal = SqliteJournal(tmp_path / "runs.db", clock=clock)
    prompt = Prompt("p", "Do.", tools=[ask])
    limits: dict[str, Any] = {"budget": Budget(requests=1), "deadline": Deadline.after(3600, clock=clock)}
    for name, limit in limits.items():
        script = ScriptedModel([ToolCall("ask"), "done"])
        adapter = Adapter(script, journal=journal, environment=LaterEnvironment(), clock=clock)
        with pytest.raises(RunParked) as parked:
            await adapter.evaluate(prompt, "go", run_id=name, **{name: limit})
        clock.by += timedelta(hours=2)
        journal.questions.answer(answer_to(parked.value.questions[0]))
        with pytest.raises(PromptEvaluationError, match=name):
            await adapter.resume(name, prompt)
        assert len(script.requests) == 1


async def lease_end(journal: Journal) -> float:
    if isinstance(journal, PostgresJournal):
        query = "SELECT leased_until FROM leases WHERE owner = ?"
        return (await journal._database.select(query, journal.owner))[0][0]
    return (await journal.runs.get("run")).leased_until


async def test_the_lease_of_a_run_at_work_is_renewed(journal: Journal, monkeypatch: pytest.MonkeyPatch):
    """While a process works on a run, it renews the lease of the run."""
    monkeypatch.setattr(journal, "lease", 0.1)

    @tool(effect="staged")
    async def wait_for_the_lease() -> str:
        """Wait until the lease has been renewed."""
        if isinstance(journal, PostgresJournal):
            journal._database.leases.renewed -= 10  # type: ignore[attr-defined]  # a new lease is not renewed
        before = await lease_end(journal)
        while await lease_end(journal) <= before:
            await asyncio.sleep(0.01)
        return "renewed"

    prompt = Prompt("p", "Do.", tools=[wait_for_the_lease])
    adapter = Adapter(ScriptedModel([ToolCall("wait_for_the_lease"), "done"]), journal=journal)
    async with asyncio.timeout(PATIENCE):
        assert (await adapter.evaluate(prompt, "go", run_id="run")).text == "done"


async def test_runs_of_a_session_are_in_order_although_the_clock_was_set_back(journal: Any):
    """A session's second run builds on its first, even if the wall clock was set back in between."""
    clock = Shifted()
    prompt = Prompt("p", "Do.", tools=[ask])
    script = ScriptedModel(["first", ToolCall("ask"), "second"])
    adapter = Adapter(script, journal=journal, environment=LaterEnvironment(), clock=clock)
    session = Session()
    await adapter.evaluate(prompt, "one", session=session, run_id="a")
    clock.by -= timedelta(hours=1)
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt, "two", session=session, run_id="b")
    assert [row.record.id for row in await journal.runs.list(session_id=session.id)] == ["a", "b"]
    journal.questions.answer(answer_to(parked.value.questions[0]))
    await adapter.resume("b", prompt)
    assert [len(each.messages) for each in script.requests] == [1, 3, 5]


async def test_one_of_two_answers_is_enough_for_a_handler_that_takes_the_first(tmp_path: Path):
    """A handler that takes the first of two answers continues with it, and its run is not parked for the other.

    If a handler needs both answers, its run stays parked until it has them.
    """
    handed: list[int] = []

    @tool(effect="staged")
    async def first_of_two(context: ToolContext) -> str:
        """Ask two questions and take the first answer."""
        assert context.wait_for is not None
        asked = [asyncio.ensure_future(context.wait_for(kind, {}, Pick)) for kind in ("a", "b")]
        try:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        handed.extend(each.result().number for each in done)
        return "enough"

    @tool(effect="staged")
    async def both(context: ToolContext) -> str:
        """Ask two questions and take both answers."""
        assert context.wait_for is not None
        picked = await asyncio.gather(*(context.wait_for(kind, {}, Pick) for kind in ("a", "b")))
        return f"{[each.number for each in picked]}"

    journal = SqliteJournal(tmp_path / "runs.db", watch=0.02)
    prompt = Prompt("p", "Do.", tools=[first_of_two, both])
    script = ScriptedModel([ToolCall("first_of_two"), ToolCall("both"), "done"])
    adapter = Adapter(script, journal=journal, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt, "go", run_id="run")
    journal.questions.answer(answer_to(parked.value.questions[1], {"number": 7}))
    with pytest.raises(RunParked) as parked:
        await adapter.resume("run", prompt)
    assert handed == [7]
    of_both = [each for each in parked.value.questions if each.asked_by == ("both",)]
    assert [each.name for each in of_both] == ["a", "b"]
    journal.questions.answer(answer_to(of_both[1], {"number": 2}))
    with pytest.raises(RunParked):  # `both` still needs the other answer
        await asyncio.wait_for(adapter.resume("run", prompt), PATIENCE)
    journal.questions.answer(answer_to(of_both[0], {"number": 1}))
    assert (await adapter.resume("run", prompt)).text == "done"
    assert script.requests[-1].messages[-1].results[0].text == "[1, 2]"  # type: ignore[union-attr]


@pytest.mark.parametrize("has_deadline", [False, True])
async def test_a_cancellation_while_an_answer_is_recorded_is_not_lost(
    journal: Journal, has_deadline: bool, monkeypatch: pytest.MonkeyPatch
):
    """A run that is cancelled while a model's answer is recorded ends as cancelled, and the answer's call does not begin."""
    entered: list[str] = []

    @tool(effect="read")
    async def look() -> str:
        """Look."""
        entered.append("look")
        return "seen"

    async def cancelled_meanwhile(work: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await finish(work)

    monkeypatch.setattr(attempts, "finish", cancelled_meanwhile)
    deadline = Deadline(datetime.now(UTC) + timedelta(days=1)) if has_deadline else None
    adapter = Adapter(ScriptedModel([ToolCall("look"), "done"]), journal=journal)
    running = asyncio.ensure_future(
        adapter.evaluate(Prompt("p", "Do.", tools=[look]), "go", run_id="run", deadline=deadline)
    )
    with pytest.raises(asyncio.CancelledError):
        await running
    assert entered == []
    assert (await journal.runs.get("run")).status == "cancelled"
