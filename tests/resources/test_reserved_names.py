"""The names `.handrail` and `.<name>.handrail` are reserved: no tool or command can see, change or delete files under them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem
from handrail.errors import FileError, PathRefused
from handrail.journal.records import CallKey
from handrail.resources.directory.commit import Commit, Manifest, Step, shown_version
from handrail.resources.directory.content import version_of
from handrail.resources.directory.disk import DISK
from handrail.resources.mount import ReservedNames
from handrail.resources.shell import probe
from support.filesystems import Folders, commit, fill
from support.folders import Folder, anything, processes_with

KEPT = {".handrail/runs.db": "rows", ".handrail/key": "secret", "sub/.handrail/key": "secret", "sub/a": "a"}


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip("; ".join(support.missing))
    return request.param


def kept(root: Path) -> dict[str, str]:
    """Return the content of each file in a reserved folder, keyed by path."""
    return {
        str(path.relative_to(root)): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and ".handrail" in str(path.relative_to(root))
    }


# --- tools ---------------------------------------------------------------------------------------------

TRIES: list[Any] = [
    lambda f: f.read(".handrail/key"),
    lambda f: f.read("./.handrail//key"),
    lambda f: f.read("sub/.handrail/key"),
    lambda f: f.stat(".handrail"),
    lambda f: f.list(".handrail"),
    lambda f: f.exists(".handrail/key"),
    lambda f: f.write(".handrail/runs.db", "forged"),
    lambda f: f.write(".handrail/runs.db-wal", "forged"),
    lambda f: f.append(".handrail/key", "x"),
    lambda f: f.edit(".handrail/key", "secret", "x"),
    lambda f: f.mkdir("new/.handrail"),
    lambda f: f.delete(".handrail", recursive=True),
    lambda f: f.delete("sub/.handrail/key"),
    lambda f: f.move(".handrail", "mine"),
    lambda f: f.move("sub/a", ".handrail/a"),
    lambda f: f.write(".work.handrail/at-work/x", "forged"),
    lambda f: f.read("link/key"),
    lambda f: f.write("link/key", "x"),
]


@pytest.mark.parametrize("attempt", TRIES)
@pytest.mark.parametrize("direct", [True, False])
def test_no_tool_reaches_it(folders: Folders, attempt: Any, direct: bool):
    """Every operation refuses a reserved name, at any depth and through a link, with an error that says why."""
    files = folders(KEPT)
    (files.root / "link").symlink_to(".handrail")
    with pytest.raises(PathRefused, match="reserved for Handrail"):
        attempt(files if direct else files.fork("call"))
    assert kept(files.root) == {path: text for path, text in KEPT.items() if ".handrail" in path}


def test_no_listing_and_no_search_shows_it(folders: Folders):
    """Listings, globs and searches omit reserved names, and a change below a reserved name makes no call stale."""
    files = folders(KEPT)
    for each in (files, files.fork("call")):
        assert [info.path for info in each.list()] == ["sub"]
        assert each.glob("**") == ("sub/a",)
        assert each.glob(".handrail/*") == each.glob("*/.handrail/*") == each.glob("**/")[1:] == ()
        assert each.grep("secret|rows") == ()
    fork = files.fork("call")
    fork.list()
    fill(files.root, {".handrail/runs.db-wal": "new"})
    assert fork.stale() == ()


@pytest.mark.parametrize("verb", ["delete", "move"])
def test_a_folder_around_it_stays(folders: Folders, verb: str):
    """A folder that contains a reserved one can't be deleted or moved, and the error names the reserved folder."""
    files = folders({"sub/deep/.handrail/key": "secret", "sub/a": "a"})
    fork = files.fork("call")
    with pytest.raises(FileError, match=r"sub/deep/\.handrail"):
        fork.delete("sub", recursive=True) if verb == "delete" else fork.move("sub", "other")
    assert fork.changed == ()


