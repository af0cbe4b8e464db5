"""Schemas of types: what the model is told, what is accepted, and the messages for what is refused."""

import enum
import json
import math
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    RootModel,
    SecretStr,
    Tag,
    model_validator,
)
from typing_extensions import TypedDict

from handrail import ToolContext, tool
from handrail.errors import DefinitionError, ToolValidationError
from handrail.schema import Schema, schema_of, to_json

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    TWO = 2


class Mood(enum.StrEnum):
    GOOD = "good"
    BAD = "bad"


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Line:
    start: Point
    end: Point


@dataclass
class Bag:
    items: list[int] = field(default_factory=list[int])


@dataclass(kw_only=True)
class Keywords:
    count: int = 1
    name: str


@dataclass
class Counted:
    text: str
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.text)


@dataclass
class Scaled:
    size: int
    scale: InitVar[int] = 2

    def __post_init__(self, scale: int) -> None:
        self.size *= scale


class User(BaseModel):
    name: str
    age: int = 0


class Sender(BaseModel):
    from_: str = Field(alias="from")


@dataclass
class Letter:
    from_: Annotated[str, Field(alias="from")]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int = 0


class Lax(BaseModel):
    model_config = ConfigDict(strict=False)
    a: int = Field(default=0, strict=False)


@dataclass
class Box(Generic[T]):
    item: T


class Crate(BaseModel, Generic[T]):
    item: T


@dataclass
class Tree:
    value: int
    children: "list[Tree]" = field(default_factory=list["Tree"])


class Folder(BaseModel):
    name: str
    inner: "dict[str, Folder]" = {}


@dataclass
class Cat:
    kind: Literal["cat"]
    lives: int


@dataclass
class Dog:
    kind: Literal["dog"]
    tricks: list[str]


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


