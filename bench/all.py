"""Run the benchmarks in PARTS, and list the missed limits at the end.

A benchmark that fails or misses a limit does not stop the others, but makes the exit status 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = (
    "imports.py",
    "definition.py",
    "run.py",
    "directory.py",
    "journal.py",
    "attachments.py",
    "mcp_calls.py",
    "parked.py",
)


def run(part: str) -> list[str]:
    """Run one benchmark, print its output, and return a line for each limit that it missed, or for its failure."""
    print(f"== {part}", flush=True)
    missed: list[str] = []
    with subprocess.Popen([sys.executable, HERE / part], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.rstrip().endswith("MISSED"):
                missed.append(f"{part}: {' '.join(line.split())}")
    if process.returncode and not missed:
        missed.append(f"{part}: ended with exit status {process.returncode}")
    return missed


def main() -> int:
    missed = [line for part in PARTS for line in run(part)]
    print("\n".join(["== missed:", *missed]) if missed else "== every limit was met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
