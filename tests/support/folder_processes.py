"""Several processes that change one folder at the same time, while an editor saves a file in it.

The processes are killed and started again. Run as a script, this runs rounds and prints one JSON report per round:

    python tests/support/folder_processes.py --processes 2 3 4 8 --updates 2000 --rounds 10 --journaled both

Each call appends its own line to a shared file, to its process's own file or to two files at once, or writes the line
to the file that the editor saves. Afterwards, every file but the editor's must contain the lines of all successful calls
that appended to it, and no lines of failed calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
from support.crashing import KillingDisk, Points

SHARED = ("shared/0", "shared/1")
PAIR = ("pair/a", "pair/b")
EDITED = "edited"
_TOKEN = re.compile(r"w\d+\.\d+\.\d+")
_POINTS = 16
"""The approximate number of kill points that one call passes."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one round."""

    processes: int
    updates: int
    """How many calls each process makes, not counting those that conflict or are cut short by a kill."""
    journaled: bool = False
    kills: int = 0
    """How often each process is killed, at a random point, unless it finishes first."""
    editor: bool = True
    seed: int = 0


class Report(msgspec.Struct, kw_only=True):
    """The findings of one round. Every field but the first three must be 0 or empty."""

    succeeded: int = 0
    conflicts: int = 0
    saves: int = 0
    lost: int = 0
    """Calls that succeeded, but whose lines are missing or in the wrong files."""
    written: int = 0
    """Calls that conflicted or failed, but whose lines are in a file."""
    failures: list[str] = []
    """Messages of calls that failed for a reason other than a conflict."""
    torn: int = 0
    """The number of broken lines and of files with a duplicate or incomplete line, plus 1 if the files of the pair differ."""
    lost_saves: int = 0
    """How often the editor found that its last save was no longer the first line."""
    crashed: int = 0
    """Processes that ended with an error."""

    @property
    def is_clean(self) -> bool:
        return not (
            self.lost or self.written or self.failures or self.torn or self.lost_saves or self.crashed
        )


@tool(effect="staged", description="Add a line to files.")
async def add(token: str, paths: list[str], context: ToolContext) -> None:
    files = context.filesystem
    for path in paths:
        if path == EDITED:
            first = files.read(path).partition("\n")[0]
            files.write(path, f"{first}\n{token}\n")
        else:
            files.append(path, f"{token}\n")


