"""`Connection`: the interface to a database, so that the same SQL serves SQLite and PostgreSQL, and how damaged rows are read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Rows(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """The number of rows that the statement changed. It has no meaning for a statement that only reads."""
        ...

    def fetchone(self) -> Any:
        """Return the next row, or None if there are no more."""
        ...

    def fetchall(self) -> list[Any]:
        """Return all remaining rows."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """An open connection to a journal's database.

    Statements are written for SQLite. `handrail.journal.postgres` translates the few words that PostgreSQL spells
    differently.
    """

    @property
    def total_changes(self) -> int:
        """The number of rows that this connection has inserted, changed or deleted."""
        ...

    def execute(self, query: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Rows:
        """Execute a statement with these values for its placeholders."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


_AT_ONCE = 200
"""Maximum number of keys or rows that one statement lists."""


def chunks(values: Iterable[T]) -> Iterator[tuple[T, ...]]:
    """Yield the values in groups that are small enough for one statement."""
    left = iter(values)
    while some := tuple(islice(left, _AT_ONCE)):
        yield some


def marks(values: Sequence[Any]) -> str:
    """Return a placeholder for each of these values, separated by commas."""
    return ", ".join("?" * len(values))


_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG)


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error means that the file is damaged, and not that it is busy or that the disk failed."""
    code = getattr(error, "sqlite_errorcode", None)  # missing if Python could not convert a value
    return (code is None and "decode" in str(error)) or (code is not None and code & 0xFF in _CORRUPT)


def decode_text(found: bytes) -> str:
    """Decode a text column, even if it is not valid UTF-8, so that an error can show it."""
    return found.decode(errors="surrogateescape")


def fetch(connection: Connection, query: str, *values: object, **named: object) -> list[Any]:
    """Return the rows that a query finds, including those with invalid text, so that an error can name them.

    The query's placeholders are either `?` or names, as in `:now`.
    """
    given = named or values
    try:
        return connection.execute(query, given).fetchall()
    except sqlite3.OperationalError:
        with texts_decoded(connection):
            return connection.execute(query, given).fetchall()


@contextlib.contextmanager
def texts_decoded(connection: Connection) -> Generator[None]:
    """Read text that is not UTF-8 without an error while the block runs. In PostgreSQL, all text is valid."""
    if not isinstance(connection, sqlite3.Connection):
        yield
        return
    before, connection.text_factory = connection.text_factory, decode_text
    try:
        yield
    finally:
        connection.text_factory = before


def compact(connection: sqlite3.Connection) -> bool:
    """Rewrite a file so that it has no bytes of deleted rows, and empty its log. Returns False if a reader kept the log from that."""
    connection.execute("VACUUM")
    (is_busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy
