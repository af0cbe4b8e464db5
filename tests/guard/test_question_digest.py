"""Question digests and remembered decisions treat equal arguments alike, however they are written, and tell different ones apart."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, PlainSerializer, PlainValidator, SecretStr, WithJsonSchema

from handrail import CapabilityPolicy, Session, tool
from handrail.journal.sqlite import MemoryJournal
from handrail.question import Question
from handrail.run import open_gate
from handrail.testing import Person


class Account(BaseModel):
    """An account, which is nested in the arguments of `pay`."""

    name: str
    limit: float = 0.0


@tool
async def pay(amount: float, to: Account, tags: set[str], notes: dict[str, int]) -> str:
    """Pay."""
    return "paid"


@tool
async def log_in(password: SecretStr) -> str:
    """Log in."""
    return "done"


class Label:
    """A user's own type. Different values can have the same JSON."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@tool
async def mark(
    label: Annotated[
        Label,
        PlainValidator(Label),
        PlainSerializer(lambda label: label.text.lower()),
        WithJsonSchema({"type": "string"}),
    ],
) -> str:
    """Mark something."""
    return label.text


TOOLS = [pay, log_in, mark]


def asked(name: str, arguments: str) -> Question:
    """Return the question about a call, with everything else that its digest covers held constant."""
    person, ids, journal = Person(), itertools.count(1), MemoryJournal()
    journal.key = b"k" * 32
    gate = open_gate(
        TOOLS,
        policies=[CapabilityPolicy()],
        environment=person,
        journal=journal,
        session=Session(id="session", principal="ada"),
        new_id=lambda: f"{next(ids):032x}",
    )
    asyncio.run(_call(gate, name, arguments))
    [question] = person.questions
    return question


async def _call(gate: Any, name: str, arguments: str) -> None:
    await gate.invoke(name, arguments, call_id="call")


def spelled(data: st.DataObject, amount: int, tags: set[str], limit: int) -> str:
    """Return these arguments as JSON. Hypothesis draws the order of keys and items and the spelling of numbers."""

    def shuffled(value: dict[str, Any]) -> dict[str, Any]:
        return {key: value[key] for key in data.draw(st.permutations(sorted(value)))}

    def number(value: int) -> Any:
        return data.draw(st.sampled_from([value, float(value)]))

    to = {"name": "Ada", "limit": number(limit)}
    if not limit and data.draw(st.booleans()):
        del to["limit"]  # 0 is its default
    written = {
        "amount": number(amount),
        "to": shuffled(to),
        "tags": data.draw(st.permutations(sorted(tags))),
        "notes": {"a": 1},
    }
    return json.dumps(shuffled(written), indent=data.draw(st.sampled_from([None, 1])))


@given(
    data=st.data(),
    amount=st.integers(0, 9),
    tags=st.sets(st.sampled_from(["x", "y", "z", "ä"])),
    limit=st.integers(0, 2),
)
def test_equal_arguments_are_the_same_question(data: st.DataObject, amount: int, tags: set[str], limit: int):
    """Equal arguments give the same digest, payload and rows, however they are spelled. Different arguments change the digest."""
    one = asked("pay", spelled(data, amount, tags, limit))
    two = asked("pay", spelled(data, amount, tags, limit))
    assert (one.digest, one.payload, one.rows) == (two.digest, two.payload, two.rows)
    for other in (
        spelled(data, amount + 1, tags, limit),
        spelled(data, amount, tags ^ {"x"}, limit),
        spelled(data, amount, tags, limit + 1),
    ):
        assert asked("pay", other).digest != one.digest


def test_a_secret_is_covered():
    """A different secret gives a different digest, although both questions look the same."""
    one, two = (asked("log_in", json.dumps({"password": word})) for word in ("one", "two"))
    assert one.payload == two.payload
    assert one.digest != two.digest
    assert one.digest == asked("log_in", '{ "password" : "one" }').digest


@pytest.mark.parametrize("tags", [["b", "a", "c"], ["c", "b", "a"]])
def test_sets_are_shown_in_order(tags: list[str]):
    """The items of a set are shown sorted, since their order could differ in the next process."""
    question = asked("pay", json.dumps({"amount": 1, "to": {"name": "Ada"}, "tags": tags, "notes": {}}))
    assert question.payload["arguments"]["tags"] == ["a", "b", "c"]


def test_arguments_whose_json_says_less_are_told_apart():
    """If two different values have the same JSON, the arguments as they were sent make the digests differ."""
    one, two = (asked("mark", json.dumps({"label": text})) for text in ("Alpha", "alpha"))
    assert one.payload == two.payload
    assert one.digest != two.digest
    assert one.digest == asked("mark", ' {"label" : "Alpha"}').digest


# --- remembered decisions -----------------------------------------------------------------------------

EXACT = {"approved": True, "remember": "exact"}


def questions_about(name: str, *spellings: str) -> int:
    """Return how many of these calls in one session a person is asked about, if each answer is an exact approval."""
    person = Person(EXACT)
    gate = open_gate(TOOLS, policies=[CapabilityPolicy()], environment=person)
    for arguments in spellings:
        asyncio.run(_call(gate, name, arguments))
    return len(person.questions)


@given(
    data=st.data(),
    amount=st.integers(0, 9),
    tags=st.sets(st.sampled_from(["x", "y", "z", "ä"])),
    limit=st.integers(0, 2),
)
def test_a_remembered_decision_covers_equal_arguments(
    data: st.DataObject, amount: int, tags: set[str], limit: int
):
    """An exact decision covers its call however the arguments are spelled, and no call with other arguments."""
    same = [spelled(data, amount, tags, limit) for _ in range(3)]
    assert questions_about("pay", *same) == 1
    others = [
        spelled(data, amount + 1, tags, limit),
        spelled(data, amount, tags ^ {"x"}, limit),
        spelled(data, amount, tags, limit + 1),
    ]
    assert questions_about("pay", *same, *others) == 4


@pytest.mark.parametrize(
    ("name", "spellings", "count"),
    [
        ("log_in", ['{"password": "one"}', '{ "password" : "one" }', '{"password": "two"}'], 2),
        ("mark", ['{"label": "Alpha"}', '{ "label" : "Alpha" }', '{"label": "alpha"}'], 2),
    ],
)
def test_a_remembered_decision_covers_no_arguments_that_look_the_same(
    name: str, spellings: list[str], count: int
):
    """Arguments that are shown alike but differ, such as two secrets, are decided separately."""
    assert questions_about(name, *spellings) == count
