"""Attachments of recorded runs: a resumed worker has those that its run began with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, MemoryFilesystem, ScriptedModel, ToolCall, WorkerRegistry
from handrail.content import Attachment
from handrail.environment import LaterEnvironment
from handrail.errors import BlobNotFoundError, RunError, RunParked
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import Traits, UserMessage
from handrail.replay.attachments import load
from support.parked_runs import answer_to
from support.worker_folders import sound

TOOLS = '''
from handrail import WorkerContext, tool

@tool
def send(context: WorkerContext) -> str:
    """Send the attachments."""
    return " ".join(f"{each.name}={each.content!r}" for each in context.attachments) or "nothing"
'''
MAIN = "---\ntools: [send]\nattachments: {count: 3}\n---\nSend {{ attachments }}."
GIVEN = [Attachment(b"one", "a.txt"), Attachment(b"\xff\x00", "b.bin")]
SENT = "a.txt=b'one' b.bin=b'\\xff\\x00'"


async def park(registry: WorkerRegistry, journal: MemoryJournal, name: str, **arguments: Any) -> None:
    """Run a worker until it waits for an approval, and record the approval."""
    with pytest.raises(RunParked) as parked:
        await registry.run(
            name, "go", run_id="run", journal=journal, environment=LaterEnvironment(), **arguments
        )
    (question,) = parked.value.questions
    journal.questions.answer(answer_to(question, {"approved": True}))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_resumed_worker_has_its_attachments(tmp_path: Path, streamed: bool) -> None:
    """A call that was approved after the run was parked runs with the attachments that the run began with."""
    registry, journal = sound(tmp_path, TOOLS, main=MAIN), MemoryJournal()
    await park(registry, journal, "main", model=ScriptedModel([ToolCall("send", {})]), attachments=GIVEN)
    assert sorted(await journal.blobs.list("run")) == sorted(each.digest for each in GIVEN)
    script = ScriptedModel(["end"])
    again: Any = {"journal": journal, "model": script, "environment": LaterEnvironment()}
    if streamed:
        stream = WorkerRegistry(tmp_path).resume_stream("main", "run", **again)
        assert [event async for event in stream]
    else:
        await WorkerRegistry(tmp_path).resume("main", "run", **again)
    assert script.requests[0].messages[-1].text == SENT


async def test_attachments_are_not_passed_again(tmp_path: Path) -> None:
    """`resume` takes no attachments, and a worker's run with attachments is not resumed without its worker."""
    registry, journal = sound(tmp_path, TOOLS, main=MAIN), MemoryJournal()
    await park(registry, journal, "main", model=ScriptedModel([ToolCall("send", {})]), attachments=GIVEN)
    given: Any = {"attachments": GIVEN}
    for verb in (registry.resume, registry.resume_stream):
        with pytest.raises(TypeError, match="takes no argument 'attachments'"):
            verb("main", "run", journal=journal, **given)
    adapter = Adapter(ScriptedModel(["end"]), journal=journal, environment=LaterEnvironment())
    with pytest.raises(RunError, match="resumed without its worker"):
        await adapter.resume("run", registry["main"].prompt)


async def test_a_nested_worker_has_the_bytes_that_it_was_given(tmp_path: Path) -> None:
    """A file that was handed over by path and changed while the run was parked reaches the worker as it was."""
    registry = sound(tmp_path, TOOLS, sender=MAIN, main="---\nworkers: [sender]\n---\nGo.")
    files, journal = MemoryFilesystem({"a.txt": "one"}), MemoryJournal()
    call = ToolCall("sender", {"input": "go", "attachments": ["a.txt"]})
    models = {"main": ScriptedModel([call]), "sender": ScriptedModel([ToolCall("send", {})])}
    await park(registry, journal, "main", models=models, filesystem=files)
    later = MemoryFilesystem({"a.txt": "two"})
    sender = ScriptedModel(["sent"])
    again: Any = {"main": ScriptedModel(["end"]), "sender": sender}
    await registry.resume(
        "main", "run", journal=journal, models=again, filesystem=later, environment=LaterEnvironment()
    )
    assert sender.requests[0].messages[-1].text == "a.txt=b'one'"


async def test_a_nested_worker_gets_its_attachments_without_a_journal(tmp_path: Path) -> None:
    """A worker that is called with the path of a file gets the file as an attachment, even if nothing is recorded."""
    registry = sound(tmp_path, TOOLS, sender=MAIN, main="---\nworkers: [sender]\n---\nGo.")
    call = ToolCall("sender", {"input": "go", "attachments": ["a.txt"]})
    sender = ScriptedModel([ToolCall("send", {}), "sent"])
    models: Any = {"main": ScriptedModel([call, "end"]), "sender": sender}
    files = MemoryFilesystem({"a.txt": "one"})
    await registry.run("main", "go", models=models, filesystem=files, approvals="approve_all")
    assert sender.requests[1].messages[-1].text == "a.txt=b'one'"


class Blobs:
    """A stand-in for a journal. It keeps only blobs, in memory."""

    def __init__(self) -> None:
        self.blobs = self
        self.kept: dict[str, bytes] = {}

    async def get(self, digest: str) -> bytes:
        if digest not in self.kept:
            raise BlobNotFoundError(digest)
        return self.kept[digest]


@given(st.lists(st.tuples(st.text(min_size=1), st.binary(max_size=50)), max_size=4), st.data())
def test_attachments_are_restored_whole_or_not_at_all(
    files: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    """Any attachments are restored as they were. If the bytes of one are not stored, the error names it."""
    attachments = [Attachment(content, name) for name, content in files]
    journal: Any = Blobs()

    def references() -> list[Attachment]:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(attachments), type=list[Attachment])

    recorded = references()
    journal.kept = {each.digest: each.content for each in attachments}
    asyncio.run(load(journal, "run", recorded))
    assert [(each, each.content) for each in recorded] == [(each, each.content) for each in attachments]
    if recorded:
        lost = data.draw(st.sampled_from(recorded))
        del journal.kept[lost.digest]
        first = next(each for each in recorded if each.digest == lost.digest)
        with pytest.raises(RunError) as refused:
            asyncio.run(load(journal, "run", references()))
        assert repr(first.name) in str(refused.value)


async def test_a_picture_is_passed_on_to_the_workers_model(tmp_path: Path) -> None:
    """A picture reaches the model of a worker that is run with it, and of a worker that is called with it, if that model takes pictures."""
    picture = Attachment(b"\x89PNG\r\n\x1a\n" + b"\0" * 20, "plot.png")
    files = MemoryFilesystem({"plot.png": picture.content})
    main = "---\nworkers: [reader]\nattachments: {count: 1}\n---\nGo."
    registry = sound(tmp_path, main=main, reader="---\nattachments: {count: 1}\n---\nRead.")
    outer = ScriptedModel([ToolCall("reader", {"input": "x", "attachments": ["plot.png"]}), "end"])
    inner, blind = ScriptedModel(["read"]), ScriptedModel(["read"], traits=Traits(native_output=True))
    await registry.run(
        "main", "go", model=outer, models={"reader": inner}, filesystem=files, attachments=[picture]
    )
    for script in (outer, inner):
        message = script.requests[0].messages[0]
        assert isinstance(message, UserMessage)
        assert [each.content for each in message.attachments] == [picture.content]
        assert "- plot.png (28 bytes, attached)" in message.text
    await registry.run("reader", "go", model=blind, attachments=[picture])
    message = blind.requests[0].messages[0]
    assert isinstance(message, UserMessage)
    assert message.attachments == ()
    assert "- plot.png (28 bytes, not text)" in message.text
