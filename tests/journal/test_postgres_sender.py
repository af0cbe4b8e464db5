"""The event loop sends most records to PostgreSQL itself, and leaves everything else to the journal's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import psycopg
import pytest

from handrail import PostgresJournal
from handrail.errors import JournalError, RunBusy
from handrail.journal.postgres import sender
from handrail.journal.postgres.address import parse_url
from handrail.journal.records import Entry
from handrail.journal.sql.database import Job
from journal.test_journal_contract import run, unit
from support import postgres
from support.damage import end_leases

pytestmark = pytest.mark.once  # PostgreSQL starts slowly


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    url = postgres.borrow_url()
    yield url
    postgres.give_back(url)


@contextlib.contextmanager
def opened(url: str) -> Generator[PostgresJournal]:
    journal = PostgresJournal(url, watch=None)
    try:
        yield journal
    finally:
        journal.close()


@contextlib.asynccontextmanager
async def begun(url: str) -> AsyncGenerator[PostgresJournal]:
    """Open a journal, and record the run `run` and its first call.

    That prepares the statement that adds records, so the event loop can send the next ones itself.
    """
    with opened(url) as journal:
        await begin(journal)
        yield journal


async def begin(journal: PostgresJournal) -> None:
    await journal.runs.begin(run())
    await journal.calls.commit(unit("first"))


def jobs(journal: PostgresJournal) -> list[Job[Any]]:
    """Return a list that collects the jobs of the journal's thread from now on."""
    found: list[Job[Any]] = []
    run: Any = type(journal._database)._run

    def noted(connection: Any, job: Job[Any]) -> None:
        found.append(job)
        run(journal._database, connection, job)

    journal._database._run = noted
    return found


@contextlib.contextmanager
def blocked(url: str) -> Generator[Callable[[], None]]:
    """Keep the server from answering until the block ends. Yields a function that terminates the connection that waits for an answer."""
    address = parse_url(url)
    with (
        psycopg.connect(address.conninfo) as locking,
        psycopg.connect(address.conninfo, autocommit=True) as other,
    ):
        locking.execute(f'SELECT 1 FROM "{address.schema}".chains FOR UPDATE')  # pyright: ignore
        pid = locking.info.backend_pid

        def terminate() -> None:
            query = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
            )
            while not other.execute(query, (pid,)).fetchall():
                pass  # the statement has not reached the server yet

        yield terminate


async def ids(journal: PostgresJournal) -> list[str]:
    assert not (await journal.runs.verify()).altered
    return [each.call_id for each in await journal.calls.load("run")]


def pending(journal: PostgresJournal, call_id: str) -> Any:
    found = journal.calls.commit_soon(unit(call_id))
    assert found is not None
    return found


async def test_the_usual_record_needs_no_thread(url: str):
    async with begun(url) as journal:
        found = jobs(journal)
        for name in "ab":
            await journal.calls.commit(unit(name))
            assert await pending(journal, f"{name} soon").wait()
        await asyncio.gather(*(journal.calls.commit(unit(name)) for name in "cdef"))
        assert not found
        assert await ids(journal) == ["first", "a", "a soon", "b", "b soon", *"cdef"]


async def test_a_job_of_the_thread_comes_after_all_that_was_begun_before_it(url: str):
    async with begun(url) as journal:
        begun_before = [pending(journal, name) for name in "abc"]
        # This blocks the loop, so the thread has to read the answers.
        found = journal._database.transact_now(
            lambda connection: connection.execute(
                "SELECT key FROM records WHERE kind = 'unit' ORDER BY link"
            ).fetchall()
        )
        assert [key for (key,) in found] == ["first", *"abc"]
        later = pending(journal, "d")
        assert [await each.wait() for each in (*begun_before, later)] == [True] * 4
        assert await ids(journal) == ["first", *"abcd"]


async def test_a_connection_that_is_lost_before_the_answer_loses_nothing_and_repeats_nothing(url: str):
    async with begun(url) as journal:
        with blocked(url) as terminate:
            both = asyncio.gather(*(journal.calls.commit(unit(name)) for name in "ab"))
            await asyncio.sleep(0)
            await asyncio.to_thread(terminate)
        await both
        assert await ids(journal) == ["first", "a", "b"]
        found = jobs(journal)
        await journal.calls.commit(unit("c"))
        assert len(found) == 0, "the new connection has the statement too"


async def test_a_record_whose_answer_is_lost_is_not_added_again(url: str, monkeypatch: pytest.MonkeyPatch):
    async with begun(url) as journal:
        sender = journal._database._sender
        assert sender is not None
        has_answer = sender._has_answer

        def lose() -> bool:
            while not has_answer():
                pass
            monkeypatch.undo()
            sender._result = None
            sender._connection.raw.close()
            raise psycopg.OperationalError("the connection was cut")

        monkeypatch.setattr(sender, "_has_answer", lose)
        await journal.calls.commit(unit("a"))
        await journal.calls.commit(unit("b"))
        assert await ids(journal) == ["first", "a", "b"]


