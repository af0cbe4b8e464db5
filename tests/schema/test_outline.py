"""Checking plain data against its JSON Schema alone: clear mistakes are found, and valid data is never refused."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from handrail.schema import Schema
from handrail.schema.comparison import Rules


class Inner(BaseModel):
    kind: Literal["a", "b"]
    next: "Inner | None" = None


class Order(BaseModel):
    seats: int
    name: str | None = None
    tags: list[str] = []
    inner: Inner | None = None
    price: float = 0.0


SCHEMA: Schema[Order] = Schema(Order)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"seats": "many"}, ["seats must be a whole number, got 'many'"]),
        ({"seats": True}, ["seats must be a whole number, got true"]),
        ({}, ["seats is missing"]),
        (True, ["the answer must be an object, got true"]),
        (
            {"seats": 1, "extra": 2},
            ["extra is unknown; the known fields are seats, name, tags, inner, price"],
        ),
        ({"seats": 1, "tags": ["a", 2]}, ["tags[1] must be text, got 2"]),
        ({"seats": 1, "inner": {"kind": "c"}}, ["inner.kind must be one of 'a', 'b', got 'c'"]),
        (
            {"seats": 1, "inner": {"kind": "a", "next": {"kind": 1}}},
            ["inner.next.kind must be one of 'a', 'b', got 1"],
        ),
    ],
)
def test_what_is_plainly_wrong_is_named(value: Any, words: list[str]):
    """Each definite mistake is reported with its location.

    A value that has the wrong type or is not one of the choices is also quoted.
    """
    found = Rules(SCHEMA.json_schema).misfits(value)
    assert len(found) >= len(words)
    for word in words:
        assert any(word in str(each) for each in found)


ORDERS = st.builds(
    Order,
    seats=st.integers(),
    name=st.none() | st.text(),
    tags=st.lists(st.text(), max_size=3),
    inner=st.none() | st.builds(Inner, kind=st.sampled_from(["a", "b"])),
    price=st.floats(allow_nan=False, allow_infinity=False),
)


@given(ORDERS)
def test_what_fits_is_never_refused(order: Order):
    """The JSON that a schema dumps for a valid value contains no mistakes."""
    assert Rules(SCHEMA.json_schema).misfits(json.loads(SCHEMA.dump(order))) == []
