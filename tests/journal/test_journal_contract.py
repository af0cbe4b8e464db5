"""Laws that every journal obeys. To test a new implementation, add it to `STORES` and to the fixture `opening`."""

import asyncio
import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from handrail.errors import (
    AnswerRefused,
    BlobNotFoundError,
    DefinitionError,
    JournalAltered,
    JournalError,
    OutcomeUnknown,
    RunBusy,
    RunError,
    RunUnknown,
    SessionBusy,
    TicketError,
    ToolValidationError,
)
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.protocol import Journal
from handrail.journal.records import (
    CANCEL,
    Amounts,
    CommitUnit,
    Decision,
    Entry,
    RunCopy,
    RunRecord,
    RunRow,
    SpendCap,
    SpendRaise,
    SpendWindow,
    WorkerRow,
)
from handrail.journal.sql import queue
from handrail.journal.sql.leases import LEASE_SECONDS
from handrail.journal.sql.questions import Watch
from handrail.journal.sql.schema import UPGRADABLE, VERSION
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.question import Answer, Question, Vote
from support import PATIENCE, postgres
from support.journals import kept
from support.parked_runs import answer_to
from support.texts import RUN_ID_TAKEN

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Hands:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds


POSTGRES = pytest.param("postgres", marks=pytest.mark.once)
"""PostgreSQL is tested under one Python version only, because it starts slowly."""
STORES = ("memory", "sqlite", POSTGRES)
SHARED = ("sqlite", POSTGRES)
"""The stores that several processes can open."""


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def opening(
    clock: Hands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Journal]]:
    opened: list[SqliteJournal | PostgresJournal] = []
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    url = cache(postgres.new_url)

    def open_store(store: str) -> Journal:
        if store == "memory":
            opened.append(MemoryJournal(clock))
        elif store == "postgres":
            opened.append(PostgresJournal(url(), clock=clock, watch=0.001))
        else:
            opened.append(SqliteJournal(tmp_path / "runs.db", clock=clock, watch=0.001))
        return opened[-1]

    yield open_store
    for each in opened:
        each.close()


@pytest.fixture(params=STORES)
def journal(request: pytest.FixtureRequest, opening: Callable[[str], Journal]) -> Journal:
    """Provide a new journal. A test that uses it runs once for each store."""
    return opening(request.param)


@pytest.fixture(params=SHARED)
def processes(request: pytest.FixtureRequest, opening: Callable[[str], Journal]) -> tuple[Journal, Journal]:
    """Provide a new journal, opened twice as if by two processes."""
    return opening(request.param), opening(request.param)


def run(id: str = "run", session: str = "s", principal: str = "ada", at: float = 1.0) -> RunRecord:
    return RunRecord(id=id, session_id=session, principal=principal, prompt="p", model="m", began_at=at)


def unit(call: str, run_id: str = "run", session: str = "s", files: bool = False) -> CommitUnit:
    manifest = ({"path": "a"},) if files else ()
    return CommitUnit(run_id=run_id, call_id=call, session_id=session, result=b"{}", files=manifest)


def ask(id: str = "run?1", run_id: str = "run", **changed: Any) -> Question:
    fields: dict[str, Any] = {
        "id": id,
        "kind": "input",
        "name": "pick",
        "message": "Which?",
        "payload": {},
        "schema": {"type": "integer"},
        "digest": f"digest of {id}",
        "principal": "ada",
        "asked_by": (),
        "call_id": "c",
        "asked_at": NOW,
        "run_id": run_id,
    }
    return Question(**{**fields, **changed})


async def asked(journal: Journal, question: Question, *rest: Any) -> "asyncio.Task[Answer]":
    """Ask a question, wait until it is open, and return the task that waits for its answer."""
    task = asyncio.ensure_future(journal.questions.ask(question, *rest))
    while question.id not in [each.id for each in await journal.questions.open()]:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    return task


# --- runs and leases ------------------------------------------------------------------------------


async def test_a_run_is_owned_from_its_beginning_until_it_is_left(journal: Journal):
    await journal.runs.begin(run())
    row = await journal.runs.get("run")
    assert (row.status, bool(row.owner), row.record) == ("running", True, run())
    await journal.runs.leave("run", "done", b"outcome")
    row = await journal.runs.get("run")
    assert (row.status, row.owner, row.outcome) == ("done", "", b"outcome")


async def test_ids_of_runs_are_unique_and_unknown_ones_are_named(journal: Journal):
    await journal.runs.begin(run())
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await journal.runs.begin(run())
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await journal.runs.add(RunCopy(row=RunRow(record=run(), status="done")))
    for unknown in (journal.runs.get, journal.runs.take, journal.runs.stop):
        with pytest.raises(RunUnknown):
            await unknown("nobody's")


async def test_taking_a_run_returns_its_row_as_it_was(journal: Journal):
    await journal.runs.begin(run())
    await journal.runs.leave("run", "parked")
    assert (await journal.runs.take("run")).status == "parked"
    assert (await journal.runs.get("run")).status == "running"
    await journal.runs.leave("run", "failed")
    assert (await journal.runs.take("run")).status == "failed"
    assert (await journal.runs.get("run")).status == "failed", "a finished run changed its status"


async def test_a_lease_is_held_by_one_process_until_it_expires(
    processes: tuple[Journal, Journal], clock: Hands
):
    first, second = processes
    await first.runs.begin(run())
    clock.seconds = LEASE_SECONDS - 1
    with pytest.raises(RunBusy):
        await second.runs.take("run")
    assert await kept(first, "run") == 0
    clock.seconds = 2 * LEASE_SECONDS - 2
    with pytest.raises(RunBusy):
        await second.runs.take("run")
    clock.seconds = 2 * LEASE_SECONDS
    await second.runs.take("run")
    assert (await second.runs.get("run")).owner


async def test_a_process_that_lost_its_lease_writes_nothing_more(
    processes: tuple[Journal, Journal], clock: Hands
):
    """A process that lost its lease can neither renew it nor write to the run. Each attempt raises `RunBusy` and records nothing."""
    first, second = processes
    await first.runs.begin(run())
    clock.seconds = LEASE_SECONDS
    await second.runs.take("run")

    async def value() -> int:
        return 1

    decision = Decision(session_id="s", principal="ada", kind="remembered", id="d", at=1.0, body=b"")
    writes: list[Callable[[], Any]] = [
        lambda: kept(first, "run"),
        lambda: first.runs.leave("run", "done"),
        lambda: first.calls.note("run", Entry("verb", ".1", 1.0, b"")),
        lambda: first.calls.commit(unit("c")),
        lambda: first.steps.run("key", value, run_id="run"),
        lambda: first.questions.ask(ask()),
        lambda: first.tickets.close("run", [".1"]),
        lambda: first.blobs.put(b"bytes", run_id="run"),
        lambda: first.decisions.write(decision, run_id="run"),
        lambda: first.tickets.issue("run", ".1", "text"),
    ]
    for write in writes:
        with pytest.raises(RunBusy):
            await write()
    assert (await second.runs.get("run")).status == "running"
    assert await second.calls.entries("run") == await second.calls.load("run") == ()
    assert await second.steps.load("run") == await second.questions.open() == ()
    assert await second.decisions.read("s", "ada") == await second.blobs.list("run") == ()


async def test_the_owner_of_a_run_is_told_to_stop_it(journal: Journal):
    await journal.runs.begin(run())
    assert await kept(journal, "run") == 0
    await journal.runs.stop("run")
    assert (await journal.runs.get("run")).stopping
    assert await kept(journal, "run") == CANCEL
    await journal.runs.leave("run", "cancelled")
    assert not (await journal.runs.get("run")).stopping


