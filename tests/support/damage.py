"""Functions that write a journal with a little of everything, read it in every way, and change what is in it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Generator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from handrail import PostgresJournal, SqliteJournal
from handrail.errors import JournalError, TicketError
from handrail.journal.any_journal import AnyJournal
from handrail.journal.records import CommitUnit, Decision, Entry, RunCopy, RunRecord, RunRow
from handrail.journal.sql.connection import Connection
from handrail.journal.sql.run_rows import find_run, update_run
from handrail.question import Answer, Question, Vote

RUNS = ("tea", "tea-2", "cake", "soup", "copy", "parked")
SESSIONS = ("s", "t", "u")
QUESTION: dict[str, Any] = {
    "kind": "approval", "name": "pay", "message": "Pay?", "payload": {}, "schema": {}, "digest": "d",
    "principal": "ada", "asked_by": (), "call_id": "c", "asked_at": datetime(2030, 1, 1, tzinfo=UTC),
}  # fmt: skip


class Reading(dict[str, Any]):
    """The outcomes of reading a journal in every way: for each way, what it returned or the `JournalError` that it raised."""

    def __repr__(self) -> str:  # the full text would be longer than Hypothesis wants to print
        return f"<reading of {len(self)}>"


def _run(id: str, session: str, at: float) -> RunRecord:
    return RunRecord(
        id=id, session_id=session, principal="ada", prompt="p" * 300, model="test:m", began_at=at
    )


def _unit(run_id: str, session: str, number: int, *, files: bool = False) -> CommitUnit:
    return CommitUnit(
        run_id=run_id,
        session_id=session,
        call_id=f"{run_id}-call-{number}",
        result=b"result %d" % number * 20,
        files=[{"root": "r"}] if files else [],
    )


def write_journal(path: Path) -> None:
    """Write a journal with six runs in three sessions: running, done, failed, parked and copied ones."""
    asyncio.run(_write(path))


async def _write(path: Path) -> None:
    journal = SqliteJournal(path, watch=None, inline=True)
    for number, (id, session) in enumerate((("tea", "s"), ("tea-2", "s"), ("cake", "t"), ("soup", "u"))):
        followed = await journal.runs.turn(session, "ada")
        await journal.runs.begin(_run(id, session, float(number)), followed=followed)
        await journal.calls.note(id, Entry("model answer", "1", 1.0, b"answer" * 50))
        await journal.blobs.put(b"bytes of " + id.encode(), run_id=id)
        for each in range(6):
            await journal.calls.commit(_unit(id, session, each))
        await journal.calls.note(id, Entry("undone", f"{id}-call-1", 1.0, b""))
        await journal.steps.run(f"{id}/step", _value, run_id=id)
        journal._database.transact_now(  # pyright: ignore[reportPrivateUsage]
            journal.questions._put(Question(id=f"{id}.1", run_id=id, **QUESTION))  # pyright: ignore[reportPrivateUsage]
        )
        journal.tickets.issue(id, ".1", f"ticket of {id}")
        journal.tickets.issue(id, ".2", f"other ticket of {id}")
        await journal.tickets.claim(id, ".1", "worker", False)
        await journal.tickets.deposit(id, ".1", "worker", b"deposit" * 10)
        decision = Decision(
            session_id=session, principal="ada", kind="remembered", id=id, at=1.0, body=b"yes"
        )
        journal.decisions.write(decision, run_id=id)
        if id != "tea":
            vote = Vote(question_id=f"{id}.1", digest="d", by="bob", roles=(), approved=True)
            await journal.votes.cast(id, vote)
            journal.questions.answer(Answer(question_id=f"{id}.1", digest="d", by="ada", value={"n": 1}))
        else:
            await journal.runs.leave("tea", "parked")
    await journal.calls.commit(_unit("soup", "u", 9, files=True))
    await journal.runs.leave("tea-2", "done", b"outcome" * 9)
    await journal.runs.take("tea")
    await journal.runs.leave("cake", "failed", b"broken" * 9)
    for id, source in (("copy", ""), ("parked", "cake#1")):
        row = RunRow(record=_run(id, "u", 9.0 + len(id)), status="parked")
        units = [_unit(id, "u", each) for each in range(3)]
        await journal.runs.add(RunCopy(row=row, units=units, steps=[("k", b"\x01")], forked_from=source))
    await journal.runs.stop("parked")
    journal.close()


async def _value() -> str:
    return "value" * 20


@contextmanager
def quiet() -> Generator[None]:
    """Disable the loggers that report damage, until the block ends."""
    logs = [logging.getLogger(name) for name in ("handrail.journal", "handrail.questions")]
    for each in logs:
        each.disabled = True
    try:
        yield
    finally:
        for each in logs:
            each.disabled = False


def read_journal(path: Path) -> Reading:
    """Read a journal in every way. Damage is represented by its `JournalError`, and a refused ticket by the reason.

    Any other error is raised.
    """
    with quiet():
        try:
            journal = SqliteJournal(path, watch=None, inline=True)
        except JournalError as error:
            return Reading(journal=error)
        try:
            return asyncio.run(_read(journal))
        finally:
            journal.close()


async def _read(journal: SqliteJournal) -> Reading:
    found = Reading(journal=journal.id)

    async def put(name: str, read: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[name] = await read()
        except JournalError as error:
            found[name] = error

    for id in RUNS:
        await put(f"{id}: row", lambda id=id: journal.runs.get(id))
        await put(f"{id}: calls", lambda id=id: journal.calls.load(id))
        await put(f"{id}: entries", lambda id=id: journal.calls.entries(id))
        await put(f"{id}: steps", lambda id=id: journal.steps.load(id))
        await put(f"{id}: questions", lambda id=id: journal.questions.history(id))
        await put(f"{id}: open questions", lambda id=id: journal.questions.open(id))
        await put(f"{id}: votes", lambda id=id: journal.votes.on(id, f"{id}.1", "d"))
        await put(f"{id}: blobs", lambda id=id: _blobs(journal, id))
        await put(f"{id}: ticket", lambda id=id: _claim(journal, id))
        await put(f"{id}: later", lambda id=id: journal.calls.later(_unit(id, "", 2)))
    for id in SESSIONS:
        await put(f"session {id}: calls", lambda id=id: journal.calls.load_session(id))
        await put(f"session {id}: marks", lambda id=id: journal.calls.marks(id))
        await put(f"session {id}: runs", lambda id=id: journal.runs.list(session_id=id))
        await put(f"session {id}: decisions", lambda id=id: journal.decisions.read(id, "ada"))
    await put("unapplied", lambda: journal.calls.unapplied())
    await put("runs", lambda: journal.runs.list())
    await put("runs of ada", lambda: journal.runs.list(principal="ada"))
    await put("sessions of ada", lambda: journal.runs.sessions("ada"))
    await put("open questions", lambda: journal.questions.open())
    await put("verification", lambda: _verify(journal))
    return found


async def _blobs(journal: SqliteJournal, run_id: str) -> list[bytes]:
    return [await journal.blobs.get(digest) for digest in await journal.blobs.list(run_id)]


async def _claim(journal: SqliteJournal, run_id: str) -> Any:
    try:
        return await journal.tickets.claim(run_id, ".1", "worker", False)
    except TicketError as error:  # the run is over, or has no ticket
        return str(error)


async def _verify(journal: SqliteJournal) -> Any:
    found = await journal.runs.verify()
    if found.altered:
        raise found.altered[0]
    return found


def set_lease(journal: AnyJournal, run_id: str, owner: str | None = None, until: float = 0.0) -> None:
    """Set the end of a run's lease and, if `owner` is given, the process that holds the lease."""
    database = journal._database  # pyright: ignore[reportPrivateUsage]

    def change(connection: Connection) -> None:
        row = find_run(connection, database.chains, run_id)
        held = row.owner if owner is None else owner
        if isinstance(journal, PostgresJournal):  # a process has one lease for all its runs
            connection.execute("DELETE FROM leases WHERE owner = ?", (held,))
            mac = database.chains.row_mac("leases", (held, float(until)))
            connection.execute("INSERT INTO leases VALUES (?, ?, ?)", (held, float(until), mac))
            until_now = 0.0
        else:
            until_now = until
        update_run(connection, database.chains, row, owner=held, leased_until=until_now)

    database.transact_now(change)


def unapply(path: Path, call_id: str | None = None) -> None:
    """Mark the recorded call with this id, or every call, as not applied, as if its process had died before the renames."""
    with closing(sqlite3.connect(path)) as connection, connection:
        query = "UPDATE records SET state = 'committed' WHERE kind = 'unit' AND state = 'applied' AND ifnull(key = ?, true)"
        assert connection.execute(query, (call_id,)).rowcount


def end_leases(journal: PostgresJournal) -> None:
    """End the leases of all processes at this database, as if they had not been renewed."""
    database = journal._database  # pyright: ignore[reportPrivateUsage]

    def end(connection: Connection) -> None:
        for (owner,) in connection.execute("SELECT owner FROM leases").fetchall():
            mac = database.chains.row_mac("leases", (owner, 1.0))
            connection.execute("UPDATE leases SET leased_until = 1, mac = ? WHERE owner = ?", (mac, owner))

    database.transact_now(end)
