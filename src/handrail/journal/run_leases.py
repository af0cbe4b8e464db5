"""Acquires run leases in a journal's database."""

from __future__ import annotations

from typing import Any

from handrail.journal.connection import Connection
from handrail.journal.database import Database
from handrail.journal.records import OVER
from handrail.journal.run_rows import StoredRun, update_run
from handrail.journal.verification import verify_session


def acquire(
    connection: Connection,
    database: Database,
    row: StoredRun,
    now: float,
    *,
    claims: bool = False,
    **changes: Any,
) -> StoredRun:
    """Take the lease of a run that no other process holds, and return its new row.

    Raises `JournalAltered` if its session was altered.

    `changes` are made only if this process did not own the run before. So `take`, which clears a request to stop
    the run, does not clear one that was made after a worker's claim. With `claims`, a new leg begins even if this process owned the run.
    """
    progress = verify_session(connection, database.chains, row.id).progress
    is_mine = row.owner == database.owner
    return update_run(
        connection,
        database.chains,
        row,
        **{
            "status": row.status if row.status in (*OVER, "queued") else "running",
            "owner": database.owner,
            "leased_until": database.leases.until(connection, now),
            "changed_at": now,
            "deaths": row.deaths if is_mine else count_deaths(row, progress),
            "progress": progress,
            "due_at": None,
            "legs": row.legs if is_mine and not claims else row.legs + 1,
            **({} if is_mine else changes),
        },
    )


def earliest(*times: float | None) -> float | None:
    """Return the earliest of these times, or None if all of them are None."""
    return min((each for each in times if each is not None), default=None)


def count_deaths(row: StoredRun, progress: int) -> int:
    """Return how many processes in a row have died while they executed this run. A process that made progress restarts the count at 1."""
    if row.status not in ("running", "queued"):
        return 0
    if not row.owner:  # it was released, which resets the count, or taken from a process that has ended
        return row.deaths
    return row.deaths + 1 if row.progress == progress else 1
