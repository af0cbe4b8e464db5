"""Measure the cost of running a command, by back end and folder size, compared with starting it directly.

    python bench/shell.py [FOLDER]      (FOLDER is where the files are made; by default the system's temporary
    folder)

The figures are medians of the wall time of `true` over interleaved rounds. The shell checks the overlay's mounts on
every run, so the figures include that. The only limit is that the overlay costs about the same at any size.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from handrail.resources.shell import Allow, Layers, Shell, probe

ROUNDS = int(os.environ.get("ROUNDS", "25"))
SIZES = (10, 1_000, 100_000)
COPIED = (10, 1_000)
LIMIT = 1.3


def make(base: Path, count: int) -> Layers:
    """Create a folder with this many files, a thousand per subfolder, and return layers over it."""
    for name in ("root", "upper", "work"):
        (base / name).mkdir(parents=True)
    for number in range(count):
        place = base / "root" / str(number // 1000)
        if number % 1000 == 0:
            place.mkdir()
        (place / str(number)).write_text(str(number))
    return Layers((base / "root",), base / "upper", base / "work")


def runner(
    layers: Layers, backend: Literal["overlay", "copy"], *, network: bool = False
) -> Callable[[], Awaitable[float]]:
    shell = Shell([Allow(...)], backend=backend, network=network)

    async def once() -> float:
        began = time.perf_counter()
        finished = await shell.run(["true"], layers)
        taken = time.perf_counter() - began
        assert finished.ok
        assert finished.backend == backend
        return taken

    return once


async def bare() -> float:
    began = time.perf_counter()
    await asyncio.to_thread(subprocess.run, ["true"], check=True)
    return time.perf_counter() - began


async def measure(base: Path) -> dict[str, float]:
    print(f"support: {probe(base)}")
    layers = {count: make(base / str(count), count) for count in SIZES}
    ways: dict[str, Callable[[], Awaitable[float]]] = {"bare": bare}
    for count in SIZES:
        ways[f"overlay {count:,} files"] = runner(layers[count], "overlay")
    ways["overlay 10 files, network on"] = runner(layers[10], "overlay", network=True)
    for count in COPIED:
        ways[f"copy {count:,} files"] = runner(layers[count], "copy")
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, way in ways.items():
            taken[name].append(await way())
    return {name: statistics.median(times[1:]) * 1000 for name, times in taken.items()}


def main(folder: str | None) -> int:
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=folder))
    try:
        medians = asyncio.run(measure(base))
    finally:
        shutil.rmtree(base)
    for name, milliseconds in medians.items():
        print(f"{name:32} {milliseconds:8.2f} ms")
    ratio = medians[f"overlay {SIZES[-1]:,} files"] / medians["overlay 10 files"]
    print(
        f"{SIZES[-1]:,} files over 10: {ratio:.2f}× (at most {LIMIT}×: {'met' if ratio <= LIMIT else 'MISSED'})"
    )
    return ratio > LIMIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
