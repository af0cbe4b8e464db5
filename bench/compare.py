"""Compare the gate and the set-up of a run at old commits with those in the working tree, as ratios to the floor.

    python bench/compare.py COMMIT ...

Each side is a checkout, which a process measures with the checkout's own bench/run.py. The processes take turns, so a busy
machine slows all of them. The cost of a side is divided by its own floor in the same round. A process's figures vary by up to
a tenth with its memory layout, so all are restarted several times. The bare gate may be at most 1 µs slower than at the last COMMIT.
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
from typing import Any, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = int(os.environ.get("ROUNDS", "5"))
"""How many rounds each process measures."""
PROCESSES = int(os.environ.get("PROCESSES", "12"))
"""How many processes measure each side."""
MOST = 1.0
"""Maximum number of microseconds by which the bare gate may be slower."""


ROWS = ("gate", "invoked", "timeout", "suspending", "plain", "writing", "set-up of a run")


class Stub:
    """A model that answers at once."""

    name = "bench:stub"

    def __init__(self) -> None:
        from handrail.messages import Traits

        self.traits = Traits(native_output=True)

    async def stream(self, request: Any, /) -> Any:
        from handrail.messages import StopPart, TextPart

        yield TextPart("done")
        yield StopPart("done")


def measure() -> None:
    """Measure one round for each line of standard input. This is the main function of a side's process."""
    import run
    from handrail import Adapter, Prompt

    side: Any = run

    async def suspending(params: Any, *, context: Any) -> Any:
        await asyncio.sleep(0)
        return await side.handler(params, context=context)

    def plain(params: Any, *, context: Any) -> Any:
        return side.ToolResult.ok(params.city, "fine")

    plain.__annotations__ = suspending.__annotations__ = get_type_hints(side.handler, side.__dict__)
    model: Any = Stub()
    adapter = Adapter(model)
    prompt = Prompt("bench", "Be brief.", tools=[side.Tool("forecast", "Forecast.", side.handler)])

    async def one_run() -> None:
        await adapter.evaluate(prompt, "Go.")

    rows = {
        "floor": side.floor,
        "gate": side.through(side.a_gate()),
        "invoked": side.invoked(side.a_gate()),
        "timeout": side.through(side.a_gate(timeout=30)),
        "suspending": side.through(side.a_gate(suspending)),
        "plain": side.through(side.a_gate(plain)),
        "set-up of a run": lambda: side.cpu_of(one_run, 200),
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

    def __init__(self, name: str, tree: Path) -> None:
        self.name = name
        self.tree = tree
        self.rounds: list[dict[str, float]] = []

    def median(self, name: str) -> float:
        return statistics.median(each[name] for each in self.rounds)

    def ratio(self, name: str) -> float:
        """Return the median ratio of a cost to the floor of the same round."""
        floor = "writing floor" if name == "writing" else "floor"
        return statistics.median(each[name] / each[floor] for each in self.rounds)


def main(commits: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(commit, Path(folder) / str(number)) for number, commit in enumerate(commits)]
        try:
            for side in sides:
                worktree = ["git", "worktree", "add", "--detach", "-q", side.tree, side.name]
                subprocess.run(worktree, cwd=ROOT, check=True)
            sides.append(Side("now", ROOT))
            for _ in range(PROCESSES):
                measure_in_turn(sides)
        finally:
            for side in sides[: len(commits)]:
                subprocess.run(["git", "worktree", "remove", "--force", side.tree], cwd=ROOT)
    return report(sides)


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


def report(sides: list[Side]) -> int:
    floor = statistics.median(side.median("floor") for side in sides)
    load = os.getloadavg()[0]
    print(
        f"Medians of CPU time over {len(sides[0].rounds)} rounds, load {load:.1f}. The floor is {floor:.2f} µs.\n"
    )
    print(f"{'':16}" + "".join(f"{side.name[:8]:>22}" for side in sides))
    for name in ROWS:
        figures = (f"{side.median(name):10.2f} µs {side.ratio(name):7.2f}x" for side in sides)
        print(f"{name:16} " + " ".join(figures))
    slower = (sides[-1].ratio("gate") - sides[-2].ratio("gate")) * floor
    verdict = "ok" if slower <= MOST else "MISSED"
    print(f"\nthe bare gate changed by {slower:+.2f} µs   at most {MOST:+} µs   {verdict}")
    return 0 if slower <= MOST else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        measure()
    elif sys.argv[1:]:
        sys.exit(main(sys.argv[1:]))
    else:
        sys.exit("Name the commit to compare with: python bench/compare.py COMMIT")