def kind_of(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else value.kind


Beast = Annotated[Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")], Discriminator(kind_of)]


class Options(TypedDict):
    depth: int
    label: NotRequired[str]


class Pair(NamedTuple):
    left: int
    right: str = "r"


class Numbers(RootModel[list[int]]):
    pass


class Span(BaseModel):
    first: int
    last: int

    @model_validator(mode="after")
    def in_order(self) -> "Span":
        if self.first > self.last:
            raise ValueError("first must not be after last")
        return self


POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
    "required": ["x"],
    "additionalProperties": False,
}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
FINITE = "must be a finite number; NaN and infinities are not allowed"
TEST_UUID = "12345678-1234-5678-1234-567812345678"


# Each row has an annotation, the expected part of its JSON Schema, accepted JSON and its value, and refused
# JSON and its whole message.
Row = tuple[Any, dict[str, Any], str, object, str, str]
ROWS: dict[str, Row] = {
    "str": (str, {"type": "string"}, '"a"', "a", "1", "must be text, got the number 1"),
    "str-null": (str, {"type": "string"}, '""', "", "null", "must be text, got null"),
    "int": (int, {"type": "integer"}, "1", 1, '"1"', 'must be a whole number, got the text "1"'),
    "int-float": (int, {"type": "integer"}, "-5", -5, "1.0", "must be a whole number, got the number 1.0"),
    "int-bool": (int, {"type": "integer"}, "0", 0, "true", "must be a whole number, got true"),
    "float": (float, {"type": "number"}, "1", 1.0, '"1"', 'must be a number, got the text "1"'),
    "bool": (bool, {"type": "boolean"}, "true", True, "1", "must be true or false, got the number 1"),
    "none": (None, {"type": "null"}, "null", None, "0", "must be null, got the number 0"),
    "optional": (
        int | None,
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "null",
        None,
        '"x"',
        'must be a whole number, got the text "x"',
    ),
    "literal": (
        Literal["a", 1],
        {"enum": ["a", 1]},
        "1",
        1,
        '"b"',
        "must be one of 'a' or 1, got the text \"b\"",
    ),
    "enum": (
        Color,
        {"enum": ["red", 2]},
        "2",
        Color.TWO,
        '"RED"',
        "must be one of 'red' or 2, got the text \"RED\"",
    ),
    "str-enum": (
        Mood,
        {"enum": ["good", "bad"], "type": "string"},
        '"bad"',
        Mood.BAD,
        "3",
        "must be one of 'good' or 'bad', got the number 3",
    ),
    "list": (
        list[int],
        INTEGERS,
        "[1,2]",
        [1, 2],
        '[1,"x",2.5]',
        '[1]: must be a whole number, got the text "x"; [2]: must be a whole number, got the number 2.5',
    ),
    "list-of-what": (list[int], INTEGERS, "[]", [], "{}", "must be a list, got an object"),
    "list-of-lists": (
        list[list[int]],
        {"items": INTEGERS},
        "[[1],[]]",
        [[1], []],
        "[[1,null]]",
        "[0][1]: must be a whole number, got null",
    ),
    "sequence": (Sequence[int], INTEGERS, "[1]", [1], "1", "must be a list, got the number 1"),
    "dict": (
        dict[str, int],
        {"type": "object", "additionalProperties": {"type": "integer"}},
        '{"a":1}',
        {"a": 1},
        '{"a b":"c"}',
        '["a b"]: must be a whole number, got the text "c"',
    ),
    "dict-of-what": (dict[str, int], {"type": "object"}, "{}", {}, "[]", "must be an object, got a list"),
    "dict-keys": (
        dict[int, str],
        {"additionalProperties": {"type": "string"}},
        '{"1":"a"}',
        {1: "a"},
        '{"x":"a"}',
        'x: this key must be a whole number, got the text "x"',
    ),
    "mapping": (
        Mapping[str, bool],
        {"additionalProperties": {"type": "boolean"}},
        '{"a":false}',
        {"a": False},
        '{"a":0}',
        "a: must be true or false, got the number 0",
    ),
    "tuple": (
        tuple[int, str],
        {"prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        '[1,"a"]',
        (1, "a"),
        '["a",1]',
        '[0]: must be a whole number, got the text "a"; [1]: must be text, got the number 1',
    ),
    "tuple-short": (tuple[int, str], {"minItems": 2}, '[0,""]', (0, ""), "[1]", "[1]: required, and missing"),
    "tuple-long": (
        tuple[int, str],
        {"maxItems": 2},
        '[0,""]',
        (0, ""),
        '[0,"",1]',
        "must have at most 2 items, got 3",
    ),
    "tuple-variadic": (
        tuple[int, ...],
        INTEGERS,
        "[1,2,3]",
        (1, 2, 3),
        "[null]",
        "[0]: must be a whole number, got null",
    ),
    "set": (
        set[int],
        {**INTEGERS, "uniqueItems": True},
        "[1,1]",
        {1},
        '["x"]',
        '[0]: must be a whole number, got the text "x"',
    ),
    "frozenset": (frozenset[str], {}, '["a"]', frozenset({"a"}), "3", "must be a list, got the number 3"),
    "dataclass": (Point, POINT, '{"x":1}', Point(1), '{"y":1}', "x: required, and missing"),
    "dataclass-unknown": (
        Point,
        POINT,
        '{"x":1,"y":2}',
        Point(1, 2),
        '{"x":1,"z":1}',
        "z: unknown; remove it. Known here: x, y",
    ),
    "dataclass-nested": (
        Line,
        {"properties": {"start": {"$ref": "#/$defs/Point"}, "end": {"$ref": "#/$defs/Point"}}},
        '{"start":{"x":1},"end":{"x":2}}',
        Line(Point(1), Point(2)),
        '{"start":{"x":"1"},"end":7}',
        'start.x: must be a whole number, got the text "1"; end: must be an object, got the number 7',
    ),
    "dataclass-default-factory": (
        Bag,
        {"properties": {"items": INTEGERS}},
        "{}",
        Bag(),
        '{"items":null}',
        "items: must be a list, got null",
    ),
    "dataclass-kw-only": (
        Keywords,
        {"required": ["name"]},
        '{"name":"a"}',
        Keywords(name="a"),
        "{}",
        "name: required, and missing",
    ),
    "dataclass-init-false": (
        Counted,
        {"properties": {"text": {"type": "string"}}, "required": ["text"]},
        '{"text":"abc"}',
        Counted("abc"),
        '{"text":"abc","length":9}',
        "length: unknown; remove it. Known here: text",
    ),
    "dataclass-init-var": (
        Scaled,
        {"properties": {"size": {"type": "integer"}, "scale": {"type": "integer", "default": 2}}},
        '{"size":3,"scale":5}',
        Scaled(3, 5),
        '{"size":3,"scale":"x"}',
        'scale: must be a whole number, got the text "x"',
    ),
    "model": (
        User,
        {"properties": {"name": {"type": "string"}, "age": {"type": "integer", "default": 0}}},
        '{"name":"a"}',
        User(name="a"),
        '{"nam":"a"}',
        "name: required, and missing; nam: unknown; did you mean name?",
    ),
    "model-lax": (
        Lax,
        {"properties": {"a": {"type": "integer", "default": 0}}},
        "{}",
        Lax(),
        '{"a":"1"}',
        'a: must be a whole number, got the text "1"',
    ),
    "model-validator": (
        Span,
        {"required": ["first", "last"]},
        '{"first":1,"last":2}',
        Span(first=1, last=2),
        '{"first":2,"last":1}',
        "first must not be after last",
    ),
    "model-alias": (
        Sender,
        {"properties": {"from": {"type": "string"}}, "required": ["from"]},
        '{"from":"a"}',
        Sender.model_validate({"from": "a"}),
        '{"from_":"a"}',
        "from: required, and missing; from_: unknown; did you mean from?",
    ),
    "dataclass-alias": (
        Letter,
        {"properties": {"from": {"type": "string"}}},
        '{"from":"a"}',
        Letter("a"),
        '{"from_":"a"}',
        "from: required, and missing; from_: unknown; did you mean from?",
    ),
    "root-model": (
        Numbers,
        INTEGERS,
        "[1]",
        Numbers([1]),
        "[true]",
        "[0]: must be a whole number, got true",
    ),
    "generic-dataclass": (
        Box[int],
        {"properties": {"item": {"type": "integer"}}, "additionalProperties": False},
        '{"item":1}',
        Box(1),
        '{"item":"x"}',
        'item: must be a whole number, got the text "x"',
    ),
    "generic-model": (
        Crate[list[Point]],
        {"properties": {"item": {"type": "array", "items": {"$ref": "#/$defs/Point"}}}},
        '{"item":[{"x":1}]}',
        Crate[list[Point]](item=[Point(1)]),
        '{"item":[{"x":1,"q":2}]}',
        "item[0].q: unknown; remove it. Known here: x, y",
    ),
    "recursive-dataclass": (
        Tree,
        {"type": "object", "additionalProperties": False},
        '{"value":1,"children":[{"value":2}]}',
        Tree(1, [Tree(2)]),
        '{"value":1,"children":[{"value":2,"children":[{"value":"x","foo":1}]}]}',
        'children[0].children[0].value: must be a whole number, got the text "x"; '
        "children[0].children[0].foo: unknown; remove it. Known here: children, value",
    ),
    "recursive-model": (
        Folder,
        {"type": "object", "required": ["name"]},
        '{"name":"a","inner":{"k":{"name":"b"}}}',
        Folder(name="a", inner={"k": Folder(name="b")}),
        '{"name":"a","inner":{"k":{"nam":"b"}}}',
        "inner.k.name: required, and missing; inner.k.nam: unknown; did you mean name?",
    ),
    "union": (
        int | str,
        {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        '"1"',
        "1",
        "1.5",
        "(as int): must be a whole number, got the number 1.5; (as str): must be text, got the number 1.5",
    ),
    "union-of-dataclasses": (
        list[Cat | Point],
        {"items": {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Point"}]}},
        '[{"x":1},{"kind":"cat","lives":9}]',
        [Point(1), Cat("cat", 9)],
        '[{"x":1,"lives":9}]',
        "[0].kind (as Cat): required, and missing; [0].x (as Cat): unknown; remove it. Known here: kind, lives; "
        "[0].lives (as Point): unknown; remove it. Known here: x, y",
    ),
    "union-of-dataclass-and-primitive": (
        dict[str, Point | int],
        {"additionalProperties": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "integer"}]}},
        '{"a":3,"b":{"x":1}}',
        {"a": 3, "b": Point(1)},
        '{"a":"c"}',
        'a (as Point): must be an object, got the text "c"; a (as int): must be a whole number, got the text "c"',
    ),
    "union-discriminated": (
        Pet,
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
        '{"kind":"dog","tricks":[]}',
        Dog("dog", []),
        '{"kind":"cow"}',
        "its 'kind' must be one of 'cat', 'dog', got 'cow'",
    ),
    "union-discriminated-without": (
        Pet,
        {},
        '{"kind":"cat","lives":1}',
        Cat("cat", 1),
        '{"lives":1}',
        "its 'kind' is required, and must be one of 'cat', 'dog'",
    ),
    "union-discriminated-unknown": (
        Box[Pet],
        {},
        '{"item":{"kind":"cat","lives":1}}',
        Box(Cat("cat", 1)),
        '{"item":{"kind":"dog","lives":1}}',
        "item.tricks (as dog): required, and missing; "
        "item.lives (as dog): unknown; remove it. Known here: kind, tricks",
    ),
    "union-by-function": (
        Beast,
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
        '{"kind":"cat","lives":1}',
        Cat("cat", 1),
        '{"kind":"cow"}',
        "must be one of the forms 'cat', 'dog'",
    ),
    "union-by-function-without": (
        Box[Beast],
        {},
        '{"item":{"kind":"cat","lives":1}}',
        Box(Cat("cat", 1)),
        '{"item":{}}',
        "item: must be one of the known forms",
    ),
    "union-by-function-unknown": (
        Beast,
        {},
        '{"kind":"dog","tricks":["sit"]}',
        Dog("dog", ["sit"]),
        '{"kind":"dog","lives":1}',
        "tricks (as dog): required, and missing; lives (as dog): unknown; remove it. Known here: kind, tricks",
    ),
    "json-in-text": (
        Box[Json[list[int]]],
        {"additionalProperties": False},
        '{"item":"[1]"}',
        Box([1]),
        '{"item":"{"}',
        "item: must be JSON: EOF while parsing an object at line 1 column 1",
    ),
    "typed-dict": (
        Box[Options],
        {"additionalProperties": False},
        '{"item":{"depth":1}}',
        Box({"depth": 1}),
        '{"item":{"dpth":1,"label":2}}',
        "item.depth: required, and missing; item.label: must be text, got the number 2; "
        "item.dpth: unknown; did you mean depth?",
    ),
    "named-tuple": (
        Pair,
        {"type": "array", "minItems": 1, "maxItems": 2},
        "[1]",
        Pair(1),
        '["a","b","c"]',
        "must have at most 2 items, got 3",
    ),
    "gt": (
        Annotated[int, Gt(0)],
        {"exclusiveMinimum": 0},
        "1",
        1,
        "0",
        "must be greater than 0, got the number 0",
    ),
    "ge": (Annotated[int, Ge(0)], {"minimum": 0}, "0", 0, "-1", "must be at least 0, got the number -1"),
    "lt": (
        Annotated[int, Lt(9)],
        {"exclusiveMaximum": 9},
        "8",
        8,
        "9",
        "must be less than 9, got the number 9",
    ),
    "le": (Annotated[int, Le(9)], {"maximum": 9}, "9", 9, "10", "must be at most 9, got the number 10"),
    "multiple-of": (
        Annotated[int, MultipleOf(3)],
        {"multipleOf": 3},
        "6",
        6,
        "7",
        "must be a multiple of 3, got the number 7",
    ),
    "min-length": (
        Annotated[str, MinLen(1)],
        {"minLength": 1},
        '"a"',
        "a",
        '""',
        'must have at least 1 character, got the text ""',
    ),
    "max-length": (
        Annotated[str, MaxLen(2)],
        {"maxLength": 2},
        '"ab"',
        "ab",
        '"abc"',
        'must have at most 2 characters, got the text "abc"',
    ),
    "min-items": (
        Annotated[list[int], MinLen(2)],
        {"minItems": 2},
        "[1,2]",
        [1, 2],
        "[]",
        "must have at least 2 items, got 0",
    ),
    "max-items": (
        Annotated[dict[str, int], MaxLen(1)],
        {"maxProperties": 1},
        "{}",
        {},
        '{"a":1,"b":2}',
        "must have at most 1 item, got 2",
    ),
    "pattern": (
        Annotated[str, Field(pattern="^a+$")],
        {"pattern": "^a+$"},
        '"aa"',
        "aa",
        '"b"',
        'must match the pattern ^a+$, got the text "b"',
    ),
    "date": (
        date,
        {"type": "string", "format": "date"},
        '"2026-01-31"',
        date(2026, 1, 31),
        '"2026-02-31"',
        'must be a date such as 2026-01-31, got the text "2026-02-31"',
    ),
    "datetime": (
        datetime,
        {"format": "date-time"},
        '"2026-01-31T12:00:00Z"',
        datetime(2026, 1, 31, 12, tzinfo=UTC),
        "1700000000",
        "must be a time such as 2026-01-31T12:00:00Z, got the number 1700000000",
    ),
    "datetime-text": (
        datetime,
        {"format": "date-time"},
        '"2026-01-31T12:00:00+02:00"',
        datetime(2026, 1, 31, 10, tzinfo=UTC),
        '"tomorrow"',
        'must be a time such as 2026-01-31T12:00:00Z, got the text "tomorrow"',
    ),
    "time": (
        time,
        {"format": "time"},
        '"12:30:00"',
        time(12, 30),
        '"noon"',
        'must be a time of day such as 12:00:00, got the text "noon"',
    ),
    "timedelta": (
        timedelta,
        {"format": "duration"},
        '"PT30S"',
        timedelta(seconds=30),
        '"soon"',
        'must be a duration such as PT30S, got the text "soon"',
    ),
    "uuid": (
        uuid.UUID,
        {"format": "uuid"},
        f'"{TEST_UUID}"',
        uuid.UUID(TEST_UUID),
        '"x"',
        'must be a UUID, got the text "x"',
    ),
    "decimal": (Decimal, {}, '"1.50"', Decimal("1.50"), '"x"', 'must be a number, got the text "x"'),
    "path": (Path, {"format": "path"}, '"a/b"', Path("a/b"), "1", "must be text, got the number 1"),
    "bytes": (bytes, {"type": "string"}, '"a"', b"a", "1", "must be text, got the number 1"),
    "secret": (
        SecretStr,
        {"writeOnly": True},
        '"s3cr3t"',
        SecretStr("s3cr3t"),
        "[1]",
        "must be text",
    ),
    "any": (Any, {}, '{"a":[1,null]}', {"a": [1, None]}, "[NaN]", f"[0]: {FINITE}"),
    "bare-dict": (
        dict,
        {"type": "object"},
        '{"a":{"b":1}}',
        {"a": {"b": 1}},
        '{"a":{"b":Infinity}}',
        f"a.b: {FINITE}",
    ),
    "described": (
        Annotated[str, Field(description="A city.")],
        {"type": "string", "description": "A city."},
        '"Rome"',
        "Rome",
        "null",
        "must be text, got null",
    ),
}


def refused(schema: Schema[Any], data: str | bytes) -> ToolValidationError:
    """Parse input that must be refused, and return the error."""
    with pytest.raises(ToolValidationError) as caught:
        schema.parse(data)
    error = caught.value
    assert str(error) == "; ".join(map(str, error.problems))
    return error


def test_the_table_is_as_long_as_promised():
    """The table has at least forty different annotations."""
    assert len({str(row[0]) for row in ROWS.values()}) >= 40


@pytest.mark.parametrize("name", ROWS)
def test_schema_says(name: str):
    """The JSON Schema of each row's annotation contains the row's expected part."""
    annotation, expected, *_ = ROWS[name]
    found = Schema[Any](annotation).json_schema
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", ROWS)
def test_parse_accepts(name: str):
    """Each row's accepted JSON gives exactly the row's value and type, from text and from bytes."""
    annotation, _, data, value, _, _ = ROWS[name]
    schema = Schema[Any](annotation)
    for parsed in (schema.parse(data), schema.parse(data.encode())):
        assert parsed == value
        assert type(parsed) is type(value)


@pytest.mark.parametrize("name", ROWS)
def test_parse_refuses(name: str):
    """Each row's refused JSON gives exactly the row's message."""
    annotation, _, _, _, data, words = ROWS[name]
    assert str(refused(Schema(annotation), data)) == words


@pytest.mark.parametrize("name", ROWS)
def test_dump_gives_what_parse_takes(name: str):
    """A value that is dumped and parsed again is unchanged, unless part of it is masked or not kept."""
    annotation, _, data, value, _, _ = ROWS[name]
    if annotation in (SecretStr, Scaled):
        return  # secrets are masked, and an InitVar is not kept
    schema = Schema[Any](annotation)
    assert schema.parse(schema.dump(schema.parse(data))) == value


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object with properties in a JSON Schema."""
    if isinstance(schema, dict):
        if "properties" in schema and isinstance(schema["properties"], dict):
            yield schema
        for part in schema.values():
            yield from objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from objects(part)


@pytest.mark.parametrize("name", ROWS)
def test_every_object_is_closed(name: str):
    """Every object with properties allows no other properties, and no schema has a title."""
    schema = Schema[Any](ROWS[name][0]).json_schema
    assert [found for found in objects(schema) if found.get("additionalProperties") is not False] == []
    assert '"title"' not in json.dumps(schema)


def test_the_walk_finds_objects_at_depth():
    """`objects`, a helper of these tests, finds nested objects and every member of a union."""
    assert len(list(objects(Schema(Line).json_schema))) == 2
    assert len(list(objects(Schema(list[Cat | Dog | Point]).json_schema))) == 3


# --- infinite and very large numbers -------------------------------------------------------------

LARGE = "1" * 400
TOO_LARGE = "is too large for a float"


@pytest.mark.parametrize(
    "written",
    ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E+999", f"{LARGE}.0", "1" + "0" * 250 + "e99"],
)
@pytest.mark.parametrize(
    ("annotation", "form", "where"),
    [
        (float, "{}", ""),
        (Any, "{}", ""),
        (object, "{}", ""),
        (list[float], "[1, {}]", "[1]: "),
        (list[Any], "[{}]", "[0]: "),
        (dict[str, float], '{{"a": {}}}', "a: "),
        (dict[str, Any], '{{"a": {{"b": [{}]}}}}', "a.b[0]: "),
        (tuple[int, float], "[1, {}]", "[1]: "),
        (float | None, "{}", ""),
        (float | str, "{}", ""),
        (Box[float], '{{"item": {}}}', "item: "),
        (Crate[Any], '{{"item": {}}}', "item: "),
        (Decimal, "{}", ""),
        (list[Box[float | None]], '[{{"item": {}}}]', "[0].item: "),
    ],
    ids=str,
)
def test_no_infinity_comes_in(annotation: Any, form: str, where: str, written: str):
    """NaN, infinities and overflowing floats are refused wherever a float or a `Decimal` is allowed, with the same message."""
    assert str(refused(Schema(annotation), form.format(written))) == f"{where}{FINITE}"
    assert str(refused(Schema(annotation), form.format(written).encode())) == f"{where}{FINITE}"


@pytest.mark.parametrize("written", ["NaN", "nan", "Infinity", "-inf", "1e999"])
@pytest.mark.parametrize(
    ("annotation", "form", "where"),
    [
        (dict[float, int], '{{"{}": 1}}', "{}: "),
        (Mapping[float | None, int] | None, '{{"{}": 1}}', "{}: "),
        (list[dict[float, int]], '[{{"{}": 1}}]', "[0].{}: "),
        (Box[dict[float, int]], '{{"item": {{"{}": 1}}}}', "item.{}: "),
    ],
    ids=str,
)
def test_no_infinity_comes_in_as_a_key(annotation: Any, form: str, where: str, written: str):
    """Keys of a mapping are text in JSON. NaN and infinities are refused there too, if the keys are numbers."""
    assert str(refused(Schema(annotation), form.format(written))) == f"{where.format(written)}{FINITE}"
    assert Schema(dict[float, int]).parse('{"1.5": 1}') == {1.5: 1}
    assert Schema(dict[str, int]).parse('{"NaN": 1}') == {"NaN": 1}


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    ("annotation", "form", "where"),
    [
        (float, "{}", ""),
        (float | None, "{}", ""),
        (list[float], "[{}]", "[0]: "),
        (Box[dict[str, float]], '{{"item": {{"a": {}}}}}', "item.a: "),
    ],
    ids=str,
)
def test_a_whole_number_past_every_float_is_refused_as_a_float(
    annotation: Any, form: str, where: str, sign: str
):
    """An integer with four hundred digits is refused as a float, because it would become infinity."""
    assert str(refused(Schema(annotation), form.format(sign + LARGE))) == f"{where}{TOO_LARGE}"


@pytest.mark.parametrize("annotation", [int, Any, int | float, float | int])
def test_a_large_whole_number_stays_one(annotation: Any):
    """An integer with four hundred digits is accepted wherever an integer is allowed."""
    assert Schema[Any](annotation).parse(LARGE) == int(LARGE)


def test_the_word_infinity_in_text_is_fine():
    """Text may contain NaN and Infinity, because only numbers are checked."""
    assert Schema(dict[str, Any]).parse('{"a": "NaN Infinity 1e999"}') == {"a": "NaN Infinity 1e999"}


def test_numbers_near_the_end_are_fine():
    """The largest float is accepted unchanged, and a float that underflows becomes zero."""
    assert Schema(float).parse("1.7976931348623157e308") == 1.7976931348623157e308
    assert Schema(float).parse("1e-999") == 0.0


def test_a_whole_number_written_as_an_infinity_is_told_what_to_be():
    """For an int field, an infinity is reported only once, as a value of the wrong type."""
    assert str(refused(Schema(Point), '{"x": 1e999}')) == "x: must be a whole number, got the number inf"


def test_a_default_that_json_cannot_say_is_not_shown():
    """An infinite default works, but is left out of the JSON Schema, because JSON can't express it."""

    @dataclass
    class Limits:
        most: float = math.inf
        least: float = 0.5

    schema = Schema(Limits)
    assert schema.parse("{}").most == math.inf
    assert schema.json_schema["properties"] == {
        "most": {"type": "number"},
        "least": {"type": "number", "default": 0.5},
    }


# --- unknown keys --------------------------------------------------------------------------------


@dataclass
class Holder:
    one: Point | None = None
    many: list[Point] = field(default_factory=list[Point])
    named: dict[str, Point] = field(default_factory=dict[str, Point])
    pair: tuple[int, Point] | None = None
    row: tuple[Point, ...] = ()
    user: User | None = None
    options: Options | None = None
    open: Open | None = None
    pet: Pet | None = None
    box: Box[Point] | None = None
    crates: list[Crate[Point]] = field(default_factory=list[Crate[Point]])
    tree: Tree | None = None
    line: Line | None = None
    deep: dict[str, list[Box[Line]]] = field(default_factory=dict[str, list[Box[Line]]])
    nested: "Holder | None" = None


@pytest.mark.parametrize(
    ("sent", "where"),
    [
        ('{"odd":1}', "odd"),
        ('{"one":{"x":1,"odd":1}}', "one.odd"),
        ('{"many":[{"x":1},{"x":1,"odd":1}]}', "many[1].odd"),
        ('{"named":{"k":{"x":1,"odd":1}}}', "named.k.odd"),
        ('{"pair":[1,{"x":1,"odd":1}]}', "pair[1].odd"),
        ('{"row":[{"x":1,"odd":1}]}', "row[0].odd"),
        ('{"user":{"name":"a","odd":1}}', "user.odd"),
        ('{"options":{"depth":1,"odd":1}}', "options.odd"),
        ('{"open":{"odd":1}}', "open.odd"),
        ('{"pet":{"kind":"cat","lives":1,"odd":1}}', "pet.odd (as cat)"),
        ('{"box":{"item":{"x":1,"odd":1}}}', "box.item.odd"),
        ('{"crates":[{"item":{"x":1,"odd":1}}]}', "crates[0].item.odd"),
        ('{"tree":{"value":1,"children":[{"value":1,"odd":1}]}}', "tree.children[0].odd"),
        ('{"line":{"start":{"x":1,"odd":1},"end":{"x":1}}}', "line.start.odd"),
        (
            '{"deep":{"k":[{"item":{"start":{"x":1,"odd":1},"end":{"x":1}}}]}}',
            "deep.k[0].item.start.odd",
        ),
        ('{"nested":{"nested":{"nested":{"odd":1}}}}', "nested.nested.nested.odd"),
    ],
)
def test_an_unknown_key_is_refused_in_every_container(sent: str, where: str):
    """An unknown key is reported once with its place, at any depth and in any kind of container."""
    [problem] = refused(Schema(Holder), sent).problems
    assert problem.where == where
    assert problem.what.startswith("unknown; remove it. Known here: ")


def test_a_model_that_allows_extras_is_closed_too():
    """Extra fields are refused even if the user's pydantic class has `extra="allow"`."""
    schema = Schema(Open)
    assert schema.json_schema["additionalProperties"] is False
    assert str(refused(schema, '{"b":1}')) == "b: unknown; remove it. Known here: a"
    assert Open.model_validate({"b": 1}).model_extra == {"b": 1}  # the class itself is unchanged


def test_an_unknown_key_that_is_no_plain_word_is_quoted():
    """An unknown key that is not a plain word is quoted in the message, so that it does not look like a path."""
    assert refused(Schema(Point), '{"x":1,"a.b":1}').problems[0].where == '["a.b"]'
    assert refused(Schema(Point), '{"x":1,"":1}').problems[0].where == '[""]'


def test_the_context_is_no_argument():
    """The injected context is not an argument, and passing it is refused."""

    @tool
    def look(at: str, context: ToolContext) -> str:
        """Look somewhere."""
        return at

    assert "context" not in look.json_schema["properties"]
    with pytest.raises(ToolValidationError) as caught:
        look.parse('{"at": "a", "context": {}}')
    assert str(caught.value) == "context: unknown; remove it. Known here: at"


# --- the messages of refusals --------------------------------------------------------------------


def test_all_problems_of_one_input_are_reported_at_once():
    """All problems in one input are reported in one error, each with its place."""

    @dataclass
    class Order:
        item: str
        count: Annotated[int, Gt(0)]
        price: float
        to: User

    error = refused(Schema(Order), '{"count":0,"price":1e999,"to":{"name":5},"colour":"red"}')
    assert [str(problem) for problem in error.problems] == [
        "item: required, and missing",
        "count: must be greater than 0, got the number 0",
        "to.name: must be text, got the number 5",
        "colour: unknown; remove it. Known here: count, item, price, to",
        f"price: {FINITE}",
    ]


def test_the_same_problem_is_said_once():
    """A problem that several members of a union share is reported once."""
    error = refused(Schema(Box[Box[int] | Box[str]]), '{"item":{"item":1,"odd":1}}')
    said = list(map(str, error.problems))
    assert len(said) == len(set(said))
    assert "item.odd (as Box): unknown; remove it. Known here: item" in said


NOT_JSON = "not valid JSON: "


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", f"{NOT_JSON}EOF while parsing a value at line 1 column 0"),
        ("{", f"{NOT_JSON}EOF while parsing an object at line 1 column 1"),
        ('{"x":1}}', f"{NOT_JSON}trailing characters at line 1 column 8"),
        ("{'x':1}", f"{NOT_JSON}key must be a string at line 1 column 2"),
        ('{"x":1,}', f"{NOT_JSON}trailing comma at line 1 column 8"),
        ("NaN!", f"{NOT_JSON}trailing characters at line 1 column 4"),
        (b"\xff", f"{NOT_JSON}expected value at line 1 column 1"),
        ('{"x":"\ud800"}', f"{NOT_JSON}it contains a lone surrogate"),
        ("[" * 100_000, f"{NOT_JSON}recursion limit exceeded at line 1 column 202"),
        ("[1]", "must be an object, got a list"),
        ("null", "must be an object, got null"),
        ('"{}"', 'must be an object, got the text "{}"'),
        ("7", "must be an object, got the number 7"),
        ("true", "must be an object, got true"),
    ],
    ids=range(14),
)
def test_what_is_no_json_object_is_refused(data: str | bytes, words: str):
    """The message for malformed JSON says what is wrong in it. For JSON that is not an object, it says what was expected."""
    assert str(refused(Schema(Point), data)) == words


