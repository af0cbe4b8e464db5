"""Disks that are full or can't be synced: what a call replaced is never lost."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    DirectoryFilesystem,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import FileError, FileLimitReached
from handrail.journal.records import CallKey
from handrail.messages import ToolMessage
from handrail.resources.directory.disk import Disk
from resources.directory.crashing import snapshot
from resources.directory.full_disk import FILES, change
from support import TESTS
from support.filesystems import fill

MOUNTED = 'mount -t tmpfs -o size=2m,nr_inodes=400 none "$1" && exec "$2" -m resources.directory.full_disk "$1" "$3"'
_SYS_ADMIN = 21
"""Number of the capability that a process needs to mount a disk."""


def can_mount() -> bool:
    """Return whether this process has the capability to mount a disk, so that it needs no user namespace for that."""
    status = Path("/proc/self/status").read_text()
    (capabilities,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(capabilities, 16) >> _SYS_ADMIN & 1)


def undo_on_a_full_disk(folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    """Run `resources.directory.full_disk` on a small disk of its own, or on this disk with simulated errors if nothing can be mounted.

    A process that has the capability to mount a disk never falls back to the simulation.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    unshare = ["unshare", "-m"] if can_mount() else ["unshare", "-r", "-m"]
    command = [*unshare, "sh", "-ec", MOUNTED, "sh", str(folder), sys.executable, what]
    if not can_mount():
        probe = [*unshare, "mount", "-t", "tmpfs", "none", str(folder)]
        if subprocess.run(probe, capture_output=True).returncode:
            command = [sys.executable, "-m", "resources.directory.full_disk", str(folder), "imagined"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.once
@pytest.mark.parametrize("what", ["bytes", "names"])
def test_old_bytes_are_found_whenever_the_disk_fills_up_during_an_undo(tmp_path: Path, what: str):
    """If the disk fills up during an undo, at whatever operation, the old files can be restored once there is free space.

    The first undo completes, changes nothing, or reports that files could not be restored.
    This holds whether the disk runs out of bytes or of inodes, and for calls with and without a journal on
    the same disk.
    """
    ran = undo_on_a_full_disk(tmp_path, what)
    kinds = [line.split()[0] for line in ran.stdout.splitlines()]
    assert (ran.returncode, kinds) == (0, ["Direct", "Journaled"]), ran.stdout + ran.stderr


class Failing(Disk):
    """A disk on which every change fails with the error `number`, if there is one. Files can still be removed."""

    number = 0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name in ("number", "forget") or name.startswith("_"):
            return found

        def change(*given: Any) -> Any:
            if self.number:
                raise OSError(self.number, os.strerror(self.number))
            return found(*given)

        return change


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "the disk is read-only"),
        (errno.EIO, "Input/output error"),
    ],
)
async def test_a_call_on_a_disk_that_fails_changes_nothing_and_the_model_is_told(
    tmp_path: Path, number: int, told: str
):
    """If the disk fails, the call fails, and its files stay as they were. The run goes on, and a later call succeeds."""
    disk, root = Failing(), tmp_path / "root"
    fill(root, {"a": "old"})
    seen: list[Any] = []

    @tool(effect="staged")
    async def write(*, context: ToolContext) -> str:
        """Write two files. The disk fails when the first call is committed."""
        disk.number = 0
        seen.append(snapshot(root))
        for path in ("a", "b"):
            context.filesystem.write(path, "new")
        disk.number = number if len(seen) == 1 else 0
        return "written"

    model = ScriptedModel([ToolCall("write"), ToolCall("write"), "done"])
    with (
        contextlib.closing(SqliteJournal(tmp_path / "runs.db")) as journal,
        DirectoryFilesystem(root, disk=disk) as files,
    ):
        adapter = Adapter(model, filesystem=files, journal=journal)
        response = await adapter.evaluate(Prompt("p", "Do.", tools=[write]), "go", run_id="run")
        assert [unit.status for unit in await journal.calls.load("run")] == ["error", "ok"]
    failed, succeeded = (each.text for each in response.messages if isinstance(each, ToolMessage))
    assert told in failed
    assert succeeded == "written"
    assert seen[0] == seen[1]
    assert [(root / path).read_text() for path in ("a", "b")] == ["new", "new"]


