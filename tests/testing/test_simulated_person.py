"""`SimulatedPerson`: a model answers the questions of a run, as a person would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, ToolCall, UserContext, tool
from handrail.testing import SimulatedPerson


@dataclass(frozen=True)
class Seat:
    row: int


@tool(effect="idempotent", capabilities={"money"})
async def book(context: UserContext) -> int:
    """Book a seat."""
    return (await context.wait_for("seat", {"free": [1, 2]}, Seat, message="Which row?")).row


POLICIES = [CapabilityPolicy({"money": "ask"})]


async def booked(person: SimulatedPerson) -> tuple[str, Any]:
    """Book a seat with this person, and return what the model was told, and the run's usage."""
    model = ScriptedModel([ToolCall("book"), "Done."])
    prompt = Prompt("desk", "Book.", tools=[book], policies=POLICIES)
    response = await Adapter(model, environment=person).evaluate(prompt, "Go.")
    return model.requests[1].messages[-1].text, response.usage


async def test_a_model_approves_and_fills_in_forms():
    """Approvals and `wait_for` are answered by the model, which sees its instructions and what a person would be shown."""
    model = ScriptedModel(['{"approved": true, "reason": "cheap"}', '{"row": 2}'])
    person = SimulatedPerson(model, "You pay up to $5.")
    told, usage = await booked(person)
    assert told == "2"
    assert [each.kind for each in person.questions] == ["approval", "input"]
    assert [each.system for each in model.requests] == ["You pay up to $5."] * 2
    [approval, form] = [each.messages[0].text for each in model.requests]
    assert "'money'" in approval
    assert "Which row?" in form
    assert '"free":[1,2]' in form
    assert '"row"' in form
    assert usage.requests == 2  # the person's requests are not the run's


async def test_a_model_denies_with_its_reason():
    """The model's reason not to approve is told to the run's model."""
    told, _ = await booked(
        SimulatedPerson(ScriptedModel(['{"approved": false, "reason": "too dear"}']), "Be mean.")
    )
    assert "too dear" in told


async def test_an_answer_that_does_not_fit_is_asked_for_again():
    """An answer that is no JSON, or does not match the schema, is asked for again."""
    model = ScriptedModel(["the second", '{"seat": 2}', '{"row": 1}'])
    assert (await booked(SimulatedPerson(model, "Choose.", approve=True)))[0] == "1"


@pytest.mark.parametrize("prepared", [{"approve": True}, {"answers": {"seat": {"row": 7}}}])
async def test_prepared_answers_come_first(prepared: dict[str, Any]):
    """A prepared decision or answer is given without asking the model; the model answers the rest."""
    answer = '{"row": 7}' if "approve" in prepared else '{"approved": true}'
    model = ScriptedModel([answer])
    assert (await booked(SimulatedPerson(model, "Choose.", **prepared)))[0] == "7"
    assert len(model.requests) == 1