def test_long_text_is_shown_in_part():
    """A message to the model quotes only part of a long text."""
    error = refused(Schema(Point), json.dumps({"x": "z" * 5000}))
    assert str(error) == 'x: must be a whole number, got the text "' + "z" * 56 + '…"'


def test_names_of_forms_that_mean_nothing_are_left_out():
    """Labels that pydantic invents for the members of a union are not shown to the model."""
    text = str(refused(Schema(Box[SecretStr | int]), '{"item":1.5}'))
    assert text == "item: must be text; item (as int): must be a whole number"


def test_what_a_type_raises_itself_is_a_refusal():
    """Any exception that a user's class raises during validation becomes a refusal with the exception's message."""

    @dataclass
    class Positive:
        n: int

        def __post_init__(self) -> None:
            if self.n < 0:
                raise LookupError("no such number")
            if self.n == 0:
                raise AssertionError("zero is nothing")

    assert str(refused(Schema(Positive), '{"n":-1}')) == (
        "refused by the type itself: LookupError: no such number"
    )
    assert str(refused(Schema(Positive), '{"n":0}')) == "zero is nothing"


# --- secrets -------------------------------------------------------------------------------------


class Login(BaseModel):
    password: SecretStr = Field(min_length=8)
    old: list[SecretStr] = []
    named: dict[str, SecretStr] = {}
    maybe: SecretStr | None = None
    either: SecretStr | int = 0


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ('{"password":"hunt"}', "password: must have at least 8 characters"),
        ('{"password":4711}', "password: must be text"),
        ('{"password":"hunterhunter","old":[4711]}', "old[0]: must be text"),
        ('{"password":"hunterhunter","named":{"k":4711}}', "named.k: must be text"),
        ('{"password":"hunterhunter","maybe":4711}', "maybe: must be text"),
        (
            '{"password":"hunterhunter","either":4711.5}',
            "either: must be text; either (as int): must be a whole number",
        ),
        (
            '{"pasword":"hunterhunter"}',
            "password: required, and missing; pasword: unknown; did you mean password?",
        ),
        (
            '{"password":"hunterhunter\ud800"}',
            f"{NOT_JSON}it contains a lone surrogate",
        ),
    ],
)
def test_a_secret_is_never_echoed(sent: str, words: str):
    """A secret's value appears in no error, no problem and no chained exception."""
    error = refused(Schema(Login), sent)
    assert str(error) == words
    told = repr((error, error.problems, error.__cause__, error.__context__))
    assert "hunt" not in told
    assert "4711" not in told


