"""Compaction together with what else may happen to a run: it waits, continues in another process or on a worker, or is nested.

Each run is compared with one that is answered at once. Every request is sent once, with the same messages.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from handrail import Adapter, LaterEnvironment, PostgresJournal, SqliteJournal
from handrail.errors import RunParked
from handrail.fleet import FleetApp, Runner, submit
from handrail.journal.records import OVER
from handrail.run.record.begin import decode_outcome
from handrail.testing import Person
from support import PATIENCE, long_reader, postgres
from support.parked_runs import answer_to

Log = Callable[[], list[str]]
"""A function that returns the requests since it was last called, in order."""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    path = tmp_path / "requests"
    monkeypatch.setenv("READER_LOG", str(path))

    def take() -> list[str]:
        lines = path.read_text().splitlines()
        path.unlink()
        return lines

    return take


async def answered_at_once(
    log: Log, prompt: Any = long_reader.prompt, adapter: Adapter = long_reader.adapter
):
    """Return the usage and the requests of a run that nothing interrupts, and check that it was compacted at least twice in each reading."""
    person = Person(approve=True, answers={"pick_card": {"text": "the ace"}})
    response = await adapter.evaluate(prompt, "Read it.", environment=person)
    sent = log()
    assert sum(each.startswith("compacted") for each in sent) > len(sent) / 2
    return response.usage, sent


async def test_it_waits_for_an_approval_between_two_compactions(log: Log, tmp_path: Path):
    usage, sent = await answered_at_once(log)
    journal = SqliteJournal(tmp_path / "runs.db")
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    with pytest.raises(RunParked):
        await long_reader.adapter.evaluate(long_reader.prompt, "Read it.", run_id="r", **options)
    assert "compaction" in {entry.kind for entry in await journal.calls.entries("r")}
    [question] = await journal.questions.open("r")
    journal.questions.answer(answer_to(question, {"approved": True}))
    response = await long_reader.adapter.resume("r", long_reader.prompt, **options)
    assert (response.usage, log()) == (usage, sent)
    journal.close()


async def test_it_is_resumed_in_another_process(log: Log, tmp_path: Path):
    usage, sent = await answered_at_once(log)

    def process(mode: str) -> str:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, long_reader.__file__, str(tmp_path), mode]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert await asyncio.to_thread(process, "begin") == "parked\n"
    text, used = json.loads(await asyncio.to_thread(process, "resume"))
    assert (text, used) == ("All is read.", msgspec.to_builtins(usage))
    assert log() == sent


async def test_workers_with_postgresql_continue_it(log: Log, tmp_path: Path):
    """One worker begins the run, and another one continues it."""
    usage, sent = await answered_at_once(log)
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(postgres.KEY)
    journal = PostgresJournal(postgres.new_url(), key_file=key)
    app = FleetApp.load(long_reader.__file__)
    run_id = (await submit(journal, app, "Read it.")).record.id

    async def work_until(statuses: Any) -> None:
        stop = asyncio.Event()
        working = asyncio.ensure_future(Runner(journal, [app]).run(stop))
        async with asyncio.timeout(PATIENCE):
            while (await journal.runs.get(run_id)).status not in statuses:
                await asyncio.sleep(0.005)
        stop.set()
        await asyncio.wait_for(working, PATIENCE)

    await work_until(["parked"])
    [question] = await journal.questions.open(run_id)
    journal.questions.answer(answer_to(question, {"approved": True}))
    await work_until(OVER)
    outcome = decode_outcome(await journal.runs.get(run_id))
    assert (outcome.text, outcome.usage) == ("All is read.", usage)
    assert log() == sent
    journal.close()


async def test_it_is_nested_in_a_worker_inside_a_handoff(log: Log, tmp_path: Path):
    """Both halves of the handoff call a worker, which reads until it is compacted, waits for an approval, and reads on."""
    prompt, adapter = long_reader.delegating(tmp_path / "workers")
    usage, sent = await answered_at_once(log, prompt, adapter)
    journal = SqliteJournal(tmp_path / "runs.db")
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    with pytest.raises(RunParked):
        await adapter.evaluate(prompt, "Read it.", run_id="r", **options)
    asked: list[str] = []
    for _ in range(4):
        [question] = await journal.questions.open("r")
        asked.append(question.kind)
        value = {"approved": True} if question.kind == "approval" else {"text": "the ace"}
        journal.questions.answer(answer_to(question, value))
        _, adapter = long_reader.delegating(tmp_path / "workers")  # as in a new process
        try:
            response = await adapter.resume("r", prompt, **options)
        except RunParked:
            continue
        assert response.usage == usage
    # the handoff itself needs an approval
    assert asked == ["approval", "approval", "handoff", "approval"]
    assert sorted(log()) == sorted(sent)
    journal.close()
