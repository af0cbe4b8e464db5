"""A call that touches many files never stops the event loop: threads go through its files, in slices."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    CapabilityPolicy,
    DirectoryFilesystem,
    Prompt,
    SqliteJournal,
    ToolCall,
    ToolContext,
    open_gate,
    tool,
)
from handrail.clock import SystemClock
from handrail.concurrency.claims import SLICE, GaveUp, Pace
from handrail.concurrency.threads import is_on_loop
from handrail.errors import ToolError
from handrail.events import Progress, ToolInvoked
from handrail.guard.feedback import CommandPassing, RunState
from handrail.resources.shell import Allow, Shell
from handrail.runs import undo
from handrail.session import Session
from handrail.testing import Person
from resources.directory.loop_steps import LoopDisk, LoopSteps
from resources.workspaces import adapter, contents
from resources.workspaces import run as run_in_workspace

MANY = 3 * SLICE
STEPS = MANY
"""How many function calls a pass of the loop may make. That is less than one for each file, and far more than a small call makes."""
SHELL = Shell([Allow(...)])
MAKE = (
    f"mkdir -p made/a made/b; for i in $(seq {MANY // 2}); do echo $i > made/a/$i; echo $i > made/b/$i; done"
)
COMMAND = ["sh", "-c", MAKE]


def write_many(files: Any, folder: str = "made") -> None:
    for number in range(MANY):
        files.write(f"{folder}/{number % 3}/{number}", "text")


@tool(effect="staged", capabilities={"fs.write"})
async def command(how: str, context: ToolContext) -> str:
    """Run a command that makes many files."""
    finished = await SHELL.run_on(context.filesystem, COMMAND)
    if not finished.ok or how == "fail":
        raise ToolError(finished.render())
    if how == "wait":
        await asyncio.sleep(3600)
    return "done"


@tool(effect="staged", capabilities={"fs.write"})
def write(context: ToolContext) -> str:
    """Write many files, in the handler's thread."""
    write_many(context.filesystem)
    return "done"


@tool(effect="staged")
def clear(context: ToolContext) -> str:
    """Delete a folder with many files."""
    context.filesystem.delete("old", recursive=True)
    return "done"


@tool(effect="staged")
def summarize(context: ToolContext) -> str:
    """Read many files and write one."""
    files = context.filesystem
    total = sum(len(files.read(path)) for path in files.glob("old/**"))
    files.write("total", str(total))
    return "done"


@tool(effect="staged")
def small(context: ToolContext) -> str:
    """Write one file."""
    context.filesystem.write("small", "text")
    return "done"


@tool(effect="staged")
async def outer(name: str, arguments: dict[str, str], context: ToolContext) -> str:
    """Make an inner call."""
    result = await context.call(name, **arguments)
    return str(result.success)


@tool(effect="staged")
async def after_writing(context: ToolContext) -> str:
    """Write many files, then run a command on them."""
    await asyncio.to_thread(write_many, context.filesystem, "before")
    finished = await SHELL.run_on(context.filesystem, ["true"])
    return finished.ending


TOOLS: list[Any] = [command, write, clear, summarize, small, outer, after_writing]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "command": ("command", {"how": ""}),
    "failing command": ("command", {"how": "fail"}),
    "tool that writes": ("write", {}),
    "tool that deletes": ("clear", {}),
    "tool that reads": ("summarize", {}),
    "inner command": ("outer", {"name": "command", "arguments": {"how": ""}}),
    "failing inner command": ("outer", {"name": "command", "arguments": {"how": "fail"}}),
    "inner tool": ("outer", {"name": "write", "arguments": {}}),
    "command after a tool": ("after_writing", {}),
}


class Ground:
    """A folder with many files, whose disk notes what the event loop's thread does."""

    def __init__(self, base: Path) -> None:
        self.disk = LoopDisk()
        root = base / "root"
        (root / "old").mkdir(parents=True)
        for number in range(MANY):
            (root / "old" / str(number)).write_text("text")
        self.root = root
        self.files = DirectoryFilesystem(root, disk=self.disk, keep_calls=2)
        self.steps = LoopSteps()

    async def watched(self, work: Callable[[], Awaitable[Any]], steps: int = STEPS) -> Any:
        """Await this work, and assert that the loop's thread did nothing for each file meanwhile, or at most so many `steps`."""
        self.disk.watched = True
        with self.steps.counted():
            value = await work()
        self.disk.watched = False
        assert self.disk.on_loop == []
        assert self.steps.most < steps, self.steps.where
        return value

    def staged(self) -> list[str]:
        """Return what is left in the folder of this process, without the lock's folder and spare ones."""
        return [each.name for each in self.files.staging.glob("at-work/*/*") if any(each.iterdir())]


@pytest.fixture
def ground(tmp_path: Path) -> Any:
    made = Ground(tmp_path)
    yield made
    made.files.close()