def test_a_secret_default_is_not_advertised():
    """The JSON Schema shows a secret default neither in plain text nor masked, and building it causes no warning."""

    class Keys(BaseModel):
        key: SecretStr = SecretStr("hunter2")
        keys: list[SecretStr] = [SecretStr("hunter2")]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = Schema(Keys).json_schema
    assert all("default" not in part for part in shown["properties"].values())
    assert "*" not in json.dumps(shown)


def test_a_secret_is_masked_when_dumped():
    """A secret appears neither in the JSON of `Schema.dump` nor in that of `to_json`."""
    login = Login(password=SecretStr("hunterhunter"))
    assert b"hunter" not in Schema(Login).dump(login)
    assert b"hunter" not in to_json(login)


# --- types that are refused ----------------------------------------------------------------------


class Corner(enum.Enum):
    """An enum whose values JSON does not have."""

    TOP_LEFT = (0, 0)
    OTHER = object()


INDESCRIBABLE = "can't be described to a model"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (range, f"range {INDESCRIBABLE}: "),
        (list[range], f"list[range] {INDESCRIBABLE}: "),
        (Iterator[int], f"Iterator[int] {INDESCRIBABLE}: "),
        (type[int], f"type[int] {INDESCRIBABLE}: a class can't be sent as JSON. Use "),
        (Corner, f"Corner {INDESCRIBABLE}: a value of the enum is neither text nor a number. "),
        (dict[tuple[int, int], str], f"dict[tuple[int, int], str] {INDESCRIBABLE}: a key "),
    ],
    ids=str,
)
def test_a_type_that_cannot_be_described_is_refused(annotation: Any, words: str):
    """The error for a type without a JSON Schema names the type as written, and lists the types to use instead."""
    with pytest.raises(DefinitionError) as caught:
        Schema(annotation)
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith("plain JSON values.")


