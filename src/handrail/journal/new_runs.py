"""New runs in a journal's database: how a run is recorded when it begins, is submitted or is copied."""

from __future__ import annotations

import math

import msgspec

from handrail.errors import RunError
from handrail.journal.chains import Chains, run_chain
from handrail.journal.connection import Connection
from handrail.journal.database import Database, encode
from handrail.journal.records import RunRecord, RunStatus, SessionTurn
from handrail.journal.run_rows import StoredRun, find_run, insert_run, update_run
from handrail.journal.sessions import RUN, add_to_session
from handrail.journal.turns import begin_turn
from handrail.journal.verification import BEGUN, OUTCOME, end_of


def begin_run(
    connection: Connection, database: Database, run: RunRecord, followed: SessionTurn | None, now: float
) -> SessionTurn:
    """Record a new run, or begin a queued one that this process has taken, with its lease and its session's turn."""
    queued = _queued(connection, database, run.id)
    if queued is None:
        check_new(connection, run.id)
    turn = begin_turn(connection, database, (run.session_id, run.principal), run.id, followed)
    query = "SELECT max(began_at) FROM runs WHERE session_id = ? AND status != 'queued'"
    placed = _after(run, connection.execute(query, (run.session_id,)).fetchone()[0])
    lease = database.owner, database.leases.until(connection, now)
    if queued is None:
        insert_new(connection, database.chains, placed, "running", now, lease=lease)
    else:
        _begin_queued(connection, database.chains, queued, placed, lease, now)
    return turn


def check_new(connection: Connection, run_id: str) -> None:
    """Raise `RunError` if there is already a run with this id."""
    if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone():
        raise RunError(
            run_id,
            "the journal already has a run with this id",
            "Resume that run, or give the new run another id.",
        )


def insert_new(
    connection: Connection,
    chains: Chains,
    run: RunRecord,
    status: RunStatus,
    changed_at: float,
    *,
    lease: tuple[str, float] = ("", 0.0),
    outcome: bytes = b"",
    queue: tuple[str, str, str, float | None] = ("", "", "", None),
) -> None:
    """Add a new run. `queue` is the name of its queue, its host, its key and when it is due."""
    record = encode(run, f"run {run.id!r} began with")
    ids = run.id, run.session_id, run.principal
    legs = 1 if lease[0] else 0
    row = StoredRun(*ids, status, *lease, run.began_at, changed_at, 0, 0, 0, *queue, legs, record, outcome)
    insert_run(connection, chains, row)
    chain = run_chain(run.id)
    chains.append(connection, chain, RUN, run.id, record, at=run.began_at)
    chains.fence(connection, run.id, row.owner)
    add_to_session(connection, chains, run.session_id, RUN, run.id, chain, at=run.began_at)
    end, body = end_of(status, outcome)
    if end or body:
        chains.append(connection, chain, OUTCOME, end, body, at=changed_at)


def _queued(connection: Connection, database: Database, run_id: str) -> StoredRun | None:
    """Return the row of a queued run that this process has taken, or None if there is no such run."""
    query = "SELECT 1 FROM runs WHERE id = ? AND status = 'queued' AND owner = ?"
    if connection.execute(query, (run_id, database.owner)).fetchone() is None:
        return None
    return find_run(connection, database.chains, run_id)


def _begin_queued(
    connection: Connection,
    chains: Chains,
    queued: StoredRun,
    run: RunRecord,
    lease: tuple[str, float],
    now: float,
) -> None:
    """Begin a submitted run: replace the record in its row, and set its status to `running`.

    The record with which it was submitted stays in the run's chain.
    """
    run = msgspec.structs.replace(run, request=queued.decoded.request)
    record = encode(run, f"run {run.id!r} began with")
    chains.append(connection, run_chain(run.id), BEGUN, run.id, record, at=run.began_at)
    changes = {"status": "running", "owner": lease[0], "leased_until": lease[1], "changed_at": now}
    update_run(connection, chains, queued, record=record, began_at=run.began_at, **changes)


def _after(run: RunRecord, last: float | None) -> RunRecord:
    """Return the run with a start time after `last`, the start of its session's last run, even if the clock was set back or stands still."""
    if last is None or run.began_at > last:
        return run
    return msgspec.structs.replace(run, began_at=math.nextafter(last, math.inf))
