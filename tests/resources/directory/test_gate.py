"""Calls on a real folder through the gate: a failed call changes nothing, and a commit is recorded before it is applied."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, tool
from handrail.events import ToolInvoked
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit
from handrail.journal.sql.calls import SqlCalls
from handrail.journal.sql.database import Database
from handrail.journal.sqlite import MemoryJournal
from handrail.resources import given
from handrail.resources.directory.disk import Disk
from handrail.resources.directory.recovery import Recovered
from support.filesystems import Folders, aside, marks, tree
from support.rig import Note, Rig

FILES = {"a": "1", "d/x": "1", ".venv/lib/y": "ignored"}


@tool(effect="staged", description="Change files and state.")
async def change(text: str, context: ToolContext) -> str:
    files = context.filesystem
    files.write("a", text)
    files.write("new/b", text)
    files.delete("d", recursive=True)
    context.session.dispatch(Note(text))
    return text


@tool(effect="staged", description="Change files, then fail.")
async def fail(how: str, context: ToolContext) -> str:
    context.filesystem.write("a", "changed")
    context.filesystem.delete("d", recursive=True)
    if how == "cancel":
        raise asyncio.CancelledError
    raise RuntimeError(how)


class Meddling(Disk):
    """A disk that edits the file `a` once, just before a commit replaces it."""

    def __init__(self, root: Callable[[], Path]) -> None:
        self._root = root
        self.times = 1

    def exchange(self, source: int, name: str, target: int, other: str) -> None:
        if other == "a" and self.times:
            self.times -= 1
            (self._root() / "a").write_text("theirs")
        super().exchange(source, name, target, other)


class WatchedCalls(SqlCalls):
    """Notes each call to `commit`, `applied` and `void`, with the content of `a` at that time."""

    def __init__(self, database: Database, root: Path) -> None:
        super().__init__(database)
        self._root = root
        self.seen: list[tuple[str, str]] = []

    async def commit(self, unit: CommitUnit, /) -> None:
        self.seen.append(("commit", (self._root / "a").read_text()))
        await super().commit(unit)

    async def applied(self, unit: CommitUnit, /) -> None:
        self.seen.append(("applied", (self._root / "a").read_text()))
        await super().applied(unit)

    async def void(self, unit: CommitUnit, /) -> None:
        self.seen.append(("void", (self._root / "a").read_text()))
        await super().void(unit)


class Watching(MemoryJournal):
    """A journal that keeps its calls in a `WatchedCalls`."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.calls = WatchedCalls(self._database, root)
        self.seen = self.calls.seen


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("how", ["raise", "cancel"])
async def test_a_call_that_fails_leaves_the_folder_as_it_was(folders: Folders, how: str, recorded: bool):
    """A failed call changes no bytes or inodes in the folder, and leaves nothing staged."""
    files = folders(FILES)
    before = marks(files.root)
    rig = Rig([fail], files=files, journal=MemoryJournal() if recorded else None)
    assert not (await rig.call("fail", how=how)).success
    assert marks(files.root) == before
    assert aside(files) == []


async def test_files_are_renamed_between_the_record_and_its_mark(folders: Folders):
    """A call is recorded before its files are renamed, and marked as applied afterwards.

    The record names the changed paths, and the call can be undone.
    """
    files = folders(FILES)
    journal = Watching(files.root)
    rig = Rig([change], files=files, journal=journal)
    assert (await rig.call("change", text="2")).success
    assert journal.seen == [("commit", "1"), ("applied", "2")]
    assert tree(files) == {
        "a": "2", "new": None, "new/b": "2", ".venv": None, ".venv/lib": None, ".venv/lib/y": "ignored",
    }  # fmt: skip
    assert rig.notes == ["2"]
    (unit,) = await journal.calls.load(rig.gate.run.run_context.run_id)
    (manifest,) = unit.files
    assert sorted(step["path"] for step in manifest["steps"]) == ["a", "d", "new", "new/b"]
    assert manifest["call_id"] == unit.call_id
    assert manifest["journal"] == journal.id
    assert files.undo(unit.call_id, run_id=unit.run_id, journal=journal.id) == ("a", "d", "new", "new/b")
    assert tree(files)["a"] == "1"
    assert aside(files) == []


