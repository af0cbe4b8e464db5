"""Orders to a run: it pauses, wraps up or stops before its next step, also in another process, and nothing that was said is lost."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    Deadline,
    LaterEnvironment,
    MemoryJournal,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    tool,
)
from handrail.clock import SYSTEM_CLOCK, Clock, SystemClock
from handrail.errors import AnswerRefused, MessageRefused, PromptEvaluationError, RunParked
from handrail.journal.any_journal import AnyJournal
from handrail.journal.protocol import Journal
from handrail.messages import ModelRequest, ToolMessage, Traits, UserMessage
from handrail.models.scripted import Reply
from handrail.question import Answer
from handrail.run.record.notices import WRAP_UP
from handrail.run.response import ANSWER_TOOL
from handrail.runs import cancel, fork, go_on, messages, pause, replay, send, show, stop, wrap_up


def said(request: ModelRequest) -> list[str]:
    """Return what the user has said so far."""
    return [message.text for message in request.messages if isinstance(message, UserMessage)]


async def send_for_later(journal: Journal, run_id: str, text: str) -> None:
    await send(journal, run_id, text, when="afterwards")


class Worker:
    """An agent whose tool `work` gives its own run orders, and runs `then` meanwhile."""

    def __init__(
        self,
        script: Any,
        *orders: Any,
        journal: AnyJournal | None = None,
        clock: Clock = SYSTEM_CLOCK,
        **options: Any,
    ) -> None:
        self.model = script if isinstance(script, ScriptedModel) else ScriptedModel(script)
        self.journal: AnyJournal = journal or MemoryJournal()
        self.orders = list(orders)
        self.worked = 0

        @tool(effect="pure")
        async def work() -> str:
            """Work."""
            self.worked += 1
            orders, self.orders = self.orders, []
            for order, *text in orders:
                await order(self.journal, "r", *text)
            return "worked"

        self.agent = Agent(Adapter(self.model, clock=clock), "Help.", tools=[work], **options)

    def begin(self, **options: Any) -> Any:
        return self.agent.run("go", run_id="r", journal=self.journal, **options)

    def resume(self, **options: Any) -> Any:
        return self.agent.adapter.resume("r", self.agent.prompt, journal=self.journal, **options)

    async def until_paused(self) -> None:
        """Wait until the run asks whether to go on."""
        while not await self.journal.questions.open("r"):
            await asyncio.sleep(0)


async def test_a_run_pauses_until_it_is_continued() -> None:
    worker = Worker([ToolCall("work", {}), "done"], [pause, "look first"])
    running = asyncio.ensure_future(_finished(worker.begin()))
    await worker.until_paused()
    [question] = await worker.journal.questions.open("r")
    assert (question.kind, question.id, question.call_id) == ("pause", "r#2?pause-1", "")
    assert len(worker.model.requests) == 1
    await send(worker.journal, "r", "in metres")
    await go_on(worker.journal, "r", "and go on")
    assert (await running).text == "done"
    assert said(worker.model.requests[1]) == ["go", "look first", "in metres\n\nand go on"]


async def _finished(operation: Any) -> Any:
    return await operation


async def test_a_paused_run_is_parked_and_goes_on_in_another_process(tmp_path: Any) -> None:
    """A run that pauses twice before one answer is parked each time. Each message is told once, and a replay tells the same."""
    path = str(tmp_path / "runs.db")
    worker = Worker(
        [ToolCall("work", {}), "done"], [pause, "one"], [send, "two"], journal=SqliteJournal(path)
    )
    with pytest.raises(RunParked) as parked:
        await worker.begin(environment=LaterEnvironment())
    assert [each.kind for each in parked.value.questions] == ["pause"]
    worker.journal.close()
    worker.journal = SqliteJournal(path)
    await pause(worker.journal, "r", "three")
    await go_on(worker.journal, "r")  # the second pause is taken back, and the first is over
    await pause(worker.journal, "r", "four")
    with pytest.raises(RunParked) as parked:
        await worker.resume(environment=LaterEnvironment())
    assert [each.id for each in parked.value.questions] == ["r#2?pause-2"]
    await go_on(worker.journal, "r")
    response = await worker.resume(environment=LaterEnvironment())
    assert response.text == "done"
    assert said(worker.model.requests[1]) == ["go", "one", "two\n\nfour"]
    assert worker.worked == 1
    assert [(each.text, each.state) for each in await messages(worker.journal, "r")] == [
        ("one", "told"),
        ("two", "told"),
        ("three", "withdrawn"),
        ("four", "told"),
    ]
    assert not await replay(worker.journal, "r", worker.agent.prompt)
    forked = await fork(worker.journal, "r", 1)
    worker.model = worker.agent.adapter.model = ScriptedModel(["again"])  # type: ignore[assignment]
    again = await worker.agent.adapter.resume(forked.record.id, worker.agent.prompt, journal=worker.journal)
    assert [each.text for each in again.messages if isinstance(each, UserMessage)] == [
        "go",
        "one",
        "two\n\nfour",
    ]  # it was said before the answer at which the fork begins
    worker.journal.close()


async def test_a_run_stops_after_its_step() -> None:
    """A stopped run has the results of its step, and its session's next run reads what it was not told."""
    worker = Worker(
        [Reply("working", calls=[ToolCall("work", {})]), "next"],
        [stop, "enough"],
        [
            send,
            "and rest",
        ],
    )
    session = Session(id="s")
    response = await worker.begin(session=session)
    assert (response.text, response.output, response.stop_reason) == ("working", None, "stopped")
    assert isinstance(response.messages[-3], ToolMessage)
    assert (await show(worker.journal, "r")).row.status == "done"
    again = await worker.resume()
    assert (again.text, again.stop_reason, again.messages) == ("working", "stopped", response.messages)
    await worker.agent.run("go", journal=worker.journal, session=session)
    assert said(worker.model.requests[1]) == ["go", "enough", "and rest", "go"]


