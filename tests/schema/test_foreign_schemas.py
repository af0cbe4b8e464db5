"""Schemas from outside, with recursive unions, long reference chains or huge enums, are checked in a bounded number of steps."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.errors import DefinitionError, ToolValidationError
from handrail.schema.comparison import MAX_STEPS, Comparison, Rules
from handrail.schema.problems import asks_for_secrets, forms_of, inside, schemas_at
from handrail.schema.raw import MAX_DEPTH, MAX_PARTS, check_foreign
from handrail.schema.secrets import MASK, masked
from handrail.serve.agui.interrupts import frontend_tool

ITSELF: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/S"}, {"$ref": "#/$defs/S"}]}
DOUBLING: dict[str, Any] = {
    f"D{number}": {"anyOf": [{"$ref": f"#/$defs/D{number + 1}"}, {"$ref": f"#/$defs/D{number + 1}"}]}
    for number in range(60)
}
TREE: dict[str, Any] = {
    "anyOf": [{"type": "object", "properties": {"a": {"$ref": "#/$defs/S"}, "b": {"$ref": "#/$defs/S"}}}] * 2
    + [{"type": "integer"}]
}


def nested(depth: int, leaf: Any) -> Any:
    value = leaf
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/S"}}, "$defs": {"S": ITSELF}}, {"x": 1}),
        (
            {"properties": {"x": {"$ref": "#/$defs/D0"}}, "$defs": {**DOUBLING, "D60": {"type": "string"}}},
            {"x": 1},
        ),
        ({"properties": {"x": {"$ref": "#/$defs/S"}}, "$defs": {"S": TREE}}, {"x": nested(40, "leaf")}),
    ],
    ids=["a union of itself", "sixty unions in a row", "a union at every level of the value"],
)
def test_unions_do_not_double_the_steps(schema: dict[str, Any], value: Any) -> None:
    """Each part of the schema is compared with each part of the value at most once, so unions do not double the work."""
    comparison = Comparison(Rules(schema))
    comparison.run(value)
    assert comparison.steps < 1000


@pytest.mark.parametrize("defs", [{"S": ITSELF}, {**DOUBLING, "D60": {"writeOnly": True}}, {"S": TREE}])
def test_resolving_unions_takes_each_schema_once(defs: dict[str, Any]) -> None:
    """Resolving a union yields each schema once, however many references lead to it."""
    root = {"properties": {"x": {"$ref": f"#/$defs/{next(iter(defs))}"}}, "$defs": defs}
    forms = schemas_at(root, ("x",))
    for _ in range(30):
        assert len({id(form) for form in forms}) == len(forms) <= 200
        forms = inside(forms, "a", root)
    assert asks_for_secrets(root, root) is ("D60" in defs)
    masked({"x": nested(30, 1)}, root)


def test_a_comparison_that_is_too_long_is_refused() -> None:
    """A value that takes too many steps to check is refused with that reason instead of being accepted unchecked."""
    kinds = [{"type": "object", "required": [f"f{number}"]} for number in range(1000)]
    schema = {"properties": {"x": {"type": "array", "items": {"anyOf": kinds}}}}
    (found,) = Rules(schema).misfits({"x": [{}] * 2000})
    assert "takes more than" in found.what
    assert Rules(schema).misfits({"x": [{}] * 2000}, secret=True) == [found]


def test_a_long_chain_of_references_is_refused() -> None:
    """A value is refused if its schema's references form a chain longer than the depth limit."""
    defs: dict[str, Any] = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}]} for n in range(2000)}
    (found,) = Rules({"properties": {"x": {"$ref": "#/$defs/D0"}}, "$defs": defs}).misfits({"x": 1})
    assert "levels" in found.what


def test_names_that_a_pattern_may_allow_are_not_refused() -> None:
    """A name that `patternProperties` may allow is not called unknown."""
    schema = {"type": "object", "patternProperties": {"^x-": {}}, "additionalProperties": False}
    assert Rules(schema).misfits({"x-a": 1}) == []


