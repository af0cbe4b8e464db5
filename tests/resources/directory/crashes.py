"""Commits in processes that are killed, and the recovery of their folder."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from handrail import DirectoryFilesystem, SqliteJournal
from handrail.resources.directory import Recovered
from resources.directory.crashing import FILES, RUN
from support import TESTS
from support.filesystems import fill

DEEP = bool(os.environ.get("HANDRAIL_DEEP"))
KILLED = -9
CRASHING = Path(__file__).with_name("crashing.py")


def picked(points: int, kills: int) -> range:
    """Return all kill points in a deep run. Otherwise, return at least `kills` of them, or all if there are fewer."""
    return range(1, points + 1, 1 if DEEP else max(1, points // kills))


class Killed:
    """A server process that forks a child for each order. The child may be killed while it carries out the order."""

    def __init__(self, program: Path = CRASHING) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )

    def run(self, order: dict[str, Any]) -> int:
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    def close(self) -> None:
        self._server.communicate()


class Crashes:
    """A folder with a journal, and child processes that commit to it or recover it, and can be killed."""

    def __init__(self, base: Path, killed: Killed) -> None:
        self.base = base
        self.kills = 0
        self._killed = killed

    def fresh(self) -> None:
        """Restore the folder's initial files, and remove the journal and the staging folder."""
        for name in ("root", ".root.handrail"):
            shutil.rmtree(self.base / name, ignore_errors=True)
        for path in self.base.glob("journal.db*"):
            path.unlink()
        (self.base / "root").mkdir()
        fill(self.base / "root", FILES)
        (self.base / "root" / "tool.sh").chmod(0o755)

    def run(self, at: int = 0, **order: Any) -> int:
        """Run an order in a child that is killed at point `at` (0 means never), and return the child's exit status."""
        order = {"base": str(self.base), "at": at, "seed": 0, "edited": "", "durability": "process", **order}
        status = self._killed.run(order)
        self.kills += status == KILLED
        return status

    def said(self) -> dict[str, Any]:
        return json.loads((self.base / "said").read_text())

    def recover(self) -> tuple[Recovered, list[Any]]:
        """Recover the folder, check that no call is unapplied, and return what was recovered and the run's calls."""

        async def main() -> tuple[Recovered, list[Any]]:
            journal = SqliteJournal(self.base / "journal.db")
            files = DirectoryFilesystem(self.base / "root")
            try:
                recovered = await files.recover(journal)
                assert await journal.calls.unapplied() == ()
                return recovered, list(await journal.calls.load(RUN))
            finally:
                journal.close()
                files.close()

        return asyncio.run(main())
