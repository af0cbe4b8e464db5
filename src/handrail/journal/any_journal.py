"""Opens a journal by its name, which is the path of a file or the URL of a database."""

from __future__ import annotations

from os import PathLike, fspath

from handrail.journal.postgres.address import is_url
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.sqlite import SqliteJournal

AnyJournal = SqliteJournal | PostgresJournal
"""A journal in SQLite or in PostgreSQL."""


def open_by_name(name: str | PathLike[str], *, watches: bool = True) -> AnyJournal:
    """Open the journal in a file, or in a PostgreSQL database if the name is its URL.

    Pass `watches=False` where nothing waits for an answer, as in a command that only reads. Then the journal does not
    check regularly for answers from other processes.
    """
    if isinstance(name, str) and is_url(name):
        return PostgresJournal(name) if watches else PostgresJournal(name, watch=None)
    return SqliteJournal(fspath(name)) if watches else SqliteJournal(fspath(name), watch=None)
