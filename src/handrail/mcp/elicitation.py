"""Puts the questions of MCP servers, and their requests to log in, to a person through the context of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from mcp_types import ElicitRequestURLParams, ElicitResult, ErrorData
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from handrail.context import ToolContext
from handrail.errors import ContextExpired, Declined, NoAnswer
from handrail.mcp.forms import flat_fields
from handrail.mcp.login import LoginNeeded
from handrail.schema import to_json
from handrail.workers.output_schema import output_type

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
    schema["properties"] = fields = {name: _field(each) for name, each in given.items()}
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


def _field(field: Any) -> Any:
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
        kept["items"] = _field(kept["items"])
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
