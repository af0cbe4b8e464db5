"""Workspaces in a journal's database: which files each has, and which run has it. And blobs: bytes that are stored once and named by their digest.

The rows of a workspace's files are replaced when they change. Each has a MAC, and the workspace's own row has the sum of
these MACs. So reading all rows shows whether something other than Handrail has changed, added or removed one.

Each commit also adds this sum to the workspace's chain, whose newest record must match the workspace's row. So rows that were
set back to an earlier version together are noticed whenever the workspace is used.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from handrail.errors import (
    BlobNotFoundError,
    JournalAltered,
    UndoRefused,
    WorkspaceBusy,
    WorkspaceTakenError,
)
from handrail.ids import random_id
from handrail.journal.records import (
    CommitUnit,
    Entry,
    WorkspaceChange,
    WorkspaceDelta,
    WorkspaceFile,
    WorkspaceLine,
    WorkspaceRow,
)
from handrail.journal.sql.chains import Chains, alteration, reading, run_chain, workspace_chain
from handrail.journal.sql.connection import Connection, chunks, fetch, marks
from handrail.journal.sql.database import Database, Role, transaction
from handrail.journal.sql.leases import check_not_taken, check_owner
from handrail.journal.sql.verification import BLOB, is_intact, verified


class SqlBlobs(Role):
    """The role `Blobs` of a journal. A blob is kept as long as a run or a workspace refers to it."""

    @transaction
    def put(self, connection: Connection, data: bytes, /, *, run_id: str) -> str:
        database = self._database
        check_owner(connection, database.owner, run_id)
        return put_blob(connection, database.chains, data, run_id, at=database.now())

    @transaction
    def get(self, connection: Connection, digest: str, /) -> bytes:
        database = self._database
        with reading(database.chains, f"blob {digest}", 1):
            for (data,) in fetch(connection, "SELECT data FROM blobs WHERE digest = ?", digest):
                if not is_intact(digest, data):
                    raise database.chains.altered(f"blob {digest}", 1, "its bytes were changed")
                return data
            if not fetch(connection, "SELECT 1 FROM blob_runs WHERE digest = ?", digest):
                raise BlobNotFoundError(digest)
        raise database.chains.altered(f"blob {digest}", 1, "its bytes are missing")

    async def has(self, digest: str, /) -> bool:
        return bool(await self._database.select("SELECT 1 FROM blobs WHERE digest = ?", digest))

    @transaction
    def list(self, connection: Connection, run_id: str, /) -> Sequence[str]:
        return tuple(sorted(verified(connection, self._chains, run_id).blobs))


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


def remove_unused_blobs(connection: Connection, digests: Iterable[str]) -> None:
    """Delete those of these blobs that no run and no workspace refers to any more."""
    for some in chunks(digests):
        connection.execute(
            f"""DELETE FROM blobs WHERE digest IN ({marks(some)})
                AND NOT EXISTS (SELECT 1 FROM blob_runs WHERE blob_runs.digest = blobs.digest)
                AND NOT EXISTS (SELECT 1 FROM workspace_files WHERE workspace_files.digest = blobs.digest)""",
            some,
        )


def erase_workspaces(
    connection: Connection, chains: Chains, names: Iterable[str], run_ids: Collection[str]
) -> None:
    """Delete workspaces with their files. The others no longer name one of these runs as the last that had them."""
    for name in names:
        query = "DELETE FROM workspace_files WHERE workspace = ? RETURNING digest"
        digests = dict.fromkeys(digest for (digest,) in connection.execute(query, (name,)).fetchall())
        connection.execute("DELETE FROM workspaces WHERE name = ?", (name,))
        chains.remove(connection, workspace_chain(name))
        remove_unused_blobs(connection, digests)
    for name, run_id in fetch(connection, "SELECT name, run_id FROM workspaces WHERE run_id != ''"):
        row = _find(connection, chains, name) if run_id in run_ids else None
        if row is not None:
            _replace(connection, chains, row, run_id="", owner="")


def workspaces_of(
    connection: Connection, chains: Chains, principal: str, users: Mapping[str, Collection[str]]
) -> tuple[list[str], list[str]]:
    """Return the workspaces that only this person has used, and those that others may have used too.

    `users` has, by workspace, the principals of the runs in it. Each version names who made it by a keyed digest, which also tells
    of runs that were forgotten. A version of an earlier release does not, so its workspace counts as used by others too.
    """
    mark = chains.mark(principal)
    found: tuple[list[str], list[str]] = [], []
    for (name,) in fetch(connection, "SELECT name FROM workspaces ORDER BY name"):
        query = "SELECT DISTINCT key FROM records WHERE chain = ?"
        makers = {key for (key,) in fetch(connection, query, workspace_chain(name))}
        principals = set(users.get(name, ()))
        if mark in makers or principal in principals:
            found[not (makers <= {mark} and principals <= {principal})].append(name)
    return found


_HEAD = """SELECT name, id, version, run_id, owner, seal, mac,
        (SELECT links FROM chains WHERE chain = :chain), (SELECT max(link) FROM records WHERE chain = :chain),
        (SELECT body FROM records WHERE chain = :chain ORDER BY link DESC LIMIT 1)
    FROM workspaces WHERE name = :name"""
_HOLDER = "SELECT owner, status, queue, due_at FROM runs WHERE id = ?"
_ROWS = "SELECT name, id, version, run_id, owner, seal, mac FROM workspaces"
_NAMES = """SELECT name FROM workspaces UNION SELECT workspace FROM workspace_files
    UNION SELECT substr(chain, 11) FROM chains WHERE chain LIKE 'workspace %'"""
_FILES = (
    "SELECT workspace, path, version, kind, mode, digest, size, mac FROM workspace_files WHERE workspace = ?"
)
_REPLACE = """ ON CONFLICT (workspace, path) DO UPDATE SET version = excluded.version, kind = excluded.kind,
    mode = excluded.mode, digest = excluded.digest, size = excluded.size, mac = excluded.mac"""
_MODULUS = 1 << 256
_VERSION = "version"
"""The kind of the records in a workspace's chain: one for each commit and undo."""


