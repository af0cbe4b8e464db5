"""An MCP server over HTTP on loopback."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from handrail.mcp import McpTools, UrlServer
from handrail.mcp.http import PATH, HttpServer
from handrail.mcp.server import ToolServer
from support.serving import BEARER, TOKEN, served_at


@asynccontextmanager
async def serving(served: ToolServer, token: str | None = TOKEN, **options: Any) -> AsyncGenerator[str]:
    """Serve over HTTP during the block. Yields the address of the endpoint."""
    async with served_at(HttpServer(served, token=token, **options)) as address:
        yield address.rstrip("/") + PATH


def jobs(url: str, **options: Any) -> McpTools:
    """Return a section with the tools of a server that `serving` serves."""
    return McpTools("jobs", server=UrlServer(url, BEARER), **options)
