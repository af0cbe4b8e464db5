"""Waiting for a claim: the event loop goes on, and the wait ends with a cancellation, a deadline or the other call."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Deadline,
    DirectoryFilesystem,
    MemoryFilesystem,
    Session,
    SqliteJournal,
    ToolContext,
    open_gate,
    tool,
)
from handrail.concurrency.claims import Claim, claims_of
from handrail.errors import PromptEvaluationError
from handrail.events import ToolInvoked
from handrail.journal.records import CallKey
from handrail.protocols import Fork
from handrail.resources import given
from handrail.resources.directory.disk import Disk


@tool(effect="staged")
async def extend(context: ToolContext) -> str:
    """Extend a file."""
    context.filesystem.append("x", "+")
    return "extended"


class Blocker:
    """Somebody who has claimed the file: a call of this process, or of another one."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.files: Any = MemoryFilesystem({"x": "1"})
        self._fork: Any = None
        if kind == "process":
            folder.mkdir()
            (folder / "x").write_text("1")
            self.files, self._other = DirectoryFilesystem(folder), DirectoryFilesystem(folder)
            self._fork = self._other.fork("other")
            self._fork.append("x", "-")
            self._fork.prepare()
            self._fork.stage(CallKey("other", "run", "", "journal"))
            self._fork.enter(lambda: True, keep=True)
        else:
            self._claim = Claim({"x": 8})
            assert self.files.claims.try_enter(self._claim)

    def leave(self) -> None:
        if self._fork is not None:
            self._fork.drop()
        else:
            self.files.claims.leave(self._claim)

    def close(self) -> None:
        if self._fork is not None:
            self._fork.drop()
            self.files.close()
            self._other.close()


@pytest.fixture(params=["task", "process"])
def blocker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blocker]:
    found = Blocker(tmp_path / "root", request.param)
    yield found
    found.close()


async def waiting(task: asyncio.Task[Any]) -> None:
    """Let the loop go on until the call has come to its commit and waits there."""
    for _ in range(200):
        await asyncio.sleep(0.001)
        assert not task.done()


def ends(session: Session) -> list[str]:
    return [event.status for event in session[ToolInvoked].all()]


@pytest.mark.parametrize("journaled", [False, True])
async def test_a_call_goes_on_when_the_claim_is_given_up(blocker: Blocker, tmp_path: Path, journaled: bool):
    """The loop runs other tasks meanwhile, and the call commits as soon as nobody is in its way."""
    journal = SqliteJournal(tmp_path / "runs.db") if journaled else None
    gate = open_gate([extend], filesystem=blocker.files, journal=journal)
    task = asyncio.ensure_future(_invoke(gate))
    await waiting(task)
    blocker.leave()
    assert (await task).success
    assert blocker.files.read("x") == "1+"
    if journal is not None:
        journal.close()


async def _invoke(gate: Any) -> Any:
    return await gate.invoke("extend")