async def test_a_cancelled_wait_leaves_the_record_and_the_next_one_follows(url: str):
    async with begun(url) as journal:
        with blocked(url):
            waiting = asyncio.ensure_future(journal.calls.commit(unit("a")))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await journal.calls.commit(unit("b"))
        assert await ids(journal) == ["first", "a", "b"]


async def test_closing_the_journal_waits_for_the_answer(url: str):
    async with begun(url) as journal:
        both = [pending(journal, name) for name in "ab"]
    assert [await each.wait() for each in both] == [True, True]
    with opened(url) as journal:
        assert await ids(journal) == ["first", "a", "b"]


def test_a_loop_that_ends_before_the_answer_leaves_it_to_the_thread(url: str):
    async def begin_one(name: str) -> None:
        pending(journal, name)

    with opened(url) as journal:
        asyncio.run(begin(journal))
        for name in "abc":
            asyncio.run(begin_one(name))
        assert asyncio.run(ids(journal)) == ["first", *"abc"]


async def test_two_loops_add_to_the_same_journal(url: str):
    async def add(thread: str) -> None:
        for number in range(20):
            await journal.calls.commit(unit(f"{thread}{number}"))

    async with begun(url) as journal:
        await asyncio.gather(add("inner"), asyncio.to_thread(lambda: asyncio.run(add("outer"))))
        found = await ids(journal)
        for thread in ("inner", "outer"):
            assert [each for each in found if thread in each] == [f"{thread}{number}" for number in range(20)]


async def test_a_record_of_another_loop_follows_one_that_has_no_answer_yet(url: str):
    async with begun(url) as journal:
        database = journal._database
        assert database._sender is not None
        with blocked(url):
            first = pending(journal, "a")
            second = asyncio.ensure_future(
                asyncio.to_thread(lambda: asyncio.run(journal.calls.commit(unit("b"))))
            )
            while not database._waiting and len(database._sender._queue) == 1:
                await asyncio.sleep(0)
        assert await first.wait()
        await second
        assert await ids(journal) == ["first", "a", "b"]


@pytest.mark.parametrize("rolls_back", [True, False])
async def test_a_statement_that_is_not_prepared_any_more_is_prepared_again(url: str, rolls_back: bool):
    def forget(connection: Any) -> None:
        connection.execute("DEALLOCATE ALL")
        if rolls_back:
            raise RunBusy("run", "")

    async with begun(url) as journal:
        with contextlib.suppress(RunBusy):
            await journal._database.transact(forget)
        for name in "abc":
            await journal.calls.commit(unit(name))
        found = jobs(journal)
        await journal.calls.commit(unit("d"))
        assert not found
        assert await ids(journal) == ["first", *"abcd"]


async def test_a_run_that_was_taken_over_gets_no_record(url: str):
    async with begun(url) as journal:
        found = jobs(journal)
        with opened(url) as other:
            await asyncio.to_thread(end_leases, other)
            await other.runs.take("run")
            with pytest.raises(RunBusy):
                await journal.calls.commit(unit("late"))
            assert len(found) == 1, (
                "the statement was sent from the loop, and a transaction found out why it failed"
            )
            assert await ids(other) == ["first"]


@pytest.mark.parametrize("problem", ["long", "no reader", "unencodable"])
async def test_what_the_loop_cannot_send_is_left_to_the_thread(
    url: str, monkeypatch: pytest.MonkeyPatch, problem: str
):
    def refuse(*given: Any) -> None:
        raise NotImplementedError if problem == "no reader" else UnicodeEncodeError("utf-8", "", 0, 1, "")

    async with begun(url) as journal:
        if problem == "long":
            monkeypatch.setattr(sender, "_LONGEST", 10)
        elif problem == "no reader":
            monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refuse)
        else:
            monkeypatch.setattr(sender, "_encoded", refuse)
        found = jobs(journal)
        await journal.calls.commit(unit("a"))
        assert len(found) == 1
        assert await ids(journal) == ["first", "a"]


async def test_a_record_with_text_that_is_not_unicode_fails_alone(url: str):
    """A record whose text is not valid Unicode fails. The records that wait before and after it are added."""
    async with begun(url) as journal:
        bad = Entry("told", "\udcff", 1.0, b"")
        found = await asyncio.gather(
            journal.calls.commit(unit("a")),
            journal.calls.note("run", bad),
            journal.calls.commit(unit("b")),
            return_exceptions=True,
        )
        assert [type(each) for each in found] == [type(None), JournalError, type(None)]
        with pytest.raises(JournalError, match="lone surrogate"):
            await journal.calls.note("run", bad)
        assert await ids(journal) == ["first", "a", "b"]
