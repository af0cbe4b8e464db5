"""A journal's schema: the tables that Handrail creates, and the check that a file has these and nothing else.

A trigger or a view in the file would be code that runs in Handrail's own transactions. The schema is checked when
the journal is opened, and SQLite is configured to refuse triggers and views that are added later.
"""

from __future__ import annotations

import shlex
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from handrail.errors import JournalError, JournalUpgraded
from handrail.journal.sql.connection import Connection

VERSION = 17
"""Version of the schema. A journal of an earlier one has to be upgraded; one of a later one says whether this version may write to it."""
OLDEST = 17
"""The oldest schema whose code may write to a journal of this version, beside newer code."""
UPGRADABLE = (13,)
"""The schemas of released versions, from which a journal can be upgraded."""

APPLICATION_ID = 0x48726A6C
"""The number in a file's header that marks it as a journal. It spells "Hrjl"."""
_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_ID_AT = slice(68, 72)

# A table with large values has rowids. Without them, SQLite reads in full every row that it passes on its way to another.
TABLES: Sequence[str] = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL, principal TEXT NOT NULL, status TEXT NOT NULL,
        owner TEXT NOT NULL, leased_until REAL NOT NULL, began_at REAL NOT NULL, changed_at REAL NOT NULL,
        signals INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0, progress INTEGER NOT NULL DEFAULT 0,
        queue TEXT NOT NULL DEFAULT '', host TEXT NOT NULL DEFAULT '', key TEXT NOT NULL DEFAULT '', due_at REAL,
        legs INTEGER NOT NULL DEFAULT 0,
        record BLOB NOT NULL, outcome BLOB NOT NULL, mac BLOB NOT NULL
    )""",
    "CREATE INDEX runs_by_time ON runs (began_at)",
    "CREATE INDEX runs_of_a_session ON runs (session_id, began_at)",
    "CREATE INDEX runs_of_a_principal ON runs (principal, began_at)",
    "CREATE INDEX sessions_of_a_principal ON runs (principal, session_id, began_at, changed_at)",
    # Runs that are parked until somebody answers are left out. They may be the majority.
    """CREATE INDEX runs_for_workers ON runs (coalesce(due_at, 0), began_at, id) WHERE queue != ''
        AND status IN ('queued', 'running', 'parked') AND (due_at IS NOT NULL OR status != 'parked')""",
    "CREATE UNIQUE INDEX runs_by_key ON runs (principal, key) WHERE key != ''",
    # The run that has a session's turn, or had the last one. The lease on the turn is the run's own.
    """CREATE TABLE turns (
        session_id TEXT NOT NULL, principal TEXT NOT NULL, turn TEXT NOT NULL, run_id TEXT NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (session_id, principal)
    )""",
    """CREATE TABLE workers (
        owner TEXT PRIMARY KEY, host TEXT NOT NULL, leased_until REAL NOT NULL, body BLOB NOT NULL, mac BLOB NOT NULL
    )""",
    """CREATE TABLE records (
        number INTEGER PRIMARY KEY, chain TEXT NOT NULL, link INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
        at REAL NOT NULL, session_id TEXT NOT NULL, body BLOB NOT NULL, mac BLOB NOT NULL, state TEXT NOT NULL,
        begins INTEGER NOT NULL, UNIQUE (chain, link)
    )""",
    "CREATE INDEX undone_calls ON records (chain, key) WHERE kind IN ('undone', 'told')",
    # A process marks the first call of a session that it adds to a chain. An index of every call would write one more page for each.
    "CREATE INDEX chains_of_a_session ON records (session_id) WHERE begins = 1",
    "CREATE INDEX units_to_apply ON records (chain, key) WHERE state = 'committed'",
    "CREATE TABLE chains (chain TEXT NOT NULL UNIQUE, links INTEGER NOT NULL, seal BLOB NOT NULL)",
    """CREATE TABLE questions (
        id TEXT PRIMARY KEY, question BLOB NOT NULL, answer BLOB, answered_at REAL, run_id TEXT NOT NULL,
        asked_at REAL NOT NULL, principal TEXT NOT NULL
    )""",
    "CREATE INDEX questions_of_a_run ON questions (run_id)",
    "CREATE INDEX open_questions ON questions (asked_at) WHERE answer IS NULL",
    "CREATE INDEX open_questions_to_a_principal ON questions (principal, asked_at) WHERE answer IS NULL",
    # What each receiver of notifications was told, and the message that is on its way to it.
    "CREATE TABLE outbox (receiver TEXT PRIMARY KEY, state BLOB NOT NULL, mac BLOB NOT NULL)",
    """CREATE TABLE tickets (
        run_id TEXT NOT NULL, place TEXT NOT NULL, text TEXT NOT NULL, open INTEGER NOT NULL,
        holder TEXT NOT NULL, held_until REAL NOT NULL, deposit BLOB NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (run_id, place)
    )""",
    "CREATE TABLE spending (id TEXT PRIMARY KEY, ends_at REAL NOT NULL, body BLOB NOT NULL, mac BLOB NOT NULL)",
    "CREATE INDEX spending_by_end ON spending (ends_at)",
    """CREATE TABLE reservations (
        spending TEXT NOT NULL, id TEXT NOT NULL, owner TEXT NOT NULL, body BLOB NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (spending, id)
    )""",
    "CREATE TABLE blobs (digest TEXT PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE blob_runs (run_id TEXT, digest TEXT, PRIMARY KEY (run_id, digest)) WITHOUT ROWID",
    "CREATE INDEX runs_of_a_blob ON blob_runs (digest)",
    """CREATE TABLE workspaces (
        name TEXT PRIMARY KEY, id TEXT NOT NULL, version INTEGER NOT NULL, run_id TEXT NOT NULL, owner TEXT NOT NULL,
        seal TEXT NOT NULL, mac BLOB NOT NULL
    )""",
    # A path that was removed keeps a row of the kind '', so that a copy of an earlier version can be brought up to date.
    """CREATE TABLE workspace_files (
        workspace TEXT NOT NULL, path TEXT NOT NULL, version INTEGER NOT NULL, kind TEXT NOT NULL,
        mode INTEGER NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL, mac BLOB NOT NULL,
        PRIMARY KEY (workspace, path)
    )""",
    "CREATE INDEX workspace_files_by_version ON workspace_files (workspace, version)",
    "CREATE INDEX workspace_files_of_a_blob ON workspace_files (digest)",
)

_READ = "SELECT type, name, tbl_name, sql FROM sqlite_master"

Schema = Mapping[str, tuple[str, str, str | None]]
"""The type, table and statement of each table, index, trigger and view, by name."""


def is_blank(path: str, *, check: Callable[[sqlite3.Connection, str, Schema], object] | None = None) -> bool:
    """Return whether a file is empty, so that a journal may be created in it; False for a journal or an unreadable file.

    Raises `JournalError` for any other file, such as the database of another program. Until the file is known to be a journal,
    SQLite opens it only in a mode in which it ignores the files beside it. In any other mode, SQLite would apply and delete
    those files, and create others. A database without a journal's mark has to pass `check`.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError:  # SQLite reports it
        return False
    if not header:
        return True
    if header[:16] != _MAGIC or len(header) < _HEADER_BYTES:  # SQLite would overwrite a very short file
        problem = "it can't be opened: file is not a database"
        raise JournalError(path, problem, "Pass the path of a journal or of a new file.")
    if header[_ID_AT] != APPLICATION_ID.to_bytes(4, "big"):
        _check_unmarked(path, check or _check)
    return False


