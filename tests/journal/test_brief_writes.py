"""A call is recorded in the caller's thread where this can't block, and otherwise in the journal's own thread."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from handrail import Session, SqliteJournal, ToolContext, tool
from handrail.concurrency.cancellation import Pending
from handrail.concurrency.claims import WHOLE, Claim
from handrail.errors import JournalError, RunBusy
from handrail.journal.records import CommitUnit
from handrail.journal.sql.calls import _BRIEF
from handrail.journal.sql.connection import Connection
from handrail.journal.sql.database import Database, Job
from handrail.journal.sqlite import Durability
from handrail.run import open_gate
from support import PATIENCE


@tool(effect="pure")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Note(msgspec.Struct, frozen=True):
    text: str


@tool(effect="staged")
async def note(text: str, *, context: ToolContext) -> None:
    """Keep a note."""
    context.session.dispatch(Note(text))


def unit(call_id: str, result: bytes = b'"done"') -> CommitUnit:
    return CommitUnit(run_id="run", call_id=call_id, events=[], result=result, effects=[], files=[])


@contextlib.contextmanager
def opened(folder: Path, durability: Durability = "process") -> Generator[SqliteJournal]:
    journal = SqliteJournal(folder / "journal.db", durability=durability, watch=None)
    try:
        yield journal
    finally:
        journal.close()


def writers(journal: SqliteJournal) -> list[threading.Thread]:
    """Return a list that collects the thread of each transaction from now on."""
    found: list[threading.Thread] = []
    run: Any = Database._run

    def noted(connection: Connection, job: Job[Any]) -> None:
        found.append(threading.current_thread())
        run(journal._database, connection, job)

    journal._database._run = noted
    return found


def ids_in(journal: SqliteJournal) -> list[str]:
    return [each.call_id for each in asyncio.run(journal.calls.load("run"))]


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_call_is_recorded_in_the_callers_thread_unless_the_disk_must_confirm_it(
    tmp_path: Path, durability: Durability
) -> None:

    with opened(tmp_path, durability) as journal:
        gate = open_gate([add], journal=journal)
        found = writers(journal)
        for number in range(5):
            assert (await gate.invoke("add", {"a": number, "b": 1})).value == number + 1
        assert len(found) == 5
        assert ({each is threading.current_thread() for each in found}) == {durability == "process"}


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_recorded_call_needs_no_task(tmp_path: Path, durability: Durability) -> None:
    made: list[Any] = []

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work)
        return asyncio.Task(work, loop=loop, **options)

    with opened(tmp_path, durability) as journal:
        gate = open_gate([add], journal=journal)
        asyncio.get_running_loop().set_task_factory(make)
        await gate.invoke("add", {"a": 1, "b": 1})
        assert made == []


def test_a_write_does_not_wait_for_another_process_in_the_callers_thread(tmp_path: Path) -> None:
    async def main() -> None:
        gate = open_gate([add], journal=journal)
        found = writers(journal)
        other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert not journal.calls.commit_now(unit("refused"))
        waiting = asyncio.ensure_future(gate.invoke("add", {"a": 1, "b": 1}))
        while not found:
            await asyncio.sleep(0)  # the waiting call does not block the loop
        assert not waiting.done()
        other.execute("COMMIT")
        other.close()
        assert (await waiting).value == 2
        assert found[0] is not threading.current_thread()
        assert journal.calls.commit_now(unit("later"))  # the lock is free, so this is written at once

    with opened(tmp_path) as journal:
        asyncio.run(main())
        assert ids_in(journal) == ["later"]


def test_a_write_follows_the_jobs_before_it(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        begun, may_end = threading.Event(), threading.Event()

        def work(connection: Any) -> None:
            begun.set()
            assert may_end.wait(PATIENCE)

        async def main() -> None:
            earlier = asyncio.ensure_future(journal._database.transact(work))
            await asyncio.to_thread(begun.wait, PATIENCE)
            assert not journal.calls.commit_now(unit("now"))
            later = asyncio.ensure_future(journal.calls.commit(unit("first")))
            await asyncio.sleep(0)
            may_end.set()
            await asyncio.gather(earlier, later)
            assert journal.calls.commit_now(unit("second"))

        asyncio.run(main())
        assert ids_in(journal) == ["first", "second"]


@pytest.mark.parametrize("cancellations", [1, 2])
@pytest.mark.parametrize("by", ["task", "scope"])
def test_a_call_that_is_cancelled_while_it_is_recorded_commits_first(
    tmp_path: Path, cancellations: int, by: str
) -> None:
    """A call that is cancelled while its record waits to be written still commits its changes. Only then does a cancelled task end as cancelled."""

    async def main() -> None:
        session = Session()
        gate = open_gate([note], journal=journal, session=session, run_id="run")
        scope = anyio.CancelScope()

        async def call() -> None:
            with scope:
                await gate.invoke("note", {"text": "kept"})

        begun, may_end = threading.Event(), threading.Event()
        earlier = asyncio.ensure_future(journal._database.transact(lambda _: _hold(begun, may_end)))
        await asyncio.to_thread(begun.wait, PATIENCE)
        calling = asyncio.ensure_future(call())
        while journal._database._waiting < 2:
            await asyncio.sleep(0)
        for _ in range(cancellations):
            calling.cancel() if by == "task" else scope.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
        assert not calling.done()
        assert not session[Note].all()
        may_end.set()
        await asyncio.wait({calling})
        assert calling.cancelled() == (by == "task")  # a scope absorbs its own cancellation
        assert session[Note].all() == (Note("kept"),)
        await earlier

    with opened(tmp_path, "power") as journal:
        asyncio.run(main())
        assert len(ids_in(journal)) == 1


def _hold(begun: threading.Event, may_end: threading.Event) -> None:
    begun.set()
    assert may_end.wait(PATIENCE)


def test_a_long_record_is_left_to_the_thread(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert not journal.calls.commit_now(unit("long", b"x" * _BRIEF))
        assert journal.calls.commit_now(unit("short", b"x" * (_BRIEF // 2)))
        assert ids_in(journal) == ["short"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as journal:
        chains = journal._database.chains
        append: Any = chains.append_record

        def fail(*values: Any, **more: Any) -> None:
            append(*values, **more)
            raise RunBusy("run", "another process")

        with monkeypatch.context() as patched:
            patched.setattr(chains, "append_record", fail)
            with pytest.raises(RunBusy):
                journal.calls.commit_now(unit("failed"))
        assert journal.calls.commit_now(unit("next"))
        assert ids_in(journal) == ["next"]


def test_nothing_is_written_to_a_closed_journal(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.close()
        assert not journal.calls.commit_now(unit("late"))
        with pytest.raises(JournalError, match="is closed"):
            asyncio.run(journal.calls.commit(unit("late")))


async def test_a_call_that_touched_nothing_is_recorded_after_those_that_commit(tmp_path: Path) -> None:
    """While another call has claimed the session, even a call that has touched nothing waits, and the loop goes on."""
    with opened(tmp_path) as journal:
        session, claim = Session(), Claim(WHOLE)
        gate = open_gate([add], journal=journal, session=session, run_id="run")
        assert session.claims.try_enter(claim)
        waiting = asyncio.ensure_future(gate.invoke("add", {"a": 1, "b": 1}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        session.claims.leave(claim)
        assert (await waiting).value == 2
        assert len(await journal.calls.load("run")) == 1


async def test_concurrent_calls_that_touched_nothing_are_recorded_in_the_journals_thread(
    tmp_path: Path,
) -> None:
    """Calls of one turn are recorded in the order in which they end, whatever they touched, so none overtakes another."""
    arrived = asyncio.Barrier(2)

    @tool(effect="pure")
    async def meet() -> None:
        """Meet another call."""
        await arrived.wait()

    with opened(tmp_path) as journal:
        gate = open_gate([meet], journal=journal, run_id="run")
        found = writers(journal)
        await asyncio.gather(gate.invoke("meet", {}), gate.invoke("meet", {}))
        assert found[0] is not threading.current_thread()


def test_a_call_that_touched_nothing_is_recorded_although_it_is_cancelled(tmp_path: Path) -> None:
    """A call that is cancelled while its record waits to be written ends once the record is there."""

    async def main() -> None:
        gate = open_gate([add], journal=journal, run_id="run")
        begun, may_end = threading.Event(), threading.Event()
        earlier = asyncio.ensure_future(journal._database.transact(lambda _: _hold(begun, may_end)))
        await asyncio.to_thread(begun.wait, PATIENCE)
        calling = asyncio.ensure_future(gate.invoke("add", {"a": 1, "b": 1}))
        while journal._database._waiting < 2:
            await asyncio.sleep(0)
        calling.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not calling.done()
        may_end.set()
        await asyncio.wait({calling})
        assert calling.cancelled()
        await earlier

    with opened(tmp_path, "power") as journal:
        asyncio.run(main())
        assert len(ids_in(journal)) == 1


async def test_a_record_that_the_journal_did_not_begin_to_add_is_added_with_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a journal answers that it has added nothing, the call is committed like one that has touched something."""

    def added_nothing(self: Any, run_id: str, record: Any) -> Pending[bool]:
        pending = Pending[bool]()
        pending.settle(False, None)
        return pending

    with opened(tmp_path, "power") as journal:
        gate = open_gate([add], journal=journal, run_id="run")
        monkeypatch.setattr(Database, "add_soon", added_nothing)
        assert (await gate.invoke("add", {"a": 1, "b": 1})).value == 2
        assert len(await journal.calls.load("run")) == 1