def test_messages_are_bounded() -> None:
    """Neither a huge enum nor thousands of unknown fields produce a huge message."""
    choice = {
        "properties": {"x": {"enum": [f"value {n}" for n in range(5000)]}},
        "additionalProperties": False,
    }
    (wrong,) = Rules(choice).misfits({"x": 1})
    assert wrong.what.endswith(", and 4950 more, got 1")
    fields = {"properties": {f"f{n}": {} for n in range(2000)}, "additionalProperties": False}
    found = Rules(fields).misfits({f"g{n}": 1 for n in range(2000)})
    assert len(found) == 100
    assert sum(len(str(each)) for each in found) < 100_000


names = st.sampled_from(["A", "B", "C", "D"])
leaves = st.one_of(
    st.sampled_from(["string", "integer", "object", "array", "null"]).map(lambda kind: {"type": kind}),
    st.lists(st.integers(0, 3), max_size=4).map(lambda values: {"enum": values}),
    names.map(lambda name: {"$ref": f"#/$defs/{name}"}),
    st.booleans(),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map(lambda forms: {"anyOf": forms}),
        st.lists(inner, min_size=1, max_size=3).map(lambda forms: {"oneOf": forms}),
        inner.map(lambda items: {"type": "array", "items": items}),
        st.dictionaries(st.sampled_from("xyz"), inner, max_size=3).map(
            lambda fields: {"type": "object", "properties": fields, "required": list(fields)[:1]}
        ),
    ),
    max_leaves=12,
)
values = st.recursive(
    st.none() | st.integers(0, 3) | st.just("text"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("wxyz"), inner, max_size=3),
    max_leaves=12,
)


SECRET: dict[str, Any] = {"type": "string", "writeOnly": True}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": {"$ref": "#/definitions/Key"}}, "definitions": {"Key": SECRET}},
        {"properties": {"x": {"$ref": "#/properties/y"}, "y": SECRET}},
        {"properties": {"x": {"$ref": "#/properties/y/anyOf/1"}, "y": {"anyOf": [{"type": "null"}, SECRET]}}},
        {
            "properties": {"x": {"$ref": "#/$defs/Text", "writeOnly": True}},
            "$defs": {"Text": {"type": "string"}},
        },
        {"properties": {"x": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": SECRET}},
        {"patternProperties": {"^x$": SECRET}},
        {"unevaluatedProperties": SECRET},
        {"if": {"required": ["x"]}, "then": {"properties": {"x": SECRET}}},
        {"dependentSchemas": {"y": {"properties": {"x": SECRET}}}},
    ],
)
def test_secrets_are_found_wherever_a_schema_has_them(schema: dict[str, Any]) -> None:
    """A value that a schema marks `writeOnly` is masked, whichever keyword or reference leads to it."""
    check_foreign(schema, "it")
    assert asks_for_secrets(schema, schema)
    assert masked({"x": "hunter2"}, schema) == {"x": MASK}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"x": {"$ref": "#/properties/a"}, "a": {}}, "$defs": {"a": {"type": "integer"}}}, {"x": ""}),
        ({"properties": {"x": {"$ref": "#/$defs/b/properties/c"}}, "$defs": {"c": {"type": "null"}, "b": {}}}, {"x": 1}),
        ({"properties": {"x": {"$ref": "#a"}, "y": {}}, "required": ["y"]}, {"x": {}, "y": 1}),
        ({"properties": {"x": {"type": "integer"}}}, {"x": 1.0}),
        ({"properties": {"x": {"prefixItems": [{"type": "string"}], "items": False}}}, {"x": ["a"]}),
        ({"properties": {"x": {"prefixItems": [{}], "items": {"type": "string"}}}}, {"x": [1, "a"]}),
    ],
)  # fmt: skip
def test_valid_values_are_not_refused(schema: dict[str, Any], value: Any) -> None:
    """A value that may be valid under JSON Schema 2020-12 has no misfits."""
    assert Rules(schema).misfits(value) == []


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (
            {"properties": {"x": {"$ref": "#/definitions/N"}}, "definitions": {"N": {"type": "null"}}},
            {"x": 1},
        ),
        ({"properties": {"x": {"$ref": "#"}}, "required": ["y"]}, {"x": {}, "y": 1}),
        ({"properties": {"x": {"prefixItems": [{"type": "string"}]}}}, {"x": [1]}),
        ({"properties": {"x": {"type": "integer"}}}, {"x": 1.5}),
    ],
)
def test_references_and_tuples_are_followed(schema: dict[str, Any], value: Any) -> None:
    """Mistakes are found behind a reference to any part of the schema, and in each item of a tuple."""
    assert len(Rules(schema).misfits(value)) == 1