def test_schema_of_makes_one_schema_for_a_type():
    """`schema_of` returns the same schema object for the same type."""
    assert schema_of(Point) is schema_of(Point)
    assert schema_of(Point).parse('{"x":1}') == Point(1)


def test_parse_value_goes_through_json():
    """`parse_value` applies the same rules to a Python value as `parse` does to a model's JSON."""
    assert Schema(Line).parse_value({"start": Point(1), "end": {"x": 2}}) == Line(Point(1), Point(2))
    with pytest.raises(ToolValidationError, match=r"^x: must be a whole number"):
        Schema(Point).parse_value({"x": "1"})
    with pytest.raises(ToolValidationError, match=r"^can't be written as JSON: "):
        Schema(Point).parse_value({"x": object()})
    with pytest.raises(ToolValidationError, match=FINITE):
        Schema(Box[float]).parse_value({"item": math.nan})


@pytest.mark.parametrize(
    "value", [Letter("a"), Sender.model_validate({"from": "a"}), Counted("abc"), Box(Letter("a"))], ids=repr
)
def test_parse_value_takes_an_instance_back(value: Any):
    """`parse_value` accepts an instance, even if its class has aliases or fields with `init=False`."""
    annotation = Box[Letter] if isinstance(value, Box) else type(value)
    assert Schema[Any](annotation).parse_value(value) == value


