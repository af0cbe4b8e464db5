"""Measure a commit alone and among contenders, in CPU time and in latency, at this commit and at an older one.

    python bench/commits.py [COMMIT] [--where FOLDER]

Each call reads a file and writes it. Contenders are tasks of one process or processes, each with a session of its own, on
files of their own or on one file. With COMMIT, a checkout of it is measured in turn with the working tree, so a busy machine
slows both. The CPU time of a row is that of all contenders and of their journals' threads. It is divided by the number of
calls that committed: on one file, calls run again, or fail in versions in which they don't.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from handrail import DirectoryFilesystem, MemoryFilesystem, SqliteJournal, ToolContext, open_gate, tool

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = int(os.environ.get("ROUNDS", "5"))
CALLS = int(os.environ.get("CALLS", "40"))
"""How many calls each contender makes in a round."""
CONTENDERS = 8
CONTENT = "x" * 2000


class Row(NamedTuple):
    """One way to commit."""

    files: str
    journal: str = ""
    processes: int = 1
    tasks: int = 1
    shared: bool = False
    """Whether all contenders write one file."""

    @property
    def name(self) -> str:
        where = f"{self.files}, {f'journal ({self.journal})' if self.journal else 'no journal'}"
        if self.processes == self.tasks == 1:
            return f"alone: {where}"
        who = f"{self.processes} processes" if self.processes > 1 else f"{self.tasks} tasks"
        return f"{who}, {'one file' if self.shared else 'files of their own'}: {where}"


PLACES = [
    ("memory", ""),
    ("memory", "process"),
    ("directory", ""),
    ("directory", "process"),
    ("directory", "power"),
]
ROWS = [
    *(Row(files, journal) for files, journal in PLACES),
    *(Row(files, journal, 1, CONTENDERS, shared) for shared in (False, True) for files, journal in PLACES),
    *(
        Row(files, journal, CONTENDERS, 1, shared)
        for shared in (False, True)
        for files, journal in PLACES[2:]
    ),
]


class Figures(NamedTuple):
    """The figures of one row in one round: microseconds of CPU per commit, and of latency per call."""

    cpu: float
    median: float
    late: float
    """The latency that one call in twenty exceeds."""
    failed: int


# --- one side -----------------------------------------------------------------------------------------


def measure(where: Path) -> None:
    """Measure every row for each line of standard input. This is the main function of a side's process."""
    asyncio.run(
        contend(Row("memory"), where, 0, lambda: None)
    )  # imports what is imported lazily, before any fork
    for _ in sys.stdin:
        print(json.dumps([measured(row, where) for row in ROWS]), flush=True)


