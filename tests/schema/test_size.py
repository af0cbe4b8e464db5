"""The size of one call's arguments is limited, so that checking them does not block the event loop."""

import json

import pytest

from handrail import open_gate, tool
from handrail.errors import ToolValidationError
from handrail.schema.size import MOST_BIG_INTEGERS, MOST_VALUES, check_size


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
    given = f'{{"numbers": {begin * 50_000}1{end * 50_000}}}'
    assert "recursion limit exceeded" in open_gate([add]).invoke("add", given).wait().render()
