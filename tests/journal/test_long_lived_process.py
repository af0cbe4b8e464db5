"""Journals in a long-lived process: threads, a locked file, a full disk, memory, and owners that can't be seen."""

import asyncio
import contextlib
import gc
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, ToolCall, ToolContext, tool
from handrail.errors import JournalError
from handrail.journal.records import RunStatus
from handrail.journal.sql import leases as lease
from handrail.journal.sql.runs import SqlRuns
from handrail.question import Answer, Question
from handrail.runs import cancel
from handrail.testing import Person
from support.parked_runs import answer_to


class Pick(BaseModel):
    number: int


@tool(effect="staged")
async def ask(context: ToolContext) -> int:
    """Ask somebody for a number."""
    assert context.wait_for is not None
    return (await context.wait_for("pick", {}, Pick)).number


class Thinking(Person):
    """A person who is there but never answers."""

    async def ask(self, question: Question, /) -> Answer:
        return await asyncio.get_running_loop().create_future()


def asking(journal: SqliteJournal, run_id: str) -> Any:
    adapter = Adapter(ScriptedModel([ToolCall("ask"), "done"]), journal=journal, environment=Thinking())
    return adapter.evaluate(Prompt("p", "Do.", tools=[ask]), "go", run_id=run_id)


def until_asked(journal: SqliteJournal, run_id: str) -> Question:
    async def look() -> Question:
        while not (found := await journal.questions.open(run_id)):
            await asyncio.sleep(0.01)
        return found[0]

    return asyncio.run(look())


def test_answers_from_elsewhere_reach_every_thread(tmp_path: Path):
    """An answer from another process reaches the thread that waits for it, even after another thread has ended."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=0.02)
    other = SqliteJournal(tmp_path / "runs.db", watch=None)
    said: dict[str, str] = {}

    def work(run_id: str) -> None:
        said[run_id] = asyncio.run(_result_of(asking(journal, run_id))).text

    threads: list[threading.Thread] = []
    questions: list[Question] = []
    for run_id in ("a", "b"):
        thread = threading.Thread(target=work, args=(run_id,))
        thread.start()
        threads.append(thread)
        questions.append(until_asked(other, run_id))
    for thread, question in zip(threads, questions, strict=True):
        other.questions.answer(answer_to(question))
        thread.join()
    assert said == {"a": "done", "b": "done"}
    journal.close()
    other.close()


async def _result_of(going: Any) -> Any:
    return await going


async def test_a_file_that_is_locked_for_a_while_does_not_end_the_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = SqliteJournal(tmp_path / "runs.db", watch=None)
    # This opens the connection of `other` before the patch, so it waits for the lock as long as usual.
    assert not await other.questions.open("run")
    monkeypatch.setattr("handrail.journal.sqlite._BUSY_SECONDS", 0.01)
    journal = SqliteJournal(tmp_path / "runs.db", watch=0.02)
    running = asyncio.ensure_future(asking(journal, "run"))
    while not (questions := await other.questions.open("run")):
        await asyncio.sleep(0.01)
    holder = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    await asyncio.sleep(0.2)
    holder.execute("ROLLBACK")
    holder.close()
    other.questions.answer(answer_to(questions[0]))
    assert (await running).text == "done"
    journal.close()
    other.close()


async def test_a_run_whose_file_stays_locked_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If the file stays locked, the run fails with an error that says so. Once the lock is gone, the run can be resumed.

    The call that could not be recorded runs again, with the same key.
    """
    monkeypatch.setattr("handrail.journal.sqlite._WAIT_FOR_OTHERS", "PRAGMA busy_timeout = 1")
    journal, keys = SqliteJournal(tmp_path / "runs.db"), list[str]()
    holder = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)

    @tool(effect="idempotent")
    async def pay(context: ToolContext) -> str:
        """Pay, and lock the file at the first attempt."""
        keys.append(context.invocation.idempotency_key)
        if len(keys) == 1:
            holder.execute("BEGIN IMMEDIATE")
        return "paid"

    prompt, model = Prompt("p", "Do.", tools=[pay]), ScriptedModel([ToolCall("pay"), "done"])
    with contextlib.closing(journal), contextlib.closing(holder):
        adapter = Adapter(model, journal=journal)
        with pytest.raises(JournalError, match="locked"):
            await adapter.evaluate(prompt, "go", run_id="run")
        holder.execute("ROLLBACK")
        assert (await adapter.resume("run", prompt)).text == "done"
        assert len(await journal.calls.load("run")) == 1
    assert len(keys) == 2
    assert len(set(keys)) == 1


