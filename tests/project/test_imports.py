"""Tests that hello world loads few modules, and none that it does not need.

The tests count modules, because their number is the same on every machine. `make bench` measures the time.
"""

import subprocess
import sys

HELLO = "from handrail import Agent, tool"
MOST_MODULES = 80

LATER = ("griffe", "opentelemetry", "aiohttp", "starlette", "typer", "rich", "jinja2", "yaml", "anyio")
"""Packages that are loaded on first use, or are part of an extra."""
UNUSED = ("difflib", "sqlite3", "tomllib", "tempfile", "http", "email.message", "zipfile")
"""Parts of the standard library that hello world does not need."""
FLOOR = "import pydantic, asyncio; from pydantic import BaseModel, Field, TypeAdapter"


def loaded_by(line: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after running this line."""
    code = f"import sys\n{line}\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return set(result.stdout.split())


def of_ours(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.partition(".")[0] == "handrail")


def test_hello_world_loads_few_modules():
    """Importing what hello world uses loads few modules, and no package that is needed only later."""
    ours = of_ours(loaded_by(HELLO))
    assert len(ours) <= MOST_MODULES, ours
    packages = {name.split(".")[1] for name in ours if "." in name}
    declared = {
        "handrail.journal",
        "handrail.journal.protocol",
        "handrail.journal.records",
    }
    assert not [name for name in ours if name.startswith("handrail.journal") and name not in declared]
    assert not packages & {"guard", "resources", "environment", "runs", "workers", "serve", "cli"}


def test_hello_world_loads_nothing_that_can_wait():
    """Hello world loads no extra, no docstring parser and no telemetry.

    It loads unused parts of the standard library only if pydantic or asyncio loads them too.
    """
    loaded, floor = loaded_by(HELLO), loaded_by(FLOOR)
    assert [name for name in LATER if name in loaded] == []
    assert [name for name in UNUSED if name in loaded and name not in floor] == []


def test_the_package_itself_loads_nothing_else():
    """`import handrail` loads no other module of the package."""
    assert of_ours(loaded_by("import handrail")) == ["handrail"]


def test_a_gate_loads_no_shell_and_no_database():
    """Importing `open_gate` and `tool` loads neither the shell nor the adapter, and no package in `LATER`."""
    loaded = loaded_by("from handrail import open_gate, tool")
    assert not [
        name
        for name in of_ours(loaded)
        if name.startswith(("handrail.resources.shell", "handrail.run.adapter"))
    ]
    assert [name for name in LATER if name in loaded] == []


def test_the_packages_that_wait_are_named_as_they_are_imported():
    """Some modules that are loaded late appear, once loaded, under the names that the tests above look for."""
    loaded = loaded_by("import griffe, opentelemetry, difflib, sqlite3, tomllib")
    assert {"griffe", "opentelemetry", "difflib", "sqlite3", "tomllib"} <= loaded


def test_no_public_name_loads_the_command_line_or_the_terminal():
    """Importing public names other than `TerminalEnvironment` loads neither the command line nor the terminal."""
    names = "[getattr(handrail, name) for name in handrail.__all__ if name != 'TerminalEnvironment']"
    avoided = ("handrail.cli", "handrail.environment.terminal")
    assert [name for name in loaded_by(f"import handrail; {names}") if name.startswith(avoided)] == []


def test_the_version_loads_no_pydantic_and_the_help_no_tools():
    """`--version` and `--help` load neither pydantic nor asyncio, and of Handrail only what they print with."""
    for option in ("--version", "--help"):
        loaded = loaded_by(
            f"import io\nout, sys.stdout, sys.argv = sys.stdout, io.StringIO(), ['handrail', {option!r}]\n"
            "from handrail.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\nsys.stdout = out"
        )
        assert not loaded & {"pydantic", "asyncio", "rich", "sqlite3"}
        assert not [
            name
            for name in loaded
            if name.startswith(("handrail.tools", "handrail.run", "handrail.environment"))
        ]
        assert "handrail.cli" in loaded


def test_listing_runs_loads_neither_the_gate_nor_an_adapter():
    """What lists runs is loaded without what executes them. The other commands load that when they need it."""
    loaded = loaded_by("import handrail.cli.runs_commands\nfrom handrail.runs import list_runs")
    assert "handrail.runs.catalog" in loaded
    assert not loaded & {f"handrail.run.{each}" for each in ("adapter", "gate", "entry", "record.begin")}
    assert not loaded & {"handrail.agent", "handrail.guard.approval", "handrail.runs.check"}
