"""The history of commits: the sizes that it notes for a commit, and the folders that it reuses."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem
from handrail.journal.records import CallKey
from handrail.resources.directory.disk import Disk
from support.filesystems import Folders, aside, tree


def made(files: DirectoryFilesystem, call: str, *does: tuple[Any, ...]) -> None:
    """Call methods of a new fork, each given as its name and its arguments, and commit the fork as `call`."""
    fork = files.fork(call)
    for name, *arguments in does:
        getattr(fork, name)(*arguments, **({"recursive": True} if name == "delete" else {}))
    fork.prepare()
    fork.stage(CallKey(call))
    fork.apply()
    fork.applied()


def held(folder: Path) -> tuple[int, int]:
    """Return how many bytes a folder's files occupy: those with one hard link, and those with several."""
    found = [os.lstat(path) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    sizes = [(status.st_nlink > 1, min(status.st_size, status.st_blocks * 512)) for status in found]
    return sum(size for shared, size in sizes if not shared), sum(size for shared, size in sizes if shared)


CALLS: dict[str, list[tuple[Any, ...]]] = {
    "a file is replaced": [("write", "a", "new")],
    "two files are replaced": [("write", "a", "new"), ("write", "d/b", "new")],
    "a file with two names is replaced": [("write", "linked", "new")],
    "a sparse file is replaced": [("write", "sparse", "new")],
    "a file is created": [("write", "x/y/z", "new")],
    "a file is deleted": [("delete", "a")],
    "a file is moved": [("move", "a", "moved")],
    "a file is created beside a deleted folder": [("delete", "d"), ("write", "a", "new")],
    "a folder is replaced by a file": [("delete", "d"), ("write", "d", "new")],
}


@pytest.mark.parametrize("case", CALLS)
def test_the_name_of_a_kept_commit_says_what_it_holds(folders: Folders, case: str):
    """The name of a kept commit's folder states the size of its files with one hard link, and of those with several."""
    files = folders({"a": "old a", "d/b": "old b" * 1000, "linked": "twice"})
    os.link(files.root / "linked", files.root / "other")
    with (files.root / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    made(files, "call", *CALLS[case])
    (kept,) = files.staging.glob("done/*")
    own, shared = kept.name.split("-")[2:]
    assert (int(own), int(shared)) == held(kept)


class Counting(Disk):
    """A disk that counts the folders that it creates."""

    def __init__(self) -> None:
        self.created = 0

    def folder(self, path: Path, mode: int) -> None:
        self.created += 1
        super().folder(path, mode)


def test_a_full_history_creates_no_more_folders(folders: Folders):
    """Once the history is full, the folder of the commit that is dropped from it is used for the next commit."""
    disk = Counting()
    files = folders({"a": "0"}, keep_calls=3, disk=disk)
    for number in range(10):
        made(files, f"call {number}", ("write", "a", str(number)))
    assert disk.created == 4
    assert len(list(files.staging.glob("done/*"))) == 3
    for number in (9, 8, 7):
        assert files.undo(f"call {number}") == ("a",)
    assert tree(files) == {"a": "6"}


@pytest.mark.parametrize("what", ["", "at-work", "at-work/*", "at-work/*/gone*"])
def test_a_folder_to_be_used_again_may_be_deleted(folders: Folders, what: str):
    """If somebody deletes the empty folder that is kept for the next commit, or a folder above it, the commit gets a new one."""
    files = folders({"a": "0"}, keep_calls=1)
    for number in range(3):
        made(files, f"call {number}", ("write", "a", str(number)))
    (spare,) = aside(files)
    assert not list(Path(spare).iterdir())
    for path in files.staging.parent.glob(f"{files.staging.name}/{what}".rstrip("/")):
        shutil.rmtree(path)
    made(files, "last", ("write", "a", "last"))
    assert files.undo("last") == ("a",)
    assert tree(files) == {"a": "2"}


def test_a_forked_process_does_not_take_its_parents_folder(folders: Folders):
    """A forked process creates its own folders, so parent and child can both commit."""
    files = folders({"a": "0", "b": "0"}, keep_calls=1)
    for number in range(3):
        made(files, f"call {number}", ("write", "a", str(number)))
    (spare,) = aside(files)
    child = os.fork()
    if not child:
        try:
            made(files, "child", ("write", "b", "child"))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert Path(spare).is_dir()
    made(files, "parent", ("write", "a", "parent"))
    assert tree(files) == {"a": "parent", "b": "child"}


def test_a_forked_process_does_not_take_folders_that_its_parent_has_synced(folders: Folders):
    """A process that is forked during a call makes its own folders for synced commits, although its parent has some ready."""
    files = folders({"a": "0"})

    def begun(call: str) -> Any:
        fork = files.fork(call)
        fork.write("a", call)
        return fork

    def staged(fork: Any) -> str:
        fork.prepare()
        told = fork.stage(CallKey("call", journal="j"), synced=True)
        fork.drop()
        return str(told["folder"]).partition("/")[0]

    ours = staged(begun("first"))
    fork = begun("second")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(write, staged(fork).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    theirs = os.read(read, 1000).decode()
    os.close(read)
    assert staged(fork) == ours
    assert theirs not in ("", ours)