async def test_a_cancelled_call_stops_waiting(blocker: Blocker):
    """A call that is cancelled while it waits ends as cancelled, and leaves neither changes nor a claim."""
    session = Session()
    gate = open_gate([extend], filesystem=blocker.files, session=session)
    task = asyncio.ensure_future(_invoke(gate))
    await waiting(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ends(session) == ["cancelled"]
    assert blocker.files.read("x") == "1"
    blocker.leave()
    assert (await open_gate([extend], filesystem=blocker.files).invoke("extend")).success


async def test_a_deadline_ends_the_wait(blocker: Blocker):
    """A call whose run's deadline passes while it waits is rolled back."""
    session = Session()
    gate = open_gate([extend], filesystem=blocker.files, session=session, deadline=Deadline.after(0.3))
    with pytest.raises(PromptEvaluationError):
        await gate.invoke("extend")
    assert len(ends(session)) == 1
    assert blocker.files.read("x") == "1"


async def test_calls_on_other_files_do_not_wait(blocker: Blocker):
    """A call on another file commits while somebody has claimed this one."""

    @tool(effect="staged")
    async def other(context: ToolContext) -> None:
        """Write another file."""
        context.filesystem.write("y", "1")

    assert (await open_gate([other], filesystem=blocker.files).invoke("other")).success


@pytest.mark.parametrize("kind", ["memory", "directory"])
async def test_nobody_waits_while_the_journal_records_a_call_that_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """A call that changed nothing gives its claims up before it is recorded, except the one on its own session."""
    (tmp_path / "root").mkdir()
    files: Any = MemoryFilesystem() if kind == "memory" else DirectoryFilesystem(tmp_path / "root")
    files.write("x", "1")
    journal = SqliteJournal(tmp_path / "runs.db", durability="power")
    is_recording, may_go_on = asyncio.Event(), asyncio.Event()
    commit = journal.calls.commit

    async def slowly(unit: Any) -> None:
        is_recording.set()
        await may_go_on.wait()
        await commit(unit)

    @tool(effect="read")
    async def look(context: ToolContext) -> str:
        """Read the file."""
        return context.filesystem.read("x")

    monkeypatch.setattr(journal.calls, "commit", slowly)
    monkeypatch.setattr(journal.calls, "commit_soon", lambda unit: None)  # pyright: ignore[reportUnknownLambdaType]
    reader = asyncio.ensure_future(_look(open_gate([look], filesystem=files, journal=journal)))
    await is_recording.wait()
    assert not files.claims.is_busy
    assert (await open_gate([extend], filesystem=files).invoke("extend")).success
    assert not reader.done()
    may_go_on.set()
    assert (await reader).value == "1"
    journal.close()


async def _look(gate: Any) -> Any:
    return await gate.invoke("look")


class CountFork(Fork):
    """A fork of a counter, which is never stale."""

    def __init__(self, counter: Any) -> None:
        self.counter, self.number = counter, counter.number

    def fork(self, owner: str, /, *, writable: bool = True) -> CountFork:
        return CountFork(self)

    def stale(self) -> list[str]:
        return []

    def prepare(self) -> None: ...

    def apply(self) -> None:
        self.counter.number = self.number

    def drop(self) -> None: ...


@dataclass
class Apples:
    """A counter that has no hash, as no ordinary dataclass has."""

    number: int = 0

    def fork(self, owner: str, /, *, writable: bool = True) -> CountFork:
        return CountFork(self)


class Pears(Apples):
    """Another counter."""


@tool(effect="staged")
async def count(context: ToolContext) -> None:
    """Count in both counters, the second one first."""
    context.resources.get(Pears).number += 1
    context.resources.get(Apples).number += 1


async def test_a_call_does_not_wait_for_itself(tmp_path: Path):
    """A recorded call that uses two resources that have no hash, and so share their claims, commits to both."""
    apples, pears = Apples(), Pears()
    journal = SqliteJournal(tmp_path / "runs.db")
    gate = open_gate([count], resources=[given(Apples, apples), given(Pears, pears)], journal=journal)
    result = await gate.invoke("count")
    journal.close()
    assert result.success
    assert (apples.number, pears.number) == (1, 1)


class Counters:
    """Counters with claims of their own, which note in which order they are taken."""

    def __init__(self) -> None:
        self.claimed: list[str] = []

    def make(self, kind: type[Apples], name: str, key: str | None = None) -> Apples:
        @contextlib.asynccontextmanager
        async def claim(reads: Any, writes: Any) -> AsyncGenerator[None]:
            self.claimed.append(name)
            yield

        counter: Any = kind()
        counter.claim = claim
        if key is not None:
            counter.claim_key = key
        return counter


@pytest.mark.parametrize("keys", [(None, None), ("b", "a")])
async def test_every_process_takes_the_claims_of_resources_in_one_order(keys: tuple[str | None, str | None]):
    """The claims of custom resources are taken in the order of the classes' names, or of their keys, whichever was used first."""
    counters = Counters()
    for first in (Apples, Pears):
        made = {
            kind: counters.make(kind, kind.__name__, key)
            for kind, key in zip((Apples, Pears), keys, strict=True)
        }
        claims_of(made[first])  # the one that is used first would come first
        gate = open_gate([count], resources=[given(kind, each) for kind, each in made.items()])
        assert (await gate.invoke("count")).success
    expected = ["Apples", "Pears"] if keys[0] is None else ["Pears", "Apples"]
    assert counters.claimed == expected * 2


class SlowDisk(Disk):
    """A disk on which one kind of operation waits until the test lets it go on."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self.is_slow = self.gave_up = False
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()

    def append(self, fd: int, data: bytes, offset: int) -> None:
        self._wait("append")
        super().append(fd, data, offset)

    def sync_folder(self, fd: int) -> None:
        self._wait("sync")
        super().sync_folder(fd)

    def _wait(self, operation: str) -> None:
        if self.is_slow and operation == self._operation:
            self.is_waiting.set()
            self.gave_up |= not self.may_go_on.wait(5)

    async def waits(self) -> None:
        """Return once a thread waits for this disk."""
        while not self.is_waiting.is_set():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("journaled", [False, True])
async def test_the_loop_goes_on_while_the_disk_is_slow(tmp_path: Path, journaled: bool):
    """While one call waits for the disk to write into the table of claims, the loop begins others on the folder."""
    async with slow_folder(tmp_path, "append", journaled=journaled) as (disk, begin):
        assert (await begin("x", journaled)).success
        disk.is_slow = True
        first = begin("y", journaled)
        await disk.waits()
        second = begin("z", journaled)
        await waiting(first)
        disk.may_go_on.set()
        assert (await first).success
        assert (await second).success


async def test_a_commit_does_not_wait_while_the_folders_of_another_are_synced(tmp_path: Path):
    """A call that is not recorded commits while one that must survive a power cut waits for the disk."""
    async with slow_folder(tmp_path, "sync", journaled=True) as (disk, begin):
        disk.is_slow = True
        first = begin("x", True)
        await disk.waits()
        assert (await begin("y", False)).success
        assert not first.done()
        disk.may_go_on.set()
        assert (await first).success


@contextlib.asynccontextmanager
async def slow_folder(path: Path, operation: str, *, journaled: bool) -> AsyncGenerator[tuple[SlowDisk, Any]]:
    """Yield a slow disk, and a function that begins a call which writes a file on it."""
    (path / "root").mkdir()
    disk = SlowDisk(operation)
    files = DirectoryFilesystem(path / "root", disk=disk)
    journal = SqliteJournal(path / "runs.db", durability="power") if journaled else None

    @tool(effect="staged")
    async def write(path: str, context: ToolContext) -> None:
        """Write a file."""
        context.filesystem.write(path, "1")

    def begin(path: str, is_recorded: bool) -> asyncio.Task[Any]:
        gate = open_gate([write], filesystem=files, journal=journal if is_recorded else None)
        return asyncio.ensure_future(_write(gate, path))

    try:
        yield disk, begin
    finally:
        disk.may_go_on.set()
        files.close()
        if journal is not None:
            journal.close()
    assert not disk.gave_up, "the loop did not go on"


async def _write(gate: Any, path: str) -> Any:
    return await gate.invoke("write", {"path": path})
