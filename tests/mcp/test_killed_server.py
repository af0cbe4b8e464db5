"""`handrail mcp` is killed with SIGKILL while a question to a client is open. It starts again with a clock three days ahead."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp_types import ElicitResult

from handrail.journal.sqlite import SqliteJournal
from mcp import Client, MCPError, StdioServerParameters
from support.mcp_tasks import TasksClient, TaskSession

DAYS = 3
APP = str(Path(__file__).with_name("killed_app.py"))


class Server:
    """The server's command, its journal, and the notes that its processes leave."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notes = folder / "notes"
        self.journal = folder / "runs.db"
        self.answers: list[ElicitResult] = []
        self.asked = asyncio.Event()

    @asynccontextmanager
    async def process(self, mode: Any, days: int = 0) -> AsyncGenerator[Any]:
        """Start a process, and connect to it with the SDK's client."""
        words = ["-m", "handrail", "mcp", APP, "--journal", str(self.journal)]
        env = {**os.environ, "HANDRAIL_NOTES": str(self._notes), "HANDRAIL_DAYS": str(days)}
        started = StdioServerParameters(command=sys.executable, args=words, env=env, cwd=str(self._folder))
        declared = [TasksClient()] if mode == "2026-07-28" else None
        async with Client(
            started, mode=mode, elicitation_callback=self._answer, extensions=declared
        ) as client:
            yield client.session

    async def _answer(self, context: Any, params: Any) -> ElicitResult:
        self.asked.set()
        if not self.answers:
            await asyncio.Event().wait()  # the person thinks about it
        return self.answers.pop()

    def kill(self) -> None:
        os.kill(int(self._lines("process")[-1]), signal.SIGKILL)

    def _lines(self, word: str) -> list[str]:
        lines = [line.partition(" ") for line in self._notes.read_text().splitlines()]
        return [rest for first, _, rest in lines if first == word]

    def count(self, word: str) -> int:
        """Return how many times the processes noted this word."""
        return len(self._lines(word))


def accept(asked: Any, value: int) -> dict[str, Any]:
    """Return the arguments of a call that answers the one question that was asked."""
    [id] = asked.input_requests
    return {
        "input_responses": {id: ElicitResult(action="accept", content={"value": value})},
        "request_state": asked.request_state,
        "allow_input_required": True,
    }


CALLS: Mapping[str, tuple[dict[str, Any], str]] = {
    "order": ({"product": "shirt"}, "shirt 4"),
    "pick": ({}, "4 of 3"),
}


async def test_question_of_a_2026_client_survives_a_kill(tmp_path: Path) -> None:
    """The client answers three days later, to a new process, and gets the results of the calls that it made.

    Each act of the handoff `pick` ran once. The handler of `order`, which may run again, was entered twice.
    """
    server = Server(tmp_path)
    async with server.process("2026-07-28") as session:
        asked = {
            name: await session.call_tool(name, given, allow_input_required=True)
            for name, (given, _) in CALLS.items()
        }
        server.kill()
    async with server.process("2026-07-28", days=DAYS) as session:
        for name, (given, expected) in CALLS.items():
            found = await session.call_tool(name, given, **accept(asked[name], 4))
            assert found.content[0].text == expected
    assert (server.count("process"), server.count("deal"), server.count("settle")) == (2, 1, 1)
    assert (server.count("order"), server.count("size")) == (2, 1)
    journal = SqliteJournal(server.journal)
    assert [row.status for row in await journal.runs.list()] == ["done", "done"]
    journal.close()


async def test_question_of_a_task_survives_a_kill(tmp_path: Path) -> None:
    """If a process is killed while a task waits for an answer, a new process asks the question again and takes the answer."""
    server = Server(tmp_path)
    async with server.process("2026-07-28") as session:
        made = TaskSession(session)
        task = (await made.call("job"))["taskId"]
        await made.get(task, "input_required")
        server.kill()
    async with server.process("2026-07-28", days=DAYS) as session:
        again = TaskSession(session)
        [id] = (await again.get(task, "input_required"))["inputRequests"]
        given = {"action": "accept", "content": {"value": 4}}
        await again.send("tasks/update", taskId=task, inputResponses={id: given})
        found = await again.get(task, "completed")
    assert found["result"]["content"][0]["text"] == "4 done"


async def test_question_of_an_older_client_survives_a_kill(tmp_path: Path) -> None:
    """An older client can't refer to a call that it made before, so it makes a new one. The old one still waits in the journal."""
    server = Server(tmp_path)
    async with server.process("legacy") as session:
        call = asyncio.ensure_future(session.call_tool("pick", {}))
        await server.asked.wait()
        server.kill()
        with pytest.raises(MCPError, match="Connection closed"):
            await call
    server.answers.append(ElicitResult(action="accept", content={"value": 4}))
    async with server.process("legacy", days=DAYS) as session:
        found = await session.call_tool("pick", {})
    assert found.content[0].text == "4 of 3"
    assert (server.count("process"), server.count("deal"), server.count("settle")) == (2, 2, 1)
    journal = SqliteJournal(server.journal)
    waiting = [row for row in await journal.runs.list() if row.status != "done"]
    assert [len(await journal.questions.open(row.record.id)) for row in waiting] == [1]
    journal.close()