@pytest.mark.parametrize(
    ("name", "journal"),
    [*((name, "") for name in CALLS), *((name, "process") for name in CALLS), ("command", "power")],
)
async def test_the_loop_does_nothing_for_each_file(
    ground: Ground, tmp_path: Path, name: str, journal: str
) -> None:
    """Whatever a call does with many files, and however it ends, the loop's thread makes no call of the disk and few others."""
    kept: Any = SqliteJournal(tmp_path / "runs.db", durability=journal) if journal else None  # type: ignore[arg-type]
    gate = open_gate(TOOLS, filesystem=ground.files, journal=kept)
    for _ in range(3):
        assert (await gate.invoke("small")).success  # imports what is imported lazily
    called, arguments = CALLS[name]
    result = await ground.watched(lambda: gate.invoke(called, arguments))
    assert result.success == (name != "failing command")
    count = len([path for path in ground.root.rglob("*") if path.is_file()])
    assert count == {
        "failing command": MANY + 1,
        "failing inner command": MANY + 1,
        "tool that deletes": 1,
        "tool that reads": MANY + 2,
    }.get(name, 2 * MANY + 1)
    assert ground.staged() == []
    await gate.close()
    if kept is not None:
        kept.close()


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("scope", [["made"], ["."]])
async def test_what_a_person_and_a_policy_see_of_many_files_is_made_in_a_thread(
    ground: Ground, scope: list[str], inner: bool
) -> None:
    """The diff of a question, its paths, rows and digest, and the check of a scope are not made on the loop."""
    asked: list[int] = []

    def approve(question: Any) -> bool:
        asked.append(len(question.payload.get("diff", "")))
        return True

    policy = CapabilityPolicy({"fs.write": "ask"}, scope=scope)
    person = Person(approve=approve)
    gate = open_gate(TOOLS, filesystem=ground.files, policies=[policy], environment=person)
    assert (await gate.invoke("small")).success
    for name, arguments in (("write", {}), ("command", {"how": ""})):
        if inner:
            name, arguments = "outer", {"name": name, "arguments": arguments}
        result = await ground.watched(lambda name=name, arguments=arguments: gate.invoke(name, arguments))
        assert result.success, result.message
    assert max(asked) > MANY
    await gate.close()


async def test_undo_and_the_history_go_through_many_files_in_a_thread(ground: Ground, tmp_path: Path) -> None:
    """A deleted folder comes back without work on the loop. So does its removal from the history, which a small call causes."""
    prompt = Prompt("files", "Work.", tools=TOOLS)
    with contextlib.closing(SqliteJournal(tmp_path / "runs.db")) as journal:

        async def made(*names: str, run_id: str) -> str:
            calls = [ToolCall(name, {}) for name in names]
            response = await adapter(*calls).evaluate(
                prompt, "go", run_id=run_id, journal=journal, filesystem=ground.files
            )
            ended = response.session[ToolInvoked].all()
            assert all(each.status == "ok" for each in ended)
            return ended[-1].call_id

        early = await made("small", run_id="early")
        await undo(journal, "early", early, ground.files)  # imports what is imported lazily
        call_id = await made("clear", run_id="first")
        # The record of the undo lists the paths, which takes two steps for each.
        await ground.watched(lambda: undo(journal, "first", call_id, ground.files), 3 * MANY)
        assert len(list((ground.root / "old").iterdir())) == MANY
    gate, steps = open_gate(TOOLS, filesystem=ground.files), LoopSteps()
    for name in ("small", "clear"):
        assert (await gate.invoke(name)).success
    with steps.counted():
        for _ in range(3):
            assert (await gate.invoke("small")).success
    assert steps.most < STEPS + SLICE, steps.where  # a slice is counted, to see that the folder is large
    await gate.close()
    ground.files.close()
    assert not any(ground.files.staging.glob("at-work/*"))


async def test_a_workspace_goes_through_many_files_in_a_thread(tmp_path: Path) -> None:
    """Hashing, recording and applying a command's files in a workspace takes no more steps on the loop than one file does."""
    with contextlib.closing(SqliteJournal(tmp_path / "runs.db")) as journal:

        async def most(line: str, run_id: str) -> int:
            steps = LoopSteps()
            with steps.counted():
                call = ToolCall("command", {"line": line})
                response = await run_in_workspace(journal, tmp_path, call, run_id=run_id)
            [ended] = response.session[ToolInvoked].all()
            assert ended.result.success, ended.result.message
            return steps.most

        for run_id in ("first", "second"):
            few = await most("echo 1 >> a", run_id)
        assert await most(MAKE, "third") < few + SLICE
    assert len(contents(tmp_path)) == MANY + 1


async def test_a_checker_s_command_is_dropped_in_a_thread(ground: Ground) -> None:
    """What the command of `CommandPassing` made is removed without work on the loop."""
    checker = CommandPassing(SHELL, *COMMAND)
    state = RunState(Session(), 0, 0.0, 0, filesystem=ground.files.fork("the run"))
    assert await checker.missing(state) is None
    assert await ground.watched(lambda: checker.missing(state)) is None
    assert ground.staged() == []


