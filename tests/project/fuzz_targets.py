"""Fuzz targets. Each takes any bytes, and checks that they lead to a correct result or a readable error.

A target returns normally for a correct result and for one of Handrail's own errors. Anything else is a finding: any
other exception, a wrong result, or text that can't be shown.
"""

from __future__ import annotations

import asyncio
import enum
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field

from handrail import UserContext, tool
from handrail.errors import HandrailError
from handrail.events import ToolInvoked
from handrail.journal.sqlite import SqliteJournal
from handrail.resources.diff import unified_diff
from handrail.run import open_gate
from handrail.run.gate import Gate
from handrail.serve.agui.inputs import parse_input
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import parse_json
from handrail.session import Session
from handrail.testing import Person
from handrail.workers import WorkerRegistry

Target = Callable[[bytes], None]


class Colour(enum.Enum):
    RED = "red"
    GREEN = 2


@dataclass
class Point:
    x: int
    y: float = 0.0
    tags: list[str] = field(default_factory=list[str])
    next: Point | None = None


class Box(BaseModel):
    point: Point
    sizes: dict[str, Decimal] = {}
    colour: Colour = Colour.RED
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.5


@tool(effect="pure")
async def plain(text: str, count: int = 1, exact: float = 1.0, sure: bool = False) -> str:
    """Take plain values."""
    return text * 0


@tool(effect="pure")
async def nested(box: Box, others: list[Box | Point] | None = None) -> str:
    """Take nested values."""
    return str(box.point.x)


@tool(effect="pure")
async def dated(on: date, at: datetime, span: timedelta, who: UUID, raw: bytes = b"") -> str:
    """Take values that JSON represents as text."""
    return (at + span).isoformat() if at.tzinfo else on.isoformat()


class Row(BaseModel):
    key: Literal["a", "b"] | None = None
    pair: tuple[int, str] = (1, "")
    anything: Any = None
    unique: set[str] = set()


@tool(effect="pure")
async def loose(rows: list[Row], numbers: dict[int, int] | None = None) -> str:
    """Take loosely typed values."""
    return str(len(rows))


TOOLS = (plain, nested, dated, loose)

good: dict[str, bytes] = {
    "plain": b'{"text": "a", "count": 2, "exact": 1.5, "sure": true}',
    "nested": b'{"box": {"point": {"x": 1, "next": {"x": 2}}, "sizes": {"a": "1.5"}, "colour": 2}, "others": [{"x": 1}]}',
    "dated": b'{"on": "2024-02-29", "at": "2024-02-29T12:00:00Z", "span": "P1DT2H", '
    b'"who": "12345678-1234-5678-1234-567812345678", "raw": "eA=="}',
    "loose": b'{"rows": [{"key": "a", "pair": [1, "x"], "anything": {"a": [1]}, "unique": ["a"]}], "numbers": {"1": 2}}',
}
"""Valid arguments for each tool, as JSON."""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _in_words(text: str) -> None:
    assert text
    text.encode()  # fails on lone surrogates, which no provider or page can show


def _call(name: str, arguments: Any) -> None:
    """Call a tool through a gate, and check that its arguments are accepted, or refused with a readable message."""
    session, ends = Session(), list[ToolInvoked]()
    session.dispatcher.subscribe(ToolInvoked, ends.append)
    gate: Gate = open_gate(TOOLS, session=session)
    result = _loop().run_until_complete(gate.invoke(name, arguments))
    (ended,) = ends
    if ended.status == "ok":
        assert result.success
    else:
        overflow = (
            isinstance(ended.error, OverflowError) and name == "dated"
        )  # raised by the handler's own sum
        assert ended.status == "invalid" or overflow, (ended.status, result.message, ended.error)
        _in_words(result.message)


def arguments(data: bytes) -> None:
    """Call the tool that the first byte selects. Its arguments are the other bytes, once as bytes and once as text."""
    which = TOOLS[data[0] % len(TOOLS)] if data else plain
    _call(which.name, data[1:])
    _call(which.name, data[1:].decode(errors="replace"))


def argument_values(name: str, value: Any) -> None:
    """Call a tool with arguments as a program would pass them."""
    _call(name, value)


def agui_body(data: bytes) -> None:
    """Parse the body of an AG-UI request."""
    try:
        parse_input(parse_json(data))
    except RequestRefused as refused:
        _in_words(str(refused))
        for where, what in refused.fields:
            _in_words(where + what)