def measured(row: Row, where: Path) -> Figures:
    """Measure a row in new processes, since the journals have threads, which don't survive a fork."""
    base = Path(tempfile.mkdtemp(prefix=".handrail-bench-", dir=where))
    try:
        (base / "root").mkdir()
        for number in range(CONTENDERS):
            (base / "root" / f"f{number}").write_text(CONTENT)
        if row.journal:
            forked([lambda: create_journal(row, base)])
        start = multiprocessing.get_context("fork").Barrier(row.processes)
        found = forked(
            [lambda at=at: asyncio.run(contend(row, base, at, start.wait)) for at in range(row.processes)]
        )
    finally:
        shutil.rmtree(base)
    latencies = sorted(each for one in found for each in one["latencies"])
    cpu = sum(one["cpu"] for one in found) / max(1, sum(one["committed"] for one in found))
    late = latencies[len(latencies) * 19 // 20]
    failed = sum(len(one["latencies"]) - one["committed"] for one in found)
    return Figures(cpu * 1e6, statistics.median(latencies) * 1e6, late * 1e6, failed)


def forked(works: Iterable[Callable[[], Any]]) -> list[Any]:
    """Do each piece of work in a child process, all at the same time, and return the results."""
    pipes: list[int] = []
    for work in works:
        read, write = os.pipe()
        if not os.fork():
            os.close(read)
            with os.fdopen(write, "w") as out:
                json.dump(work(), out)
            os._exit(0)
        os.close(write)
        pipes.append(read)
    found: list[Any] = []
    for pipe in pipes:
        with os.fdopen(pipe) as read_from:
            found.append(json.load(read_from))
    for _ in pipes:
        os.wait()
    return found


def create_journal(row: Row, base: Path) -> None:
    SqliteJournal(base / "runs.db", durability=row.journal).close()  # type: ignore[arg-type]


async def contend(row: Row, base: Path, at: int, start: Callable[[], object]) -> dict[str, Any]:
    """Make the calls of one process, and return their latencies, how many committed, and the CPU time of all."""

    @tool(effect="staged")
    async def rewrite(path: str, context: ToolContext) -> None:
        """Read a file, and write it again."""
        text = context.filesystem.read(path)
        await asyncio.sleep(0)
        context.filesystem.write(path, text)

    in_memory = row.files == "memory"
    files: Any = (
        MemoryFilesystem({f"f{number}": CONTENT for number in range(CONTENDERS)})
        if in_memory
        else DirectoryFilesystem(base / "root")
    )
    journal: Any = SqliteJournal(base / "runs.db", durability=row.journal) if row.journal else None  # type: ignore[arg-type]
    gates = [open_gate([rewrite], filesystem=files, journal=journal) for _ in range(row.tasks)]
    latencies: list[float] = []
    committed = 0

    async def calls(number: int, times: int) -> None:
        nonlocal committed
        path = "f0" if row.shared else f"f{at + number}"
        for _ in range(times):
            began = time.perf_counter()
            result = await gates[number].invoke("rewrite", {"path": path})
            latencies.append(time.perf_counter() - began)
            committed += result.success

    await asyncio.gather(*(calls(number, 3) for number in range(row.tasks)))
    latencies.clear()
    committed = 0
    start()
    began = time.process_time()
    await asyncio.gather(*(calls(number, CALLS) for number in range(row.tasks)))
    cpu = time.process_time() - began
    for gate in gates:
        await gate.close()
    for each in (journal, None if in_memory else files):
        if each is not None:
            each.close()
    return {"latencies": latencies, "committed": committed, "cpu": cpu}


# --- both sides ---------------------------------------------------------------------------------------


class Side:
    """A checkout that is measured, and the figures of its rounds."""

    def __init__(self, tree: Path, where: Path) -> None:
        self.rounds: list[list[Figures]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--measure", "--where", str(where)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tree / "src")},
        )

    def measure(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a measuring process ended early")
        self.rounds.append([Figures(*each) for each in json.loads(line)])

    def shown(self, at: int) -> str:
        rounds = [each[at] for each in self.rounds]
        cpu, median, late = (statistics.median(column) for column in list(zip(*rounds, strict=True))[:3])
        failed = sum(each.failed for each in rounds)
        return f"{cpu:9.0f} {median:9.0f} {late:9.0f} {failed or '':>7}"

    def close(self) -> None:
        self._process.communicate()


def main(commit: str, where: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        trees = [ROOT]
        if commit:
            subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, commit], cwd=ROOT, check=True)
            trees = [tree, ROOT]
        try:
            sides = [Side(each, where) for each in trees]
            for number in range(ROUNDS):
                for side in sides if number % 2 else sides[::-1]:
                    side.measure()
            for side in sides:
                side.close()
        finally:
            if commit:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(
        f"Medians of {ROUNDS} rounds in µs: CPU per commit, latency of a call (median, one in twenty), failed calls.\n"
    )
    names = [f"{f'at {commit[:10]}':>37}", f"{'here':>37}"][-len(sides) :]
    print(f"{'':62}{' |'.join(names)}")
    heads = f"{'CPU':>9} {'median':>9} {'late':>9} {'failed':>7}"
    print(f"{'':62}{' |'.join([heads] * len(sides))}")
    for at, row in enumerate(ROWS):
        print(f"{row.name:62}{' |'.join(side.shown(at) for side in sides)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("commit", nargs="?", default="")
    parser.add_argument("--where", type=Path, default=Path())
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.where)
    else:
        main(given.commit, given.where)