async def test_a_request_to_stop_stays_while_a_run_is_parked_until_it_is_taken(
    processes: tuple[Journal, Journal],
):
    first, second = processes
    await first.runs.begin(run())
    await second.runs.stop("run")
    await first.runs.leave("run", "parked")
    row = await second.runs.get("run")
    assert (row.status, row.stopping, row.due_at) == ("parked", True, None)
    await second.runs.take("run")
    assert not (await second.runs.get("run")).stopping


async def test_a_run_that_is_lost_does_not_keep_others_from_being_renewed(
    processes: tuple[Journal, Journal], clock: Hands
):
    first, second = processes
    for name in ("mine", "taken", "stopped"):
        await first.runs.begin(run(name, name))
    await first.runs.leave("taken", "parked")
    await second.runs.take("taken")
    await second.runs.stop("stopped")
    clock.seconds = LEASE_SECONDS - 1
    found = await first.runs.keep("taken", "unknown", "mine", "stopped")
    assert isinstance(found["taken"], RunBusy)
    assert isinstance(found["unknown"], RunUnknown)
    assert (found["mine"], found["stopped"]) == (False, True)
    clock.seconds = LEASE_SECONDS + 1
    with pytest.raises(RunBusy):
        await second.runs.take("mine")
    assert await first.runs.keep() == {}


async def test_runs_are_listed_newest_first_in_pages_and_those_of_a_session_oldest_first(journal: Journal):
    for number in range(5):
        await begin(journal, run(f"r{number}", "st"[number % 2], "ada"), float(number))
        await journal.runs.leave(f"r{number}", "done")
    await journal.runs.begin(run("other", "u", "bob", at=9.0))
    found: list[str] = []
    before = None
    while page := await journal.runs.list(principal="ada", limit=2, before=before):
        found += [row.record.id for row in page]
        before = page[-1].record.mark
    assert found == ["r4", "r3", "r2", "r1", "r0"]
    assert [row.record.id for row in await journal.runs.list(session_id="s")] == ["r0", "r2", "r4"]
    assert (await journal.runs.list())[0].record.id == "other"


async def test_sessions_are_listed_last_changed_first_in_pages(journal: Journal, clock: Hands):
    for number, session in enumerate("sts"):
        clock.seconds = number
        await begin(journal, run(f"r{number}", session), float(number))
        await journal.runs.leave(f"r{number}", "done")
    [first] = await journal.runs.sessions("ada", limit=1)
    assert (first.session_id, first.runs, first.first.id, first.newest.record.id) == ("s", 2, "r0", "r2")
    [second] = await journal.runs.sessions("ada", before=first.mark)
    assert second.session_id == "t"
    assert await journal.runs.sessions("bob") == ()


async def test_a_copy_has_everything_but_an_owner(journal: Journal):
    entry = Entry("verb", ".1", 1.0, b"ask")
    row = RunRow(record=run(), status="parked", owner="somebody", leased_until=1e12, stopping=True)
    await journal.runs.add(
        RunCopy(
            row=row,
            entries=[entry],
            units=[unit("c", files=True)],
            steps=[("k", b"\x01"), ("l", None)],
            blobs=[b"bytes"],
        )
    )
    found = await journal.runs.get("run")
    assert (found.status, found.owner, found.stopping) == ("parked", "", False)
    assert await journal.calls.entries("run") == (entry,)
    assert [each.call_id for each in await journal.calls.load("run")] == ["c"]
    assert await journal.calls.unapplied() == (), "an imported run's files were listed as unapplied"
    assert await journal.steps.load("run") == (("k", b"\x01"), ("l", None))
    assert await journal.blobs.list("run") == (hashlib.sha256(b"bytes").hexdigest(),)


async def test_nothing_of_a_forgotten_run_is_left(journal: Journal):
    await journal.runs.begin(run())
    await journal.calls.note("run", Entry("verb", ".1", 1.0, b"ask"))
    await journal.calls.commit(unit("c", files=True))
    digest = await journal.blobs.put(b"bytes", run_id="run")
    task = await asked(journal, ask())
    journal.questions.answer(answer_to(ask(), 1))
    await task
    decision = Decision(session_id="s", principal="ada", kind="remembered", id="d", at=1.0, body=b"")
    journal.decisions.write(decision)
    await journal.runs.leave("run", "done")
    await begin(journal, run("later"))
    await journal.runs.forget(["run"])
    assert await journal.decisions.read("s", "ada") == (decision,), (
        "a decision was lost although its session has another run"
    )
    assert await journal.calls.entries("run") == await journal.calls.load("run") == ()
    assert await journal.calls.unapplied() == await journal.questions.history("run") == ()
    assert not await journal.blobs.has(digest)
    with pytest.raises(RunUnknown):
        await journal.runs.get("run")
    await journal.runs.forget(["later"])
    assert await journal.decisions.read("s", "ada") == ()


# --- the queue ------------------------------------------------------------------------------------

QUEUE = "shop:agent@1"


def request(id: str = "run", session: str = "", principal: str = "ada", at: float = 1.0) -> RunRecord:
    return RunRecord(
        id=id,
        session_id=session or f"session of {id}",
        principal=principal,
        prompt="p",
        model="m",
        began_at=at,
        app="shop:agent",
        code="1",
        request=b"a message",
    )


async def due(journal: Journal, **arguments: Any) -> list[str]:
    return [row.record.id for row in await journal.queue.due([QUEUE], **arguments)]


async def claimed(journal: Journal, **arguments: Any) -> str:
    row = await journal.queue.claim([QUEUE], **arguments)
    return "" if row is None else row.record.id


async def begin(journal: Journal, record: RunRecord, begun_at: float = 100.0) -> None:
    """Begin a claimed run, or a new one, on a session that includes everything recorded."""
    begun = msgspec.structs.replace(record, began_at=begun_at, request=b"", begin=b"begin")
    await journal.runs.begin(begun, followed=await journal.runs.turn(record.session_id, record.principal))


async def test_a_submitted_run_is_queued_until_a_worker_begins_it(journal: Journal, clock: Hands):
    row = await journal.queue.submit(request())
    assert (row.status, row.owner, row.queue, row.due_at) == ("queued", "", QUEUE, NOW.timestamp())
    assert (await journal.runs.get("run")).status == "queued"
    before = await journal.queue.claim([QUEUE])
    assert before is not None
    assert (before.status, before.owner, before.legs) == ("queued", "", 1)
    assert await journal.queue.claim([QUEUE]) is None, "a claimed run was claimed again"
    await begin(journal, request())
    row = await journal.runs.get("run")
    assert (row.status, row.record.begin, row.record.request) == ("running", b"begin", b"a message")
    assert not (await journal.runs.verify()).altered
    await journal.runs.leave("run", "done", b"outcome")
    assert await due(journal) == []


async def test_a_submitted_run_that_is_parked_while_it_should_stop_is_due_for_a_worker_that_ends_it(
    journal: Journal,
):
    await journal.queue.submit(request())
    assert await claimed(journal) == "run"
    await begin(journal, request())
    await journal.runs.stop("run")
    await journal.runs.leave("run", "parked")
    assert (await journal.runs.get("run")).stopping
    assert await due(journal) == ["run"]
    assert await claimed(journal) == "run"
    await journal.runs.take("run")
    assert await journal.runs.keep("run") == {"run": True}
    await journal.runs.leave("run", "cancelled")
    assert not (await journal.runs.get("run")).stopping
    assert await due(journal) == []


async def test_a_run_that_this_process_still_executes_is_not_claimed(journal: Journal):
    for id in ("run", "next"):
        await journal.queue.submit(request(id))
    assert await claimed(journal, run_id="run", besides=["run"]) == ""
    assert [await claimed(journal, besides=["run"]) for _ in range(2)] == ["next", ""]
    assert await claimed(journal) == "run"


