"""`/readyz`, and `Readiness` behind it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from handrail import MemoryJournal
from handrail.clock import SystemClock
from handrail.fleet import Runner
from handrail.fleet.status import StatusServer
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.readiness import Readiness
from handrail.serve.metrics import new_metrics
from support import PATIENCE
from support.killed_postgres import started_server
from support.postgres import KEY
from support.serving import serving

pytestmark = pytest.mark.once  # sockets and a server do not depend on the Python version


class Minutes(SystemClock):
    """A clock that a test sets."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


async def test_a_server_whose_journal_answers_is_ready_for_everybody(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        ready = await client.ask("GET", "/readyz", headers={"Authorization": "-"})
        assert (ready.status, ready.json) == (200, {"status": "ready"})


async def test_a_database_that_is_down_is_told_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDRAIL_KEY", KEY)
    monkeypatch.setattr("handrail.journal.readiness._PATIENCE", 0.2)
    monkeypatch.setattr("handrail.journal.readiness._EVERY", 0.0)
    with started_server() as server, closing(PostgresJournal(server.url())) as journal:
        readiness = Readiness(journal, lambda: False)
        async with asyncio.timeout(PATIENCE):
            while await readiness.state() != "ready":  # on a busy machine, the first answer may take longer
                pass
            server.shut_down()
            assert await readiness.state() == "journal unreachable"
            server.start_again()
            while await readiness.state() != "ready":
                pass


async def test_probes_that_come_together_ask_the_journal_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal, asked, clock = MemoryJournal(), list[int](), Minutes()

    async def signalled() -> tuple[str, ...]:
        asked.append(1)
        return ()

    monkeypatch.setattr(journal.queue, "signalled", signalled)
    readiness = Readiness(journal, lambda: False, clock)
    assert set(await asyncio.gather(*(readiness.state() for _ in range(50)))) == {"ready"}
    assert len(asked) == 1
    clock.seconds = 0.9
    await readiness.state()
    assert len(asked) == 1
    clock.seconds = 1.1
    await readiness.state()
    assert len(asked) == 2
    journal.close()


async def test_a_worker_is_ready_until_it_drains() -> None:
    draining = asyncio.Event()
    with closing(MemoryJournal()) as journal:
        status = StatusServer(Runner(journal, []), new_metrics({}), draining.is_set)
        transport = httpx.ASGITransport(app=status)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://worker", timeout=PATIENCE
        ) as client:
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
            draining.set()
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
