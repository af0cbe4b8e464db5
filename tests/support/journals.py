"""Opens the journal that belongs to a path, so that the same tests can run on SQLite and on PostgreSQL.

with journals.of_kind("postgres"):
    journal = journals.open_at(tmp_path / "runs.db")
    other = journals.open_at(tmp_path / "runs.db")      the same journal, opened as a different process would
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from handrail import PostgresJournal, SqliteJournal
from handrail.errors import HandrailError
from handrail.journal.any_journal import AnyJournal
from handrail.journal.protocol import Journal
from support import postgres

KINDS = ("sqlite", "postgres") if os.environ.get("HANDRAIL_DEEP") else ("sqlite",)
"""The kinds of journals for tests that are slow on PostgreSQL: both in a deep run, otherwise only SQLite."""

_kind = "sqlite"
_opened: list[PostgresJournal] = []


def open_at(path: Path, **options: Any) -> AnyJournal:
    """Open the journal that belongs to a path, in the kind of database that `of_kind` selects (by default SQLite)."""
    if _kind == "sqlite":
        return SqliteJournal(path, **options)
    schema = f"t{hashlib.sha256(str(path).encode()).hexdigest()[:20]}"
    options.setdefault("key_file", _key_file(path))
    _opened.append(PostgresJournal(postgres.schema_url(schema), **options))
    return _opened[-1]


def _key_file(path: Path) -> Path:
    file = path.with_name(f"{path.name}-key")
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(postgres.KEY)
    return file


@contextlib.contextmanager
def of_kind(kind: str) -> Generator[None]:
    """Use one kind of database within the block. Afterwards, close the PostgreSQL journals that were opened in it."""
    global _kind
    before, _kind = _kind, kind
    try:
        yield
    finally:
        _kind = before
        while _opened:
            _opened.pop().close()


async def kept(journal: Journal, run_id: str) -> int:
    """Renew the lease of one run, and return the signals to it. Raises `HandrailError` if the renewal fails."""
    found = (await journal.runs.keep(run_id))[run_id]
    if isinstance(found, HandrailError):
        raise found
    return found