def test_a_forged_manifest_does_not_reach_it(folders: Folders, tmp_path: Path):
    """A commit does not carry out a step that names a reserved path, and returns the path as one whose step failed."""
    files = folders(KEPT)
    area = files._store.area
    assert area.mine.is_dir()  # the staging folder must exist
    slots = tmp_path / "slots"
    fill(slots, {"1": "forged"})
    after = shown_version(version_of(os.lstat(slots / "1")))
    for step in (
        Step(do="put", path=".handrail/new", slot="1", after=after),
        Step(do="take", path=".handrail", slot="2", before="x"),
    ):
        manifest = Manifest(call_id="c", root=str(files.root), staging="", folder="", steps=(step,))
        left = Commit(files._store.jail, DISK, slots, manifest, area.table).finish()
        assert left == (step.path,)
    assert "new" not in os.listdir(files.root / ".handrail")


# --- commands ------------------------------------------------------------------------------------------


def test_no_command_sees_it(tmp_path: Path, backend: str):
    """A command does not see the reserved folders in the root or one level below it."""
    made = Folder(tmp_path)
    for path, content in KEPT.items():
        made.add(path, content)
    finished = made.sh(anything(backend), "ls -A . sub; cat .handrail/* sub/.handrail/*; find . -name key")
    assert "secret" not in finished.output
    assert "rows" not in finished.output
    assert not [line for line in finished.output.splitlines() if line.endswith(".handrail")]


DEEP = (
    "a/b/.handrail/key",
    "a/b/c/d/e/.handrail/key",
    "a/x/y/.staged.handrail/key",
    "a/b/.handrail/.handrail/key",
)


def test_no_command_sees_it_at_any_depth(tmp_path: Path, backend: str):
    """A command sees no reserved name, however deep it is, and sees everything else in the folders around it."""
    made = Folder(tmp_path)
    made.add("a/b/own", "own")
    (made.root / "a/b").chmod(0o750)
    for path in DEEP:
        made.add(path, "secret")
    script = "stat -c %a a/b; cat a/b/own; find . -name '*.handrail'; cat " + " ".join(DEEP)
    finished = made.sh(anything(backend), script)
    assert finished.output.startswith("750\nown")
    assert "secret" not in finished.output
    assert not [line for line in finished.output.splitlines() if line.endswith(".handrail")]
    made.add("a/new/f/.handrail/key", "secret")  # an earlier command has already seen `a`
    made.add("a/b/c/.handrail/key", "secret")
    finished = made.sh(anything(backend), "cat a/new/f/.handrail/key a/b/c/.handrail/key; find . -name key")
    assert "secret" not in finished.output
    assert "/key\n" not in finished.output.replace(": No such file", "")


def test_deep_ones_survive_commands(folders: Folders, backend: str):
    """A command can't change or delete a reserved folder, however deep it is, or delete a folder around it."""
    files = folders(dict.fromkeys(DEEP, "secret") | {"a/b/own": "own"})
    fork = files.fork("call")
    script = "mkdir -p a/b/.handrail; echo forged > a/b/.handrail/key; rm -rf a/x/y/.staged.handrail; echo b > a/b/own"
    asyncio.run(anything(backend).run_on(fork, ["sh", "-c", script]))
    assert fork.changed == ("a/b/own",)
    commit(fork)
    assert kept(files.root) == dict.fromkeys(DEEP, "secret")
    fork = files.fork("call")
    with pytest.raises(FileError, match="handrail"):
        asyncio.run(anything(backend).run_on(fork, ["sh", "-c", "rm -rf a"]))
    fork.drop()
    assert kept(files.root) == dict.fromkeys(DEEP, "secret")


