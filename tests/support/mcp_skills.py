"""An MCP server with skills, written with the official SDK: `python mcp_skills.py FILE`.

The file is read for each request. Its JSON has the `entries`, the `contents` of each address, and the addresses of `unlisted` entries.
With `endless`, each page of skills has another one after it. Each request is noted in a file beside it.
"""

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import mcp_types as wire
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from mcp import MCPError

FILE = Path(sys.argv[-1])


class GetParams(wire.RequestParams):
    uri: str


def note(what: str) -> dict[str, Any]:
    with FILE.with_suffix(".log").open("a") as log:
        log.write(f"{what}\n")
    return json.loads(FILE.read_text())


async def list_skills(request: Any, params: Any) -> dict[str, Any]:
    state = note("list")
    found = [each for each in state["entries"] if each["uri"] not in state.get("unlisted", [])]
    more = {"nextCursor": "more"} if state.get("endless") else {}
    return {"resultType": "complete", "skills": found, "ttlMs": 0, "cacheScope": "private", **more}


async def get_skill(request: Any, params: GetParams) -> dict[str, Any]:
    for entry in note(f"get {params.uri}")["entries"]:
        if entry["uri"] == params.uri:
            return {"resultType": "complete", "skill": entry, "ttlMs": 0, "cacheScope": "private"}
    raise MCPError(wire.INVALID_PARAMS, "no such skill")


async def read(request: Any, params: wire.ReadResourceRequestParams) -> wire.ReadResourceResult:
    uri = str(params.uri)
    content = note(f"read {uri}")["contents"].get(uri)
    if content is None:
        raise MCPError(wire.INVALID_PARAMS, "no such resource")
    try:
        text = base64.b64decode(content).decode()
        return wire.ReadResourceResult(contents=[wire.TextResourceContents(uri=uri, text=text)])
    except ValueError:  # not text, or not Base64
        return wire.ReadResourceResult(contents=[wire.BlobResourceContents(uri=uri, blob=content)])


async def list_tools(request: Any, params: Any) -> wire.ListToolsResult:
    return wire.ListToolsResult(tools=[wire.Tool(name="echo", input_schema={"type": "object"})])


async def call_tool(request: Any, params: Any) -> wire.CallToolResult:
    return wire.CallToolResult(content=[wire.TextContent(text="echo")])


async def main() -> None:
    server: Server[Any] = Server(
        "docs", on_list_tools=list_tools, on_call_tool=call_tool, on_read_resource=read
    )
    server.extensions["io.modelcontextprotocol/skills"] = {}
    server.add_request_handler("skills/list", wire.PaginatedRequestParams, list_skills)
    server.add_request_handler("skills/get", GetParams, get_skill)
    async with stdio_server() as (reads, writes):
        await server.run(reads, writes, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