class Worker:
    """A process that writes each call's outcome to a file. If it is killed, the next process continues where it stopped."""

    def __init__(self, base: Path, number: int, round: Round) -> None:
        self._base, self._number, self._round = base, number, round
        self._log = base / "outcomes" / str(number)

    def outcomes(self) -> list[list[str]]:
        text = self._log.read_text() if self._log.exists() else ""
        return [line.split(" ", 2) for line in text.splitlines()]

    async def run(self, life: int) -> None:
        before = self.outcomes()
        done = sum(outcome[0] == "ok" for outcome in before)
        draw = random.Random(f"{self._round.seed} {self._number} {life}")
        left = self._round.updates - done
        killed = life < self._round.kills
        points = Points(
            draw.randint(1, max(2, left * _POINTS // (self._round.kills - life + 1))) if killed else 0
        )
        files = DirectoryFilesystem(self._base / "root", disk=KillingDisk(points))
        journal = SqliteJournal(self._base / "journal.db") if self._round.journaled else None
        if journal is not None:
            await files.recover(journal)
        gate = open_gate([add], filesystem=files, journal=journal)
        out = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        attempts = count(len(before))
        while done < self._round.updates:
            token = f"w{self._number}.{done}.{next(attempts)}"
            paths = self._paths(draw)
            os.write(out, f"began {token}\n".encode())
            result = await gate.invoke("add", {"token": token, "paths": paths})
            if result.success:
                done += 1
                os.write(out, f"ok {token} {' '.join(paths)}\n".encode())
            elif "has changed" in result.message or "is writing to" in result.message:
                os.write(out, f"conflict {token}\n".encode())
            else:
                os.write(out, f"failed {token} {result.message!r}\n".encode())
                done += 1
        await gate.close()
        if journal is not None:
            journal.close()
        files.close()

    def _paths(self, draw: random.Random) -> list[str]:
        own = f"own/{self._number}"
        choices: list[list[str]] = [[draw.choice(SHARED)], [*PAIR], [own]]
        return draw.choice([*choices, [EDITED]] if self._round.editor else choices)


def edit(base: Path, out: int) -> None:
    """Save a file in place or by a rename, as editors do, until the workers end. Then write the numbers of saves and of lost saves to `out`."""
    path, aside = base / "root" / EDITED, base / "root" / ".edited.swp"
    lost = 0
    for number in count(1):
        lost += _first_line(path) != f"save {number - 1}"
        if (base / "ended").exists():
            os.write(out, json.dumps([number - 1, lost]).encode())
            return
        if number % 2:
            path.write_text(f"save {number}\n")
        else:
            aside.write_text(f"save {number}\n")
            aside.rename(path)
        time.sleep(0.0005 * (number % 3))


def _first_line(path: Path) -> str:
    """Return the first line of a file. The folder's lock ensures that no commit is between two renames."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        return path.read_text().partition("\n")[0]
    finally:
        os.close(folder)


def forked(work: Any) -> int:
    """Start the work in a child process, and return the child's process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def run_round(base: Path, round: Round) -> Report:
    """Run one round in an empty folder, and return what was found."""
    (base / "outcomes").mkdir()
    for path in (*SHARED, *PAIR, EDITED, "own/x"):
        (base / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (base / "root" / path).write_text("save 0\n" if path == EDITED else "")
    workers = [Worker(base, number, round) for number in range(round.processes)]
    report = Report()
    read, write = os.pipe()
    editor = forked(lambda: edit(base, write)) if round.editor else 0
    alive = {forked(lambda worker=worker: asyncio.run(worker.run(0))): (worker, 0) for worker in workers}
    while alive:
        child, status = os.wait()
        if child not in alive:
            editor, report.crashed = 0, report.crashed + 1
            continue
        worker, life = alive.pop(child)
        code = os.waitstatus_to_exitcode(status)
        if code == -9:
            alive[forked(lambda worker=worker, life=life: asyncio.run(worker.run(life + 1)))] = (
                worker,
                life + 1,
            )
        report.crashed += code not in (0, -9)
    (base / "ended").touch()
    if editor:
        os.waitpid(editor, 0)
        report.saves, report.lost_saves = json.loads(os.read(read, 100))
    os.close(read)
    os.close(write)
    asyncio.run(_settle(base, round))
    _check(base, workers, report)
    return report


async def _settle(base: Path, round: Round) -> None:
    files = DirectoryFilesystem(base / "root")
    if round.journaled:
        journal = SqliteJournal(base / "journal.db")
        await files.recover(journal)
        journal.close()
    files.write("last", "")
    files.close()


def _check(base: Path, workers: list[Worker], report: Report) -> None:
    found: dict[str, list[str]] = {}
    for path in (*SHARED, *PAIR, *(f"own/{number}" for number in range(len(workers)))):
        at = base / "root" / path
        lines = at.read_text().split("\n") if at.exists() else [""]
        report.torn += lines[-1] != "" or len(lines) != len(set(lines))
        report.torn += sum(_TOKEN.fullmatch(line) is None for line in lines[:-1])
        for line in lines[:-1]:
            found.setdefault(line, []).append(path)
    report.torn += (base / "root" / PAIR[0]).read_text() != (base / "root" / PAIR[1]).read_text()
    for worker in workers:
        outcomes = worker.outcomes()
        for word, token, *rest in outcomes:
            is_there = token in found
            if word == "ok":
                report.succeeded += 1
                report.lost += rest != [EDITED] and found.get(token) != rest[0].split()
            elif word == "conflict":
                report.conflicts += 1
                report.written += is_there
            elif word == "failed":
                report.failures.append(" ".join(rest))
                report.written += is_there


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[3])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--journaled", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--where", default=None)
    given = parser.parse_args()
    journaled = {"yes": [True], "no": [False], "both": [False, True]}[given.journaled]
    clean = True
    for seed in range(given.rounds):
        for processes in given.processes:
            for recorded in journaled:
                round = Round(
                    processes=processes,
                    updates=given.updates,
                    journaled=recorded,
                    kills=given.kills,
                    seed=seed,
                )
                base = Path(tempfile.mkdtemp(prefix="handrail-processes-", dir=given.where))
                try:
                    report = run_round(base, round)
                finally:
                    with contextlib.suppress(OSError):
                        shutil.rmtree(base)
                clean &= report.is_clean
                told = {"processes": processes, "journaled": recorded, **msgspec.to_builtins(report)}
                told["failures"] = [
                    *sorted({re.sub("[0-9a-f]{32}|[0-9]+", "#", each) for each in report.failures})[:3],
                    len(report.failures),
                ]
                print(json.dumps({**told, "clean": report.is_clean}), flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
