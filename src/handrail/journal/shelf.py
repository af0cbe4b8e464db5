"""Runs as a whole in a journal's file: looked through, brought in, taken away. Each within a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from handrail.errors import AnswerRefused, RunUnknown
from handrail.journal.recorded import Kept, plain
from handrail.question import Question
from handrail.records import Asked, CommitUnit, Entry, Mark, RunCopy, RunRecord, RunRow, SessionRow

ROW = """record, status, owner, leased_until, changed_at, outcome, stopping,
    (SELECT count(*) FROM questions WHERE run_id = runs.id AND answer IS NULL)"""
_AT_ONCE = 500
"""How many ids are named in one statement."""


def row_of(connection: sqlite3.Connection, run_id: str) -> RunRow:
    """A run as it stands."""
    query = f"SELECT {ROW} FROM runs WHERE id = ?"
    row = connection.execute(query, (run_id,)).fetchone()
    if row is None:
        raise RunUnknown(run_id)
    return run_row(row)


def run_row(row: Sequence[Any]) -> RunRow:
    """What `ROW` selects, as a row."""
    record, status, owner, until, changed, outcome, stopping, waiting = row
    return RunRow(
        record=msgspec.msgpack.decode(record, type=RunRecord),
        status=status,
        owner=owner,
        leased_until=until,
        changed_at=changed,
        outcome=outcome,
        questions=waiting,
        stopping=bool(stopping),
    )


def runs(
    connection: sqlite3.Connection,
    session_id: str | None,
    principal: str | None,
    limit: int,
    before: Mark | None,
) -> tuple[RunRow, ...]:
    """Runs, the newest first; of a session all of them, the oldest first."""
    where, values = ["TRUE"], list[Any]()
    # Somebody has many more runs than a session: where both are named, the session's index finds them.
    by_principal = "principal" if session_id is None else "+principal"
    for column, value in (("session_id", session_id), (by_principal, principal)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if session_id is not None:
        order = f"began_at, id{' LIMIT 1' if limit == 1 else ''}"
    else:
        if before is not None:
            where.append("(began_at, id) < (?, ?)")
            values += before
        order = "began_at DESC, id DESC LIMIT ?"
        values.append(limit)
    query = f"SELECT {ROW} FROM runs WHERE {' AND '.join(where)} ORDER BY {order}"
    return tuple(run_row(row) for row in connection.execute(query, values))


# With a plus, as in `runs`: else each line of the page goes through all that somebody has ever run.
_SESSIONS = f"""WITH found AS (
        SELECT session_id AS session, count(*) AS number, max(changed_at) AS changed
        FROM runs WHERE principal = :principal GROUP BY session_id
        HAVING :mark IS NULL OR (changed, session) < (:mark, :id)
        ORDER BY changed DESC, session DESC LIMIT :limit
    )
    SELECT session, number, changed,
        (SELECT record FROM runs WHERE +principal = :principal AND session_id = session ORDER BY began_at, id LIMIT 1),
        (SELECT count(*) FROM questions JOIN runs ON runs.id = questions.run_id
            WHERE runs.principal = :principal AND session_id = session AND answer IS NULL),
        {ROW}
    FROM found JOIN runs ON runs.id = (
        SELECT id FROM runs WHERE +principal = :principal AND session_id = session
        ORDER BY began_at DESC, id DESC LIMIT 1
    ) ORDER BY changed DESC, session DESC"""


def sessions(
    connection: sqlite3.Connection, principal: str, limit: int, before: Mark | None
) -> tuple[SessionRow, ...]:
    """The sessions somebody has runs in, those first that were changed last."""
    at, id = before or (None, None)
    rows = connection.execute(_SESSIONS, {"principal": principal, "limit": limit, "mark": at, "id": id})
    return tuple(
        SessionRow(
            session_id=session_id,
            runs=number,
            changed_at=changed,
            first=msgspec.msgpack.decode(first, type=RunRecord),
            questions=waiting,
            newest=run_row(newest),
        )
        for session_id, number, changed, first, waiting, *newest in rows
    )


def questions(
    connection: sqlite3.Connection, run_id: str | None, principal: str | None
) -> tuple[Question, ...]:
    """What waits for an answer, oldest first."""
    where, values = ["answer IS NULL"], list[Any]()
    for column, value in (("run_id", run_id), ("principal", principal)):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    query = f"SELECT question FROM questions WHERE {' AND '.join(where)} ORDER BY asked_at, id"
    return tuple(msgspec.msgpack.decode(row[0], type=Question) for row in connection.execute(query, values))


def put_entries(connection: sqlite3.Connection, run_id: str, entries: Iterable[Entry]) -> None:
    """Add to what happened in a run; the same thing again takes the place of the first."""
    connection.executemany(
        "INSERT OR REPLACE INTO entries (run_id, kind, key, at, body) VALUES (?, ?, ?, ?, ?)",
        ((run_id, entry.kind, entry.key, entry.at, entry.body) for entry in entries),
    )


def put(connection: sqlite3.Connection, copy: RunCopy, record: bytes) -> None:
    """Bring a run in, as one. Its files are not this journal's to change."""
    row = copy.row
    run = row.record
    values = (
        run.id,
        run.session_id,
        run.principal,
        row.status,
        run.began_at,
        row.changed_at,
        record,
        row.outcome,
    )
    connection.execute(
        "INSERT INTO runs "
        "(id, session_id, principal, status, owner, leased_until, began_at, changed_at, record, outcome) "
        "VALUES (?, ?, ?, ?, '', 0, ?, ?, ?, ?)",
        values,
    )
    put_entries(connection, run.id, copy.entries)
    connection.executemany(
        "INSERT INTO units (run_id, call_id, state, unit, session_id) VALUES (?, ?, 'applied', ?, ?)",
        ((run.id, unit.call_id, msgspec.msgpack.encode(unit), unit.session_id) for unit in copy.units),
    )
    connection.executemany(
        "INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", ((key, run.id, value) for key, value in copy.steps)
    )


