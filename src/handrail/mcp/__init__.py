"""MCP in both directions: the tools of MCP servers in a prompt, and an app as an MCP server.

    from handrail.mcp import McpTools
    Prompt("guide", ["Answer briefly.", McpTools(command=["npx", "@scope/server", "folder"])])

Needs `pip install 'handrail[mcp]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from handrail.errors import DefinitionError

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
_HOMES = {
    "HttpServer": "http",
    "Login": "login",
    "McpTools": "section",
    "StdioServer": "transport",
    "ToolServer": "server",
    "UrlServer": "url_transport",
    "load_servers": "config",
    "serve_agent": "apps",
}


def missing_extra(name: str) -> DefinitionError:
    """Return the error to raise when the module `name`, which the `mcp` extra installs, is missing."""
    return DefinitionError(
        f"MCP needs {name}, which is not installed. Install it with: pip install 'handrail[mcp]'"
    )


if not TYPE_CHECKING:  # a type checker would take every name for one of the package's

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{__name__}.{home}"), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in REQUIRED:
                raise
            raise missing_extra(missing) from None