def parts_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(parts_of, inner))


@given(
    st.fixed_dictionaries(dict.fromkeys("ABCD", schemas)),
    schemas.filter(lambda one: type(one) is dict),
    values,
)
def test_the_steps_are_bounded_by_both_sizes(
    defs: dict[str, Any], schema: dict[str, Any], value: Any
) -> None:
    """A comparison takes at most one step for each pair of a schema's part and a value's part."""
    root = {**schema, "$defs": defs}
    check_foreign(root, "it")
    comparison = Comparison(Rules(root))
    found = comparison.run(value)
    assert comparison.steps <= parts_of(root) * parts_of(value)
    assert len(forms_of(root, root)) <= parts_of(root)
    if bool(found) != bool(Rules(root).misfits(value)):
        pytest.fail("the same comparison had another outcome")


def fits(schema: Any, value: Any, defs: dict[str, Any]) -> bool:
    """Return whether a value fits a schema, checked recursively in exponential time. `oneOf` counts as `anyOf`.

    References must lead to later names.
    """
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return fits(defs[schema["$ref"][-1]], value, defs)
    forms = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        return any(fits(form, value, defs) for form in forms)
    if "enum" in schema:
        return value in schema["enum"]
    kind = {"string": str, "integer": int, "object": dict, "array": list, "null": type(None)}[schema["type"]]
    if not isinstance(value, kind):
        return False
    if isinstance(value, dict):
        named = schema.get("properties", {})
        inner = all(fits(named[name], part, defs) for name, part in value.items() if name in named)
        return inner and all(name in value for name in schema.get("required", ()))
    return not isinstance(value, list) or all(fits(schema.get("items", True), item, defs) for item in value)


def forwards(schema: Any, name: str) -> Any:
    """Return the schema with only those references that lead to later names. Other references become `true`."""
    if isinstance(schema, list):
        return [forwards(each, name) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return schema if schema["$ref"][-1] > name else True
    return {word: forwards(inner, name) for word, inner in schema.items()}


@given(st.fixed_dictionaries(dict.fromkeys("ABCD", schemas)), values)
def test_remembering_what_was_compared_changes_no_outcome(defs: dict[str, Any], value: Any) -> None:
    """A value has misfits if and only if the plain recursive check `fits` refuses it."""
    ahead = {name: forwards(schema, name) for name, schema in defs.items()}
    root = {"$ref": "#/$defs/A", "$defs": ahead}
    assert (not Rules(root).misfits(value)) is fits(root, value, ahead)


def deep(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        made = {"type": "array", "items": made}
    return {"properties": {"x": made}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"x": {"enum": list(range(MAX_PARTS + 1))}}}, "more than 10000 parts"),
        ({"properties": {f"f{n}": {"type": "string"} for n in range(MAX_PARTS)}}, "more than 10000 parts"),
        (deep(MAX_DEPTH), "more than 64 levels"),
        (deep(100_000), "more than 64 levels"),
        ({"properties": []}, "/properties is not an object of schemas"),
        ({"properties": {"x": 3}}, "/properties/x is not a JSON Schema"),
        ({"properties": {"x": {"anyOf": {}}}}, "/properties/x/anyOf is not a list of schemas"),
        ({"properties": {"x": {"anyOf": ["y"]}}}, "/properties/x/anyOf/0 is not a JSON Schema"),
        ({"$defs": 1}, "/$defs is not an object"),
        ({"required": "x"}, "/required is not a list"),
        ({"required": [[]]}, "/required is not a list of names"),
        ({"properties": {"x": {"enum": 1}}}, "/properties/x/enum is not a list"),
        (
            {"properties": {"x": {"$ref": "http://a/b#/c"}}},
            "/properties/x/$ref is 'http://a/b#/c'",
        ),
        ({"properties": {"x": {"$ref": ["#"]}}}, "/properties/x/$ref is ['#']"),
    ],
)
def test_a_client_s_schema_is_refused_when_it_is_brought(schema: dict[str, Any], reason: str) -> None:
    """A client's schema that is too large, too deep or malformed is refused, and the error names the tool and the problem."""
    with pytest.raises(DefinitionError) as refused:
        frontend_tool("paint", "Paint.", schema)
    assert reason in str(refused.value)
    assert "'paint'" in str(refused.value)


