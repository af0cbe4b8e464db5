"""A definition creates each adapter and schema once. The quick ways it takes have the same outcome as the slow ones."""

import dataclasses
import enum
import math
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field, SecretStr, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from handrail import ToolContext, tool
from handrail.errors import ToolDefinitionError
from handrail.schema import Schema
from handrail.schema.secrets import MASK
from handrail.tools.path_arguments import PathArg, PathFinder


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Place:
    name: str = "Oslo"


class Note(BaseModel):
    text: str = ""


def small(number: int) -> int:
    if number > 9:
        raise ValueError("too large")
    return number


ANNOTATIONS: list[Any] = [
    str,
    int,
    float,
    bool,
    bytes,
    str | None,
    int | str,
    Annotated[int, Field(ge=1, le=100)],
    Annotated[str, Field(description="A name.", max_length=3)],
    Annotated[int, AfterValidator(small)],
    Literal["new", "old", 1],
    list[int],
    tuple[int, ...],
    dict[str, int],
    Colour,
    Place,
    Note,
    date,
    SecretStr,
    Any,
]
DEFAULTS: list[Any] = [
    *(
        None,
        True,
        0,
        1,
        50,
        101,
        1.0,
        math.inf,
        math.nan,
        "",
        "new",
        "newer",
        "\ud800",
        b"",
        (),
        (1,),
        ("a",),
    ),
    *(Colour.RED, Place(), Note(), date(2026, 1, 2), SecretStr("x"), frozenset[int](), object()),
]


def define(annotation: Any, default: Any) -> Any:
    def report(city: str, days: Any = default) -> None:
        """Report."""

    report.__annotations__["days"] = annotation
    return tool(report)


@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=range(len(ANNOTATIONS)))
def test_a_default_is_valid_exactly_if_its_annotation_accepts_it(annotation: Any):
    """The quick check of a default in its field and a schema of the annotation alone decide alike."""
    alone = Schema[Any](annotation)
    for default in DEFAULTS:
        if type(default).__hash__ is None:
            continue
        made = dataclasses.make_dataclass("made", [("days", annotation, dataclasses.field(default=default))])
        assert Schema[Any](made).accepts_field("days", default) == alone.accepts(default)


def test_a_field_that_can_t_stand_alone_is_not_certainly_valid():
    """A type that refers to itself, a field without a default and a missing field are left to the schema of the annotation."""

    @dataclasses.dataclass(frozen=True)
    class Tree:
        inner: "Tree | None" = None

    @dataclasses.dataclass
    class Params:
        city: str
        tree: Tree = Tree()  # it is frozen

    schema = Schema[Any](Params, locals())
    assert not schema.accepts_field("tree", Tree())
    assert not schema.accepts_field("city", "Oslo")
    assert not schema.accepts_field("other", 1)
    assert not Schema[Any](int).accepts_field("days", 1)


def test_the_first_of_several_mistakes_is_told():
    """An invalid default is told before a missing description, and before what else it makes impossible."""

    def report(city: int = "Oslo") -> None: ...  # pyright: ignore[reportArgumentType]  # the default is wrong

    with pytest.raises(ToolDefinitionError, match="default 'Oslo' of 'city' does not match"):
        tool(report)
    with pytest.raises(ToolDefinitionError, match="of 'days' does not match"):
        define(int, "\ud800")