def full(connection: Any) -> None:
    """Fail as SQLite does on a full disk: roll the transaction back and raise an error."""
    connection.execute("ROLLBACK")
    raise sqlite3.OperationalError("database or disk is full")


async def test_a_full_disk_is_named(tmp_path: Path):
    """A full disk is reported as such, although SQLite has already rolled the transaction back."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    with pytest.raises(JournalError, match="disk is full"):
        journal._database.transact_now(full)  # pyright: ignore[reportPrivateUsage]
    assert await journal.runs.list() == ()
    journal.close()


async def test_a_run_whose_end_could_not_be_recorded_can_be_cancelled_where_it_was(tmp_path: Path):
    """If a run's end could not be recorded, the process that still owns the run can cancel it."""

    class Filling(SqlRuns):
        async def leave(
            self, run_id: str, status: RunStatus, outcome: bytes = b"", /, **options: Any
        ) -> None:
            if not self.filled:
                self.filled = True
                await self._database.transact(full)
            await super().leave(run_id, status, outcome, **options)

        filled = False

    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    journal.runs = Filling(journal._database, journal.steps.forget)  # pyright: ignore[reportPrivateUsage]
    adapter = Adapter(ScriptedModel(["done"]), journal=journal)
    with pytest.raises(JournalError, match="disk is full"):
        await adapter.evaluate(Prompt("p", "Do."), "go", run_id="run")
    assert (await journal.runs.get("run")).status == "running"
    assert (await cancel(journal, "run")).status == "cancelled"
    journal.close()


async def test_a_journal_in_a_file_keeps_nothing_of_runs_that_are_over(tmp_path: Path):
    """The futures of finished runs do not accumulate in memory."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)

    @tool
    async def pay(context: ToolContext) -> str:
        """Pay."""
        return await context.once("pay", lambda: "paid")

    prompt = Prompt("p", "Do.", tools=[pay])

    async def run(number: int) -> None:
        adapter = Adapter(ScriptedModel([ToolCall("pay"), "done"]), journal=journal)
        await adapter.evaluate(prompt, "go", run_id=f"run {number}")

    def held() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())

    await run(0)
    before = held()
    for number in range(1, 30):
        await run(number)
    assert held() - before < 10
    journal.close()


def test_a_process_that_can_not_be_seen_from_here_is_not_said_to_be_dead(monkeypatch: pytest.MonkeyPatch):
    """An owner that can't be seen from here, such as one in another container of the pod, is not considered dead."""
    lease._host.cache_clear()  # pyright: ignore[reportPrivateUsage]
    owner = lease.new_owner()
    assert not lease.is_dead(owner)
    host, _, *rest = owner.split("/")
    gone = "/".join((host, "999999999", *rest))
    assert lease.is_dead(gone)
    monkeypatch.setattr(lease.os, "readlink", lambda path: "pid:[1]")
    lease._host.cache_clear()  # pyright: ignore[reportPrivateUsage]
    try:
        assert not lease.is_dead(gone)
    finally:
        lease._host.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_a_name_is_given_without_looking_up_again_when_this_process_started(
    monkeypatch: pytest.MonkeyPatch,
):
    """A second owner name is made without looking up this process's start time again."""
    first = lease.new_owner()
    monkeypatch.setattr(lease, "_started", lambda pid: pytest.fail("the start time was read again"))
    assert lease.new_owner().split("/")[:3] == first.split("/")[:3]
