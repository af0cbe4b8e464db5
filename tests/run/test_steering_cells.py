"""Messages and orders together with what else may happen to a run: it waits, continues in another process or on a worker, or nests.

Each message is told once and in order, and each order is carried out once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail import LaterEnvironment, PostgresJournal, SqliteJournal
from handrail.errors import MessageRefused, RunParked
from handrail.fleet import FleetApp, Runner, submit
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER
from handrail.run.record.begin import decode_outcome
from handrail.runs import edit, go_on, messages, pause, send, withdraw, wrap_up
from support import PATIENCE, postgres, steered
from support.parked_runs import answer_to


async def approve(journal: Journal, run_id: str) -> None:
    """Approve the only thing that the run asks for."""
    [question] = await journal.questions.open(run_id)
    value: Any = {"approved": True} if question.kind == "approval" else {"text": "the ace"}
    journal.questions.answer(answer_to(question, value))


async def say_much(journal: Journal, run_id: str) -> None:
    """Say something for each moment, edit, withdraw, and order a pause."""
    await send(journal, run_id, "second", when="now")
    typo = (await send(journal, run_id, "thrid")).message.id
    await send(journal, run_id, "fifth", when="afterwards")
    unsaid = (await send(journal, run_id, "unsaid")).message.id
    await pause(journal, run_id, "fourth")
    await edit(journal, run_id, typo, "third")
    await withdraw(journal, run_id, unsaid)


SAID = "second\n\nthird\n\nfourth / fifth"


async def test_it_waits_for_an_approval_meanwhile(tmp_path: Path):
    """A run that waits for an approval hears nothing. Once approved, it hears everything, and pauses."""
    journal = SqliteJournal(tmp_path / "runs.db")
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    with pytest.raises(RunParked):
        await steered.adapter.evaluate(steered.prompt, "Begin.", run_id="r", **options)
    assert (await send(journal, "r", "x")).status == "parked"
    await withdraw(journal, "r", (await messages(journal, "r"))[0].id)
    await say_much(journal, "r")
    await approve(journal, "r")
    with pytest.raises(RunParked) as parked:
        await steered.adapter.resume("r", steered.prompt, **options)
    assert [each.kind for each in parked.value.questions] == ["pause"]
    await go_on(journal, "r")
    response = await steered.adapter.resume("r", steered.prompt, **options)
    assert response.text == SAID
    journal.close()


async def test_it_is_resumed_in_other_processes(tmp_path: Path):
    """Each leg is a process of its own, which dies when the run is parked. What is said comes from this one."""

    async def process(mode: str) -> Any:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, steered.__file__, str(tmp_path), mode]
        run = subprocess.run
        done = await asyncio.to_thread(
            run, command, env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    assert await process("begin") == ["approval"]
    journal = SqliteJournal(tmp_path / "runs.db")
    await say_much(journal, "r")
    await approve(journal, "r")
    assert await process("resume") == ["pause"]
    await send(journal, "r", "at last", when="afterwards")
    await wrap_up(journal, "r")
    text, reason = await process("resume")
    assert reason == "wrapped up"
    assert text.startswith("second\n\nthird\n\nfourth / Finish now")
    states = {each.text: each.state for each in await messages(journal, "r")}
    assert states == dict.fromkeys(["second", "third", "fourth", "fifth", "at last", ""], "told") | {
        "unsaid": "withdrawn"
    }
    journal.close()


async def test_workers_with_postgresql_are_told(tmp_path: Path):
    """A run is told the same on workers: one begins it, one pauses it, and one ends it."""
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(postgres.KEY)
    journal = PostgresJournal(postgres.new_url(), key_file=key)
    app = FleetApp.load(steered.__file__)
    run_id = (await submit(journal, app, "Begin.")).record.id
    assert (await send(journal, run_id, "first")).status == "queued"

    async def work_until_asked(kind: str) -> None:
        stop = asyncio.Event()
        working = asyncio.ensure_future(Runner(journal, [app]).run(stop))
        async with asyncio.timeout(PATIENCE):
            while True:
                status = (await journal.runs.get(run_id)).status
                asked = [each.kind for each in await journal.questions.open(run_id)]
                if status in OVER or (status == "parked" and asked == [kind]):
                    break
                await asyncio.sleep(0.005)
        stop.set()
        await asyncio.wait_for(working, PATIENCE)

    await work_until_asked("approval")
    await say_much(journal, run_id)
    await approve(journal, run_id)
    await work_until_asked("pause")
    await go_on(journal, run_id)
    await work_until_asked("")
    assert decode_outcome(await journal.runs.get(run_id)).text == f"first / {SAID}"
    journal.close()


async def test_a_worker_inside_a_handoff_is_told_nothing(tmp_path: Path):
    """What is said while a nested run waits is told to the run at the root, after the call. The nested run can't be sent anything."""
    prompt, adapter = steered.delegating(tmp_path / "workers")
    journal = SqliteJournal(tmp_path / "runs.db")
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    with pytest.raises(RunParked):
        await adapter.evaluate(prompt, "Begin.", run_id="r", **options)
    await approve(journal, "r")  # the handoff itself
    with pytest.raises(RunParked) as parked:
        await adapter.resume("r", prompt, **options)
    [question] = parked.value.questions
    nested = question.id.partition("/")[0] + "/" + question.id.partition("/")[2].partition(".")[0]
    with pytest.raises(MessageRefused, match=r"nested in another run.*'r'"):
        await send(journal, nested, "to the worker")
    await say_much(journal, "r")
    for asked in ("approval", "handoff"):
        assert [each.kind for each in await journal.questions.open("r")] == [asked]
        await approve(journal, "r")
        _, adapter = steered.delegating(tmp_path / "workers")  # as in a new process
        with pytest.raises(RunParked) as parked:
            await adapter.resume("r", prompt, **options)
    assert [each.kind for each in parked.value.questions] == ["pause"]
    await go_on(journal, "r")
    assert (await adapter.resume("r", prompt, **options)).text == SAID
    journal.close()
