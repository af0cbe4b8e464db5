"""Handoffs with fewer than three acts, in a run that is parked and then continued by a different adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import TypedDict

from handrail import (
    Adapter,
    Handoff,
    LaterEnvironment,
    Parked,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
)
from handrail.errors import RunParked
from handrail.events import HandoffAnswered, HandoffParked
from handrail.testing import RecordingSubscriber
from support.parked_runs import answer_to


class Slot(TypedDict):
    """An answer as a TypedDict."""

    day: str


@dataclass(frozen=True)
class Visit:
    """The params of a handoff."""

    street: str


def no_act() -> Handoff[Visit, Any]:
    """Make a handoff without acts, which asks for its answer."""
    return Handoff("book", "When shall we come?", params=Visit, answer=Slot)


def only_client() -> Handoff[Visit, Any]:
    """Make a handoff whose only act is its `client`."""
    made = Handoff("book", "Ask when we may come.", params=Visit)

    @made.client
    async def ask(visit: Visit, *, context: UserContext) -> Slot:
        return await context.wait_for("visit", visit, Slot, message="When shall we come?")

    return made


def no_after() -> Handoff[Visit, Any]:
    """Make a handoff without `after`, whose answer is its result."""
    made = Handoff("book", "When shall we come?", params=Visit, answer=Slot)

    @made.before
    async def look_up(params: Visit, *, context: ToolContext) -> Parked[int, Visit]:
        return Parked(7, params)

    return made


def no_before() -> Handoff[Visit, Any]:
    """Make a handoff without `before`, whose params are public."""
    made = Handoff("book", "When shall we come?", params=Visit)

    @made.after
    async def settle(private: None, slot: Slot, *, context: ToolContext) -> ToolResult[Slot]:
        return ToolResult.ok(slot)

    return made


@pytest.mark.parametrize("make", [no_act, only_client, no_after, no_before])
async def test_a_parked_handoff_is_answered_later_and_continued_elsewhere(tmp_path: Path, make: Any) -> None:
    """A parked handoff's question waits in the journal with its message. After the answer, a new adapter finishes the run with the result."""
    model = ScriptedModel([ToolCall("book", {"street": "Main St"}), "Booked."])

    def adapter() -> tuple[Adapter, SqliteJournal]:
        journal = SqliteJournal(tmp_path / "runs.db", watch=None)
        return Adapter(model, journal=journal, environment=LaterEnvironment()), journal

    def prompt() -> Prompt[Any]:
        return Prompt("p", "Book.", tools=[make()])

    first, journal = adapter()
    session = Session(id="s")
    heard = RecordingSubscriber(session)
    with pytest.raises(RunParked) as parked:
        await first.evaluate(prompt(), "go", run_id="run", session=session)
    [question] = parked.value.questions
    assert question.message == "When shall we come?"
    assert [each.public for each in heard.of(HandoffParked)] == [{"street": "Main St"}]
    assert heard.of(HandoffAnswered) == []
    journal.questions.answer(answer_to(question, {"day": "Monday"}))
    journal.close()
    second, journal = adapter()
    response = await second.resume("run", prompt())
    assert response.text == "Booked."
    assert model.requests[-1].messages[-1].results[0].text == '{"day":"Monday"}'  # pyright: ignore
    [answered] = response.session[HandoffAnswered].all()
    assert answered.answer == {"day": "Monday"}
    journal.close()
