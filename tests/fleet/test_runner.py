"""Workers execute the runs that wait in a journal, even if some of the workers are lost."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, runs
from handrail.clock import SYSTEM_CLOCK, SystemClock
from handrail.errors import JournalError, RunError
from handrail.events import RunClaimed, ToolInvoked
from handrail.fleet import FleetApp, JournalDispatcher, Runner, Submission, submit
from handrail.fleet.dispatcher import Execute
from handrail.fleet.submission import repeat
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, RunRow, WorkerRow
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.run.entry import MOST_WORKER_DEATHS
from handrail.run.record.begin import decode_outcome, decode_request
from handrail.run.record.lease import renew_now
from handrail.serve.sources import PromptSource
from handrail.session.bus import subscribe_everywhere
from support import PATIENCE, fleet_app
from support.parked_runs import answer_to


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Let the app's tools write to a log, and return a function that reads its lines."""
    path = tmp_path / "log"
    monkeypatch.setenv("FLEET_LOG", str(path))
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def app() -> FleetApp:
    return FleetApp.load(str(Path(fleet_app.__file__)))


@asynccontextmanager
async def worker(
    journal: Journal, app: FleetApp, grace: float = 0.0, **options: Any
) -> AsyncGenerator[Runner]:
    """Run a worker until the block ends. Runs that it has not finished then are interrupted after `grace` seconds."""
    runner, stop = Runner(journal, [app], **options), asyncio.Event()
    task = asyncio.ensure_future(runner.run(stop, grace=grace))
    try:
        yield runner
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE)


async def until(done: Callable[[], Any]) -> Any:
    """Wait until `done` returns something true, and return that."""
    async with asyncio.timeout(PATIENCE):
        while not (found := await result if asyncio.iscoroutine(result := done()) else result):
            await asyncio.sleep(0.005)
    return found


async def over(journal: Journal, run_id: str) -> RunRow:
    async def look() -> RunRow | None:
        row = await journal.runs.get(run_id)
        return row if row.status in OVER else None

    return await until(look)


async def test_a_worker_begins_a_submitted_run(app: FleetApp, log: Callable[[], list[str]]):
    journal = MemoryJournal()
    row = await submit(journal, app, "pay rent")
    assert (row.status, row.queue) == ("queued", app.queue)
    async with worker(journal, app):
        row = await over(journal, row.record.id)
    assert (row.status, decode_outcome(row).text) == ("done", "Result: paid rent")
    assert len(log()) == 1


async def test_turns_of_a_session_are_executed_in_order_with_the_conversation_so_far(app: FleetApp):
    journal = MemoryJournal()
    said = ["one", "two", "three"]
    for number, message in enumerate(said):
        await submit(journal, app, Submission(message, session_id="s", run_id=str(number)))
    async with worker(journal, app):
        texts = [decode_outcome(await over(journal, str(number))).text for number in range(3)]
    assert texts == ["Turn 1: one", "Turn 2: two", "Turn 3: three"]


async def test_a_waiting_run_leaves_memory_and_continues_once_it_is_answered(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path
):
    journal, door = SqliteJournal(tmp_path / "runs.db"), SqliteJournal(tmp_path / "runs.db")
    run_id = (await submit(journal, app, "choose tea")).record.id

    async def parked() -> bool:
        return (await door.runs.get(run_id)).status == "parked"

    async with worker(journal, app) as runner:
        await until(parked)
        await until(lambda: not runner.running)
    [question] = await door.questions.open(run_id)
    door.questions.answer(answer_to(question, {"name": "green"}))  # while no worker is up
    async with worker(journal, app):
        row = await over(journal, run_id)
    assert (decode_outcome(row).text, log()) == ("Result: chose green", ["chose green"])
    journal.close()
    door.close()