@cache
def _folder() -> Path:
    kept = tempfile.TemporaryDirectory(prefix="handrail-fuzz-")
    _kept.append(kept)
    return Path(kept.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def worker_file(data: bytes) -> None:
    """Check a worker's file that contains these bytes."""
    folder = _folder() / "workers"
    folder.mkdir(exist_ok=True)
    (folder / "main.md").write_bytes(data)
    try:
        registry = WorkerRegistry(folder)
        for problem in registry.check():
            _in_words(str(problem))
    except HandrailError as error:
        _in_words(str(error))


@cache
def _journal() -> Path:
    from support.recorded import Recorder, call

    folder = _folder() / "recorded"
    folder.mkdir()

    async def record() -> None:
        recorder = Recorder(folder)
        await recorder.run("tea", call("note", text="a"), "Noted.")
        recorder.close()

    _loop().run_until_complete(record())
    connection = sqlite3.connect(folder / "runs.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return folder


def journal_file(data: bytes) -> None:
    """Open a journal in which bytes were overwritten, verify it, and read its run.

    Each change takes four bytes of `data`: three for the offset and one for the new value.
    """
    source = _journal()
    folder = _folder() / "altered"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    file = folder / "runs.db"
    raw = bytearray(file.read_bytes())
    for start in range(0, len(data) - 3, 4):
        raw[int.from_bytes(data[start : start + 3]) % len(raw)] = data[start + 3]
    file.write_bytes(raw)
    same = bytes(raw) == (source / "runs.db").read_bytes()

    async def read() -> None:
        journal = SqliteJournal(file)
        try:
            found = await journal.runs.verify()
            await journal.calls.load("tea")
            await journal.steps.load("tea")
            assert not same or not list(found.altered)
        finally:
            journal.close()

    try:
        _loop().run_until_complete(read())
    except HandrailError as error:
        assert not same
        _in_words(str(error))


@dataclass
class Choice:
    name: str
    count: Annotated[int, Field(ge=0)] = 0
    more: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


_GOOD = {"name": "good", "count": 1}


def answer_value(value: Any) -> None:
    """Answer a question with this value, and with a valid one if it is refused."""

    @tool(effect="pure")
    async def asks(context: UserContext) -> str:
        """Ask for a choice."""
        choice = await context.wait_for("ask", {}, Choice)
        assert isinstance(choice, Choice)
        assert choice.count >= 0
        return "fine"

    person = Person(answers={"ask": _GOOD}, wrong_first=value)
    session, ends = Session(), list[ToolInvoked]()
    session.dispatcher.subscribe(ToolInvoked, ends.append)
    gate = open_gate([asks], session=session, environment=person)
    result = _loop().run_until_complete(gate.invoke("asks"))
    assert result.success, (result.message, ends[0].error)
    assert len(person.questions) <= 2


def answer(data: bytes) -> None:
    """Answer a question with the JSON value that these bytes encode, or with their text if they are not JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = data.decode(errors="replace")
    answer_value(value)


def diff(data: bytes) -> None:
    """Check that the diff of two texts turns the first into the second. The first 0xFF separates them."""
    old, _, new = data.partition(b"\xff")
    before, after = (text.decode(errors="replace").splitlines(keepends=True) for text in (old, new))
    lines = list(unified_diff(before, after, "a/x", "b/x"))
    assert bool(lines) == (before != after)
    assert _applied(before, lines) == after


def _applied(before: list[str], lines: list[str]) -> list[str]:
    """Apply a unified diff to the old lines, and return the new ones. This shares no code with Handrail."""
    made: list[str] = []
    at = 0
    for line in lines[2:]:
        if line.startswith("@@"):
            start, _, count = line.split()[1][1:].partition(",")
            first = int(start) - (0 if count == "0" else 1)
            made += before[at:first]
            at = first
        elif line[0] == "+":
            made.append(line[1:])
        else:
            assert before[at] == line[1:]
            if line[0] == " ":
                made.append(before[at])
            at += 1
    return made + before[at:]


_BODY = {
    "threadId": "t1",
    "runId": "r1",
    "state": {},
    "messages": [
        {"id": "m1", "role": "user", "content": "hello"},
        {
            "id": "m2",
            "role": "assistant",
            "content": "",
            "toolCalls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"id": "m3", "role": "tool", "content": "done", "toolCallId": "c1"},
    ],
    "tools": [
        {"name": "show", "description": "Show it.", "parameters": {"type": "object", "properties": {}}}
    ],
    "context": [],
    "forwardedProps": {},
    "resume": [{"interruptId": "q1#abcdef", "status": "resolved", "payload": {"approved": True}}],
}
_WORKER = b"""---
name: main
description: Sorts letters.
model: "openai:gpt-5"
tools: [read_file, search_files]
effects:
  staged: ask
limits: {requests: 3}
---
Sort the letters.
"""

TARGETS: dict[str, tuple[Target, list[bytes]]] = {
    "arguments": (arguments, [bytes([at]) + good[each.name] for at, each in enumerate(TOOLS)]),
    "agui_body": (agui_body, [json.dumps(_BODY).encode(), b'{"threadId": "t", "runId": "r"}']),
    "worker_file": (worker_file, [_WORKER, b"---\n---\n", b"---\na: &a [*a]\n---\n"]),
    "journal_file": (journal_file, [b"\0\0\x64\x01", b"\0\0\x1b\xff\0\x10\0\x05"]),
    "answer": (answer, [json.dumps(_GOOD).encode(), b'{"name": "a", "more": {"b": [1.5, NaN]}}', b'"plain"']),
    "diff": (diff, [b"a\nb\nc\xffa\nc\nd", b"x\r\ny\x0cz\xff", b"\xffnew"]),
}
"""Every target by name, with inputs from which a fuzzer can start."""


def corpus(name: str) -> list[bytes]:
    """Return the inputs in `tests/fuzz/NAME`, each of which was once a finding."""
    folder = Path(__file__).parent.parent / "fuzz" / name
    return [each.read_bytes() for each in sorted(folder.glob("*"))]
