"""Storage: where the journals of a simulation are, and how each process opens the journal that the last one left."""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.clock import Clock
from handrail.journal.any_journal import AnyJournal
from handrail.journal.postgres.address import parse_url
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.sql.database import Moments
from handrail.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    import psycopg

JOURNAL, KEY = "journal.db", "key"
_MOST_LETTERS = 30
"""Maximum length of the prefix that the schemas of a simulation take from the URL's schema."""


class Storage(ABC):
    """The storage of a simulation's journals. Each trial has its own journal, which belongs to the trial's folder."""

    @abstractmethod
    def open(self, folder: Path, clock: Clock, moments: Moments) -> AnyJournal:
        """Open the journal of a folder as a different process would, with what earlier processes recorded in it."""

    @abstractmethod
    def read(self, folder: Path, query: str, *values: object) -> list[Any]:
        """Return the rows that a query finds in the database. It is run directly, not through a journal."""

    @abstractmethod
    def contents(self, folder: Path) -> bytes:
        """Return everything that the journal has stored."""

    @abstractmethod
    def clear(self, folder: Path) -> None:
        """Remove what earlier trials in the same folder recorded."""

    @abstractmethod
    def close(self) -> None:
        """Remove the journals that are stored outside the folders."""


def storage_at(url: str | None) -> Storage:
    """Return storage in the PostgreSQL database with this URL, or in the trials' folders if it is None."""
    return FolderStorage() if url is None else PostgresStorage(url)


class FolderStorage(Storage):
    """Journals in SQLite files, one in each folder. They are removed with their folders."""

    def open(self, folder: Path, clock: Clock, moments: Moments) -> AnyJournal:
        return SqliteJournal(
            folder / JOURNAL, clock=clock, new_id=_journal_id, watch=None, inline=True, moments=moments
        )

    def read(self, folder: Path, query: str, *values: object) -> list[Any]:
        with closing(sqlite3.connect(folder / JOURNAL)) as connection:
            return connection.execute(query, values).fetchall()

    def contents(self, folder: Path) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{JOURNAL}*")))

    def clear(self, folder: Path) -> None:
        """Do nothing: the file was removed with its folder."""

    def close(self) -> None:
        """Do nothing: the files are removed with their folders."""


class PostgresStorage(Storage):
    """Journals in a PostgreSQL database, each in its own schema, which is dropped when the simulation ends.

    No other schema is touched, not even that of the journal which the URL names.
    """

    def __init__(self, url: str) -> None:
        self._address = parse_url(url)
        self._schemas: set[str] = set()
        self._connections: dict[int, psycopg.Connection[Any]] = {}
        """The connections by the pid of the process that opened them."""

    def open(self, folder: Path, clock: Clock, moments: Moments) -> AnyJournal:
        url = self._address.conninfo
        return PostgresJournal(
            f"{url}{'&' if '?' in url else '?'}schema={self._schema(folder)}",
            key_file=folder.with_name(KEY),
            clock=clock,
            new_id=_journal_id,
            watch=None,
            inline=True,
            moments=moments,
        )

    def read(self, folder: Path, query: str, *values: object) -> list[Any]:
        from handrail.journal.postgres.statements import PostgresConnection

        connection = PostgresConnection(self._connect())
        connection.execute(f'SET search_path = "{self._schema(folder)}"')
        return connection.execute(query, values).fetchall()

    def contents(self, folder: Path) -> bytes:
        values = [
            value
            for table in self._tables(self._schema(folder))
            for row in self.read(folder, f'SELECT * FROM "{table}"')
            for value in row
        ]
        return b"\n".join(each if isinstance(each, bytes) else str(each).encode() for each in values)

    def clear(self, folder: Path) -> None:
        key = folder.with_name(KEY)
        if not key.exists():
            key.touch(mode=0o600)
            key.write_text(secrets.token_hex())
        schema = self._schema(folder)
        self._schemas.add(schema)
        tables = [f'"{schema}"."{table}"' for table in self._tables(schema) if table != "about"]
        if tables:  # truncating is much faster than creating the tables again
            self._execute(f"TRUNCATE {', '.join(tables)}")

    def close(self) -> None:
        for schema in self._schemas:
            self._execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
        self._connect().close()

    def _schema(self, folder: Path) -> str:
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        return f"{self._address.schema[:_MOST_LETTERS]}_simulation_{digest}"

    def _tables(self, schema: str) -> list[str]:
        query = "SELECT tablename::text FROM pg_tables WHERE schemaname = %s"
        return [table for (table,) in self._connect().execute(query, (schema,)).fetchall()]

    def _execute(self, statement: str) -> None:
        self._connect().execute(statement)  # pyright: ignore[reportArgumentType, reportCallIssue]  # it contains plain names only

    def _connect(self) -> psycopg.Connection[Any]:
        """Return this process's own connection. A forked process can't use the connection of its parent."""
        import psycopg

        process = os.getpid()
        if process not in self._connections:
            self._connections[process] = psycopg.connect(self._address.conninfo, autocommit=True)
        return self._connections[process]


def _journal_id() -> str:
    return "journal"
