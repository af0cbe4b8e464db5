"""Forms that are generated from JSON Schemas and filled in line by line."""

import json
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, TypeAdapter

from handrail.environment.form import NOTHING, fill_in, parse
from handrail.errors import Declined
from handrail.schema import Schema


class Typist:
    """A person who types these lines, then presses Ctrl-D."""

    def __init__(self, *typed: str) -> None:
        self._typed = list(typed)
        self.seen: list[str] = []
        self.hid: list[str] = []
        """Prompts whose input was hidden while it was typed."""

    def say(self, text: str = "", *styles: str) -> None:
        self.seen.append(text)

    async def line(self, prompt: str) -> str:
        self.seen.append(prompt)
        if not self._typed:
            raise Declined("", "")
        return self._typed.pop(0)

    async def hidden_line(self, prompt: str) -> str:
        self.hid.append(prompt)
        return await self.line(prompt)

    @property
    def left(self) -> list[str]:
        return self._typed

    @property
    def text(self) -> str:
        return "\n".join(self.seen)


async def fill(kind: Any, *typed: str, before: Any = NOTHING) -> Any:
    """Fill in a form for this type, check that every typed line was read, and return the value."""
    schema = Schema(kind)
    typist = Typist(*typed)
    value = await fill_in(schema.json_schema, typist, before)
    assert typist.left == [], typist.text
    schema.parse_value(value)  # what was typed must match the type
    return value


class Address(BaseModel):
    street: str
    number: int


class Order(BaseModel):
    """A model with many kinds of fields."""

    item: Annotated[str, Field(min_length=3, description="What you want.")]
    count: Annotated[int, Field(ge=1, le=9)] = 1
    price: float
    gift: bool
    size: Literal["S", "M", "L"]
    due: date | None = None
    to: Address
    back_to: Address | None = None
    tags: list[str] = Field(default_factory=list)


async def test_every_kind_of_field():
    """A form asks for text, numbers, booleans, choices, dates, objects, optional values and lists."""
    typed = ["tea", "", "2.5", "y", "2", "2026-05-31", "Main", "7", "n", "y", "hot", "green", "", "s"]
    assert await fill(Order, *typed) == {
        "item": "tea",
        "count": 1,
        "price": 2.5,
        "gift": True,
        "size": "M",
        "due": "2026-05-31",
        "to": {"street": "Main", "number": 7},
        "back_to": None,
        "tags": ["hot", "green"],
    }


async def test_each_field_is_checked_as_it_is_typed():
    """A mistake is explained at once, and the field is asked for again."""
    typist = Typist(
        "te", "", "tea", "x", "10", "3", "cheap", "nan", "1", "maybe", "n", "XL", "4", "L", "soon", ""
    )
    with pytest.raises(Declined):
        await fill_in(Schema(Order).json_schema, typist)
    for words in (
        "at least 3 characters, not 2",
        "a value is required",
        "a whole number, such as 3",
        "at most 9",
        "a number, such as 2.5",
        "y or n",
        "one of 1 to 3",
        "a date, such as 2026-05-31",
    ):
        assert words in typist.text
    assert "What you want." in typist.text


def test_a_number_may_be_larger_than_any_float():
    """A form accepts an integer that is larger than any float."""
    assert parse({"type": "number"}, "9" * 400) == int("9" * 400)


async def test_a_form_is_shown_before_it_is_sent_and_can_be_edited():
    """A form is shown before it is sent, and `e` edits it again with the earlier values as defaults."""
    assert await fill(Address, "Main", "7", "e", "", "8", "") == {"street": "Main", "number": 8}
    typist = Typist("Main", "7", "what", "s")
    await fill_in(Schema(Address).json_schema, typist)
    assert "This will be sent:\n    street: Main\n    number: 7" in typist.text
    assert "expected: s, e or d" in typist.text


async def test_a_form_can_be_declined_with_a_reason():
    """A form can be declined with `d` and a reason at its end, or with Ctrl-D while it is filled in."""
    with pytest.raises(Declined) as declined:
        await fill(Address, "Main", "7", "d", "none of your business")
    assert declined.value.reason == "none of your business"
    with pytest.raises(Declined):
        await fill(Address, "Main")


@dataclass
class Tree:
    name: str
    children: list["Tree"] = field(default_factory=list["Tree"])


class Card(BaseModel):
    kind: Literal["card"]
    number: str


class Cash(BaseModel):
    kind: Literal["cash"]


class Unset(BaseModel):
    value: None


