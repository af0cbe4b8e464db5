"""A program that calls a tool of an MCP server in a recorded run: `python mcp_task_client.py URL JOURNAL`."""

import asyncio
import sys
from typing import Any

from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, ToolCall
from handrail.mcp import McpTools, UrlServer
from support.mcp_served import BEARER

RUN = "run"


def jobs(url: str, **options: Any) -> McpTools:
    """Return a section with the tools of the server."""
    return McpTools("jobs", server=UrlServer(url, BEARER), **options)


async def main(url: str, path: str) -> None:
    async with jobs(url) as section:
        prompt = Prompt("guide", ["Go.", section])
        model = ScriptedModel([ToolCall("slow", {"word": "it"}), "Done."])
        await Adapter(model).evaluate(prompt, "hi", journal=SqliteJournal(path), run_id=RUN)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