@pytest.mark.parametrize("order", [stop, wrap_up])
async def test_an_order_ends_a_pause(order: Any) -> None:
    worker = Worker([ToolCall("work", {}), "that is all"], [pause])
    with pytest.raises(RunParked):
        await worker.begin(environment=LaterEnvironment())
    await order(worker.journal, "r", "enough")
    response = await worker.resume(environment=LaterEnvironment())
    expected = ("", "stopped") if order is stop else ("that is all", "wrapped up")
    assert (response.text, response.stop_reason) == expected


async def test_whoever_declines_to_continue_a_run_stops_it() -> None:
    worker = Worker([ToolCall("work", {})], [pause])
    with pytest.raises(RunParked) as parked:
        await worker.begin(environment=LaterEnvironment())
    [question] = parked.value.questions
    worker.journal.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by="local", outcome="declined")
    )
    assert (await worker.resume(environment=LaterEnvironment())).stop_reason == "stopped"


async def test_a_run_that_wraps_up_makes_no_more_calls() -> None:
    worker = Worker(
        [ToolCall("work", {}), Reply("so far", calls=[ToolCall("work", {})]), "never"],
        [wrap_up, "it is late"],
        [send_for_later, "x"],
    )
    response = await worker.begin()
    assert (response.text, response.stop_reason) == ("so far", "wrapped up")
    assert worker.worked == 1
    assert said(worker.model.requests[1]) == ["go", f"it is late\n\n{WRAP_UP}"]
    assert len(worker.model.requests) == 2
    [result] = [each for each in response.messages if isinstance(each, ToolMessage)][-1].results
    assert result.failed
    assert "wrapped up" in result.text
    assert response.messages[-1] == UserMessage("x", midway=True)  # left to the next run


