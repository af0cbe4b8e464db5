"""Refusals are bounded: they take at most 4 kB, list at most twenty problems, and count the others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import ToolResult, tool
from handrail.errors import ToolValidationError
from handrail.run import open_gate
from handrail.schema import Schema, list_problems
from handrail.schema.problems import Problem

MANY = 100_000


@dataclass
class Order:
    """An order with a list, a dict and a choice."""

    items: list[int]
    prices: dict[str, float]
    color: Literal["red", "blue"] = "red"


def refusal(schema: Schema[Any], data: Any) -> ToolValidationError:
    with pytest.raises(ToolValidationError) as refused:
        schema.parse(data if isinstance(data, str) else json.dumps(data))
    return refused.value


def assert_bounded(error: ToolValidationError) -> None:
    lines = [str(problem) for problem in error.problems]
    assert len(lines) <= 21
    assert not any(line.startswith("and ") for line in lines[:-1])
    assert len(str(error).encode(errors="replace")) <= 4096
    assert len(list_problems(error).encode(errors="replace")) <= 4000


def test_few_problems_are_all_told() -> None:
    """Twenty problems are all listed, without a count."""
    error = refusal(Schema(list[int]), ["x"] * 20)
    assert [problem.where for problem in error.problems] == [f"[{n}]" for n in range(20)]


def test_the_rest_is_counted() -> None:
    """The problems after the twentieth are counted."""
    error = refusal(Schema(list[int]), ["x"] * 23)
    assert len(error.problems) == 21
    assert str(error.problems[-1]) == "and 3 more problems"


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (list[int], ["x"] * MANY),
        (list[list[int]], [["x"] * 100] * (MANY // 100)),
        (set[int], ["x"] * MANY),
        (tuple[int, ...], ["x"] * MANY),
    ],
    ids=["list", "lists", "set", "tuple"],
)
def test_very_many_problems_are_not_described_one_by_one(
    kind: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100,000 errors, only a few become Python objects, and the message says how many more there are."""
    made: list[int] = []
    describe = pydantic_core.ValidationError.errors

    class Counting:
        def __init__(self, error: Any) -> None:
            self._error = error

        def error_count(self) -> int:
            return self._error.error_count()

        def errors(self, **options: Any) -> Any:
            found = describe(self._error, **options)
            made.append(len(found))
            return found

    schema: Schema[Any] = Schema(kind)
    first = schema._first_errors

    def counted(self: Any, error: Any, data: Any) -> Any:
        errors, others = first(Counting(error), data)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        made.append(len(errors))
        return errors, others

    monkeypatch.setattr(Schema, "_first_errors", counted)
    error = refusal(schema, data)
    assert 0 < sum(made) < 100
    assert_bounded(error)
    assert "more problems" in str(error.problems[-1])
    count = int(str(error.problems[-1]).split()[1].replace(",", ""))
    assert count + len(error.problems) - 1 == MANY


def test_an_object_with_very_many_problems_is_bounded() -> None:
    """The refusal of an object with 5,000 invalid values is bounded."""
    error = refusal(Schema(dict[str, int]), {f"key {n}": "x" for n in range(5000)})
    assert_bounded(error)
    assert str(error.problems[-1]) == "and 4,980 more problems"


def test_unknown_keys_are_bounded() -> None:
    """The refusal of thousands of unknown arguments is bounded."""
    error = refusal(Schema(Order), {"items": [], "prices": {}, **{f"key {n}": 1 for n in range(5000)}})
    assert_bounded(error)


def test_long_keys_and_long_choices_are_cut() -> None:
    """A key with a million characters, or a type with thousands of choices, does not make a long refusal."""
    assert_bounded(refusal(Schema(dict[str, int]), {"é" * 1_000_000: "x"}))
    choices: Any = Literal[tuple(f"choice {n}" for n in range(5000))]  # type: ignore[valid-type]
    error = refusal(Schema(list[choices]), ["x"] * 30)
    assert_bounded(error)
    assert "choice 0" in str(error)


def test_infinities_are_bounded() -> None:
    """The refusal of thousands of numbers that are not finite is bounded."""
    error = refusal(Schema(list[float]), "[" + ",".join(["NaN"] * 5000) + "]")
    assert_bounded(error)
    assert str(error.problems[-1]) == "and 4,980 more problems"


async def test_a_refusal_of_a_handler_is_bounded() -> None:
    """A `ToolValidationError` that a handler raises is bounded too."""

    @tool(effect="read")
    async def check(how: Literal["long", "many"]) -> None:
        """Refuse with one long message, or with many problems."""
        if how == "long":
            raise ToolValidationError("é" * 100_000)
        raise ToolValidationError("no", [Problem(f"item {n}", "wrong") for n in range(5000)])

    gate = open_gate([check])
    for how in ("long", "many"):
        result: ToolResult[Any] = await gate.invoke("check", {"how": how})
        assert len(result.render().encode()) <= 4096
    assert "and 4,980 more problems" in result.render()


async def test_the_answer_of_the_gate_is_bounded() -> None:
    """The result of a refused call takes at most 4 kB, whether its arguments are text or a mapping."""

    @tool
    async def order(items: list[int], prices: dict[str, float]) -> None:
        """Order things."""

    gate = open_gate([order])
    wrong = {"items": ["x" * 50] * 10_000, "prices": {"p" * 500 + str(n): "x" for n in range(5_000)}}
    for arguments in (wrong, json.dumps(wrong)):
        result = await gate.invoke("order", arguments)
        assert len(result.render().encode()) <= 4096
        assert "more problems" in result.render()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(), inner, max_size=30),
        max_leaves=60,
    )
)
def test_any_refusal_is_bounded(value: Any) -> None:
    """Whatever a model sends, a refusal of it is bounded."""
    for kind in (Order, list[int], dict[str, list[float]], int | list[Order]):
        schema: Schema[Any] = Schema(kind)
        try:
            schema.parse(json.dumps(value))
        except ToolValidationError as error:
            assert_bounded(error)
