"""Several processes and people change one folder: nothing is lost, and each call's result says what happened."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, tool
from handrail.errors import Conflict, FileError
from handrail.journal.records import CallKey
from handrail.journal.sqlite import MemoryJournal
from handrail.resources.directory import area
from handrail.resources.directory.disk import Disk
from handrail.resources.facts import Facts
from support import importing_support
from support.filesystems import Folders, aside, commit, fill, tree
from support.rig import Rig

DEEP = bool(os.environ.get("HANDRAIL_DEEP"))
COUNTS = {
    "a number of calls": (
        ["--processes", "2", "3", "4", "8", "--updates", "2000", "--kills", "20", "--rounds", "10"]
        if DEEP
        else ["--processes", "3", "--updates", "12", "--kills", "1"]
    ),
    "a time": ["--processes", "8", "--seconds", "300", "--rounds", "3"]
    if DEEP
    else ["--processes", "4", "--seconds", "3"],
}


@pytest.mark.once
@pytest.mark.timeout(36_000 if DEEP else 600)
@pytest.mark.parametrize("journaled", ["no", "yes"])
@pytest.mark.parametrize("counts", COUNTS)
def test_processes_lose_nothing(tmp_path: Path, counts: str, journaled: str):
    """Processes that read and change shared files, and are killed and restarted, commit as if one call had run after another.

    Their calls fail only because of an editor, and what it saves to one of the files is not lost either.
    """
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("folder_processes.py")), *COUNTS[counts], "--journaled", journaled, "--where", str(tmp_path)],
        capture_output=True, text=True, env=importing_support(),
    )  # fmt: skip
    reports = [json.loads(line) for line in ran.stdout.splitlines()]
    assert reports, ran.stderr
    for report in reports:
        assert report["kills"]
        if "--updates" in COUNTS[counts]:
            updates = int(COUNTS[counts][COUNTS[counts].index("--updates") + 1])
            assert report["succeeded"] + report["conflicts"] >= report["processes"] * updates
        assert report["clean"], (report, ran.stderr[-2000:])


@pytest.mark.parametrize("damage", ["lost", "torn", "none"])
def test_a_round_of_processes_finds_damage(tmp_path: Path, damage: str):
    """If an older version of a file comes back after a round, or half of one, the round is not clean."""
    ran = subprocess.run(
        [sys.executable, "-c", DAMAGING, str(tmp_path), damage], capture_output=True, text=True, env=importing_support(), check=True
    )  # fmt: skip
    report = json.loads(ran.stdout)
    assert bool(report["problem"]) == (damage != "none")
    assert bool(report["torn"]) == (damage == "torn")


DAMAGING = """
import msgspec, sys
from pathlib import Path
from resources.directory.folder_processes import Report, Round, SHARED, _check, content_of, run_round, version_of
base, round = Path(sys.argv[1]), Round(processes=2, updates=10, editor=False)
before = run_round(base, round)
assert before.is_clean, before
path = next(base / "root" / name for name in SHARED if (base / "root" / name).read_text())
text = path.read_text()
if sys.argv[2] == "lost":
    path.write_text("")
elif sys.argv[2] == "torn":
    path.write_text(text[:-3])
report = Report()
_check(base, round, report, set())
print(msgspec.json.encode(report).decode())
"""


# --- exclusive renames ------------------------------------------------------------------------------


class Hooked(Disk):
    """A disk that calls functions before and after each exchange, with the exchange's number."""

    def __init__(self, before: Callable[[int], Any] = id, after: Callable[[int], Any] = id) -> None:
        self._before, self._after = before, after
        self.exchanges = 0

    def exchange(self, source: int, name: str, target: int, other: str) -> None:
        self.exchanges += 1
        self._before(self.exchanges)
        super().exchange(source, name, target, other)
        self._after(self.exchanges)


def save(path: Path, text: str) -> None:
    """Save a file by renaming a new one over it, as many editors do."""
    path.with_name(f"{path.name}.swp").write_text(text)
    path.with_name(f"{path.name}.swp").rename(path)