async def test_only_a_run_that_was_claimed_can_be_begun(processes: tuple[Journal, Journal]):
    first, second = processes
    await first.queue.submit(request())
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await begin(first, request())
    await second.queue.claim([QUEUE])
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await begin(first, request())


async def test_a_submitted_run_comes_after_the_others_although_the_clock_was_set_back(
    journal: Journal, clock: Hands
):
    """A run that is submitted comes after those of its session that have begun, and before one that is due later."""

    def submitted(id: str) -> RunRecord:
        return msgspec.structs.replace(request(id), session_id="s", began_at=clock.now().timestamp())

    async def order() -> list[str]:
        return [row.record.id for row in await journal.runs.list(session_id="s")]

    await journal.queue.submit(submitted("first"))
    assert await claimed(journal) == "first"
    await begin(journal, submitted("first"), NOW.timestamp())
    tomorrow = NOW.timestamp() + 86400
    later = msgspec.structs.replace(submitted("tomorrow"), began_at=tomorrow)
    await journal.queue.submit(later, at=tomorrow)
    clock.seconds = -45
    await journal.queue.submit(submitted("second"))
    assert await order() == ["first", "second", "tomorrow"]
    await journal.runs.leave("first", "done")
    assert await claimed(journal) == "second"
    assert not (await journal.runs.verify()).altered


async def test_a_run_without_an_app_is_not_submitted(journal: Journal):
    with pytest.raises(DefinitionError, match="without an app"):
        await journal.queue.submit(run())


async def test_runs_are_claimed_in_the_order_in_which_they_are_due(journal: Journal, clock: Hands):
    now = NOW.timestamp()
    for id, at in (("later", now + 60), ("second", now - 1), ("first", now - 2)):
        await journal.queue.submit(request(id), at=at)
    assert await due(journal) == ["first", "second"]
    assert [await claimed(journal) for _ in range(3)] == ["first", "second", ""]
    clock.seconds = 60
    assert await claimed(journal) == "later"


async def test_a_claim_among_many_queued_runs_reads_few_of_them(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
):
    """A claim reads a few of the runs that are due, and the others only if it can claim none of the few."""
    for number in range(20):
        await journal.queue.submit(request(f"run{number:02}", session=f"s{number}"))
    read: list[str] = []
    check = queue.check_run
    monkeypatch.setattr(queue, "_FEW", 5)
    monkeypatch.setattr(queue, "check_run", lambda *args: (read.append(""), check(*args))[1])
    assert await claimed(journal) == "run00"
    assert len(read) == 5
    assert await claimed(journal, run_id="run15") == "run15"
    assert len(read) == 5 + 1
    await journal.queue.adopt("run19", "other:agent@1")
    row = await journal.queue.claim(["other:agent@1"])
    assert row is not None
    assert row.record.id == "run19"


async def test_a_worker_claims_only_from_its_queues_and_for_its_host(journal: Journal):
    await journal.queue.submit(request("here"), host="ada.example")
    assert await journal.queue.claim(["shop:agent@2"]) is None
    assert await journal.queue.claim([QUEUE], host="bob.example") is None
    assert await due(journal, host="bob.example") == []
    assert [row.record.id for row in await journal.queue.due()] == ["here"]
    assert await claimed(journal, host="ada.example") == "here"


async def test_a_key_submits_a_run_once(journal: Journal):
    assert (await journal.queue.submit(request("one"), key="k")).record.id == "one"
    assert (await journal.queue.submit(request("two"), key="k")).record.id == "one"
    assert (await journal.queue.submit(request("bob's", principal="bob"), key="k")).record.id == "bob's"
    assert {row.record.id for row in await journal.runs.list()} == {"one", "bob's"}


async def test_runs_of_a_session_take_turns(journal: Journal, clock: Hands):
    """Only the oldest queued run of a session is due, and only while no other run of the session is claimed, running or parked."""
    first, second = request("first", "s", at=1.0), request("second", "s", at=2.0)
    for each in (second, first):
        await journal.queue.submit(each)
    assert await due(journal) == ["first"]
    assert [await claimed(journal), await claimed(journal)] == ["first", ""], "two turns began at once"
    with pytest.raises(SessionBusy, match="the session 's' is in use by the run 'first'"):
        await journal.runs.take("second")
    await begin(journal, first)
    assert await claimed(journal) == ""
    await journal.runs.leave("first", "parked")
    assert await claimed(journal) == ""
    await journal.runs.take("first")
    await journal.runs.leave("first", "done")
    assert await claimed(journal) == "second"
    await begin(journal, second, begun_at=50.0)
    assert [row.record.id for row in await journal.runs.list(session_id="s")] == ["first", "second"]


async def test_sessions_of_different_principals_do_not_wait_for_each_other(journal: Journal):
    """A parked run of one principal does not hold up the other's queued run in a session with the same id."""
    await journal.queue.submit(request("ada's", "s"))
    assert await claimed(journal) == "ada's"
    await begin(journal, request("ada's", "s"))
    await journal.runs.leave("ada's", "parked")
    await journal.queue.submit(request("bob's", "s", principal="bob"))
    assert await due(journal) == ["bob's"]
    assert await claimed(journal) == "bob's"


async def test_a_run_scheduled_for_later_does_not_hold_up_its_session(journal: Journal, clock: Hands):
    await journal.queue.submit(request("on friday", "s", at=1.0), at=NOW.timestamp() + 60)
    await journal.queue.submit(request("now", "s", at=2.0))
    assert await claimed(journal) == "now"


async def test_an_answer_makes_a_parked_run_due(processes: tuple[Journal, Journal]):
    worker, door = processes
    await worker.queue.submit(request())
    await worker.queue.claim([QUEUE])
    await begin(worker, request())
    task = await asked(worker, ask())
    task.cancel()
    await worker.runs.leave("run", "parked")
    assert await due(worker) == []
    door.questions.answer(answer_to(ask(), 1))
    assert await due(worker) == ["run"]
    assert await claimed(worker) == "run"
    await worker.runs.leave("run", "parked")
    assert await due(worker) == [], "an answer woke its run twice"


async def test_an_answer_during_a_leg_makes_the_run_due_when_it_parks(processes: tuple[Journal, Journal]):
    """A run whose question is answered before its worker has parked it can be claimed as soon as it is parked."""
    worker, door = processes
    await worker.queue.submit(request())
    await worker.queue.claim([QUEUE])
    await begin(worker, request())
    task = await asked(worker, ask())
    task.cancel()
    door.questions.answer(answer_to(ask(), 1))
    await worker.runs.leave("run", "parked")
    assert await claimed(door) == "run"


async def test_a_parked_run_is_due_when_its_question_expires_or_somebody_wakes_it(
    journal: Journal, clock: Hands
):
    await journal.queue.submit(request())
    await journal.queue.claim([QUEUE])
    await begin(journal, request())
    await journal.runs.leave("run", "parked", due_at=NOW.timestamp() + 5)
    assert await due(journal) == []
    clock.seconds = 5
    assert await claimed(journal) == "run"
    await journal.runs.leave("run", "parked")
    assert await claimed(journal) == ""
    await journal.queue.wake("run")
    assert await claimed(journal) == "run"


async def test_a_run_whose_worker_is_gone_is_claimed_by_another(
    processes: tuple[Journal, Journal], clock: Hands
):
    """A run whose worker's lease has ended is claimed by another worker, whether or not the run had begun, and the death is counted."""
    first, second = processes
    await first.queue.submit(request())
    await first.queue.claim([QUEUE])
    assert await claimed(second) == "", "a live worker lost its run"
    clock.seconds = LEASE_SECONDS
    row = await second.queue.claim([QUEUE])
    assert row is not None
    assert (row.status, row.deaths, row.legs) == ("queued", 1, 2)
    assert (await second.runs.take("run")).deaths == 1, "resuming a claimed run forgot the deaths"
    await begin(second, request())
    clock.seconds = 2 * LEASE_SECONDS
    row = await first.queue.claim([QUEUE])
    assert row is not None
    assert (row.status, row.deaths, row.legs) == ("running", 1, 3)
    with pytest.raises(RunBusy):
        await kept(second, "run")


