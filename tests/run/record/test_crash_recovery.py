"""The column *rerun after a crash* of the effect table: each cell is tested with processes that are killed."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import SqliteJournal
from support.texts import OUTCOME_UNKNOWN, WAS_DONE, WAS_UNDONE

pytestmark = pytest.mark.once  # processes are slow to start, and behave the same under every Python version

APP = Path(__file__).with_name("crash_app.py")


class Program:
    """The program under test, run in a new process each time."""

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
    """Crash and resume the program, and return its effects, the model's text and the number of questions."""
    assert program.start(folder, tool, "crash")["code"] == 137
    resumed = program.start(folder, tool, "resume")
    assert resumed["code"] == 0
    return (folder / "world").read_text().splitlines(), resumed["text"], resumed["questions"]


@pytest.mark.parametrize("tool", ["pure", "read", "staged"])
def test_what_is_all_inside_the_transaction_is_run_again(program: Program, tmp_path: Path, tool: str):
    """A call whose effects are all in the transaction is rerun, and the model's recorded answer is not requested again."""
    world, told, _ = crashed_and_resumed(program, tmp_path, tool)
    assert world == ["asked", f"begin {tool}", f"begin {tool}", f"end {tool}", "asked"]
    assert told == f"it says: {tool} done"
    assert (tmp_path / "files" / "a.txt").exists() == (tool == "staged")


def test_what_is_idempotent_is_run_again_with_the_same_key(program: Program, tmp_path: Path):
    """An idempotent call is rerun with the same key, so that a service that honours the key does the work once."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "idempotent")
    begun = [line for line in world if line.startswith("begin")]
    assert len(begun) == 2
    assert begun[0] == begun[1]
    assert told == "it says: idempotent done"


@pytest.mark.parametrize(
    ("tool", "after", "told"),
    [
        ("compensable", ["compensated"], WAS_UNDONE),
        ("compensable_done", ["probed"], WAS_DONE),
        ("compensable_not_done", ["probed", "begin", "end"], "compensable_not_done done"),
        ("compensable_unknown", ["probed", "compensated"], WAS_UNDONE),
    ],
)
def test_what_is_compensable_is_probed_else_compensated(
    program: Program, tmp_path: Path, tool: str, after: list[str], told: str
):
    """A call that the probe confirms is kept, and one that it rules out is rerun. Any other call is compensated."""
    world, text, _ = crashed_and_resumed(program, tmp_path, tool)
    assert [line.split()[0] for line in world] == ["asked", "begin", *after, "asked"]
    assert told in text


def recorded(folder: Path) -> list[tuple[str, str]]:
    """Return the place and status of every finished call in the run's journal."""

    async def load() -> list[tuple[str, str]]:
        journal = SqliteJournal(folder / "runs.db")
        units = [(unit.place, unit.status) for unit in await journal.calls.load("run")]
        journal.close()
        return units

    return asyncio.run(load())


def test_a_compensation_that_was_cut_runs_again(program: Program, tmp_path: Path):
    """A compensation that a crash interrupts records nothing. It is rerun when the run is resumed, and recorded once."""
    assert program.start(tmp_path, "compensable", "crash")["code"] == 137
    assert program.start(tmp_path, "compensable", "crash in compensation")["code"] == 137
    assert recorded(tmp_path) == []
    assert "was undone" in program.start(tmp_path, "compensable", "resume")["text"]
    world = (tmp_path / "world").read_text().splitlines()
    assert world == ["asked", "begin compensable", "compensated", "compensated", "asked"]
    assert (tmp_path / "files" / "taken back.txt").exists()
    assert recorded(tmp_path) == [(".1-", "ok"), (".1", "error")]


