"""Over all legs of a run, a call has one start and one end, and every other fact about it is published once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import (
    Adapter,
    CapabilityPolicy,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    gather,
    runs,
    tool,
)
from handrail.errors import RunParked
from handrail.events import (
    ApprovalDecided,
    ApprovalRequested,
    Fact,
    HandoffAnswered,
    HandoffParked,
    MessageAdded,
    ModelResponded,
    PromptExecuted,
    QuestionAnswered,
    QuestionAsked,
    ToolInvoked,
    ToolResumed,
    ToolStarted,
)
from handrail.question import Answer, Question
from handrail.session import Dispatcher
from support.cards import card_game
from support.parked_runs import Resting, answer_to


class Pick(BaseModel):
    number: int


@tool(effect="staged", capabilities={"fs.write"})
async def ask_twice(context: ToolContext) -> str:
    """Ask two questions at once, and a third one after their answers."""
    assert context.wait_for is not None
    one, two = await gather(context.wait_for("one", {}, Pick), context.wait_for("two", {}, Pick))
    permission = await context.request_permission("deploy")
    return f"{one.number} {two.number} {permission.approved}"


@tool(effect="staged")
async def note(context: ToolContext) -> str:
    """Do nothing."""
    return "noted"


INNER = Prompt(
    "inner",
    "Do the rest.",
    tools=[ask_twice, note, card_game()],
    policies=[CapabilityPolicy({"fs.write": "ask"})],
)


@tool(effect="staged")
async def delegate(context: ToolContext) -> str:
    """Run a prompt in a nested run."""
    await context.call("note")
    return (await context.adapter.evaluate(INNER, "go")).text


OUTER = Prompt("outer", "Delegate.", tools=[delegate, note])
SCRIPT = (
    [ToolCall("note"), ToolCall("delegate")],
    [ToolCall("ask_twice"), ToolCall("note")],
    ToolCall("pick_card", {"cards": 3}),
    "inner done",
    "done",
)
ONCE = (
    *(ToolStarted, ToolInvoked, QuestionAsked, QuestionAnswered, ApprovalRequested, ApprovalDecided),
    *(HandoffParked, HandoffAnswered, PromptExecuted, ModelResponded, MessageAdded),
)


def reply(question: Question) -> Answer:
    if question.kind == "approval":
        return answer_to(question, {"approved": True})
    return answer_to(question, {"index": 1} if question.kind == "handoff" else {"number": 7})


class Present(LaterEnvironment):
    """An environment in which somebody answers at once."""

    async def ask(self, question: Question, /) -> Answer:
        return reply(question)


def about(event: Any) -> tuple[str, ...]:
    """Return what identifies a fact in its run."""
    id = getattr(event, "question_id", "") or getattr(event, "call_id", "")
    if isinstance(event, MessageAdded):
        id = f"{event.conversation} {type(event.message).__name__} {len(str(event.message))}"
    return (
        type(event).__name__,
        event.run_id if isinstance(event, MessageAdded) else event.run_context.run_id,
        id,
    )


def once(events: list[Any]) -> Counter[tuple[str, ...]]:
    return Counter(about(event) for event in events if isinstance(event, ONCE))


def logged(session: Session) -> dict[str, Counter[tuple[str, ...]]]:
    """Return the facts about calls and answers in a session's logs, by type."""
    calls = [kind for kind in ONCE if kind not in (MessageAdded, PromptExecuted, ToolStarted)]
    return {kind.__name__: Counter(map(about, session[kind].all())) for kind in calls}


class Leg:
    """One process that executes the run for a while, and hears its events."""

    def __init__(self, path: Path, model: ScriptedModel, environment: Any = None) -> None:
        self.journal = SqliteJournal(path, watch=None)
        self.heard: list[Any] = []
        self.bus = Dispatcher()
        self.bus.subscribe(Fact, self.heard.append)
        self.adapter = Adapter(model, journal=self.journal, environment=environment or LaterEnvironment())

    async def begin(self, prompt: Prompt[Any]) -> Session:
        session = Session(id="s")
        return (
            await self.adapter.evaluate(prompt, "go", run_id="run", session=session, bus=self.bus)
        ).session

    async def resume(self, prompt: Prompt[Any]) -> Session:
        return (await self.adapter.resume("run", prompt, bus=self.bus)).session

    async def answer_first(self, parked: RunParked) -> None:
        """Answer one of the open questions, so that the others stay open in the next leg."""
        self.journal.questions.answer(reply(parked.questions[0]))
        self.journal.close()


async def test_the_legs_of_a_run_together_publish_what_an_uninterrupted_run_publishes(tmp_path: Path):
    """A nested run with approvals, questions and a handoff is parked at each of them. Every fact is published exactly once."""
    whole = Leg(tmp_path / "whole.db", ScriptedModel([*SCRIPT]), Present())
    expected = logged(await whole.begin(OUTER))
    model, legs = ScriptedModel([*SCRIPT]), list[Leg]()
    session = None
    while session is None:
        legs.append(leg := Leg(tmp_path / "legs.db", model))
        try:
            session = await (leg.begin(OUTER) if len(legs) == 1 else leg.resume(OUTER))
        except RunParked as parked:
            await leg.answer_first(parked)
    assert len(legs) > 4
    heard = [event for leg in legs for event in leg.heard]
    assert once(heard) == once(whole.heard)
    calls = [event for event in heard if not isinstance(event, ModelResponded | MessageAdded)]
    assert set(once(calls).values()) == {1}
    assert logged(session) == expected
    for journal in (whole.journal, legs[-1].journal):
        loaded = await runs.session(journal, "s", principal="local")
        assert logged(loaded) == expected
        assert [each.prompt for each in loaded[PromptExecuted].all()] == ["outer"]
    resumed = [event.tool for event in legs[2].heard if isinstance(event, ToolResumed)]
    assert resumed[0] == "delegate"
    assert not [event for event in legs[0].heard if isinstance(event, ToolResumed)]


async def test_a_call_that_was_stopped_by_force_starts_once(tmp_path: Path):
    """A call without any record, in a run that was parked by force, is known to have started."""
    begun, hangs = asyncio.Event(), [True]

    @tool(effect="staged")
    async def hang(context: ToolContext) -> str:
        """Wait forever, the first time."""
        if hangs.pop():
            hangs.append(False)
            begun.set()
            await asyncio.get_running_loop().create_future()
        return "back"

    prompt, model, there = (
        Prompt("p", "Do.", tools=[hang]),
        ScriptedModel([ToolCall("hang"), "done"]),
        Resting(),
    )
    first = Leg(tmp_path / "runs.db", model, there)
    run = asyncio.ensure_future(first.begin(prompt))
    await begun.wait()
    assert there.parking is not None
    there.parking.park(by_force=True)
    with pytest.raises(RunParked):
        await run
    second = Leg(tmp_path / "runs.db", model)
    await second.resume(prompt)
    heard = [type(event) for event in [*first.heard, *second.heard]]
    assert (heard.count(ToolStarted), heard.count(ToolResumed), heard.count(ToolInvoked)) == (1, 1, 1)
