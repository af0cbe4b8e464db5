"""Compare the gate at an old commit with the gate in the working tree, as ratios to the floor.

    python bench/compare.py COMMIT

Each side is a checkout, which a process measures with the checkout's own bench/run.py. The two processes take turns, so a busy
machine slows both. The cost of a side is divided by its own floor in the same round. A process's figures vary by up to
a tenth with its memory layout, so both are restarted several times. The bare gate may be at most 1 µs slower than at COMMIT.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = int(os.environ.get("ROUNDS", "5"))
"""How many rounds each process measures."""
PROCESSES = int(os.environ.get("PROCESSES", "12"))
"""How many processes measure each side."""
MOST = 1.0
"""Maximum number of microseconds by which the bare gate may be slower."""


def measure() -> None:
    """Measure one round for each line of standard input. This is the main function of a side's process."""
    import run

    side: Any = run
    rows = {
        "floor": side.floor,
        "gate": side.through(side.a_gate()),
        "invoked": side.invoked(side.a_gate()),
        "timeout": side.through(side.a_gate(timeout=30)),
        "writing floor": side.writing_floor,
        "writing": side.through(side.a_gate(side.writing_handler)),
    }

    async def once() -> dict[str, float]:
        return {name: await timed() for name, timed in rows.items()}

    for _ in sys.stdin:
        print(json.dumps(asyncio.run(once())), flush=True)


class Process:
    """A process that measures one side."""

    def __init__(self, tree: Path) -> None:
        path = os.pathsep.join([str(tree / "src"), str(tree / "bench")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--measure"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "CALLS": os.environ.get("CALLS", "1000")},
        )

    def measure(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a measuring process ended early")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


class Side:
    """A checkout whose gate is measured, and the figures of its rounds."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.rounds: list[dict[str, float]] = []

    def median(self, name: str) -> float:
        return statistics.median(each[name] for each in self.rounds)

    def ratio(self, name: str) -> float:
        """Return the median ratio of a cost to the floor of the same round."""
        floor = "writing floor" if name == "writing" else "floor"
        return statistics.median(each[name] / each[floor] for each in self.rounds)


def main(commit: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", tree, commit], cwd=ROOT, check=True)
        try:
            sides = [Side(tree), Side(ROOT)]
            for _ in range(PROCESSES):
                measure_in_turn(sides)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    return report(commit, *sides)


def measure_in_turn(sides: list[Side]) -> None:
    """Start a process for each side, and let them measure in turn. The first round, which creates all objects, is dropped."""
    processes = [(side, Process(side.tree)) for side in sides]
    for number in range(ROUNDS + 1):
        for side, process in processes if number % 2 else processes[::-1]:
            figures = process.measure()
            if number:
                side.rounds.append(figures)
    for _, process in processes:
        process.close()


def report(commit: str, old: Side, new: Side) -> int:
    floor = statistics.median([old.median("floor"), new.median("floor")])
    print(
        f"Medians of CPU time over {len(new.rounds)} rounds. Old is {commit}. The floor is {floor:.2f} µs.\n"
    )
    print(f"{'':16} {'old':>10} {'new':>10} {'old/floor':>10} {'new/floor':>10}")
    for name in ("gate", "invoked", "timeout", "writing"):
        figures = f"{old.median(name):7.2f} µs {new.median(name):7.2f} µs"
        print(f"{name:16} {figures} {old.ratio(name):9.2f}x {new.ratio(name):9.2f}x")
    slower = (new.ratio("gate") - old.ratio("gate")) * floor
    verdict = "ok" if slower <= MOST else "MISSED"
    print(f"\nthe bare gate changed by {slower:+.2f} µs   at most {MOST:+} µs   {verdict}")
    return 0 if slower <= MOST else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit("Name the commit to compare with: python bench/compare.py COMMIT")
