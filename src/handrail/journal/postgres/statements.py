"""Statements for PostgreSQL, translated from the journal's SQL, and the connection that executes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import psycopg

from handrail.journal.connection import Rows

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

    def execute(self, query: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Rows:
        translated, reads = translate(query)
        cursor = self.raw.execute(translated, values, binary=True)  # pyright: ignore[reportArgumentType]  # it contains no user's text
        if not reads:
            self.total_changes += max(cursor.rowcount, 0)
        return cursor

    def close(self) -> None:
        self.raw.close()