def test_unchanged_folders_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A repeated search for reserved names reads only folders that have changed since, or shortly before, the last read."""
    fill(tmp_path, {"a/b/c/.handrail/key": "", "a/d/e": "", "f/g": ""})
    now = os.lstat(tmp_path).st_ctime_ns + 60 * 10**9
    names, read, scan = ReservedNames(tmp_path), list[str](), os.scandir

    def scandir(path: str) -> Any:
        read.append(os.path.relpath(path, tmp_path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert names.find(now - 60 * 10**9) == ["a/b/c/.handrail"]
    assert sorted(read) == [".", "a", "a/b", "a/b/c", "a/d", "f"]
    assert names.find(now) == ["a/b/c/.handrail"]
    assert len(read) == 12  # the folders had changed too recently to rely on their times
    fill(tmp_path, {"a/d/.x.handrail/key": ""})
    (tmp_path / "f" / "g").unlink()
    (tmp_path / "f").rmdir()
    assert sorted(names.find(now)) == ["a/b/c/.handrail", "a/d/.x.handrail"]
    assert sorted(read[12:]) == [".", "a/d"]


@pytest.mark.parametrize("existed", [True, False])
def test_no_command_sees_what_is_made_there_while_it_runs(tmp_path: Path, existed: bool):
    """Files that a journal creates in a reserved folder while a command runs, such as `runs.db-wal`, stay hidden."""
    if not probe(tmp_path).overlay:
        pytest.skip("a copy never shows later files")
    made = Folder(tmp_path)
    made.add("wait/here")
    if existed:
        made.add(".handrail/runs.db")
    script = f"""
        : {tmp_path.name}; until ls wait | grep -q now && grep -q now wait/now; do sleep 0.01; done
        cat wait/now; ls -A .; cat .handrail/runs.db-wal
    """

    def write_later() -> None:
        while not processes_with(f": {tmp_path.name}"):
            time.sleep(0.01)
        made.add(".handrail/runs.db-wal", "secret")
        made.add("wait/now", "now")

    writer = threading.Thread(target=write_later)
    writer.start()
    finished = made.sh(anything("overlay"), script)
    writer.join()
    assert finished.output.splitlines()[0].startswith("now")  # files created elsewhere meanwhile are visible
    assert "secret" not in finished.output
    assert ".handrail\n" not in finished.output


EVIL = """
    mkdir -p .handrail sub/.handrail x/y/.handrail
    echo forged > .handrail/runs.db; echo forged > sub/.handrail/key; echo forged > x/y/.handrail/key
    echo fine > sub/a
"""


def test_nothing_a_command_writes_there_is_kept(folders: Folders, backend: str):
    """A command's writes below a reserved name are discarded: they appear in no diff and no commit."""
    files = folders(KEPT)
    fork = files.fork("call")
    asyncio.run(anything(backend).run_on(fork, ["sh", "-c", EVIL]))
    assert ".handrail" not in fork.diff()
    assert fork.changed == ("sub/a", "x/", "x/y/")
    fork.prepare()
    fork.stage(CallKey("c"))
    fork.apply()
    fork.applied()
    assert kept(files.root) == {path: text for path, text in KEPT.items() if ".handrail" in path}
    files.undo("c")
    assert kept(files.root) == {path: text for path, text in KEPT.items() if ".handrail" in path}


def test_a_command_does_not_delete_it(folders: Folders, backend: str):
    """A command's `rm -rf` deletes no reserved folder. Deleting a folder that contains one is refused."""
    files = folders(KEPT)
    fork = files.fork("call")
    asyncio.run(anything(backend).run_on(fork, ["sh", "-c", "rm -rf .handrail; rm -rf sub/* sub/.??*"]))
    assert fork.changed == ("sub/a",)
    commit(fork)
    assert kept(files.root) == {path: text for path, text in KEPT.items() if ".handrail" in path}
    fork = files.fork("call")
    with pytest.raises(FileError, match=r"sub/\.handrail"):
        asyncio.run(anything(backend).run_on(fork, ["sh", "-c", "rm -rf sub"]))
    fork.drop()
    assert DirectoryFilesystem(files.root).exists("sub")
