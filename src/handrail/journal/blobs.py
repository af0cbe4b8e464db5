"""Blobs in a journal's database: bytes that are stored once and named by their digest."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence

from handrail.errors import BlobNotFoundError, JournalAltered
from handrail.journal.database import Database
from handrail.journal.lease import check_owner
from handrail.journal.verification import is_intact


class SqliteBlobs:
    """Blobs in a database. A blob is kept as long as a run refers to it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, data: bytes, /, *, run_id: str) -> str:
        database = self._database

        def put(connection: sqlite3.Connection) -> str:
            check_owner(connection, database.owner, run_id)
            return put_blob(connection, data, run_id)

        return await database.transact(put)

    async def get(self, digest: str, /) -> bytes:
        database = self._database
        for (data,) in await database.select("SELECT data FROM blobs WHERE digest = ?", digest):
            if not is_intact(digest, data):
                raise JournalAltered(database.path, "blob", digest, 1, "", "its bytes were changed")
            return data
        raise BlobNotFoundError(digest)

    async def has(self, digest: str, /) -> bool:
        return bool(await self._database.select("SELECT 1 FROM blobs WHERE digest = ?", digest))

    async def list(self, run_id: str, /) -> Sequence[str]:
        query = "SELECT digest FROM blob_runs WHERE run_id = ? ORDER BY digest"
        return tuple(digest for (digest,) in await self._database.select(query, run_id))


def put_blob(connection: sqlite3.Connection, data: bytes, run_id: str) -> str:
    """Store bytes, unless they are already stored, and add a reference from a run. Returns their digest."""
    digest = hashlib.sha256(data).hexdigest()
    connection.execute("INSERT OR IGNORE INTO blobs VALUES (?, ?)", (digest, data))
    connection.execute("INSERT OR IGNORE INTO blob_runs VALUES (?, ?)", (run_id, digest))
    return digest


def remove_unused_blobs(connection: sqlite3.Connection) -> None:
    """Delete the blobs that no run refers to."""
    connection.execute("DELETE FROM blobs WHERE digest NOT IN (SELECT digest FROM blob_runs)")
