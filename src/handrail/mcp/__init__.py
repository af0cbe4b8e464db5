"""MCP in both directions: the tools of MCP servers in a prompt, and an app as an MCP server.

    from handrail.mcp import McpTools
    Prompt("guide", ["Answer briefly.", McpTools(command=["npx", "@scope/server", "folder"])])

Needs `pip install 'handrail[mcp]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.mcp.apps import serve_agent
    from handrail.mcp.config import load_servers
    from handrail.mcp.http import HttpServer
    from handrail.mcp.login import Login
    from handrail.mcp.section import McpTools
    from handrail.mcp.server import ToolServer
    from handrail.mcp.transport import StdioServer
    from handrail.mcp.url_transport import UrlServer

__all__ = [
    "HttpServer",
    "Login",
    "McpTools",
    "StdioServer",
    "ToolServer",
    "UrlServer",
    "load_servers",
    "serve_agent",
]

REQUIRED = ("mcp", "mcp_types", "httpx2", "starlette", "uvicorn")
"""Modules of packages that the `mcp` extra installs. If one of them is missing, `missing_extra` creates the error."""


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's
    from handrail.imports import names_on_first_use
    from handrail.serve import missing_extra

    __getattr__ = names_on_first_use(
        __name__,
        {
            "http": "HttpServer",
            "login": "Login",
            "section": "McpTools",
            "transport": "StdioServer",
            "server": "ToolServer",
            "url_transport": "UrlServer",
            "config": "load_servers",
            "apps": "serve_agent",
        },
        lambda missing, home: missing_extra(missing, "mcp", "MCP") if missing in REQUIRED else None,
    )
