"""MCP servers from npm in one run, beside Handrail's own tools."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Thread

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolCall, tool
from handrail.events import Progress
from handrail.mcp import transport
from handrail.messages import ToolMessage
from handrail.session import Session
from handrail.testing import Person
from support import PATIENCE
from support.npm_servers import Program, command, event_of_listing
from support.texts import MCP_OUTCOME_UNKNOWN


async def test_servers_with_different_fates_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server is killed during a call, one is replaced by a version with other tools, one sends too much, and one asks a question.

    The model is told about the first three, which can be used afterwards. The person answers the fourth.
    A fifth server and the prompt's own tools are not affected.
    """
    monkeypatch.setattr(transport, "MAX_UNASKED", 300)
    (tmp_path / "a.txt").write_text("the file")
    graph = tmp_path / "graph.jsonl"
    os.mkfifo(graph)
    memory = Program(tmp_path / "memory", *command("memory"), MEMORY_FILE_PATH=str(graph))
    files = Program(tmp_path / "files", *command("old-filesystem", tmp_path))
    everything = Program(tmp_path / "everything", *command("everything"))
    thinking = Program(tmp_path / "thinking", *command("sequential-thinking"))
    names = ("memory", "files", "floods", "asks", "thinking")
    programs = (memory, files, everything, everything, thinking)
    sections = {name: each.section(name) for name, each in zip(names, programs, strict=True)}

    @tool(effect="read")
    def note(text: str) -> str:
        """Note a text."""
        return f"noted: {text}"

    @tool(effect="idempotent")
    async def upgrade() -> str:
        """Replace the program of the file server, and wait for its new list."""
        listed = event_of_listing(sections["files"], "read_text_file", monkeypatch)
        files.install(*command("filesystem", tmp_path))
        files.kill()
        await asyncio.wait_for(listed.wait(), PATIENCE)
        return "upgraded"

    def kill_while_it_reads() -> None:
        writer = os.open(graph, os.O_WRONLY)  # waits for the server to read the named pipe
        graph.unlink()
        memory.kill()
        os.close(writer)

    calls = [
        ToolCall("note", {"text": "a"}),
        ToolCall("files_read_file", {"path": str(tmp_path / "a.txt")}),
        ToolCall("memory_read_graph", {}),
        ToolCall(
            "memory_create_entities",
            {"entities": [{"name": "Ann", "entityType": "person", "observations": []}]},
        ),
        ToolCall("upgrade", {}),
        ToolCall("files_read_text_file", {"path": str(tmp_path / "a.txt")}),
        ToolCall("asks_trigger-elicitation-request", {}),
        ToolCall("floods_trigger-long-running-operation", {"duration": 0, "steps": 1_000_000}),
        ToolCall("floods_echo", {"message": "still here"}),
        ToolCall(
            "thinking_sequentialthinking",
            {"thought": "b", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
        ),
        ToolCall("note", {"text": "c"}),
    ]
    model = ScriptedModel([*calls, "Done."])
    person = Person(answers={"mcp.form": lambda form: {**form["suggested"], "name": "Ann"}})
    session = Session()
    session.dispatcher.subscribe(Progress, lambda event: None)  # otherwise the server would send no progress
    async with AsyncExitStack() as stack:
        await asyncio.gather(*map(stack.enter_async_context, sections.values()))
        Thread(target=kill_while_it_reads, daemon=True).start()
        prompt = Prompt("guide", ["Go.", *sections.values()], tools=[note, upgrade])
        await Adapter(model).evaluate(prompt, "hi", environment=person, session=session)
        opened = {name: each.server.account("local").connection.opened for name, each in sections.items()}
    messages = model.requests[-1].messages
    told = [one.text for each in messages if isinstance(each, ToolMessage) for one in each.results]
    assert told[:2] == ["noted: a", "the file"]
    assert "it was killed by signal 9" in told[2]
    assert MCP_OUTCOME_UNKNOWN in told[2]
    assert '"name": "Ann"' in told[3]
    assert told[4] == "upgraded"
    assert told[5].startswith("the file")
    assert "The tools of the server files have changed." in told[5]
    offered = [{each.tool.name for each in request.tools} for request in model.requests]
    assert [("files_read_text_file" in each) for each in (offered[4], offered[5])] == [False, True]
    assert [question.payload["server"] for question in person.questions] == ["asks"]
    assert "- Name: Ann" in told[6]
    assert "- Favorite Integer: 42" in told[6]
    assert "it sent 301 messages without an answer" in told[7]
    assert told[8] == "Echo: still here"
    assert '"thoughtHistoryLength": 1' in told[9]
    assert told[10] == "noted: c"
    assert opened == {"memory": 2, "files": 2, "floods": 2, "asks": 1, "thinking": 1}
