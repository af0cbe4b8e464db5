"""`handrail mcp`: the tools of an app as an MCP server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from handrail.agent import Agent
from handrail.cli.command_options import open_files, search_here
from handrail.cli.outcome import UsageError
from handrail.prompt import Prompt
from handrail.serve.sources import load_module


def serve(app: str, folder: Path | None) -> int:
    """Serve the tools of an app over standard input and output until the input ends. Returns the exit status."""
    from handrail.mcp import ToolServer

    search_here()
    named, _, attribute = app.partition(":")
    module = load_module(named)
    found: Any = getattr(module, attribute or ("prompt" if hasattr(module, "prompt") else "agent"), None)
    prompt: Any = cast("Agent[Any]", found).prompt if isinstance(found, Agent) else found
    if not isinstance(prompt, Prompt):
        raise UsageError(f"{app} has no prompt or agent to serve. Name one, as {named}:NAME.")
    files = open_files(folder, None)
    asyncio.run(ToolServer(cast("Prompt[Any]", prompt), files=lambda: files).serve_stdio())
    return 0