def is_locked(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def test_no_other_commit_comes_between_the_renames(folders: Folders):
    """The folder is locked during the renames of a commit or an undo, and unlocked before and after a commit's `apply`."""
    held: list[bool] = []
    look = lambda _: held.append(is_locked(files.root))  # noqa: E731  # it is only passed as an argument
    files = folders({"a": "1", "b": "1"}, disk=Hooked(look, look))
    fork = files.fork("call")
    fork.write("a", "2")
    fork.write("b", "2")
    fork.prepare()
    fork.stage(CallKey("call"))
    assert not is_locked(files.root)
    fork.apply()
    assert held == [True] * 4
    assert not is_locked(files.root)
    fork.applied()
    files.undo("call")
    assert held == [True] * 8


def test_a_call_that_read_between_the_renames_of_another_fails_before_its_own(folders: Folders):
    """A call that read two files between the renames of another filesystem's commit gets a conflict, and renames nothing."""
    late = Hooked()
    read: list[Any] = []

    def read_between(number: int) -> None:
        if number == 1:
            fork = other.fork("late")
            for path in ("a", "b"):
                fork.append(path, "3")
            fork.prepare()
            fork.stage(CallKey("late"))
            read.append(fork)

    files = folders({"a": "1", "b": "1"}, disk=Hooked(after=read_between))
    other = DirectoryFilesystem(files.root, disk=late)
    fork = files.fork("call")
    for path in ("a", "b"):
        fork.append(path, "2")
    commit(fork)
    with pytest.raises(Conflict):
        read[0].apply()
    assert late.exchanges == 0
    read[0].drop()
    other.close()
    assert tree(files) == {"a": "12", "b": "12"}


@pytest.mark.parametrize("foreign", [False, True])
def test_a_commit_that_died_between_its_renames_is_finished_or_reverted(folders: Folders, foreign: bool):
    """A commit whose process died between two renames is finished by the next commit.

    If somebody has changed the file that was not renamed yet, the dead process's commit is reverted instead.
    """
    files = folders({"a": "1", "b": "1"})
    child = os.fork()
    if not child:
        dying = DirectoryFilesystem(files.root, disk=Hooked(after=lambda _: os._exit(9)))
        fork = dying.fork("call")
        for path in ("a", "b"):
            fork.write(path, "2")
        commit(fork)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert tree(files) == {"a": "2", "b": "1"}
    if foreign:
        save(files.root / "b", "theirs")
    files.write("c", "3")
    assert tree(files) == {**({"a": "1", "b": "theirs"} if foreign else {"a": "2", "b": "2"}), "c": "3"}


@pytest.mark.parametrize("how", ["rename", "in place", "deleted"])
@pytest.mark.parametrize("times", range(1, 5))
def test_what_is_saved_while_a_step_is_taken_back_stays(folders: Folders, how: str, times: int):
    """If somebody saves a file again while a conflicting commit puts their first save back, the newest save stays."""

    def meddle(number: int) -> None:
        if number > times:
            return
        if number > 1 and how == "in place":
            (files.root / "a").write_text(f"theirs {number}, longer {'x' * number}")
        elif number > 1 and how == "deleted":
            (files.root / "a").unlink()
            (files.root / "a").write_text(f"theirs {number}, longer {'x' * number}")
        else:
            save(files.root / "a", f"theirs {number}, longer {'x' * number}")

    disk = Hooked(meddle)
    files = folders({"a": "1"}, disk=disk)
    fork = files.fork("call")
    fork.write("a", "ours")
    fork.prepare()
    with pytest.raises(Conflict, match="a"):
        fork.apply()
    assert disk.exchanges == times + 1
    assert files.read("a") == f"theirs {times}, longer {'x' * times}"
    assert aside(files) == []


def test_what_is_deleted_while_a_step_is_taken_back_does_not_take_a_save_along(folders: Folders):
    """If somebody deletes the call's file while a conflicting commit puts their save back, the save is still put back."""

    def meddle(number: int) -> None:
        save(files.root / "a", "theirs") if number == 1 else (files.root / "a").unlink()

    files = folders({"a": "1"}, disk=Hooked(meddle))
    fork = files.fork("call")
    fork.write("a", "ours")
    fork.prepare()
    with pytest.raises(Conflict, match="a"):
        fork.apply()
    assert files.read("a") == "theirs"


def test_a_save_during_the_first_step_is_seen_before_the_second(folders: Folders):
    """If somebody saves the second file of a commit while the first is renamed, the first is restored."""
    disk = Hooked(lambda number: save(files.root / "b", "theirs") if number == 1 else None)
    files = folders({"a": "1", "b": "1"}, disk=disk)
    fork = files.fork("call")
    fork.write("a", "ours")
    fork.write("b", "ours")
    fork.prepare()
    with pytest.raises(Conflict, match="b"):
        fork.apply()
    assert tree(files) == {"a": "1", "b": "theirs"}
    assert disk.exchanges == 2


def test_a_file_that_somebody_is_writing_is_not_replaced(folders: Folders):
    """If a program has a file open for writing, a commit to it fails with an error that says so, and the program's data stays."""
    files = folders({"a": "1", "b": "1"})
    with (files.root / "a").open("w") as theirs:
        fork = files.fork("call")
        fork.write("b", "ours")
        fork.write("a", fork.read("a") + "ours")
        fork.prepare()
        with pytest.raises(FileError, match="'a': another program is writing to this file"):
            fork.apply()
        theirs.write("theirs")
    assert tree(files) == {"a": "theirs", "b": "1"}
    files.write("a", "ours")
    assert files.read("a") == "ours"


def test_who_only_reads_a_file_is_not_in_the_way(folders: Folders):
    """A file that a program has open for reading can be replaced."""
    files = folders({"a": "1"})
    with (files.root / "a").open():
        files.write("a", "2")
    assert files.read("a") == "2"


DYING = """
    import os, sys
    from handrail import DirectoryFilesystem
    from handrail.journal.records import CallKey
    from handrail.resources.directory.disk import Disk
    class Dying(Disk):
        def exchange(self, source, name, target, other):
            super().exchange(source, name, target, other)
            os._exit(1)
    files = DirectoryFilesystem(sys.argv[1], disk=Dying())
    if sys.argv[2] == "undo":
        files.undo("call")
    fork = files.fork("call")
    fork.write("a", "2")
    fork.write("b", "2")
    fork.prepare()
    fork.stage(CallKey("call", journal=sys.argv[2]))
    fork.apply()
"""


@pytest.mark.once
@pytest.mark.parametrize("journal", ["", "recorded"])
def test_nobody_builds_on_half_a_commit(folders: Folders, journal: str):
    """If a process is killed between two renames, the next commit, in another process, first completes the interrupted one."""
    files = folders({"a": "1", "b": "1"})
    files.write("c", "1")
    subprocess.run([sys.executable, "-c", textwrap.dedent(DYING), str(files.root), journal], check=False)
    assert sorted(tree(files).values(), key=str) == ["1", "1", "2"]
    files.write("c", "2")
    assert tree(files) == {"a": "2", "b": "2", "c": "2"}
    assert files._store.area.table._renaming is None


# --- results of calls after failures, and a shared history ---------------------------------------------


class Failing(Disk):
    """A disk on which the operations that `fails` selects report an error."""

    def __init__(self) -> None:
        self.fails: Callable[[str, tuple[Any, ...]], bool] = lambda name, args: False

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(found) or name == "fails":
            return found

        def maybe(*args: Any) -> Any:
            if self.fails(name, args):
                raise OSError(28, "No space left on device")
            return found(*args)

        return maybe


@tool(effect="staged", description="Write a file.")
async def put(path: str, context: ToolContext) -> None:
    context.filesystem.write(path, "ours")


@pytest.mark.parametrize("recorded", [False, True])
async def test_a_call_whose_files_are_written_succeeds(folders: Folders, recorded: bool):
    """If the files that a call replaced can't be moved to the history, the call still succeeds. They are moved there later."""
    disk = Failing()
    files = folders({"a": "1"}, disk=disk)
    rig = Rig([put], files=files, journal=MemoryJournal() if recorded else None)
    disk.fails = lambda name, args: name == "retire"
    assert (await rig.call("put", path="a")).success
    assert files.read("a") == "ours"
    assert not list(files.staging.glob("done/*"))
    disk.fails = lambda name, args: False
    assert (await rig.call("put", path="b")).success
    assert len(list(files.staging.glob("done/*"))) == 2


def test_what_is_not_in_the_history_yet_is_put_there_at_the_end(folders: Folders):
    """A commit that could not be moved to the history is moved there by the time the next process opens the folder."""
    disk = Failing()
    files = folders({"a": "1"}, disk=disk)
    disk.fails = lambda name, args: name == "retire"
    fork = files.fork("call")
    fork.write("a", "2")
    fork.prepare()
    fork.stage(CallKey("call"))
    fork.apply()
    fork.applied()
    disk.fails = lambda name, args: False
    files.close()
    again = DirectoryFilesystem(files.root)
    assert again.undo("call") == ("a",)
    assert again.read("a") == "1"
    again.close()


def test_a_path_that_can_not_be_restored_is_named(folders: Folders):
    """If the disk fails during the renames and their reversal, the error names the changed paths, and undo restores them."""
    disk = Failing()
    files = folders({"a": "1", "b": "1", "c": "1"}, disk=disk)
    fork = files.fork("call")
    for name in "abc":
        fork.write(name, "2")
    fork.prepare()
    fork.stage(CallKey("call"))
    seen: list[str] = []
    disk.fails = lambda name, args: name == "exchange" and (seen.append(args[3]) or len(seen) > 2)
    with pytest.raises(FileError, match=r"could not be restored in a, b\. Undo this call"):
        fork.apply()
    disk.fails = lambda name, args: False
    fork.drop()
    assert tree(files) == {"a": "2", "b": "2", "c": "1"}
    assert files.undo("call") == ("a", "b")
    assert tree(files) == {"a": "1", "b": "1", "c": "1"}


def test_a_deleted_file_that_can_not_be_restored_is_kept(folders: Folders):
    """If the disk fails during the renames and a deleted file can't be put back, the file is kept, and undo restores it."""
    disk = Failing()
    files = folders({"a": "precious", "b": "1"}, disk=disk)
    fork = files.fork("call")
    fork.delete("a")
    fork.write("b", "2")
    fork.prepare()
    fork.stage(CallKey("call"))
    disk.fails = lambda name, args: name == "exchange" or (name == "place" and args[3] == "a")
    with pytest.raises(FileError, match=r"could not be restored in a\. Undo this call"):
        fork.apply()
    disk.fails = lambda name, args: False
    fork.drop()
    assert tree(files) == {"b": "1"}
    assert files.undo("call") == ("a",)
    assert tree(files) == {"a": "precious", "b": "1"}


def test_a_file_that_somebody_else_deletes_too_is_a_conflict(folders: Folders):
    """If somebody else has already deleted a file that a call deletes, nothing is applied, and the call gets a conflict."""
    files = folders({"a": "1", "b": "1"})
    fork = files.fork("call")
    fork.delete("a")
    fork.delete("b")
    fork.prepare()
    fork.stage(CallKey("call"))
    (files.root / "b").unlink()
    with pytest.raises(Conflict):
        fork.apply()
    fork.drop()
    assert tree(files) == {"a": "1"}


def test_two_processes_share_one_history(folders: Folders):
    """Two filesystems can add commits to the same history and remove old ones from it without errors."""
    one = folders({"a": "1"}, keep_calls=2)
    two = DirectoryFilesystem(one.root, keep_calls=2)
    for number in range(6):
        for files in (one, two):
            fork = files.fork("call")
            fork.write("a", f"{number} {id(files)}")
            fork.prepare()
            fork.stage(CallKey(f"call {number} {files is one}"))
            fork.apply()
            fork.applied()
    assert len(list(one.staging.glob("done/*"))) == 2
    assert one.undo("call 5 False") == ("a",)
    assert two.undo("call 5 True") == ("a",)
    two.close()


UNTOLD = """
import asyncio, os, sys
from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
from handrail.resources.directory.disk import Disk

@tool(effect="staged")
async def write(context: ToolContext) -> None:
    "Write."
    context.filesystem.write("a", "2")

class Dying(Disk):
    def exchange(self, *paths):
        os.kill(os.getpid(), 9)

async def main(root, path, work, told):
    files = DirectoryFilesystem(root, disk=Dying() if work == "begins" else Disk())
    journal = SqliteJournal(path)
    applied = journal.calls.applied

    async def die(unit):
        if told == "told":
            await applied(unit)
        os.kill(os.getpid(), 9)

    journal.calls.applied = die
    if work == "recovers":
        await files.recover(journal)
    else:
        await open_gate([write], filesystem=files, journal=journal).invoke("write", {})

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.once
@pytest.mark.parametrize(
    "deaths",
    [
        ["writes untold"],
        ["writes told"],
        ["writes untold", "recovers untold"],
        ["writes untold", "recovers told"],
    ],
)
async def test_an_applied_commit_is_known_however_many_follow(
    folders: Folders, tmp_path: Path, deaths: list[str]
):
    """A commit is still known as applied after more commits than the history keeps.

    Its process dies just before or just after the journal is told that the commit is applied. A process that
    recovers the commit may die at the same points.
    """
    files, path = folders({"a": "1"}, keep_calls=2), tmp_path / "runs.db"
    for death in deaths:
        ran = [sys.executable, "-c", UNTOLD, str(files.root), str(path), *death.split()]
        assert subprocess.run(ran, env=importing_support()).returncode == -9
        assert (files.root / "a").read_text() == "2"
    for number in range(4):
        files.write("a", str(number))

    journal = SqliteJournal(path)
    try:
        recovered = await files.recover(journal)
        is_told = deaths[-1].endswith(" told")
        assert (len(recovered.finished), recovered.dropped, recovered.unapplied) == (not is_told, (), ())
        assert not await journal.calls.unapplied()
    finally:
        journal.close()
    assert files.read("a") == "3"
    assert [path.name for path in files.staging.glob("at-work/*")] == [files._store.area.mine.name]


@pytest.mark.once
@pytest.mark.parametrize("work", ["writes", "begins"])
def test_a_process_that_dies_during_a_recovery_loses_nothing(folders: Folders, tmp_path: Path, work: str):
    """If a process records a commit and dies while another one recovers the folder, the next recovery completes the commit."""
    files, path = folders({"a": "1"}, keep_calls=2), tmp_path / "runs.db"
    die = [sys.executable, "-c", UNTOLD, str(files.root), str(path), work, "untold"]

    async def recover(first: bool) -> None:
        journal: Any = SqliteJournal(path)
        listed = journal.calls.unapplied

        async def unapplied() -> Any:
            found = await listed()
            journal.calls.unapplied = listed
            assert (await asyncio.to_thread(subprocess.run, die, env=importing_support())).returncode == -9
            return found

        if first:
            journal.calls.unapplied = unapplied
        try:
            recovered = await files.recover(journal)
            assert (len(recovered.finished), recovered.dropped, recovered.unapplied) == (not first, (), ())
        finally:
            journal.close()

    asyncio.run(recover(first=True))
    for number in range(4):
        files.write("b", str(number))
    asyncio.run(recover(first=False))
    assert tree(files) == {"a": "2", "b": "3"}


def test_a_commit_that_is_pruned_meanwhile_is_no_trouble(folders: Folders):
    """A call succeeds even if another process removes an old commit from the history just before the call does."""

    class Pruned(Disk):
        def retire(self, path: Path, new_path: Path) -> None:
            if path.parent.name == "done":
                shutil.rmtree(path)
            super().retire(path, new_path)

    files = folders({"a": "1"}, keep_calls=1, disk=Pruned())
    for number in range(3):
        files.write("a", str(number))
    assert files.read("a") == "2"


# --- the staging folder ---------------------------------------------------------------------------------


def test_a_starting_process_keeps_its_folder(folders: Folders, monkeypatch: pytest.MonkeyPatch):
    """If a starting process's folder is removed before it is locked, the process creates a new one."""
    files = folders({"a": "1"})
    flock, swept = fcntl.flock, [0]

    def sweep_first(fd: int, how: int) -> None:
        if swept[0] < 3:
            swept[0] += 1
            shutil.rmtree(os.readlink(f"/proc/self/fd/{fd}"))
        flock(fd, how)

    monkeypatch.setattr(area.fcntl, "flock", sweep_first)
    files.write("a", "2")
    assert (files.read("a"), swept) == ("2", [3])
    assert [path.name for path in files.staging.glob("at-work/*")] == [files._store.area.mine.name]


@pytest.mark.parametrize("journal", ["", "recorded"])
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("what", ["", "at-work", "done", "at-work/*"])
def test_a_deleted_staging_folder_is_made_again(folders: Folders, what: str, synced: bool, journal: str):
    """If somebody deletes the staging folder or a part of it, a prepared call creates it again and succeeds."""
    files = folders({"a": "1"})
    for number in range(3):
        fork = files.fork("call")
        fork.write("a", str(number))
        fork.prepare()
        for path in files.staging.parent.glob(f"{files.staging.name}/{what}".rstrip("/")):
            shutil.rmtree(path)
        fork.stage(CallKey("call", journal=journal), synced=synced)
        fork.apply(synced=synced)
        fork.applied()
        assert files.read("a") == str(number)
    assert files.undo("call", journal=journal) == ("a",)
    assert files.read("a") == "1"


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("when", ["staged", "applied"])
async def test_a_staging_folder_deleted_in_between(folders: Folders, when: str, recorded: bool):
    """If the staging folder is deleted after the files are staged, nothing is changed, and the call's result says why.

    If it is deleted after the renames, the call succeeds.
    """

    class Deleting(Disk):
        def write(self, path: Path, data: bytes, facts: Facts | None = None) -> None:
            super().write(path, data, facts)
            if when == "staged" and path.name == "manifest" and deleted:
                deleted.pop()
                shutil.rmtree(files.staging)

        def exchange(self, source: int, name: str, target: int, other: str) -> None:
            super().exchange(source, name, target, other)
            if when == "applied" and deleted:
                deleted.pop()
                shutil.rmtree(files.staging)

    deleted = [1]
    files = folders({"a": "1"}, disk=Deleting())
    rig = Rig([put], files=files, journal=MemoryJournal() if recorded else None)
    result = await rig.call("put", path="a")
    if when == "staged":
        assert "the staged changes were deleted" in result.message
        assert files.read("a") == "1"
    else:
        assert result.success
        assert files.read("a") == "ours"
    assert (await rig.call("put", path="b")).success


@pytest.mark.once
def test_a_forked_process_has_a_folder_of_its_own(tmp_path: Path):
    """Processes that are forked after the first write can commit at the same time as their parent."""
    fill(tmp_path, {"root/a": "1"})
    script = textwrap.dedent("""
        import os, sys
        from handrail import DirectoryFilesystem
        files = DirectoryFilesystem(sys.argv[1])
        files.write("a", "2")
        for number in range(3):
            if os.fork() == 0:
                for each in range(5):
                    files.write(f"c{number}", str(each))
                files.close()
                os._exit(0)
        for each in range(5):
            files.write("b", str(each))
        assert [os.wait()[1] for _ in range(3)] == [0, 0, 0]
        files.write("a", "3")
        files.close()
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "root")], check=True)
    files = DirectoryFilesystem(tmp_path / "root")
    assert tree(files) == {"a": "3", "b": "4", "c0": "4", "c1": "4", "c2": "4"}
    assert list(files.staging.glob("at-work/*")) == []
    files.close()


def test_recovery_leaves_the_commits_of_live_processes_alone(folders: Folders, tmp_path: Path):
    """A recovery in one process does not touch a commit that a live process has recorded and is about to apply."""

    async def main() -> None:
        files = folders({"a": "1"})
        journal = SqliteJournal(tmp_path / "journal.db")
        second = DirectoryFilesystem(files.root)
        beside = SqliteJournal(tmp_path / "journal.db")

        class Recovering(Disk):
            def exchange(self, source: int, name: str, target: int, other: str) -> None:
                recovered.append(asyncio.run(_recover()))
                super().exchange(source, name, target, other)

        async def _recover() -> Any:
            return await second.recover(beside)

        recovered: list[Any] = []
        files._store.area.disk = files._store.area.table._disk = Recovering()
        rig = Rig([put], files=files, journal=journal)
        assert (await rig.call("put", path="a")).success
        assert [(each.finished, each.left) for each in recovered] == [((), ())]
        assert second.read("a") == "ours"
        assert await journal.calls.unapplied() == ()
        journal.close()
        beside.close()
        second.close()

    asyncio.run(main())


def test_commits_of_two_filesystems_agree(folders: Folders):
    """If two filesystems prepare commits from the same version of a file, the second one to apply its commit gets a conflict."""
    one = folders({"a": "1", "b": "1"})
    two = DirectoryFilesystem(one.root)
    forks = [files.fork("call") for files in (one, two)]
    for fork in forks:
        fork.write("a", fork.read("a") + "2")
        fork.prepare()
    forks[0].apply()
    with pytest.raises(Conflict, match="a"):
        forks[1].apply()
    fork = two.fork("again")
    fork.append("a", "3")
    commit(fork)
    assert two.read("a") == "123"
    two.close()