async def test_a_run_that_was_begun_without_workers_is_not_theirs(journal: Journal, clock: Hands):
    await journal.runs.begin(request())
    clock.seconds = LEASE_SECONDS
    assert [row.record.id for row in await journal.queue.due()] == []


async def test_claiming_one_run_that_is_not_due_gives_its_next_leg_a_new_number(journal: Journal):
    await journal.queue.submit(request("first", "s", at=1.0))
    await journal.queue.submit(request("second", "s", at=2.0))
    assert await journal.queue.claim([QUEUE], run_id="second") is None
    assert (await journal.runs.get("second")).legs == 1
    assert (await journal.runs.get("first")).legs == 0
    assert await claimed(journal, run_id="first") == "first"
    assert await claimed(journal, run_id="first") == ""
    assert (await journal.runs.get("first")).legs == 1, "a leg was counted although the run is claimed"


async def test_a_queued_run_is_cancelled_without_a_turn(processes: tuple[Journal, Journal], clock: Hands):
    """`queue.cancel` ends a queued run while a worker has another run of its session. It ends a claimed run only after the worker's lease has expired."""
    worker, door = processes
    for id, at in (("first", 1.0), ("second", 2.0)):
        await door.queue.submit(request(id, "s", at=at))
    assert await claimed(worker) == "first"
    assert not await door.queue.cancel("first", b"outcome"), "a run that a worker is about to begin was ended"
    assert not await worker.queue.cancel("first", b"outcome"), (
        "a run that a worker is about to begin was ended"
    )
    assert await door.queue.cancel("second", b"outcome")
    row = await worker.runs.get("second")
    assert (row.status, row.outcome, row.owner, row.due_at) == ("cancelled", b"outcome", "", None)
    assert not await door.queue.cancel("second", b"later")
    assert not (await door.runs.verify()).altered
    clock.seconds = 60
    assert await door.queue.cancel("first", b"outcome")
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await begin(worker, request("first", "s"))
    with pytest.raises(RunUnknown):
        await door.queue.cancel("third", b"")


async def test_a_session_finds_its_calls_in_chains_of_runs_that_are_not_recorded(
    processes: tuple[Journal, Journal],
):
    """A session's calls are found in the chain of a run that is not recorded, whichever process added them.

    The chain may also contain calls of other sessions.
    """
    first, second = processes
    for each, call_id, session in (
        (first, "1", "s"),
        (first, "2", "t"),
        (second, "3", "s"),
        (second, "4", "u"),
        (first, "5", "u"),
        (first, "6", "u"),
    ):
        await each.calls.commit(unit(call_id, session=session))
    for session, calls in (("s", ["1", "3"]), ("t", ["2"]), ("u", ["4", "5", "6"])):
        assert [each.call_id for each in await second.calls.load_session(session)] == calls
    assert not (await first.runs.verify()).altered


async def test_an_adopted_run_moves_to_another_queue(journal: Journal):
    await journal.queue.submit(request())
    await journal.queue.adopt("run", "shop:agent@2")
    assert await claimed(journal) == ""
    row = await journal.queue.claim(["shop:agent@2"])
    assert row is not None
    assert row.record.code == "1", "what was recorded has changed"


async def test_a_worker_is_told_which_of_its_runs_to_stop(processes: tuple[Journal, Journal]):
    worker, door = processes
    for id in ("one", "two"):
        await worker.queue.submit(request(id))
        await worker.queue.claim([QUEUE])
        await begin(worker, request(id))
    await door.runs.stop("two")
    assert await worker.queue.signalled() == ("two",)
    assert await door.queue.signalled() == ()
    await worker.runs.leave("two", "cancelled")
    assert await worker.queue.signalled() == ()


async def test_a_lost_run_that_was_to_be_stopped_is_stopped_by_its_next_worker(
    processes: tuple[Journal, Journal], clock: Hands
):
    first, second = processes
    await first.queue.submit(request())
    await first.queue.claim([QUEUE])
    await begin(first, request())
    await second.runs.stop("run")
    clock.seconds = LEASE_SECONDS
    assert await claimed(second) == "run"
    await second.runs.take("run")
    assert await second.queue.signalled() == ("run",)
    assert await kept(second, "run") == CANCEL


async def test_a_run_that_is_to_be_stopped_does_not_wait_for_its_time(
    processes: tuple[Journal, Journal], clock: Hands
):
    """If a run is asked to stop and then parks until tomorrow, a worker can claim it a second later."""
    worker, door = processes
    await worker.queue.submit(request())
    await worker.queue.claim([QUEUE])
    await begin(worker, request())
    await door.runs.stop("run")
    await worker.runs.leave("run", "parked", b"", due_at=NOW.timestamp() + 86_400)
    clock.seconds = 1
    assert await claimed(worker) == "run"


async def test_waiting_ends_when_another_process_submits(processes: tuple[Journal, Journal]):
    worker, door = processes
    waiting = asyncio.ensure_future(worker.queue.wait(PATIENCE))
    await asyncio.sleep(0)
    await door.queue.submit(request())
    await asyncio.wait_for(waiting, PATIENCE / 2)
    await worker.queue.wait(0)


async def test_workers_are_listed_while_they_are_alive(processes: tuple[Journal, Journal], clock: Hands):
    first, second = processes
    worker = WorkerRow(owner="", host="ada.example", queues=[QUEUE], limit=4)
    await first.queue.announce(worker, seconds=10)
    [found] = await second.queue.workers()
    assert (found.owner, found.host, found.queues, found.limit) == (first.owner, "ada.example", [QUEUE], 4)
    clock.seconds = 10
    assert await second.queue.workers() == ()
    await first.queue.announce(worker, seconds=10)
    await first.queue.announce(worker, seconds=0)
    assert await second.queue.workers() == ()


# --- calls ----------------------------------------------------------------------------------------


async def test_units_are_loaded_in_order_by_run_and_by_session(journal: Journal):
    for call, run_id, session in (("1", "a", "s"), ("2", "b", "s"), ("3", "a", "s"), ("4", "c", "t")):
        await journal.calls.commit(unit(call, run_id, session))
    assert [each.call_id for each in await journal.calls.load("a")] == ["1", "3"]
    assert [each.call_id for each in await journal.calls.load_session("s")] == ["1", "2", "3"]
    assert await journal.calls.load("nobody's") == ()


async def test_a_voided_unit_was_never_committed(journal: Journal):
    for call in "12":
        await journal.calls.commit(unit(call, files=True))
    await journal.calls.void(unit("1", files=True))
    await journal.calls.applied(unit("2", files=True))
    await journal.calls.void(unit("2", files=True))  # too late: its files were already applied
    assert [each.call_id for each in await journal.calls.load("run")] == ["2"]
    assert [each.call_id for each in await journal.calls.load_session("s")] == ["2"]
    assert await journal.calls.unapplied() == ()


async def test_units_whose_files_nobody_applies_are_found_after_a_crash(processes: tuple[Journal, Journal]):
    """A process finds other processes' units whose files were not applied, but not the units that it is applying itself."""
    first, second = processes
    await first.calls.commit(unit("plain"))
    for call in ("1", "2"):
        await first.calls.commit(unit(call, files=True))
    assert await first.calls.unapplied() == (), "units that this process is applying were listed"
    await first.calls.applied(unit("2", files=True))
    assert [each.call_id for each in await second.calls.unapplied()] == ["1"]
    await second.calls.applied(unit("1", files=True))
    assert await second.calls.unapplied() == ()


