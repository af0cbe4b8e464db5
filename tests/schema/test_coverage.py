"""Approval covers everything that a tool gets: arguments whose JSON hides a part are refused before anybody is asked."""

import dataclasses
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from uuid import UUID

import pydantic_core
import pytest
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    SecretStr,
    field_serializer,
    model_serializer,
)
from typing_extensions import TypedDict

from handrail import CapabilityPolicy, open_gate, tool
from handrail.question import Question
from handrail.schema import Schema
from handrail.schema.coverage import first_hidden
from handrail.testing import Person


class Excluded(BaseModel):
    item: str
    cents: int = Field(default=0, exclude=True)


class Overwritten(BaseModel):
    fee: int = Field(alias="amount")
    total: int = Field(serialization_alias="amount")


class Cut(BaseModel):
    text: str

    @field_serializer("text")
    def cut(self, text: str) -> str:
        return text[:5]


class Summary(BaseModel):
    text: str
    amount: int

    @model_serializer
    def sum_up(self) -> dict[str, Any]:
        return {"text": self.text}


class Someday(BaseModel):
    when: datetime

    @field_serializer("when")
    def soften(self, when: datetime) -> str:
        return "someday"


Lower = Annotated[str, PlainSerializer(str.lower)]

HIDDEN: dict[str, tuple[Any, str, str]] = {
    "an excluded field": (Excluded, '{"item": "pen", "cents": 99900}', "v.cents"),
    "an excluded field in a list": (list[Excluded], '[{"item": "pen", "cents": 99900}]', "v.0.cents"),
    "a field under another's name": (Overwritten, '{"amount": 99900, "total": 1}', "v.fee"),
    "a field that is cut": (Cut, '{"text": "hello; rm -rf /"}', "v.text"),
    "a model that sums itself up": (Summary, '{"text": "pen", "amount": 99900}', "v.amount"),
    "a softened date": (Someday, '{"when": "2030-01-01T00:00:00Z"}', "v.when"),
    "keys that are written alike": (dict[Lower, int], '{"a": 99900, "A": 1}', "v"),
    "secret keys": (dict[SecretStr, int], '{"x": 99900, "y": 1}', "v"),
}


@pytest.mark.parametrize(("kind", "given", "where"), HIDDEN.values(), ids=HIDDEN)
def test_what_would_be_hidden_is_refused(kind: Any, given: str, where: str):
    """If a part of an argument would be hidden, nobody is asked, the handler does not run, and the error names the part."""
    ran: list[object] = []
    asked: list[Question] = []

    @tool(effect="idempotent", capabilities={"x"})
    async def take(v: kind) -> str:  # pyright: ignore[reportInvalidTypeForm]  # parametrized
        """Take a value."""
        ran.append(v)
        return "taken"

    person = Person(lambda question: asked.append(question) or True)
    gate = open_gate([take], policies=[CapabilityPolicy({"x": "ask"})], environment=person)
    result = gate.invoke("take", f'{{"v": {given}}}').wait()
    assert (ran, asked) == ([], [])
    assert not result.success
    assert f"{where}: it can't be shown to a person" in result.render()


class Colour(Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


class Names(RootModel[list[str]]):
    pass


class Options(TypedDict):
    deep: bool


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    at: Point = Point(1, 2)
    shout: Annotated[str, AfterValidator(lambda text: f"{text}!")] = "hey!"
    key: SecretStr = SecretStr("hunter2")
    real: int = Field(default=3, alias="genuine")


@dataclasses.dataclass
class Plain:
    path: Path = Path("a/b")
    colours: tuple[Colour, ...] = (Colour.RED,)
    options: Options | None = None
    due: date = date(2030, 1, 2)
    wait: timedelta = timedelta(seconds=90)
    price: Decimal = Decimal("1.10")
    id: UUID = dataclasses.field(default_factory=lambda: UUID(int=7))
    raw: bytes = b"abc"
    words: frozenset[str] = frozenset(["a"])
    numbers: dict[int, float] = dataclasses.field(default_factory=lambda: {1: 0.5})
    inner: Open = dataclasses.field(default_factory=Open)
    made: str = dataclasses.field(default="by the class", init=False)


@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        Plain(options={"deep": True}),
        Open(at=Point(3, 4), other=[1, {"a": None}]),  # pyright: ignore[reportCallIssue]  # extra fields are allowed
        datetime(2030, 1, 1, tzinfo=UTC),
        [Open(), Open()],
        Names(["ann", "bob"]),
    ],
    ids=["defaults", "options", "extra fields", "a time", "a list", "a root model"],
)
def test_ordinary_values_are_shown_whole(value: Any):
    """A value whose JSON shows all of it is accepted, even if a validator changes it at each parse."""
    schema: Schema[Any] = Schema(type(value) if not isinstance(value, list) else list[Open])
    assert first_hidden(value, pydantic_core.from_json(schema.dump(value)), masked=schema.secret) is None
