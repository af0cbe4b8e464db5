"""Attachments of recorded runs: a resumed worker has those that its run began with."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, Agent, MemoryFilesystem, ScriptedModel, Session, ToolCall, WorkerRegistry, tool
from handrail.content import Attachment
from handrail.environment import LaterEnvironment
from handrail.errors import BlobNotFoundError, RunError, RunParked
from handrail.fleet import FleetApp, Runner, Submission, submit
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.messages import ToolMessage, Traits, UserMessage
from handrail.models.scripted import Reply
from handrail.run.record.begin import decode_outcome
from handrail.run.record.log import load_attachments
from support import PATIENCE
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
    asyncio.run(load_attachments(journal, "run", recorded))
    assert [(each, each.content) for each in recorded] == [(each, each.content) for each in attachments]
    if recorded:
        lost = data.draw(st.sampled_from(recorded))
        del journal.kept[lost.digest]
        first = next(each for each in recorded if each.digest == lost.digest)
        with pytest.raises(RunError) as refused:
            asyncio.run(load_attachments(journal, "run", references()))
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


# --- attachments that are passed on by name -------------------------------------------------------------

PICTURE = Attachment(b"\x89PNG\r\n\x1a\n" + b"\0" * 20, "plot.png")
OTHER = Attachment(b"\x89PNG\r\n\x1a\n" + b"\1" * 20, "plot.png")


def hand(worker: str, *names: str) -> ToolCall:
    """A call that hands attachments to a worker by name."""
    return ToolCall(worker, {"input": "go", "attachments": list(names)})


def handed(script: ScriptedModel) -> list[Attachment]:
    """The attachments of the first message to a worker's model."""
    message = script.requests[0].messages[0]
    assert isinstance(message, UserMessage)
    return list(message.attachments)


def told(script: ScriptedModel) -> str:
    """What a model was told about its last calls."""
    message = script.requests[-1].messages[-1]
    assert isinstance(message, ToolMessage)
    return message.results[-1].text


async def test_a_worker_passes_its_attachments_on_by_name(tmp_path: Path) -> None:
    """What a worker was given reaches a worker of its worker, whatever its kind, and the run needs no files."""
    middle = "---\nworkers: [sender]\nattachments: {count: 2}\n---\nGo."
    main = "---\nworkers: [middle]\nattachments: {count: 2}\n---\nGo."
    registry = sound(tmp_path, TOOLS, sender=MAIN, middle=middle, main=main)
    sender = ScriptedModel([ToolCall("send", {}), "sent"])
    models: Any = {"middle": ScriptedModel([hand("sender", "b.bin", "a.txt"), "end"]), "sender": sender}
    main_model = ScriptedModel([hand("middle", "a.txt", "b.bin"), "end"])
    await registry.run(
        "main", "go", model=main_model, models=models, attachments=GIVEN, approvals="approve_all"
    )
    assert told(sender) == "b.bin=b'\\xff\\x00' a.txt=b'one'"


async def test_an_attachment_comes_before_the_file_of_its_name(tmp_path: Path) -> None:
    """The model has seen the attachment. A file of the same name may be a different one."""
    main = "---\nworkers: [sender]\nattachments: {count: 1}\n---\nGo."
    registry = sound(tmp_path, TOOLS, sender=MAIN, main=main)
    sender = ScriptedModel([ToolCall("send", {}), "sent"])
    models: Any = {"main": ScriptedModel([hand("sender", "a.txt", "c.txt"), "end"]), "sender": sender}
    files = MemoryFilesystem({"a.txt": "another", "c.txt": "three"})
    await registry.run(
        "main", "go", models=models, filesystem=files, attachments=GIVEN[:1], approvals="approve_all"
    )
    assert told(sender) == "a.txt=b'one' c.txt=b'three'"


@tool(effect="read")
def screenshot() -> Attachment:
    """Take a screenshot."""
    return PICTURE


@pytest.mark.parametrize("source", ["message", "result", "answer", "earlier"])
async def test_every_attachment_of_the_conversation_can_be_passed_on(tmp_path: Path, source: str) -> None:
    """Those of a message, of a tool's result and of the model's own answers, also from earlier runs of the session."""
    registry = sound(tmp_path, reader="---\nattachments: {count: 1}\n---\nRead.")
    attached = [PICTURE] if source in ("message", "earlier") else []
    shown: list[Any] = [ToolCall("screenshot", {})] if source == "result" else []
    call = hand("reader", "plot.png")
    passed = Reply("", [call], attachments=[PICTURE]) if source == "answer" else call
    early: list[Any] = ["I see it."] if source == "earlier" else []
    model = ScriptedModel([*early, *shown, passed, "It was read.", "end"])
    agent = Agent(model, "Go.", tools=[screenshot, registry.tool("reader")])
    session = Session()
    await agent.run("Look.", attachments=attached, session=session)
    if early:
        await agent.run("Pass it on.", session=session)
    nested = next(each for each in model.requests if each.messages[0].text.startswith("go\n"))
    message = nested.messages[0]
    assert isinstance(message, UserMessage)
    assert [each.content for each in message.attachments] == [PICTURE.content]


async def test_a_nested_conversation_passes_on_only_what_is_in_it(tmp_path: Path) -> None:
    """A worker's worker can't name what only the outer conversation has seen."""
    registry = sound(
        tmp_path,
        main="---\nworkers: [middle]\nattachments: {count: 1}\n---\nGo.",
        middle="---\nworkers: [reader]\nattachments: {count: 1}\n---\nGo.",
        reader="---\nattachments: {count: 1}\n---\nRead.",
    )
    middle = ScriptedModel([hand("reader", "plot.png"), "end"])
    models: Any = {"main": ScriptedModel([hand("middle"), "end"]), "middle": middle}
    await registry.run("main", "go", models=models, attachments=[PICTURE])
    assert "plot.png can't be read, because this run has no files" in told(middle)


