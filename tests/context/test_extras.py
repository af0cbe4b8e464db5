"""Extras: a read-only mapping with validated names and values, and typed keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from handrail.context import (
    PROVIDER_REQUEST_ID,
    RATE_LIMIT,
    TRACING_SPAN,
    ExtraKey,
    Extras,
    PerCall,
    RateLimit,
)
from handrail.errors import DefinitionError, ExtraKeyError


@pytest.mark.parametrize("name", ["a", "rate_limit", "x2", "a_1_b", "provider_request_id"])
def test_snake_case_names_are_taken(name: str):
    """A key's name has lowercase letters, digits and single underscores, and starts with a letter."""
    assert ExtraKey(name, str).name == name
    assert Extras({name: 1})[name] == 1


@pytest.mark.parametrize(
    "name", ["", "A", "rateLimit", "rate-limit", "_a", "a_", "a__b", "2a", "ä", "a b", "a\n", "x.y", 3, None]
)
def test_other_names_are_refused_with_an_example(name: Any):
    """`ExtraKey` and `Extras` refuse the same names, with an error that gives a valid name as an example."""
    with pytest.raises(ExtraKeyError) as of_key:
        ExtraKey(name, str)
    with pytest.raises(ExtraKeyError) as of_mapping:
        Extras({name: 1})
    assert str(of_key.value) == str(of_mapping.value)
    assert "snake_case" in str(of_key.value)
    assert str(of_key.value).endswith("'rate_limit'.")
    assert of_key.value.key == name
    assert isinstance(of_key.value, DefinitionError)


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", [1, {"a": [None]}], {"deep": {"er": []}}])
def test_json_values_are_taken(value: object):
    """Extras return any JSON value unchanged."""
    assert Extras({"it": value})["it"] == value


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, [object()], {"a": {"b": object()}}],
    ids=["object", "function", "in a list", "nested"],
)
def test_what_is_not_json_is_refused_unless_the_key_is_opaque(value: object):
    with pytest.raises(ExtraKeyError, match=r"can't be written as JSON.*`ExtraKey\(\.\.\., opaque=True\)`"):
        Extras({"it": value})
    key = ExtraKey("it", object, "Lives as long as the call; any thread.", opaque=True)
    assert Extras({"it": value}, (key,))[key] is value


def test_a_key_that_is_not_opaque_does_not_let_objects_in():
    """A key that is declared but not `opaque` refuses objects that are not JSON."""
    with pytest.raises(ExtraKeyError):
        Extras({"it": object()}, (ExtraKey("it", object),))


def test_an_opaque_key_says_how_its_object_may_be_used():
    """An opaque key must say how long its object lives and which threads may use it."""
    with pytest.raises(ExtraKeyError, match=r"how long the object lives and from which threads") as caught:
        ExtraKey("handle", object, opaque=True)
    assert caught.value.key == "handle"


def test_values_are_found_by_name_and_by_key():
    """`extras[KEY]`, `extras["name"]`, `get` and `in` find the same values."""
    limit = RateLimit(requests_left=3, resets_at=datetime(2030, 1, 1, tzinfo=UTC))
    extras = Extras({"rate_limit": limit, "provider_request_id": "req-1"})
    assert extras[RATE_LIMIT] is extras["rate_limit"] is extras.get(RATE_LIMIT) is limit
    assert extras.get("provider_request_id") == extras[PROVIDER_REQUEST_ID] == "req-1"
    assert "rate_limit" in extras
    assert RATE_LIMIT in extras


def test_what_is_missing_is_a_key_error_or_the_default():
    """For a missing key, `extras[...]` raises `KeyError`, and `get` returns the default."""
    extras = Extras()
    with pytest.raises(KeyError):
        extras[RATE_LIMIT]
    with pytest.raises(KeyError):
        extras["nothing"]
    assert extras.get(RATE_LIMIT) is None
    assert extras.get(PROVIDER_REQUEST_ID, "none") == "none"
    assert extras.get("nothing", 7) == 7
    assert RATE_LIMIT not in extras


def test_it_is_a_mapping_and_read_only():
    """Extras can be iterated and have a length, but can't be changed, not even through the dict that they were made from."""
    source = {"a": 1, "b": 2}
    extras: Any = Extras(source)
    source["c"] = 3
    assert (dict(extras), len(extras), list(extras.items())) == ({"a": 1, "b": 2}, 2, [("a", 1), ("b", 2)])
    with pytest.raises(TypeError):
        extras["a"] = 2
    with pytest.raises(TypeError):
        del extras["a"]
    assert extras == {"a": 1, "b": 2}


def test_the_built_in_keys():
    """The tracing span's key is opaque and says how the span may be used. The other two keys are not opaque."""
    span = object()
    assert Extras({"tracing_span": span})[TRACING_SPAN] is span
    assert TRACING_SPAN.opaque
    assert "thread" in TRACING_SPAN.about
    assert "ends with the call" in TRACING_SPAN.about
    assert [key.name for key in (TRACING_SPAN, PROVIDER_REQUEST_ID, RATE_LIMIT)] == [
        "tracing_span",
        "provider_request_id",
        "rate_limit",
    ]
    assert not PROVIDER_REQUEST_ID.opaque
    assert not RATE_LIMIT.opaque