async def test_files_of_a_live_process_count_as_applied_once_they_are_in_place(
    folders: Folders, tmp_path: Path
):
    """If recovery runs after a commit's renames but before its record is marked as applied, the commit counts as finished."""
    files = folders(FILES)
    journal, theirs = (SqliteJournal(tmp_path / "runs.db", watch=None) for _ in range(2))
    recovered: list[Recovered] = []
    tell = journal.calls.applied

    async def overtaken(unit: CommitUnit, /) -> None:
        journal.calls.applied = tell
        with DirectoryFilesystem(files.root) as other:
            recovered.append(await other.recover(theirs))
        await tell(unit)

    journal.calls.applied = overtaken
    rig = Rig([change], files=files, journal=journal)
    assert (await rig.call("change", text="2")).success
    [found] = recovered
    assert (len(found.finished), found.unapplied, found.dropped) == (1, (), ())
    assert tree(files)["a"] == "2"
    assert aside(files) == []


@pytest.mark.parametrize("recorded", [False, True])
async def test_an_edit_in_the_last_moment_makes_it_void(folders: Folders, recorded: bool):
    """If somebody edits a file at the last moment, the call ends in a conflict, and its message names the file.

    The call's changes are reverted. If it was recorded, its record is voided.
    """
    files: DirectoryFilesystem = folders(FILES, disk=Meddling(lambda: files.root))
    journal = Watching(files.root) if recorded else None
    rig = Rig([change], files=files, journal=journal)
    result = await rig.call("change", text="2")
    assert rig.status("change") == "conflict"
    assert "somebody else has changed a in the meantime." in result.message
    assert tree(files) == {
        "a": "theirs", "d": None, "d/x": "1", ".venv": None, ".venv/lib": None, ".venv/lib/y": "ignored",
    }  # fmt: skip
    assert rig.notes == []
    assert aside(files) == []
    if journal is not None:
        assert journal.seen == [("commit", "1"), ("void", "theirs")]
        assert await journal.calls.load(rig.gate.run.run_context.run_id) == ()
        assert await journal.calls.unapplied() == ()


async def test_a_record_that_can_not_be_written_stops_the_call(folders: Folders):
    """If the record can't be written, nothing is renamed, and none of the call's changes remain."""
    journal = MemoryJournal()

    async def commit(unit: CommitUnit, /) -> None:
        raise OSError("no space")

    journal.calls.commit = commit

    files = folders(FILES)
    before = marks(files.root)
    rig = Rig([change], files=files, journal=journal)
    assert not (await rig.call("change", text="2")).success
    assert (marks(files.root), rig.notes, aside(files)) == (before, [], [])


async def test_a_mark_that_can_not_be_written_does_not_fail_the_call(folders: Folders):
    """A call whose record can't be marked as applied still succeeds, and stays listed for recovery."""
    journal = MemoryJournal()

    async def settle(unit: CommitUnit, state: str, *, synced: bool) -> None:
        raise OSError("no space")

    journal.calls._settle = settle  # pyright: ignore[reportPrivateUsage]

    files = folders(FILES)
    rig = Rig([change], files=files, journal=journal)
    assert (await rig.call("change", text="2")).success
    assert (files.read("a"), rig.notes) == ("2", ["2"])
    assert len(await journal.calls.unapplied()) == 1


class Second(DirectoryFilesystem):
    """A second folder, which tools request by this class."""


@pytest.mark.parametrize("recorded", [False, True])
async def test_two_folders_commit_together_or_not_at_all(folders: Folders, tmp_path: Path, recorded: bool):
    """If a conflict stops the commit to the second of two folders, the first folder's renames are reverted."""

    @tool(effect="staged", description="Change two folders.")
    async def both(context: ToolContext) -> None:
        context.filesystem.write("a", "2")
        context.resources.get(Second).write("a", "2")
        context.session.dispatch(Note("both"))

    files = folders(FILES)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "a").write_text("1")
    disk = Meddling(lambda: tmp_path / "second")
    second = Second(tmp_path / "second", disk=disk)
    journal = MemoryJournal() if recorded else None
    rig = Rig([both], files=files, journal=journal, resources=[given(Second, second)])
    before = marks(files.root)
    assert "a" in (await rig.call("both")).message
    assert (marks(files.root), second.read("a"), rig.notes) == (before, "theirs", [])
    assert (await rig.call("both")).success
    assert (files.read("a"), second.read("a"), rig.notes) == ("2", "2", ["both"])
    assert aside(files) == aside(second) == []
    second.close()


