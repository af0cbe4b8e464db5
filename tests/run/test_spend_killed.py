"""A cap on spending holds while eight processes spend from it and are killed, and nothing is counted twice or lost."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from handrail import PostgresJournal, SqliteJournal
from handrail.journal.any_journal import AnyJournal
from handrail.question import Vote
from support import PATIENCE, postgres, spending_app, warm_python
from support.parked_runs import answer_to

PROCESSES = 8
Store = tuple[str, Callable[[], AnyJournal]]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.once)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Provide where a journal is, and a function that opens it."""
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    if request.param == "sqlite":
        path = str(tmp_path / "runs.db")
        return path, lambda: SqliteJournal(path)
    url = postgres.new_url()
    return url, lambda: PostgresJournal(url)


def spend(mode: str, where: str, folder: Path, cap: int, given: Sequence[str], die: Sequence[int]) -> str:
    """Let a process for each of `given` spend, and return what they printed once all have ended or were killed."""
    script = spending_app.__file__
    started = [
        warm_python.start(
            [script, mode, where, str(folder / "bill"), str(cap), each, str(at)],
            cwd=folder,
            env=dict(os.environ),
        )
        for each, at in zip(given, die, strict=True)
    ]
    printed = ""
    for process, at in zip(started, die, strict=True):
        if not at:
            (folder / "over").touch()  # those that were killed are listed first
        out, err = process.communicate(PATIENCE)
        assert process.returncode == (-9 if at else 0), err
        printed += out
    return printed


def billed(folder: Path) -> int:
    return sum(map(int, (folder / "bill").read_text().split()))


async def test_the_cap_holds_whenever_processes_are_killed(store: Store, tmp_path: Path) -> None:
    where, opened = store
    opened().close()  # so that it exists
    seeds = [str(seed) for seed in range(PROCESSES)]
    spend("reserve", where, tmp_path, 800, seeds, [1, 1, 1, 2, 0, 0, 0, 0])
    journal = opened()
    [state] = await journal.spending.list()
    counted = state.counted["tokens"]
    assert billed(tmp_path) <= counted <= 800
    assert counted == 800, (
        "they went on until nothing was left, since nobody waits for what a killed process had reserved"
    )
    assert counted - billed(tmp_path) <= 4 * 20, (
        "only the four requests of killed processes count as what they had reserved"
    )
    assert state.in_flight == {}
    assert (await journal.runs.verify()).altered == []
    journal.close()


async def test_runs_of_eight_killed_processes_park_at_the_cap_and_go_on_once_it_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    where, cap, request = str(tmp_path / "runs.db"), 26_000, spending_app.TOKENS
    journal = SqliteJournal(where)
    ids = [[f"r{process}{number}" for number in range(2)] for process in range(PROCESSES)]
    given = [",".join(each) for each in ids]
    spend("run", where, tmp_path, cap, given, [1, 2, 3, 1, 2, 1, 2, 3])
    printed = spend("run", where, tmp_path, cap, given, [0] * PROCESSES)
    assert "parked at a higher cap" in printed
    [state] = await journal.spending.list()
    assert billed(tmp_path) <= state.counted["tokens"] <= cap
    assert state.counted["tokens"] > cap - 5 * request, "they did not ask before the cap was near"
    everything = [",".join(given)]
    while {row.status for row in await journal.runs.list()} != {"done"}:
        # A raise withdraws the questions of the other runs, which then go on without an answer.
        for question in (await journal.questions.open())[:1]:
            given_by_bob = answer_to(question, {"approved": True}, by="bob", votes=(by_bob(question),))
            journal.questions.answer(given_by_bob)
        spend("run", where, tmp_path, cap, everything, [0])
    [state] = await journal.spending.list()
    requests = PROCESSES * 2 * spending_app.REQUESTS
    lost = state.counted["requests"] - requests
    assert 0 < lost <= PROCESSES, "each process that was killed during a request has lost at most that one"
    assert billed(tmp_path) == (requests + lost) * request, "no recorded answer was paid for again"
    assert state.counted["tokens"] <= cap + sum(int(each.amounts["tokens"]) for each in state.raises)
    assert {each.by for each in state.raises} == {"bob"}
    assert (await journal.runs.verify()).altered == []
    journal.close()


def by_bob(question: Any) -> Vote:
    return Vote(
        question_id=question.id, digest=question.digest, by="bob", since=1.0, roles=("admin",), approved=True
    )
