"""Values that are read from JSON while it arrives: what is seen of them before they are complete, and what that costs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from typing import Annotated, Any, Literal, NotRequired

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, ValidationInfo, field_validator, model_validator
from typing_extensions import TypedDict

from handrail.schema import Schema
from handrail.schema.partial_values import PartialType, PartialValue

pytestmark = pytest.mark.once  # the text is plain data, read in the same way by every Python version


@dataclass(frozen=True)
class City:
    """A place."""

    name: str
    people: int = 0


@dataclass(frozen=True)
class Region:
    """Cities, with something about the first one."""

    title: str = ""
    cities: list[City] = field(default_factory=list[City])
    capital: City | None = None
    counts: dict[str, int] = field(default_factory=dict[str, int])
    inner: Region | None = None


class Notes(TypedDict):
    """A mapping with known keys."""

    day: NotRequired[date]
    lines: NotRequired[list[str]]


class Page(BaseModel):
    """A model whose keys in JSON differ from its fields."""

    heading: str = Field(alias="Heading", min_length=2)
    notes: Notes = Field(default_factory=lambda: Notes())


class Cities(RootModel[list[City]]):
    """A model of a list."""


class Checked(BaseModel):
    """A model with validators of its own."""

    low: int
    high: int

    @field_validator("high")
    @classmethod
    def _above(cls, value: int, info: ValidationInfo) -> int:
        assert value > info.data["low"]
        return value

    @model_validator(mode="after")
    def _even(self) -> Checked:
        assert (self.low + self.high) % 2 == 0
        return self


def seen(kind: Any, *pieces: str, within: str = "") -> list[Any]:
    """Return what is seen of a value after each piece of its text that changed it."""
    value = PartialValue(PartialType(Schema(kind).core), within)
    states: list[Any] = []
    changes = 0
    for piece in pieces:
        value.take(piece)
        if value.changes > changes:
            states.append(value.copy())
            changes = value.changes
    return states


# --- what is seen ------------------------------------------------------------------------------


def test_an_object_is_a_dict_of_its_complete_fields_until_it_is_complete() -> None:
    """A field is seen once it is complete, with its type. The whole object is an instance."""
    assert seen(City, "{", '"name"', ":", '"Os', 'lo"', ',"people":', "12", "0", "}") == [
        {},
        {"name": "Oslo"},
        City("Oslo", 120),
    ]


def test_a_list_has_its_complete_items() -> None:
    """An item is seen once it is complete. Nothing is seen of an incomplete one."""
    assert seen(list[City], '[{"name"', ':"a"', "}", ', {"name": "b", "people"', ":1}", "]") == [
        [],
        [City("a")],
        [City("a"), City("b", 1)],
        [City("a"), City("b", 1)],
    ]


def test_a_list_or_an_object_in_a_field_is_seen_while_it_grows() -> None:
    """It has the same form as it would have by itself, and its type once it is complete."""
    pieces = ['{"cities": [', '{"name": "a"}', ', {"name": "b"}]', ', "capital": {"name": "c"', "}", "}"]
    assert seen(Region, *pieces) == [
        {"cities": []},
        {"cities": [City("a")]},
        {"cities": [City("a"), City("b")]},
        {"cities": [City("a"), City("b")], "capital": {"name": "c"}},
        {"cities": [City("a"), City("b")], "capital": City("c")},
        Region(cities=[City("a"), City("b")], capital=City("c")),
    ]


def test_a_typed_dict_and_a_model_with_aliases() -> None:
    """Fields are named as in Python, and converted to their types."""
    pieces = ['{"Heading": "Hi"', ',"notes": {"day": "2030-01-02"', ', "lines": ["a"', "]}}"]
    *states, last = seen(Page, *pieces)
    assert states == [
        {"heading": "Hi"},
        {"heading": "Hi", "notes": {"day": date(2030, 1, 2)}},
        {"heading": "Hi", "notes": {"day": date(2030, 1, 2), "lines": ["a"]}},
    ]
    assert last == Page(Heading="Hi", notes={"day": date(2030, 1, 2), "lines": ["a"]})


@pytest.mark.parametrize(
    ("kind", "text", "before", "last"),
    [
        (dict[str, City], '{"a": {"name": "b"}}', [{}, {"a": City("b")}], {"a": City("b")}),
        (dict[int, str], '{"1": "b"}', [{}, {1: "b"}], {1: "b"}),
        (set[int], "[1, 2 ]", [[], [1], [1, 2]], {1, 2}),
        (tuple[int, ...], "[1, 2 ]", [[], [1], [1, 2]], (1, 2)),
        (Cities, '[{"name": "b"}]', [[], [City("b")]], Cities([City("b")])),
        (City | str | None, '{"name": "b"}', [{}, {"name": "b"}], City("b")),
        (City | list[int], "[1 ]", [[], [1]], [1]),
        (Annotated[list[int], Field(min_length=2)], "[1, 2 ]", [[], [1], [1, 2]], [1, 2]),
        (Any, '{"a": [1, {"b": null}]}', [{}, {"a": [1, {"b": None}]}], {"a": [1, {"b": None}]}),
        (list[Any], '[{"a": 1}]', [[], [{"a": 1}]], [{"a": 1}]),
    ],
)
def test_other_lists_and_objects(kind: Any, text: str, before: list[Any], last: Any) -> None:
    """Mappings, sets, tuples, models of lists, unions with one kind of object, and plain JSON are seen while they grow."""
    *states, whole = seen(kind, *text)
    assert (states, whole) == (before, last)
    assert type(whole) is type(last)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "12"),
        (str, '"ab"'),
        (City | str, '"ab"'),
        (City | Checked, '{"name": "b"}'),
        (tuple[int, str], "[1]"),
    ],
)
def test_nothing_is_seen_of_other_values(kind: Any, text: str) -> None:
    """Nothing is seen of a value that is neither an object nor a list, or of an object of which several kinds are possible."""
    assert seen(kind, *text) == []


def test_a_value_inside_an_object_is_read_from_its_field() -> None:
    """A value can be put in a field of an object. Reading is over when the field is complete."""

    class Wrapped(BaseModel):
        value: list[int] | str

    assert seen(Wrapped, '{"value"', ":[1", ", 2", "]", "}", within="value") == [[], [1], [1, 2]]
    assert seen(Wrapped, '{"value":"a"}', within="value") == []
    assert seen(Wrapped, "{}", within="value") == []


def test_a_fence_before_the_value_is_skipped() -> None:
    """A model may put its answer in a Markdown fence, although it should not."""
    assert seen(list[int], " \n`", "``json", "\n[1", ",2", "]\n```") == [[], [1], [1, 2]]


def test_a_field_whose_validator_needs_other_fields_is_seen_with_the_whole() -> None:
    """Such a field is left out until the object is complete."""
    assert seen(Checked, '{"low": 1', ', "high": 3', "}") == [{}, {"low": 1}, Checked(low=1, high=3)]


def test_a_field_is_checked_by_itself() -> None:
    """A field's own constraints apply before the rest has arrived."""

    class Bounded(BaseModel):
        size: Annotated[int, Field(ge=3)]
        kind: Literal["a", "b"]

    assert seen(Bounded, '{"size": 2', ', "kind": "a"', ', "size": 4', "}") == [
        {},
        {"kind": "a"},
        Bounded(size=4, kind="a"),
    ]


