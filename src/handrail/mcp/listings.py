"""`Listings`: the lists of tools that a server sends, without the tools that are not valid.

The SDK refuses a whole list if one tool in it is not valid, so such tools are removed before the SDK reads the list.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from mcp_types import JSONRPCResponse, ListToolsResult
from mcp_types.methods import SERVER_RESULTS, validate_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from handrail.text.rendering import escape_line
from handrail.text.secrets import Secrets

log = logging.getLogger("handrail.mcp")

_MAX_WARNINGS = 100
"""Maximum number of invalid tools that the log names for one connection."""
_MAX_WORDS = 200


class Listings:
    """The lists of tools that come through one connection. `server` names the server in the log."""

    def __init__(self, server: str, secrets: Secrets) -> None:
        self._server = server
        self._secrets = secrets
        self._version: str = MODERN_PROTOCOL_VERSIONS[-1]
        self._warned: set[str] = set()

    def screen(self, message: object) -> None:
        """Remove the tools that are not valid from a response that lists tools.

        The log names each of them once, with what is wrong, but at most `_MAX_WARNINGS` of them.

        A list that is not valid for other reasons is left as it is, and so are all other messages.
        """
        if not isinstance(message, JSONRPCResponse):
            return
        result = message.result
        version = result.get("protocolVersion")
        if isinstance(version, str):
            self._version = version
        tools: Any = result.get("tools")
        if (
            not isinstance(tools, list)
            or "content" in result  # the message is the result of a call
            or not self._problem_of(result)
            or self._problem_of({**result, "tools": []})
        ):
            return
        kept: list[Any] = []
        for tool in cast("list[Any]", tools):
            problem = self._problem_of({**result, "tools": [tool]})
            if problem:
                self._warn(tool, problem)
            else:
                kept.append(tool)
        result["tools"] = kept

    def _problem_of(self, result: Mapping[str, Any]) -> str:
        """Return the first problem in a list of tools; "" if the list is valid."""
        try:
            if ("tools/list", self._version) in SERVER_RESULTS:
                validate_server_result("tools/list", self._version, result)
            ListToolsResult.model_validate(result, by_name=False)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(step) for step in first["loc"] if step != "tools")
            return f"{where.removeprefix('0').lstrip('.') or 'it'}: {first['msg']}"
        return ""

    def _warn(self, tool: object, problem: str) -> None:
        named: Any = cast("dict[str, Any]", tool).get("name") if isinstance(tool, dict) else None
        words = f"{named!r} ({problem})" if isinstance(named, str) else f"without a name ({problem})"
        said = escape_line(self._secrets.hide(words), _MAX_WORDS)
        if said not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(said)
            log.warning(
                "the MCP server %s describes a tool wrongly: %s. The tool is left out.", self._server, said
            )
