"""Blobs in a journal's database: bytes that are stored once and named by their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from handrail.errors import BlobNotFoundError
from handrail.journal.chains import Chains, fetch, reading, run_chain
from handrail.journal.connection import Connection
from handrail.journal.database import Database
from handrail.journal.lease import check_owner
from handrail.journal.verification import BLOB, is_intact, verified


class SqliteBlobs:
    """The role `Blobs` of a journal. A blob is kept as long as a run or a workspace refers to it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, data: bytes, /, *, run_id: str) -> str:
        database = self._database

        def put(connection: Connection) -> str:
            check_owner(connection, database.owner, run_id)
            return put_blob(connection, database.chains, data, run_id, at=database.now())

        return await database.transact(put)

    async def get(self, digest: str, /) -> bytes:
        database = self._database

        def get(connection: Connection) -> bytes:
            with reading(database.chains, f"blob {digest}", 1):
                for (data,) in fetch(connection, "SELECT data FROM blobs WHERE digest = ?", digest):
                    if not is_intact(digest, data):
                        raise database.chains.altered(f"blob {digest}", 1, "its bytes were changed")
                    return data
                if not fetch(connection, "SELECT 1 FROM blob_runs WHERE digest = ?", digest):
                    raise BlobNotFoundError(digest)
            raise database.chains.altered(f"blob {digest}", 1, "its bytes are missing")

        return await database.transact(get)

    async def has(self, digest: str, /) -> bool:
        return bool(await self._database.select("SELECT 1 FROM blobs WHERE digest = ?", digest))

    async def list(self, run_id: str, /) -> Sequence[str]:
        chains = self._database.chains
        records = await self._database.transact(lambda connection: verified(connection, chains, run_id))
        return tuple(sorted(records.blobs))


def keeper(run_id: str) -> str:
    """Return the name under which `blob_runs` lists the workspace files that are kept for a run.

    The records of the calls that changed them contain their digests, so these files need no records of their own.
    """
    return f"files of {run_id}"


def put_blob(connection: Connection, chains: Chains, data: bytes, run_id: str, *, at: float) -> str:
    """Store bytes, unless they are already stored, and record that a run refers to them. Returns their digest."""
    digest = hashlib.sha256(data).hexdigest()
    connection.execute("INSERT INTO blobs VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, data))
    refer = "INSERT INTO blob_runs VALUES (?, ?) ON CONFLICT DO NOTHING"
    if connection.execute(refer, (run_id, digest)).rowcount:
        chains.append(connection, run_chain(run_id), BLOB, digest, b"", at=at)
    return digest


def remove_unused_blobs(connection: Connection) -> None:
    """Delete the blobs that no run and no workspace refers to."""
    connection.execute(
        """DELETE FROM blobs WHERE digest NOT IN (SELECT digest FROM blob_runs)
            AND digest NOT IN (SELECT digest FROM workspace_files)"""
    )