def test_a_key_can_be_subscripted_and_is_a_value():
    """Keys with equal definitions are equal and hashable, with or without a type argument. A key can't be changed."""
    assert ExtraKey[int]("n", int) == ExtraKey("n", int)
    assert len({ExtraKey("n", int), ExtraKey[int]("n", int), ExtraKey("m", int)}) == 2
    with pytest.raises(AttributeError):
        ExtraKey("n", int).name = "m"  # pyright: ignore[reportAttributeAccessIssue]


def test_its_repr_shows_names_and_no_values():
    """The repr of extras shows only the keys, because a value may be a provider's secret."""
    assert repr(Extras({"provider_request_id": "sk-secret"})) == "Extras(provider_request_id)"


# --- frozen copies ---------------------------------------------------------------------------------


@dataclass
class Tenant:
    """A declared type whose values can be changed in place."""

    name: str
    tags: list[str]


TENANT = ExtraKey("tenant", Tenant)


def test_json_values_are_frozen_copies():
    """What a tool reads equals what was given, does not follow later changes to it, and can't be changed, at any depth."""
    source: Any = {"limits": {"a": [1, 2]}, "names": ["x", {"y": 1}]}
    extras = Extras(source)
    source["limits"]["a"].append(3)
    source["names"][1]["y"] = 2
    assert extras["limits"] == {"a": [1, 2]}
    assert extras["names"] == ["x", {"y": 1}]
    for change in (
        lambda: extras["limits"]["a"].append(3),
        lambda: extras["limits"].update(b=1),
        lambda: extras["names"][1].clear(),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change()
    assert ExtraKey("limits", dict) in extras
    assert extras[ExtraKey("limits", dict)] == {"a": [1, 2]}


@pytest.mark.parametrize("way", [lambda extras: extras[TENANT], lambda extras: dict(extras)["tenant"]])
def test_a_declared_value_that_can_be_changed_is_copied_for_each_reader(way: Callable[[Extras], Tenant]):
    """Neither who gave a value nor who read it can change what others read."""
    given = Tenant("acme", ["a"])
    extras = Extras({TENANT: given})
    given.tags.append("later")
    first = way(extras)
    first.tags.append("mine")
    first.name = "mine"
    assert way(extras) == Tenant("acme", ["a"])
    assert way(extras.merged(Extras({"other": 1}))) == Tenant("acme", ["a"])


def test_a_declared_value_that_can_not_be_changed_is_shared():
    """Immutable values are not copied."""
    limit = RateLimit(requests_left=3)
    extras = Extras({RATE_LIMIT: limit})
    assert extras[RATE_LIMIT] is extras[RATE_LIMIT] is limit


@pytest.mark.parametrize(
    "value",
    [Tenant("acme", []), datetime(2030, 1, 1, tzinfo=UTC), {1: 2}, [Tenant("acme", [])], {"a": {"b"}}],
    ids=["dataclass", "datetime", "number as name", "inside a list", "set"],
)
def test_an_object_is_refused_unless_its_key_declares_its_type(value: object):
    """A value that is not JSON, although it could be written as JSON, needs a key that declares its type."""
    with pytest.raises(ExtraKeyError, match=r"not JSON.*ExtraKey\('it', "):
        Extras({"it": value})
    key = ExtraKey("it", type(value))
    assert Extras({key: value})[key] == value
    assert Extras({"it": value}, (key,))[key] == value


def test_a_value_that_can_not_be_copied_is_refused_by_name():
    """A declared value that can be written as JSON but not copied needs an opaque key."""

    @dataclass
    class Locked:
        name: str

        def __deepcopy__(self, memo: Any) -> Locked:
            raise TypeError("it holds a lock")

    with pytest.raises(ExtraKeyError, match=r"can't be copied: TypeError.*opaque=True"):
        Extras({ExtraKey("it", Locked): Locked("a")})
    opaque = ExtraKey("it", Locked, "Lives as long as the run; any thread.", opaque=True)
    kept = Locked("a")
    assert Extras({opaque: kept})[opaque] is kept


def test_the_value_of_one_call_is_a_frozen_copy_too():
    """A value that is found for each call is checked and frozen like one that is given."""
    found: dict[str, Any] = {"1": ["a"], "2": Tenant("acme", []), "3": object()}
    extras = Extras({"it": PerCall(found.get)})
    value = extras.for_call("1", Extras())["it"]
    found["1"].append("b")
    assert value == ["a"]
    with pytest.raises(TypeError, match="read-only"):
        value.append("c")
    for call in ("2", "3"):
        with pytest.raises(ExtraKeyError):
            extras.for_call(call, Extras())
    declared = Extras({TENANT: PerCall(found.get)}).for_call("2", Extras())
    declared[TENANT].tags.append("mine")
    assert declared[TENANT] == Tenant("acme", [])