async def test_units_of_a_run_that_a_live_process_owns_are_left_to_it(processes: tuple[Journal, Journal]):
    first, second = processes
    await first.runs.begin(run())
    await first.calls.commit(unit("1", files=True))
    assert await second.calls.unapplied() == ()


async def test_later_units_are_those_after_it_that_were_not_undone(journal: Journal):
    await journal.runs.begin(run())
    for call in "1234":
        await journal.calls.commit(unit(call, files=call == "3"))
    await journal.calls.note("run", Entry("undone", "2", 1.0, b""))
    await journal.calls.void(unit("3", files=True))
    assert [each.call_id for each in await journal.calls.later(unit("1"))] == ["4"]
    assert await journal.calls.later(unit("4")) == ()


async def test_entries_are_in_order_and_one_of_the_same_key_replaces_the_first(journal: Journal):
    await journal.runs.begin(run())
    for entry in (
        Entry("verb", ".1", 1.0, b"a"),
        Entry("verb", ".2", 1.0, b"b"),
        Entry("undone", "c", 1.0, b""),
    ):
        await journal.calls.note("run", entry)
    await journal.calls.note("run", Entry("verb", ".2", 2.0, b"new"))
    entries = await journal.calls.entries("run")
    assert {(each.key, each.body) for each in entries} == {(".1", b"a"), (".2", b"new"), ("c", b"")}
    assert entries[0].key == ".1"
    assert [(id, each.key) for id, each in await journal.calls.marks("s")] == [("run", "c")]


async def test_only_a_run_that_nobody_owns_is_noted_from_outside(journal: Journal, clock: Hands):
    await journal.runs.begin(run())
    entry = Entry("undone", "c", 1.0, b"")
    with pytest.raises(RunBusy):
        await journal.calls.note("run", entry, from_outside=True)
    await journal.runs.leave("run", "done")
    await journal.calls.note("run", entry, from_outside=True)
    with pytest.raises(RunBusy):
        await journal.calls.note("run", entry)
    assert await journal.calls.entries("run") == (entry,)


# --- steps ----------------------------------------------------------------------------------------


async def test_a_step_succeeds_once(journal: Journal):
    ran: list[int] = []

    async def step() -> int:
        ran.append(1)
        if len(ran) == 1:
            raise ValueError("not yet")
        return len(ran)

    with pytest.raises(ValueError, match="not yet"):
        await journal.steps.run("key", step)
    assert await journal.steps.run("key", step) == await journal.steps.run("key", step) == 2
    assert ran == [1, 1]


async def test_an_interrupted_step_is_settled_by_the_process_that_resumes(
    processes: tuple[Journal, Journal], clock: Hands
):
    """An interrupted step is unsettled until a process that takes over the run settles it."""
    first, second = processes
    await first.runs.begin(run())
    started = asyncio.Event()

    async def hangs() -> int:
        started.set()
        await asyncio.sleep(1000)
        return 1

    async def decided() -> Any:
        return {"happened": True}

    task = asyncio.ensure_future(first.steps.run("key", hangs, run_id="run"))
    await started.wait()
    task.cancel()
    await asyncio.wait({task})
    assert await second.steps.load("run") == (("key", None),)
    clock.seconds = LEASE_SECONDS
    await second.runs.take("run")
    assert await second.steps.run("key", hangs, run_id="run", unsettled=decided) == {"happened": True}
    await second.runs.leave("run", "done")
    assert await first.steps.run("key", hangs, run_id="run") == {"happened": True}


async def test_deaths_without_progress_are_counted(processes: tuple[Journal, Journal], clock: Hands):
    """Consecutive deaths of a run's owners are counted. New progress, or an owner that leaves the run properly, restarts the count."""
    first, second = processes
    await first.runs.begin(run())

    async def taken(journal: Journal) -> int:
        clock.seconds += LEASE_SECONDS
        return (await journal.runs.take("run")).deaths

    assert [await taken(each) for each in (second, first, second)] == [1, 2, 3]
    for kind, key in (("call tried", ".1"), ("call begun", ".1~4"), ("deadline", "")):
        await second.calls.note("run", Entry(kind, key, 1.0, b""))  # type: ignore[arg-type]
    assert await taken(first) == 4, "an attempt's own records counted as progress"
    await first.calls.note("run", Entry("inner call", ".1~4.1", 1.0, b""))
    assert [await taken(second), await taken(first)] == [1, 2]
    await first.calls.note("run", Entry("inner call", ".1~5.1", 1.0, b""))
    assert await taken(second) == 3, "the same call in the next attempt counted as progress"
    await second.runs.leave("run", "parked")
    assert [await taken(first), await taken(second)] == [0, 1]


# --- questions ------------------------------------------------------------------------------------


async def test_the_first_answer_wins_and_a_repeat_is_harmless(journal: Journal):
    """The first answer wins, and repeating it is harmless, both while the asker waits and afterwards."""
    question = ask()
    task = await asked(journal, question)
    journal.questions.answer(answer_to(question, 1))
    journal.questions.answer(answer_to(question, 1))
    assert (await task).value == 1
    journal.questions.answer(answer_to(question, 1))
    for other in (answer_to(question, 2), answer_to(question, None, outcome="declined")):
        with pytest.raises(AnswerRefused, match="The first answer counts"):
            journal.questions.answer(other)
    assert (await journal.questions.ask(question)).value == 1
    assert await journal.questions.open() == ()
    [found] = await journal.questions.history("run")
    assert (found.answer, found.answered_at) == (answer_to(question, 1), NOW.timestamp())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"digest": "another"}, "digest"),
        ({"by": "mallory"}, "'mallory' may not answer it"),
        ({"question_id": "none"}, "there is no such question"),
        ({"outcome": "approved"}, "'approved' is not a valid outcome"),
        ({"value": "many"}, "match the schema"),
    ],
)
async def test_an_answer_that_is_not_right_is_refused(journal: Journal, changed: Any, problem: str):
    def check(value: Any) -> None:
        if not isinstance(value, int):
            raise ToolValidationError("give a number.")

    question = ask()
    task = await asked(journal, question, None, check)
    with pytest.raises(AnswerRefused, match=problem):
        journal.questions.answer(answer_to(question, **{"value": 1, **changed}))
    journal.questions.answer(answer_to(question, 1))
    assert (await task).value == 1


async def test_an_expired_question_takes_no_answer(journal: Journal, clock: Hands):
    """An answer that comes too late ends the question, for its asker and for everybody else."""
    question = ask(expires_at=NOW + timedelta(seconds=1000))
    task = await asked(journal, question)
    clock.seconds = 1000
    with pytest.raises(AnswerRefused, match="the question has expired"):
        journal.questions.answer(answer_to(question, 1))
    assert (await task).outcome == "timed out"
    [found] = await journal.questions.history("run")
    assert (found.answer, found.answered_at) == (await task, NOW.timestamp() + 1000)


async def parked_question(journal: Journal, **changed: Any) -> Question:
    """Ask a question that expires after 1000 seconds, in a run that is then parked."""
    question = ask(expires_at=NOW + timedelta(seconds=1000), **changed)
    await journal.runs.begin(run())
    task = await asked(journal, question)
    task.cancel()
    await asyncio.wait({task})
    await journal.runs.leave("run", "parked")
    return question


async def list_all(journal: Journal, question: Question) -> None:
    assert await journal.questions.open() == ()


async def list_of_run(journal: Journal, question: Question) -> None:
    assert await journal.questions.open("run") == ()


async def look_back(journal: Journal, question: Question) -> None:
    [found] = await journal.questions.history("run")
    assert found.answer is not None
    assert found.answer.outcome == "timed out"


