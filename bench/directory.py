"""Measure calls on a real folder against bare disk operations and git, and searches against Python's regex engine.

The figures are medians of wall time, since the disk is the bottleneck of a call. Rows with a limit say whether it was
met.

    python bench/directory.py [FOLDER]      (a folder on the disk to measure; by default the current one)
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from handrail import DirectoryFilesystem, SqliteJournal, ToolContext, open_gate, tool
from handrail.protocols import Match
from handrail.resources.search import line_pattern, matches
from handrail.run.gate import Gate
from handrail.text.patterns import Pattern

ROUNDS = int(os.environ.get("ROUNDS", "9"))
CALLS = int(os.environ.get("CALLS", "100"))
CONTENT = "x" * 2000
FEW, MANY, GIT = 10, 100_000, (10, 10_000)

Work = Callable[[], Awaitable[None]]


@tool(effect="read", description="Read one file.")
async def look(context: ToolContext) -> int:
    return len(context.filesystem.read("d0/f0"))


@tool(effect="staged", description="Write one file.")
async def rewrite(context: ToolContext) -> None:
    context.filesystem.write("d0/f0", CONTENT)


def folder_of(base: Path, files: int) -> Path:
    """Create a folder with this many files, a thousand per subfolder."""
    folder = base / f"files{files}"
    for number in range(files):
        at = folder / f"d{number // 1000}"
        if number % 1000 == 0:
            at.mkdir(parents=True)
        (at / f"f{number}").write_text(CONTENT)
    return folder


async def timed(work: Work, calls: int) -> float:
    """Return the wall time of one iteration, in microseconds."""
    began = time.perf_counter()
    for _ in range(calls):
        await work()
    return (time.perf_counter() - began) / calls * 1e6


async def medians(rows: dict[str, Work], calls: int = CALLS, rounds: int = ROUNDS) -> dict[str, float]:
    """Return each row's median. Rounds are interleaved, so that a busy moment affects all rows."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, work in rows.items():
            found[name].append(await timed(work, calls))
    return {name: statistics.median(times) for name, times in found.items()}


def bare(folder: Path, synced: bool) -> Work:
    """Return work that only writes a temporary file, syncs it if `synced`, and renames it."""

    async def work() -> None:
        fd = os.open(folder / "d0" / ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, CONTENT.encode())
        if synced:
            os.fsync(fd)
        os.close(fd)
        os.rename(folder / "d0" / ".new", folder / "d0" / "f0")

    return work


def through(gate: Gate, name: str) -> Work:
    async def work() -> None:
        result = await gate.invoke(name)
        assert result.success, result.message

    return work


def say(name: str, value: str, holds: bool | None = None) -> bool:
    print(f"{name:66} {value:>14}  {'' if holds is None else 'ok' if holds else 'MISSED'}", flush=True)
    return holds is not False


async def reads(few: Path, many: Path) -> bool:
    opened = [DirectoryFilesystem(few), DirectoryFilesystem(many)]
    rows = {
        name: through(open_gate([look], filesystem=files), "look")
        for name, files in zip(("few", "many"), opened, strict=True)
    }
    found = await medians(rows, CALLS * 5)
    for files in opened:
        files.close()
    say(f"read one file through the gate, {FEW} files", f"{found['few']:.0f} µs")
    say(f"read one file through the gate, {MANY} files", f"{found['many']:.0f} µs")
    ratio = found["many"] / found["few"]
    return say("  many over few (at most 1.5)", f"{ratio:.2f}x", ratio <= 1.5)


