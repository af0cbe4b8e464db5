"""Tools that a client brings: a model calls them here, and the client carries them out.

Such a call is a question to whoever is connected. So it is journaled, may wait for days, survives a restart,
and is answered once, by the tool message that the client sends in its next input.
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
    """What a client says came of a call."""

    content: str
    error: str | None = None


class FrontendTool(Tool[Any, Any]):
    """A tool with the client's own name, words and JSON Schema. Its arguments are plain JSON."""

    def parse(self, arguments: str | bytes | Mapping[str, Any]) -> Any:
        """The arguments as they are, or `ToolValidationError` with what does not fit the client's schema."""
        value: Any = arguments
        if isinstance(arguments, str | bytes):
            try:
                value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
            except ValueError as error:
                raise ToolValidationError(f"the arguments are no JSON: {error}") from None
        if not isinstance(value, dict):
            raise ToolValidationError("the arguments are no JSON object. Give one: {...}.")
        wrong = misfits(self.json_schema, cast("object", value))
        if wrong:
            raise ToolValidationError("; ".join(map(str, wrong)))
        return cast("dict[str, Any]", value)

    def parse_again(self, params: Any, arguments: str | bytes | Mapping[str, Any]) -> Any:
        return deepcopy(params)

    def dump(self, params: Any) -> bytes:
        return to_json(params)


def frontend_tool(name: str, description: str, parameters: Any = None) -> FrontendTool:
    """The tool that a client describes; `DefinitionError` where a model could not be offered it."""
    if not _NAME.fullmatch(name):
        raise DefinitionError(
            f"the tool {name!r} can't be offered to a model. A name has 1 to 64 letters, digits, - and _."
        )
    schema = _OPEN if parameters is None or parameters == {} else parameters
    if not isinstance(schema, dict) or cast("dict[str, Any]", schema).get("type", "object") != "object":
        raise DefinitionError(f"the parameters of the tool {name!r} are no JSON Schema of an object.")

    async def ask(params: None, *, context: UserContext) -> ToolResult[Any]:
        asked = {"tool": name, "arguments": params}
        came = await context.wait_for(FRONTEND_TOOL, asked, Outcome)
        if came.error is not None:
            return ToolResult.error(came.error if not came.content else f"{came.error}\n{came.content}")
        return ToolResult.ok(None, came.content)

    made = FrontendTool("frontend", "A tool of the client's own.", ask, effect="read")
    # What a client calls its tools is its own business; our rules for names and words are not for these.
    for field, value in (
        ("name", name),
        ("description", description.strip() or name),
        ("json_schema", {**cast("dict[str, Any]", schema), "type": "object"}),
    ):
        object.__setattr__(made, field, value)
    return made


def frontend_tools_of(offered: Mapping[str, str], added: Iterable[str]) -> list[FrontendTool]:
    """The client's tools that a recorded run was begun with, for whoever goes on with it."""
    found: list[FrontendTool] = []
    for name in added:
        description, schema = msgspec.json.decode(offered[name])
        found.append(frontend_tool(name, description, schema))
    return found
