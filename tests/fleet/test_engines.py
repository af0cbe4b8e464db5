"""An engine starts the legs of runs, and the journal decides what they do. The engines are DBOS and procrastinate."""

import asyncio
import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from handrail.fleet import FleetApp, Runner, Submission, submit
from handrail.fleet.dispatcher import Engine
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER
from handrail.journal.sqlite import SqliteJournal
from handrail.run.record.begin import decode_outcome
from support import PATIENCE, fleet_app, postgres
from support.parked_runs import answer_to

MakeEngine = Callable[[Journal], Engine]


pytestmark = pytest.mark.skipif(
    not os.environ.get("HANDRAIL_DEEP"), reason="starting an engine twice takes seconds"
)


@pytest.fixture
def engine(tmp_path: Path) -> MakeEngine:
    if importlib.util.find_spec("dbos") is None:
        pytest.skip("dbos is not installed")
    from handrail.fleet.dbos import DbosDispatcher

    return lambda journal: DbosDispatcher(f"sqlite:///{tmp_path}/dbos.db", journal, poll=0.02)


async def test_an_engine_drives_runs_through_questions_and_restarts_of_the_worker(
    engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The engine starts every leg of two turns of a session, and both finish.

    The first turn asks a question, which is answered while no worker is up, and so takes two legs.
    """
    monkeypatch.setenv("FLEET_LOG", str(tmp_path / "log"))
    app = FleetApp.load(str(Path(fleet_app.__file__)))
    journal = SqliteJournal(tmp_path / "runs.db")
    first = (await submit(journal, app, Submission("choose tea", session_id="s"))).record.id
    second = (await submit(journal, app, Submission("pay rent", session_id="s"))).record.id

    async def work(until: Callable[[str], bool], run_id: str) -> None:
        stop = asyncio.Event()
        runner = Runner(journal, [app], dispatcher=engine(journal))
        task = asyncio.ensure_future(runner.run(stop, grace=0))
        async with asyncio.timeout(PATIENCE):
            while not until((await journal.runs.get(run_id)).status):
                await asyncio.sleep(0.01)
                if task.done():
                    task.result()
        stop.set()
        await asyncio.wait_for(task, PATIENCE)

    await work(lambda status: status == "parked", first)
    [question] = await journal.questions.open(first)
    journal.questions.answer(answer_to(question, {"name": "green"}))
    await work(lambda status: status in OVER, second)
    texts = [decode_outcome(await journal.runs.get(each)).text for each in (first, second)]
    assert texts == ["Result: chose green", "Result: paid rent"]
    assert (await journal.runs.get(first)).legs == 2
    journal.close()


async def test_a_leg_that_ended_or_was_lost_before_it_claimed_its_run_is_started_again(
    engine: MakeEngine, tmp_path: Path
):
    """If a leg ends or hangs without claiming its run, the engine starts another one when the run is woken.

    DBOS starts nothing twice under one id, so each leg needs an id of its own.
    """
    app = FleetApp.load(str(Path(fleet_app.__file__)))
    journal = SqliteJournal(tmp_path / "runs.db")
    row = await submit(journal, app, "pay rent")
    started: asyncio.Queue[str] = asyncio.Queue()
    lost = asyncio.Event()

    async def execute(run_id: str) -> None:
        started.put_nowait(run_id)
        if started.qsize() + taken == 2:  # the second leg never ends, as if its process were gone
            await lost.wait()

    taken = 0
    dispatcher = engine(journal)
    working = asyncio.ensure_future(dispatcher.work(execute, [app.queue], 10))
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            while started.empty():
                await dispatcher.wake(row)
                await asyncio.sleep(0.05)
            assert started.get_nowait() == row.record.id
            taken += 1
    lost.set()
    working.cancel()
    await asyncio.wait([working])
    journal.close()


async def test_a_submitted_run_is_started_by_the_engine_even_before_a_worker_is_up(
    engine: MakeEngine, tmp_path: Path
):
    """The engine starts the legs by itself: in this test, no worker polls the journal.

    A delayed leg starts at once if its run is woken.
    """
    app = FleetApp.load(str(Path(fleet_app.__file__)))
    journal = SqliteJournal(tmp_path / "runs.db")
    door, started = engine(journal), asyncio.Queue[str]()
    now = await submit(journal, app, "pay rent", dispatcher=door)
    soon = await submit(journal, app, Submission("pay rent", at=time.time() + 0.1), dispatcher=door)
    late = await submit(journal, app, Submission("pay rent", at=time.time() + 100_000), dispatcher=door)
    dispatcher = engine(journal)
    working = asyncio.ensure_future(dispatcher.work(started.put, [app.queue], 10))
    async with asyncio.timeout(PATIENCE):
        assert {await started.get(), await started.get()} == {now.record.id, soon.record.id}
        await dispatcher.wake(late)
        assert await started.get() == late.record.id
    working.cancel()
    await asyncio.wait([working])
    journal.close()


async def test_procrastinate_opens_a_database_again_that_was_lost(tmp_path: Path):
    if importlib.util.find_spec("procrastinate") is None:
        pytest.skip("procrastinate is not installed")
    import psycopg

    from handrail.fleet.procrastinate import ProcrastinateDispatcher

    name = f"lost_{os.getpid()}"
    url = f"postgresql://tests@/{name}?host={postgres.server_folder()}"
    app = FleetApp.load(str(Path(fleet_app.__file__)))
    journal = SqliteJournal(tmp_path / "runs.db")
    row = await submit(journal, app, "pay rent")
    started: asyncio.Queue[str] = asyncio.Queue()
    dispatcher = ProcrastinateDispatcher(url, journal)
    with psycopg.connect(url.replace(name, "postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # pyright: ignore
        working = asyncio.ensure_future(dispatcher.work(started.put, [app.queue], 10))
        async with asyncio.timeout(PATIENCE):
            for _ in range(2):
                while started.empty():
                    with contextlib.suppress(Exception):  # any error that a lost database causes
                        await dispatcher.wake(row)
                    await asyncio.sleep(0.05)
                    assert not working.done(), working.result()
                while not started.empty():
                    started.get_nowait()
                query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                connection.execute(query, (name,))
        working.cancel()
        await asyncio.wait([working])
    journal.close()
