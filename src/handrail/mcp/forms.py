"""Questions as forms that MCP clients show, and the clients' responses as answers.

MCP forms are flat: strings, numbers, booleans and choices. A question whose answer has any other shape is answered as
JSON text, with its schema in the message. MCP forbids forms that ask for secrets: a question that asks for one becomes
an address, at which the person answers in a browser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mcp_types as wire
import pydantic_core

from handrail.question import Answer, Question
from handrail.rendering import Row, escape
from handrail.schema import to_json

_FLAT = frozenset(["string", "number", "integer", "boolean"])
_JSON = "json"
"""The field of a form in which the answer is written as JSON."""
_VALUE = "value"
"""The name of the only field in a form for an answer that is not an object."""


def can_ask(request: Any) -> bool:
    """Return whether the client can show a form to a person."""
    capabilities = request.session.client_capabilities
    offered = None if capabilities is None else capabilities.elicitation
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
        shown = to_json(_plain(question.schema)).decode()
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
            name: _expanded(each, definitions, depth + 1) if depth < 8 else _plain(each)
            for name, each in named.items()
            if name != "$defs"
        }
    if isinstance(value, list | tuple):
        return [_expanded(each, definitions, depth) for each in cast("list[Any]", value)]
    return value


def _plain(value: Any) -> Any:
    """Return a read-only schema as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in cast("Mapping[str, Any]", value).items()}
    return [_plain(each) for each in cast("list[Any]", value)] if isinstance(value, list | tuple) else value
