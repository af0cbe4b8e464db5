"""Broadcasts: who watches a session, and what its runs send to the watchers until nobody watches the session any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from handrail import MemoryJournal, PostgresJournal
from handrail.journal.postgres.address import parse_url
from handrail.journal.protocol import Watcher
from support import PATIENCE, postgres

pytestmark = pytest.mark.once  # PostgreSQL starts slowly


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    url = postgres.borrow_url()
    yield url
    postgres.give_back(url)


@pytest.fixture
def worker(url: str) -> Iterator[PostgresJournal]:
    journal = PostgresJournal(url)
    yield journal
    journal.close()


@pytest.fixture
def server(url: str) -> Iterator[PostgresJournal]:
    journal = PostgresJournal(url)
    yield journal
    journal.close()


async def told(journal: PostgresJournal) -> asyncio.Queue[tuple[str, bool]]:
    """Return a queue that receives the notices from now on."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[str, bool]]()

    def heard(session_id: str, is_watched: bool) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, (session_id, is_watched))

    await journal.broadcasts.listen(heard)
    # An empty id says that notices may have been missed.
    assert await asyncio.wait_for(queue.get(), PATIENCE) == ("", True)
    return queue


async def test_what_a_run_says_reaches_those_who_watch_its_session(
    worker: PostgresJournal, server: PostgresJournal
):
    at_worker, at_server = await told(worker), await told(server)
    await server.broadcasts.watch(Watcher("page", 1), "ann/t", seconds=60)
    assert await asyncio.wait_for(at_worker.get(), PATIENCE) == ("ann/t", True)
    assert await worker.broadcasts.watchers(["ann/t", "bob/t"]) == {"ann/t": [Watcher("page", 1)]}
    await worker.broadcasts.add("ann/t", "run", 1, 1, b"Hel")
    await worker.broadcasts.add("ann/t", "run", 1, 2, b"lo")
    await worker.broadcasts.add("bob/t", "other", 1, 1, b"secret")
    assert await asyncio.wait_for(at_server.get(), PATIENCE) == ("ann/t", True)
    assert await asyncio.wait_for(at_server.get(), PATIENCE) == ("ann/t", False)
    first, second = await server.broadcasts.read("ann/t", 0)
    assert (first.run_id, first.leg, first.number, first.body, second.body) == ("run", 1, 1, b"Hel", b"lo")
    assert await server.broadcasts.read("ann/t", first.position) == [second]
    assert await server.broadcasts.last("ann/t") == second.position


async def test_the_last_one_to_leave_deletes_the_batches(worker: PostgresJournal, server: PostgresJournal):
    for each in ("one", "two"):
        await server.broadcasts.watch(Watcher(each, 1), "ann/t", seconds=60)
    await worker.broadcasts.add("ann/t", "run", 1, 1, b"Hello")
    await server.broadcasts.leave("one", "ann/t")
    assert len(await server.broadcasts.read("ann/t", 0)) == 1
    await server.broadcasts.leave("two", "ann/t")
    assert await server.broadcasts.read("ann/t", 0) == []
    assert await worker.broadcasts.watchers(["ann/t"]) == {}


async def test_a_watcher_that_is_gone_counts_no_more_and_what_is_old_is_deleted(
    worker: PostgresJournal, server: PostgresJournal, url: str
):
    await server.broadcasts.watch(Watcher("gone", 1), "ann/t", seconds=-1)
    assert await worker.broadcasts.watchers(["ann/t"]) == {}
    await worker.broadcasts.add("ann/t", "run", 1, 1, b"Hello")
    await worker.broadcasts.sweep()
    assert len(await server.broadcasts.read("ann/t", 0)) == 1
    age(url)
    await worker.broadcasts.sweep()
    assert await server.broadcasts.read("ann/t", 0) == []


async def test_a_batch_that_something_else_has_written_is_not_shown(
    worker: PostgresJournal, server: PostgresJournal, url: str, caplog: pytest.LogCaptureFixture
):
    await worker.broadcasts.add("ann/t", "run", 1, 1, b"Pay 1")
    await worker.broadcasts.add("ann/t", "run", 1, 2, b"done")
    execute(url, "UPDATE broadcasts SET body = 'Pay 9' WHERE number = 1")
    assert [each.body for each in await server.broadcasts.read("ann/t", 0)] == [b"done"]
    assert "something other than Handrail" in caplog.text
    execute(url, "UPDATE broadcasts SET session_id = 'bob/t'")  # another person's session
    assert await server.broadcasts.read("bob/t", 0) == []


async def test_broadcasts_wake_no_worker(worker: PostgresJournal, server: PostgresJournal):
    notices = await told(worker)
    waiting = asyncio.ensure_future(worker.queue.wait(PATIENCE))
    await asyncio.sleep(0)
    await server.broadcasts.watch(Watcher("page", 1), "ann/t", seconds=60)
    await server.broadcasts.add("ann/t", "run", 1, 1, b"Hello")
    assert await asyncio.wait_for(notices.get(), PATIENCE) == ("ann/t", True)
    assert await asyncio.wait_for(notices.get(), PATIENCE) == ("ann/t", False)
    assert not waiting.done()
    waiting.cancel()


def test_only_a_journal_in_postgresql_has_broadcasts(server: PostgresJournal):
    assert server.broadcasts is not None
    assert MemoryJournal().broadcasts is None


def age(url: str) -> None:
    execute(url, "UPDATE broadcasts SET at = at - 3600")


def execute(url: str, query: str) -> None:
    address = parse_url(url)
    with psycopg.connect(address.conninfo, autocommit=True) as connection:
        connection.execute(f'SET search_path = "{address.schema}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
        connection.execute(query)  # pyright: ignore[reportArgumentType, reportCallIssue]  # a test's own text
