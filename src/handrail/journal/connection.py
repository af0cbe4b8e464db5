"""`Connection`: the journal's interface to a database, so that the same SQL serves SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
