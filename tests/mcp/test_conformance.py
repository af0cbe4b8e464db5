"""MCP's own conformance suite, run against `handrail mcp --http` and against `McpTools`.

The scenarios that do not pass are listed with their reasons. The server does not offer sampling, roots, logging or
subscriptions. Revision 2026-07-28 deprecates these features or leaves them optional, but the suite requires them. The client
does not log in without a person, and does not support DPoP. No revision requires either.
"""

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import shlex
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from handrail.mcp import Login, McpTools, UrlServer
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.run import open_gate
from handrail.schema import to_json
from handrail.tools import RunMode, Tool
from skills.test_skills import skill
from support import PATIENCE, ROOT
from support.parked_runs import answer_to

log = logging.getLogger(__name__)

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
)
SUITE = ROOT / ".components/mcp-conformance"
SAMPLING = "asks the client's model (sampling), which is not offered"
LOGGING = "sends log messages to the client, which is not offered"
SUBSCRIPTIONS = "notifies the client of changes to a resource, which is not offered"

NOT_PASSED = {
    "2026-07-28": {
        "server-stateless": f"one of 25 checks {SAMPLING}: a missing capability is named, but it is elicitation",
        "input-required-result-basic-sampling": SAMPLING,
        "input-required-result-basic-list-roots": "asks for the client's roots, which is not offered",
        "input-required-result-multiple-input-requests": SAMPLING,
        "input-required-result-capability-check": SAMPLING,
    },
    "2025-11-25": {
        "logging-set-level": LOGGING,
        "tools-call-with-logging": LOGGING,
        "tools-call-sampling": SAMPLING,
        "resources-subscribe": SUBSCRIPTIONS,
        "resources-unsubscribe": SUBSCRIPTIONS,
    },
}
WITHOUT_PERSON = "an extension: logs in without a person, which is not offered"
DPOP = "an extension: tokens bound to a key of the client (DPoP), which is not offered"
CLIENT_NOT_PASSED = {
    "auth/client-credentials-basic": WITHOUT_PERSON,
    "auth/client-credentials-jwt": WITHOUT_PERSON,
    "auth/enterprise-managed-authorization": WITHOUT_PERSON,
    "auth/wif-jwt-bearer": WITHOUT_PERSON,
    "auth/dpop": DPOP,
    "auth/dpop-nonce": DPOP,
}
"""The scenarios that the client does not pass. They are the same in both revisions, and neither requires them."""

CLIENT_SCENARIOS = {"2026-07-28": 39}
"""Number of scenarios for clients in each revision. Only the deep tests run those of the older revision."""
if os.environ.get("HANDRAIL_DEEP"):
    CLIENT_SCENARIOS["2025-11-25"] = 25

TASKS = 10
"""The number of scenarios about tasks, all of which pass."""


async def test_the_server(tmp_path: Path) -> None:
    """Every scenario for servers passes in both revisions, except those that are listed."""
    files = tmp_path / "files"
    (files / "template/123").mkdir(parents=True)
    (files / "template/123/data").write_text('{"id": "123"}')
    (files / "static-text").write_text("This is the content of the static text resource.")
    (files / "static-binary").write_bytes(PNG)
    options = ["--files", str(files), "--resources", "test://", "--journal", str(tmp_path / "runs.db")]
    async with serving(Path(__file__).with_name("conformance_app.py"), *options) as url:
        new, old = await asyncio.gather(
            *(run(tmp_path / each, "server", "--url", url, "--requirements", each) for each in NOT_PASSED)
        )
    assert failed(new) == set(NOT_PASSED["2026-07-28"])
    assert failed(old) == set(NOT_PASSED["2025-11-25"])
    assert sum(name.startswith("tasks-") for name in new) == TASKS
    assert (len(new), len(old)) == (50, 33)


@pytest.mark.parametrize(("revision", "count"), CLIENT_SCENARIOS.items())
async def test_the_client(tmp_path: Path, revision: str, count: int) -> None:
    """Every scenario for clients passes, except those that are listed."""
    milliseconds = f"{PATIENCE * 1000:.0f}"
    async with offered_clients() as command:
        arguments = ["--command", command, "--timeout", milliseconds, "--requirements", revision]
        found = await run(tmp_path, "client", *arguments)
    assert failed(found) == set(CLIENT_NOT_PASSED)
    assert len(found) == count


SKILLS = ("sep-2640-skills-directory", "sep-2640-skills-enumeration", "sep-2640-skills-manifest")
SKILLS_APP = """
from pathlib import Path
from handrail import Prompt, Skills

def authenticate(request):
    return "suite"  # which sends no token

prompt = Prompt("guide", [Skills(Path(__file__).with_name("skills"))])
"""


async def test_a_server_with_skills(tmp_path: Path) -> None:
    """Every scenario for servers with skills passes. The requirements of a revision don't include those of extensions."""
    skill(tmp_path / "skills", "refunds", references__a_DOT_md="a")
    (tmp_path / "app.py").write_text(SKILLS_APP)
    async with serving(tmp_path / "app.py", "--journal", str(tmp_path / "runs.db")) as url:
        for name in SKILLS:
            found = await run(tmp_path / "results", "server", "--url", url, "--scenario", name)
            assert found.get(name) == [], found


@contextlib.asynccontextmanager
async def serving(app: Path, *options: str) -> AsyncGenerator[str]:
    """Serve an app with `handrail mcp --http`, and yield its address."""
    command = [sys.executable, "-m", "handrail", "mcp", str(app), "--http", "--port=0"]
    server = await asyncio.create_subprocess_exec(
        *command,
        *options,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    try:
        assert server.stdout is not None
        said = (await server.stdout.readline()).decode()
        url = re.search(r"http://\S+", said)
        assert url is not None, said
        yield url[0]
    finally:
        server.terminate()
        await server.wait()


async def run(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """Run scenarios of the suite. Returns the failed checks of each scenario."""
    if not (SUITE / "node").exists():
        pytest.fail("the conformance suite is not installed. Run: scripts/components")
    program = SUITE / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    suite = await asyncio.create_subprocess_exec(
        str(SUITE / "node"), str(program), *arguments, "-o", str(folder),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    await suite.wait()
    found: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("checks.json")):
        place = str(file.parent.relative_to(folder))
        name = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", place.removeprefix("server-"))
        checks = json.loads(file.read_text())
        found[name] = [each["id"] for each in checks if each["status"] == "FAILURE"]
    return found


def failed(found: dict[str, list[str]]) -> set[str]:
    return {name for name, checks in found.items() if checks}


# The clients. All run in this process: for each scenario the suite starts `launch_client.py`, which asks for one.


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
        return answer_to(question, value)


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
        yield shlex.join(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch_client.py")), str(port)]
        )


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
