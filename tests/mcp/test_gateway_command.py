"""`handrail mcp --proxy` as a process, in front of the filesystem server from npm."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from mcp_types import ElicitResult
from typer.testing import CliRunner

from handrail import Adapter, Prompt, ScriptedModel
from handrail.cli.commands import app
from handrail.serve.people import People, people_path
from handrail.serve.sources import PromptSource
from mcp import Client, StdioServerParameters
from support.npm_servers import command
from support.serving import Client as Page
from support.serving import serving

SECRET = "correct horse battery"
ANN = {"Authorization": f"Bearer ann:{SECRET}"}
POLICIES = """\
policies:
  - capability:
      allow: [mcp.files.read_text_file]
      ask: [mcp.files.write_file]
      deny: [mcp.files.move_file]
  - rate_limit: {most: 2, per_seconds: 3600, tools: [read_text_file]}
"""


async def never(context: Any, params: Any) -> ElicitResult:
    raise AssertionError("the client was asked")


@asynccontextmanager
async def gateway(folder: Path, work: Path) -> AsyncGenerator[Client]:
    """Start the command as an MCP client does, and connect to it."""
    program, *arguments = command("filesystem", work)
    servers = {"files": {"command": program, "args": arguments}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (folder / "policies.yaml").write_text(POLICIES)
    words = ["-m", "handrail", "mcp", "--proxy", "mcp.json", "--policies", "policies.yaml"]
    server = StdioServerParameters(
        command=sys.executable, args=[*words, "--journal", "runs.db"], cwd=str(folder)
    )
    async with Client(server, elicitation_callback=never) as client:
        yield client


async def decide(page: Page, approved: bool) -> Any:
    """Wait for a question in the approver's inbox, decide on it, and return it."""
    while not (found := (await page.ask("GET", "/inbox", headers=ANN)).json["questions"]):
        await asyncio.sleep(0.01)
    [question] = found
    given = {"question_id": question["id"], "digest": question["digest"], "approved": approved}
    answer = await page.ask("POST", "/inbox/answers", {**given, "reason": "" if approved else "no"}, ANN)
    assert answer.json == {"decided": approved}
    return question


def text_of(result: Any) -> str:
    return result.content[0].text


async def output_of(*words: str, journal: Path) -> str:
    """Return the output of a `handrail` command that uses this journal."""
    done = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--journal", str(journal)])
    assert done.exit_code == 0, done.output
    return done.output


async def test_writes_are_approved_denied_audited_and_limited(tmp_path: Path) -> None:
    """An approver sees the path and the content of a write and decides on it. The policies deny a move and a third read.

    Each vote is in the audit log, and each call in the journal.
    """
    work, journal = tmp_path / "work", tmp_path / "runs.db"
    work.mkdir()
    with closing(People(people_path(journal))) as people:
        people.add("ann", ["approver"], SECRET)
    desk = PromptSource(Prompt("desk", "Help."), Adapter(ScriptedModel([])))
    async with (
        serving(tmp_path, desk, people_file=people_path(journal).name) as page,
        gateway(tmp_path, work) as client,
    ):
        files = {name: {"path": str(work / name), "content": f"content of {name}"} for name in ("a", "b")}
        approved = asyncio.ensure_future(client.call_tool("write_file", files["a"]))
        shown = await decide(page, approved=True)
        assert shown["payload"]["arguments"] == files["a"]
        assert not (await approved).is_error
        denied = asyncio.ensure_future(client.call_tool("write_file", files["b"]))
        await decide(page, approved=False)
        assert (await denied).is_error
        refused = await client.call_tool(
            "move_file", {"source": str(work / "a"), "destination": str(work / "c")}
        )
        reads = [await client.call_tool("read_text_file", {"path": str(work / "a")}) for _ in range(3)]
    assert [each.name for each in work.iterdir()] == ["a"]
    assert (work / "a").read_text() == "content of a"
    assert refused.is_error
    assert "mcp.files.move_file" in text_of(refused)
    assert [each.is_error for each in reads] == [False, False, True]
    assert text_of(reads[0]) == "content of a"
    assert "2 calls in 3600 seconds is the limit" in text_of(reads[2])
    voted = [json.loads(line) for line in (await output_of("audit", journal=journal)).splitlines()]
    votes = [(each["who"], each["approved"]) for each in voted if each["action"] == "voted"]
    assert votes == [("ann", True), ("ann", False)]
    runs = json.loads(await output_of("runs", "list", "--json", journal=journal))["runs"]
    assert len(runs) == 6
    record = await output_of("runs", "show", "--full", shown["run_id"], journal=journal)
    assert "content of a" in record
    assert "write_file" in record