async def writes(few: Path, base: Path) -> bool:
    plain, process, power = [DirectoryFilesystem(few, staging=base / f"aside{n}") for n in range(3)]
    journals = [SqliteJournal(base / f"{level}.db", durability=level) for level in ("process", "power")]
    found = await medians(
        {
            "bare": bare(few, synced=False),
            "bare, synced": bare(few, synced=True),
            "no journal": through(open_gate([rewrite], filesystem=plain), "rewrite"),
            "process": through(open_gate([rewrite], filesystem=process, journal=journals[0]), "rewrite"),
            "power": through(open_gate([rewrite], filesystem=power, journal=journals[1]), "rewrite"),
        }
    )
    for each in (plain, process, power, *journals):
        each.close()
    say("bare write + rename", f"{found['bare']:.0f} µs")
    say("bare write + fsync + rename", f"{found['bare, synced']:.0f} µs")
    kept = True
    for name, words in (
        ("no journal", "one-file write through the gate, no journal"),
        ("process", "the same with a journal that survives kill -9"),
        ("power", "the same with a journal that survives a power cut"),
    ):
        ratio = found[name] / found["bare, synced"]
        say(words, f"{found[name]:.0f} µs")
        kept &= say("  over bare write + fsync + rename (at most 3)", f"{ratio:.2f}x", ratio <= 3)
    return kept


def git(folder: Path, *arguments: str) -> None:
    quiet = ["-c", "user.name=x", "-c", "user.email=x@y", "-c", "gc.auto=0"]
    subprocess.run(["git", *quiet, *arguments], cwd=folder, check=True, capture_output=True)


async def snapshots(base: Path) -> None:
    """Print the time to commit one changed file with git and reset it, and the time to change it in a call and undo the call."""
    for files in GIT:
        folder = folder_of(base / "git", files)
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "before")

        async def by_git(folder: Path = folder) -> None:
            (folder / "d0" / "f0").write_text(f"{time.perf_counter_ns()}")
            git(folder, "add", "-A")
            git(folder, "commit", "-qm", "call")
            git(folder, "reset", "-q", "--hard", "HEAD~1")

        found = await medians({"git": by_git}, 3, 3)
        say(f"git add, commit, reset --hard, {files} files", f"{found['git']:.0f} µs")
        files_of = DirectoryFilesystem(folder, staging=base / f"aside-git{files}")
        gate = open_gate([rewrite], filesystem=files_of)

        async def by_call(gate: Gate = gate, files_of: DirectoryFilesystem = files_of) -> None:
            await gate.invoke("rewrite", call_id="call")
            files_of.undo("call", run_id=gate.run.run_context.request_id)

        found = await medians({"call": by_call}, 50, 3)
        say(f"a call and its undo, {files} files", f"{found['call']:.0f} µs")
        files_of.close()


async def searches() -> bool:
    """Search 200,000 lines in memory with Handrail's linear engine and with Python's. Return whether the limits hold."""
    lines = [
        f"    value_{number} = compute({number % 97}, name='line {number}')" for number in range(200_000)
    ]
    data = "\n".join(lines).encode()
    kept = True
    for text in ("nowhere", r"compute\(9\d, \w+='line \d*7'", "(?i)VALUE_1234"):
        ours, python = line_pattern(text), re.compile(text)

        async def by_rust(pattern: Pattern = ours) -> None:
            for _ in matches(pattern, "a.py", data):
                pass

        async def by_python(pattern: re.Pattern[str] = python) -> None:
            for number, line in enumerate(data.decode().split("\n"), 1):
                if pattern.search(line.removesuffix("\r")):
                    Match("a.py", number, line[:500])

        found = await medians({"rust": by_rust, "python": by_python}, 1)
        say(f"search 200,000 lines for {text}", f"{found['rust'] / 1000:.0f} ms")
        ratio = found["rust"] / found["python"]
        kept &= say("  over Python's engine (at most 1.25)", f"{ratio:.2f}x", ratio <= 1.25)
    return kept


async def main(where: Path) -> int:
    base = Path(tempfile.mkdtemp(prefix=".handrail-bench-", dir=where))
    try:
        few, many = folder_of(base, FEW), folder_of(base, MANY)
        kept = await reads(few, many)
        kept &= await writes(few, base)
        kept &= await searches()
        if shutil.which("git"):
            await snapshots(base)
    finally:
        shutil.rmtree(base)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))))