class SqlWorkspaces(Role):
    """The role `Workspaces` of a journal."""

    @transaction
    def acquire(self, connection: Connection, name: str, run_id: str, /) -> WorkspaceRow:
        database = self._database
        check_not_taken(connection, database.owner, run_id)
        row = _find(connection, database.chains, name)
        if row is None:
            row = WorkspaceRow(name=name, id=random_id(), run_id=run_id, owner=database.owner)
            values = _head_values(row)
            mac = database.chains.row_mac("workspaces", values)
            connection.execute("INSERT INTO workspaces VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, mac))
        elif row.run_id != run_id:
            _check_free(connection, database, row)
        database.leases.until(connection, database.now())
        return _replace(connection, database.chains, row, run_id=run_id, owner=database.owner)

    @transaction
    def release(self, connection: Connection, name: str, run_id: str, /) -> None:
        database = self._database
        row = _find(connection, database.chains, name)
        if row is not None and (row.run_id, row.owner) == (run_id, database.owner):
            is_kept = _is_kept(connection, database, msgspec.structs.replace(row, owner=""))
            left_to = run_id if is_kept else ""
            _replace(connection, database.chains, row, run_id=left_to, owner="")

    @transaction
    def get(self, connection: Connection, name: str, /) -> WorkspaceRow | None:
        return _find(connection, self._chains, name)

    @transaction
    def list(self, connection: Connection) -> Sequence[WorkspaceLine]:
        database = self._database
        names = [name for (name,) in fetch(connection, _NAMES)]
        return [_line(connection, database, name) for name in sorted(names, key=str)]

    @transaction
    def holders(self, connection: Connection) -> Mapping[str, str]:
        database = self._database
        query = "SELECT name FROM workspaces WHERE run_id != ''"
        found: dict[str, str] = {}
        for (name,) in fetch(connection, query):
            with contextlib.suppress(JournalAltered):  # `verify` reports it
                row = _find(connection, database.chains, name)
                if row is not None and _is_kept(connection, database, row):
                    found[row.name] = row.run_id
        return found

    @transaction
    def files(
        self, connection: Connection, name: str, /, *, since: int = 0
    ) -> Mapping[str, WorkspaceFile | None]:
        return read_files(connection, self._chains, name, since)

    @transaction
    def has(self, connection: Connection, digests: Collection[str], /, *, run_id: str) -> Collection[str]:
        database = self._database
        check_not_taken(connection, database.owner, run_id)
        found = _stored(connection, digests)
        _keep(connection, run_id, found)
        return found

    async def put(self, blobs: Sequence[bytes], /, *, run_id: str) -> None:
        rows = [(hashlib.sha256(data).hexdigest(), data) for data in blobs]  # before the transaction begins

        def put(connection: Connection) -> None:
            check_not_taken(connection, self._database.owner, run_id)
            _insert(connection, "blobs", rows, " ON CONFLICT DO NOTHING")
            _keep(connection, run_id, [digest for digest, _ in rows])

        await self._database.transact(put)

    @transaction
    def fetch(self, connection: Connection, digests: Collection[str], /) -> Mapping[str, bytes]:
        database = self._database
        found: dict[str, bytes] = {}
        for some in chunks(digests):
            query = f"SELECT digest, data FROM blobs WHERE digest IN ({marks(some)})"
            found.update(connection.execute(query, some).fetchall())
        for digest in digests:
            if digest not in found:
                raise BlobNotFoundError(digest)
            if not is_intact(digest, found[digest]):
                raise database.chains.altered(f"blob {digest}", 1, "its bytes were changed")
        return found

    @transaction
    def undo(self, connection: Connection, undone: Sequence[tuple[CommitUnit, Entry]], /) -> None:
        database = self._database
        for run_id in dict.fromkeys(unit.run_id for unit, _ in undone):
            check_owner(connection, database.owner, run_id)
            verified(connection, database.chains, run_id)
        for unit, entry in undone:
            for delta in unit.workspaces:
                _revert(connection, database, unit, delta)
            chain = run_chain(unit.run_id)
            database.chains.append(connection, chain, entry.kind, entry.key, entry.body, at=entry.at)


def advance(connection: Connection, database: Database, run_id: str, delta: WorkspaceDelta) -> None:
    """Make the next version of a workspace.

    Raises `WorkspaceTakenError` if this process no longer has the workspace for this run, or if the workspace has a different
    version from the one that the call worked on. Raises `BlobNotFoundError` if the bytes of a file are not stored, and
    `JournalAltered` if a row was altered or the workspace was removed.
    """
    row = _known(connection, database.chains, delta)
    if (row.run_id, row.owner, row.version) != (run_id, database.owner, delta.base):
        raise WorkspaceTakenError(row.name, row.run_id, row.owner, loser=run_id)
    states = [state for change in delta.changes for state in (change.old, change.new) if state is not None]
    wanted = {state.digest for state in states if state.digest}
    for digest in wanted - set(_stored(connection, wanted)):
        raise BlobNotFoundError(digest)
    _keep(connection, run_id, wanted)  # the old ones too, so that the call can be undone
    unexpected = _change(connection, database.chains, row, delta.changes, run_id)
    if unexpected:  # the version is checked above, so the rows themselves were changed
        raise database.chains.altered(f"workspace {row.name}", row.version, f"{unexpected[0]!r} was changed")


def _revert(connection: Connection, database: Database, unit: CommitUnit, delta: WorkspaceDelta) -> None:
    row = _known(connection, database.chains, delta)
    if row.run_id != unit.run_id:  # `undo` has checked that this process owns the unit's own run
        _check_free(connection, database, row)
    opposite = [WorkspaceChange(each.path, each.new, each.old) for each in delta.changes]
    gone = {each.path for each in opposite if each.new is None}
    filled = [
        path
        for folder in (each.path for each in opposite if each.new is None and each.old is not None)
        for path in _below(connection, row.name, folder)
        if path not in gone
    ]
    unexpected = filled or _change(connection, database.chains, row, opposite, unit.run_id)
    if unexpected:
        raise UndoRefused(unit.call_id, sorted(unexpected), "these paths have been changed since")


def read_files(
    connection: Connection, chains: Chains, name: str, since: int = 0
) -> dict[str, WorkspaceFile | None]:
    """Return the paths that changed after the version `since`, with their states; None for a removed path.

    Raises `JournalAltered` if the row of the workspace or of one of these paths was altered. Rows that were removed or set
    back to an earlier state are noticed only if all rows are read, with `since=0`.
    """
    return _read_files(connection, chains, name, _find(connection, chains, name), since)


def _read_files(
    connection: Connection, chains: Chains, name: str, row: WorkspaceRow | None, since: int = 0
) -> dict[str, WorkspaceFile | None]:
    found: dict[str, WorkspaceFile | None] = {}
    total = 0
    for values in fetch(connection, f"{_FILES} AND version > ?", name, since):
        _check_file(chains, values)
        total += int.from_bytes(values[7])
        found[values[1]] = _state(values)
    if not since and _shown(total) != ((row and row.seal) or _shown(0)):
        raise chains.altered(f"workspace {name}", 1, "the rows of its files do not match its own row")
    return found


def workspace_alterations(connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
    """Yield the first alteration that is found in each altered workspace."""
    for (name,) in fetch(connection, _NAMES):
        yield from alteration(read_files, connection, chains, name)


def read_unchained(connection: Connection, chains: Chains) -> list[WorkspaceRow]:
    """Return the workspaces of a journal in which they have no chains yet. Raises `JournalAltered` if one was altered."""
    found: dict[str, WorkspaceRow] = {}
    for name, id, version, run_id, owner, seal, mac in fetch(connection, _ROWS):
        if not chains.is_row("workspaces", (name, id, version, run_id, owner, seal), mac):
            raise chains.altered(workspace_chain(name), 1, "its row was changed")
        found[name] = WorkspaceRow(name=name, id=id, version=version, run_id=run_id, owner=owner, seal=seal)
    names = {name for (name,) in fetch(connection, "SELECT DISTINCT workspace FROM workspace_files")}
    for name in names | found.keys():
        _read_files(connection, chains, name, found.get(name))
    return list(found.values())


def begin_chain(connection: Connection, chains: Chains, row: WorkspaceRow) -> None:
    """Begin the chain of a workspace that has none. Only its newest version is known, so the others are empty records."""
    for version in range(1, row.version + 1):
        body = _recorded(row.id, row.seal) if version == row.version else b""
        chains.append(connection, workspace_chain(row.name), _VERSION, "", body)


def _line(connection: Connection, database: Database, name: str) -> WorkspaceLine:
    """Return a workspace as it is listed. If it was altered, the line has only its name and the problem."""
    try:
        row = _find(connection, database.chains, name)
        states = _read_files(connection, database.chains, name, row).values()
    except JournalAltered as altered:
        return WorkspaceLine(str(name), altered=altered.problem)
    if row is None:  # an altered name may be a value that no query finds
        return WorkspaceLine(str(name), altered="its row was changed")
    found = [state for state in states if state is not None and state.kind != "folder"]
    run_id = row.run_id if _is_kept(connection, database, row) else ""
    return WorkspaceLine(row.name, row.version, len(found), sum(state.size for state in found), run_id)


# --- rows -----------------------------------------------------------------------------------------------


def _find(connection: Connection, chains: Chains, name: str) -> WorkspaceRow | None:
    chain = workspace_chain(name)
    for values in fetch(connection, _HEAD, chain=chain, name=name):
        if not chains.is_row("workspaces", tuple(values[:6]), values[6]):
            raise chains.altered(chain, 1, "its row was changed")
        name, id, version, run_id, owner, seal = values[:6]
        if tuple(values[7:]) != ((version, version, _recorded(id, seal)) if version else (None, None, None)):
            raise chains.altered(chain, 1, "its row is not the newest one that was recorded")
        return WorkspaceRow(name=name, id=id, version=version, run_id=run_id, owner=owner, seal=seal)
    if fetch(connection, "SELECT 1 FROM chains WHERE chain = ?", chain):
        raise chains.altered(chain, 1, "it was removed")
    return None


def _recorded(id: str, seal: str) -> bytes:
    """Return what a workspace's chain records about one version."""
    return f"{id} {seal}".encode()


def _known(connection: Connection, chains: Chains, delta: WorkspaceDelta) -> WorkspaceRow:
    row = _find(connection, chains, delta.name)
    if row is None or row.id != delta.id:
        raise chains.altered(f"workspace {delta.name}", 1, "it was removed")
    return row


def _check_free(connection: Connection, database: Database, row: WorkspaceRow) -> None:
    """Raise `WorkspaceBusy` if a run has the workspace."""
    if _is_kept(connection, database, row):
        owner = row.owner if _is_at_work(connection, database, row.owner) else ""
        raise WorkspaceBusy(row.name, row.run_id, owner)


def _is_kept(connection: Connection, database: Database, row: WorkspaceRow) -> bool:
    """Return whether a run has the workspace, so no different run may take it.

    A submitted run that is over, or waits for an answer or for its due time, does not. Any other submitted run that has begun does,
    even if its process has ended: a worker will continue it, perhaps in the middle of a call that has changed files. A run
    that was not submitted has the workspace until it releases it, or until its process has ended or no longer owns the run.
    """
    found = connection.execute(_HOLDER, (row.run_id,)).fetchone()
    if found is not None:
        owner, status, queue, due_at = found
        is_due = due_at is not None and due_at <= database.now()
        if queue and (status == "running" or (status == "parked" and is_due)):
            return True
        if owner != row.owner:
            return False
    return _is_at_work(connection, database, row.owner)


def _is_at_work(connection: Connection, database: Database, owner: str) -> bool:
    return bool(owner) and (owner == database.owner or database.leases.is_at_work(connection, owner))


def _head_values(row: WorkspaceRow) -> tuple[Any, ...]:
    return row.name, row.id, row.version, row.run_id, row.owner, row.seal


def _replace(connection: Connection, chains: Chains, row: WorkspaceRow, **changes: Any) -> WorkspaceRow:
    """Replace a workspace's row. In PostgreSQL, two transactions that replace the same row conflict, and one is repeated."""
    new = msgspec.structs.replace(row, **changes)
    values = _head_values(new)
    query = "UPDATE workspaces SET version = ?, run_id = ?, owner = ?, seal = ?, mac = ? WHERE name = ?"
    connection.execute(query, (*values[2:], chains.row_mac("workspaces", values), row.name))
    return new


def _change(
    connection: Connection,
    chains: Chains,
    row: WorkspaceRow,
    changes: Sequence[WorkspaceChange],
    run_id: str,
) -> list[str]:
    """Save the changes of a run as a workspace's next version, and return []. The version notes whose run it is, by a keyed digest.

    If some paths are not in the old states that the changes name, change nothing and return these paths.
    """
    before: dict[str, tuple[Any, ...]] = {}
    for some in chunks([change.path for change in changes]):
        for values in fetch(connection, f"{_FILES} AND path IN ({marks(some)})", row.name, *some):
            _check_file(chains, values)
            before[values[1]] = tuple(values)
    unexpected = [each.path for each in changes if _state(before.get(each.path)) != each.old]
    if unexpected:
        return unexpected
    total = int(row.seal or "0", 16)
    version = row.version + 1
    rows: list[tuple[Any, ...]] = []
    for change in changes:
        new = change.new
        state = ("", 0, "", 0) if new is None else (new.kind, new.mode, new.digest, new.size)
        values = (row.name, change.path, version, *state)
        mac = chains.row_mac("workspace_files", values)
        old = before.get(change.path)
        total += int.from_bytes(mac) - (0 if old is None else int.from_bytes(old[7]))
        rows.append((*values, mac))
    _insert(connection, "workspace_files", rows, _REPLACE)
    seal, chain = _shown(total), workspace_chain(row.name)
    _replace(connection, chains, row, version=version, seal=seal)
    (maker,) = connection.execute("SELECT principal FROM runs WHERE id = ?", (run_id,)).fetchone() or ("",)
    body = _recorded(row.id, seal)
    if chains.append(connection, chain, _VERSION, chains.mark(maker), body) != version:
        raise chains.altered(chain, version, "its versions were changed")
    return []


def _below(connection: Connection, name: str, folder: str) -> list[str]:
    query = "SELECT path FROM workspace_files WHERE workspace = ? AND path >= ? AND path < ? AND kind != ''"
    return [path for (path,) in fetch(connection, query, name, f"{folder}/", f"{folder}0")]


def _check_file(chains: Chains, values: Sequence[Any]) -> None:
    if not chains.is_row("workspace_files", tuple(values[:7]), values[7]):
        raise chains.altered(f"workspace {values[0]}", 1, f"the row of {values[1]!r} was changed")


def _state(values: Sequence[Any] | None) -> WorkspaceFile | None:
    return WorkspaceFile(*values[3:7]) if values is not None and values[3] else None


def _shown(total: int) -> str:
    return f"{total % _MODULUS:x}"


# --- blobs ----------------------------------------------------------------------------------------------


def _stored(connection: Connection, digests: Collection[str]) -> list[str]:
    found: list[str] = []
    for some in chunks(digests):
        query = f"SELECT digest FROM blobs WHERE digest IN ({marks(some)})"
        found += [digest for (digest,) in connection.execute(query, some).fetchall()]
    return found


def _keep(connection: Connection, run_id: str, digests: Iterable[str]) -> None:
    rows = [(keeper(run_id), digest) for digest in digests]
    _insert(connection, "blob_runs", rows, " ON CONFLICT DO NOTHING")


def _insert(connection: Connection, table: str, rows: Sequence[tuple[Any, ...]], rest: str) -> None:
    for some in chunks(rows):
        values = ", ".join(f"({marks(row)})" for row in some)
        connection.execute(
            f"INSERT INTO {table} VALUES {values}{rest}", tuple(each for row in some for each in row)
        )
