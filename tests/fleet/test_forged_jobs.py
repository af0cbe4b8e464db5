"""Rows that others wrote to an engine's tables start nothing, and are never code."""

import asyncio
import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from handrail.fleet import FleetApp, submit
from handrail.fleet.dispatcher import next_leg, queue_name, sealed_leg
from handrail.journal.records import RunRow
from handrail.journal.sqlite import SqliteJournal
from support import PATIENCE, fleet_app, postgres


class _Code:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


async def _rows(tmp_path: Path, journal: SqliteJournal) -> tuple[FleetApp, RunRow, RunRow, list[Any]]:
    """Return an app, two submitted runs, and what others may write to start the second one."""
    app = FleetApp.load(str(Path(fleet_app.__file__)))
    wanted, forged = await submit(journal, app, "pay rent"), await submit(journal, app, "pay rent")
    other = SqliteJournal(tmp_path / "other.db")
    seal = sealed_leg(wanted, journal).partition(" ")[0]
    ways = [
        forged.record.id,
        next_leg(forged),
        f"{seal} {next_leg(forged)}",
        sealed_leg(forged, other),
        "é " + next_leg(forged),
    ]
    other.close()
    return app, wanted, forged, ways


def test_dbos_reads_no_pickled_row_whatever_format_the_row_names(tmp_path: Path):
    """A row of DBOS's tables names the format that it is read in. Pickle is refused, even where DBOS would read it by default."""
    pytest.importorskip("dbos", reason="dbos is not installed")
    from dbos import _serialization as stored

    from handrail.fleet import dbos as ours

    row, format = stored.serialize_args((_Code(tmp_path / "ran"),), {}, None, stored.DBOSDefaultSerializer)
    for serializer in (ours._Legs(), stored.DBOSDefaultSerializer):  # pyright: ignore[reportPrivateUsage]
        for read in (stored.deserialize_args, stored.deserialize_value, stored.deserialize_exception):
            for named in (format, None):
                with pytest.raises(ValueError, match=r"pickled data|malformed"):
                    read(row, named, serializer)
    assert not (tmp_path / "ran").exists()


def test_what_dbos_stores_for_a_leg_is_json_of_our_own_shapes():
    """The arguments of a leg and the text of its exception are stored as JSON. Any other shape is refused, in both directions."""
    pytest.importorskip("dbos", reason="dbos is not installed")
    from handrail.fleet import dbos as ours

    legs = ours._Legs()  # pyright: ignore[reportPrivateUsage]
    given: dict[str, Any] = {"args": ("one",), "kwargs": {}}
    assert legs.deserialize(legs.serialize(given)) == given
    error = legs.deserialize(legs.serialize(KeyError("gone")))
    assert type(error) is RuntimeError
    assert "gone" in str(error)
    legs.deserialize(legs.serialize(None))
    for text in ("[]", "1", "null", '{"args": [{}]}', '{"more": 1}', '{"py/object": "os.system"}', "x"):
        with pytest.raises(msgspec.DecodeError):
            legs.deserialize(text)
    for value in ({"args": (Path("x"),)}, object()):
        with pytest.raises(msgspec.ValidationError):
            legs.serialize(value)


async def test_a_row_that_others_add_to_dbos_runs_no_code_and_starts_no_run(tmp_path: Path):
    """DBOS starts the leg that was enqueued with the journal's key, and nothing that others enqueue, in any of its formats."""
    pytest.importorskip("dbos", reason="dbos is not installed")
    from dbos import DBOSClient, DBOSPortableJSONSerializer

    from handrail.fleet.dbos import DbosDispatcher

    journal, url = SqliteJournal(tmp_path / "runs.db"), f"sqlite:///{tmp_path}/dbos.db"
    app, wanted, _, ways = await _rows(tmp_path, journal)
    dispatcher = DbosDispatcher(url, journal, poll=0.02)
    await dispatcher.submit(wanted)

    def forge() -> None:
        options: Any = {"workflow_name": "handrail.leg", "queue_name": queue_name(app.queue)}
        default = DBOSClient(system_database_url=url, application_name="handrail")
        default.enqueue(options, _Code(tmp_path / "ran"))
        portable = DBOSClient(
            system_database_url=url,
            application_name="handrail",
            serializer=DBOSPortableJSONSerializer(),
        )
        for way in (*ways, 1, None, [wanted.record.id], {"leg": wanted.record.id}):
            portable.enqueue(options, way)
        default.destroy()
        portable.destroy()

    await asyncio.to_thread(forge)
    started: asyncio.Queue[str] = asyncio.Queue()
    working = asyncio.ensure_future(dispatcher.work(started.put, [app.queue], 10))
    with contextlib.closing(sqlite3.connect(tmp_path / "dbos.db")) as connection:
        query = "SELECT count(*) FROM workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"
        async with asyncio.timeout(PATIENCE):
            while connection.execute(query).fetchone() != (0,):
                await asyncio.sleep(0.02)
        ended = connection.execute("SELECT status FROM workflow_status").fetchall()
    working.cancel()
    await asyncio.wait([working])
    assert len(ended) == 11
    assert [started.get_nowait() for _ in range(started.qsize())] == [wanted.record.id]
    assert not (tmp_path / "ran").exists()
    journal.close()


async def test_a_job_that_others_add_to_procrastinate_starts_no_run(tmp_path: Path):
    """procrastinate starts the leg that was added with the journal's key, and nothing that others add."""
    pytest.importorskip("procrastinate", reason="procrastinate is not installed")
    import psycopg

    from handrail.fleet.procrastinate import ProcrastinateDispatcher

    name = f"forged_{os.getpid()}"
    url = f"postgresql://tests@/{name}?host={postgres.server_folder()}"
    journal = SqliteJournal(tmp_path / "runs.db")
    app, wanted, _, ways = await _rows(tmp_path, journal)
    started: asyncio.Queue[str] = asyncio.Queue()
    dispatcher = ProcrastinateDispatcher(url, journal)
    with psycopg.connect(url.replace(name, "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # pyright: ignore
    working = asyncio.ensure_future(dispatcher.work(started.put, [app.queue], 10))
    async with asyncio.timeout(PATIENCE):
        await dispatcher.wake(wanted)
        assert await started.get() == wanted.record.id
        task = dispatcher._app.configure_task("handrail.leg", queue=queue_name(app.queue))  # pyright: ignore[reportPrivateUsage]
        others: list[Any] = [*ways, 1, None, [wanted.record.id], {"leg": wanted.record.id}]
        for way in others:
            await task.defer_async(leg=way)
        await task.defer_async(run_id=wanted.record.id)
        await dispatcher.wake(wanted)
        assert await started.get() == wanted.record.id
        with psycopg.connect(url, autocommit=True) as connection:
            query = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
            while connection.execute(query).fetchone() != (0,):  # pyright: ignore
                await asyncio.sleep(0.05)
    working.cancel()
    await asyncio.wait([working])
    assert started.empty()
    journal.close()
