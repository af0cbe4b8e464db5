"""Tests that run the other libraries' code in the migration guides (`docs/moving`) on those libraries.

pydantic-ai is installed for the bridge. The other libraries need separate environments, which `make test-deep` creates
(`scripts/peers`). Without its environment, a library's test is skipped with a reason, or fails in a deep run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from project.documents import DOCS, ROOT, chains, compare

pytestmark = pytest.mark.once  # most libraries' code runs on the interpreter of a separate environment

PAGES = sorted((DOCS / "moving").glob("*.md"))
RUNNER = """
import contextlib, io, json, sys
names, said = {"__name__": "__main__"}, []
for code in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    said.append(printed.getvalue())
print(json.dumps(said))
"""
# Keeps the libraries from sending traces to a service.
QUIET = {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


def python_with(library: str) -> str:
    """Return the Python in whose environment the library is installed.

    Skips the test if there is none, except in a deep run.
    """
    if library == "pydantic_ai":
        return sys.executable
    python = ROOT / ".components/peers" / library / "bin/python"
    if not python.exists() and not os.environ.get("HANDRAIL_DEEP"):
        pytest.skip(f"{library} is not installed. Run `scripts/peers`, or `make test-deep`.")
    return str(python)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_other_half_runs_on_the_other_library(page: Path, tmp_path: Path) -> None:
    """The blocks for the other library run on it, in order, and print what the page shows."""
    (blocks,) = chains(page, page.stem)
    assert [block.prints is not None for block in blocks] == [False, True, True, True, True]
    python = python_with(page.stem)
    ended = subprocess.run(
        [python, "-c", RUNNER],
        input=json.dumps([block.code for block in blocks]),
        cwd=tmp_path,
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr
    for block, printed in zip(blocks, json.loads(ended.stdout), strict=True):
        compare(page, block, printed)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_our_half_stands_beside_it(page: Path) -> None:
    """Each migration guide has four examples with Handrail, each with its output."""
    (blocks,) = chains(page)
    assert [block.prints is not None for block in blocks] == [True, True, True, True]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_page_names_the_versions_it_was_run_on(page: Path) -> None:
    """The versions named on the page are the pinned ones."""
    pins = ROOT / "requirements/peers" / f"{page.stem}.txt"
    installed = (pins if pins.exists() else ROOT / "requirements/dev.txt").read_text()
    named = re.findall(r"([a-z-]+) (\d+\.\d+\.\d+)", page.read_text())
    assert named
    assert [
        f"{name}=={version}"
        for name, version in named
        if not re.search(rf"^{name}=={re.escape(version)}\s", installed, re.MULTILINE)
    ] == []
