"""The effect table's column *run again after a crash*, a test a cell, with processes that are really killed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import SUPPORT

pytestmark = pytest.mark.once  # processes and terminals, at a cost: what they try is not Python's

APP = SUPPORT / "crash_app.py"


class Program:
    """The program under test: each start of it is a process of its own."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(APP)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder: Path, tool: str, mode: str) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([str(folder), tool, mode]) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        self._server.communicate(timeout=300)


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    started = Program()
    yield started
    started.close()


def crashed_and_resumed(program: Program, folder: Path, tool: str) -> tuple[list[str], str, int]:
    """What happened in the world, what the model was told, and how often somebody was asked."""
    assert program.start(folder, tool, "crash")["code"] == 137
    resumed = program.start(folder, tool, "resume")
    assert resumed["code"] == 0
    return (folder / "world").read_text().splitlines(), resumed["text"], resumed["questions"]


@pytest.mark.parametrize("tool", ["pure", "read", "staged"])
def test_what_is_all_inside_the_transaction_is_run_again(program: Program, tmp_path: Path, tool: str):
    """And the model is not asked again for what it had said."""
    world, told, _ = crashed_and_resumed(program, tmp_path, tool)
    assert world == ["asked", f"begin {tool}", f"begin {tool}", f"end {tool}", "asked"]
    assert told == f"it says: {tool} done"
    assert (tmp_path / "files" / "a.txt").exists() == (tool == "staged")


def test_what_is_idempotent_is_run_again_with_the_same_key(program: Program, tmp_path: Path):
    """So that whoever takes the key does it once."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "idempotent")
    begun = [line for line in world if line.startswith("begin")]
    assert len(begun) == 2
    assert begun[0] == begun[1]
    assert told == "it says: idempotent done"


@pytest.mark.parametrize(
    ("tool", "after", "told"),
    [
        ("compensable", ["compensated"], "what it may have done was undone"),
        ("compensable_done", ["probed"], "was done before the process ended"),
        ("compensable_not_done", ["probed", "begin", "end"], "compensable_not_done done"),
        ("compensable_unknown", ["probed", "compensated"], "what it may have done was undone"),
    ],
)
def test_what_is_compensable_is_probed_else_compensated(
    program: Program, tmp_path: Path, tool: str, after: list[str], told: str
):
    """Found to have happened it stays; found not to have, it runs; not known, it is undone."""
    world, text, _ = crashed_and_resumed(program, tmp_path, tool)
    assert [line.split()[0] for line in world] == ["asked", "begin", *after, "asked"]
    assert told in text


def test_what_is_irreversible_is_not_run_again(program: Program, tmp_path: Path):
    """The outcome is unknown, and the model is told so."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "irreversible")
    assert world == ["asked", "begin irreversible", "asked"]
    assert "it is not known whether it happened" in told


def test_a_settled_once_is_not_repeated(program: Program, tmp_path: Path):
    """Not where the handler is entered again, and not where it is not."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "once_again")
    assert world == ["asked", "paid", "asked"]
    assert told == "it says: done"
    other = tmp_path / "other"
    other.mkdir()
    world, told, _ = crashed_and_resumed(program, other, "once_settled")
    assert world == ["asked", "paid", "asked"]
    assert "it is not known whether it happened" in told


@pytest.mark.parametrize(
    ("tool", "questions", "told"),
    [
        ("once_cut", 1, "it says: done"),
        ("once_probed", 0, "it says: done"),
        ("once_failing", 0, "it is not known whether it happened"),
    ],
)
def test_a_once_that_was_cut_is_probed_or_asked_about(
    program: Program, tmp_path: Path, tool: str, questions: int, told: str
):
    """It was paid before the process ended, so it is not paid again, whoever says so."""
    world, text, asked = crashed_and_resumed(program, tmp_path, tool)
    assert world == ["asked", "paid", "asked"]
    assert asked == questions
    assert told in text
