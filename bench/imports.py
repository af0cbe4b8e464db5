"""Measure the cost of imports from Handrail, compared with imports of the libraries behind them.

The figures are medians of the CPU time of fresh interpreters, over interleaved rounds. Bytecode is on disk, as for an
installed package.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

ROUNDS = int(os.environ.get("ROUNDS", "15"))
FLOOR = "import pydantic, asyncio; from pydantic import BaseModel, Field, TypeAdapter"
PROGRAM = "import sys; from handrail.cli import main; sys.argv = ['handrail', "
EMPTY_JOURNAL = (
    "import os; from handrail import SqliteJournal; SqliteJournal(os.environ['HANDRAIL_JOURNAL']).close()"
)
LINES = {
    "python alone": "pass",
    "pydantic, anyio": "import pydantic, anyio",
    "handrail": "import handrail",
    "names of pydantic": FLOOR,
    "hello world's names": "from handrail import Agent, tool",
    "names of pydantic, anyio": f"import anyio; {FLOOR}",
    "the words of a tool": "from handrail import Tool, ToolContext, ToolResult, gather, tool",
    "typer": "import typer",
    "handrail --help": f"{PROGRAM}'--help']; main()",
    "handrail runs list": f"{PROGRAM}'runs', 'list']; main()",
}
LIMITS = [
    ("handrail", "pydantic, anyio", 1.2),
    ("hello world's names", "names of pydantic", 1.3),
    ("the words of a tool", "names of pydantic, anyio", 1.2),
    ("handrail runs list", "typer", 3),
]


def cpu_milliseconds(line: str, environment: dict[str, str]) -> float:
    """Return the user and system time of a fresh interpreter that runs one line, in milliseconds.

    Exits if the line fails.
    """
    process = subprocess.Popen([sys.executable, "-c", line], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"`{line}` failed")
    return (usage.ru_utime + usage.ru_stime) * 1e3


def main() -> None:
    with tempfile.TemporaryDirectory() as bytecode:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**kept, "PYTHONPYCACHEPREFIX": bytecode, "HANDRAIL_JOURNAL": f"{bytecode}/runs.db"}
        cpu_milliseconds(EMPTY_JOURNAL, environment)
        for line in LINES.values():
            cpu_milliseconds(line, environment)  # the first run writes the bytecode
        taken: dict[str, list[float]] = {name: [] for name in LINES}
        for _ in range(ROUNDS):
            for name, line in LINES.items():
                taken[name].append(cpu_milliseconds(line, environment))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    print(f"CPU time of a fresh interpreter, median of {ROUNDS} rounds; load {os.getloadavg()[0]:.1f}")
    for name, line in LINES.items():
        print(f"{name:24} {medians[name]:7.1f} ms   {line}")
    for name, floor, most in LIMITS:
        ratio = medians[name] / medians[floor]
        verdict = "ok" if ratio <= most else "MISSED"
        print(f"{name} over {floor}: {ratio:.2f}x   at most {most}x   {verdict}")


if __name__ == "__main__":
    main()
