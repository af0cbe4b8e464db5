"""Upgrades of a journal in PostgreSQL."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import psycopg

from handrail.errors import JournalError
from handrail.journal.digest import shared_key
from handrail.journal.postgres.address import Address
from handrail.journal.postgres.chains import PostgresChains
from handrail.journal.postgres.database import (
    LOCK,
    LOCK_SECONDS,
    NOW,
    altered,
    find_tables,
    find_version,
    refusal,
    statements,
)
from handrail.journal.postgres.pooler import check_pooler
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.sql.upgrade import IN_USE, Step, Subject, Upgrade, carry_out, examine, next_step

_LIVE = """SELECT owner FROM leases WHERE leased_until > extract(epoch FROM clock_timestamp())
    UNION SELECT owner FROM workers WHERE leased_until > extract(epoch FROM clock_timestamp())"""
_CATALOG = """SELECT 'column ' || relname || '.' || attname || ' ' || format_type(atttypid, atttypmod)
        || coalesce(' ' || collname, '') || CASE WHEN attnotnull THEN ' not null' ELSE '' END
        || coalesce(' default ' || pg_get_expr(adbin, adrelid), '') AS line
    FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace JOIN pg_attribute ON attrelid = pg_class.oid
        LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
        LEFT JOIN pg_collation ON pg_collation.oid = attcollation AND collname != 'default'
    WHERE nspname = ? AND relkind IN ('r', 'p') AND attnum > 0 AND NOT attisdropped
    UNION ALL SELECT 'index ' || replace(indexdef, ' ON ' || schemaname || '.', ' ON ') FROM pg_indexes WHERE schemaname = ?
    UNION ALL SELECT 'table ' || relname || ' ' || relpersistence::text || coalesce(' ' || array_to_string(reloptions, ' '), '')
    FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = ? AND relkind IN ('r', 'p')
    UNION ALL SELECT 'constraint ' || relname || ' ' || pg_get_constraintdef(pg_constraint.oid)
    FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = ? AND contype IN ('c', 'f', 'p', 'u', 'x')"""
_CREATES = re.compile(r"(CREATE|ALTER) (?:UNLOGGED |UNIQUE )?(?:TABLE|INDEX) (\w+)")


def upgrade_database(address: Address, check: bool) -> Upgrade:
    """Carry out the next step of a journal's upgrade. Does nothing if it needs none."""

    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(address.conninfo, autocommit=True, application_name="handrail upgrade")

    try:
        with connect() as raw:
            check_pooler(address.shown, raw, connect)
            raw.execute(f'SET search_path = "{address.schema}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
            return _upgrade(PostgresConnection(raw), address, check)
    except psycopg.Error as error:
        raise refusal(address, "it can't be upgraded", error) from None


def _upgrade(connection: PostgresConnection, address: Address, check: bool) -> Upgrade:
    raw, shown = connection.raw, address.shown
    tables = find_tables(connection, shown, address.schema)
    if not tables:
        raise JournalError(shown, "there is no journal in this schema", "Name the URL of a journal.")
    step = next_step(shown, find_version(connection, shown))
    is_alone = step is not None and step.is_offline and not check
    # Alone, it has to see what the last process wrote before it got the locks. Otherwise, it verifies one state of the database.
    raw.execute(f"BEGIN ISOLATION LEVEL {'READ COMMITTED' if is_alone else 'REPEATABLE READ'}")  # pyright: ignore[reportArgumentType, reportCallIssue]  # one of two texts
    if not check:
        raw.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")  # pyright: ignore[reportArgumentType, reportCallIssue]  # a number
        connection.execute(LOCK, (address.schema,))
    if is_alone:
        connection.execute(f"LOCK TABLE {', '.join(sorted(tables))} IN ACCESS EXCLUSIVE MODE")
        for (owner,) in connection.execute(_LIVE).fetchall():
            raise JournalError(shown, f"the process {owner} uses it", IN_USE)
    subject, step = _open(connection, address)
    outcome = examine(subject, step)
    if step is not None and not check:
        carry_out(subject, step)
        raw.execute("COMMIT")
    return outcome


def _open(connection: PostgresConnection, address: Address) -> tuple[Subject, Step | None]:
    """Return a journal and its next step, in the open transaction. Raises `JournalError` if its schema was altered."""
    shown, schema = address.shown, address.schema
    find_tables(connection, shown, schema)
    version = find_version(connection, shown)
    step = next_step(shown, version)
    if step is not None:
        released = files("handrail.journal.postgres").joinpath(f"schema_{version}.txt").read_text()
        for line in sorted({*released.splitlines()} ^ {*read_catalog(connection, schema)}):
            raise altered(shown, f"the {line} is not as it was released")
    ((id,),) = connection.execute("SELECT value FROM about WHERE key = 'id'").fetchall()
    ((now,),) = connection.execute(NOW).fetchall()
    key = shared_key(shown, None)
    chains = PostgresChains(id, shown, key, "handrail", lambda: now)
    return Subject(connection, shown, id, key, version, chains, lambda: _create(connection, schema)), step


def read_catalog(connection: PostgresConnection, schema: str) -> list[str]:
    """Return a line for each table, column, index and constraint of a schema, in order."""
    return sorted(line for (line,) in connection.execute(_CATALOG, (schema,) * 4).fetchall())


def _create(connection: PostgresConnection, schema: str) -> None:
    """Create this version's tables and indexes that a journal lacks."""
    query = "SELECT relname::text FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = ?"
    present = {name for (name,) in connection.execute(query, (schema,)).fetchall()}
    for each in statements():
        match = _CREATES.match(each)
        assert match is not None
        if match[2] not in present:
            connection.execute(each)