class Paid(BaseModel):
    by: Annotated[Card | Cash, Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "typed", "value"),
    [
        (str, ["hello", ""], "hello"),
        (str, ['""', ""], ""),
        (bool, ["n", ""], False),
        (Literal["a", "b"], ["b", ""], "b"),
        (Literal[3, 1, 2], ["b", ""], 1),
        (Literal[3, 1, 2], ["2", ""], 2),
        (list[int], ["1", "2", "", ""], [1, 2]),
        (list[Address], ["y", "Main", "1", "n", ""], [{"street": "Main", "number": 1}]),
        (dict[str, int], ["a", "1", "b", "2", "", ""], {"a": 1, "b": 2}),
        (int | None, ["", ""], None),
        (None, ["", ""], None),
        (Unset, ["", ""], {"value": None}),
        (int | str, ["2", "7", ""], "7"),
        (
            Tree,
            ["root", "y", "y", "leaf", "n", "n", ""],
            {"name": "root", "children": [{"name": "leaf"}]},
        ),
        (Paid, ["2", ""], {"by": {"kind": "cash"}}),
        (Paid, ["1", "4711", ""], {"by": {"kind": "card", "number": "4711"}}),
        (Annotated[list[int], Field(min_length=2, max_length=2)], ["1", "", "2", ""], [1, 2]),
    ],
)
async def test_kinds_of_answers(kind: Any, typed: list[str], value: Any):
    """A form can ask for scalars, choices, unions, recursive types, lists and mappings."""
    assert await fill(kind, *typed) == value


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("date", "2026-01-31", "2026-02-31"),
        ("time", "14:30", "26:00"),
        ("date-time", "2026-01-31T12:00:00", "now"),
        ("email", "ada@example.org", "ada"),
        ("uri", "https://example.org", "example"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
    ],
)
def test_formats(format: str, good: str, bad: str):
    """Each known format is checked, and the error gives an example."""
    schema = {"type": "string", "format": format}
    assert parse(schema, good) == good
    with pytest.raises(ValueError, match="such as"):
        parse(schema, bad)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"$ref": "elsewhere.json"},
        {"type": "string", "pattern": "("},
        {"type": "array"},
        {"type": "object"},
        {"anyOf": []},
        {"enum": []},
    ],
)
async def test_odd_schemas_end(schema: dict[str, Any]):
    """A person can always leave a form, even if its schema is empty, broken or recursive."""
    with pytest.raises(Declined):
        await fill_in(schema, Typist(*["x"] * 5))


async def test_a_schema_is_escaped():
    """Names, descriptions and options are escaped, because they may come from a model."""
    schema = {
        "type": "object",
        "properties": {
            "a\x1b[31m": {"type": "string", "enum": ["\x1b[2J", "b"], "description": "\x1b]0;x\x07"}
        },
        "required": ["a\x1b[31m"],
    }
    typist = Typist("1", "s")
    await fill_in(schema, typist)
    assert "\x1b" not in typist.text
    assert "\x07" not in typist.text


@given(
    st.one_of(
        st.tuples(st.just(int), st.integers()),
        st.tuples(st.just(float), st.floats(allow_nan=False, allow_infinity=False)),
        st.tuples(st.just(bool), st.booleans()),
        st.tuples(st.just(date), st.dates()),
    )
)
def test_typed_values_round_trip(drawn: tuple[Any, Any]):
    """Integers, floats, booleans and dates that are typed as text are read as the same values."""
    kind, value = drawn
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    typed = "y" if value is True else "n" if value is False else str(value)
    read = parse(adapter.json_schema(), typed)
    assert adapter.validate_json(json.dumps(read)) == value


class Login(BaseModel):
    user: str
    key: SecretStr
    old: SecretStr | None = None
    more: list[SecretStr] = []


async def test_a_secret_is_hidden_while_typed_and_masked_when_shown() -> None:
    """A secret is hidden while it is typed, and masked in the summary and as a default."""
    typist = Typist("ann", "hunter2", "hunter3", "y", "hunter4", "", "e", "", "", "", "n", "s")
    value = await fill_in(Schema(Login).json_schema, typist)
    assert value == {"user": "ann", "key": "hunter2", "old": "hunter3", "more": ["hunter4"]}
    assert typist.left == []
    assert "hunter" not in typist.text
    assert "**********" in typist.text
    assert not any("user" in prompt for prompt in typist.hid)
    assert len(typist.hid) == 6


def test_a_count_may_be_written_with_a_fraction_of_zero() -> None:
    """A form checks `maxLength: 2.0` as 2."""
    assert parse({"type": "string", "maxLength": 2.0}, "ab") == "ab"
    with pytest.raises(ValueError, match="at most 2 characters, not 3"):
        parse({"type": "string", "maxLength": 2.0}, "abc")
