"""Questions as forms that MCP clients show, and the clients' responses as answers.

MCP forms are flat: strings, numbers, booleans and choices. A question whose answer has any other shape is answered as
JSON text, with its schema in the message. MCP forbids forms that ask for secrets: a question that asks for one becomes
an address, at which the person answers in a browser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import mcp_types as wire
import pydantic_core
from mcp_types import ElicitRequestURLParams, ElicitResult, ErrorData
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from handrail.context import ToolContext
from handrail.errors import ContextExpired, Declined, NoAnswer
from handrail.mcp.contents import plain_schema
from handrail.mcp.login import LOCAL, LoginNeeded
from handrail.question import Answer, Question
from handrail.schema import to_json
from handrail.text.rendering import Row, escape
from handrail.workers.output_schema import output_type

_FLAT = frozenset(["string", "number", "integer", "boolean"])
_JSON = "json"
"""The field of a form in which the answer is written as JSON."""
_VALUE = "value"
"""The name of the only field in a form for an answer that is not an object."""


def principal_of(request: Any) -> str:
    """Return the principal who sent a request: over HTTP the authenticated one, otherwise the local user."""
    scope: Any = getattr(request.request, "scope", None)
    found: str = LOCAL if scope is None else scope["handrail.principal"]
    return found


def elicitation_of(request: Any) -> wire.ElicitationCapability | None:
    """Return how the client can ask a person; None if it can't."""
    capabilities = request.session.client_capabilities
    return None if capabilities is None else capabilities.elicitation


def can_ask(request: Any) -> bool:
    """Return whether the client can show a form to a person."""
    offered = elicitation_of(request)
    return offered is not None and (offered.form is not None or offered.url is None)


def address_of(question: Question, url: str) -> wire.ElicitRequestURLParams:
    """Return a request to open the address at which a question is answered."""
    return wire.ElicitRequestURLParams(message=message_of(question), url=url)


def form_of(question: Question, problem: str = "") -> wire.ElicitRequestFormParams:
    """Return a question as a form. `problem` says why the previous answer to it was refused.

    The message shows the question's rows, which are the call's arguments if an approval is asked for, and the diff of an
    approval that has one. Raises `ValueError` if the question asks for a secret.
    """
    if question.secret:
        raise ValueError(
            f"question {question.name!r} asks for a secret, which may not be asked for in a form. Use `address_of`."
        )
    schema = _expanded(question.schema, question.schema.get("$defs", {}))
    fields = flat_fields(schema)
    message = message_of(question, problem)
    if fields is None:
        shown = to_json(plain_schema(question.schema)).decode()
        message = f"{message}\nAnswer as JSON. It must match this JSON Schema: {shown}"
        fields = {_JSON: {"type": "string", "title": "Answer as JSON"}}
        needed: list[str] = [_JSON]
    elif _is_object(schema):
        needed = [name for name in schema.get("required", ()) if not _may_be_null(schema, name)]
    else:
        needed = [_VALUE]
    form: dict[str, Any] = {"type": "object", "properties": fields, "required": needed}
    return wire.ElicitRequestFormParams(message=message, requested_schema=form)


def key_of(question: Question) -> str:
    """Return the key under which a client gets a question: its name if it is the first of its call, otherwise its id."""
    return question.name if question.id == f"{question.run_id}.1~1?1" else question.id


def message_of(question: Question, problem: str = "") -> str:
    """Return the text of a question: `problem`, the question itself, its rows and its diff. Empty parts are left out."""
    shown = "\n".join(map(_line_of, question.rows))
    parts = (problem, question.message or question.name, shown, _changes_of(question))
    return "\n".join(part for part in parts if part)


def _changes_of(question: Question) -> str:
    """Return the diff that an approval would apply, indented below a heading; "" if the question shows none."""
    diff = question.payload.get("diff") if question.kind == "approval" else None
    return "It makes these changes:" + _indented(f"\n{escape(diff).rstrip()}") if diff else ""


def _line_of(row: Row) -> str:
    """Return a row as text. Further lines of its value are indented, so that they can't be taken for other rows."""
    return _indented(f"{row.name}: {row.whole}")


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def answer_of(question: Question, response: Any) -> Answer | None:
    """Convert a client's response to an answer. Returns None if the response is invalid.

    If the answer should be JSON text and is not, its value is None. For a question that asks for a secret, a response
    that accepts means only that the person has opened the address, so this returns None.
    """
    if isinstance(response, Mapping):
        try:
            response = wire.ElicitResult.model_validate(response)
        except ValueError:
            return None
    if not isinstance(response, wire.ElicitResult):
        return None
    if response.action == "cancel":
        return _answer(question, "cancelled")
    if response.action == "decline":
        return _answer(question, "declined", reason="declined at the client")
    if question.secret:
        return None
    return _answer(question, "answered", _value(question, cast("dict[str, Any]", response.content or {})))


