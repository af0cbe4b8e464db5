"""A value of each type that a tool may declare comes back from the record as it was, and replays without a difference."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import ipaddress
import math
import uuid
from collections import Counter, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import pytest

from handrail import Adapter, MemoryJournal, Prompt, ScriptedModel, Tool, ToolCall, UserContext, runs, tool
from handrail.messages import ModelRequest
from support.parked_runs import park_and_resume


class Color(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


class Pair(NamedTuple):
    number: int
    word: str


@dataclasses.dataclass
class Place:
    path: PurePosixPath
    address: ipaddress.IPv4Address
    paths: dict[PurePosixPath, Decimal]


@dataclasses.dataclass
class Mean:
    value: float


VALUES: list[tuple[Any, Any]] = [
    (PurePosixPath, PurePosixPath("a/b")),
    (PurePath, PurePath("a/b")),
    (PureWindowsPath, PureWindowsPath("a\\b")),
    (Path, Path("/a/b")),
    (PosixPath, PosixPath("a")),
    (list[PurePosixPath], [PurePosixPath("a")]),
    (PurePosixPath | None, PurePosixPath("a")),
    (Place, Place(PurePosixPath("a"), ipaddress.IPv4Address("1.2.3.4"), {PurePosixPath("b"): Decimal("1.10")})),
    (ipaddress.IPv6Network, ipaddress.IPv6Network("::/64")),
    (Decimal, Decimal("1.10")),
    (set[int], {1, 2}),
    (frozenset[Color], frozenset({Color.RED})),
    (Color, Color.RED),
    (Size, Size.SMALL),
    (dict[Color, int], {Color.RED: 1}),
    (uuid.UUID, uuid.UUID(int=5)),
    (dict[uuid.UUID, str], {uuid.UUID(int=5): "a"}),
    (datetime.timedelta, datetime.timedelta(seconds=90, microseconds=5)),
    (datetime.datetime, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)),
    (datetime.date, datetime.date(2026, 1, 1)),
    (datetime.time, datetime.time(1, 2)),
    (Fraction, Fraction(1, 3)),
    (complex, 1 + 2j),
    (tuple[int, str], (1, "a")),
    (Pair, Pair(1, "a")),
    (deque[int], deque([1])),
    (Counter[str], Counter("aab")),
    (dict[int, str], {1: "a"}),
]  # fmt: skip


async def before_and_after(asked: Tool[Any, Any], arguments: dict[str, Any]) -> list[Any]:
    """Return what an outer call gets from `asked` before its run is parked, and after it is resumed, from the record.

    The model calls `asked` too. The finished run is replayed, without a difference.
    """
    values: list[Any] = []

    @tool(effect="idempotent", description="Use the value.")
    async def use(context: UserContext) -> str:
        values.append((await context.call(asked.name, **arguments)).unwrap())
        return await context.wait_for("word", {}, str)

    def answer(request: ModelRequest) -> Any:
        return {1: ToolCall(asked.name, arguments), 3: ToolCall("use")}.get(len(request.messages), "Done.")

    journal, prompt = MemoryJournal(), Prompt[Any]("p", "Use it.", tools=[asked, use])
    assert await park_and_resume(Adapter(ScriptedModel(answer), journal=journal), prompt) == "Done."
    assert await runs.replay(journal, "r1", prompt) is None
    return values


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[str(kind) for kind, _ in VALUES])
async def test_a_value_comes_back_from_the_record_as_it_was(kind: Any, value: Any):
    """A value of each type can be an argument and a result. It has the same type and value after a resume."""
    given: list[Any] = []

    def echo(value: Any) -> Any:
        given.append(value)
        return value

    echo.__annotations__ = {"value": kind, "return": kind}
    echoing = tool(effect="irreversible", description="Return the value.")(echo)
    live, recorded = await before_and_after(echoing, {"value": value})
    assert given == [value, value]  # for the model and for the outer call, and not again
    assert live == recorded == value
    assert {type(live), type(recorded), *map(type, given)} == {type(value)}


@pytest.mark.parametrize("kind", [float, Mean, list[Any], Any], ids=str)
async def test_a_number_that_json_lacks_comes_back_from_the_record(kind: Any):
    """A run whose tool returned NaN or an infinity can be resumed, and gets these numbers again."""

    def mean() -> Any:
        return (
            [math.nan, -math.inf, "NaN"]
            if kind == list[Any]
            else Mean(math.nan)
            if kind is Mean
            else math.nan
        )

    mean.__annotations__ = {"return": kind}
    live, recorded = await before_and_after(tool(effect="irreversible", description="Tell it.")(mean), {})
    assert repr(live) == repr(recorded) == repr(mean())


async def test_words_that_look_like_numbers_stay_words():
    """A recorded text that only looks like a number JSON lacks is recorded as it is."""

    @tool(effect="irreversible", description="Tell it.")
    def words() -> list[str]:
        return ["NaN", "Infinity"]

    live, recorded = await before_and_after(words, {})
    assert live == recorded == ["NaN", "Infinity"]
