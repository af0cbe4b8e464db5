"""Clients for MCP's conformance suite. Each calls the tools of a server through a gate, as a run does.

All clients run in this process: for each scenario the suite starts `launch_mcp_client.py`, which asks for one.
"""

import asyncio
import contextlib
import json
import logging
import shlex
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from handrail.mcp import Login, McpTools, UrlServer
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.run import open_gate
from handrail.schema import to_json
from handrail.tools import RunMode, Tool
from support import PATIENCE, SUPPORT

log = logging.getLogger("support.mcp_conformance_client")


class Browser(Environment):
    """A person who logs in at once, wherever that leads, and fills in every form with its defaults and with made-up values for other required fields."""

    run_mode: RunMode = "user"

    async def ask(self, question: Question, /) -> Answer:
        value: Any = None
        if question.name == "mcp.login":
            async with httpx2.AsyncClient(timeout=PATIENCE) as client:
                response = await client.get(question.payload["url"])
                value = response.headers.get("Location", "")
        elif question.name == "mcp.login.endpoints":
            value = True
        elif question.name == "mcp.form":
            fields = question.schema.get("properties", {})
            value = {name: field["default"] for name, field in fields.items() if "default" in field}
            if question.schema.get("type") == "boolean":
                value = True
            for name in question.schema.get("required", ()):
                value.setdefault(name, {"string": "a", "boolean": True}.get(fields[name].get("type"), 1))
        return Answer(question_id=question.id, digest=question.digest, by=question.principal, value=value)


def argument(schema: Any) -> Any:
    """Return a value that matches a simple schema."""
    if "default" in schema:
        return schema["default"]
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "integer" | "number":
            return 1
        case "boolean":
            return True
        case "array":
            return []
        case "object":
            return {}
        case _:
            return "a"


def plain(value: Any) -> Any:
    """Return a read-only schema as plain JSON."""
    return json.loads(to_json(value))


@contextlib.asynccontextmanager
async def offered_clients() -> AsyncGenerator[str]:
    """Listen for the suite. Yields the command that the suite must start for each scenario.

    The suite starts all scenarios at once. Only a few run at a time, because they share this process and slow each other down.
    """
    free = asyncio.Semaphore(4)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with free:
                await use_server(json.loads(await reader.readline()))
            writer.write(b"0")
        except Exception as error:  # some scenarios require that the client refuses the server
            log.warning("%s", error)
            writer.write(b"1")
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield shlex.join([sys.executable, "-I", "-S", str(SUPPORT / "launch_mcp_client.py"), str(port)])


async def use_server(request: Mapping[str, str]) -> None:
    """Call the tools of one scenario's server: those the suite names, or all of them."""
    context = json.loads(request.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    version = request.get("MCP_CONFORMANCE_PROTOCOL_VERSION", "")
    with tempfile.TemporaryDirectory() as folder:
        login = Login(
            Path(folder),
            "http://localhost:3000/callback",
            client_id=context.get("client_id", ""),
            client_secret=context.get("client_secret", ""),
            metadata_url="https://conformance-test.local/client-metadata.json",
        )
        mode: Any = "legacy" if version.startswith("2025") else "auto"
        async with McpTools("suite", server=UrlServer(request["url"], login=login, mode=mode)) as section:
            for _ in range(2):  # the second time, the login is over
                tools = section.current_tools()
                needs_login = any(tool.name.endswith("login") for tool in tools)
                gate = open_gate(tools, environment=Browser())
                for name, arguments in planned_calls(context, tools, needs_login):
                    result = await gate.invoke(name, arguments)
                    if not result.success:
                        log.warning("%s: %s", name, result.message)
                await gate.close()
                if not needs_login:
                    break


def planned_calls(
    context: Mapping[str, Any], tools: Sequence[Tool[Any, Any]], needs_login: bool
) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls the suite names, or one call of each tool if it names none or a login is needed first."""
    if context.get("toolCalls") and not needs_login:
        # The suite writes null for an argument that is not provided. The tools' schemas do not allow null.
        return [
            (
                each["name"],
                {name: value for name, value in each.get("arguments", {}).items() if value is not None},
            )
            for each in context["toolCalls"]
        ]
    calls: list[tuple[str, dict[str, Any]]] = []
    for tool in tools:
        properties = tool.json_schema.get("properties", {})
        arguments = {name: argument(properties[name]) for name in tool.json_schema.get("required", ())}
        if tool.name == "json_schema_echo":  # it expects the first tool's schema as the client received it
            arguments = {"schema": plain(tools[0].json_schema)}
        calls.append((tool.name, arguments))
    return calls
