"""Measure the CPU time of an MCP call through Handrail's server and client, compared with the bare SDK.

    python bench/mcp_calls.py

The servers are separate processes. They are called over standard input and output, and over HTTP on loopback with a
bearer token. The sides take turns, so a busy machine slows all of them. Each ratio may be at most 1.5.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
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
TOKEN = "a-token-for-this-benchmark-on-loopback-only"
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Repeated:
    """The tool's result: an object, so that both servers send a structured value and both clients check it."""

    text: str


Work = Callable[[], Awaitable[Any]]


def bare_server(**options: Any) -> Any:
    """Return the SDK's server, with one tool."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("bench", log_level="ERROR", **options)

    @server.tool()
    async def repeat(text: str, times: int) -> Repeated:  # pyright: ignore[reportUnusedFunction]
        """Repeat a text."""
        return Repeated(text * times)

    return server


def handrail_server() -> Any:
    """Return Handrail's server, with the same tool."""
    from handrail import Prompt, tool
    from handrail.mcp import ToolServer

    @tool(effect="read")
    async def repeat(text: str, times: int) -> Repeated:
        """Repeat a text."""
        return Repeated(text * times)

    return ToolServer(Prompt("bench", "Repeat.", tools=[repeat]))


def bare_app() -> Any:
    """Return the SDK's server as an ASGI app that checks a bearer token."""
    from mcp.server.auth.provider import AccessToken, TokenVerifier
    from mcp.server.auth.settings import AuthSettings
    from pydantic import AnyHttpUrl

    class OneToken(TokenVerifier):
        async def verify_token(self, token: str) -> AccessToken | None:
            known = hmac.compare_digest(token, TOKEN)
            return AccessToken(token=token, client_id="bench", scopes=[]) if known else None

    auth = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"),
        resource_server_url=AnyHttpUrl("http://127.0.0.1/mcp"),
        validate_token_resource=False,
    )
    return bare_server(token_verifier=OneToken(), auth=auth).streamable_http_app()


def handrail_app() -> Any:
    """Return Handrail's server as an ASGI app that checks a bearer token."""
    from handrail.mcp.http import HttpServer
    from handrail.serve.limits import Limits

    limits = Limits(requests_per_second=1e6, burst=10**6)
    return HttpServer(handrail_server(), token=TOKEN, limits=limits)


def serve_http(app: Any) -> None:
    """Serve an app on a free loopback port, which is printed."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="error", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])


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
        self.rates: list[float] = []

    async def measure(self, calls: int) -> None:
        began, since = self._clock(), time.perf_counter()
        for _ in range(calls):
            await self._work()
        self.rates.append(calls / (time.perf_counter() - since))
        self.costs.append((self._clock() - began) / calls * 1e6)

    @property
    def cost(self) -> float:
        return statistics.median(self.costs)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def children() -> set[int]:
    """Return the ids of this process's child processes."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(each) for each in found.split()}


def command(how: str) -> list[str]:
    return [sys.executable, "-P", __file__, how]


async def open_bare(stack: AsyncExitStack, how: str, mode: Any) -> tuple[Work, int]:
    """Start a server, and connect the SDK's client to it over standard streams.

    Returns a function that makes a call, and the server's process id.
    """
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
    """Start a server as a section of a prompt.

    Returns a function that makes a call through the gate, and the server's process id.
    """
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


async def open_url(stack: AsyncExitStack, how: str, mode: Any) -> tuple[Work, int]:
    """Start a server, and connect the SDK's client to it over HTTP.

    Returns a function that makes a call, and the server's process id.
    """
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    from mcp import Client

    process = await asyncio.create_subprocess_exec(*command(how), stdout=asyncio.subprocess.PIPE)
    stack.callback(process.kill)
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"})
    await stack.enter_async_context(http)
    transport = streamable_http_client(f"http://127.0.0.1:{port}/mcp", http_client=http)
    session = (await stack.enter_async_context(Client(transport, mode=mode))).session
    await session.list_tools()

    async def call() -> None:
        found: Any = await session.call_tool("repeat", GIVEN)
        assert found.structured_content == EXPECTED

    return call, process.pid


async def main() -> int:
    holds = True
    for mode in ("2026-07-28", "legacy"):
        async with AsyncExitStack() as stack:
            bare, bare_process = await open_bare(stack, "--serve-bare", mode)
            served, served_process = await open_bare(stack, "--serve-handrail", mode)
            ours, _ = await open_handrail(stack, "--serve-bare", mode)
            web, web_process = await open_url(stack, "--http-bare", mode)
            served_web, served_web_process = await open_url(stack, "--http-handrail", mode)
            sides = [
                Side("the SDK's server", bare, lambda process=bare_process: cpu_of(process)),
                Side("server", served, lambda process=served_process: cpu_of(process)),
                Side("the SDK's client", bare, time.process_time),
                Side("client", ours, time.process_time),
                Side("the SDK's server over HTTP", web, lambda process=web_process: cpu_of(process)),
                Side("server over HTTP", served_web, lambda process=served_web_process: cpu_of(process)),
            ]
            for number in range(ROUNDS + 1):
                for side in sides:
                    await side.measure(CALLS)
                    if number == 0:
                        side.costs.clear()  # the first round warms up
        for one, other in zip(sides[::2], sides[1::2], strict=True):
            ratio = other.cost / one.cost
            holds = holds and ratio <= MOST
            what = f"{mode}: {other.name}, {other.cost:.0f} µs of CPU and {other.rate:.0f} calls a second"
            bare_cost = f"the SDK {one.cost:.0f} µs and {one.rate:.0f}"
            print(
                f"{what:<72} {bare_cost:<30} {ratio:5.2f}× (≤ {MOST}){'' if ratio <= MOST else '  MISSED'}",
                flush=True,
            )
    return 0 if holds else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve-bare"]:
            bare_server().run("stdio")
        case ["--serve-handrail"]:
            asyncio.run(handrail_server().serve_stdio())
        case ["--http-bare"]:
            serve_http(bare_app())
        case ["--http-handrail"]:
            serve_http(handrail_app())
        case _:
            sys.exit(asyncio.run(main()))
