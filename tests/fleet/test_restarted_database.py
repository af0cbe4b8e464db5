"""A database that is restarted while many runs wait: what a worker and a server log, and that every run goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import psycopg
import pytest

from handrail.fleet import FleetApp, Runner, Submission, submit
from handrail.journal.postgres.journal import PostgresJournal
from handrail.serve.app import asgi
from support import PATIENCE, fleet_app
from support.killed_postgres import Server, started_server
from support.postgres import KEY
from support.serving import BEARER, TOKEN, Client, served_at, source

pytestmark = pytest.mark.once  # PostgreSQL starts slowly

MANY = 20


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def outage(server: Server, caplog: pytest.LogCaptureFixture) -> AsyncGenerator[None]:
    """Stop the server until renewals of leases have failed, which they do only when a lease has run out, and start it again."""
    with caplog.at_level(logging.DEBUG, "handrail"):
        await asyncio.to_thread(server.shut_down)
        await until(lambda: "could not be renewed" in caplog.text)
        await asyncio.to_thread(server.start_again)
        yield
    loud = [
        each
        for each in caplog.records
        if each.name.startswith("handrail") and each.levelno >= logging.WARNING
    ]
    [warning] = [each.getMessage() for each in loud]
    assert "can't be used for now" in warning
    assert loud[0].exc_info is None


def connections(server: Server) -> int:
    with psycopg.connect(server.url()) as other:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'handrail'"
        return other.execute(query).fetchall()[0][0]


async def test_a_worker_warns_once_however_many_runs_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = tmp_path / "log"
    done.touch()
    monkeypatch.setenv("FLEET_LOG", str(done))
    monkeypatch.setenv("HANDRAIL_KEY", KEY)
    with started_server() as server, closing(PostgresJournal(server.url(lease=1))) as journal:
        app, stop = FleetApp.load(fleet_app.__file__), asyncio.Event()
        for _ in range(MANY):
            await submit(journal, app, Submission("doze"))
        working = asyncio.create_task(Runner(journal, [app], limit=MANY).run(stop, grace=PATIENCE))
        await until(lambda: done.read_text().count("asleep") == MANY)
        assert connections(server) == 2  # however many runs it executes
        async with outage(server, caplog):
            Path(f"{done}.wake").touch()
            async with asyncio.timeout(PATIENCE):
                while {row.status for row in await journal.runs.list()} != {"done"}:
                    await asyncio.sleep(0.05)
            stop.set()
            await working


async def test_a_server_warns_once_and_answers_its_waiting_runs_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HANDRAIL_KEY", KEY)
    with started_server() as server, closing(PostgresJournal(server.url(lease=1))) as journal:
        app = asgi(source(), journal=journal, token=TOKEN, grace=0.2)
        async with served_at(app) as address:
            client = Client(address, app, BEARER)
            names = [f"t{number}" for number in range(5)]
            for name in names:
                await client.say(name, "call order")
            asked = {name: await client.asked(name) for name in names}
            async with outage(server, caplog):
                for name, question in asked.items():
                    given = {
                        "question_id": question["id"],
                        "digest": question["digest"],
                        "value": {"seats": 1},
                    }
                    async with asyncio.timeout(PATIENCE):
                        while (await client.ask("POST", f"/threads/{name}/answers", given)).status != 200:
                            await asyncio.sleep(0.05)
                    assert (await client.idle(name))["status"] == "idle"