async def test_the_work_is_done_in_slices(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the work gives others a turn after every slice, and never on the loop."""
    turns: list[bool] = []
    turn = Pace.turn

    def counted(pace: Pace, lock: Any = None) -> None:
        turns.append(is_on_loop())
        turn(pace, lock)

    monkeypatch.setattr(Pace, "turn", counted)
    gate = open_gate(TOOLS, filesystem=ground.files)
    assert (await gate.invoke("small")).success
    assert turns == []
    assert (await gate.invoke("command", {"how": ""})).success
    parts = 7  # three parts of taking the files over, startup files, claims, check, staging and applying, some of which have one slice less
    assert len(turns) >= parts * (MANY // SLICE - 1)
    assert not any(turns)
    await gate.close()


def test_a_lock_is_free_between_slices() -> None:
    """A thread that waits for a lock gets it, even if the work holds it twice."""
    lock, entered = threading.RLock(), threading.Event()

    def wait() -> None:
        with lock:
            entered.set()

    with lock, lock:
        threading.Thread(target=wait, daemon=True).start()
        for _ in Pace().each(range(10**9), lock=lock):
            if entered.is_set():
                break
        assert not lock._is_owned() or entered.is_set()  # type: ignore[attr-defined]


def test_work_stops_and_reports_between_slices() -> None:
    """Progress is reported at most once a second, and `stop` ends the work at the next slice."""
    told: list[tuple[str, float, float]] = []
    times = iter([0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 3.1])
    pace = Pace(lambda: len(told) == 2, lambda *facts: told.append(facts), lambda: next(times))
    done: list[int] = []
    with pytest.raises(GaveUp):
        done.extend(pace.each(range(10 * SLICE), "staging files"))
    assert told == [("staging files", 2 * SLICE, 10 * SLICE), ("staging files", 4 * SLICE, 10 * SLICE)]


class Cancelling(LoopDisk):
    """A disk that cancels a task while it writes a commit's second slice, and goes on once the cancellation has landed."""

    def __init__(self) -> None:
        super().__init__()
        self.task: asyncio.Task[Any] | None = None
        self.written = 0

    def write(self, path: Path, data: bytes, facts: Any = None) -> None:
        super().write(path, data, facts)
        self.written += 1
        if self.task is not None and self.written == SLICE + SLICE // 2:
            loop, landed = self.task.get_loop(), threading.Event()

            def pass_by(left: int) -> None:
                if left:
                    loop.call_soon(pass_by, left - 1)
                else:
                    landed.set()

            loop.call_soon_threadsafe(self.task.cancel)
            loop.call_soon_threadsafe(pass_by, 20)
            landed.wait()


@pytest.mark.parametrize("has_journal", [False, True])
async def test_a_cancellation_ends_the_staging_of_many_files(tmp_path: Path, has_journal: bool) -> None:
    """It is given up after the slice, and neither the folder nor the staging folder has anything of it."""
    (tmp_path / "root").mkdir()
    disk = Cancelling()
    journal = SqliteJournal(tmp_path / "runs.db") if has_journal else None
    with DirectoryFilesystem(tmp_path / "root", disk=disk) as files:
        gate = open_gate(TOOLS, filesystem=files, journal=journal)
        assert (await gate.invoke("small")).success
        disk.written = 0

        async def write_them() -> Any:
            return await gate.invoke("write")

        disk.task = asyncio.ensure_future(write_them())
        with pytest.raises(asyncio.CancelledError):
            await disk.task
        assert disk.written <= 2 * SLICE  # the folders are among the entries
        assert files.glob("**") == ("small",)
        assert not [each for each in files.staging.glob("at-work/*/*/*") if each.name != "manifest"]
        assert (await gate.invoke("write")).success
        await gate.close()
    if journal is not None:
        journal.close()


class Hasty(SystemClock):
    """A clock on which each look at the time takes half a second."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.looks / 2


@pytest.mark.parametrize("has_journal", [False, True])
async def test_a_long_commit_reports_its_progress(ground: Ground, tmp_path: Path, has_journal: bool) -> None:
    """The call reports how many files are staged and applied, before it ends."""
    journal = SqliteJournal(tmp_path / "runs.db") if has_journal else None
    session, events = Session(), list[Any]()
    session.dispatcher.subscribe(Progress, events.append)
    session.dispatcher.subscribe(ToolInvoked, events.append)
    gate = open_gate(TOOLS, filesystem=ground.files, session=session, journal=journal, clock=Hasty())
    assert (await gate.invoke("small")).success
    events.clear()
    assert (await gate.invoke("write")).success
    *told, ended = events
    assert isinstance(ended, ToolInvoked)
    assert {each.message for each in told} == {"staging files", "applying files"}
    assert {each.total for each in told} == {MANY + 4}
    assert all(each.tool == "write" and 0 < each.done < each.total for each in told)
    await gate.close()
    if journal is not None:
        journal.close()
