"""The shape of a journal's file, and how an older one is brought to it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from handrail.errors import JournalError

SCHEMA = 4
"""Which shape the file has. A newer one is refused, never guessed at."""

_FIRST: Sequence[str] = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE steps (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE questions (id TEXT PRIMARY KEY, question BLOB NOT NULL, answer BLOB) WITHOUT ROWID",
    """CREATE TABLE units (
        number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, call_id TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('committed', 'applied', 'void')), unit BLOB NOT NULL
    )""",
    "CREATE INDEX units_of_a_run ON units (run_id)",
    "CREATE INDEX units_to_apply ON units (number) WHERE state = 'committed'",
)
_TO_SECOND: Sequence[str] = (
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL, status TEXT NOT NULL, owner TEXT NOT NULL,
        leased_until REAL NOT NULL, began_at REAL NOT NULL, changed_at REAL NOT NULL,
        record BLOB NOT NULL, outcome BLOB NOT NULL, stopping INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID""",
    "CREATE INDEX runs_by_time ON runs (began_at)",
    "CREATE INDEX runs_of_a_session ON runs (session_id, began_at)",
    """CREATE TABLE entries (
        number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
        at REAL NOT NULL, body BLOB NOT NULL, UNIQUE (run_id, kind, key)
    )""",
    "ALTER TABLE steps RENAME TO steps_before",
    """CREATE TABLE steps (key TEXT PRIMARY KEY, run_id TEXT NOT NULL DEFAULT '', value BLOB) WITHOUT ROWID""",
    "INSERT INTO steps (key, value) SELECT key, value FROM steps_before",
    "DROP TABLE steps_before",
    "CREATE INDEX steps_of_a_run ON steps (run_id) WHERE run_id != ''",
    "ALTER TABLE questions ADD COLUMN run_id TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE questions ADD COLUMN asked_at REAL NOT NULL DEFAULT 0",
    "CREATE INDEX questions_of_a_run ON questions (run_id)",
    "CREATE INDEX open_questions ON questions (asked_at) WHERE answer IS NULL",
    "ALTER TABLE units ADD COLUMN session_id TEXT NOT NULL DEFAULT ''",
    "CREATE INDEX units_of_a_session ON units (session_id)",
    "CREATE INDEX undone_calls ON entries (run_id, key) WHERE kind IN ('undone', 'told')",
    """CREATE TABLE tickets (
        run_id TEXT NOT NULL, place TEXT NOT NULL, text TEXT NOT NULL, open INTEGER NOT NULL,
        holder TEXT NOT NULL, held_until REAL NOT NULL, deposit BLOB NOT NULL, PRIMARY KEY (run_id, place)
    ) WITHOUT ROWID""",
)
_TO_THIRD: Sequence[str] = (
    "ALTER TABLE runs ADD COLUMN principal TEXT NOT NULL DEFAULT ''",
    "UPDATE runs SET principal = principal_in(record)",
    "CREATE INDEX runs_of_a_principal ON runs (principal, began_at)",
    "CREATE INDEX sessions_of_a_principal ON runs (principal, session_id, began_at, changed_at)",
    "ALTER TABLE questions ADD COLUMN principal TEXT NOT NULL DEFAULT ''",
    "UPDATE questions SET principal = principal_in(question)",
    "CREATE INDEX open_questions_to_a_principal ON questions (principal, asked_at) WHERE answer IS NULL",
)
_TO_FOURTH: Sequence[str] = (
    """CREATE TABLE decisions (
        number INTEGER PRIMARY KEY, session_id TEXT NOT NULL, principal TEXT NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('remembered', 'revoked')), id TEXT NOT NULL,
        at REAL NOT NULL, body BLOB NOT NULL, UNIQUE (session_id, principal, kind, id)
    )""",
)
MIGRATIONS: Sequence[Sequence[str]] = (_FIRST, _TO_SECOND, _TO_THIRD, _TO_FOURTH)
"""What makes a file of each shape out of one of the shape before, the first out of nothing."""


def bring_up(connection: sqlite3.Connection, path: str, new_id: str) -> None:
    """Make a new file a journal, and an older journal one of today, in one transaction."""
    connection.create_function("principal_in", 1, _principal_in)
    connection.execute("BEGIN IMMEDIATE")
    try:
        empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        found = 0 if empty else _schema_of(connection, path)
        for steps in MIGRATIONS[found:]:
            for statement in steps:
                connection.execute(statement)
        if empty:
            connection.execute("INSERT INTO about VALUES ('id', ?)", (new_id,))
        if found < SCHEMA:
            connection.execute("INSERT OR REPLACE INTO about VALUES ('schema', ?)", (str(SCHEMA),))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class _Whose(msgspec.Struct):
    principal: str = ""


def _principal_in(recorded: bytes) -> str:
    """Whose a recorded run or question is."""
    return msgspec.msgpack.decode(recorded, type=_Whose).principal


def _schema_of(connection: sqlite3.Connection, path: str) -> int:
    try:
        row = connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
    except sqlite3.OperationalError:
        row = None
    if row is None or not str(row[0]).isdecimal():
        raise JournalError(
            path, "this is a database, and no journal", "Give the path of a journal, or of a new file."
        )
    found = int(row[0])
    if not 1 <= found <= SCHEMA:
        raise JournalError(
            path,
            f"its schema is {found}, and this version of Handrail has {SCHEMA}",
            "Use the version that wrote it, or a new file.",
        )
    return found
