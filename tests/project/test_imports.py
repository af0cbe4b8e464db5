"""What importing Handrail leaves for later. What it costs is measured by bench/imports.py."""

import subprocess
import sys

LATER = ("griffe", "opentelemetry", "aiohttp", "starlette", "typer", "rich", "jinja2", "yaml")
"""Loaded when first used, or belonging to an extra."""


def test_importing_loads_nothing_that_can_wait():
    """No docstring parser, no telemetry, nothing of an extra is in `sys.modules` afterwards."""
    code = f"import sys; from handrail import tool, open_gate; print([name for name in {LATER!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_the_packages_that_wait_are_named_as_they_are_imported():
    """Guards the list above: the two of them that the core depends on exist by these names."""
    code = f"import griffe, opentelemetry, sys; print([name for name in {LATER!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "['griffe', 'opentelemetry']\n"