def remove(connection: sqlite3.Connection, run_ids: Sequence[str]) -> None:
    """Take runs away with all that is recorded of them."""
    for start in range(0, len(run_ids), _AT_ONCE):
        some = tuple(run_ids[start : start + _AT_ONCE])
        marks = ", ".join("?" * len(some))
        for table in ("entries", "units", "questions", "tickets", "steps"):
            connection.execute(f"DELETE FROM {table} WHERE run_id IN ({marks})", some)
        connection.execute(
            f"""DELETE FROM decisions WHERE session_id IN (SELECT session_id FROM runs WHERE id IN ({marks}))
            AND NOT EXISTS (SELECT 1 FROM runs WHERE session_id = decisions.session_id AND id NOT IN ({marks}))""",
            some * 2,
        )
        connection.execute(f"DELETE FROM runs WHERE id IN ({marks})", some)


def unapplied(connection: sqlite3.Connection) -> list[tuple[CommitUnit, str]]:
    """Units whose files are not known to be as they say, each with the owner of its run, if it has one."""
    query = """SELECT unit, coalesce(owner, '') FROM units LEFT JOIN runs ON runs.id = run_id
        WHERE state = 'committed' ORDER BY number"""
    rows = connection.execute(query).fetchall()
    return [(msgspec.msgpack.decode(unit, type=CommitUnit), owner) for unit, owner in rows]


def later(connection: sqlite3.Connection, unit: CommitUnit) -> tuple[CommitUnit, ...]:
    """What was committed after a unit, in all runs, and was not undone."""
    rows = connection.execute(
        """SELECT unit FROM units WHERE state != 'void' AND number >
            (SELECT max(number) FROM units WHERE run_id = ? AND call_id = ? AND state != 'void')
        AND NOT EXISTS (SELECT 1 FROM entries WHERE entries.run_id = units.run_id AND kind = 'undone' AND key = call_id)
        ORDER BY number""",
        (unit.run_id, unit.call_id),
    )
    return tuple(msgspec.msgpack.decode(row[0], type=CommitUnit) for row in rows)


def marks(connection: sqlite3.Connection, session_id: str) -> tuple[tuple[str, Entry], ...]:
    """Which calls of a session were undone, and of which the model was told."""
    rows = connection.execute(
        """SELECT entries.run_id, kind, key, at, body FROM runs JOIN entries ON entries.run_id = runs.id
        WHERE session_id = ? AND kind IN ('undone', 'told') ORDER BY number""",
        (session_id,),
    )
    return tuple((run_id, Entry(*entry)) for run_id, *entry in rows)


def asked(connection: sqlite3.Connection, run_id: str) -> tuple[Asked, ...]:
    """The questions of a run, with their answers, oldest first."""
    rows = connection.execute(
        "SELECT question, answer FROM questions WHERE run_id = ? ORDER BY asked_at, id", (run_id,)
    )
    return tuple(_asked(msgspec.msgpack.decode(question, type=Question), answer) for question, answer in rows)


def asked_as(connection: sqlite3.Connection, question_id: str) -> Asked:
    """One question, with its answer."""
    query = "SELECT question, answer FROM questions WHERE id = ?"
    row = connection.execute(query, (question_id,)).fetchone()
    if row is None:
        raise AnswerRefused(question_id, "there is no such question", "Answer one that is open.")
    return _asked(msgspec.msgpack.decode(row[0], type=Question), row[1])


def _asked(question: Question, answer: bytes | None) -> Asked:
    if answer is None:
        return Asked(question)
    return Asked(question, plain(answer), msgspec.msgpack.decode(answer, type=Kept).at)


def steps(connection: sqlite3.Connection, run_id: str) -> tuple[tuple[str, bytes | None], ...]:
    """What a run did once."""
    rows = connection.execute("SELECT key, value FROM steps WHERE run_id = ? ORDER BY key", (run_id,))
    return tuple((key, value) for key, value in rows)
