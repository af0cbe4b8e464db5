"""Undo never loses data: wherever it fails or is killed, a later undo restores the old files. The history is bounded."""

import os
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem
from handrail.errors import FileError, UndoRefused
from handrail.journal.records import CallKey
from handrail.resources.directory.disk import Disk
from resources.directory.crashing import snapshot
from support.filesystems import Folders, fill

FILES = {"a": "old a", "b": "old b", "gone": "old gone", "from": "moved", "tree/x/y": "y", "tree/z": "z"}


def change(fork: Any) -> None:
    """Rewrite, create, delete and move files, delete a folder and create one."""
    fork.write("a", "new a")
    fork.write("b", "new b")
    fork.write("made/deep", "new")
    fork.delete("gone")
    fork.move("from", "to")
    fork.delete("tree", recursive=True)
    fork.mkdir("empty")


class Dead(BaseException):
    """Raised by a disk operation to simulate the death of the process."""


class Faulty(Disk):
    """A disk whose operation number `at` fails, unless `at` is 0. If `on` is true, all later operations fail too."""

    def __init__(self) -> None:
        self.at, self.on, self.passed = 0, False, 0
        self.error: type[BaseException] = OSError

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name in ("at", "on", "passed", "error"):
            return found

        def maybe(*args: Any) -> Any:
            self.passed += 1
            if self.at and (self.passed == self.at or (self.on and self.passed > self.at)):
                raise self.error(28, "No space left on device")
            return found(*args)

        return maybe


class Scene:
    """A folder with a committed call, on a disk that can be made to fail."""

    def __init__(self, base: Path) -> None:
        fill(base / "root", FILES)
        self.root = base / "root"
        self.before = snapshot(self.root)
        self.disk = Faulty()
        self.files = DirectoryFilesystem(self.root, disk=self.disk)
        fork = self.files.fork("call")
        change(fork)
        fork.prepare()
        fork.stage(CallKey("call"))
        fork.apply()
        fork.applied()
        self.after = snapshot(self.root)
        self.disk.passed = 0

    def fail(self, at: int, how: str) -> None:
        self.disk.at, self.disk.on = at, how != "once"
        self.disk.error = Dead if how == "dead" else OSError


def operations(base: Path) -> int:
    scene = Scene(base)
    scene.files.undo("call")
    assert snapshot(scene.root) == scene.before
    scene.files.close()
    return scene.disk.passed


@pytest.mark.parametrize("how", ["once", "from then on", "dead"])
def test_old_bytes_are_found_after_any_failure_of_an_undo(tmp_path: Path, how: str):
    """Whichever operation of an undo fails, the old files can still be restored, even if the process died.

    If a single operation fails, the undo either completes or changes nothing.
    """
    (tmp_path / "count").mkdir()
    total = operations(tmp_path / "count")
    assert total > 10
    outcomes: set[str] = set()
    for at in range(1, total + 1):
        (tmp_path / str(at)).mkdir()
        scene = Scene(tmp_path / str(at))
        scene.fail(at, how)
        try:
            scene.files.undo("call")
            outcome = "undone"
        except (FileError, UndoRefused, Dead) as error:
            outcome = type(error).__name__
        found = snapshot(scene.root)
        if outcome == "undone":
            assert found == scene.before, at
        elif how == "once":
            assert found == scene.after, at
        if how == "dead":
            scene.files._store.area.abandon()  # the kernel releases the locks of a dead process
        else:
            scene.files.close()
        again = DirectoryFilesystem(scene.root)
        try:
            again.undo("call")
            outcomes.add("undone later")
        except UndoRefused:
            outcomes.add("undone before")
        assert snapshot(scene.root) == scene.before, at
        again.close()
    assert outcomes == {"undone later", "undone before"}


@pytest.mark.parametrize("at", range(1, 5))
def test_an_undo_on_a_full_disk_can_be_repeated(tmp_path: Path, at: int):
    """An undo that fails because the disk is full says so and changes nothing. It can be repeated once space is free again."""
    scene = Scene(tmp_path)
    scene.fail(at, "from then on")
    with pytest.raises(FileError, match="the disk is full"):
        scene.files.undo("call")
    assert snapshot(scene.root) == scene.after
    scene.disk.at = 0
    assert "b" in scene.files.undo("call")
    assert snapshot(scene.root) == scene.before
    scene.files.close()


