"""Leftovers of commands and of dead processes: very deep trees, setuid programs and staged files."""

import asyncio
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem
from handrail.errors import FileError
from handrail.journal.sqlite import MemoryJournal
from handrail.resources.directory.disk import Disk
from handrail.resources.mount import remove_tree
from handrail.resources.shell import probe
from support.filesystems import Folders, commit
from support.folders import PYTHON, anything

NEST = """
import os
import re
for n in range(400):
    os.mkdir("n" * 100); open("file", "w").close(); os.chdir("n" * 100)
os.chdir(PLACE); os.chmod("n" * 100, 0)
"""


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip("; ".join(support.missing))
    return request.param


def nest(folder: Path, name: str = "n" * 100, depth: int = 400) -> None:
    """Create a tree whose paths are up to ten times as long as the system allows, with an unreadable top folder."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        os.close(here)
        here = inner
    os.close(here)
    (folder / name).chmod(0)


# --- deeply nested folders, and leftovers that can't be removed ----------------------------------------


def test_a_tree_past_the_longest_path_is_removed(tmp_path: Path):
    """A tree of any depth is removed, even if a folder is unreadable. Links are not followed."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    tree = tmp_path / "tree"
    (tree / "1" / "2").mkdir(parents=True)
    (tree / "2" / "1" / "1").mkdir(parents=True)
    (tree / "2" / "link").symlink_to(kept)
    nest(tree / "1" / "2")
    nest(tree / "1", "n", 3000)  # deeper than Python's recursion limit
    remove_tree(tree)
    assert not tree.exists()
    assert (kept / "file").exists()
    remove_tree(tree)


def test_a_command_that_nests_does_not_lock_the_folder(folders: Folders, backend: str):
    """A command that nests folders too deeply fails with an explanation, and the folder stays usable."""
    files = folders({"a": "1"})
    fork = files.fork("call")
    code = NEST.replace("PLACE", repr(str(files.root)))
    # Root can read the folder whose permissions were removed, and so reaches the deep ones.
    said = "too deeply" if os.geteuid() == 0 else "removed the read permission"
    with pytest.raises(FileError, match=said):
        asyncio.run(anything(backend).run_on(fork, [PYTHON, "-c", code]))
    fork.drop()
    files.write("a", "2")
    files.close()
    again = DirectoryFilesystem(files.root)
    again.write("a", "3")
    assert again.glob("**") == ("a",)
    assert len(list(again.staging.glob("at-work/*"))) == 1
    again.close()


def test_a_nested_leftover_is_removed_by_the_next_process(folders: Folders):
    """The next process removes a dead process's leftovers, however deep they are."""
    files = folders({"a": "1"})
    files.write("a", "2")
    files.close()
    dead = files.staging / "at-work" / "dead" / "upper0"
    dead.mkdir(parents=True)
    nest(dead)
    again = DirectoryFilesystem(files.root)
    again.write("a", "3")
    assert not dead.exists()
    again.close()


class Stuck(Disk):
    """A disk on which one leftover can't be removed."""

    def forget(self, path: Path) -> None:
        if path.name == "bad":
            raise PermissionError(1, "Operation not permitted", str(path))
        super().forget(path)


@pytest.mark.parametrize("recovered", [True, False])
def test_one_bad_leftover_stops_nothing(folders: Folders, recovered: bool, caplog: pytest.LogCaptureFixture):
    """A leftover that can't be removed is logged and left in place. Others are removed, and the folder stays usable."""
    files = folders({"a": "1"})
    files.write("a", "2")
    files.close()
    for name in ("bad", "good"):
        (files.staging / "at-work" / name / "upper0").mkdir(parents=True)
    again = DirectoryFilesystem(files.root, disk=Stuck())
    if recovered:
        asyncio.run(_recover(again))
    again.write("a", "3")
    assert again.read("a") == "3"
    left = [path.name for path in (files.staging / "at-work").iterdir()]
    assert "bad" in left
    assert "good" not in left
    assert "was not cleaned up" in caplog.text
    again.close()


async def _recover(files: DirectoryFilesystem) -> Any:
    return await files.recover(MemoryJournal())


# --- setuid and setgid bits ----------------------------------------------------------------------------


def test_no_command_leaves_a_program_with_more_rights(folders: Folders, backend: str):
    """Setuid and setgid bits that a command sets are left out of the diff and never reach the folder."""
    files = folders({"old": "1", "tool": "1", "d/x": "1", "shared/x": "1"})
    (files.root / "shared").chmod(0o2775)
    fork = files.fork("call")
    script = (
        "cp /bin/true new; chmod 6755 new old; mkdir m; chmod 2755 m d; echo 2 > shared/x; chmod 4711 tool"
    )
    asyncio.run(anything(backend).run_on(fork, ["sh", "-c", script]))
    assert not re.search(r"mode [246]\d{3}", fork.diff())
    commit(fork)
    modes = {
        path: stat.S_IMODE((files.root / path).stat().st_mode) for path in ("new", "old", "tool", "m", "d")
    }
    assert modes == {"new": 0o755, "old": 0o755, "tool": 0o711, "m": 0o755, "d": 0o755}
    assert stat.S_IMODE((files.root / "shared").stat().st_mode) == 0o2775


def test_new_content_gets_no_old_rights(folders: Folders):
    """A program that a tool rewrites loses its setuid bit."""
    files = folders({"tool": "1"})
    (files.root / "tool").chmod(0o4755)
    files.write("tool", "2")
    assert stat.S_IMODE((files.root / "tool").stat().st_mode) == 0o755
