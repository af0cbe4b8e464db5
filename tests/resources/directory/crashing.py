"""A program that is killed at a chosen point, in the middle of a commit or of its recovery.

Run as a script, it reads one JSON line per attempt, forks a child that makes the attempt, and answers with the child's
exit code. So hundreds of kills take hundreds of forks, but only one import.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
from handrail.resources.directory.disk import Disk, exchange
from support.rig import Note

RUN = "run"
FILES = {
    "a.txt": "a before\n",
    "tool.sh": "#!/bin/sh\n",
    "gone.txt": "to be deleted\n",
    "moved/from.txt": "to be moved\n",
    "tree/one/x": "x\n",
    "tree/two/y": "y\n",
    "swap": "a file that becomes a folder\n",
    "pack/z": "in a folder that becomes a file\n",
    ".venv/lib/ignored.py": "ignored\n",
    "foreign.txt": "nobody touches this\n",
}


def snapshot(folder: Path) -> dict[str, Any]:
    """Return every path with its state: a file's text and mode, a link's target, or "folder"."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = (path.read_text(), path.stat().st_mode & 0o777)
    return found


def change(files: Any, seed: int) -> None:
    """Change files in random ways. The seed determines which changes are made, and in which order."""
    deeds = [
        lambda: files.append("tool.sh", "echo after\n"),
        lambda: files.write("new/deep/b.txt", "b after\n"),
        lambda: files.mkdir("empty/folder"),
        lambda: files.delete("gone.txt"),
        lambda: files.move("moved/from.txt", "moved/to.txt"),
        lambda: files.delete("tree", recursive=True),
        lambda: (files.delete("swap"), files.write("swap/inside", "now a folder\n")),
        lambda: (files.delete("pack", recursive=True), files.write("pack", "now a file\n")),
    ]
    draw = random.Random(seed)
    chosen = [*draw.sample(deeds, draw.randint(2, len(deeds))), lambda: files.write("a.txt", "a after\n")]
    for deed in draw.sample(chosen, len(chosen)):
        deed()


