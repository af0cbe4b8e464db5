"""What importing Handrail costs beside what it stands on, and what it leaves for later.

pydantic, anyio and Handrail all load themselves when they are used, so two lines are held to 1.2:
the bare imports against each other, and the words a tool needs against the names of pydantic and the
event loop that they are made of. All are measured in one run and shown (`-s`).
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

FLOOR = "import pydantic, anyio, asyncio; from pydantic import BaseModel, Field, TypeAdapter"
LINES = {
    "python alone": "pass",
    "import pydantic, anyio": "import pydantic, anyio",
    "the same, names touched": "import pydantic, anyio; from pydantic import BaseModel, Field, TypeAdapter",
    "the same, and the loop": FLOOR,
    "import handrail": "import handrail",
    "the words of a tool": "from handrail import Tool, ToolContext, ToolResult, gather, tool",
}
MOST = 1.2
ROUNDS = 25 if os.environ.get("HANDRAIL_DEEP") else 7

LATER = ("griffe", "opentelemetry", "aiohttp", "starlette", "typer", "rich", "jinja2", "yaml")
"""Loaded when first used, or belonging to an extra."""


def environment(bytecode: Path) -> dict[str, str]:
    """An installed package has its bytecode on disk: here too, in a folder of the test's own."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(bytecode)}


def cpu_milliseconds(line: str, env: dict[str, str]) -> float:
    """User and system time of a fresh interpreter that runs one line."""
    process = subprocess.Popen([sys.executable, "-c", line], env=env)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return (usage.ru_utime + usage.ru_stime) * 1000


def test_importing_costs_little_more_than_what_it_stands_on(tmp_path: Path):
    """Medians of fresh interpreters, in turns: at most 1.2 times the floor."""
    env = environment(tmp_path / "bytecode")
    for line in LINES.values():
        cpu_milliseconds(line, env)  # writes the bytecode
    spent: dict[str, list[float]] = {name: [] for name in LINES}
    for _ in range(ROUNDS):
        for name, line in LINES.items():
            spent[name].append(cpu_milliseconds(line, env))
    medians = {name: statistics.median(times) for name, times in spent.items()}
    print(f"\nCPU of a fresh interpreter, median of {ROUNDS}:")
    for name, median in medians.items():
        print(f"  {name:26} {median:6.1f} ms")
    bare = medians["import handrail"] / medians["import pydantic, anyio"]
    words = medians["the words of a tool"] / medians["the same, and the loop"]
    print(
        f"  import handrail is {bare:.2f} of the bare line; its words are {words:.2f} of what they are made of"
    )
    assert bare <= MOST
    assert words <= MOST


def test_importing_loads_nothing_that_can_wait(tmp_path: Path):
    """No docstring parser, no telemetry, nothing of an extra is in `sys.modules` afterwards."""
    code = f"import sys; from handrail import tool, open_gate; print([name for name in {LATER!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_the_packages_that_wait_are_named_as_they_are_imported():
    """Guards the list above: the two of them that the core depends on exist by these names."""
    code = f"import griffe, opentelemetry, sys; print([name for name in {LATER!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "['griffe', 'opentelemetry']\n"


def test_no_public_name_loads_the_command_line_or_the_terminal():
    """Only `TerminalEnvironment` itself needs the terminal, and nothing needs the command line."""
    code = (
        "import sys, handrail\n"
        "for name in handrail.__all__:\n"
        "    if name != 'TerminalEnvironment':\n"
        "        getattr(handrail, name)\n"
        "avoided = ('handrail.cli', 'handrail.environment.terminal')\n"
        "print([name for name in sys.modules if name.startswith(avoided)])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
