"""Measure how long a call that changes many files stops the event loop, at this commit and at an older one.

    python bench/stalls.py [COMMIT] [--where FOLDER] [--sizes 100,2000] [--rows NAME,NAME]

A command makes new files, a thousand per folder, and its call then commits them, is rolled back, or is undone. Meanwhile a
timer fires every millisecond. The figure is the longest time between two of its ticks. With
COMMIT, the same is measured at a checkout of it. The machine's own noise is measured too, with a command that makes no files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
from handrail.resources.shell import Allow, Shell

ROOT = Path(__file__).resolve().parents[1]
SIZES = (0, 100, 2_000, 20_000, 120_000)
ROWS = ("commit", "recorded", "rollback", "undo")
TICK = 0.001
MAKE = """
import os, sys
for number in range(int(sys.argv[1])):
    folder = f"made/{number // 1000}"
    if number % 1000 == 0:
        os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{number}", "w") as file:
        file.write("x" * 100)
"""
shell = Shell([Allow(...)], timeout=1200)


class Ticks:
    """A timer on the event loop, and the longest time between two of its ticks."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = 0.0

    def reset(self) -> None:
        self.longest, self._last = 0.0, time.perf_counter()

    def note(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last)
        self._last = now

    async def run(self) -> None:
        while True:
            self.note()
            await asyncio.sleep(TICK)


@asynccontextmanager
async def ticking() -> AsyncGenerator[Ticks]:
    ticks = Ticks()
    ticks.reset()
    task = asyncio.create_task(ticks.run())
    try:
        yield ticks
    finally:
        ticks.note()
        task.cancel()


@tool(effect="staged")
async def make(files: int, fails: bool, context: ToolContext) -> None:
    """Run a command that makes this many files."""
    finished = await shell.run_on(context.filesystem, [sys.executable, "-I", "-c", MAKE, str(files)])
    assert finished.ok, finished.render()
    if fails:
        raise ValueError("rolled back")


async def measured(row: str, size: int, where: Path) -> tuple[float, float]:
    """Return the longest stall of the loop and the duration of the whole call, or of the undo, in seconds."""
    base = Path(tempfile.mkdtemp(prefix=".handrail-bench-", dir=where))
    (base / "root").mkdir()
    journal: Any = SqliteJournal(base / "runs.db") if row == "recorded" else None
    files = DirectoryFilesystem(base / "root")
    gate = open_gate([make], filesystem=files, journal=journal)
    try:
        await gate.invoke("make", {"files": 1, "fails": False})  # imports what is imported lazily
        async with ticking() as ticks:
            began = time.perf_counter()
            result = await gate.invoke("make", {"files": size, "fails": row == "rollback"}, call_id="large")
            assert result.success == (row != "rollback"), result
            if row == "undo" and size:
                await asyncio.sleep(TICK)
                ticks.reset()
                began = time.perf_counter()
                run_id = gate.run.run_context.request_id
                await asyncio.to_thread(lambda: files.undo("large", run_id=run_id))
        return ticks.longest, time.perf_counter() - began
    finally:
        await gate.close()
        files.close()
        if journal is not None:
            journal.close()
        shutil.rmtree(base)


def side(tree: Path, row: str, size: int, where: Path) -> tuple[float, float]:
    """Measure in a new process, so that the garbage of one measurement does not delay the next."""
    told = [sys.executable, "-P", __file__, "--measure", f"{row},{size}", "--where", str(where)]
    ran = subprocess.run(
        told, env={**os.environ, "PYTHONPATH": str(tree / "src")}, stdout=subprocess.PIPE, check=True
    )
    stall, whole = json.loads(ran.stdout)
    return stall, whole


def main(commit: str, where: Path, sizes: list[int], rows: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        sides = {f"at {commit[:10]}": old} if commit else {}
        sides["here"] = ROOT
        if commit:
            subprocess.run(["git", "worktree", "add", "--detach", "-q", old, commit], cwd=ROOT, check=True)
        try:
            print("The longest stall of the event loop in ms, and the duration of the whole in s.\n")
            print(f"{'':26}{' |'.join(f'{name:>22}' for name in sides)}")
            for row in rows:
                for size in sizes:
                    found = [side(tree, row, size, where) for tree in sides.values()]
                    cells = [f"{stall * 1000:11.0f} {whole:10.1f}" for stall, whole in found]
                    print(f"{row:10}{size:9,} files{'':1}{' |'.join(cells)}", flush=True)
        finally:
            if commit:
                subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("commit", nargs="?", default="")
    parser.add_argument("--where", type=Path, default=Path())
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        name, _, number = given.measure.partition(",")
        print(json.dumps(asyncio.run(measured(name, int(number), given.where))))
    else:
        main(given.commit, given.where, [int(each) for each in given.sizes.split(",")], given.rows.split(","))
