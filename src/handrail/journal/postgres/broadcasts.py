"""Broadcasts in PostgreSQL: two unlogged tables, and notices that carry only a session's id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from handrail.journal.connection import Connection
from handrail.journal.postgres.notices import SAID, WATCHED
from handrail.journal.protocol import Batch, Watcher

if TYPE_CHECKING:
    from handrail.journal.postgres.database import PostgresDatabase
    from handrail.journal.postgres.notices import Notices

log = logging.getLogger("handrail.journal")

_KEPT_SECONDS = 30.0
"""Seconds after which `sweep` deletes a batch, or a watcher whose time is over.

A reader usually reads a batch within milliseconds, or within seconds if it has lost its connection.
"""
_WATCH = """INSERT INTO watchers VALUES (?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET joins = excluded.joins, until = excluded.until"""
# The position is the time, because a crash empties the table, and a counter would start again.
_ADD = """WITH added AS (
        INSERT INTO broadcasts VALUES ((extract(epoch FROM clock_timestamp()) * 1000000)::bigint, ?, ?, ?, ?, ?, ?, ?)
        RETURNING 1
    ) SELECT pg_notify(?, ?) FROM added"""
_READ = """SELECT position, run_id, leg, number, at, body, mac FROM broadcasts
    WHERE session_id = ? AND position > ? ORDER BY position"""
_DROP = """DELETE FROM broadcasts WHERE session_id = ?
    AND NOT EXISTS (SELECT 1 FROM watchers WHERE session_id = ? AND until > ?)"""


class PostgresBroadcasts:
    """The broadcasts in a database. All times come from the database's clock."""

    def __init__(self, database: PostgresDatabase, notices: Notices) -> None:
        self._database = database
        self._notices = notices
        self._heard: list[Callable[[str, bool], None]] = []
        notices.subscribe(self._noticed)

    async def watch(self, watcher: Watcher, session_id: str, /, *, seconds: float) -> None:
        database = self._database

        def watch(connection: Connection) -> None:
            until = database.now() + seconds
            connection.execute(_WATCH, (watcher.id, session_id, watcher.joins, until))
            database.chains.tell(connection, WATCHED, session_id)

        await database.transact(watch)

    async def leave(self, watcher_id: str, session_id: str, /) -> None:
        database = self._database

        def leave(connection: Connection) -> None:
            connection.execute("DELETE FROM watchers WHERE id = ?", (watcher_id,))
            connection.execute(_DROP, (session_id, session_id, database.now()))
            database.chains.tell(connection, WATCHED, session_id)

        await database.transact(leave)

    async def watchers(self, session_ids: Collection[str], /) -> Mapping[str, Sequence[Watcher]]:
        query = (
            "SELECT session_id, id, joins FROM watchers WHERE session_id = ANY(?) AND until > ? ORDER BY id"
        )
        found: dict[str, list[Watcher]] = {}
        rows = await self._database.select(query, list(session_ids), self._database.now())
        for session_id, id, joins in rows:
            found.setdefault(session_id, []).append(Watcher(id, joins))
        return found

    async def add(self, session_id: str, run_id: str, leg: int, number: int, body: bytes, /) -> None:
        database = self._database
        values = (session_id, run_id, leg, number, database.now(), body)
        mac = database.chains.row_mac("broadcasts", values)
        told = (database.channel, f"{SAID} {session_id}"[:2000])
        await database.transact(
            lambda connection: connection.execute(_ADD, (*values, mac, *told)).fetchall(), single=True
        )

    async def last(self, session_id: str, /) -> int:
        query = "SELECT coalesce(max(position), 0) FROM broadcasts WHERE session_id = ?"
        [(last,)] = await self._database.select(query, session_id)
        return last

    async def read(self, session_id: str, after: int, /) -> Sequence[Batch]:
        found: list[Batch] = []
        for position, *values, mac in await self._database.select(_READ, session_id, after):
            run_id, leg, number, _, body = values
            if self._database.chains.is_row("broadcasts", (session_id, *values), mac):
                found.append(Batch(position, run_id, leg, number, body))
            else:
                log.error(
                    "a broadcast of run %s is not shown: something other than Handrail wrote it", run_id
                )
        return found

    async def sweep(self) -> None:
        database = self._database
        now = database.now()

        def sweep(connection: Connection) -> None:
            connection.execute("DELETE FROM broadcasts WHERE at < ?", (now - _KEPT_SECONDS,))
            connection.execute("DELETE FROM watchers WHERE until < ?", (now - _KEPT_SECONDS,))

        await database.transact(sweep)

    async def listen(self, heard: Callable[[str, bool], None], /) -> Callable[[], None]:
        self._heard.append(heard)
        if not self._notices.is_listening:
            await asyncio.to_thread(self._notices.start)
        return lambda: self._heard.remove(heard)

    def _noticed(self, kind: str, id: str) -> None:
        if kind in (WATCHED, SAID, ""):
            for each in tuple(self._heard):
                each(id, kind != SAID)
