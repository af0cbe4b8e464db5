"""`handrail mcp --proxy` as a process, in front of the filesystem server from npm."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult
from typer.testing import CliRunner

from handrail import Adapter, Prompt, ScriptedModel
from handrail.cli.commands import app
from handrail.journal.records import OVER
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


SHOP = '''"""A shop in which a purchase leaves a file."""
from pathlib import Path
from handrail import Prompt, tool

@tool
async def buy() -> str:
    """Buy something."""
    Path("bought").touch()
    return "bought"

prompt = Prompt("shop", "Sell.", tools=[buy])
'''


@pytest.mark.parametrize("is_removed", [False, True])
async def test_an_approval_does_not_continue_the_call_of_a_user_who_was_removed(
    tmp_path: Path, is_removed: bool
) -> None:
    """Uma's call waits for an approval. Before Ann approves it, Uma is removed."""
    path = tmp_path / "runs.db"
    (tmp_path / "shop.py").write_text(SHOP)
    shop = ["-m", "handrail", "mcp", "shop.py", "--no-journal", "--approve", "all"]
    servers = {"shop": {"command": sys.executable, "args": shop}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (tmp_path / "policies.yaml").write_text("policies:\n  - capability: {ask: [mcp.shop.buy]}\n")
    words = ["mcp", "--proxy", "mcp.json", "--policies", "policies.yaml", "--http", "--port", "0"]
    with closing(People(people_path(path))) as people:
        people.add("ann", ["approver"], SECRET)
        people.add("uma", ["user"], SECRET)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "handrail",
            *words,
            "--journal",
            "runs.db",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            words = (await process.stdout.readline()).decode().split()
            [url] = [word for word in words if word.startswith("http://")]
            headers = {"Authorization": f"Bearer uma:{SECRET}"}
            source = PromptSource(Prompt("desk", "Help."), Adapter(ScriptedModel([])))
            async with (
                httpx2.AsyncClient(headers=headers, timeout=None) as http,
                Client(streamable_http_client(url, http_client=http), mode="legacy") as client,
                serving(tmp_path, source, people_file=people_path(path).name) as page,
            ):
                [tool] = (await client.list_tools()).tools
                calling = asyncio.ensure_future(client.call_tool(tool.name, {}))
                while not (found := (await page.ask("GET", "/inbox", headers=ANN)).json["questions"]):
                    await asyncio.sleep(0.01)
                [question] = found
                if is_removed:
                    people.remove("uma")
                given = {"question_id": question["id"], "digest": question["digest"], "approved": True}
                await page.ask("POST", "/inbox/answers", given, ANN)
                journal = page.app.threads.journal
                while (await journal.runs.get(question["run_id"])).status not in OVER:
                    await asyncio.sleep(0.01)
                calling.cancel()
        finally:
            process.terminate()
            await process.wait()
    assert (tmp_path / "bought").exists() != is_removed