async def test_a_rate_limit_and_the_log_of_calls_move_with_a_session_from_worker_to_worker(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path
):
    """Each leg of a session's runs is executed by another worker. The limit of two calls holds for all of them together."""
    door = SqliteJournal(tmp_path / "runs.db")
    for number in ("1", "2", "3"):
        await submit(door, app, Submission("choose tea", session_id="s", run_id=number))

    async def next_leg(done: Callable[[], Any]) -> None:
        journal = SqliteJournal(tmp_path / "runs.db")
        async with worker(journal, app) as runner:
            await until(done)
            await until(lambda: not runner.running)
        journal.close()

    for number in ("1", "2"):
        await next_leg(lambda number=number: door.questions.open(number))
        [question] = await door.questions.open(number)
        value = {"name": "green"}
        door.questions.answer(answer_to(question, value))
    await next_leg(lambda: over(door, "3"))
    assert "2 calls in 3600 seconds is the limit" in decode_outcome(await over(door, "3")).text
    session = await runs.session(door, "s", principal="local")
    assert [(each.tool, each.status) for each in session[ToolInvoked].all()] == [
        ("choose", "ok"),
        ("choose", "ok"),
        ("choose", "denied"),
    ]
    door.close()


def is_stopped(row: RunRow) -> bool:
    """Return whether a run was asked to stop. Its worker may have stopped it already."""
    return row.stopping or row.status == "cancelled"


async def test_a_run_is_cancelled_from_a_different_process(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path
):
    journal, door = SqliteJournal(tmp_path / "runs.db"), SqliteJournal(tmp_path / "runs.db")
    run_id = (await submit(door, app, "sleep 1000")).record.id
    async with worker(journal, app):
        await until(lambda: log() == ["asleep"])
        assert is_stopped(await runs.cancel(door, run_id))
        row = await over(door, run_id)
    assert (row.status, log()) == ("cancelled", ["asleep", "woken"])
    journal.close()
    door.close()


async def test_a_worker_that_is_stopped_leaves_its_runs_to_others(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path
):
    first, second = SqliteJournal(tmp_path / "runs.db"), SqliteJournal(tmp_path / "runs.db")
    run_id = (await submit(first, app, "sleep 1000")).record.id
    async with worker(first, app):
        await until(lambda: log() == ["asleep"])
    row = await first.runs.get(run_id)
    assert (row.status, row.owner) == ("parked", "")
    async with worker(second, app):
        await until(lambda: log().count("asleep") == 2)
    first.close()
    second.close()


async def test_a_run_that_a_stopped_worker_interrupts_is_due_and_keeps_its_workspace_at_once(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An interrupted run is parked and due at once, and keeps its workspace, so no other run changes the files before it continues."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    journal, found = MemoryJournal(), list[Any]()
    run_id = (await submit(journal, app, Submission("sleep 1000", folder="workspace:w"))).record.id
    release = journal.workspaces.release

    async def released(name: str, run_id: str) -> None:
        await release(name, run_id)
        row = await journal.runs.get(run_id)
        found.append((row.status, row.due_at is not None, await journal.workspaces.holders()))

    monkeypatch.setattr(journal.workspaces, "release", released)
    async with worker(journal, app):
        await until(lambda: log() == ["asleep"])
    assert found == [("parked", True, {"w": run_id})]


async def test_a_leg_that_lost_its_run_ends_before_the_same_worker_takes_the_run_again(
    app: FleetApp, log: Callable[[], list[str]]
):
    """A worker does not claim a run again while its own leg, which has lost that run, is still executing.

    Otherwise the journal could not tell the records of the two legs apart.
    """
    journal = MemoryJournal()
    run_id = (await submit(journal, app, "sleep 1000")).record.id
    runner = Runner(journal, [app])
    first = asyncio.ensure_future(runner.execute(run_id))
    await until(lambda: log() == ["asleep"])
    await journal.runs.leave(run_id, "parked", due_at=0.0)  # as if another worker had taken and parked it
    await runner.execute(run_id)
    assert (await journal.runs.get(run_id)).owner == ""
    await renew_now(journal, run_id)  # the first leg notices that it has lost the run
    await asyncio.wait_for(first, PATIENCE)
    second = asyncio.ensure_future(runner.execute(run_id))
    await until(lambda: log() == ["asleep", "woken", "asleep"])
    second.cancel()
    await asyncio.wait([second])


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_more(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path
):
    journal = MemoryJournal()
    for id, message in (("first", "doze"), ("second", "pay rent")):
        await submit(journal, app, Submission(message, run_id=id))
    async with worker(journal, app, grace=PATIENCE, limit=1) as runner:
        await until(lambda: log() == ["asleep"])

        async def wake() -> None:
            await until(lambda: runner._draining)
            (tmp_path / "log.wake").touch()

        waking = asyncio.ensure_future(wake())
    await waking
    assert (await journal.runs.get("first")).status == "done"
    assert (await journal.runs.get("second")).status == "queued"
    assert await journal.queue.workers() == ()


async def test_a_run_that_can_not_begin_fails_and_says_why(app: FleetApp, monkeypatch: pytest.MonkeyPatch):
    journal = MemoryJournal()
    run_id = (await submit(journal, app, Submission("x", folder="/no/such/folder"))).record.id
    async with worker(journal, app):
        row = await over(journal, run_id)
    assert (row.status, decode_outcome(row).phase) == ("failed", "begin")
    assert "is not on this host" in decode_outcome(row).error


async def test_a_workspace_is_there_for_workers_on_every_host(
    app: FleetApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = MemoryJournal()
    said: list[str] = []
    for number, host in enumerate(["ada.example", "bob.example", "ada.example"]):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / host))
        row = await submit(journal, app, Submission(f"keep {number}", folder="workspace:w"))
        assert row.host == ""
        async with worker(journal, app, host=host):
            said.append(decode_outcome(await over(journal, row.record.id)).text)
    assert said == ["Result: 0", "Result: 0 1", "Result: 0 1 2"]


