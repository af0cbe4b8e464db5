"""The queue in a journal's database: runs that wait for a worker, and the workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from handrail.errors import DefinitionError, JournalAltered
from handrail.journal.records import OVER, RunRecord, RunRow, WorkerRow
from handrail.journal.sql.chains import Chains
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Database, Role, encode, transaction
from handrail.journal.sql.leases import acquire, earliest
from handrail.journal.sql.run_rows import COLUMNS, StoredRun, check_run, find_run, update_run
from handrail.journal.sql.runs import check_new, insert_queued, release, take_turn
from handrail.journal.sql.schema import check_writer
from handrail.journal.sql.verification import verify_session
from handrail.journal.sql.workspaces import put_blob

if TYPE_CHECKING:
    from handrail.journal.sql.runs import SqlRuns

# The index `runs_for_workers` serves the conditions in the first two lines, and the order of `_FIRST`. A run that was
# interrupted is due at once. A queued run with an owner is about to begin, and the other queued runs of its session wait for it.
_TURN = """FROM turns JOIN runs AS other ON other.id = turns.run_id
    WHERE turns.session_id = runs.session_id AND turns.principal = runs.principal AND other.id != runs.id"""
_DUE = f"""SELECT {COLUMNS}, (SELECT other.owner {_TURN}), (SELECT other.leased_until {_TURN})
    FROM runs WHERE queue != '' AND status IN ('queued', 'running', 'parked')
    AND (due_at IS NOT NULL OR status != 'parked') AND coalesce(due_at, 0) <= :now
    AND (status != 'queued' OR NOT EXISTS (
        SELECT 1 FROM runs AS other WHERE other.session_id = runs.session_id AND other.principal = runs.principal AND other.id != runs.id AND (
            other.status IN ('running', 'parked')
            OR (other.status = 'queued' AND runs.owner = '' AND (other.owner != ''
                OR (other.due_at <= :now AND (other.began_at, other.id) < (runs.began_at, runs.id))))
        )
    ))"""
_FIRST = " ORDER BY coalesce(due_at, 0), began_at, id LIMIT :limit"
_ONE = " AND id = :run LIMIT :limit"
_LOCK = "SELECT 1 FROM runs WHERE id = ? /* FOR UPDATE SKIP LOCKED */"
_NOT_GIVEN = "a run is not given to a worker: %s"
_FEW, _ALL = 50, 2**62
"""How many of the due runs are read first, since one of them can usually be claimed, and how many if none can."""


class SqlQueue(Role):
    """The role `Queue` of a journal. `lost` is called with the id of each run whose cached values may be out of date."""

    def __init__(self, database: Database, runs: SqlRuns, lost: Callable[[str], None]) -> None:
        super().__init__(database)
        self._runs = runs
        self._lost = lost

    @transaction
    def submit(
        self,
        connection: Connection,
        run: RunRecord,
        /,
        *,
        at: float | None = None,
        host: str = "",
        key: str = "",
        blobs: Sequence[bytes] = (),
    ) -> RunRow:
        if not run.app:
            raise DefinitionError(
                f"run {run.id!r} can't be submitted without an app, because a worker could not find its prompt. "
                "Pass app='module:name'."
            )
        database = self._database
        now = database.now()
        query = "SELECT id FROM runs WHERE principal = ? AND key = ?"
        earlier = connection.execute(query, (run.principal, key)).fetchone() if key else None
        if earlier is None:
            check_new(connection, run.id)
            due = now if at is None else at
            insert_queued(connection, database.chains, run, now, host=host, key=key, due=due)
            for data in blobs:
                put_blob(connection, database.chains, data, run.id, at=now)
        row = find_run(connection, database.chains, run.id if earlier is None else earlier[0])
        return self._runs.shown(connection, row)

    async def claim(
        self,
        queues: Sequence[str],
        /,
        *,
        host: str = "",
        run_id: str | None = None,
        besides: Collection[str] = (),
    ) -> RunRow | None:
        database = self._database
        now = database.now()

        def claim(connection: Connection) -> RunRow | None:
            for limit in (_FEW, _ALL):
                rows, is_all = self._due(connection, queues, host, now, run_id or "", limit)
                for row in rows:
                    if row.id in besides:
                        continue
                    if connection.execute(_LOCK, (row.id,)).fetchone() is None:
                        continue  # a different worker is claiming it
                    try:
                        take_turn(connection, database, row.session, row.id)
                        taken = acquire(connection, database, row, now, claims=True)
                    except JournalAltered as altered:
                        self._log_once(str(altered), _NOT_GIVEN, altered)
                        continue
                    shown = self._runs.shown(connection, row)
                    return msgspec.structs.replace(shown, deaths=taken.deaths, legs=taken.legs)
                if is_all:
                    break
            if run_id is not None:
                missed = find_run(connection, database.chains, run_id)
                if missed.status not in OVER and not missed.owner:
                    update_run(connection, database.chains, missed, legs=missed.legs + 1)
            return None

        claimed = await database.transact(claim)
        if claimed is not None:
            if claimed.status != "queued":
                self._runs.claimed[claimed.record.id] = claimed.status
            self._lost(claimed.record.id)  # another process may have had the run
        return claimed

    @transaction
    def due(
        self,
        connection: Connection,
        queues: Sequence[str] | None = None,
        /,
        *,
        host: str | None = None,
        limit: int = 100,
    ) -> Sequence[RunRow]:
        rows, _ = self._due(connection, queues, host, self._database.now())
        return tuple(self._runs.shown(connection, row) for row in rows[:limit])

    def _due(
        self,
        connection: Connection,
        queues: Sequence[str] | None,
        host: str | None,
        now: float,
        run_id: str = "",
        limit: int = _ALL,
    ) -> tuple[list[StoredRun], bool]:
        """Read the first `limit` runs that are due, or only the run `run_id`, if it is due.

        Returns those that this process may claim, and whether there are no more to read.
        """
        found: list[StoredRun] = []
        held = self._database.leases.held(connection, now)
        due = f"{_DUE} AND {self._database.leases.free}"
        if run_id:
            read = fetch(connection, due + _ONE, now=now, limit=limit, run=run_id)
        else:
            read = fetch(connection, due + _FIRST, now=now, limit=limit)
        for values in read:
            try:
                row = check_run(self._chains, values)
            except JournalAltered as altered:
                self._log_once(str(altered), _NOT_GIVEN, altered)
                continue
            is_wanted = (queues is None or row.queue in queues) and (host is None or row.host in ("", host))
            is_mine = row.owner == self._database.owner
            is_turn = not values[-2] or not held(*values[-2:])  # no other run is working on the session
            if is_wanted and is_turn and not is_mine and not held(row.owner, row.leased_until):
                found.append(row)
        return found, len(read) < limit

    @transaction
    def wake(self, connection: Connection, run_id: str, /, at: float | None = None) -> None:
        database = self._database
        due = database.now() if at is None else at
        row = find_run(connection, database.chains, run_id)
        if row.status not in OVER and row.owner in ("", database.owner):
            update_run(connection, database.chains, row, due_at=due)

    @transaction
    def adopt(self, connection: Connection, run_id: str, queue: str, /) -> None:
        database = self._database
        now = database.now()
        row = find_run(connection, database.chains, run_id)
        update_run(connection, database.chains, row, queue=queue, changed_at=now)

    @transaction
    def cancel(self, connection: Connection, run_id: str, outcome: bytes, /) -> bool:
        database = self._database
        now = database.now()
        row = find_run(connection, database.chains, run_id)
        is_free = database.leases.is_free(connection, row.owner, row.leased_until, now)
        if row.status != "queued" or not is_free:
            return False
        verify_session(connection, database.chains, run_id)
        release(connection, database.chains, row, "cancelled", outcome, now)
        return True

    async def signalled(self) -> Sequence[str]:
        query = "SELECT id FROM runs WHERE owner = ? AND signals != 0 AND status IN ('queued', 'running', 'parked')"
        return tuple(str(id) for (id,) in await self._database.select(query, self._database.owner))

    def changes(self) -> int | None:
        return self._database.changes()

    async def wait(self, seconds: float, /) -> None:
        await self._database.wait(seconds)

    async def announce(self, worker: WorkerRow, /, *, seconds: float) -> None:
        database = self._database
        until = database.now() + seconds
        row = msgspec.structs.replace(worker, owner=database.owner, leased_until=until)
        body = encode(row, "a worker has")

        def announce(connection: Connection) -> None:
            if seconds <= 0:
                connection.execute("DELETE FROM workers WHERE owner = ?", (row.owner,))
                return
            check_writer(connection, database.path)
            values = (row.owner, row.host, until, body)
            mac = database.chains.row_mac("workers", values)
            connection.execute("DELETE FROM workers WHERE owner = ?", (row.owner,))
            connection.execute("INSERT INTO workers VALUES (?, ?, ?, ?, ?)", (*values, mac))
            connection.execute("DELETE FROM workers WHERE leased_until < ?", (until - seconds - _LONG_GONE,))

        await database.transact(announce, synced=False)

    @transaction
    def workers(self, connection: Connection) -> Sequence[WorkerRow]:
        leases, chains, now = self._database.leases, self._chains, self._database.now()
        rows = fetch(connection, "SELECT owner, host, leased_until, body, mac FROM workers ORDER BY owner")
        return tuple(
            msgspec.msgpack.decode(row[3], type=WorkerRow)
            for row in rows
            if leases.is_announced(row[0], row[2], now) and chains.is_row("workers", row[:4], row[4])
        )


_LONG_GONE = 3600.0
"""Minimum number of seconds for which a worker's row is kept after its announcement has expired."""


def make_due(connection: Connection, chains: Chains, run_id: str, at: float) -> None:
    """Note that one of a run's questions was answered, so that a worker continues the run once it is parked.

    Does nothing for a run that was not submitted, or that is neither running nor parked.
    """
    query = "SELECT 1 FROM runs WHERE id = ? AND queue != '' AND status IN ('running', 'parked')"
    if connection.execute(query, (run_id,)).fetchone():
        row = find_run(connection, chains, run_id)
        update_run(connection, chains, row, due_at=earliest(row.due_at, at))