# --- what is not JSON, or not of the type ------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ('[{"name": "a"}, {"name": 3}, {"name": "c"}]', [City("a")]),
        ('[{"name": "a"}, {"name": "b", "more": 1}, {"name": "c"}]', [City("a")]),
        ('[{"name": "a"},, {"name": "c"}]', [City("a")]),
        ('[{"name": "a"} {"name": "c"}]', [City("a")]),
        ('[{"name": "a"}}', [City("a")]),
        ('[{"name": "a"}, tru, {"name": "c"}]', [City("a")]),
        ('[{"name": "a"}, {"name": "\\ud800"}]', [City("a")]),
        ('[{"name": "a"}, {"name": "b", "people": 1e999}]', [City("a")]),
    ],
)
def test_reading_stops_at_an_item_that_is_invalid(text: str, last: Any) -> None:
    """What was seen stays, and nothing is added to it."""
    assert seen(list[City], *text)[-1] == last
    assert seen(list[City], text) == [last]


@pytest.mark.parametrize("text", ["Here it is: [1]", "`[1]`", "1", '"[1]"', "]", ",", "", "``` ```[1]"])
def test_nothing_is_seen_of_text_that_is_not_a_value(text: str) -> None:
    """Text that does not begin with an object or a list is not read."""
    assert seen(list[int], *text) == []


def test_a_field_that_is_invalid_is_left_out() -> None:
    """The other fields are seen. The whole is not."""
    assert seen(City, '{"name": 3', ', "people": 4', ', "more": [1]', "}") == [{}, {"people": 4}]


def test_a_whole_that_is_invalid_is_not_seen() -> None:
    """The type's own check of the whole applies to it, and not to its parts."""
    assert seen(Checked, '{"low": 1', ', "high": 4', "}") == [{}, {"low": 1}]


