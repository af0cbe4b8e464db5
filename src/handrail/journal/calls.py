"""Committed calls, entries and steps in a journal's database."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from handrail.errors import RunBusy
from handrail.journal.database import Database, encode
from handrail.journal.lease import check_not_taken, check_owner, is_dead, is_free
from handrail.journal.local import LocalSteps
from handrail.journal.runs import get_run, put_entries
from handrail.records import CommitUnit, Entry

T = TypeVar("T")


class SqliteCalls:
    """Committed calls and entries in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._applying: set[str] = set()
        """The calls whose files this process is changing at the moment."""

    async def commit(self, unit: CommitUnit, /) -> None:
        database = self._database
        state = "committed" if unit.files else "applied"
        encoded = encode(unit, f"call {unit.call_id!r} committed")

        def commit(connection: sqlite3.Connection) -> None:
            check_not_taken(connection, database.owner, unit.run_id)
            connection.execute(
                "INSERT INTO units (run_id, call_id, state, unit, session_id) VALUES (?, ?, ?, ?, ?)",
                (unit.run_id, unit.call_id, state, encoded, unit.session_id),
            )

        if unit.files:
            self._applying.add(unit.call_id)
        try:
            await database.transact(commit)
        except BaseException:
            self._applying.discard(unit.call_id)
            raise

    async def applied(self, unit: CommitUnit, /) -> None:
        self._applying.discard(unit.call_id)
        await self._settle(unit, "applied", synced=False)  # after a power cut, recovery repeats the check

    async def void(self, unit: CommitUnit, /) -> None:
        self._applying.discard(unit.call_id)
        await self._settle(unit, "void", synced=True)

    async def _settle(self, unit: CommitUnit, state: str, *, synced: bool) -> None:
        query = "UPDATE units SET state = ? WHERE run_id = ? AND call_id = ? AND state = 'committed'"

        def settle(connection: sqlite3.Connection) -> None:
            connection.execute(query, (state, unit.run_id, unit.call_id))

        await self._database.transact(settle, synced=synced)

    async def unapplied(self) -> Sequence[CommitUnit]:
        database = self._database
        query = """SELECT unit, coalesce(owner, '') FROM units LEFT JOIN runs ON runs.id = run_id
            WHERE state = 'committed' ORDER BY number"""
        rows = await database.select(query)
        found = [(msgspec.msgpack.decode(unit, type=CommitUnit), owner) for unit, owner in rows]
        return tuple(
            unit
            for unit, owner in found
            if (not owner or owner == database.owner or is_dead(owner)) and unit.call_id not in self._applying
        )

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        return await self._units("run_id = ?", run_id)

    async def load_session(self, session_id: str, /) -> Sequence[CommitUnit]:
        return await self._units("session_id = ?", session_id)

    async def later(self, unit: CommitUnit, /) -> Sequence[CommitUnit]:
        return await self._units(
            """number > (SELECT max(number) FROM units WHERE run_id = ? AND call_id = ? AND state != 'void')
            AND NOT EXISTS (
                SELECT 1 FROM entries WHERE entries.run_id = units.run_id AND kind = 'undone' AND key = call_id
            )""",
            unit.run_id,
            unit.call_id,
        )

    async def _units(self, where: str, *values: str) -> tuple[CommitUnit, ...]:
        query = f"SELECT unit FROM units WHERE state != 'void' AND {where} ORDER BY number"
        rows = await self._database.select(query, *values)
        return tuple(msgspec.msgpack.decode(row[0], type=CommitUnit) for row in rows)

    async def note(self, run_id: str, entry: Entry, /, *, from_outside: bool = False) -> None:
        database = self._database

        def note(connection: sqlite3.Connection) -> None:
            if from_outside:
                row = get_run(connection, run_id)
                if row.owner and not is_free(row.owner, row.leased_until, database.now(), ""):
                    raise RunBusy(run_id, row.owner)
            else:
                check_owner(connection, database.owner, run_id)
            put_entries(connection, run_id, [entry])

        await database.transact(note)

    async def entries(self, run_id: str, /) -> Sequence[Entry]:
        query = "SELECT kind, key, at, body FROM entries WHERE run_id = ? ORDER BY number"
        rows = await self._database.select(query, run_id)
        return tuple(Entry(*row) for row in rows)

    async def marks(self, session_id: str, /) -> Sequence[tuple[str, Entry]]:
        query = """SELECT entries.run_id, kind, key, at, body FROM runs JOIN entries ON entries.run_id = runs.id
            WHERE session_id = ? AND kind IN ('undone', 'told') ORDER BY number"""
        rows = await self._database.select(query, session_id)
        return tuple((run_id, Entry(*entry)) for run_id, *entry in rows)


class SqliteSteps:
    """Steps in a database. Values that an earlier process settled are returned as plain data."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._local = LocalSteps()
        self.forget = self._local.forget

    async def run(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        async def recorded() -> Any:
            row = await self._database.transact(lambda connection: self._reserve(connection, key, run_id))
            if row is not None and row[0] is not None:
                return msgspec.msgpack.decode(row[0])
            try:
                value = await (function() if row is None or unsettled is None else unsettled())
                encoded = encode(value, f"step {key!r} returned")
            except Exception:  # a cancelled step may have happened, and stays reserved
                if row is None:  # a step that was already reserved stays so until it is decided
                    with contextlib.suppress(RunBusy):  # the new owner decides
                        await self._database.write(
                            run_id, "DELETE FROM steps WHERE key = ? AND value IS NULL", key
                        )
                raise
            query = "UPDATE steps SET value = ? WHERE key = ? AND value IS NULL"
            await self._database.write(run_id, query, encoded, key)
            return value

        return await self._local.run(key, recorded, run_id=run_id)

    async def load(self, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        query = "SELECT key, value FROM steps WHERE run_id = ? ORDER BY key"
        rows = await self._database.select(query, run_id)
        return tuple((key, value) for key, value in rows)

    def _reserve(self, connection: sqlite3.Connection, key: str, run_id: str) -> Any:
        row = connection.execute("SELECT value FROM steps WHERE key = ?", (key,)).fetchone()
        if row is None:
            if run_id:
                check_owner(connection, self._database.owner, run_id)
            connection.execute("INSERT INTO steps VALUES (?, ?, NULL)", (key, run_id))
        return row