async def answer_late(journal: Journal, question: Question) -> None:
    with pytest.raises(AnswerRefused, match="the question has expired"):
        journal.questions.answer(answer_to(question, 1))


async def vote_late(journal: Journal, question: Question) -> None:
    vote = Vote(question_id=question.id, digest=question.digest, by="bob", roles=(), approved=True)
    with pytest.raises(AnswerRefused, match="the question has expired"):
        await journal.votes.cast("run", vote)
    assert await journal.votes.on("run", question.id, question.digest) == ()


async def ask_again(journal: Journal, question: Question) -> None:
    await journal.runs.take("run")
    assert (await journal.questions.ask(question)).outcome == "timed out"
    await journal.runs.leave("run", "parked")


LOOKS = (list_all, list_of_run, look_back, answer_late, vote_late, ask_again)


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
async def test_a_question_that_expires_while_its_run_is_parked_ends_once_when_it_is_looked_at(
    journal: Journal, clock: Hands, look: Callable[[Journal, Question], Any]
):
    """Whoever looks first records the end, with the time of that look. Everybody else then sees the same end."""
    question = await parked_question(journal)
    clock.seconds = 999.9
    assert [each.id for each in await journal.questions.open()] == [question.id]
    clock.seconds = 1000
    await look(journal, question)
    clock.seconds = 2000
    [first] = await journal.questions.history("run")
    assert first.answer is not None
    assert (first.answer.outcome, first.answered_at) == ("timed out", NOW.timestamp() + 1000)
    for each in LOOKS:
        await each(journal, question)
    assert list(await journal.questions.history("run")) == [first]
    assert (await journal.runs.get("run")).questions == 0
    assert not (await journal.runs.verify()).altered


async def test_an_answer_in_time_stands_however_late_its_run_is_resumed(journal: Journal, clock: Hands):
    question = await parked_question(journal)
    clock.seconds = 999.9
    journal.questions.answer(answer_to(question, 3))
    clock.seconds = 5000
    journal.questions.answer(answer_to(question, 3))
    await journal.runs.take("run")
    assert (await journal.questions.ask(question)).value == 3


async def test_an_expiry_is_counted_by_the_clock_of_the_journal(journal: Journal, clock: Hands):
    """A question lasts as long as its asker meant it to, even if the asker's clock is a day slow."""
    slow = NOW - timedelta(days=1)
    task = await asked(journal, ask(asked_at=slow, expires_at=slow + timedelta(seconds=1000)))
    clock.seconds = 999
    [question] = await journal.questions.open()
    assert question.expires_at == NOW + timedelta(seconds=1000)
    journal.questions.answer(answer_to(question, 5))
    assert (await task).value == 5


async def test_the_expiry_of_a_question_makes_a_submitted_run_due(journal: Journal, clock: Hands):
    """A worker takes the run once the question has ended, and not again until something else happens."""
    await journal.queue.submit(msgspec.structs.replace(run(), app="a:b"))
    queue = run().queue.replace("@", "a:b@")
    claimed = await journal.queue.claim([queue])
    assert claimed is not None
    record = msgspec.structs.replace(run(), app="a:b")
    await journal.runs.begin(record, followed=await journal.runs.turn(record.session_id, record.principal))
    task = await asked(journal, ask(expires_at=NOW + timedelta(seconds=1000)))
    task.cancel()
    await asyncio.wait({task})
    await journal.runs.leave("run", "parked", due_at=NOW.timestamp() + 1000)
    clock.seconds = 999.9
    assert await journal.queue.due() == ()
    clock.seconds = 1000
    assert [each.record.id for each in await journal.queue.due()] == ["run"]
    await journal.questions.open("run")
    assert [each.record.id for each in await journal.queue.due()] == ["run"]
    await journal.runs.take("run")
    await journal.runs.leave("run", "parked")
    assert await journal.queue.due() == ()


async def test_a_waiting_asker_gets_the_end_that_another_process_recorded(
    processes: tuple[Journal, Journal], clock: Hands
):
    """The asker's own timer has not fired, but a different process has found that the time is over."""
    here, there = processes
    question = ask(expires_at=NOW + timedelta(seconds=1000))
    task = await asked(here, question)
    clock.seconds = 1000
    assert await there.questions.open() == ()
    async with asyncio.timeout(PATIENCE):
        assert (await task).outcome == "timed out"


async def test_an_answer_that_another_process_took_in_time_wins_over_the_timer(
    processes: tuple[Journal, Journal], clock: Hands, monkeypatch: pytest.MonkeyPatch
):
    """The answer was recorded just before the time was over, and the asker's timer fires before it has seen the answer."""
    here, there = processes
    monkeypatch.setattr(here.questions, "watch", Watch(None, lambda id: asyncio.sleep(0)))
    question = ask(expires_at=NOW + timedelta(seconds=0.05))
    task = await asked(here, question)
    there.questions.answer(answer_to(question, 4))
    clock.seconds = 1000
    async with asyncio.timeout(PATIENCE):
        assert (await task).value == 4
    [found] = await there.questions.history("run")
    assert found.answer == answer_to(question, 4)


async def test_of_an_answer_and_the_expiry_exactly_one_is_recorded(processes: tuple[Journal, Journal]):
    """Whatever two processes do at the end of a question's time, they agree on how it ended."""
    here, there = processes
    for turn in range(20):
        question = ask(f"run?{turn}", expires_at=NOW)  # its time is over at once
        early = ask(f"run.e?{turn}", expires_at=NOW + timedelta(seconds=1))
        tasks = [asyncio.ensure_future(here.questions.ask(each)) for each in (question, early)]

        def give(late: Question = question, early: Question = early) -> None:
            for each in (late, early):
                with contextlib.suppress(AnswerRefused):
                    there.questions.answer(answer_to(each, 1))

        await asyncio.sleep(0.001 * (turn % 5))
        await asyncio.to_thread(give)
        outcomes = [(await task).outcome for task in tasks[:1]]
        if not tasks[1].done():
            await asyncio.to_thread(give)
        outcomes.append((await tasks[1]).outcome)
        assert outcomes == ["timed out", "answered"]
        ends = {each.question.id: each.answer for each in await there.questions.history("run")}
        assert [ends[each.id] for each in (question, early)] == [await task for task in tasks]


async def test_a_withdrawn_question_is_over_for_everybody(journal: Journal):
    """Questions can be withdrawn by id or by prefix without affecting others, and then be asked again. Answers are not withdrawn."""
    ids = ("run.1?1", "run.1~2?1", "run.2?1", "run.10?1")
    tasks = {id: await asked(journal, ask(id)) for id in ids}
    await journal.questions.withdraw("run.2?1")
    await journal.questions.withdraw_all("run.1~")
    assert {(await tasks[id]).outcome for id in ("run.2?1", "run.1~2?1")} == {"cancelled"}
    assert [each.id for each in await journal.questions.open()] == ["run.10?1", "run.1?1"]
    with pytest.raises(AnswerRefused, match="there is no such question"):
        journal.questions.answer(answer_to(ask("run.2?1"), 1))
    again = await asked(journal, ask("run.2?1"))
    journal.questions.answer(answer_to(ask("run.2?1"), 7))
    assert (await again).value == 7
    await journal.questions.withdraw("run.2?1")
    assert len(await journal.questions.history("run")) == 3, "an answer was withdrawn"
    await journal.questions.withdraw_all("run")
    await asyncio.gather(*tasks.values())


