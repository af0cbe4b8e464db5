"""Tests for serving without the `serve` extra: whichever package is missing, the error says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

MADE = """
from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal
from handrail.errors import DefinitionError
try:
    from handrail.serve import PromptSource, asgi
    asgi(PromptSource(Prompt("p", "Answer."), Adapter(ScriptedModel([]))), journal=SqliteJournal("runs.db"))
except DefinitionError as error:
    print(error)
"""
ASKED = "from handrail.cli import main\nsys.argv = ['handrail', 'serve', 'desk.py']\nmain()\n"


def without(name: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new process in which this package can be neither imported nor found."""
    hidden = (
        "import sys, importlib.util as util\nfind = util.find_spec\n"
        f"util.find_spec = lambda name, *more: None if name == {name!r} else find(name, *more)\n"
        f"sys.modules[{name!r}] = None\n"
    )
    command = [sys.executable, "-c", hidden + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("name", ["starlette", "ag_ui"])
def test_an_app_can_not_be_made_without_it(tmp_path: Path, name: str):
    """If starlette or ag_ui is missing, an app can't be made, and the error says how to install the extra."""
    ended = without(name, MADE, tmp_path)
    assert ended.returncode == 0, ended.stderr
    said = f"serving needs {name}, which is not installed. Install it with: pip install 'handrail[serve]'\n"
    assert ended.stdout == said


@pytest.mark.parametrize("name", ["starlette", "uvicorn", "ag_ui"])
def test_the_command_says_so_too(tmp_path: Path, name: str):
    """`handrail serve` reports a missing package before it loads the app."""
    ended = without(name, ASKED, tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert f"serving needs {name}, which is not installed." in ended.stderr
    assert "pip install 'handrail[serve]'" in ended.stderr
