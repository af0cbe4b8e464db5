"""Checks of values against a tool's JSON Schema, compared with `jsonschema`, and schemas that are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from handrail.errors import DefinitionError
from handrail.schema.comparison import Rules
from handrail.schema.raw import check_schema
from handrail.schema.references import without_anchors

NAMES = st.sampled_from(["a", "b", "ab"])
NUMBERS = st.integers(-2, 3) | st.sampled_from([0.0, 0.5, 1.0])
PLAIN = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "ab", "b1"])
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
COUNT = st.integers(0, 3) | st.sampled_from([0.0, 2.0])
RULES: dict[str, Any] = {
    "type": st.sampled_from(
        ["null", "boolean", "object", "array", "number", "integer", "string", ["string", "null"]]
    ),
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "const": VALUES,
    **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], NUMBERS),
    "multipleOf": st.sampled_from([1, 2, 0.5]),
    **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], COUNT),
    **dict.fromkeys(["minProperties", "maxProperties", "minContains", "maxContains"], COUNT),
    "pattern": st.sampled_from(["a", "^b", "[0-9]$"]),
    "uniqueItems": st.booleans(),
    "required": st.lists(NAMES, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
}


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for schemas that contain other schemas."""
    nested: dict[str, Any] = dict.fromkeys(
        ["not", "if", "then", "else", "items", "contains", "additionalProperties", "propertyNames"], inner
    )
    nested |= dict.fromkeys(
        ["allOf", "anyOf", "oneOf", "prefixItems"], st.lists(inner, min_size=1, max_size=2)
    )
    nested |= dict.fromkeys(["properties", "dependentSchemas"], st.dictionaries(NAMES, inner, max_size=2))
    nested["patternProperties"] = st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2)
    nested["$ref"] = st.sampled_from(["#/$defs/x", "#named"])
    return some_of({**RULES, **nested}, sorted(nested))


@st.composite
def some_of(draw: st.DrawFn, rules: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Draw a schema with one of the wanted rules and at most two others, so that values match often enough."""
    others = draw(st.lists(st.sampled_from(sorted(rules)), max_size=2))
    return {word: draw(rules[word]) for word in [draw(st.sampled_from(wanted)), *others]}


LEAVES = some_of(RULES, sorted(RULES))
SCHEMAS = schemas(st.booleans() | LEAVES | schemas(LEAVES))


@given(SCHEMAS, LEAVES, VALUES)
def test_the_same_values_match_as_for_jsonschema(schema: Any, other: dict[str, Any], value: Any) -> None:
    """A value has no mistakes if and only if the reference implementation finds it valid."""
    whole = {
        "type": "object",
        "properties": {"v": schema},
        "$defs": {"x": other, "y": {**other, "$anchor": "named"}},
    }
    check_schema(whole, "a test")
    found = Rules(without_anchors(whole), definite=False).misfits({"v": value})
    expected = Draft202012Validator(whole).is_valid({"v": value})
    assert (not found) == expected, found


@pytest.mark.parametrize(
    ("schema", "value", "mistakes"),
    [
        ({"multipleOf": 0.1}, 0.3, []),
        ({"multipleOf": 0.1}, 0.35, ["v must be a multiple of 0.1, got 0.35"]),
        ({"enum": [1]}, True, ["v must be one of 1, got true"]),
        ({"const": 1}, 1.0, []),
        ({"minLength": 3}, "ab", ["v must have at least 3 characters, and has 2"]),
        ({"maxItems": 1}, [1, 2], ["v must have at most 1 item, and has 2"]),
        ({"uniqueItems": True}, [1, 1.0], ["v must not contain the same item twice"]),
        ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, 2, ["v matches 2 of the alternatives, and must match exactly one"]),
        ({"type": ["string", "null"]}, 3, ["v must be text or null, got 3"]),
        ({"$ref": "#/properties/v"}, 3, []),
        ({"pattern": "^a+$"}, "b", ["v must match the pattern '^a+$', got 'b'"]),
        ({"propertyNames": {"$ref": "#/$defs/short"}, "additionalProperties": {"$ref": "#/$defs/short"}}, {"a": "abc"},
         ["v.a must have at most 1 character, and has 3"]),
        ({"maxLength": 2.0}, "abc", ["v must have at most 2 characters, and has 3"]),
        ({"contains": {"const": 1}}, [2], ["v must have at least 1 item of the kind that `contains` names, and has 0"]),
    ],
)  # fmt: skip
def test_mistakes_in_words(schema: dict[str, Any], value: Any, mistakes: list[str]) -> None:
    """A mistake says where it is and what is expected."""
    whole = {"type": "object", "properties": {"v": schema}, "$defs": {"short": {"maxLength": 1}}}
    check_schema(whole, "a test")
    assert [str(each) for each in Rules(whole, definite=False).misfits({"v": value})] == mistakes


def test_a_secret_value_is_not_repeated() -> None:
    """With `secret`, a message says what is expected, and not what was given."""
    found = Rules({"type": "object", "properties": {"v": {"pattern": "x"}}}, definite=False).misfits(
        {"v": "abc"}, secret=True
    )
    assert [str(each) for each in found] == ["v must match the pattern 'x'"]


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({}, 'has no "type": "object"'),
        ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties is not supported"),
        ({"type": "object", "properties": {"a": 1}}, "/properties/a is not a JSON Schema"),
        ({"type": "object", "allOf": [{"type": "text"}]}, "#/allOf/0/type is 'text'"),
        ({"type": "object", "not": {"$ref": "#/x"}}, "#/not/$ref is '#/x', which is not in the schema"),
        ({"type": "object", "not": {"$ref": "other.json"}}, "not in the schema"),
        (
            {"type": "object", "not": {"$ref": "http://json-schema.org/draft/schema#"}},
            "not in the schema",
        ),
        ({"type": "object", "not": {"$ref": "other.json#/$defs/a"}}, "not in the schema"),
        ({"type": "object", "not": {"$ref": 1}}, "not in the schema"),
        ({"type": "object", "not": {"type": [["text"]]}}, "#/not/type is [['text']]"),
        ({"type": "object", "minProperties": -1}, "#/minProperties is -1"),
        ({"type": "object", "minProperties": 1.5}, "#/minProperties is 1.5"),
        ({"type": "object", "minProperties": True}, "#/minProperties is true"),
        ({"type": "object", "properties": {"a": {"multipleOf": 0}}}, "#/properties/a/multipleOf is 0"),
        ({"type": "object", "properties": {"a/b": {"minimum": "1"}}}, "#/properties/a~1b/minimum is '1'"),
        ({"type": "object", "dependentRequired": {"a": "b"}}, "#/dependentRequired is"),
        ({"type": "object", "patternProperties": {"(?=a)": {}}}, "has the pattern '(?=a)'"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(schema: dict[str, Any], problem: str) -> None:
    """The error for a schema that can't be checked names the place and the problem."""
    with pytest.raises(DefinitionError) as raised:
        check_schema(schema, "a test")
    assert problem in str(raised.value)