async def test_questions_are_listed_by_run_and_by_principal_oldest_first(journal: Journal, clock: Hands):
    """The journal's clock orders them, because those of the askers may differ."""
    tasks: list[asyncio.Task[Answer]] = []
    for run_id, who, clock.seconds in (("b", "ada", 2), ("a", "bob", 1), ("c", "ada", 0)):
        tasks.append(await asked(journal, ask(f"{run_id}?1", run_id, principal=who)))
    assert [each.id for each in await journal.questions.open()] == ["c?1", "a?1", "b?1"]
    assert [each.id for each in await journal.questions.open(principal="ada")] == ["c?1", "b?1"]
    assert [each.id for each in await journal.questions.open("a")] == ["a?1"]
    await journal.questions.withdraw_all("")
    await asyncio.gather(*tasks)


async def test_the_question_of_a_parked_run_waits_for_it_and_ends_with_it(journal: Journal):
    """A parked run's unanswered question stays open until the run ends. If it is answered, the run gets the answer when it asks again."""
    await journal.runs.begin(run())
    questions = [ask("run?1"), ask("run?2")]
    for question in questions:
        task = await asked(journal, question)
        task.cancel()
        await asyncio.wait({task})
    await journal.runs.leave("run", "parked")
    assert (await journal.runs.get("run")).questions == 2
    with pytest.raises(AnswerRefused, match="not match the schema"):
        journal.questions.answer(answer_to(questions[0], "text"))
    journal.questions.answer(answer_to(questions[0], 3))
    await journal.runs.take("run")
    assert (await journal.questions.ask(questions[0])).value == 3
    await journal.runs.leave("run", "cancelled")
    assert await journal.questions.open() == ()
    assert (await journal.runs.get("run")).questions == 0


async def test_a_question_that_changed_is_asked_anew(journal: Journal):
    await journal.runs.begin(run())
    first, changed = ask(), ask(digest="another", message="And now?")
    task = await asked(journal, first)
    journal.questions.answer(answer_to(first, 1))
    await task
    task = await asked(journal, changed)
    assert [each.message for each in await journal.questions.open()] == ["And now?"]
    journal.questions.answer(answer_to(changed, 2))
    assert (await task).value == 2


async def test_an_answer_of_another_process_reaches_the_asker(processes: tuple[Journal, Journal]):
    first, second = processes
    question = ask()
    task = await asked(first, question)
    second.questions.answer(answer_to(question, 5))
    async with asyncio.timeout(PATIENCE):
        assert (await task).value == 5
    with pytest.raises(AnswerRefused, match="The first answer counts"):
        first.questions.answer(answer_to(question, 6))


# --- decisions, tickets, blobs --------------------------------------------------------------------


async def test_decisions_are_read_in_order_by_session_and_principal(journal: Journal):
    def made(id: str, session: str = "s", who: str = "ada", kind: Any = "remembered") -> Decision:
        return Decision(session_id=session, principal=who, kind=kind, id=id, at=1.0, body=id.encode())

    for each in (
        made("2"),
        made("1"),
        made("2"),
        made("2", kind="revoked"),
        made("3", "t"),
        made("4", who="bob"),
    ):
        journal.decisions.write(each)
    assert await journal.decisions.read("s", "ada") == (made("2"), made("1"), made("2", kind="revoked"))
    assert await journal.decisions.read("s", "bob") == (made("4", who="bob"),)
    assert await journal.decisions.read("t", "bob") == ()


async def test_a_ticket_is_redeemed_once(journal: Journal, clock: Hands):
    await journal.runs.begin(run())
    tickets = journal.tickets
    assert tickets.issue("run", ".1", "text") == "text"
    assert tickets.issue("run", ".1", "another") == "text", "a second ticket replaced the first"
    assert [(each.kind, each.key) for each in await journal.calls.entries("run")] == [("verb", ".1")]
    assert await tickets.claim("run", ".1", "a", False) == b""
    assert await tickets.claim("run", ".1", "a", False) == b"", "the owner of a claim could not renew it"
    with pytest.raises(TicketError, match="another process is redeeming it"):
        await tickets.claim("run", ".1", "b", False)
    await tickets.release("run", ".1", "a")
    assert await tickets.claim("run", ".1", "b", False) == b""
    clock.seconds = LEASE_SECONDS
    with pytest.raises(OutcomeUnknown):
        await tickets.claim("run", ".1", "c", False)
    assert await tickets.claim("run", ".1", "c", True) == b""
    with pytest.raises(TicketError, match="was not renewed in time"):
        await tickets.deposit("run", ".1", "b", b"late")
    await tickets.deposit("run", ".1", "c", b"result")
    assert await tickets.claim("run", ".1", "d", False) == b"result"
    assert await tickets.close("run", [".1", ".2"]) == {".1": b"result"}
    with pytest.raises(TicketError, match="the call that issued it is over"):
        await tickets.claim("run", ".1", "d", False)


async def test_a_ticket_of_no_run_or_of_one_that_is_over_is_refused(journal: Journal):
    await journal.runs.begin(run())
    with pytest.raises(RunUnknown):
        journal.tickets.issue("nobody's", ".1", "text")
    with pytest.raises(TicketError, match="is not in this journal"):
        await journal.tickets.claim("run", ".1", "a", False)
    journal.tickets.issue("run", ".1", "text")
    assert await journal.tickets.claim("run", ".1", "a", False) == b""
    assert await journal.tickets.close("run", [".1"]) == {".1": b""}, (
        "a ticket without a deposit was not closed as empty"
    )
    await journal.runs.leave("run", "done")
    with pytest.raises(TicketError, match="is over"):
        await journal.tickets.deposit("run", ".1", "a", b"late")


async def test_blobs_are_kept_once_for_as_long_as_a_run_refers_to_them(journal: Journal):
    for id in ("a", "b"):
        await journal.runs.begin(run(id, session=id))
    digest = await journal.blobs.put(b"bytes", run_id="a")
    assert digest == hashlib.sha256(b"bytes").hexdigest()
    assert (
        await journal.blobs.put(b"bytes", run_id="a")
        == await journal.blobs.put(b"bytes", run_id="b")
        == digest
    )
    empty = await journal.blobs.put(b"", run_id="a")
    assert (await journal.blobs.get(digest), await journal.blobs.get(empty)) == (b"bytes", b"")
    assert await journal.blobs.list("a") == tuple(sorted((digest, empty)))
    assert await journal.blobs.list("b") == (digest,)
    await journal.runs.forget(["a"])
    assert [await journal.blobs.has(each) for each in (digest, empty)] == [True, False]
    await journal.runs.forget(["b"])
    assert not await journal.blobs.has(digest)
    with pytest.raises(BlobNotFoundError, match=digest):
        await journal.blobs.get(digest)


async def test_blobs_are_put_only_for_a_run_that_this_process_owns(journal: Journal):
    with pytest.raises(RunUnknown):
        await journal.blobs.put(b"bytes", run_id="nobody's")
    await journal.runs.begin(run())
    await journal.runs.leave("run", "done")
    with pytest.raises(RunBusy):
        await journal.blobs.put(b"bytes", run_id="run")


# --- the journal itself ---------------------------------------------------------------------------


async def test_id_and_key_are_the_same_each_time_it_is_opened(processes: tuple[Journal, Journal]):
    first, second = processes
    assert (first.id, first.key, first.synced) == (second.id, second.key, second.synced)


