"""Calls of several sessions, threads, processes and runs on one resource: none is lost, and none fails that could run again."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from handrail import (
    Agent,
    DirectoryFilesystem,
    MemoryFilesystem,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    ToolResult,
    gather,
    open_gate,
    tool,
)
from handrail.resources import given
from handrail.resources.directory.disk import Disk
from handrail.resources.facts import Facts
from isolation.plans import plan_of
from isolation.rounds import Forker, Setting, rounds_in
from isolation.shelves import MemoryShelf, Shelf

pytestmark = pytest.mark.once

DEEP = bool(os.environ.get("HANDRAIL_DEEP"))
SKEW = plan_of("read f:x, write f:y", "read f:y, write f:x")


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    started = Forker()
    yield started
    started.close()


class Meeting:
    """A place where the first attempts of several calls wait for each other."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._all_here = asyncio.Event()
        self.attempts = 0

    async def meet(self) -> None:
        self.attempts += 1
        if self.attempts == self._members:
            self._all_here.set()
        await self._all_here.wait()


def adder(meeting: Meeting) -> Any:
    """Return a tool that adds a line to a list. All calls have read the list before the first of them writes."""

    @tool(effect="staged")
    async def add_line(line: str, context: ToolContext) -> str:
        """Add a line to the list."""
        before = context.filesystem.read("list.txt")
        await meeting.meet()
        await asyncio.sleep(0)  # others may go on, also when calls run again
        context.filesystem.write("list.txt", f"{before}{line}\n")
        return "added"

    return add_line


def texts(results: Any) -> list[str]:
    """Return what each call was told, each text once: for calls that all succeeded, `["added"]`."""
    found: list[ToolResult[Any]] = list(results)
    return sorted({result.render() for result in found})


LINES = [str(number) for number in range(64)]

# --- write skew ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "rounds"),
    [
        (Setting("directory", journal="process"), 5),
        (Setting("directory", journal="power"), 5),
        (Setting("directory", journal="postgres"), 5),
        (Setting("memory", journal="power"), 5),
        (Setting("directory", place="processes"), 300 if DEEP else 20),
        (Setting("directories", place="threads"), 120 if DEEP else 20),
    ],
    ids=str,
)
def test_write_skew_of_two_sessions(setting: Setting, rounds: int, tmp_path: Path, forker: Forker):
    """One call reads x and writes y, another reads y and writes x: the later one has seen what the earlier one wrote."""
    with rounds_in(setting, tmp_path, forker) as made:
        problems = [made.run(SKEW).problem for _ in range(rounds)]
    assert [problem for problem in problems if problem] == []