async def test_state_that_can_not_be_applied_takes_the_files_back(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
):
    """If applying the state fails after the files were renamed, the files are restored and the record is voided."""
    from handrail.session import SessionFork

    def refuse(fork: SessionFork) -> None:
        raise RuntimeError("a reducer refused")

    files, journal = folders(FILES), MemoryJournal()
    before = marks(files.root)
    rig = Rig([change], files=files, journal=journal)
    with monkeypatch.context() as patch:
        patch.setattr(SessionFork, "apply", refuse)
        assert not (await rig.call("change", text="2")).success
    assert marks(files.root) == before
    assert await journal.calls.load(rig.gate.run.run_context.run_id) == ()
    assert aside(files) == []


async def test_inner_calls_are_part_of_the_outer_ones_commit(folders: Folders):
    """Inner calls are committed with the outer call in one record, and a failed inner call changes nothing."""

    @tool(effect="staged", description="Call others.")
    async def outer(context: ToolContext) -> None:
        await context.call("change", text="inner")
        await context.call("fail", how="raise")
        context.filesystem.append("a", " and outer")

    files = folders(FILES)
    journal = Watching(files.root)
    rig = Rig([outer, change, fail], files=files, journal=journal)
    assert (await rig.call("outer")).success
    assert journal.seen == [("commit", "1"), ("applied", "inner and outer")]
    assert (files.read("new/b"), rig.notes) == ("inner", ["inner"])


@pytest.mark.parametrize("recorded", [False, True])
async def test_calls_in_parallel_lose_no_update(folders: Folders, tmp_path: Path, recorded: bool):
    """Concurrent calls that increment a number in a file lose no update, because a call with a stale read reruns."""

    @tool(effect="staged", description="Count up.")
    async def count(context: ToolContext) -> int:
        number = int(context.filesystem.read("n")) + 1
        await asyncio.sleep(0)
        context.filesystem.write("n", str(number))
        return number

    files = folders({"n": "0"})
    journal: Journal | None = SqliteJournal(tmp_path / "journal.db") if recorded else None
    rig = Rig([count], files=files, journal=journal)
    for _ in range(5):
        await asyncio.gather(*[rig.call("count") for _ in range(3)])
    ended = [event.status for event in rig.of(ToolInvoked)]
    assert int(files.read("n")) == ended.count("ok") == 15
    if isinstance(journal, SqliteJournal):
        assert len(await journal.calls.load(rig.gate.run.run_context.run_id)) == 15
        journal.close()


async def test_a_call_that_only_reads_writes_nothing_down(folders: Folders):
    """A call that only reads creates no staging folder, and its record names no files."""

    @tool(effect="read", description="Read a file.")
    async def look(context: ToolContext) -> str:
        return context.filesystem.read("a")

    files = folders(FILES)
    journal = Watching(files.root)
    rig = Rig([look], files=files, journal=journal)
    assert (await rig.call("look")).value == "1"
    assert not files.staging.exists()
    assert journal.seen == [("commit", "1")]
    (unit,) = await journal.calls.load(rig.gate.run.run_context.run_id)
    assert unit.files == []


async def test_somebody_at_the_same_file_is_a_conflict_or_a_rerun(folders: Folders):
    """If a person edits a file during a call, the call reruns if it read the file, and gets a conflict if it only wrote it."""

    @tool(effect="staged", description="Extend what is there.")
    async def extend(context: ToolContext) -> str:
        text = context.filesystem.read("a") + "+"
        if not seen:
            (files.root / "a").write_text("theirs")
        seen.append(text)
        context.filesystem.write("a", text)
        return text

    @tool(effect="staged", description="Write without looking.")
    async def blind(context: ToolContext) -> None:
        context.filesystem.write("d/x", "ours")
        (files.root / "d" / "x").write_text("theirs")

    seen: list[str] = []

    files = folders(FILES)
    rig = Rig([extend, blind], files=files)
    assert (await rig.call("extend")).value == "theirs+"
    assert seen == ["1+", "theirs+"]
    assert "d/x" in (await rig.call("blind")).message
    assert (files.root / "d" / "x").read_text() == "theirs"
