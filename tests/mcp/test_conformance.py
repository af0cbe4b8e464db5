"""MCP's own conformance suite against `handrail mcp --http`, for 2026-07-28 and 2025-11-25.

Each scenario that does not pass is listed with its reason. Handrail does not offer sampling, roots, logging
and subscriptions, which 2026-07-28 deprecates or leaves optional, nor prompts that ask or that contain more than text.
"""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest

from support import ROOT, SUPPORT
from support.mcp_conformance_app import PNG

SUITE = ROOT / ".components/mcp-conformance"
SAMPLING = "asks the client's model (sampling), which is not offered"
LOGGING = "sends log messages to the client, which is not offered"
SUBSCRIPTIONS = "notifies the client of changes to a resource, which is not offered"
CONTENT = "wants an image or a file in a prompt; prompts are the text of sections"
SCHEMA = "wants keywords in a tool's schema that a Handrail tool does not have"

NOT_PASSED = {
    "2026-07-28": {
        "server-stateless": f"one of 25 checks {SAMPLING}: a missing capability is named, but it is elicitation",
        "prompts-get-embedded-resource": CONTENT,
        "prompts-get-with-image": CONTENT,
        "input-required-result-basic-sampling": SAMPLING,
        "input-required-result-basic-list-roots": "asks for the client's roots, which is not offered",
        "input-required-result-multiple-input-requests": SAMPLING,
        "input-required-result-non-tool-request": "wants a prompt that asks; only tools ask",
        "input-required-result-capability-check": SAMPLING,
        "json-schema-2020-12": SCHEMA,
        "http-custom-header-server-validation": SCHEMA,
    },
    "2025-11-25": {
        "logging-set-level": LOGGING,
        "tools-call-with-logging": LOGGING,
        "tools-call-sampling": SAMPLING,
        "resources-subscribe": SUBSCRIPTIONS,
        "resources-unsubscribe": SUBSCRIPTIONS,
        "prompts-get-embedded-resource": CONTENT,
        "prompts-get-with-image": CONTENT,
        "json-schema-2020-12": SCHEMA,
    },
}
TASKS = 10
"""The number of scenarios about tasks, all of which pass."""


@pytest.mark.timeout(120)
async def test_the_suite(tmp_path: Path) -> None:
    """Every scenario of both revisions passes, except those that are listed."""
    if not (SUITE / "node").exists():
        pytest.fail("the conformance suite is not installed. Run: scripts/components")
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
        new, old = await asyncio.gather(*(run(url[0], each, tmp_path / each) for each in NOT_PASSED))
    finally:
        server.terminate()
        await server.wait()
    assert failed(new) == set(NOT_PASSED["2026-07-28"])
    assert failed(old) == set(NOT_PASSED["2025-11-25"])
    assert sum(name.startswith("tasks-") for name in new) == TASKS
    assert (len(new), len(old)) == (50, 33)


async def run(url: str, revision: str, folder: Path) -> dict[str, list[str]]:
    """Run the scenarios of a revision. Returns the failed checks of each."""
    program = SUITE / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    suite = await asyncio.create_subprocess_exec(
        str(SUITE / "node"), str(program), "server", "--url", url, "--requirements", revision, "-o", str(folder),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    await suite.wait()
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("server-*/checks.json")):
        name = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", file.parent.name.removeprefix("server-"))
        checks = json.loads(file.read_text())
        found[name] = [each["id"] for each in checks if each["status"] == "FAILURE"]
    return found


def failed(found: dict[str, list[str]]) -> set[str]:
    return {name for name, checks in found.items() if checks}
