"""The table of claims on a folder: who waits for whom, what was committed since, and what a dead process leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
from handrail.concurrency.claims import GaveUp
from handrail.errors import Conflict, UnfinishedCommit
from handrail.journal.records import CallKey
from handrail.resources.directory import DirectoryFork
from handrail.resources.directory import claim_table as module


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[DirectoryFilesystem, DirectoryFilesystem]]:
    """Two filesystems on one folder, which see each other as two processes do."""
    (tmp_path / "root").mkdir()
    for name in ("x", "y"):
        (tmp_path / "root" / name).write_text("1")
    with DirectoryFilesystem(tmp_path / "root") as one, DirectoryFilesystem(tmp_path / "root") as two:
        yield one, two


def staged(files: DirectoryFilesystem, read: str, write: str, run: str = "") -> DirectoryFork:
    """Return a fork that has read one file and written another, checked and staged as the gate does it, in a run of its own."""
    fork = files.fork("call")
    fork.write(write, fork.read(read) + "+")
    assert fork.stale() == ()
    fork.prepare()
    fork.stage(CallKey("call", run or f"run that writes {write}", "", "journal"))
    return fork


def at_once() -> bool:
    return True


def test_a_claim_excludes_those_who_read_or_write_the_same_file(
    pair: tuple[DirectoryFilesystem, DirectoryFilesystem],
):
    """While one call has claimed what it read and writes, a call that writes what it read waits, and then conflicts."""
    one, two = pair
    first, second = staged(one, "x", "y"), staged(two, "y", "x")
    first.enter(at_once, keep=True)
    with pytest.raises(GaveUp):
        second.enter(at_once, keep=True)
    first.apply()
    first.applied()
    with pytest.raises(Conflict) as conflict:
        second.enter(at_once, keep=True)
    assert conflict.value.places == ("y",)
    second.drop()
    assert (one.read("x"), one.read("y")) == ("1", "1+")


def test_a_claim_that_is_entered_again_is_given_up(pair: tuple[DirectoryFilesystem, DirectoryFilesystem]):
    """A call that must enter its claims a second time, after another folder was recovered, leaves none behind."""
    one, two = pair
    two.write("y", "2")
    reader = one.fork("reader")
    reader.read("x")
    reader.prepare()
    reader.enter(at_once, keep=True)
    reader.enter(at_once, keep=True)
    writer = staged(two, "x", "x")
    with pytest.raises(GaveUp):
        writer.enter(at_once, keep=True)
    reader.drop()
    writer.enter(at_once, keep=True)
    writer.drop()


def test_the_claim_of_a_process_that_lost_its_run_is_void_for_the_one_that_took_it(
    pair: tuple[DirectoryFilesystem, DirectoryFilesystem],
):
    """A frozen process that has claimed a file holds up other runs, but not the process that continues its own run."""
    frozen = staged(pair[0], "x", "y", run="run")
    frozen.enter(at_once, keep=True)
    other = staged(pair[1], "x", "y", run="other run")
    with pytest.raises(GaveUp):
        other.enter(at_once, keep=True)
    other.drop()
    taken = staged(pair[1], "x", "y", run="run")
    taken.enter(at_once, keep=True)
    taken.apply()
    taken.applied()
    assert pair[0].read("y") == "1+"
    frozen.drop()


def test_calls_on_other_files_do_not_wait(pair: tuple[DirectoryFilesystem, DirectoryFilesystem]):
    """Two calls that read one file and write different ones claim them at the same time."""
    one, two = pair
    forks = [staged(one, "x", "a"), staged(two, "x", "b")]
    for fork in forks:
        fork.enter(at_once, keep=True)
    for fork in forks:
        fork.apply()
        fork.applied()
    assert (one.read("a"), one.read("b")) == ("1+", "1+")


def test_a_claim_ends_when_its_fork_is_dropped(pair: tuple[DirectoryFilesystem, DirectoryFilesystem]):
    """A dropped call is in nobody's way, although nothing is written to the table when it is dropped."""
    one, two = pair
    first, second = staged(one, "x", "y"), staged(two, "y", "x")
    first.enter(at_once, keep=True)
    first.drop()
    second.enter(at_once, keep=True)
    second.apply()
    second.applied()
    assert one.read("x") == "1+"


