"""Laws of `Place`: each place has its own text, `within` is a partial order, and keys ignore attempts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.run.place import (
    RUN,
    Place,
    inner_call_id,
    is_in_run,
    leading_call,
    outer_call_ids,
    split_run_id,
)

NUMBERS = st.integers(1, 120)
NAMES = st.text(min_size=1, max_size=8).map(lambda text: f"once {text}")


@st.composite
def places(draw: st.DrawFn, *, numbers: st.SearchStrategy[int] = NUMBERS) -> Place:
    """Generate a place of up to twelve steps, without probes."""
    place = RUN
    for _ in range(draw(st.integers(0, 12))):
        steps = {
            "run": ("call", "call", "call", "answer", "advice"),
            "call": ("attempt", "attempt", "compensation"),
            "compensation": ("attempt",),
            "attempt": ("call", "call", "run", "run", "question", "approval"),
        }.get(place.kind, ())
        if not steps:
            break
        kind, number = draw(st.sampled_from(steps)), draw(numbers)
        match kind:
            case "call":
                place = place.child(number)
            case "attempt":
                place = place.attempt(number)
            case "run":
                place = place.nested_run(number)
            case "question":
                place = place.question(draw(st.one_of(st.just(number), NAMES)))
            case "approval":
                place = place.approval(number)
            case "answer":
                place = place.answer(number)
            case "advice":
                place = place.advice(number)
            case _:
                place = place.compensation
    return place


def without_attempts(place: Place) -> list[tuple[str, int, str]]:
    """Return the kind, number and name of each step of a place, except attempts, innermost first."""
    steps = [each for each in (place, *place.parents) if each.kind != "attempt"]
    return [(each.kind, each.number, each.name) for each in steps]


def with_attempts(place: Place, number: int) -> Place:
    """Return the same place with `number` as the number of every attempt."""
    if place.parent is None:
        return place
    around = with_attempts(place.parent, number)
    if place.kind == "attempt":
        return around.attempt(number)
    return Place(around, place.kind, place.number, place.name)


@given(places())
def test_a_place_is_parsed_from_its_own_text(place: Place):
    assert Place.parse(str(place)) == place
    assert hash(Place.parse(str(place))) == hash(place)


@given(places(), places())
def test_different_places_have_different_texts(one: Place, other: Place):
    assert (str(one) == str(other)) == (one == other)


@given(places(), NUMBERS)
def test_a_key_is_the_same_for_any_attempts(place: Place, number: int):
    assert with_attempts(place, number).key == place.key


@given(places(numbers=st.integers(1, 2)), places(numbers=st.integers(1, 2)))
def test_keys_of_different_places_differ(one: Place, other: Place):
    assert (one.key == other.key) == (without_attempts(one) == without_attempts(other))


FEW = places(numbers=st.integers(1, 2))


@given(FEW, FEW, FEW)
def test_within_is_a_partial_order(a: Place, b: Place, c: Place):
    assert a.within(a)
    assert not (a.within(b) and b.within(a)) or a == b
    assert not (a.within(b) and b.within(c)) or a.within(c)
    assert a.within(RUN)


@given(places())
def test_a_place_is_within_everything_around_it_and_nothing_else(place: Place):
    assert all(place.within(outer) and not outer.within(place) for outer in place.parents)


@given(places(numbers=st.integers(1, 130)), places(numbers=st.integers(1, 130)))
def test_the_prefix_of_a_call_finds_exactly_what_is_in_its_attempts(place: Place, other: Place):
    call = other.outermost_call
    if call is not None:
        found = str(place).startswith(call.prefix())
        assert found == (place.attempt_at(call) is not None)


def test_siblings_whose_texts_begin_alike_are_apart():
    assert not Place.parse(".12~1.1").within(Place.parse(".1"))
    assert not Place.parse(".1~12.1").within(Place.parse(".1~1"))
    assert not is_in_run("run2.1", "run")
    assert not Place.parse(".12~1.1").id("run").startswith(Place.parse(".1").prefix("run"))


def test_what_is_around_a_place():
    place = Place.parse(".2~1/3.1~2?4")
    assert str(place.outer) == ".2~1/3.1"
    assert str(place.run) == ".2~1/3"
    assert str(place.outermost_call) == ".2"
    assert place.attempt_at(Place.parse(".2")) == 1
    assert place.attempt_at(Place.parse(".2~1/3.1")) == 2
    assert place.attempt_at(Place.parse(".2~1")) is None
    assert Place.parse(".2-~1.1").attempt_at(Place.parse(".2")) is None
    assert Place.parse(".2").outer is None
    assert Place.parse("#1").outermost_call is None


@pytest.mark.parametrize(
    "text", ["x", ".", ".0", ".01", "~1", ".1.2", "?", "?1", ".1~1?", "-", ".1--", ".1#1", "#1.1", ".1~1!1~1"]
)
def test_a_text_that_is_not_a_place_is_refused(text: str):
    with pytest.raises(ValueError, match=r"is not a place|there is no|is not the name"):
        Place.parse(text)


@given(places())
def test_an_id_is_split_into_its_run_and_its_place(place: Place):
    place = place if place.kind == "run" else place.run
    run_id = "4f2a.b"
    assert split_run_id(place.id(run_id)) == (run_id, place)
    assert Place.from_id(place.id(run_id), run_id) == place
    assert is_in_run(place.id(run_id), run_id)


@given(places())
def test_the_leading_call_is_read_from_a_place_and_from_a_key(place: Place):
    call = place.outermost_call
    number = None if call is None else call.number
    assert leading_call(str(place)) == number
    assert leading_call(f"{place.key}#pay/first") == number


@given(st.text(max_size=12), NUMBERS, NUMBERS)
def test_the_outer_call_is_found_from_an_inner_calls_id(call_id: str, attempt: int, number: int):
    assert (call_id, attempt, number) in list(outer_call_ids(inner_call_id(call_id, attempt, number)))


def test_a_place_shows_its_text():
    assert re.fullmatch(r"Place\('\.2~1'\)", repr(Place.parse(".2~1")))
