"""Measure the CPU time of an MCP call through Handrail's server and client, beside the bare SDK doing the same.

    python bench/mcp_calls.py

Servers are processes on standard input and output. The sides take turns, so a busy machine slows both. Each ratio may
be at most 1.5.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = int(os.environ.get("ROUNDS", "8"))
CALLS = int(os.environ.get("CALLS", "200"))
"""How many calls one round makes on each side."""
MOST = 1.5
GIVEN = {"text": "hello", "times": 3}
EXPECTED = {"text": "hellohellohello"}
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Repeated:
    """The tool's result, so that both servers send a structured value and both clients check it."""

    text: str


Work = Callable[[], Awaitable[Any]]


def serve_bare() -> None:
    """Serve a tool with the SDK alone."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("bench")

    @server.tool()
    async def repeat(text: str, times: int) -> Repeated:  # pyright: ignore[reportUnusedFunction]
        """Repeat a text."""
        return Repeated(text * times)

    server.run("stdio")


def serve_handrail() -> None:
    """Serve the same tool with Handrail."""
    from handrail import Prompt, tool
    from handrail.mcp import ToolServer

    @tool(effect="read")
    async def repeat(text: str, times: int) -> Repeated:
        """Repeat a text."""
        return Repeated(text * times)

    asyncio.run(ToolServer(Prompt("bench", "Repeat.", tools=[repeat])).serve_stdio())


def cpu_of(process: int) -> float:
    """Return the seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


class Side:
    """One way to make a call, and the CPU time that it costs."""

    def __init__(self, name: str, work: Work, clock: Callable[[], float]) -> None:
        self.name = name
        self._work = work
        self._clock = clock
        self.costs: list[float] = []

    async def measure(self, calls: int) -> None:
        began = self._clock()
        for _ in range(calls):
            await self._work()
        self.costs.append((self._clock() - began) / calls * 1e6)

    @property
    def cost(self) -> float:
        return statistics.median(self.costs)


def children() -> set[int]:
    """Return the ids of this process's child processes."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(each) for each in found.split()}


def command(how: str) -> list[str]:
    return [sys.executable, "-P", __file__, how]


async def open_bare(stack: AsyncExitStack, how: str, mode: Any) -> tuple[Work, int]:
    """Open a server with the SDK's client. Returns a call, and the server's process id."""
    from mcp import Client, StdioServerParameters

    before = children()
    program, *arguments = command(how)
    client = Client(StdioServerParameters(command=program, args=arguments), mode=mode)
    session = (await stack.enter_async_context(client)).session
    await session.list_tools()
    (process,) = children() - before

    async def call() -> None:
        found: Any = await session.call_tool("repeat", GIVEN)
        assert found.structured_content == EXPECTED

    return call, process


async def open_handrail(stack: AsyncExitStack, how: str, mode: Any) -> tuple[Work, int]:
    """Open a server as a section of a prompt, whose tools are called through the gate."""
    from handrail import Prompt, open_gate
    from handrail.mcp import McpTools, StdioServer

    before = children()
    section = McpTools("bench", server=StdioServer(command(how), mode=mode))
    await stack.enter_async_context(section)
    (process,) = children() - before
    gate = open_gate(prompt=Prompt("bench", ["Repeat.", section]))
    stack.push_async_callback(gate.close)

    async def call() -> None:
        found = await gate.invoke("repeat", GIVEN)
        assert found.value == EXPECTED, found

    return call, process


async def main() -> int:
    holds = True
    for mode in ("2026-07-28", "legacy"):
        async with AsyncExitStack() as stack:
            bare, bare_process = await open_bare(stack, "--serve-bare", mode)
            served, served_process = await open_bare(stack, "--serve-handrail", mode)
            ours, _ = await open_handrail(stack, "--serve-bare", mode)
            sides = [
                Side("the SDK's server", bare, lambda process=bare_process: cpu_of(process)),
                Side("server", served, lambda process=served_process: cpu_of(process)),
                Side("the SDK's client", bare, time.process_time),
                Side("client", ours, time.process_time),
            ]
            for number in range(ROUNDS + 1):
                for side in sides:
                    await side.measure(CALLS)
                    if number == 0:
                        side.costs.clear()  # the first round warms up
        for one, other in ((sides[0], sides[1]), (sides[2], sides[3])):
            ratio = other.cost / one.cost
            holds = holds and ratio <= MOST
            what = f"{mode}: {other.name}, {other.cost:.0f} µs a call; the SDK {one.cost:.0f} µs"
            print(f"{what:<72} {ratio:5.2f}× (≤ {MOST}){'' if ratio <= MOST else '  MISSED'}", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve-bare"]:
            serve_bare()
        case ["--serve-handrail"]:
            serve_handrail()
        case _:
            sys.exit(asyncio.run(main()))