def test_a_listing_excludes_those_who_add_names(pair: tuple[DirectoryFilesystem, DirectoryFilesystem]):
    """A call that listed a folder conflicts with a call that added a file to it since, but two that add files do not."""
    one, two = pair
    lister = one.fork("call")
    lister.write("count", str(len(lister.list())))
    assert lister.stale() == ()
    lister.prepare()
    lister.stage(CallKey("call"))
    two.write("z", "1")
    with pytest.raises(Conflict):
        lister.enter(at_once, keep=True)
    lister.drop()


def test_the_table_survives_a_record_that_was_cut_off(pair: tuple[DirectoryFilesystem, DirectoryFilesystem]):
    """If a process dies while it writes a record, the next one goes on, and calls still see what was committed since."""
    one, two = pair
    one.write("x", "2")
    reader = staged(two, "x", "y")
    with open(one.staging / module.NAME, "ab") as table:
        table.write(b"\0\0\0\x40cut off")
    one.write("x", "3")
    with pytest.raises(Conflict):
        reader.enter(at_once, keep=True)
    reader.drop()
    again = staged(two, "x", "y")
    again.enter(at_once, keep=True)
    again.apply()
    again.applied()
    assert one.read("y") == "3+"


def test_a_large_table_is_written_anew(
    pair: tuple[DirectoryFilesystem, DirectoryFilesystem], monkeypatch: pytest.MonkeyPatch
):
    """The file does not grow for ever. Claims and recent commits stay in it."""
    monkeypatch.setattr(module, "_LARGE", 4096)
    monkeypatch.setattr(module, "_KEPT", 1024)
    one, two = pair
    held, reader = staged(one, "x", "held"), staged(two, "y", "z")
    held.enter(at_once, keep=True)
    for number in range(100):
        two.write("other", str(number))
    assert os.path.getsize(one.staging / module.NAME) < 8192
    with pytest.raises(GaveUp):
        staged(two, "held" if two.exists("held") else "y", "x").enter(at_once, keep=True)
    one.write("y", "2")
    with pytest.raises(Conflict):
        reader.enter(at_once, keep=True)
    held.apply()
    held.applied()
    assert two.read("held") == "1+"


def test_waiting_does_not_block_reads(pair: tuple[DirectoryFilesystem, DirectoryFilesystem]):
    """While a thread waits for another process, the filesystem's own lock is free."""
    one, two = pair
    first, second = staged(one, "x", "y"), staged(two, "y", "x")
    first.enter(at_once, keep=True)
    stop = threading.Event()
    waiting = threading.Thread(target=lambda: _enter(second, stop))
    waiting.start()
    try:
        assert two.read("x") == "1"
        assert two._store.lock.acquire(timeout=60)
        two._store.lock.release()
    finally:
        stop.set()
        waiting.join()
    first.drop()
    second.drop()


def _enter(fork: DirectoryFork, stop: threading.Event) -> None:
    with pytest.raises(GaveUp):
        fork.enter(stop.is_set, keep=True)


DYING = """
    import os, sys
    from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
    from handrail.resources.directory.disk import Disk

    class Dying(Disk):
        def exchange(self, *arguments):
            os._exit(9)

    @tool(effect="staged")
    async def change(context: ToolContext) -> None:
        '''Change a file.'''
        context.filesystem.write("x", "theirs")

    files = DirectoryFilesystem(sys.argv[1], disk=Dying())
    open_gate([change], filesystem=files, journal=SqliteJournal(sys.argv[2])).invoke("change").wait()
"""


@tool(effect="staged")
async def extend(context: ToolContext) -> None:
    """Extend a file."""
    context.filesystem.append("x", "+")


