"""From the command line to pytest: a run is exported as a case, and pytest replays it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from handrail.cli.runs_commands import app
from support import ROOT
from support.recorded import Recorder, call

APP = """
from handrail import Agent, ScriptedModel, ToolContext, tool
from support.recorded import TOOLS

agent = Agent(ScriptedModel(["never asked"]), "Do what is asked.", name="work", tools=TOOLS)
"""
TESTS = """
import pytest
from handrail import ScriptedModel

@pytest.mark.handrail_case("cases/r.case.json")
def test_the_incident(case):
    assert case.text == "end"

@pytest.mark.handrail_case("cases/r.case.json", model=ScriptedModel(["another end"]))
def test_another_model(case):
    assert case.text == "another end"

def test_nothing(case):
    pass
"""


def export(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)], prog_name="handrail runs")
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HANDRAIL_JOURNAL", str(tmp_path / "runs.db"))
    made = Recorder(tmp_path)
    yield made
    made.close()


def run_pytest(folder: Path, *words: str) -> str:
    """Run pytest in a folder, with the packages of this test and nothing from its configuration.

    It prints no summary (`-rN`), which repeats the messages of failures: whole in CI, cut to a line elsewhere.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rN",
        "--strict-markers",
        "-p",
        "no:cacheprovider",
        *words,
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.once
def test_yesterdays_incident_is_todays_test(recorder: Recorder):
    """Pytest collects cases by themselves and for the marker, and says what differs once the code does something else."""
    base = recorder.base
    (base / "the_app.py").write_text(APP)
    (base / "conftest.py").write_text('pytest_plugins = ["handrail.testing.fixtures"]\n')
    (base / "test_shop.py").write_text(TESTS)
    (base / "cases").mkdir()
    asyncio.run(recorder.run("r", call("note", text="one"), call("send", text="two"), "end"))
    assert "as a case" in export("r", "cases/r.case.json", "--case", "--app", "the_app:agent")
    said = run_pytest(base)
    assert "3 passed, 1 error" in said
    assert "Name the case of this test" in said
    (base / "the_app.py").write_text(APP.replace("Do what", "Do exactly what"))
    said = run_pytest(base, "--tb=short")
    assert "1 failed, 1 passed, 2 errors" in said
    assert (
        said.count("r.case.json differs from its record before the first step, the system text differs: work")
        == 2
    )
    assert "+Do exactly what is asked." in said
    assert "Traceback" not in said
    (base / "the_app.py").unlink()
    said = run_pytest(base, "cases")
    assert said.count("its prompt is at 'the_app:agent', which can't be imported") == 1
    assert "Correct the `app` in the case" in said
    assert "During handling" not in said


def test_the_export_says_what_the_case_lacks(recorder: Recorder):
    """The command names the calls that take recorded results, the agent that is missing, and options that do nothing."""
    (recorder.folder / "a").write_text("first")
    asyncio.run(recorder.run("r", call("read", path="a"), "end"))
    [id] = asyncio.run(recorder.ids("r"))
    assert "--app" in export("r", "r.case.json", "--case", code=1)
    options = ("r", "r.case.json", "--case", "--app", "support.recorded:PROMPT")
    assert f"read ({id})" in export(*options)
    assert f"read ({id})" not in export(*options, "--files", "files", "--real", "send")
    assert '"send": "real"' in Path("r.case.json").read_text()
    assert "Add --case" in export("r", "r.jsonl", "--files", "files", code=2)
    assert "no folder" in export(*options, "--files", "gone", code=1)