async def test_two_journals_have_nothing_in_common(opening: Callable[[str], Journal]):
    first, second = opening("memory"), opening("memory")
    await first.runs.begin(run())
    assert (first.id, first.key) != (second.id, second.key)
    assert await second.runs.list() == ()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1", "schema has version 1\\. .* the first of which is 13"),
        (str(VERSION - 1), f"schema has version {VERSION - 1}\\. .* the first of which is 13"),
        (str(UPGRADABLE[-1]), f"schema has version {UPGRADABLE[-1]}, .* uses {VERSION}. .* upgrade it"),
        (str(VERSION + 1), f"schema is at least {VERSION + 1}; .* {VERSION}. Install a newer version"),
        ("99", f"schema is at least 99; .* {VERSION}. Install a newer version"),
    ],
)
def test_a_journal_of_another_version_is_refused(tmp_path: Path, version: str, words: str):
    """A journal with a different schema version is refused, with an error that names the version and says what to do."""
    path = tmp_path / "runs.db"
    SqliteJournal(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE about SET value = ? WHERE key IN ('schema', 'oldest')", (version,))
    connection.close()
    with pytest.raises(JournalError, match=words):
        SqliteJournal(path)


# --- spending -----------------------------------------------------------------------------------------


CAP = SpendCap(limits={"tokens": 100, "money": Decimal(1)})
WINDOW = CAP.window("ada", NOW.timestamp())
CAPS = {WINDOW: CAP.limits}


async def test_what_is_reserved_is_not_left_for_another_process(processes: tuple[Journal, Journal]) -> None:
    one, other = processes
    await one.runs.begin(run())  # so that others see that it is at work
    assert await one.spending.reserve("a", {"tokens": 60, "money": Decimal("0.1")}, CAPS) is None
    short = await other.spending.reserve("b", {"tokens": 41}, CAPS)
    assert short is not None
    assert (short.counted["tokens"], short.in_flight["tokens"]) == (60, 60)
    assert short.missing({"tokens": 41}, CAP.limits) == {"tokens": 1}
    assert await other.spending.reserve("b", {"tokens": 40}, CAPS) is None
    await one.spending.settle("a", {"tokens": 10, "money": Decimal("0.30000000001")}, CAPS)
    await one.spending.settle("a", {"tokens": 10, "money": Decimal("0.30000000001")}, CAPS)
    state = await other.spending.get(WINDOW)
    assert state.counted == {"tokens": 50, "money": Decimal("0.30000000001")}
    assert (await one.runs.verify()).altered == []


async def test_amounts_are_reserved_in_every_window_or_in_none(journal: Journal) -> None:
    shared = SpendCap(limits={"tokens": 30}, by="app", app="desk").window("ada", NOW.timestamp())
    both: dict[SpendWindow, Amounts] = {**CAPS, shared: {"tokens": 30}}
    assert await journal.spending.reserve("a", {"tokens": 20}, both) is None
    short = await journal.spending.reserve("b", {"tokens": 20}, both)
    assert short is not None
    assert short.window == shared
    assert {each.window: each.counted["tokens"] for each in await journal.spending.list()} == {
        WINDOW: 20,
        shared: 20,
    }
    assert await journal.spending.list(since=WINDOW.ends_at) == ()


async def test_a_raise_counts_once_and_the_warning_comes_again_after_it(journal: Journal) -> None:
    async def spend(id: str, tokens: int) -> int:
        assert await journal.spending.reserve(id, {"tokens": tokens}, CAPS) is None
        return len(await journal.spending.settle(id, {"tokens": tokens}, {WINDOW: {"tokens": 80}}))

    assert [await spend("a", 79), await spend("b", 1), await spend("c", 20)] == [0, 1, 0]
    for _ in range(2):
        state = await journal.spending.add(WINDOW, SpendRaise(id="q", by="bob", amounts={"tokens": 50}))
        assert [(each.by, each.at) for each in state.raises] == [("bob", NOW.timestamp())]
        assert state.limits(CAP.limits)["tokens"] == 150
    assert [await spend("d", 29), await spend("e", 21)] == [0, 1]
    assert await journal.spending.reserve("f", {"tokens": 1}, CAPS) is not None


@pytest.mark.parametrize(
    ("day", "zone", "hours"),
    [
        (datetime(2026, 3, 28, 23, 30, tzinfo=UTC), "Europe/Berlin", 23),
        (datetime(2026, 10, 25, 12, tzinfo=UTC), "Europe/Berlin", 25),
        (datetime(2026, 9, 6, 12, tzinfo=UTC), "America/Santiago", 23),  # its midnight does not exist
        (datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC), "UTC", 24),
    ],
)
def test_a_day_is_that_of_the_zone_however_long_it_is(day: datetime, zone: str, hours: int) -> None:
    cap = SpendCap(limits={}, zone=zone)
    window = cap.window("ada", day.timestamp())
    assert window.day == day.astimezone(ZoneInfo(zone)).date().isoformat()
    last = cap.window("ada", window.ends_at - 0.001)
    following = cap.window("ada", window.ends_at)
    assert (last.day, following.day > window.day) == (window.day, True)
    before = (day.astimezone(ZoneInfo(zone)).date() - timedelta(days=1)).isoformat()
    assert cap.window("ada", window.ends_at - hours * 3600 - 0.001).day == before
    assert cap.window("ada", window.ends_at - hours * 3600).day == window.day


async def test_altered_windows_are_reported_and_count_as_nothing_left(opening: Any, tmp_path: Path) -> None:
    journal = opening("sqlite")
    for statement, problem in (
        (
            "UPDATE spending SET body = (SELECT body FROM spending WHERE id LIKE '%bea%') WHERE id LIKE '%ada%'",
            "row",
        ),
        ("DELETE FROM spending WHERE id LIKE '%ada%'", "removed"),
        ("UPDATE reservations SET owner = ''", "a reservation"),
    ):
        for name in ("ada", "bea"):
            window = CAP.window(name, NOW.timestamp())
            await journal.spending.reserve(f"{name} {problem}", {"tokens": 1}, {window: CAP.limits})
        with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as file, file:
            before = {
                table: file.execute(f"SELECT * FROM {table}").fetchall()
                for table in ("spending", "reservations")
            }
            file.execute(statement)
        assert any(problem in each.problem for each in (await journal.runs.verify()).altered)
        with pytest.raises(JournalAltered):
            await journal.spending.settle(f"ada {problem}", {"tokens": 1}, CAPS)
        if problem != "a reservation":
            with pytest.raises(JournalAltered):
                await journal.spending.reserve("next", {"tokens": 1}, CAPS)
        with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as file, file:
            for table, rows in before.items():
                file.execute(f"DELETE FROM {table}")
                file.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


# --- the outbox -----------------------------------------------------------------------------------


async def test_the_state_of_a_receiver_is_replaced_by_whoever_knows_it(journal: Journal):
    outbox = journal.outbox
    assert await outbox.read(["fay", "gus"]) == {}
    assert await outbox.replace("fay", b"", b"1")
    assert not await outbox.replace("fay", b"", b"2")
    assert not await outbox.replace("gus", b"1", b"2")
    assert await outbox.replace("fay", b"1", b"3")
    assert await outbox.read(["fay", "gus"]) == {"fay": b"3"}


async def test_one_of_several_processes_replaces_a_state(processes: tuple[Journal, Journal]):
    before = b""
    for number in range(3):
        replaced = await asyncio.gather(
            *(
                processes[each % 2].outbox.replace("fay", before, b"%d %d" % (number, each))
                for each in range(10)
            )
        )
        assert sum(replaced) == 1
        before = (await processes[0].outbox.read(["fay"]))["fay"]
        assert before == b"%d %d" % (number, replaced.index(True))


@pytest.mark.parametrize("change", ["state = state || 'x'", "receiver = 'gus'"])
async def test_an_altered_state_is_not_used(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture):
    """A message in it would be signed and sent. At worst, a receiver is told twice."""
    with contextlib.closing(SqliteJournal(tmp_path / "runs.db", watch=None)) as journal:
        assert await journal.outbox.replace("fay", b"", b"1")
        with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as other:
            other.execute(f"UPDATE outbox SET {change}")
            other.commit()
        assert await journal.outbox.read(["fay", "gus"]) == {}
        assert "altered" in caplog.text
        assert await journal.outbox.replace("fay", b"", b"2")
        assert await journal.outbox.read(["fay"]) == {"fay": b"2"}