def test_what_a_failing_disk_keeps_from_being_removed_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """If the disk fails when what a call has staged is removed, the log names it."""
    disk, root = Failing(), tmp_path / "root"
    fill(root, {"a": "old"})
    with DirectoryFilesystem(root, disk=disk) as files:
        fork = files.fork("call")
        fork.write("a", "new")
        fork.prepare()
        fork.stage(CallKey("call", journal="j"))
        disk.number = errno.EIO
        with pytest.raises(FileError, match="Input/output error"):
            fork.apply()
        fork.drop()
        disk.number = 0
        [left] = files.staging.glob("at-work/*/commit-*")
        assert f"{left} was not cleaned up" in caplog.text
    assert (root / "a").read_text() == "old"


def test_commits_on_a_failing_disk_leave_no_folders_behind(tmp_path: Path):
    """A folder that a commit would have reused, had the disk not failed, is reused by the next one."""
    disk, root = Failing(), tmp_path / "root"
    fill(root, {"a": "old"})
    with DirectoryFilesystem(root, disk=disk, keep_calls=1) as files:

        def write(text: str) -> None:
            fork = files.fork("call")
            try:
                fork.write("a", text)
                fork.prepare()
                fork.stage(CallKey(text))
                fork.apply()
                fork.applied()
            finally:
                disk.number = 0
                fork.drop()

        def at_work() -> int:
            return len(list(files.staging.glob("at-work/*/*")))

        for text in "bcd":
            write(text)
        before = at_work()
        for _ in range(3):
            disk.number = errno.EIO
            with pytest.raises(FileError, match="Input/output error"):
                write("e")
            write("f")
        assert at_work() == before


def test_a_commit_that_can_not_be_synced_is_reverted(tmp_path: Path):
    """If the folders can't be synced after the renames, the call fails, and the old files are put back."""

    class Unsynced(Disk):
        renames = 0

        def exchange(self, source: int, name: str, target: int, other: str) -> None:
            self.renames += 1
            super().exchange(source, name, target, other)

        def sync_folder(self, fd: int) -> None:
            if self.renames:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().sync_folder(fd)

    root = tmp_path / "root"
    fill(root, FILES)
    before = snapshot(root)
    with DirectoryFilesystem(root, disk=Unsynced()) as files:
        fork = files.fork("call")
        change(fork)
        fork.prepare()
        fork.stage(CallKey("call", journal="j"), synced=True)
        with pytest.raises(FileLimitReached, match="the disk is full"):
            fork.apply(synced=True)
        fork.drop()
        assert snapshot(root) == before


def test_a_commit_whose_files_can_not_be_synced_is_not_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """If a staged file can't be synced, staging fails. Otherwise, a commit could be recorded whose new content is lost."""

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Broken(Disk):
        def sync_file(self, path: Path) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", fails)
                super().sync_file(path)

    root = tmp_path / "root"
    fill(root, {"a": "old"})
    with DirectoryFilesystem(root, disk=Broken()) as files:
        fork = files.fork("call")
        fork.write("a", "new")
        fork.prepare()
        with pytest.raises(FileError, match="Input/output error"):
            fork.stage(CallKey("call", journal="j"), synced=True)
        fork.drop()
    assert (root / "a").read_text() == "old"


def test_a_file_that_its_owner_may_not_read_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If there is no permission to open a file, everything is synced with `os.sync`. Links and pipes have no content to sync."""
    synced: list[str] = []
    monkeypatch.setattr(os, "sync", lambda: synced.append("all"))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append("one"))
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "link", "pipe"):
        Disk().sync_file(tmp_path / name)
    assert synced == ["one"]

    def refuses(*given: Any, **named: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuses)
    Disk().sync_file(tmp_path / "file")
    assert synced == ["one", "all"]


def test_folders_for_commits_that_could_not_be_synced_are_not_used(tmp_path: Path):
    """If new folders for commits can't be synced, staging fails. The next attempt creates new ones and syncs them."""

    class Sometimes(Disk):
        is_broken = True
        synced = 0

        def sync_folder(self, fd: int) -> None:
            if self.is_broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.synced += 1
            super().sync_folder(fd)

    root = tmp_path / "root"
    fill(root, {"a": "old"})
    disk = Sometimes()
    with DirectoryFilesystem(root, disk=disk) as files:
        fork = files.fork("call")
        fork.write("a", "new")
        fork.prepare()
        with pytest.raises(FileError, match="Input/output error"):
            fork.stage(CallKey("call", journal="j"), synced=True)
        disk.is_broken = False
        fork.stage(CallKey("call", journal="j"), synced=True)
        # The staging folder, the folder around it, `done`, `at-work`, this process's folder and the commit's folder are synced.
        assert disk.synced == 6
        fork.apply(synced=True)
        fork.applied()
    assert (root / "a").read_text() == "new"