def _check_unmarked(path: str, check: Callable[[sqlite3.Connection, str, Schema], object]) -> None:
    """Raise `JournalError` unless a database is a journal without an application id, such as a restored dump."""
    connection = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        distrust_schema(connection)
        check(connection, path, read_schema(connection))
    except (sqlite3.Error, UnicodeError):
        raise _not_a_journal(path) from None
    finally:
        connection.close()


def _not_a_journal(path: str) -> JournalError:
    return JournalError(
        path, "this is a database, but not a journal", "Pass the path of a journal or of a new file."
    )


def create_tables(connection: sqlite3.Connection, path: str) -> bool:
    """Create the tables in an empty database and return True. If there are tables, check them and return False.

    Raises `JournalError` for a database that is not a journal, is damaged, has another version, or has an altered schema.
    """
    found = read_schema(connection)
    if found:
        _check(connection, path, found)
        return False
    ((pages,),) = connection.execute("PRAGMA page_count")
    if pages > 1:
        raise JournalError(
            path,
            "it is damaged: its list of tables is empty",
            "Restore the file from a backup, or use a new one.",
        )
    for each in TABLES:
        connection.execute(each)
    return True


def distrust_schema(connection: sqlite3.Connection) -> None:
    """Make SQLite refuse to run triggers, views and unsafe functions that the file contains.

    The authorizer is called when a statement is compiled, not when it runs, and again after the schema changes.
    """
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.set_authorizer(_authorize)
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)


def _authorize(
    action: int, one: str | None, two: str | None, database: str | None, inside: str | None
) -> int:
    """Deny everything inside a trigger or a view, which `inside` names. A journal has neither."""
    return sqlite3.SQLITE_OK if inside is None else sqlite3.SQLITE_DENY


def read_schema(connection: sqlite3.Connection) -> Schema:
    """Return the tables, indexes, triggers and views of a database."""
    return {str(name): (type, table, sql) for type, name, table, sql in connection.execute(_READ)}


@cache
def expected_schema(statements: Sequence[str] = TABLES) -> Schema:
    """Return the tables and indexes that these statements create. By default, they are those of a journal."""
    connection = sqlite3.connect(":memory:")
    try:
        for each in statements:
            connection.execute(each)
        return read_schema(connection)
    finally:
        connection.close()