@pytest.mark.parametrize("files", [None, {"c.txt": "three"}])
async def test_a_wrong_name_is_told_with_those_that_there_are(
    tmp_path: Path, files: dict[str, str] | None
) -> None:
    registry = sound(
        tmp_path,
        TOOLS,
        sender=MAIN,
        main="---\nworkers: [sender]\nattachments: {count: 2}\n---\nGo.",
    )
    main = ScriptedModel([hand("sender", "x.txt"), "end"])
    disk = None if files is None else MemoryFilesystem(files)
    await registry.run("main", "go", model=main, attachments=GIVEN, filesystem=disk)
    assert "x.txt" in told(main)
    assert "The attachments in this conversation are: a.txt, b.bin." in told(main)


async def test_a_name_of_two_attachments_is_refused_and_both_can_be_passed_by_digest(tmp_path: Path) -> None:
    """The error names both, so that the model can choose. The same bytes twice are one attachment."""
    registry = sound(tmp_path, reader="---\nattachments: {count: 1, suffixes: [.png]}\n---\nRead.")
    model = ScriptedModel(
        [
            ToolCall("screenshot", {}),
            hand("reader", "plot.png"),
            hand("reader", OTHER.digest[:12]),
            "It was read.",
            "end",
        ]
    )
    agent = Agent(model, "Go.", tools=[screenshot, registry.tool("reader")])
    await agent.run("Look.", attachments=[OTHER, PICTURE])
    refused = model.requests[2].messages[-1].text
    assert "2 attachments are named plot.png" in refused
    assert refused.index(OTHER.digest[:12]) < refused.index(PICTURE.digest[:12])
    message = model.requests[3].messages[0]
    assert isinstance(message, UserMessage)
    assert [each.content for each in message.attachments] == [OTHER.content]


async def test_the_rules_of_the_worker_hold_for_what_is_passed_on(tmp_path: Path) -> None:
    """Those for size and suffix, also if the attachment is named by its digest."""
    rule = "---\nattachments: {count: 2, max_bytes: 2, suffixes: [.bin]}\n---\nRead."
    registry = sound(tmp_path, reader=rule)
    model = ScriptedModel([hand("reader", GIVEN[0].digest, "long.bin"), "end"])
    agent = Agent(model, "Go.", tools=[registry.tool("reader")])
    await agent.run("Look.", attachments=[GIVEN[0], Attachment(b"long", "long.bin", media_type="text/plain")])
    assert "a.txt does not end in .bin" in told(model)
    assert "long.bin has 4 bytes" in told(model)


async def test_a_resumed_worker_has_what_was_passed_on_to_it(tmp_path: Path) -> None:
    """Also if there is a file of that name by then."""
    middle = "---\nworkers: [sender]\nattachments: {count: 2}\n---\nGo."
    registry = sound(tmp_path, TOOLS, sender=MAIN, middle=middle, main=middle.replace("sender", "middle"))
    journal = MemoryJournal()
    models: Any = {
        "main": ScriptedModel([hand("middle", "a.txt", "b.bin")]),
        "middle": ScriptedModel([hand("sender", "a.txt", "b.bin")]),
        "sender": ScriptedModel([ToolCall("send", {})]),
    }
    await park(registry, journal, "main", models=models, attachments=GIVEN)
    sender = ScriptedModel(["sent"])
    again: Any = {"main": ScriptedModel(["end"]), "middle": ScriptedModel(["end"]), "sender": sender}
    await WorkerRegistry(tmp_path).resume(
        "main",
        "run",
        journal=journal,
        models=again,
        filesystem=MemoryFilesystem({"a.txt": "another"}),
        environment=LaterEnvironment(),
    )
    assert told(sender) == SENT


MODELS = """
from handrail import ScriptedModel, ToolCall

def passes(request):
    if len(request.messages) == 1:
        return "I see it."
    if len(request.messages) == 3:
        return ToolCall("reader", {"input": "go", "attachments": ["plot.png"]})
    return request.messages[-1].text

def reads(request):
    return " ".join(each.digest for each in request.messages[0].attachments if each.is_here)

main, reader = ScriptedModel(passes), ScriptedModel(reads)
"""


async def test_a_worker_process_passes_on_what_another_one_was_given(tmp_path: Path) -> None:
    """The picture came with the session's first run. Only the journal has its bytes."""
    main = "---\nmodel: picture_models:main\nworkers: [reader]\nattachments: {count: 1}\n---\nGo."
    reader = "---\nmodel: picture_models:reader\nattachments: {count: 1}\n---\nRead."
    (tmp_path / "picture_models.py").write_text(MODELS)
    sound(tmp_path, main=main, reader=reader)
    app, text = FleetApp.load(str(tmp_path / "main.md")), ""
    for said in (Submission("Look.", attachments=[PICTURE]), Submission("Pass it on.")):
        with closing(SqliteJournal(tmp_path / "runs.db")) as journal:
            row = await submit(journal, app, dataclasses.replace(said, session_id="s"))
            await asyncio.wait_for(Runner(journal, [app]).execute(row.record.id), PATIENCE)
            text = decode_outcome(await journal.runs.get(row.record.id)).text
    assert text == PICTURE.digest