def _answer(question: Question, outcome: Any, value: Any = None, reason: str = "") -> Answer:
    return Answer(
        question_id=question.id,
        digest=question.digest,
        by=question.principal,
        outcome=outcome,
        value=value,
        reason=reason,
    )


def _value(question: Question, content: dict[str, Any]) -> Any:
    schema = _expanded(question.schema, question.schema.get("$defs", {}))
    fields = flat_fields(schema)
    if fields is None:
        try:
            return pydantic_core.from_json(str(content.get(_JSON, "")))
        except ValueError:
            return None
    if not _is_object(schema):
        return content.get(_VALUE)
    # Fields that the person left empty are not in the answer, so that their defaults apply. Those without a default are null.
    empty = {name: None for name in schema.get("required", ()) if _may_be_null(schema, name)}
    return empty | {name: value for name, value in content.items() if value is not None}


def _may_be_null(schema: Mapping[str, Any], name: str) -> bool:
    """Return whether a field of an object may be null. In a form, it is then left empty."""
    options: Any = schema.get("properties", {}).get(name, {}).get("anyOf", ())
    return any(each.get("type") == "null" for each in options)


def _is_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object"


def flat_fields(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a form for answers with this schema, or None if a flat form can't have them."""
    properties: Mapping[str, Any] = schema.get("properties", {}) if _is_object(schema) else {_VALUE: schema}
    fields = {name: _field(field) for name, field in properties.items()}
    extra = _is_object(schema) and schema.get("additionalProperties", False) not in (False, True)
    if extra or None in fields.values() or (not fields and schema.get("additionalProperties") is not False):
        return None
    return fields


def _field(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return one field of a form; None if a flat form can't have it."""
    field = {name: value for name, value in schema.items() if name != "additionalProperties"}
    options: Any = field.get("anyOf")
    if isinstance(options, list) and "type" not in field:  # an optional value
        others = [each for each in cast("list[dict[str, Any]]", options) if each.get("type") != "null"]
        if len(others) != 1:
            return None
        del field["anyOf"]
        field = {**others[0], **field}
    if field.get("default", "") is None:
        del field["default"]
    if field.get("type") in _FLAT:
        return field
    items: Any = field.get("items")
    is_choice = isinstance(items, dict) and bool({"enum", "anyOf"} & cast("dict[str, Any]", items).keys())
    return field if field.get("type") == "array" and is_choice else None


def _expanded(value: Any, definitions: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a schema with its references replaced, as plain dicts and lists.

    References that are unknown or nested too deeply are left as they are.
    """
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        target = named.get("$ref")
        if isinstance(target, str) and depth < 4:
            found = definitions.get(target.removeprefix("#/$defs/"))
            if isinstance(found, Mapping):
                rest = {name: each for name, each in named.items() if name != "$ref"}
                return _expanded({**cast("Mapping[str, Any]", found), **rest}, definitions, depth + 1)
        return {
            name: _expanded(each, definitions, depth + 1) if depth < 8 else plain_schema(each)
            for name, each in named.items()
            if name != "$defs"
        }
    if isinstance(value, list | tuple):
        return [_expanded(each, definitions, depth) for each in cast("list[Any]", value)]
    return value


FORM = "mcp.form"
"""The kind of a question that asks a person to fill in a form, or to agree if the form has no fields."""
URL = "mcp.url"
"""The kind of a question that asks a person to open an address. The answer is whether they did."""

LOGIN = "mcp.login"
"""The kind of a question that asks a person to log in.

The answer is the address at which the browser ended up, or "" if the redirect reached this program.
"""
ENDPOINTS = "mcp.login.endpoints"
"""The kind of a question that asks a person whether a login may use addresses that are not on the issuer's origin."""

_UNCHECKED = frozenset(["format", "enumNames"])
_REFUSED = -32602


async def ask(server: str, context: ToolContext | None, params: Any) -> ElicitResult | ErrorData:
    """Ask the person a server's question, and return the answer as MCP defines it.

    The question says that the server asks. A form is shown with the values that the server suggests, and the person's answer
    is sent as it is: nothing is added to it. If the context can't ask a person, nobody answers, or the call ends meanwhile, the question is cancelled, so
    that the server decides what to do without the answer. Returns `ErrorData` if the server's form can't be shown, or asks for a secret.
    """
    wait_for = None if context is None else context.wait_for
    if wait_for is None:
        return ElicitResult(action="cancel")
    asked: dict[str, Any] = {"server": server, "message": params.message}
    title = f"Question from {server}"
    try:
        if isinstance(params, ElicitRequestURLParams):
            message = (
                f"The MCP server {server} asks you to open an address. Handrail has not checked the address."
            )
            opened = await wait_for(URL, {**asked, "url": params.url}, bool, message=message, title=title)
            return ElicitResult(action="accept" if opened else "decline")
        message = f"The MCP server {server} asks this, not Handrail. Your answer is sent to the server."
        if not params.requested_schema.get("properties"):
            agreed = await wait_for(FORM, asked, bool, message=message, title=title)
            return ElicitResult(action="accept", content={}) if agreed else ElicitResult(action="decline")
        form = _form(params.requested_schema)
        if isinstance(form, str):
            return ErrorData(code=_REFUSED, message=f"the form can't be shown: {form}")
        kind, suggested = form
        if suggested:  # a form may shorten a long suggestion, and rows show it in full
            asked = {**asked, "suggested": suggested}
        content: Any = await wait_for(FORM, asked, TypeAdapter(kind), message=message, title=title)
        return ElicitResult(action="accept", content=content)
    except Declined:
        return ElicitResult(action="decline")
    except (
        NoAnswer,
        ContextExpired,
    ):  # a run that is parked ends the call, and asks again when it is resumed
        return ElicitResult(action="cancel")


def _form(requested: Mapping[str, Any]) -> tuple[type[BaseModel], dict[str, Any]] | str:
    """Return the type of the answers to a server's form, and the values that it suggests, or why the form can't be shown.

    The type's JSON Schema, which environments show and the question's digest covers, has the values that the server suggests.
    A field with a single choice is shown as a choice, because a constant would be answered without being shown.
    """
    if any(_is_secret(part) for part in _parts(requested)):
        return "it asks for a secret, and forms may not. Ask for it at an address (URL elicitation)"
    properties: Any = requested["properties"]
    if not isinstance(properties, dict):
        return "`properties` is not an object"
    given = cast("dict[str, Any]", properties)
    schema: dict[str, Any] = {**requested, "type": "object"}
    schema.pop("$schema", None)
    schema["properties"] = fields = {name: _checked_field(each) for name, each in given.items()}
    problems: list[str] = []
    kind = output_type(schema, lambda where, problem, hint: problems.append(f"{where}: {problem}"))
    if kind is None:
        return "; ".join(problems[:5])
    if flat_fields(schema) is None:
        return "a field of a form is text, a number, a boolean, or a choice"
    suggested = {name: each["default"] for name, each in fields.items() if each.get("default") is not None}
    try:
        TypeAdapter(kind).validate_json(to_json(suggested), strict=True)
    except ValidationError as error:
        wrong = [each["loc"][0] for each in error.errors() if each["loc"] and each["loc"][0] in suggested]
        if wrong:
            return f"the default of {wrong[0]!r} is not valid"

    def complete(shown: dict[str, Any]) -> None:
        for part in _parts(shown):
            if "const" in part:
                part["enum"] = [part.pop("const")]
        for name, value in suggested.items():
            shown["properties"][name]["default"] = value

    class Form(kind):
        model_config = ConfigDict(json_schema_extra=complete)

    Form.__doc__ = None
    return Form, suggested


def _checked_field(field: Any) -> Any:
    """Return a form's field without `format`, which only the server checks, and without the titles in `enumNames`.

    Choices with titles become an `enum` of their values.
    """
    if not isinstance(field, dict):
        return field
    given = cast("dict[str, Any]", field)
    kept = {word: value for word, value in given.items() if word not in _UNCHECKED}
    for word in ("oneOf", "anyOf"):  # choices with titles
        choices: Any = kept.get(word)
        listed = cast("list[Any]", choices) if isinstance(choices, list) else []
        if listed and all(isinstance(each, dict) and "const" in each for each in listed):
            kept["enum"] = [each["const"] for each in kept.pop(word)]
    if "items" in kept:
        kept["items"] = _checked_field(kept["items"])
    return kept


def _is_secret(part: Mapping[str, Any]) -> bool:
    return part.get("writeOnly") is True or str(part.get("format")).casefold() == "password"


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, the outermost first."""
    if isinstance(value, dict):
        part = cast("dict[str, Any]", value)
        yield part
        value = list(part.values())
    if isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _parts(each)


async def ask_login(
    server: str, context: ToolContext | None, address: str, endpoints: Mapping[str, str] | None = None
) -> str:
    """Ask the person to log in to a server, and return the address that they answer with, which may be "".

    With `endpoints`, the person is asked whether the login may use them, and this returns "". Raises `LoginNeeded` if nobody can be asked, or if the person declines or does not answer.
    """
    wait_for = None if context is None else context.wait_for
    if wait_for is None:
        raise LoginNeeded("it needs a login")
    message = (
        f"Log in to {server}: open the address. Then answer with the address that the browser shows at the end, or with "
        "nothing if it says that you are logged in."
    )
    title = f"Login to {server}"
    try:
        if endpoints:
            warning = (
                f"The login to {server} does not stay on the origin that issues its tokens. What you allow there can be used by "
                "everybody behind these addresses. Agree only if you trust all of them."
            )
            if await wait_for(ENDPOINTS, {"server": server, **endpoints}, bool, message=warning, title=title):
                return ""
            raise LoginNeeded("the person did not agree to the addresses that the login would use")
        asked = {"server": server, "url": address}
        return await wait_for(LOGIN, asked, str, message=message, title=title)
    except (Declined, NoAnswer):
        raise LoginNeeded("nobody logged in") from None