async def test_a_run_waits_for_its_workspace_and_the_worker_says_who_has_it(
    app: FleetApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    journal, said = MemoryJournal(), list[str]()
    await journal.workspaces.acquire("w", "other")
    run_id = (await submit(journal, app, Submission("keep x", folder="workspace:w"))).record.id
    async with worker(journal, app, report=said.append):
        await until(lambda: any("in use by the run 'other'" in line for line in said))

        async def released() -> bool:
            return not (await journal.runs.get(run_id)).owner

        await until(released)
        assert (await journal.runs.get(run_id)).status == "queued"
        [line] = await runs.list_runs(journal)
        assert (line.missing, line.workspaces) == (("w", "other"), [])
        await journal.workspaces.release("w", "other")
        await journal.queue.wake(run_id)
        assert decode_outcome(await over(journal, run_id)).text == "Result: x"


async def test_a_run_in_a_folder_is_taken_only_on_its_host(app: FleetApp, tmp_path: Path):
    journal = MemoryJournal()
    run_id = (await submit(journal, app, Submission("x", folder=str(tmp_path), host="ada.example"))).record.id
    async with worker(journal, app, host="bob.example"):
        other = (await submit(journal, app, "y")).record.id
        await over(journal, other)
        assert (await journal.runs.get(run_id)).status == "queued"
    async with worker(journal, app, host="ada.example"):
        await over(journal, run_id)


async def test_a_repeated_run_submits_the_next_one_once(app: FleetApp):
    journal = MemoryJournal()
    first = await submit(journal, app, Submission("pay rent", every=3600.0, key="rent"))
    async with worker(journal, app):
        await over(journal, first.record.id)
    [following] = [row for row in await journal.runs.list() if row.status == "queued"]
    assert first.due_at is not None
    assert following.due_at == first.due_at + 3600
    assert (following.queue, following.record.session_id) == (app.queue, following.record.id)


async def test_runs_repeated_within_a_second_have_different_ids(app: FleetApp):
    journal = MemoryJournal()
    row = await submit(journal, app, Submission("pay rent", every=0.4, key="rent", at=4e9))
    for _ in range(4):
        await repeat(journal, row, decode_request(row.record), JournalDispatcher())
        row = max(await journal.runs.list(), key=lambda each: each.due_at or 0.0)
    assert len({each.record.id for each in await journal.runs.list()}) == 5


async def test_a_queued_run_can_be_cancelled_but_not_resumed_or_forked(app: FleetApp):
    journal = MemoryJournal()
    run_id = (await submit(journal, app, Submission("hello", session_id="s"))).record.id
    for use in (
        lambda: fleet_app.adapter.resume(run_id, journal=journal),
        lambda: runs.fork(journal, run_id, 0),
    ):
        with pytest.raises(RunError, match="has not begun"):
            await use()
    assert [each.text for each in await runs.said(journal, run_id)] == ["hello"]
    assert (await runs.cancel(journal, run_id)).status == "cancelled"
    later = (await submit(journal, app, Submission("again", session_id="s"))).record.id
    async with worker(journal, app):
        row = await over(journal, later)
    assert decode_outcome(row).text == "Turn 1: again"


NOT_BEGUN = ("cancelled", "it was cancelled before it began")


async def test_a_queued_run_is_cancelled_while_a_worker_has_another_run_of_its_session(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path
):
    journal, door = SqliteJournal(tmp_path / "runs.db"), SqliteJournal(tmp_path / "runs.db")
    for id, message in (("first", "sleep 1000"), ("second", "pay rent"), ("third", "hello")):
        await submit(door, app, Submission(message, run_id=id, session_id="s"))
    async with worker(journal, app):
        await until(lambda: log() == ["asleep"])
        row = await runs.cancel(door, "second")
        assert (row.status, decode_outcome(row).error) == NOT_BEGUN
        assert decode_outcome(row).cost == 0
        assert is_stopped(await runs.cancel(door, "first"))
        assert decode_outcome(await over(door, "third")).text == "Turn 2: hello"
    assert (await door.runs.get("first")).status == "cancelled"
    journal.close()
    door.close()


async def test_a_run_that_was_cancelled_at_a_lost_worker_does_not_begin(
    app: FleetApp, log: Callable[[], list[str]], tmp_path: Path
):
    lost, journal = SqliteJournal(tmp_path / "runs.db"), SqliteJournal(tmp_path / "runs.db")
    run_id = (await submit(journal, app, Submission("pay rent", every=3600.0))).record.id
    await lost.queue.claim([app.queue])
    assert (await runs.cancel(journal, run_id)).stopping
    lost.close()
    async with worker(journal, app):
        row = await over(journal, run_id)
    assert (row.status, decode_outcome(row).error) == NOT_BEGUN
    assert (log(), len(await journal.runs.list())) == ([], 1)  # the series has ended too
    journal.close()


async def test_a_run_that_is_claimed_while_the_worker_begins_to_drain_is_released(
    app: FleetApp, monkeypatch: pytest.MonkeyPatch
):
    journal = MemoryJournal()
    run_id = (await submit(journal, app, "pay rent")).record.id
    claim, claimed, returns = journal.queue.claim, asyncio.Event(), asyncio.Event()

    async def slow_claim(*queues: Any, **options: Any) -> RunRow | None:
        row = await claim(*queues, **options)
        claimed.set()
        await returns.wait()
        return row

    monkeypatch.setattr(journal.queue, "claim", slow_claim)
    stop = asyncio.Event()
    task = asyncio.ensure_future(Runner(journal, [app]).run(stop))
    await asyncio.wait_for(claimed.wait(), PATIENCE)
    stop.set()
    for _ in range(10):
        await asyncio.sleep(0)  # let the worker begin to drain
    returns.set()
    await asyncio.wait_for(task, PATIENCE)
    row = await journal.runs.get(run_id)
    assert (row.status, row.owner) == ("queued", "")


async def test_a_worker_that_fails_leaves_its_runs_to_others(
    app: FleetApp, log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
):
    """When a worker fails, its runs are parked and due, so that other workers can take them.

    They are not cancelled.
    """
    journal = MemoryJournal()
    run_id = (await submit(journal, app, "sleep 1000")).record.id

    async def fail(*_: Any) -> None:
        raise OSError("something that nobody expected")

    runner = Runner(journal, [app])
    working = asyncio.ensure_future(runner.run(asyncio.Event()))
    await until(lambda: log() == ["asleep"])
    monkeypatch.setattr(journal.queue, "wait", fail)
    with pytest.raises(OSError, match="nobody expected"):
        await asyncio.wait_for(working, PATIENCE)
    row = await journal.runs.get(run_id)
    assert (row.status, row.owner, row.due_at is None) == ("parked", "", False)


@pytest.mark.parametrize(
    ("deaths", "status"), [(MOST_WORKER_DEATHS - 1, "done"), (MOST_WORKER_DEATHS, "failed")]
)
async def test_a_run_is_not_blamed_for_the_death_of_a_few_workers(
    app: FleetApp, monkeypatch: pytest.MonkeyPatch, deaths: int, status: str
):
    """A run fails only after many of its workers have died, because other runs of those workers may be the cause."""
    journal = MemoryJournal()
    run_id = (await submit(journal, app, "choose tea")).record.id
    take = journal.runs.take

    async def taken(id: str, /, **how: Any) -> RunRow:
        return msgspec.structs.replace(await take(id, **how), deaths=deaths)

    async with worker(journal, app) as runner:
        [question] = await until(lambda: journal.questions.open(run_id))
        await until(lambda: not runner.running)
        monkeypatch.setattr(journal.runs, "take", taken)
        journal.questions.answer(answer_to(question, {"name": "x"}))
        row = await over(journal, run_id)
    assert row.status == status


class _ForgetfulEngine(JournalDispatcher):
    """An engine that loses the first leg that it is asked to start, and raises an error for the second."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.legs: asyncio.Queue[str] = asyncio.Queue()

    async def wake(self, run: RunRow, /) -> None:
        self.woken.append(run.record.id)
        if len(self.woken) == 2:
            raise ConnectionError("the engine's database is being restarted")
        if len(self.woken) > 2:
            self.legs.put_nowait(run.record.id)

    async def work(self, execute: Execute, queues: Sequence[str], limit: int, /) -> None:
        while True:
            await execute(await self.legs.get())


class _FastClock:
    """A clock that advances by a minute whenever its monotonic time is read."""

    def __init__(self) -> None:
        self._minutes = 0

    def now(self) -> datetime:
        return SYSTEM_CLOCK.now()

    def monotonic(self) -> float:
        self._minutes += 1
        return 60.0 * self._minutes


async def test_a_leg_that_its_engine_has_lost_is_handed_over_again(app: FleetApp):
    journal, engine = MemoryJournal(), _ForgetfulEngine()
    run_id = (await submit(journal, app, "pay rent")).record.id
    async with worker(journal, app, dispatcher=engine, clock=_FastClock()):
        while len(engine.woken) < 3:
            await journal.queue.announce(WorkerRow(owner="", host="h", queues=()), seconds=1)  # ends its wait
            await asyncio.sleep(0.01)
        row = await over(journal, run_id)
    assert (row.status, engine.woken[:3]) == ("done", [run_id] * 3)


async def test_a_run_whose_release_failed_with_the_journal_is_released_later(
    app: FleetApp, monkeypatch: pytest.MonkeyPatch
):
    """If a worker fails to release a run, it releases the run later, and a second leg finishes it.

    Otherwise, no other worker could take the run while this worker's lease lasts.
    """
    journal = MemoryJournal()
    run_id = (await submit(journal, app, "pay rent")).record.id
    begin, get, failures = journal.runs.begin, journal.runs.get, ["get", "begin"]

    async def failing(name: str, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if failures and failures[-1] == name:
            failures.pop()
            raise JournalError("journal", "it is gone for a while", "Wait.")
        return await method(*given, **named)

    monkeypatch.setattr(journal.runs, "begin", partial(failing, "begin", begin))
    monkeypatch.setattr(journal.runs, "get", partial(failing, "get", get))
    async with worker(journal, app):
        await until(lambda: not failures)
        row = await over(journal, run_id)
    assert (row.status, row.legs) == ("done", 2)


# --- time goes on while a run is parked ------------------------------------------------------------------


class Hands(SystemClock):
    """A clock that a test can set forward."""

    by = timedelta()

    def now(self) -> datetime:
        return super().now() + self.by

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.by.total_seconds()


async def test_a_run_is_claimed_with_the_time_that_it_was_due(app: FleetApp, log: Callable[[], list[str]]):
    """A run that is scheduled does not wait for a worker before its time."""
    clock = Hands()
    journal, waits = MemoryJournal(clock), dict[str, float]()
    in_an_hour = clock.now().timestamp() + 3600
    at_once = await submit(journal, app, "pay rent")
    scheduled = await submit(journal, app, Submission("pay gas", at=in_an_hour))
    clock.by = timedelta(hours=2)
    stop = subscribe_everywhere(RunClaimed, lambda fact: waits.update({fact.run_id: fact.seconds}))
    async with worker(journal, app, clock=clock):
        for row in (at_once, scheduled):
            await over(journal, row.record.id)
    stop()
    assert round(waits[at_once.record.id] / 3600, 1) == 2.0
    assert round(waits[scheduled.record.id] / 3600, 1) == 1.0


def timed(app: FleetApp, clock: Hands) -> FleetApp:
    """Return the app with an adapter that goes by this clock, in whose runs shipping must be approved within an hour."""
    adapter = Adapter(ScriptedModel(fleet_app.answer), clock=clock, approval_seconds=3600.0)
    prompt = Prompt(
        "shop",
        "You run a shop.",
        tools=[fleet_app.ship, fleet_app.hurry, fleet_app.choose],
        policies=[CapabilityPolicy()],
    )
    return dataclasses.replace(app, source=PromptSource(prompt, adapter, app=app.name))


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize(
    ("said", "ended"),
    [
        ("hurry tea", "Result: hurry failed: question 'pick': nobody answered in time"),
        ("ship tea", "Result: ship was not approved (timed out)"),
        ("choose tea", "the deadline"),
    ],
)
async def test_a_parked_run_whose_time_ends_is_continued_by_a_worker_once(
    app: FleetApp, log: Callable[[], list[str]], said: str, ended: str, stopped: bool
):
    """A question, an approval and a deadline end on workers as they would live, and the run is taken once for that.

    It does not matter whether a worker was up when the time was over.
    """
    clock = Hands()
    journal, app = MemoryJournal(clock), timed(app, clock)
    deadline = 3600.0 if said.startswith("choose") else None
    run_id = (await submit(journal, app, Submission(said, deadline=deadline))).record.id

    async def parked() -> bool:
        return (await journal.runs.get(run_id)).status == "parked"

    async with worker(journal, app, clock=clock) as runner:
        await until(parked)
        await until(lambda: not runner.running)
        if not stopped:
            clock.by = timedelta(hours=2)
            await over(journal, run_id)
    assert stopped or not await parked()
    clock.by = timedelta(hours=2)
    async with worker(journal, app, clock=clock):
        row = await over(journal, run_id)
    outcome = decode_outcome(row)
    assert ended in (outcome.text or outcome.error)
    assert (row.legs, row.questions) == (2, 0)
    assert "ship tea" not in log()


async def test_a_run_with_an_expired_question_and_an_open_one_is_not_taken_again_and_again(app: FleetApp):
    """An expired question ends when it is looked at, even if the resumed run does not ask it again."""
    clock = Hands()
    journal, app = MemoryJournal(clock), timed(app, clock)
    run_id = (await submit(journal, app, "choose tea")).record.id

    async def parked() -> bool:
        return (await journal.runs.get(run_id)).status == "parked"

    async with worker(journal, app, clock=clock) as runner:
        await until(parked)
        await until(lambda: not runner.running)
    [question] = await journal.questions.open(run_id)
    await journal.runs.take(run_id)
    stray = msgspec.structs.replace(
        question, id=f"{run_id}.9?1", expires_at=question.asked_at + timedelta(hours=1)
    )
    asking = asyncio.ensure_future(journal.questions.ask(stray))

    async def has_two() -> bool:
        return len(await journal.questions.open(run_id)) == 2

    await until(has_two)
    asking.cancel()
    await asyncio.wait({asking})
    assert stray.expires_at is not None
    await journal.runs.leave(run_id, "parked", due_at=stray.expires_at.timestamp())
    clock.by = timedelta(hours=2)

    async with worker(journal, app, clock=clock) as runner:

        async def taken() -> bool:
            asked = await journal.questions.open(
                run_id
            )  # ends the expired one, which makes the run due once more
            row = await journal.runs.get(run_id)
            is_idle = row.status == "parked" and row.due_at is None and not row.owner and not runner.running
            return is_idle and len(asked) == 1

        await until(taken)
    assert [each.id for each in await journal.questions.open(run_id)] == [question.id]
    assert (await journal.runs.get(run_id)).due_at is None


async def test_a_schedule_that_passed_while_no_worker_was_up_runs_once(app: FleetApp):
    """Of the times of a repeated run that have passed, one is made up for. The next one is in the future."""
    clock = Hands()
    journal = MemoryJournal(clock)
    first = await submit(journal, app, Submission("hello", every=60.0, key="tick"))
    clock.by = timedelta(hours=2)
    async with worker(journal, app, clock=clock):
        await over(journal, first.record.id)
    [following] = [row for row in await journal.runs.list() if row.status == "queued"]
    assert following.due_at is not None
    assert 0 < following.due_at - clock.now().timestamp() <= 60
