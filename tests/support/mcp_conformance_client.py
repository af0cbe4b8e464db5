"""The client of the MCP conformance suite: uses the tools of a server through the gate, as a run does.

The suite starts it with the server's address as the last argument, and the scenario in the environment.
"""

import asyncio
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx2

from handrail.dispatch import open_gate
from handrail.mcp import Login, McpTools, UrlServer
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.schema import to_json
from handrail.tools import RunMode


class Browser(Environment):
    """A person who logs in at once, and accepts every form with its defaults."""

    run_mode: RunMode = "user"

    async def ask(self, question: Question, /) -> Answer:
        value: Any = None
        if question.name == "mcp.login":
            async with httpx2.AsyncClient() as client:
                response = await client.get(question.payload["url"])
                value = response.headers.get("Location", "")
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


async def main(url: str) -> None:
    scenario = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    version = os.environ.get("MCP_CONFORMANCE_PROTOCOL_VERSION", "")
    with tempfile.TemporaryDirectory() as folder:
        login = Login(
            Path(folder),
            "http://localhost:3000/callback",
            client_id=context.get("client_id", ""),
            client_secret=context.get("client_secret", ""),
            metadata_url="https://conformance-test.local/client-metadata.json",
        )
        mode: Any = "legacy" if version.startswith("2025") else "auto"
        async with McpTools("suite", server=UrlServer(url, login=login, mode=mode)) as section:
            for _ in range(2):  # the second time, the login is over
                tools = section.current_tools()
                gate = open_gate(tools, environment=Browser())
                # The suite writes null for an argument that is not provided. The tools' schemas do not allow null.
                planned = [
                    (
                        each["name"],
                        {
                            name: value
                            for name, value in each.get("arguments", {}).items()
                            if value is not None
                        },
                    )
                    for each in context.get("toolCalls", [])
                ]
                calls = planned if planned and not any("login" in tool.name for tool in tools) else None
                for tool in tools:
                    if calls is None:
                        given = tool.json_schema.get("properties", {})
                        needed = tool.json_schema.get("required", ())
                        arguments = {name: argument(given[name]) for name in given if name in needed}
                        if tool.name == "json_schema_echo":  # it compares a schema as this client received it
                            arguments = {"schema": plain(tools[0].json_schema)}
                        print(tool.name, await gate.invoke(tool.name, arguments), file=sys.stderr)
                for name, arguments in calls or ():
                    print(name, await gate.invoke(name, arguments), file=sys.stderr)
                await gate.close()
                if not any(tool.name.endswith("login") for tool in tools):
                    break
    print("done", scenario, file=sys.stderr)


logging.getLogger("mcp").addHandler(logging.NullHandler())
asyncio.run(main(sys.argv[-1]))
