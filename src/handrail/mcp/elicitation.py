"""Puts the questions of MCP servers, and their requests to log in, to a person through the context of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mcp_types import ElicitRequestURLParams, ElicitResult, ErrorData
from pydantic import TypeAdapter

from handrail.context import ToolContext
from handrail.errors import Declined, NoAnswer
from handrail.mcp.login import LoginNeeded
from handrail.workers.output_schema import output_type

FORM = "mcp.form"
"""The kind of a question that asks a person to fill in a form, or to agree if the form has no fields."""
URL = "mcp.url"
"""The kind of a question that asks a person to open an address. The answer is whether they did."""

LOGIN = "mcp.login"
"""The kind of a question that asks a person to log in.

The answer is the address at which the browser ended up, or "" if the redirect reached this program.
"""

_UNCHECKED = frozenset(["format", "enumNames"])
_REFUSED = -32602


async def ask(server: str, context: ToolContext | None, params: Any) -> ElicitResult | ErrorData:
    """Ask the person a server's question, and return the answer as MCP defines it.

    If the context can't ask a person, or nobody answers, the question is cancelled, so that the server decides what to do
    without the answer. Returns `ErrorData` if the server's form can't be shown.
    """
    wait_for = None if context is None else context.wait_for
    if wait_for is None:
        return ElicitResult(action="cancel")
    asked = {"server": server, "message": params.message}
    try:
        if isinstance(params, ElicitRequestURLParams):
            opened = await wait_for(URL, {**asked, "url": params.url}, bool)
            return ElicitResult(action="accept" if opened else "decline")
        problems: list[str] = []
        schema: dict[str, Any] = {**params.requested_schema, "type": "object"}
        schema.pop("$schema", None)
        schema["properties"] = {name: _field(each) for name, each in schema.get("properties", {}).items()}
        if not schema.get("properties"):
            agreed = await wait_for(FORM, asked, bool)
            return ElicitResult(action="accept", content={}) if agreed else ElicitResult(action="decline")
        kind = output_type(schema, lambda where, problem, hint: problems.append(f"{where}: {problem}"))
        if kind is None:
            return ErrorData(code=_REFUSED, message=f"the form can't be shown: {'; '.join(problems[:5])}")
        content: Any = await wait_for(FORM, asked, TypeAdapter(kind))
        return ElicitResult(action="accept", content={**_defaults(schema["properties"]), **content})
    except Declined:
        return ElicitResult(action="decline")
    except NoAnswer:
        return ElicitResult(action="cancel")


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


def _defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a server suggests for the fields of its form.

    They are used for fields that the person left empty.
    """
    return {name: field["default"] for name, field in fields.items() if "default" in field}


async def ask_login(server: str, context: ToolContext | None, address: str) -> str:
    """Ask the person to log in to a server, and return the address that they answer with, which may be "".

    Raises `LoginNeeded` if nobody can be asked, or if the person declines or does not answer.
    """
    wait_for = None if context is None else context.wait_for
    if wait_for is None:
        raise LoginNeeded("it needs a login")
    message = (
        f"Log in to {server}: open the address. Then answer with the address that the browser shows at the end, or with "
        "nothing if it says that you are logged in."
    )
    try:
        return await wait_for(LOGIN, {"server": server, "message": message, "url": address}, str)
    except (Declined, NoAnswer):
        raise LoginNeeded("nobody logged in") from None
