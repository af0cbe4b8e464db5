"""Tests that run each example unchanged, in its own process, and check its output."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import ROOT, warm_python
from support.raw_server import raw_server, whole
from support.terminals import window
from support.texts import NOT_A_MODEL_NAME

pytestmark = pytest.mark.timeout(900)  # starts processes, one of them with a real model

FOLDER = ROOT / "examples"
PARTS = {FOLDER / "support", FOLDER / "inbox", FOLDER / "embedded"}
"""Folders whose files are not run here: the workers of `support.py`, and the inbox and the FastAPI app, which have their own tests."""
EXAMPLES = sorted(path for path in FOLDER.rglob("*.py") if path.parent not in PARTS)

ON_ONE_PYTHON = {FOLDER / "local_model.py"}
"""Slow examples with the embedded model, which do not depend on the Python version."""

SHOWN = {
    "hello.py": [
        "through the gate.\n   It is 129 euros.",
        "2 x bread added\n   files: list.txt   lines: 1   (kept)",
        "ValueError: the shop does not sell durians\n   files: list.txt   lines: 1   (as before)",
        "files: list.txt, milk.txt   lines: 2   (one of two kept)",
        "- itme: unknown; did you mean item?",
        "order was not approved (nobody there)",
        "took longer than 0.2 seconds and was stopped",
    ],
    "pictures.py": [
        "The bars match your sketch. \n",
        "[image sketch.png: image/png, 70 bytes] from a person\n",
        "bars.png: image/png, ",
        "The journal has the bytes once each: 2 blobs\n",
    ],
    "code_fixer.py": [
        "- not yet: This must pass: ",
        "run_command was undone: the folder is unchanged\n- run_command: `make tidy`: exit code 2\n",
        "(done, 5 requests)\nIn the folder: price.py, test_price.py\n",
        "together * 0.9 if together >= 100 else together\n",
    ],
    "research.py": [
        "- a researcher ended: done\n",
        "- a researcher ended: failed: prompt 'researcher': this run's share of the budget for requests is too low",
        "# Why sales fell in May\n\nBergen was closed for repairs. (may.md)\nPrices rose by four percent. (prices.md)\n",
        "Left open: What did rivals do?\n10 requests of 30\n",
    ],
    "cleanup.py": [
        "(somebody adds a row to the file while the question is open)\n> yes\n\n? tidy_phones",
        "+Eve Ode,eve@example.org,+4755667788\n\n> yes\n- tidy_phones: 5 numbers\n",
        "> no: those are two people; go by the mail\n- drop_repeated: drop_repeated was not approved (denied)",
        "> yes\n- drop_repeated: 4 of 5 rows kept\n",
        "The last change is undone in: contacts.csv\n5 rows again.\n",
    ],
    "support.py": [
        "bank: 20.00 to ada\n",
        "mail: a receipt to ada\n",
        "? billing > settle > refund: 900.00 for bob\n",
        "refund was not approved (denied): more than 50.00 needs a signature",
        "bank: 15.00 to eve\n  main > billing > settle > refund: ok",
        "bank: 15.00 charged to eve again\n  main > billing > settle > refund.undo: ok, It was undone.\n",
        "  settle failed, so these calls were undone: refund\n",
        "technical: Please use the web page until tonight.\n",
    ],
    "memory.py": [
        "+- eats no meat (run monday, local)\n> yes\n",
        "> no: no numbers, please\nremembered under food; remember was not approved (denied)",
        "The notes: food.md\n",
        "== friday: Where shall we eat?\nI know this: food: eats no meat (run monday, local)\n",
        "The origin of that note is the run monday, in which you said: I am a vegetarian",
        "-- eats no meat (run monday, local)\n> yes\nforgotten under food\n",
    ],
    "form.py": ["Person fills the form in.\n120.00 for Oslo on 2026-03-04 go to account 4711.\n"],
    "approval_over_restart.py": [
        "ask, in its own process:\n  publish was entered\n  the run is parked; it waits for: publish uses 'fs.write'\n  in the folder: []",
        "  +Open from 10 to 18.\n  answered: yes\n  in the folder: []\n",
        "  I was told: hours.txt is published\n  in the folder: ['hours.txt']\n",
        "I was told: publish was not approved (denied): not on a Friday",
    ],
    "local_model.py": [
        "a 135M demo model",
        "-> 3 desk lamps for Maria Lopez",
        "record_order failed: ValueError: only 12 coffee mugs are left",
        "orders.csv:\n      Maria Lopez,desk lamps,3\n      Tom Becker,notebooks,12\n\n",
        "good  Works like a charm.",
    ],
    "handoff/browser_only.py": [
        'Saved to account 4711.\n{"city":"Oslo"}\n',
        "get_user_input failed: tool 'get_user_input' needs 'wait_for'",
        "the person was shown {'fields': ['city']}\n",
    ],
    "handoff/agent_only.py": [
        'Ticket 7: 2 findings.\n["it rains","it pours"]\n',
        "deep_analysis failed: tool 'deep_analysis' needs 'prompt_model'",
        "Findings(findings=['it rains', 'it pours'])\n",
    ],
    "handoff/flexible.py": [
        "Person: tea for 3\nAgentEnvironment: coffee for 4\nHeadlessEnvironment: water for 0\n"
    ],
    "handoff/sequential.py": ["['rain', 'clouds', 'wind']\n2 model calls\n"],
    "handoff/parallel.py": ["Both(technical='it works', business='it pays')\n"],
    "handoff/nested.py": [
        "['wash: done by a model', 'dry: done by a model']\n",
        "['wash: wash by hand', 'dry: dry by hand']\n",
        "['wash: left undone', 'dry: left undone']\n",
        "do_all > do_all.client > do_task > do_task.",
    ],
    "handoff/streaming.py": [
        "heard Step(step=1, total=2)\nheard Step(step=2, total=2)\nCompleted(completed=2)\n",
        "work_through says Step(step=1, total=1)\n1\n",
    ],
}


FORM = [
    ("place (text):", "Rome"),
    ("day (date):", "yesterday"),
    ("expected: a date", "2026-05-01"),
    ("add one?", "y"),
    ("what (choose one):", "1"),
    ("euros (number):", "450"),
    ("add another?", "n"),
    ("note (text", ""),
    ("s send (Enter)", ""),
]
"""Questions at the terminal, each with the answer that is typed."""

WITH_A_MODEL = {
    "code_fixer.py": [],
    "research.py": [],
    "cleanup.py": [],
    "support.py": [],
    "form.py": ["--by", "model"],
    "approval_over_restart.py": ["ask", "here"],
}
"""Examples that accept `--model`, with the other arguments that they need."""


def run(example: str | Path, *arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = warm_python.run([FOLDER / example, *arguments], cwd=cwd, env=os.environ | env)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.timeout(900)  # one example runs a real model
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            path, id=str(path.relative_to(FOLDER)), marks=[pytest.mark.once] * (path in ON_ONE_PYTHON)
        )
        for path in EXAMPLES
    ],
)
def test_example_runs_and_shows_it(example: Path, tmp_path: Path) -> None:
    """Each example ends without an error, and prints the expected output."""
    ended = run(example, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    for piece in SHOWN[example.relative_to(FOLDER).as_posix()]:
        assert piece in ended.stdout


@pytest.mark.once
@pytest.mark.parametrize("example", WITH_A_MODEL)
def test_an_example_uses_the_model_it_is_given(example: str, tmp_path: Path) -> None:
    """If an example is given an unknown model, it reports that, and does not use its scripted model instead."""
    ended = run(example, *WITH_A_MODEL[example], "--model", "nosuch", cwd=tmp_path)
    assert ended.returncode == 1
    assert f"'nosuch' {NOT_A_MODEL_NAME}" in ended.stderr


@pytest.mark.once
async def test_a_model_over_http_fills_the_form_in(tmp_path: Path) -> None:
    """If an example is given a provider's model, it sends its requests to that provider."""
    filled = {"place": "Rome", "day": "2026-05-01", "expenses": [{"what": "meal", "euros": 12.5}]}
    message = {"role": "assistant", "content": json.dumps(filled)}
    completion: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 1, "model": "any"}
    completion["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
    async with raw_server(whole(completion)) as server:
        environment = {"OLLAMA_BASE_URL": f"{server.url}/v1"}
        ended = await asyncio.to_thread(
            run, "form.py", "--by", "model", "--model", "ollama:any", cwd=tmp_path, **environment
        )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "12.50 for Rome on 2026-05-01 go to account 4711." in ended.stdout
    assert "Went to Bergen on 3 March 2026" in json.dumps(server.bodies[0])


@pytest.mark.once
def test_somebody_fills_the_form_in_at_a_terminal(tmp_path: Path) -> None:
    """At a terminal, the form asks again if a value is invalid.

    It refuses an amount over the limit, and does not show the limit.
    """
    with window() as seen:
        seen.start([sys.executable, str(FOLDER / "form.py")], env=os.environ, cwd=tmp_path)
        for asked, typed in FORM:
            seen.wait_for(asked)
            seen.type(f"{typed}\n")
        assert seen.end() == 0
        assert "TerminalEnvironment fills the form in." in seen.text()
        assert "450.00 is more than a trip may cost" in seen.text()
        assert "400" not in seen.text()


@pytest.mark.once
@pytest.mark.parametrize("example", ["code_fixer.py", "research.py", "cleanup.py"])
def test_a_script_is_not_let_loose_on_a_folder_of_ones_own(example: str, tmp_path: Path) -> None:
    """An example refuses to run its scripted model on the user's own folder, and asks for a real model."""
    ended = run(example, "--folder", str(tmp_path), cwd=tmp_path)
    assert ended.returncode == 2
    assert "Name a model: --model provider:name." in ended.stderr


@pytest.mark.once
def test_the_fixer_is_not_done_when_its_command_could_not_run(tmp_path: Path) -> None:
    """The code fixer reports that nothing was fixed if its test command could not run."""
    ended = run("code_fixer.py", "--test", "no-such-program", cwd=tmp_path)
    assert ended.returncode == 1
    assert "could not run: `no-such-program`" in ended.stdout
    assert "Not fixed: " in ended.stderr
    assert "(done, " not in ended.stdout


@pytest.mark.once
def test_the_approval_waits_and_is_answered_once(tmp_path: Path) -> None:
    """A run is parked again if it is resumed before it has an answer. Once it is resumed with the answer, it publishes the page."""
    example = "approval_over_restart.py"
    assert "the run is parked" in run(example, "ask", "here", cwd=tmp_path).stdout
    early = run(example, "resume", "here", cwd=tmp_path)
    assert early.returncode == 1
    assert "RunParked" in early.stderr
    assert "answered: yes" in run(example, "answer", "here", "yes", cwd=tmp_path).stdout
    assert not (tmp_path / "here/site/hours.txt").exists()
    assert "hours.txt is published" in run(example, "resume", "here", cwd=tmp_path).stdout
    assert (tmp_path / "here/site/hours.txt").read_text() == "Open from 10 to 18.\n"


def test_every_example_is_in_both_tables() -> None:
    """Both tables of examples, beside the examples and in the documentation, list every example."""
    for table in (FOLDER / "README.md", FOLDER.parent / "docs/examples.md"):
        text = table.read_text()
        assert [name for name in SHOWN if f"`{name}`" not in text] == []