class MeetingDisk(Disk):
    """A disk on which two commits wait for each other before they stage their bytes, unless the other can't come meanwhile."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def write(self, path: Path, data: bytes, facts: Facts | None = None) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(0.5)
        super().write(path, data, facts)


def test_write_skew_between_the_check_and_the_renames(tmp_path: Path):
    """Two threads commit at the same time, after each has read what the other writes: one of them runs again."""
    (tmp_path / "root").mkdir()
    fill = DirectoryFilesystem(tmp_path / "root")
    for name in "xy":
        fill.write(name, name)
    fill.close()
    barrier, both_read = threading.Barrier(2), threading.Barrier(2)
    results: list[ToolResult[Any]] = []

    def work(source: str, target: str) -> None:
        numbers = count()

        @tool(effect="staged")
        async def copy(context: ToolContext) -> str:
            """Copy a file over another."""
            text = context.filesystem.read(source)
            if next(numbers) == 0:
                both_read.wait()
            context.filesystem.write(target, text)
            return "copied"

        files = DirectoryFilesystem(tmp_path / "root", disk=MeetingDisk(barrier))
        results.append(run(copy, files))
        files.close()

    threads = [threading.Thread(target=work, args=pair) for pair in (("x", "y"), ("y", "x"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts(results) == ["copied"]
    assert (tmp_path / "root/x").read_text() == (tmp_path / "root/y").read_text()


def run(work: Any, files: Any) -> ToolResult[Any]:
    async def main() -> ToolResult[Any]:
        return await open_gate([work], filesystem=files).invoke("copy")

    return asyncio.run(main())


# --- a shared resource --------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["", "process", "power"])
async def test_runs_that_share_a_resource_lose_no_update(tmp_path: Path, durability: Any):
    """Six sessions of three calls each increment one counter, which they share by `given`: it is 18 in the end."""
    shelf, meeting = MemoryShelf(), Meeting(18)

    @tool(effect="staged")
    async def increment(context: ToolContext) -> str:
        """Increment the counter."""
        counter = context.resources.get(Shelf)
        value = int(counter.read("counter") or 0)
        await meeting.meet()
        counter.write("counter", str(value + 1))
        return "added"

    journal = SqliteJournal(tmp_path / "runs.db", durability=durability) if durability else None
    gates = [open_gate([increment], resources=[given(Shelf, shelf)], journal=journal) for _ in range(6)]
    results = await asyncio.gather(*(gate.invoke("increment") for gate in gates for _ in range(3)))
    assert (texts(results), shelf.read("counter")) == (["added"], "18")
    for gate in gates:
        await gate.close()
    if journal is not None:
        journal.close()


# --- one file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [2, 8])
@pytest.mark.virtual_time
async def test_every_line_of_one_session_is_added(lines: int):
    """Calls that all read a list before any of them adds its line all succeed, and every line is in the list."""

    @tool(effect="staged")
    async def add_line(line: str, context: ToolContext) -> str:
        """Add a line to the list."""
        before = context.filesystem.read("list.txt")
        await asyncio.sleep(0.01)  # all have read by now
        context.filesystem.write("list.txt", before + line + "\n")
        return "added"

    files = MemoryFilesystem({"list.txt": ""})
    gate = open_gate([add_line], filesystem=files)
    results = await gather(*[gate.invoke("add_line", {"line": line}) for line in LINES[:lines]])
    assert texts(results) == ["added"]
    assert sorted(files.read("list.txt").split()) == sorted(LINES[:lines])


def opened(kind: str, folder: Path) -> Any:
    if kind == "memory":
        return MemoryFilesystem({"list.txt": ""})
    (folder / "root").mkdir(exist_ok=True)
    (folder / "root/list.txt").touch()
    return DirectoryFilesystem(folder / "root")


async def test_the_second_of_two_sessions_runs_again(tmp_path: Path):
    """With a folder, a journal and two sessions, a call that conflicts runs again and does not fail."""
    files, journal, meeting = opened("directory", tmp_path), SqliteJournal(tmp_path / "runs.db"), Meeting(2)
    gates = [open_gate([adder(meeting)], filesystem=files, journal=journal) for _ in range(2)]
    results = await asyncio.gather(
        *(gate.invoke("add_line", {"line": str(at)}) for at, gate in enumerate(gates))
    )
    assert texts(results) == ["added"]
    assert sorted(files.read("list.txt").split()) == ["0", "1"]
    assert meeting.attempts == 3
    for each in gates:
        await each.close()
    journal.close()
    files.close()


@pytest.mark.parametrize("journaled", [False, True], ids=["no journal", "journal"])
@pytest.mark.parametrize("sessions", [1, 64])
@pytest.mark.parametrize("kind", ["memory", "directory"])
async def test_sixty_four_calls_on_one_file_all_commit(
    tmp_path: Path, kind: str, sessions: int, journaled: bool
):
    """Of 64 calls that all read a file before any of them writes it, all commit, from one session and from as many."""
    files, meeting = opened(kind, tmp_path), Meeting(64)
    journal = SqliteJournal(tmp_path / "runs.db") if journaled else None
    gates = [open_gate([adder(meeting)], filesystem=files, journal=journal) for _ in range(sessions)]
    calls = [gates[at % sessions].invoke("add_line", {"line": line}) for at, line in enumerate(LINES)]
    results = await asyncio.gather(*calls)
    lines = files.read("list.txt").split()
    failed = [result.message for result in results if not result.success]
    assert (len(failed), failed[:1]) == (0, [])
    assert sorted(lines) == sorted(LINES)
    for gate in gates:
        await gate.close()
    if journal is not None:
        journal.close()
    if kind == "directory":
        files.close()


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("kind", ["memory", "directory"])
async def test_plain_functions_in_threads_all_commit(tmp_path: Path, kind: str, sessions: int):
    """Handlers that are plain functions, which run in threads, all commit, too."""
    files, all_read, begun = opened(kind, tmp_path), threading.Barrier(8), count()

    @tool(effect="staged")
    def add_line(line: str, context: ToolContext) -> str:
        """Add a line to the list."""
        before = context.filesystem.read("list.txt")
        if next(begun) < 8:
            all_read.wait()
        context.filesystem.write("list.txt", f"{before}{line}\n")
        return "added"

    gates = [open_gate([add_line], filesystem=files) for _ in range(sessions)]
    calls = [gates[at % sessions].invoke("add_line", {"line": str(at)}) for at in range(8)]
    assert texts(await asyncio.gather(*calls)) == ["added"]
    assert sorted(files.read("list.txt").split()) == sorted(map(str, range(8)))
    if kind == "directory":
        files.close()


# --- a web app ----------------------------------------------------------------------------------------


async def test_each_of_24_requests_adds_its_line(tmp_path: Path):
    """A web app runs an agent for each request, with a session of its own, on one folder and one journal."""
    files, journal, meeting = opened("directory", tmp_path), SqliteJournal(tmp_path / "runs.db"), Meeting(24)
    add_line = adder(meeting)

    async def add(request: Request) -> PlainTextResponse:
        line = (await request.body()).decode()
        agent = Agent(
            ScriptedModel([ToolCall("add_line", {"line": line}), "done"]), "Add lines.", tools=[add_line]
        )
        response = await agent.run("Add the line.", filesystem=files, journal=journal)
        return PlainTextResponse(response.text)

    app = Starlette(routes=[Route("/lines", add, methods=["POST"])])
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://app", timeout=None
    ) as client:
        answers = await asyncio.gather(*(client.post("/lines", content=f"line{at}") for at in range(24)))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(files.read("list.txt").split()) == sorted(f"line{at}" for at in range(24))
    journal.close()
    files.close()
