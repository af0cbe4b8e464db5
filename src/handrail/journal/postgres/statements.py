"""Statements for PostgreSQL, translated from the journal's SQL, and the connection that executes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import psycopg

from handrail.journal.sql.connection import Rows

_HINT = re.compile(r"\s+INDEXED BY \w+|\+(?=principal\b)")
"""Index hints for SQLite, which are left out for PostgreSQL."""
_LOCKS = re.compile(r"/\* (FOR (?:SHARE|UPDATE SKIP LOCKED)) \*/")
"""Row locks. SQLite has one writer at a time, and needs none."""
_NAMED = re.compile(r"(?<!:):(\w+)")
_READS = re.compile(r"\s*SELECT\b", re.IGNORECASE)


@cache
def translate(query: str) -> tuple[str, bool]:
    """Translate a statement. Also returns whether it only reads."""
    translated = _HINT.sub("", query).replace("%", "%%")
    translated = _LOCKS.sub(r"\1", translated)
    reads = _READS.match(translated) is not None
    translated = _NAMED.sub(r"%(\1)s", translated).replace("?", "%s")
    return translated, reads


class PostgresConnection:
    """A connection that executes the journal's statements. `raw` is the driver's connection; a lost one is replaced."""

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        self.total_changes = 0
        """The number of rows that this connection has inserted, changed or deleted."""
        self.prepared: psycopg.Connection[Any] | None = None
        """The driver's connection on which the statement that adds a record is prepared; None if that is not certain."""
        self._cursor: psycopg.Cursor[Any] | None = None

    def execute(self, query: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Rows:
        translated, reads = translate(query)
        cursor = self.raw.execute(translated, values, binary=True)  # pyright: ignore[reportArgumentType]  # it contains no text from users
        if not reads:
            self.total_changes += max(cursor.rowcount, 0)
        return cursor

    def change(self, query: str, values: Sequence[Any]) -> int:
        """Execute a statement that returns no rows, and return the number of rows that it changed.

        All such statements use the same cursor, since creating one takes as long as encoding the values.
        """
        cursor = self._cursor
        if cursor is None or cursor.connection is not self.raw:
            cursor = self._cursor = self.raw.cursor()
        cursor.execute(translate(query)[0], values, binary=True)  # pyright: ignore[reportArgumentType]  # it contains no text from users
        self.total_changes += cursor.rowcount
        return cursor.rowcount

    def close(self) -> None:
        self.raw.close()
