"""MCP's own conformance suite, run against `handrail mcp --http` and against `McpTools`.

The scenarios that do not pass are listed with their reasons. The server does not offer sampling, roots, logging or
subscriptions. Revision 2026-07-28 deprecates these features or leaves them optional, but the suite requires them. The client
does not log in without a person, and does not support DPoP. No revision requires either.
"""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from support import PATIENCE, ROOT, SUPPORT
from support.mcp_conformance_app import PNG
from support.mcp_conformance_client import offered_clients

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
    command = [
        sys.executable,
        "-m",
        "handrail",
        "mcp",
        str(SUPPORT / "mcp_conformance_app.py"),
        "--http",
        "--port=0",
    ]
    options = ["--files", str(files), "--resources", "test://", "--journal", str(tmp_path / "runs.db")]
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
        new, old = await asyncio.gather(
            *(run(tmp_path / each, each, "server", "--url", url[0]) for each in NOT_PASSED)
        )
    finally:
        server.terminate()
        await server.wait()
    assert failed(new) == set(NOT_PASSED["2026-07-28"])
    assert failed(old) == set(NOT_PASSED["2025-11-25"])
    assert sum(name.startswith("tasks-") for name in new) == TASKS
    assert (len(new), len(old)) == (50, 33)


@pytest.mark.parametrize(("revision", "count"), CLIENT_SCENARIOS.items())
async def test_the_client(tmp_path: Path, revision: str, count: int) -> None:
    """Every scenario for clients passes, except those that are listed."""
    milliseconds = f"{PATIENCE * 1000:.0f}"
    async with offered_clients() as command:
        found = await run(tmp_path, revision, "client", "--command", command, "--timeout", milliseconds)
    assert failed(found) == set(CLIENT_NOT_PASSED)
    assert len(found) == count


async def run(folder: Path, revision: str, *arguments: str) -> dict[str, list[str]]:
    """Run the scenarios of a revision. Returns the failed checks of each scenario."""
    if not (SUITE / "node").exists():
        pytest.fail("the conformance suite is not installed. Run: scripts/components")
    program = SUITE / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    suite = await asyncio.create_subprocess_exec(
        str(SUITE / "node"), str(program), *arguments, "--requirements", revision, "-o", str(folder),
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
