"""Turns of sessions in a journal's database: one run at a time works on a recorded session.

A session's row names its current turn and the run that has it, or had it last. There is no separate lease: a run has its
turn while its owner holds the run's lease. So a run that ends, parks or is left gives its turn up in the same statement, and
the turn of a process that has ended is free.

Each turn has a new id. A session in memory remembers the turn that it has followed the record to, and a run begins on it only
if there was no other turn since. A run that takes the turn of a process whose lease has ended takes that process's run from
it in the same transaction, so the process can't commit to the session any more, although its commits check only the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from handrail.errors import JournalAltered, SessionBusy, SessionOutdated
from handrail.ids import random_id
from handrail.journal.chains import Chains, fetch, run_chain
from handrail.journal.connection import Connection
from handrail.journal.database import Database
from handrail.journal.records import SessionTurn
from handrail.journal.run_leases import count_deaths
from handrail.journal.run_rows import find_run, update_run
from handrail.journal.verification import verified

_FIND = """SELECT turns.session_id, turns.principal, turns.turn, turns.run_id, turns.mac, coalesce(owner, ''),
        coalesce(leased_until, 0)
    FROM turns LEFT JOIN runs ON runs.id = turns.run_id WHERE turns.session_id = ? AND turns.principal = ?"""
_SET = """INSERT INTO turns VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (session_id, principal) DO UPDATE SET turn = excluded.turn, run_id = excluded.run_id, mac = excluded.mac"""
_SAME = "turns.session_id = runs.session_id AND turns.principal = runs.principal"
_MISSING = f"""SELECT DISTINCT session_id FROM runs WHERE status IN ('running', 'parked', 'done')
    AND NOT EXISTS (SELECT 1 FROM turns WHERE {_SAME})"""
_FORGET = f"DELETE FROM turns WHERE session_id = ? AND NOT EXISTS (SELECT 1 FROM runs WHERE {_SAME})"

SessionKey = tuple[str, str]
"""The id of a session, and its principal. Sessions of different principals have nothing in common, even if they have the same id."""


class _Row(NamedTuple):
    """The row of a session, with the owner and the lease of the run that it names."""

    session: SessionKey
    turn: str
    run_id: str
    owner: str
    leased_until: float


def begin_turn(
    connection: Connection, database: Database, session: SessionKey, run_id: str, followed: SessionTurn | None
) -> SessionTurn:
    """Give a session's next turn to a new run, and return it. A queued run has its turn since it was claimed, and keeps it.

    Raises `SessionBusy` while another run has the turn, and `SessionOutdated` if the session was not followed to its last turn.
    """
    row = _find(connection, database.chains, session)
    if row is None:
        return _set(connection, database.chains, session, random_id(), run_id)
    is_claimed = row.run_id == run_id and row.owner == database.owner
    if not is_claimed:
        _check_free(connection, database, row)
    if followed is None or followed.id != row.turn:
        raise SessionOutdated(session[0])
    if is_claimed:
        return SessionTurn(row.turn)
    if followed.links is not None and followed.links != _links(connection, row.run_id):
        raise SessionOutdated(session[0])
    _dispossess(connection, database, row)
    return _set(connection, database.chains, session, random_id(), run_id)


def take_turn(
    connection: Connection, database: Database, session: SessionKey, run_id: str, *, is_new: bool = True
) -> None:
    """Give a session's turn to a run that is taken. Raises `SessionBusy` while another run has it.

    Without `is_new`, it is still the same turn, because the run changes nothing that sessions in memory do not look up.
    """
    row = _find(connection, database.chains, session)
    if row is not None and row.run_id != run_id:
        _check_free(connection, database, row)
        _dispossess(connection, database, row)
    turn = random_id() if is_new or row is None else row.turn
    _set(connection, database.chains, session, turn, run_id)


def read_turn(connection: Connection, database: Database, session: SessionKey) -> SessionTurn | None:
    """Return a session's current or last turn; None if it has had none.

    If a run has the turn, or its process has not given it up, the turn is named with the length of that run's record. So it is
    noticed if the run adds to the record.
    """
    row = _find(connection, database.chains, session)
    if row is None:
        return None
    return SessionTurn(row.turn, _links(connection, row.run_id) if row.owner else None)


def add_turn(connection: Connection, chains: Chains, session: SessionKey) -> None:
    """Note that a session was changed by a copy of a run, which no process has."""
    _set(connection, chains, session, random_id(), "")


def forget_turns(connection: Connection, session_ids: Iterable[str]) -> None:
    """Delete the rows of sessions with these ids that have no runs any more."""
    for session_id in session_ids:
        connection.execute(_FORGET, (session_id,))


def turn_alterations(connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
    """Yield an error for each session whose row was changed or removed."""
    for session in fetch(connection, "SELECT session_id, principal FROM turns"):
        try:
            _find(connection, chains, session)
        except JournalAltered as altered:
            yield altered
    for (session_id,) in fetch(connection, _MISSING):
        yield _altered(chains, session_id, "removed")


def _find(connection: Connection, chains: Chains, session: SessionKey) -> _Row | None:
    for id, principal, turn, run_id, mac, owner, leased_until in fetch(connection, _FIND, *session):
        if not chains.is_row("turns", (id, principal, turn, run_id), mac):
            raise _altered(chains, id, "changed")
        return _Row((id, principal), turn, run_id, owner, leased_until)
    return None


def _altered(chains: Chains, session_id: str, how: str) -> JournalAltered:
    return chains.altered(f"session {session_id}", 1, f"its row in the table of turns was {how}")


def _set(connection: Connection, chains: Chains, session: SessionKey, turn: str, run_id: str) -> SessionTurn:
    """Write a session's row. In PostgreSQL, two transactions that write the same row conflict, and one is repeated."""
    values = *session, turn, run_id
    connection.execute(_SET, (*values, chains.row_mac("turns", values)))
    return SessionTurn(turn)


def _check_free(connection: Connection, database: Database, row: _Row) -> None:
    """Raise `SessionBusy` if a process holds the lease of the run that has the turn."""
    if not database.leases.is_free(connection, row.owner, row.leased_until, database.now()):
        raise SessionBusy(row.session[0], row.run_id, row.owner)


def _dispossess(connection: Connection, database: Database, row: _Row) -> None:
    """Take the run that has the turn from its process, whose lease has ended. The run can be resumed, as after a crash."""
    if row.owner:
        run = find_run(connection, database.chains, row.run_id)
        progress = verified(connection, database.chains, run.id).progress
        lost = {"owner": "", "leased_until": 0.0, "progress": progress, "deaths": count_deaths(run, progress)}
        update_run(connection, database.chains, run, **lost)


def _links(connection: Connection, run_id: str) -> int:
    query = "SELECT links FROM chains WHERE chain = ?"
    found = connection.execute(query, (run_chain(run_id),)).fetchone()
    return 0 if found is None else found[0]
