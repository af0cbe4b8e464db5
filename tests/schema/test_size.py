"""The size of one call's arguments is limited, so that checking them does not block the event loop."""

import json
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from handrail import open_gate, tool
from handrail.errors import ToolValidationError
from handrail.schema.size import MOST_BIG_INTEGERS, MOST_VALUES, check_size, count_values


@tool(effect="read")
async def add(numbers: list[int] | set[int], note: str = "") -> str:
    """Add numbers."""
    return str(len(numbers))


def test_too_many_values_are_refused_in_words():
    """A model that sends too many values is told how many it sent, the limit, and what to do."""
    given = json.dumps({"numbers": [1] * (MOST_VALUES + 1)})
    said = open_gate([add]).invoke("add", given).wait().render()
    assert "contain 20,003 values, and the limit is 20,000" in said
    assert "pass its path" in said


def test_integers_that_could_collide_are_refused():
    """Too many integers beyond 64 bits are refused: if their hashes collide, a set of them takes quadratic time."""
    given = json.dumps({"numbers": [((1 << 61) - 1) * number for number in range(8, MOST_BIG_INTEGERS + 10)]})
    with pytest.raises(ToolValidationError, match="1,002 integers beyond 64 bits, and the limit is 1,000"):
        check_size(given)
    assert "integers beyond 64 bits" in open_gate([add]).invoke("add", given).wait().render()


def test_long_text_is_no_list():
    """A long string counts as one value, whatever it contains."""
    given = json.dumps({"numbers": [1], "note": "1,2,[3]," * 200_000})
    assert open_gate([add]).invoke("add", given).wait().value == "1"


def test_as_many_values_as_allowed_are_parsed():
    """Arguments with exactly the maximum number of values are accepted."""
    given = json.dumps({"numbers": [1] * (MOST_VALUES - 2)})
    assert open_gate([add]).invoke("add", given).wait().value == str(MOST_VALUES - 2)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_nested_values_count_too(begin: str, end: str):
    """Lists and objects that are nested in one another count as values, though few commas separate them."""
    deep = begin * 150 + "1" + end * 150
    given = f'{{"numbers": [{",".join([deep] * 500)}]}}'
    assert (
        "contain 75,502 values, and the limit is 20,000"
        in open_gate([add]).invoke("add", given).wait().render()
    )
    for data in (given, given.encode()):
        with pytest.raises(ToolValidationError, match="75,502 values"):
            check_size(data)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_values_that_are_nested_too_deeply_are_refused(begin: str, end: str):
    """Values that are nested too deeply are refused by the parser's recursion limit."""
    given = f'{{"numbers": {begin * 9_000}1{end * 9_000}}}'
    assert "recursion limit exceeded" in open_gate([add]).invoke("add", given).wait().render()


@pytest.mark.parametrize(
    "given", ["[" * 50_000, '{"a":' * 50_000, "[" * 50_000 + "]" * 50_000, "[]," * 50_000]
)
def test_values_are_counted_in_text_that_no_parser_accepts(given: str):
    """Lists that are never closed, that are nested too deeply, or that nothing contains are counted before anything is parsed."""
    with pytest.raises(ToolValidationError, match="values, and the limit is 20,000"):
        check_size(given)


TEXTS = st.text(st.sampled_from('ab,[]{}:"\\ \n\t0'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def values_in(value: Any) -> int:
    """Return the number of values in a parsed value, counting itself."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_in, inner))


@drawn(VALUES, st.sampled_from([None, 1]), st.booleans(), st.integers(0, 40))
def test_values_are_counted_without_building_them(value: Any, indent: int | None, escaped: bool, limit: int):
    """The count of a text is that of its parsed value, or on the same side of the limit, whatever its strings contain."""
    counted = count_values(json.dumps(value, indent=indent, ensure_ascii=escaped).encode(), limit)
    assert counted == values_in(value) or (counted > limit) == (values_in(value) > limit)
