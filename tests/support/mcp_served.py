"""An MCP server over HTTP on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from handrail.mcp import McpTools, UrlServer
from handrail.mcp.http import PATH, HttpServer
from handrail.mcp.server import ToolServer
from handrail.serve.server import address_of, listen, server_for

TOKEN = "a-token-that-nobody-guesses"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def serving(served: ToolServer, token: str | None = TOKEN, **options: Any) -> AsyncGenerator[str]:
    """Serve over HTTP during the block. Yields the address of the endpoint."""
    app = HttpServer(served, token=token, **options)
    listening = listen("127.0.0.1", 0)
    ready = asyncio.Event()
    server = server_for(app, ready.set)
    await app.start()
    task = asyncio.create_task(server.serve([listening]))
    await ready.wait()
    try:
        yield address_of(listening).rstrip("/") + PATH
    finally:
        await app.stop()
        server.should_exit = True
        await task


def jobs(url: str, **options: Any) -> McpTools:
    """Return a section with the tools of a server that `serving` serves."""
    return McpTools("jobs", server=UrlServer(url, BEARER), **options)