def test_parse_value_checks_an_instance():
    """`parse_value` validates an instance too, because a dataclass does not validate its own fields."""
    wrong: Any = "q"
    with pytest.raises(ToolValidationError, match=r'^x: must be a whole number, got the text "q"$'):
        Schema(Point).parse_value(Point(wrong))


def test_the_user_s_classes_are_not_touched():
    """Making a schema changes neither a dataclass nor a pydantic model."""

    @dataclass
    class Plain:
        a: int

    class Model(BaseModel):
        a: int = 0

    before = (set(vars(Plain)), Model.model_config.copy(), Model.model_json_schema())
    for kind in (Plain, Model):
        Schema[Any](kind)
    assert (set(vars(Plain)), Model.model_config, Model.model_json_schema()) == before


# --- laws ----------------------------------------------------------------------------------------


@dataclass
class Leaf:
    text: str
    number: int
    ratio: float
    flag: bool | None = None
    color: Color = Color.RED


@dataclass
class Branch:
    leaf: Leaf
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    named: dict[str, Leaf] = field(default_factory=dict[str, Leaf])
    pair: tuple[int, Leaf] | None = None
    below: "Branch | None" = None
    branches: "list[Branch]" = field(default_factory=list["Branch"])
    when: datetime | None = None
    words: frozenset[str] = frozenset()


