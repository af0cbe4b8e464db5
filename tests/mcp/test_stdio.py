"""Tests for how an MCP server on standard input and output ends: quietly, whoever or whatever ends it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from handrail import SqliteJournal
from handrail.runs import list_runs
from support import PATIENCE
from support.programs import environment

pytestmark = pytest.mark.once  # starting processes is slow, and the Python version makes no difference

APP = '''
import asyncio

from handrail import Prompt, ToolContext, tool
from handrail.mcp import server as stdio

stdio.DRAIN_SECONDS = 0.2


@tool(effect="read")
async def echo(text: str) -> str:
    """Say it again."""
    print("stray words")
    return text


@tool(effect="read")
async def slow(context: ToolContext) -> str:
    """Never end."""
    context.report_progress("at it", done=1, total=2)
    return await asyncio.get_running_loop().create_future()


@tool(effect="read")
async def ask(context: ToolContext) -> str:
    """Ask for a colour."""
    return await context.wait_for("colour", {}, str)


prompt = Prompt("app", "Help.", tools=[echo, slow, ask])
'''


class Process:
    """A server in its own process, and a client that writes and reads its lines."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "app.py").write_text(APP)
        self._folder = folder
        command = [sys.executable, "-m", "handrail", "mcp", "app.py", *options]
        pipe: Any = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe
        )
        capabilities = {"elicitation": {}}
        client = {"name": "test", "version": "1"}
        self.request("initialize", protocolVersion="2025-06-18", capabilities=capabilities, clientInfo=client)
        self.read()
        self.send({"method": "notifications/initialized"})

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def request(self, method: str, **params: Any) -> None:
        self.send({"id": 1, "method": method, "params": params})

    def call(self, name: str, **arguments: Any) -> None:
        self.request("tools/call", name=name, arguments=arguments, _meta={"progressToken": "t"})

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ended(self) -> tuple[int, str]:
        """Wait for the end of the process, and return its exit code and what it wrote to standard error."""
        assert self.process.stderr is not None
        code = self.process.wait(PATIENCE)
        return code, self.process.stderr.read().decode()

    async def standings(self) -> list[str]:
        journal = SqliteJournal(self._folder / "runs.db")
        found = [line.standing for line in await list_runs(journal)]
        journal.close()
        return found


@contextmanager
def process(folder: Path, *options: str) -> Generator[Process]:
    server = Process(folder, *(options or ("--journal", "runs.db")))
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        for stream in (server.process.stdin, server.process.stdout, server.process.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


def close_input(server: Process) -> None:
    assert server.process.stdin is not None
    server.process.stdin.close()


def close_output(server: Process) -> None:
    """Close the output only, which the server notices when it writes."""
    assert server.process.stdout is not None
    server.process.stdout.close()
    server.send({"id": 2, "method": "ping"})


def close_both(server: Process) -> None:
    close_output(server)
    close_input(server)


ENDS: dict[str, Callable[[Process], None]] = {
    "input": close_input,
    "output": close_output,
    "both": close_both,
    "SIGTERM": lambda server: server.process.send_signal(signal.SIGTERM),
    "SIGINT": lambda server: server.process.send_signal(signal.SIGINT),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("during", ["nothing", "slow", "ask"])
async def test_a_server_ends_quietly(tmp_path: Path, end: str, during: str) -> None:
    """The exit code is 0 and nothing is printed, whether or not a call is in progress.

    If the client goes away, a call whose request is in progress is cancelled. On a signal it is parked.
    """
    with process(tmp_path) as server:
        if during != "nothing":
            server.call(during)
            assert (
                server.read()["method"]
                == {
                    "slow": "notifications/progress",
                    "ask": "elicitation/create",
                }[during]
            )
        ENDS[end](server)
        assert server.ended() == (0, "")
        standing = "parked" if end.startswith("SIG") else "cancelled"
        assert await server.standings() == ([] if during == "nothing" else [standing])


@pytest.mark.parametrize("end", ["input", "SIGTERM"])
def test_a_server_without_a_journal_ends_quietly(tmp_path: Path, end: str) -> None:
    with process(tmp_path, "--no-journal") as server:
        server.call("slow")
        server.read()
        ENDS[end](server)
        assert server.ended() == (0, "")


def test_a_client_that_reads_nothing_does_not_keep_the_server(tmp_path: Path) -> None:
    """Its input has ended, and its output is full. The server waits a while, and then leaves the rest unwritten."""
    with process(tmp_path) as server:
        server.call("echo", text="x" * 500_000)
        assert server.process.stdout is not None
        server.process.stdout.read(1)
        close_input(server)
        code, printed = server.ended()
        assert (code, printed.replace("stray words\n", "")) == (0, "")


def test_what_handlers_print_is_not_sent_to_the_client(tmp_path: Path) -> None:
    with process(tmp_path) as server:
        server.call("echo", text="hello")
        assert server.read()["result"]["content"][0]["text"] == "hello"
        close_input(server)
        assert server.ended() == (0, "stray words\n")