def test_arguments_for_a_client_s_tool_are_refused_past_the_steps() -> None:
    """A call whose arguments can't be checked within the step limit is refused with that reason."""
    kinds = [{"type": "object", "required": [f"f{number}"]} for number in range(500)]
    tool = frontend_tool(
        "paint", "Paint.", {"properties": {"x": {"type": "array", "items": {"anyOf": kinds}}}}
    )
    with pytest.raises(ToolValidationError, match=f"more than {MAX_STEPS} steps"):
        tool.parse({"x": [{}] * 1000})


class Counted(int):
    """A number that counts how often it is quoted."""

    quoted = 0

    def __repr__(self) -> str:
        Counted.quoted += 1
        return "1"


def test_a_mistake_costs_the_same_for_a_value_of_any_size() -> None:
    """Only the beginning of a value is quoted, and only for the mistakes that are reported."""
    Counted.quoted = 0
    value = [Counted()] * 1000
    (wrong,) = Rules({"anyOf": [{"type": "string"}] * 4900}).misfits(value)
    assert wrong.what.startswith("must be text, got [1, 1, 1, ")
    assert Counted.quoted <= 30


def test_mistakes_count_as_steps() -> None:
    """A value is refused at the step limit if every member of a union finds many mistakes in it."""
    form = {"type": "object", "additionalProperties": False}
    (wrong,) = Rules({"anyOf": [dict(form) for _ in range(2000)]}).misfits({f"k{at}": 1 for at in range(200)})
    assert wrong.what.startswith("can't be checked")


@pytest.mark.parametrize(
    "value",
    [1 << 20_000, {"a": [[[[1]]]]}, {"x" * 5000: "y" * 5000}, ["z" * 5000] * 99],
    ids=["a number", "nesting", "long texts", "a long list"],
)
def test_any_value_is_quoted_in_a_few_words(value: Any) -> None:
    """However large a value is, a message quotes at most its beginning."""
    (wrong,) = Rules({"type": "string"}).misfits(value)
    assert len(wrong.what) < 100


def test_long_names_are_not_copied_to_every_part() -> None:
    """If a schema and a value have a long name and many parts, the name is not copied for each part."""
    name = "k" * 200_000
    schema = {"type": "object", "properties": {name: {"items": {"type": "string"}}}}
    many = {"type": "object", "properties": {name: {"properties": {f"a{at}": {} for at in range(2000)}}}}
    tracemalloc.start()
    try:
        check_foreign(many, "t")
        wrong = Rules(schema).misfits({name: [0] * 2000})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert len(wrong) == 100
    assert all(len(each.where) < 100 for each in wrong)


def test_arguments_of_a_client_s_tool_have_a_maximum_size() -> None:
    """The arguments for a client's tool have the same size limit as those for any other tool."""
    with pytest.raises(ToolValidationError, match="20,000"):
        frontend_tool("t", "Do it.", {"type": "object"}).parse('{"x": [' + "0," * 30_000 + "0]}")
