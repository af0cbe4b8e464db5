"""Every example runs as it stands, in a process of its own, and shows what it says it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
PARTS = {FOLDER / "newsroom", FOLDER / "inbox"}
"""What is run by another file: a folder of workers, and the inbox, which has its own tests."""
EXAMPLES = sorted(path for path in FOLDER.rglob("*.py") if path.parent not in PARTS)

SHOWN = {
    "hello.py": [
        "2 x bread added\n   files: list.txt   lines: 1   (kept)",
        "ValueError: the shop does not sell durians\n   files: list.txt   lines: 1   (as before)",
        "files: list.txt, milk.txt   lines: 2   (one of two kept)",
        "- itme: unknown; did you mean item?",
        "order was not approved (nobody there)",
        "took longer than 0.2 seconds and was stopped",
    ],
    "preview.py": [
        "   > no\n   edit_file: edit_file was not approved (denied)",
        "plan.md: 'see Anna on monday\\n'\n\n2.",
        "(somebody adds a line to the file while you look)\n   > yes\n   edit_file: edit_file is not allowed: plan.md exists",
        "plan.md: 'see Anna on Monday\\ncall mum\\n'",
        "`make -s`: exit code 2",
        "in the folder: Makefile, plan.md",
        "undone: plan.md\n   plan.md: 'see Anna on monday\\ncall mum\\n'",
    ],
    "workers.py": [
        "nothing is wrong with ['critic', 'editor', 'main']",
        "main > editor > count_words  ok",
        "critic: {'good': True, 'remarks': ['short', 'clear']}",
        "main said: That is all.",
        "publish was not approved (nobody there)",
        "requests: 7",
        "broken.md:2: `tool` unknown; did you mean tools?",
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
    "handoff/sequential.py": ["['rain', 'clouds', 'wind']\n2 calls of the model\n"],
    "handoff/parallel.py": ["Both(technical='it works', business='it pays')\n"],
    "handoff/nested.py": [
        "['wash: done by a model', 'dry: done by a model']\n",
        "['wash: wash by hand', 'dry: dry by hand']\n",
        "['wash: left undone', 'dry: left undone']\n",
        "do_all > do_all.client > do_task > do_task.",
    ],
    "handoff/streaming.py": [
        "heard Step(step=1, total=2)\nheard Step(step=2, total=2)\nCompleted(completed=2)\n",
        "work_through.client says Step(step=1, total=1)\n1\n",
    ],
}


@pytest.mark.timeout(120)  # a real model is at work in one of them
@pytest.mark.parametrize("example", EXAMPLES, ids=[str(path.relative_to(FOLDER)) for path in EXAMPLES])
def test_example_runs_and_shows_it(example: Path, tmp_path: Path) -> None:
    """It ends by itself, without a complaint, and what it promises is on the screen."""
    run = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert (run.returncode, run.stderr) == (0, "")
    for piece in SHOWN[example.relative_to(FOLDER).as_posix()]:
        assert piece in run.stdout
