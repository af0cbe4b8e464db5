"""A program that undoes a call on a disk that fills up during the undo, at each of its operations in turn.

If a small disk can be mounted, it really becomes full: before the chosen operation and before each later one, the
program uses up all free space. Otherwise these operations fail as if the disk were full. In both cases, the undo is
repeated once there is free space again, and must restore the old files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from handrail import Adapter, DirectoryFilesystem, Prompt, SqliteJournal, ToolContext, runs, tool
from handrail.errors import HandrailError, UndoRefused
from handrail.journal.records import CallKey
from handrail.models.scripted import ScriptedModel
from handrail.resources.directory.disk import Disk
from handrail.run.call import ToolCall
from resources.directory.crashing import snapshot
from support.filesystems import fill

CALL = "call"
FILES = {
    "a": "old a",
    "b": "old b" * 2000,
    "gone": "old gone",
    "from": "moved",
    "tree/x/y": "y",
    "tree/z": "z",
}
_PAGE = 4096


def change(files: Any) -> None:
    """Rewrite, create, delete and move files, delete a folder and create one."""
    files.write("a", "new a")
    files.write("b", "new b" * 3000)
    files.write("made/deep", "new")
    files.delete("gone")
    files.move("from", "to")
    files.delete("tree", recursive=True)
    files.mkdir("empty")


# --- full disks -----------------------------------------------------------------------------------------


class Ballast:
    """Uses up the free space of a disk: its bytes or its inodes."""

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder
        self._what = what
        self._made = 0

    def fill(self) -> None:
        """Use up the space that is free now."""
        self._folder.mkdir(exist_ok=True)
        try:
            while True:
                self._made += 1
                fd = os.open(self._folder / str(self._made), os.O_WRONLY | os.O_CREAT, 0o600)
                with os.fdopen(fd, "wb", buffering=0) as file:
                    while self._what == "bytes":
                        file.write(bytes(_PAGE))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def free(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Imagined:
    """Stands in for a `Ballast` where no small disk can be mounted. Its `fill` raises the error of a full disk."""

    def fill(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def free(self) -> None:
        pass


class FullDisk(Disk):
    """A disk that is full from operation number `_at` on, or never if that number is 0."""

    def __init__(self, ballast: Ballast | Imagined) -> None:
        self._ballast = ballast
        self._at = self._passed = 0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_"):
            return found

        def between(*args: Any) -> Any:
            self._pass()
            return found(*args)

        return between

    def _pass(self, *_: Any) -> None:
        self._passed += 1
        if self._at and self._passed >= self._at:
            self._ballast.fill()


# --- calls ----------------------------------------------------------------------------------------------


class Direct:
    """A call that no journal records."""

    def __init__(self, base: Path, disk: FullDisk) -> None:
        pass

    async def make(self, files: DirectoryFilesystem) -> None:
        fork = files.fork(CALL)
        try:
            change(fork)
            fork.prepare()
            fork.stage(CallKey(CALL))
            fork.apply()
            fork.applied()
        finally:
            fork.drop()

    async def undo(self, files: DirectoryFilesystem) -> None:
        files.undo(CALL)


class Journaled:
    """A call that is recorded in a journal on the same disk. On a small disk, the journal's transactions are operations too."""

    def __init__(self, base: Path, disk: FullDisk) -> None:
        self._path = base / "journal.db"
        self._moments = disk._pass if isinstance(disk._ballast, Ballast) else None

    def _open(self) -> contextlib.closing[SqliteJournal]:
        return contextlib.closing(SqliteJournal(self._path, durability="power", moments=self._moments))

    async def make(self, files: DirectoryFilesystem) -> None:
        @tool(effect="staged")
        async def work(context: ToolContext) -> str:
            """Change files."""
            change(context.filesystem)
            return "done"

        with self._open() as journal:
            adapter = Adapter(
                ScriptedModel([ToolCall("work", "{}"), "end"]), filesystem=files, journal=journal
            )
            await adapter.evaluate(Prompt("p", "Do.", tools=[work]), "go", run_id=CALL)

    async def undo(self, files: DirectoryFilesystem) -> None:
        with self._open() as journal:
            (unit,) = await journal.calls.load(CALL)
            await runs.undo(journal, CALL, unit.call_id, files)


# --- undo -----------------------------------------------------------------------------------------------


async def undo_once(base: Path, kind: Any, ballast: Ballast | Imagined, at: int) -> tuple[str, int]:
    """Make a call, undo it on a disk that is full from operation `at` on (0 means never), and undo it again with free space.

    Returns how the first undo ended and the number of operations it took.
    """
    base.mkdir()
    root, disk = base / "root", FullDisk(ballast)
    fill(root, FILES)
    before, call = snapshot(root), kind(base, disk)
    files = DirectoryFilesystem(root, disk=disk)
    await call.make(files)
    after = snapshot(root)
    assert after != before
    disk._passed, disk._at = 0, at
    said, ended = "", "undone"
    try:
        await call.undo(files)
    except HandrailError as error:
        said, ended = str(error), type(error).__name__
        assert "full" in said or "No space left" in said, said
    found, passed = snapshot(root), disk._passed
    assert found in (before, after) or "could not be restored" in said, f"half undone at {at}: {said}"
    assert found == before or ended != "undone", at
    files.close()
    disk._at = 0
    ballast.free()
    # The second undo is refused if the first one has succeeded, or was finished when the folder was opened again.
    with DirectoryFilesystem(root) as again, contextlib.suppress(UndoRefused):
        await call.undo(again)
        assert ended != "undone", f"undone twice at {at}"
    assert snapshot(root) == before, f"old bytes lost at {at}"
    shutil.rmtree(base)
    return ended, passed


async def undo_everywhere(disk: Path, kind: Any, ballast: Ballast | Imagined) -> str:
    """Fill up the disk at each operation of an undo in turn. Returns how often each ending was seen."""
    _, total = await undo_once(disk / "count", kind, ballast, 0)
    assert total > 10
    endings: dict[str, int] = {}
    for at in range(1, total + 1):
        ended, _ = await undo_once(disk / str(at), kind, ballast, at)
        endings[ended] = endings.get(ended, 0) + 1
    assert len(endings) > 1, endings
    return " ".join(f"{ended}={times}" for ended, times in sorted(endings.items()))


def main() -> None:
    disk, what = Path(sys.argv[1]), sys.argv[2]
    for kind in (Direct, Journaled):
        ballast = Imagined() if what == "imagined" else Ballast(disk / "ballast", what)
        print(kind.__name__, asyncio.run(undo_everywhere(disk, kind, ballast)), flush=True)


if __name__ == "__main__":
    main()