# --- laws --------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
CITIES = st.builds(City, st.text(), st.integers(0, 10**9))
REGIONS = st.recursive(
    st.builds(Region, st.text(max_size=3), st.lists(CITIES, max_size=3), st.none() | CITIES),
    lambda inner: st.builds(
        Region,
        cities=st.lists(CITIES, max_size=3),
        counts=st.dictionaries(st.text(), st.integers(), max_size=3),
        inner=inner,
    ),
    max_leaves=12,
)


@st.composite
def split(draw: st.DrawFn, value: Any) -> list[str]:
    """Write a value as JSON in one of several styles, and split the text anywhere."""
    text = json.dumps(
        value,
        default=lambda each: {one.name: getattr(each, one.name) for one in fields(each)},
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
    )
    cuts = sorted(draw(st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=40)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def is_part(part: Any, whole: Any) -> bool:
    """Return whether a partial value is a prefix of the whole."""
    if isinstance(part, list) and isinstance(whole, list):
        return part == whole[: len(part)]
    if isinstance(part, dict):
        if is_dataclass(whole):
            return all(is_part(one, getattr(whole, name)) for name, one in part.items())
        return list(part.items()) == list(whole.items())[: len(part)]
    return part == whole


@given(st.data(), st.lists(PLAIN, max_size=4) | st.dictionaries(st.text(), PLAIN, max_size=4))
@example(None, [])
def test_plain_json_ends_as_what_it_is(data: st.DataObject | None, value: Any) -> None:
    """Whatever the document and however it is split, each state is a prefix of the value, and the last one is the value."""
    pieces = [json.dumps(value)] if data is None else data.draw(split(value))
    states = seen(Any, *pieces)
    assert states[-1] == value
    assert all(is_part(each, value) for each in states)


@given(st.data(), REGIONS)
def test_typed_values_end_as_what_they_are(data: st.DataObject, value: Region) -> None:
    """The same holds for objects inside each other, however deep, and each complete part has its type."""
    states = seen(Region, *data.draw(split(value)))
    assert states[-1] == value
    assert all(is_part(each, value) for each in states)
    assert [len(str(each)) for each in states[:-1]] == sorted(len(str(each)) for each in states[:-1])


@given(st.lists(st.sampled_from([*'{}[],:"\\ \n`', "null", "12", '"a"', "\ud800"]), max_size=30))
def test_any_text_can_be_read(pieces: list[str]) -> None:
    """Whatever a model writes, reading does not raise. If all of it is valid, the last state is its value."""
    for kind in (Any, Region, list[int], dict[str, Region]):
        states = seen(kind, *pieces)
        try:
            whole = Schema(kind).parse("".join(pieces))
        except Exception:
            continue
        if isinstance(whole, list | dict | Region):
            assert states[-1] == whole


def test_a_value_is_not_changed_after_it_was_seen() -> None:
    """What was seen earlier stays as it was."""
    text = '{"title": "t", "cities": [{"name": "a"}, {"name": "b"}]}'
    value = PartialValue(PartialType(Schema(Region).core))
    states: list[tuple[Any, str]] = []
    for each in text:
        value.take(each)
        if value.changes:
            states.append((value.copy(), repr(value.copy())))
    assert len(states) > 10
    assert all(repr(state) == shown for state, shown in states)


# --- costs -------------------------------------------------------------------------------------


class Counted(PartialValue):
    """Counts the characters that are parsed."""

    parsed = 0

    def _slice(self, start: int, end: int) -> str:
        self.parsed += end - start
        return super()._slice(start, end)


@pytest.mark.parametrize("kind", [list[City], Any])
def test_each_item_is_parsed_twice_however_many_there_are(kind: Any) -> None:
    """An item is parsed once by itself, and once with the whole list."""
    text = json.dumps([{"name": str(number)} for number in range(3_000)])
    value = Counted(PartialType(Schema(kind).core))
    for at in range(0, len(text), 7):
        value.take(text[at : at + 7])
    assert value.is_complete
    assert value.parsed <= 2 * len(text)


def test_an_object_in_many_others_is_parsed_a_bounded_number_of_times() -> None:
    """Objects that are too deep to be seen while they grow are read as parts of those that are not."""
    text = '{"inner": ' * 60 + "{}" + "}" * 60
    value = Counted(PartialType(Schema(Region).core))
    for each in text:
        value.take(each)
    assert value.is_complete
    assert value.parsed <= 12 * len(text)


def test_reading_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never ends is not kept in memory a second time."""
    monkeypatch.setattr("handrail.schema.partial_values._LONGEST", 100)
    states = seen(list[int], "[", *["1," for _ in range(1_000)])
    assert 40 < len(states[-1]) < 60