texts = st.text(max_size=8)
leaf = st.builds(
    Leaf,
    texts,
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.booleans(),
    st.sampled_from(Color),
)


def branch(inner: st.SearchStrategy[Branch | None]) -> st.SearchStrategy[Branch]:
    return st.builds(
        Branch,
        leaf,
        st.lists(leaf, max_size=2),
        st.dictionaries(texts, leaf, max_size=2),
        st.none() | st.tuples(st.integers(), leaf),
        inner,
        st.lists(inner.filter(bool), max_size=2),
        st.none() | st.datetimes(timezones=st.just(UTC)),
        st.frozensets(texts, max_size=2),
    )


branches = st.recursive(branch(st.none()), branch, max_leaves=4)
BRANCH = Schema(Branch)


@settings(deadline=None)
@given(branches)
def test_law_dump_then_parse_is_the_value(value: Branch):
    """A dumped value of a nested, recursive type parses to an equal value."""
    assert BRANCH.parse(BRANCH.dump(value)) == value


Location = tuple[str | int, ...]
FIELDS = ({"leaf", "leaves"}, {"text", "number"})


def places(value: Any, location: Location = ()) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield every JSON object that represents a dataclass, with its place."""
    if isinstance(value, dict):
        if any(names <= set(value) for names in FIELDS):
            yield location, value
        for key, inner in value.items():
            yield from places(inner, (*location, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*location, index))


def written(location: Location) -> str:
    """Return the place in the notation that errors use."""
    text = ""
    for part in location:
        if isinstance(part, str) and part and all(char.isalnum() or char in "_-" for char in part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


@settings(deadline=None)
@given(branches, st.data())
def test_law_an_unknown_key_is_refused_where_it_is(value: Branch, data: st.DataObject):
    """One unknown key in any object of a valid input gives one problem, which names its place."""
    sent = json.loads(BRANCH.dump(value))
    location, found = data.draw(st.sampled_from(list(places(sent))))
    found["unknown_key"] = 1
    [problem] = refused(BRANCH, json.dumps(sent)).problems
    assert problem.where == written((*location, "unknown_key"))
    assert problem.what.startswith("unknown; remove it. Known here: ")
