"""The name `.handrail` is reserved for Handrail: no tool and no command can see, write or delete it."""

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
from handrail.records import CallKey
from handrail.resources.directory.commit import Commit, Manifest, Step, shown_version
from handrail.resources.directory.content import version_of
from handrail.resources.directory.disk import DISK
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
    """Return the content of each file in a reserved folder, by path."""
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
    """Every operation refuses a reserved name, at any depth and through a link, and says why."""
    files = folders(KEPT)
    (files.root / "link").symlink_to(".handrail")
    with pytest.raises(PathRefused, match="reserved for Handrail"):
        attempt(files if direct else files.fork("call"))
    assert kept(files.root) == {path: text for path, text in KEPT.items() if ".handrail" in path}


def test_no_listing_and_no_search_shows_it(folders: Folders):
    """Listings, globs and searches omit reserved names, and a change below one never makes a call stale."""
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
    """Recovery does not carry out a manifest on disk that names a reserved path."""
    files = folders(KEPT)
    slots = tmp_path / "slots"
    fill(slots, {"1": "forged"})
    after = shown_version(version_of(os.lstat(slots / "1")))
    for step in (
        Step(do="put", path=".handrail/new", slot="1", after=after),
        Step(do="take", path=".handrail", slot="2", before="x"),
    ):
        manifest = Manifest(call_id="c", root=str(files.root), staging="", folder="", steps=(step,))
        left = Commit(files._ground.jail, DISK, slots, manifest).finish()
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
        : {tmp_path.name}; until ls wait | grep -q now; do sleep 0.01; done
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