@pytest.mark.once
async def test_a_commit_that_a_dead_process_recorded_comes_first(tmp_path: Path):
    """A call with another journal is told how to finish it. A call with the same journal finishes it, and builds on it."""
    root = tmp_path / "root"
    root.mkdir()
    for name in ("x", "y"):
        (root / name).write_text("1")
    path = str(tmp_path / "journal.db")
    script = [sys.executable, "-c", textwrap.dedent(DYING), str(root), path]
    assert subprocess.run(script, check=False).returncode == 9

    with DirectoryFilesystem(root) as files:
        other, same = SqliteJournal(tmp_path / "other.db"), SqliteJournal(path)
        refused = await open_gate([extend], filesystem=files, journal=other).invoke("extend")
        assert not refused.success
        assert "Any call with that call's journal finishes them" in refused.message
        assert "handrail runs resume" in refused.message
        assert "handrail runs discard" in refused.message
        with pytest.raises(UnfinishedCommit):
            files.write("x", "mine")
        files.write("y", "2")  # only its paths are claimed
        assert (await open_gate([extend], filesystem=files, journal=same).invoke("extend")).success
        assert (files.read("x"), files.read("y")) == ("theirs+", "2")
        other.close()
        same.close()


DYING_LATE = """
    import os, sys
    from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
    from handrail.resources.directory.disk import Disk

    class Dying(Disk):
        def exchange(self, *arguments):
            if sys.argv[3] == "before":
                os._exit(9)
            super().exchange(*arguments)

    @tool(effect="staged")
    async def change(context: ToolContext) -> None:
        '''Change a file.'''
        context.filesystem.append("x", sys.argv[4])

    journal = SqliteJournal(sys.argv[2])
    if sys.argv[3] == "after":
        journal.calls.applied = lambda unit: os._exit(9)
    open_gate([change], filesystem=DirectoryFilesystem(sys.argv[1], disk=Dying()), journal=journal).invoke("change").wait()
"""


@pytest.mark.once
async def test_an_applied_commit_that_was_not_noted_does_not_stop_recovery(tmp_path: Path):
    """A process dies once its files are in place, another one with the same file before its are: both are recovered."""
    root, path = tmp_path / "root", str(tmp_path / "journal.db")
    root.mkdir()
    (root / "x").write_text("0")
    for moment, text in (("after", "1"), ("before", "2")):
        script = [sys.executable, "-c", textwrap.dedent(DYING_LATE), str(root), path, moment, text]
        assert subprocess.run(script, check=False).returncode == 9

    with DirectoryFilesystem(root) as files:
        journal = SqliteJournal(path)
        recovered = await files.recover(journal)
        assert len(recovered.finished) == 2
        assert files.read("x") == "012"
        journal.close()


def test_a_commit_that_is_renaming_its_files_counts_as_made_since(
    pair: tuple[DirectoryFilesystem, DirectoryFilesystem],
):
    """A call that began between a commit's record and its renames conflicts with that call, not with a foreign edit."""
    one, two = pair
    first = staged(one, "x", "y")
    first.enter(at_once, keep=True)
    commit = first._commit
    assert commit is not None
    with one._store.area.table.held(commit.claim):
        late = two.fork("late")
        assert late.others_committed()  # the table has not changed since the fork was made
    late.drop()
    first.drop()


def test_calls_whose_commits_the_table_has_forgotten_may_have_been_made(
    pair: tuple[DirectoryFilesystem, DirectoryFilesystem], monkeypatch: pytest.MonkeyPatch
):
    """Once the table no longer says what was committed since a call began, it says that somebody may have committed."""
    monkeypatch.setattr(module, "_LARGE", 4096)
    monkeypatch.setattr(module, "_KEPT", 1024)
    one, two = pair
    two.write("y", "0")
    early = one.fork("early")
    for number in range(100):
        two.write("other", str(number))
    assert early.others_committed()
    early.drop()