def test_a_compensation_that_had_finished_does_not_run_again(program: Program, tmp_path: Path):
    """A finished compensation is not rerun, even if the process died before the compensated call was recorded."""
    assert program.start(tmp_path, "compensable", "crash")["code"] == 137
    assert program.start(tmp_path, "compensable", "crash after compensation")["code"] == 137
    assert recorded(tmp_path) == [(".1-", "ok")]
    assert "was undone" in program.start(tmp_path, "compensable", "resume")["text"]
    world = (tmp_path / "world").read_text().splitlines()
    assert world == ["asked", "begin compensable", "compensated", "asked"]
    assert recorded(tmp_path) == [(".1-", "ok"), (".1", "error")]


def test_a_call_that_was_being_undone_is_not_replayed_as_done(program: Program, tmp_path: Path):
    """An interrupted compensation is finished first, and the rerun handler then learns that its inner call was undone."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "trip_entered_again")
    booked = ["booked flight", "booked hotel"]
    assert world == ["asked", *booked, "undone hotel", "undone flight", "undone flight", "asked"]
    assert "flight was being undone when the process ended" in told
    assert (tmp_path / "files" / "hotel undone.txt").exists()
    assert (tmp_path / "files" / "flight undone.txt").exists()


def test_what_was_undone_does_not_stand(program: Program, tmp_path: Path):
    """If the handler is not rerun, an interrupted compensation runs again, a finished one does not, and the model learns of both."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "trip_not_entered_again")
    booked = ["booked flight", "booked hotel"]
    assert world == ["asked", *booked, "undone hotel", "undone flight", "undone flight", "asked"]
    assert "These inner calls were undone: hotel, flight." in told
    assert "It had done" not in told


@pytest.mark.parametrize("cut", [False, True])
def test_a_probe_that_fails_is_rolled_back_and_does_not_know(program: Program, tmp_path: Path, cut: bool):
    """A probe that fails is rolled back, and one that is interrupted is rerun. In both cases, the call is compensated."""
    tool = "compensable_failing_probe"
    assert program.start(tmp_path, tool, "crash")["code"] == 137
    if cut:
        assert program.start(tmp_path, tool, "crash in probe")["code"] == 137
    assert "was undone" in program.start(tmp_path, tool, "resume")["text"]
    world = [line.split()[0] for line in (tmp_path / "world").read_text().splitlines()]
    assert world == ["asked", "begin", *["probed"] * (2 if cut else 1), "compensated", "asked"]
    assert not (tmp_path / "files" / "probed.txt").exists()
    assert recorded(tmp_path) == [(".1=", "error"), (".1-", "ok"), (".1", "error")]


def test_what_is_irreversible_is_not_run_again(program: Program, tmp_path: Path):
    """An irreversible call is not rerun, and the model is told that its outcome is unknown."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "irreversible")
    assert world == ["asked", "begin irreversible", "asked"]
    assert OUTCOME_UNKNOWN in told


def test_a_settled_once_is_not_repeated(program: Program, tmp_path: Path):
    """A step recorded by `once` is not repeated, whether or not its handler is rerun."""
    world, told, _ = crashed_and_resumed(program, tmp_path, "once_again")
    assert world == ["asked", "paid", "asked"]
    assert told == "it says: done"
    other = tmp_path / "other"
    other.mkdir()
    world, told, _ = crashed_and_resumed(program, other, "once_settled")
    assert world == ["asked", "paid", "asked"]
    assert OUTCOME_UNKNOWN in told


@pytest.mark.parametrize(
    ("tool", "questions", "told"),
    [
        ("once_cut", 1, "it says: done"),
        ("once_probed", 0, "it says: done"),
        ("once_failing", 0, OUTCOME_UNKNOWN),
    ],
)
def test_a_once_that_was_cut_is_probed_or_asked_about(
    program: Program, tmp_path: Path, tool: str, questions: int, told: str
):
    """A payment that was made before a crash is not repeated.

    A person or a probe confirms it, or its outcome stays unknown.
    """
    world, text, asked = crashed_and_resumed(program, tmp_path, tool)
    assert world == ["asked", "paid", "asked"]
    assert asked == questions
    assert told in text
