"""A tool that a server describes wrongly is left out, with a warning that names it. The server's other tools can be used."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp_types import JSONRPCResponse

from handrail.mcp import McpTools, StdioServer
from handrail.mcp.connection import ServerUnavailable
from handrail.mcp.transport import Listings
from handrail.text.secrets import Secrets
from support import SUPPORT
from support.mcp_http import ECHO, Reply, Request, json_reply, listening, ordinary

SCHEMA = {"type": "object", "properties": {}}
WRONG: list[Any] = [
    {"name": "without"},
    {"name": "list", "inputSchema": {"type": "array"}},
    {"name": "number", "inputSchema": 3},
    {"name": "noted\n\x1b[31m", "inputSchema": SCHEMA, "annotations": "none"},
    {"inputSchema": SCHEMA},
    "word",
]


async def test_over_http(caplog: pytest.LogCaptureFixture) -> None:
    """Each tool that is described wrongly causes one warning, which says what is wrong, however often the list is read."""

    def answer(request: Request) -> Reply | None:
        if request.message.get("method") == "tools/list":
            return json_reply(request.message, {"tools": [*WRONG[:3], ECHO, *WRONG[3:]]})
        return ordinary(request)

    async with listening(answer) as url, McpTools("trial", url=url) as section:
        assert [tool.name for tool in section.current_tools()] == ["echo"]
        client = await section.server.account("local").connection.client()
        assert [tool.name for tool in (await client.list_tools()).tools] == ["echo"]
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(said) == len(WRONG)
    assert (
        "describes a tool wrongly: 'without' (inputSchema: Field required). The tool is left out." in said[0]
    )
    assert "'list' (inputSchema.type: Input should be 'object')" in said[1]
    assert "\n" not in said[3]
    assert "\x1b" not in said[3]
    assert "without a name (name: Field required)" in said[4]


async def test_of_a_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wrongly described tool of a server that is started by a command is left out too."""
    (tmp_path / "state").write_text("wrong fresh")
    command = [sys.executable, "-S", str(SUPPORT / "mcp_server.py"), str(tmp_path / "state")]
    async with McpTools("trial", server=StdioServer(command)) as section:
        names = {tool.name for tool in section.current_tools()}
    assert {"fresh", "echo"} <= names
    assert "wrong" not in names
    assert "describes a tool wrongly: 'wrong'" in caplog.text


async def test_a_list_that_is_not_one_is_still_refused() -> None:
    """If the list itself is not valid, the server can't be used."""

    def answer(request: Request) -> Reply | None:
        if request.message.get("method") == "tools/list":
            return json_reply(request.message, {"tools": [ECHO], "nextCursor": 3})
        return ordinary(request)

    async with listening(answer) as url:
        with pytest.raises(ServerUnavailable, match="not valid MCP"):
            await McpTools("trial", url=url).connect()


@pytest.mark.parametrize(("version", "kept"), [("2026-07-28", ["any"]), ("2025-11-25", [])])
def test_the_version_decides_what_is_valid(version: str, kept: list[str], caplog: Any) -> None:
    """A later protocol version allows output schemas that an older one refuses. A secret in a tool's name is not logged."""
    listings = Listings("trial", Secrets.of({}, {}, ["hunter2"]))
    listings.screen(JSONRPCResponse(jsonrpc="2.0", id=1, result={"protocolVersion": version}))
    tool = {"name": "any", "inputSchema": SCHEMA, "outputSchema": {"type": "array"}}
    hidden = {"name": "hunter2"}
    whole = {"tools": [tool, hidden], "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    response = JSONRPCResponse(jsonrpc="2.0", id=2, result=whole)
    listings.screen(response)
    assert [each["name"] for each in response.result["tools"]] == kept
    assert "hunter2" not in caplog.text


def test_other_messages_are_left_alone() -> None:
    """If the result of a call has a field called `tools`, the field is not changed."""
    listings = Listings("trial", Secrets.of({}, {}, ()))
    result = {"content": [], "tools": [3]}
    response = JSONRPCResponse(jsonrpc="2.0", id=1, result=dict(result))
    listings.screen(response)
    assert response.result == result