class Points:
    """Counts the points that the process passes, and kills the process at point number `at` (0 means never)."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._lock = threading.Lock()
        self.passed = 0

    def reach(self, *last_words: Any) -> None:
        with self._lock:
            self.passed += 1
            if self.passed == self._at:
                for words in last_words:
                    words()
                os.kill(os.getpid(), signal.SIGKILL)


class KillingDisk(Disk):
    """A disk that can kill the process before and after each operation."""

    def __init__(self, points: Points, edit_before: str = "") -> None:
        self._points = points
        self._edit_before = edit_before

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or not callable(found) or name == "lose":
            return found

        def between(*args: Any) -> Any:
            self._points.reach(self._lose)
            self._before(name, args)
            result = found(*args)
            self._after(name, args)
            self._points.reach(self._lose)
            return result

        return between

    def _before(self, name: str, args: tuple[Any, ...]) -> None:
        """Edit the file `edit_before`, if there is one, just before the commit changes it, as another program might."""
        if self._edit_before and name in ("exchange", "place") and args[3] == Path(self._edit_before).name:
            path, self._edit_before = self._edit_before, ""
            Path(path).write_text("edited by somebody\n")

    def _after(self, name: str, args: tuple[Any, ...]) -> None:
        pass

    def _lose(self) -> None:
        pass


class CutDisk(KillingDisk):
    """A disk that loses unsynced changes when it kills the process, as in a power cut.

    It loses the content of every unsynced file, and a random number of the newest unsynced creations and renames.
    """

    def __init__(self, points: Points, edit_before: str = "") -> None:
        super().__init__(points, edit_before)
        self._bytes: dict[int, None] = {}
        """The inodes of files whose content was not synced."""
        self._names: list[tuple[str, Any, set[int]]] = []
        """Creations and renames, oldest first: the operation, the arguments to undo it, and the inodes of the folders whose sync saves it.

        A saved change has no folders.
        """

    def _after(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("write", "copy", "symlink", "folder", "link"):
            path: Path = args[{"write": 0, "copy": 1, "symlink": 1, "folder": 0, "link": 2}[name]]
            if name in ("write", "copy"):
                self._bytes[path.stat().st_ino] = None
            self._names.append(("made", path, {path.parent.stat().st_ino}))
        elif name in ("place", "exchange"):
            source, old, target, new = args
            folders = {os.fstat(source).st_ino, os.fstat(target).st_ino}
            self._names.append((name, (os.dup(source), old, os.dup(target), new), folders))
        elif name == "sync_file":
            self._bytes.pop(args[0].lstat().st_ino, None)
        elif name == "sync_folder":
            synced = os.fstat(args[0]).st_ino
            for what, _, folders in self._names:
                if synced in folders:
                    folders.clear() if what != "made" else folders.discard(synced)

    def _lose(self) -> None:
        unsynced = [each for each in self._names if each[2]]
        # The disk may already have written none, some or all of the changes, oldest first.
        kept = max(0, random.Random(self._points.passed).randint(-len(unsynced), len(unsynced)))
        for what, how, _ in reversed(unsynced[kept:]):
            if what == "made":
                self._empty(how)
            elif what == "exchange":
                exchange(how[2], how[3], how[0], how[1])
            else:
                os.rename(how[3], how[1], src_dir_fd=how[2], dst_dir_fd=how[0])
        for base in ("root", ".root.handrail"):
            for path in Path(os.environ["CRASH_BASE"], base).rglob("*"):
                if path.is_file() and path.lstat().st_ino in self._bytes:
                    path.write_bytes(b"")

    def _empty(self, path: Path) -> None:
        try:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError:
            return  # a change that reached the disk has renamed the file


def killing_journal(
    path: Path, points: Points, lose: Any = None, durability: Any = "process"
) -> SqliteJournal:
    """Open a journal that can kill the process before and after each transaction."""
    last_words = () if lose is None else (lose,)
    return SqliteJournal(path, durability=durability, moments=lambda *_: points.reach(*last_words))


async def commit_once(base: Path, seed: int, points: Points, edited: str, durability: Any) -> str:
    """Make one call through a gate on the folder and the journal under `base`. Return "ok" or the call's message."""
    disk = (CutDisk if durability == "power" else KillingDisk)(
        points, str(base / "root" / edited) if edited else ""
    )
    journal = killing_journal(base / "journal.db", points, disk._lose, durability)
    files = DirectoryFilesystem(base / "root", disk=disk)
    numbers = count()

    @tool(effect="staged", description="Change files and state.")
    async def work(context: ToolContext) -> str:
        change(context.filesystem, seed)
        context.session.dispatch(Note("noted"))
        return "done"

    def new_id() -> str:
        number = next(numbers)
        return RUN if number == 1 else f"id{number}"  # the first id is the session's, the second is the run's

    gate = open_gate([work], filesystem=files, journal=journal, new_id=new_id)
    result = await gate.invoke("work")
    await gate.close()
    journal.close()
    files.close()
    return "ok" if result.success else result.message


async def recover_once(base: Path, points: Points) -> str:
    """Recover the folder after a kill, and return "ok". The process can be killed during the recovery too."""
    files = DirectoryFilesystem(base / "root", disk=KillingDisk(points))
    journal = killing_journal(base / "journal.db", points)
    await files.recover(journal)
    journal.close()
    files.close()
    return "ok"


def attempt(order: dict[str, Any]) -> None:
    base, points = Path(order["base"]), Points(order["at"])
    os.environ["CRASH_BASE"] = str(base)
    if order.get("recover"):
        said = asyncio.run(recover_once(base, points))
    else:
        said = asyncio.run(commit_once(base, order["seed"], points, order["edited"], order["durability"]))
    (base / "said").write_text(json.dumps({"said": said, "points": points.passed}))


def serve(attempt: Callable[[dict[str, Any]], None]) -> None:
    """Read orders, and carry out each in a child. Answer with the child's exit code."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                attempt(order)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    serve(attempt)
