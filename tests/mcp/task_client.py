"""A program that calls a tool of an MCP server in a recorded run: `python task_client.py URL JOURNAL`."""

import asyncio
import sys

from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, ToolCall
from support.mcp_served import jobs


async def main(url: str, path: str) -> None:
    async with jobs(url) as section:
        prompt = Prompt("guide", ["Go.", section])
        model = ScriptedModel([ToolCall("slow", {"word": "it"}), "Done."])
        await Adapter(model).evaluate(prompt, "hi", journal=SqliteJournal(path), run_id="run")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