@pytest.mark.parametrize("by_call", [True, False])
async def test_a_run_that_wraps_up_can_still_give_its_answer(by_call: bool) -> None:
    answer = ToolCall(ANSWER_TOOL, {"value": 7}) if by_call else '{"value": 7}'
    script = ScriptedModel(
        [ToolCall("work", {}), ToolCall("work", {}), answer], traits=Traits(native_output=not by_call)
    )
    worker = Worker(script, [wrap_up], output=int)
    response = await worker.begin()
    assert (response.output, response.stop_reason) == (7, "wrapped up")
    assert worker.worked == 1


async def test_an_order_that_comes_when_the_model_is_done_changes_nothing() -> None:
    """A run that is done is not paused, not stopped and not asked again; but what was said with the order is told."""

    async def script(request: ModelRequest) -> str:
        if len(worker.model.requests) == 1:
            for order in (pause, stop, wrap_up):
                await order(worker.journal, "r")
            await pause(worker.journal, "r", "one more thing")
            return "done"
        return "done again"

    worker = Worker(script)
    running = asyncio.ensure_future(_finished(worker.begin()))
    await worker.until_paused()  # its model has more to do, so it pauses
    await go_on(worker.journal, "r")
    response = await running
    assert (response.text, response.stop_reason) == ("done again", "done")
    assert said(worker.model.requests[1]) == ["go", "one more thing"]


async def test_a_pause_can_be_cancelled_and_its_run_too() -> None:
    worker = Worker([ToolCall("work", {}), "done"], [pause], [go_on])
    assert (await worker.begin()).text == "done"
    worker = Worker([ToolCall("work", {}), "done"], [pause])
    with pytest.raises(RunParked):
        await worker.begin(environment=LaterEnvironment())
    assert (await cancel(worker.journal, "r")).status == "cancelled"
    assert not await worker.journal.questions.open("r")


async def test_what_is_refused() -> None:
    worker = Worker([ToolCall("work", {}), "done"])
    await worker.begin()
    with pytest.raises(MessageRefused, match=r"not paused.*nothing to continue"):
        await go_on(worker.journal, "r")
    with pytest.raises(MessageRefused, match=r"the run is over"):
        await pause(worker.journal, "r")
    with pytest.raises(MessageRefused, match=r"nested in another run"):
        await stop(worker.journal, "r.1~1/1")
    worker = Worker([ToolCall("work", {}), "done"], [pause])
    with pytest.raises(RunParked):
        await worker.begin(environment=LaterEnvironment())
    for order in (pause, stop, wrap_up):
        with pytest.raises(MessageRefused, match=r"'eve' may not"):
            await order(worker.journal, "r", by="eve")
    with pytest.raises(AnswerRefused, match=r"'eve' may not"):
        await go_on(worker.journal, "r", by="eve")


class Shifted(SystemClock):
    """A clock that a test can set forward."""

    by = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.by


@pytest.mark.parametrize("pauses", [True, False])
async def test_a_deadline_of_a_paused_run(pauses: bool) -> None:
    """A deadline that pauses for people pauses with the run. Another one ends the run once it has passed."""
    clock = Shifted()
    worker = Worker([ToolCall("work", {}), "done"], [pause], journal=MemoryJournal(clock), clock=clock)
    deadline = Deadline.after(3600, clock=clock, pauses_for_people=pauses)
    options: Any = {"environment": LaterEnvironment()}
    with pytest.raises(RunParked) as parked:
        await worker.begin(deadline=deadline, **options)
    assert (parked.value.due_at is None) == pauses
    clock.by = timedelta(hours=2)
    if pauses:
        await go_on(worker.journal, "r")
        assert (await worker.resume(**options)).text == "done"
    else:
        with pytest.raises(PromptEvaluationError, match="deadline"):
            await worker.resume(**options)


async def test_a_deadline_ends_a_run_that_is_paused_in_memory() -> None:
    worker = Worker([ToolCall("work", {}), "done"], [pause])
    with pytest.raises(PromptEvaluationError, match="deadline"):
        await worker.begin(deadline=Deadline.after(0.1))
    assert not await worker.journal.questions.open("r")
