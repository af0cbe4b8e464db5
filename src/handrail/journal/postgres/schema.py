"""The schema of a journal in PostgreSQL: the same tables as in SQLite, and those for leases, sign-ins, the audit log and broadcasts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from handrail.errors import JournalError
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.schema import TABLES, VERSION

_TYPES = {
    # Text is ordered by code points, as in SQLite and in Python, whatever the locale of the database.
    r"\bTEXT\b": 'text COLLATE "C"',
    r"\bBLOB\b": "bytea",
    r"\bREAL\b": "double precision",
    r"\bINTEGER\b": "bigint",
    r"\bnumber bigint PRIMARY KEY\b": "number bigint NOT NULL",
    r"\) WITHOUT ROWID\b": ")",
}
_OWN = (
    # The owner of a run is repeated at the head of its chain, so that one statement adds a record and checks the owner.
    "ALTER TABLE chains ADD COLUMN owner text COLLATE \"C\" NOT NULL DEFAULT ''",
    # Likewise the number of the last record, which the next one must exceed.
    "ALTER TABLE chains ADD COLUMN number bigint NOT NULL",
    "ALTER TABLE chains SET (fillfactor = 60)",
    """CREATE TABLE leases (owner text COLLATE "C" PRIMARY KEY, leased_until double precision NOT NULL,
        mac bytea NOT NULL)""",
    """CREATE TABLE sign_ins (secret bytea PRIMARY KEY, id text COLLATE "C" NOT NULL, name text COLLATE "C" NOT NULL,
        ends_at double precision NOT NULL, body bytea NOT NULL, mac bytea NOT NULL)""",
    """CREATE TABLE audit (number bigint PRIMARY KEY, at double precision NOT NULL,
        who text COLLATE "C" NOT NULL, action text COLLATE "C" NOT NULL, address text COLLATE "C" NOT NULL,
        details text COLLATE "C" NOT NULL, mac bytea NOT NULL)""",
    "CREATE INDEX records_by_number ON records USING brin (number)",
    # PostgreSQL empties unlogged tables after a crash. Watchers register again, and broadcasts are not part of the record.
    """CREATE UNLOGGED TABLE watchers (id text COLLATE "C" PRIMARY KEY, session_id text COLLATE "C" NOT NULL,
        joins bigint NOT NULL, until double precision NOT NULL)""",
    """CREATE UNLOGGED TABLE broadcasts (position bigint NOT NULL, session_id text COLLATE "C" NOT NULL,
        run_id text COLLATE "C" NOT NULL, leg bigint NOT NULL, number bigint NOT NULL, at double precision NOT NULL,
        body bytea NOT NULL, mac bytea NOT NULL, PRIMARY KEY (session_id, position))""",
)
_LOCK = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('handrail'), pg_catalog.hashtext(?))"
_FOUND = """SELECT relname, relkind::text FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = ? AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')"""
_PLANTED = """SELECT tgname, 'trigger' FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
    JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = ? AND NOT tgisinternal
    UNION ALL SELECT rulename, 'rule' FROM pg_rules WHERE schemaname = ?
    UNION ALL SELECT policyname, 'policy' FROM pg_policies WHERE schemaname = ?
    UNION ALL SELECT proname, 'function' FROM pg_proc JOIN pg_namespace ON pg_namespace.oid = pronamespace WHERE nspname = ?
    UNION ALL SELECT oprname, 'operator' FROM pg_operator JOIN pg_namespace ON pg_namespace.oid = oprnamespace WHERE nspname = ?
    UNION ALL SELECT proname, 'function' FROM pg_proc JOIN pg_depend ON refclassid = 'pg_proc'::regclass AND refobjid = pg_proc.oid
    WHERE EXISTS (SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = ? AND (
        (classid = 'pg_class'::regclass AND objid = pg_class.oid)
        OR (classid = 'pg_attrdef'::regclass AND objid IN (SELECT oid FROM pg_attrdef WHERE adrelid = pg_class.oid))
        OR (classid = 'pg_constraint'::regclass AND objid IN (SELECT oid FROM pg_constraint WHERE conrelid = pg_class.oid))))"""
"""Finds everything in the schema that could run foreign code, and the functions elsewhere that its defaults, checks or indexes call."""


def statements() -> Iterator[str]:
    """Yield the statements that create the tables."""
    for each in TABLES:
        for pattern, type in _TYPES.items():
            each = re.sub(pattern, type, each)
        yield each
    yield from _OWN


def create_tables(connection: PostgresConnection, shown: str, schema: str) -> bool:
    """Create the tables in an empty schema and return True. If there are tables, check them and return False.

    Only an empty schema is locked, because several processes may open a new journal at once. Raises `JournalError` for a
    schema that is not a journal's, has a different version, lacks a table, or contains triggers or other code.
    """
    found = _find_tables(connection, shown, schema)
    if not found:
        connection.execute(_LOCK, (schema,))
        found = _find_tables(connection, shown, schema)
    if not found:
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        for each in statements():
            connection.execute(each)
        return True
    wanted = {
        match[1] for each in statements() if (match := re.match(r"CREATE (?:UNLOGGED )?TABLE (\w+)", each))
    }
    row = connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
    version = "missing" if row is None else str(row[0])
    if version != str(VERSION):
        raise JournalError(
            shown,
            f"its schema has version {version}, but this version of Handrail uses {VERSION}",
            "Use the version of Handrail that wrote it, or a new schema: add ?schema=NAME to the URL.",
        )
    for name in sorted(wanted):
        if found.get(name) != "r":
            raise _altered(shown, f"the table {name!r} was {'changed' if name in found else 'removed'}")
    return False


def _find_tables(connection: PostgresConnection, shown: str, schema: str) -> dict[str, str]:
    """Return the kind of each table and similar in a schema. Raises `JournalError` if it is not a journal's, or contains code."""
    found: dict[str, str] = dict(connection.execute(_FOUND, (schema,)).fetchall())
    if found and (found.get("about") != "r" or found.get("records") != "r"):
        raise JournalError(
            shown,
            f"the schema {schema!r} of this database is not a journal",
            "Use an empty one: add ?schema=NAME to the URL.",
        )
    # This comes before any table is used, since even reading one could run foreign code.
    for name, kind in connection.execute(_PLANTED, (schema,) * 6).fetchall():
        raise _altered(shown, f"the {kind} {name!r} was added")
    return found


def _altered(shown: str, problem: str) -> JournalError:
    return JournalError(
        shown,
        f"something other than Handrail has altered its schema: {problem}",
        "Nothing was read or written. Restore an unaltered copy, or use a new schema.",
    )