def kept(files: DirectoryFilesystem) -> list[str]:
    return sorted(path.name for path in files.staging.glob("done/*") if path.is_dir())


def made(files: DirectoryFilesystem, call_id: str, verb: str, *args: Any) -> None:
    """Commit one change as a call."""
    fork = files.fork("call")
    getattr(fork, verb)(*args)
    fork.prepare()
    fork.stage(CallKey(call_id))
    fork.apply()
    fork.applied()


def test_a_moved_file_takes_no_room_in_the_history(folders: Folders):
    """Moving a large file adds no bytes to the history, so the move and all calls before it can be undone."""
    files = folders({"a": "1"}, keep_bytes=20_000)
    for name, holes in (("sparse", True), ("full", False)):
        with (files.root / name).open("wb") as file:
            file.truncate(2 << 30) if holes else file.write(b"x" * 1_000_000)
    made(files, "first", "write", "a", "2")
    made(files, "sparse", "move", "sparse", "sparse2")
    made(files, "full", "move", "full", "full2")
    made(files, "last", "write", "a", "3")
    for call in ("last", "full", "sparse", "first"):
        assert files.undo(call)
    assert (files.root / "sparse").stat().st_size == 2 << 30
    assert (files.root / "full").stat().st_size == 1_000_000
    assert files.read("a") == "1"


def test_a_file_that_was_moved_and_then_deleted_takes_room(folders: Folders):
    """Once a moved file is deleted, only the history still holds its bytes, so they count towards the limit."""
    files = folders({"a": "1", "large": "x" * 100_000}, keep_bytes=20_000)
    made(files, "first", "write", "a", "2")
    made(files, "move", "move", "large", "large2")
    made(files, "delete", "delete", "large2")
    held = {os.lstat(path).st_ino: os.lstat(path).st_size for path in files.staging.glob("done/*/*")}
    assert sum(held.values()) <= 20_000
    assert files.undo("first") == ("a",)


def test_one_large_call_does_not_displace_all_others(folders: Folders):
    """A call whose replaced files take more than half of `keep_bytes` is dropped before the small calls around it."""
    files = folders({"a": "1", "large": "x" * 15_000, "larger": "x" * 50_000}, keep_bytes=20_000)
    for number in range(6):
        made(files, f"small {number}", "write", "a", str(number) * 1000)
    made(files, "large", "delete", "large")
    made(files, "larger", "delete", "larger")
    made(files, "small 6", "write", "a", "6")
    for call in ("large", "larger"):
        with pytest.raises(UndoRefused, match=r"too large to keep, .* 20000 bytes"):
            files.undo(call)
    for number in reversed(range(7)):
        assert files.undo(f"small {number}") == ("a",)
    assert files.read("a") == "1"


def test_too_old_is_said_only_when_it_is(folders: Folders):
    """A refused undo says that the call may be too old only if the history is full."""
    files = folders({"a": "1"}, keep_calls=3)
    made(files, "first", "write", "a", "2")
    with pytest.raises(UndoRefused, match="it changed no files here, or it was undone already"):
        files.undo("unknown")
    files.undo("first")
    with pytest.raises(UndoRefused, match="undone already"):
        files.undo("first")
    for number in range(4):
        made(files, f"call {number}", "write", "a", f"{number} {number}")
    with pytest.raises(UndoRefused, match="too old: only the last 3 calls are kept"):
        files.undo("call 0")
    assert len(kept(files)) == 3


def test_a_call_of_a_different_process_can_be_undone(folders: Folders):
    """Undo finds the calls that other processes have made since this process last looked at the history."""
    files = folders({"a": "1"})
    made(files, "ours", "write", "b", "1")
    other = DirectoryFilesystem(files.root)
    made(other, "theirs", "write", "a", "2")
    assert files.undo("theirs") == ("a",)
    assert files.read("a") == "1"
    other.close()