def test_each_adapter_and_schema_is_created_once(monkeypatch: pytest.MonkeyPatch):
    """A tool of plain types creates one type adapter and one JSON Schema, whatever its defaults and its result."""
    counts = {"adapters": 0, "schemas": 0}
    adapter: Any = TypeAdapter
    create, generate = adapter.__init__, GenerateJsonSchema.generate

    def counting_adapter(self: Any, *arguments: Any, **named: Any) -> None:
        counts["adapters"] += 1
        create(self, *arguments, **named)

    def counting_schema(self: Any, *arguments: Any, **named: Any) -> Any:
        counts["schemas"] += 1
        return generate(self, *arguments, **named)

    def define_one() -> None:
        @tool
        async def forecast(
            city: str,
            days: int = 3,
            scale: Annotated[int, Field(ge=1)] = 1,
            *,
            order: Literal["new", "old"] = "new",
            note: str | None = None,
            context: ToolContext,
        ) -> str:
            """Forecast."""
            return city

        assert forecast.parse('{"city": "Oslo"}').order == "new"

    define_one()
    monkeypatch.setattr(TypeAdapter, "__init__", counting_adapter)
    monkeypatch.setattr(GenerateJsonSchema, "generate", counting_schema)
    define_one()
    assert counts == {"adapters": 1, "schemas": 1}


@given(default=st.none() | st.booleans() | st.integers() | st.text())
def test_a_plain_default_is_shown_as_pydantic_would_show_it(default: Any):
    """The JSON Schema shows a plain default as pydantic's own generator does."""
    made = dataclasses.make_dataclass("made", [("value", Any, dataclasses.field(default=default))])
    theirs = TypeAdapter(made).json_schema()["properties"]["value"]
    ours = Schema[Any](made).json_schema["properties"]["value"]
    assert ours.get("default", "none") == theirs.get("default", "none")


def test_a_default_that_looks_like_a_mask_is_not_shown():
    """The text that stands for a secret is no default that a model should repeat."""
    assert "default" not in define(str, MASK).json_schema["properties"]["days"]


@pytest.mark.filterwarnings("ignore:.*json_encoders")
def test_json_encoders_decide_how_a_default_is_shown():
    """A default is encoded by pydantic if the type's configuration says how."""

    class Params(BaseModel):
        model_config = {"json_encoders": {int: lambda number: f"{number} days"}}
        days: int = 3

    assert Schema[Any](Params).json_schema["properties"]["days"]["default"] == "3 days"


FIELDS: list[Any] = [
    ("city", str, dataclasses.field()),
    ("days", int, dataclasses.field(default=3)),
    ("tags", list[str], dataclasses.field(default_factory=list[str])),
]


def test_params_are_as_those_of_a_dataclass():
    """The params of a tool are created, compared, shown and hashed as those of a dataclass with the same fields."""

    @tool
    def forecast(city: str, days: int = 3, tags: list[str] = []) -> None:  # noqa: B006  # defaults are copied
        """Forecast."""

    ours, theirs = forecast.params, dataclasses.make_dataclass("forecast", FIELDS, kw_only=True)
    for kind in (ours, theirs):
        params = kind(city="Oslo", days=2)
        assert params == kind(city="Oslo", days=2, tags=[]) != kind(city="Oslo")
        assert params != theirs(city="Oslo", days=2) or kind is theirs
        assert repr(params) == "forecast(city='Oslo', days=2, tags=[])"
        assert kind.__hash__ is None
        assert dataclasses.replace(params, days=4).days == 4
        assert kind(city="a").tags is not kind(city="a").tags
        for wrong in ({}, {"city": "a", "place": "b"}):
            with pytest.raises(TypeError, match="city" if not wrong else "place"):
                kind(**wrong)
    assert "description" not in forecast.json_schema


@pytest.mark.parametrize(
    ("annotation", "declared"),
    [
        (list[Annotated[str, PathArg("read")]], {"read"}),
        (dict[str, list[Annotated[str, Field(description="A path."), PathArg("write")]]], {"write"}),
        (Annotated[list[Annotated[str, PathArg("read")]], Field(max_length=2)], {"read"}),
        (Literal["new"] | Annotated[str, PathArg("write")], {"write"}),
        (list[str] | Literal["new"] | None, set[str]()),
    ],
    ids=range(5),
)
def test_paths_are_found_inside_plain_types(annotation: Any, declared: set[str]):
    """Types that have no fields are skipped, and what they contain is not."""
    assert PathFinder(annotation).declared == declared
