"""`FrontendTool`: a tool that a client brings. A model calls it here, and the client executes it.

Such a call is a question to the client. So it is recorded in the journal, may wait for days, survives a
restart, and is answered once, by the tool message in the client's next input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pydantic_core

from handrail.context import UserContext
from handrail.errors import DefinitionError, ToolValidationError
from handrail.schema import to_json
from handrail.schema.problems import misfits
from handrail.serve.agui.interrupts import FRONTEND_TOOL
from handrail.tools import Tool, ToolResult

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPEN: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Outcome:
    """The result of a call, as the client reports it."""

    content: str
    error: str | None = None


class FrontendTool(Tool[Any, Any]):
    """A tool with the client's name, description and JSON Schema. Its arguments are plain JSON."""

    def parse(self, arguments: str | bytes | Mapping[str, Any]) -> Any:
        """The arguments unchanged, or `ToolValidationError` with what does not fit the client's schema."""
        value: Any = arguments
        if isinstance(arguments, str | bytes):
            try:
                value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
            except ValueError as error:
                raise ToolValidationError(f"the arguments are not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ToolValidationError("the arguments are not a JSON object. Send one: {...}.")
        wrong = misfits(self.json_schema, cast("object", value))
        if wrong:
            raise ToolValidationError("; ".join(map(str, wrong)))
        return cast("dict[str, Any]", value)

    def parse_again(self, params: Any, arguments: str | bytes | Mapping[str, Any]) -> Any:
        return deepcopy(params)

    def dump(self, params: Any) -> bytes:
        return to_json(params)


def frontend_tool(name: str, description: str, parameters: Any = None) -> FrontendTool:
    """The tool that a client describes. `DefinitionError` if it can't be offered to a model."""
    if not _NAME.fullmatch(name):
        raise DefinitionError(
            f"the tool {name!r} can't be offered to a model. A name has 1 to 64 letters, digits, - and _."
        )
    schema = _OPEN if parameters is None or parameters == {} else parameters
    if not isinstance(schema, dict) or cast("dict[str, Any]", schema).get("type", "object") != "object":
        raise DefinitionError(f"the parameters of the tool {name!r} are not a JSON Schema of an object.")

    async def ask(params: None, *, context: UserContext) -> ToolResult[Any]:
        asked = {"tool": name, "arguments": params}
        came = await context.wait_for(FRONTEND_TOOL, asked, Outcome)
        if came.error is not None:
            return ToolResult.error(came.error if not came.content else f"{came.error}\n{came.content}")
        return ToolResult.ok(None, came.content)

    made = FrontendTool("frontend", "A tool of the client.", ask, effect="read")
    # Our rules for names and descriptions do not apply to a client's tools.
    for field, value in (
        ("name", name),
        ("description", description.strip() or name),
        ("json_schema", {**cast("dict[str, Any]", schema), "type": "object"}),
    ):
        object.__setattr__(made, field, value)
    return made


def frontend_tools_of(offered: Mapping[str, str], added: Iterable[str]) -> list[FrontendTool]:
    """The client's tools that a recorded run was started with, for resuming it."""
    found: list[FrontendTool] = []
    for name in added:
        description, schema = msgspec.json.decode(offered[name])
        found.append(frontend_tool(name, description, schema))
    return found
