"""Questions of an MCP server, put to the person in the environment of the call that they belong to."""

from __future__ import annotations

from typing import Any

from mcp_types import ElicitRequestURLParams, ElicitResult, ErrorData
from pydantic import TypeAdapter

from handrail.context import ToolContext
from handrail.errors import Declined, NoAnswer
from handrail.workers.output_schema import output_type

FORM = "mcp.form"
"""The kind of a question whose answer is a form."""
URL = "mcp.url"
"""The kind of a question that asks a person to open an address. The answer is whether they did."""

_REFUSED = -32602


async def ask(server: str, context: ToolContext | None, params: Any) -> ElicitResult | ErrorData:
    """Ask the person a server's question, and return the answer in the server's terms.

    If nobody can be asked or nobody answers, the question is cancelled, so that the server decides what to do without the
    answer. A form that can't be shown is refused with an error.
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
        schema = {**params.requested_schema, "type": "object"}
        schema.pop("$schema", None)
        if not schema.get("properties"):
            agreed = await wait_for(FORM, asked, bool)
            return ElicitResult(action="accept", content={}) if agreed else ElicitResult(action="decline")
        kind = output_type(schema, lambda where, problem, hint: problems.append(f"{where}: {problem}"))
        if kind is None:
            return ErrorData(code=_REFUSED, message=f"the form can't be shown: {'; '.join(problems[:5])}")
        content: Any = await wait_for(FORM, asked, TypeAdapter(kind))
        return ElicitResult(action="accept", content=content)
    except Declined:
        return ElicitResult(action="decline")
    except NoAnswer:
        return ElicitResult(action="cancel")
