"""Tools whose params are a JSON Schema: the model sees it as it is, and the handler gets a dict that matches it."""

import copy
import dataclasses
from typing import Any, TypedDict

import pytest

from handrail import Tool, ToolContext, ToolExample, ToolResult, open_gate
from handrail.errors import ToolDefinitionError, ToolValidationError

CONTACT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"place": {"$anchor": "place", "type": "object", "properties": {"city": {"type": "string"}}}},
    "properties": {
        "by": {"enum": ["phone", "email"]},
        "phone": {"type": "string", "pattern": "^[0-9]+$"},
        "email": {"type": "string"},
        "home": {"$ref": "#place"},
        "code": {"type": "string", "writeOnly": True},
    },
    "if": {"properties": {"by": {"const": "phone"}}, "required": ["by"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


async def reach(params: dict[str, Any], *, context: ToolContext) -> ToolResult[dict[str, Any]]:
    return ToolResult.ok(params)


def contact(**options: Any) -> Tool[dict[str, Any], dict[str, Any]]:
    given: dict[str, Any] = {"params": CONTACT, "effect": "read", **options}
    return Tool("contact", "Contact somebody.", reach, **given)


async def test_a_call_gets_the_arguments_as_a_dict() -> None:
    """The schema is shown unchanged, and arguments that match it reach the handler as they are."""
    made = contact()
    assert made.json_schema == CONTACT
    sent = {"by": "phone", "phone": "12", "home": {"city": "Bonn"}}
    assert (await open_gate([made]).invoke("contact", sent)).value == sent


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({"by": "phone", "email": "a"}, "phone is missing"),
        ({}, "email is missing"),
        ({"email": "a", "home": {"city": 3}}, "home.city must be text"),
        ({"email": "a", "fax": "1"}, "fax is unknown"),
        ({"by": "phone", "phone": "x"}, "phone must match the pattern"),
        ('{"email": 1e999}', "email must be a finite number"),
        ("[]", "the arguments are not a JSON object"),
        ("{", "not valid JSON"),
    ],
)
async def test_arguments_that_do_not_match_are_refused(sent: Any, problem: str) -> None:
    """A call whose arguments do not match the schema fails, and its message says what is wrong."""
    result = await open_gate([contact()]).invoke("contact", sent)
    assert not result.success
    assert problem in result.message


def test_secrets_are_masked() -> None:
    """An argument that is `writeOnly` is masked in what is recorded, and a mask is not accepted in its place."""
    made = contact()
    sent = {"email": "a", "code": "hunter2"}
    assert made.secret
    assert "hunter2" not in made.mask(sent) + made.dump(made.parse(sent)).decode()
    assert made.clear(sent) == b'{"email":"a","code":"hunter2"}'
    assert made.mask({"email": "a", "code": ["hunter2"]}) == made.mask("not JSON")  # withheld entirely
    assert made.mask(made.mask(sent)) == made.mask(sent)
    with pytest.raises(ToolValidationError, match="masked"):
        made.parse(made.mask(sent))


def test_a_secret_beside_a_reference_is_masked() -> None:
    """A secret is masked even if `writeOnly` is beside a reference, or in a schema whose anchor a reference names."""
    schema = {
        "type": "object",
        "$defs": {"login": {"$anchor": "login", "properties": {"user": {"type": "string"}}}},
        "properties": {
            "by": {"$ref": "#/$defs/login", "properties": {"key": {"writeOnly": True}}},
            "to": {"$ref": "#token"},
        },
        "allOf": [{"properties": {"to": {"$anchor": "token", "type": "string", "writeOnly": True}}}],
    }
    made = contact(params=schema)
    assert made.mask({"by": {"user": "ann", "key": "k1"}, "to": "k2"}) == (
        '{"by":{"user":"ann","key":"**********"},"to":"**********"}'
    )


async def test_a_policy_and_the_handler_share_nothing() -> None:
    """`copy_params` copies the arguments for a policy at every depth, so that the policy can't change those of the handler."""
    made = contact()
    sent = made.parse({"email": "a", "home": {"city": "Bonn"}})
    copied = made.copy_params(sent, "{}")
    copied["home"]["city"] = "Köln"
    assert sent["home"]["city"] == "Bonn"


def test_such_a_tool_is_a_value() -> None:
    """A tool with a schema can be compared, hashed and copied, and its schema can't be changed afterwards."""
    schema = copy.deepcopy(CONTACT)
    made = contact(params=schema)
    schema["required"] = ["fax"]
    assert made == contact()
    assert hash(made) == hash(contact())
    assert dataclasses.replace(made, timeout=3.0).json_schema == CONTACT
    with pytest.raises(TypeError, match="read-only"):
        made.json_schema["required"] = []


class Reached(TypedDict):
    email: str


async def takes_typed_dict(params: Reached, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(params["email"])


@dataclasses.dataclass
class Record:
    email: str


async def takes_record(params: Record, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok(params.email)


def test_the_handler_takes_a_dict() -> None:
    """A handler may annotate the dict as a typed dict, but not as another class."""
    assert Tool("contact", "Contact.", takes_typed_dict, params=CONTACT).parse({"email": "a"}) == {
        "email": "a"
    }
    with pytest.raises(
        ToolDefinitionError, match="`params` is dict, but 'params' of its handler is annotated"
    ):
        Tool("contact", "Contact.", takes_record, params=CONTACT)


def test_a_wrong_schema_or_example_is_an_error_at_definition() -> None:
    """A wrong schema or example is refused when the tool is defined, and the error names the tool."""
    with pytest.raises(ToolDefinitionError, match="tool 'contact': the schema of its params"):
        contact(params={"type": "array"})
    with pytest.raises(ToolDefinitionError, match="examples\\[0\\] is invalid: email is missing"):
        contact(examples=[ToolExample("No address.", {}, {})])