def missing_statements(found: Schema) -> list[str]:
    """Return the statements that create this version's tables and indexes which a schema lacks."""
    return [sql for name, (_, _, sql) in expected_schema().items() if sql is not None and name not in found]


def describe_difference(found: Schema, expected: Schema) -> str:
    """Return the first difference between two schemas in words, or "" if there is none."""
    if found == expected:
        return ""
    name = next(name for name in (*found, *expected) if found.get(name) != expected.get(name))
    type = (found.get(name) or expected[name])[0]
    how = "added" if name not in expected else "removed" if name not in found else "changed"
    return f"something other than Handrail has altered its schema: the {type} {name!r} was {how}"


def find_alteration(connection: sqlite3.Connection, path: str) -> JournalError | None:
    """Return the error for a schema that was altered since the journal was opened; None if it was not, or can't be read."""
    try:
        found = read_schema(connection)
        return _alteration(path, found, is_newer=find_version(connection, path, found) > VERSION)
    except JournalError as error:
        return error
    except (sqlite3.Error, UnicodeError):  # it can't be read at all, which the caller reports
        return None


def are_intact(connection: sqlite3.Connection, *tables: str) -> bool:
    """Return whether tables agree with their indexes. This reads all their rows: about 3 µs each."""
    try:
        return all(
            connection.execute(f"PRAGMA integrity_check({each})").fetchone() == ("ok",) for each in tables
        )
    except (sqlite3.Error, UnicodeError):
        return False


def find_damage(connection: sqlite3.Connection) -> list[str]:
    """Return what SQLite finds wrong with the structure of the whole file, in its own words: at most 20 problems."""
    try:
        found = [str(problem) for (problem,) in connection.execute("PRAGMA integrity_check(20)")]
    except (sqlite3.Error, UnicodeError) as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def _alteration(path: str, found: Schema, *, is_newer: bool = False) -> JournalError | None:
    """Return the error for a schema that differs from this version's, except for the tables and indexes that a newer one adds."""
    expected = expected_schema()
    if is_newer:
        added = {name for name, (type, *_) in found.items() if type in ("table", "index")} - expected.keys()
        found = {name: each for name, each in found.items() if name not in added}
    return alteration_of(path, found, expected)


def alteration_of(path: str, found: Schema, expected: Schema) -> JournalError | None:
    """Return the error for a schema that is not the expected one; None if it is."""
    problem = describe_difference(found, expected)
    if not problem:
        return None
    return JournalError(
        path,
        problem,
        "Nothing was read or written. Restore an unaltered copy, or use a new file.",
    )


def find_version(connection: sqlite3.Connection, path: str, found: Schema) -> int:
    """Return the version of a journal's schema. Raises `JournalError` for a database that is not a journal."""
    if found.get("about") != expected_schema()["about"]:  # a view with this name must not be read
        altered = _alteration(path, found)
        raise altered if altered is not None and "records" in found else _not_a_journal(path)
    row = connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
    if row is None or not str(row[0]).isdecimal():
        raise _not_a_journal(path)
    return int(row[0])


def _check(connection: sqlite3.Connection, path: str, found: Schema) -> None:
    version = find_version(connection, path, found)
    check_version(connection, path, version)
    altered = _alteration(path, found, is_newer=version > VERSION)
    if altered is not None:
        raise altered


def check_version(connection: Connection, path: str, version: int) -> None:
    """Raise `JournalError` unless this version of Handrail can use a journal whose schema has this version."""
    if version in UPGRADABLE:
        raise JournalError(
            path,
            f"its schema has version {version}, but this version of Handrail uses {VERSION}",
            f"Stop every process that uses it, and upgrade it: `handrail journal upgrade --journal {shlex.quote(path)}`. "
            "With --check, this command says what it would do.",
        )
    if version < VERSION:
        raise not_upgradable(path, version)
    check_writer(connection, path)


def not_upgradable(path: str, version: int) -> JournalError:
    """Return the error for a journal that is too old to be upgraded, or was not written by a release."""
    return JournalError(
        path,
        f"its schema has version {version}. Only those of releases can be upgraded, the first of which is {UPGRADABLE[0]}",
        "Use the version of Handrail that wrote it, or a new journal.",
    )


def check_writer(connection: Connection, path: str) -> None:
    """Raise `JournalUpgraded` if a journal no longer lets this version write to it.

    The journal names the oldest schema whose code may. So several versions can work on one journal until the last process of
    the oldest one was replaced, and a process that was forgotten stops at the next renewal of a lease.
    """
    row = connection.execute("SELECT value FROM about WHERE key = 'oldest'").fetchone()
    oldest = int(row[0]) if row is not None else 0
    if oldest > VERSION:
        raise JournalUpgraded(path, oldest, VERSION)
