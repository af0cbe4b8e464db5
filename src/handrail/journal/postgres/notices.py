"""Notices between processes: which run, question or watched session has changed. And broadcasts, which they announce.

They carry only ids, so the receiver looks up what has changed. Broadcasts are kept in two unlogged tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psycopg

from handrail.errors import JournalError
from handrail.journal.protocol import Batch, Watcher
from handrail.journal.sql.connection import Connection

if TYPE_CHECKING:
    from handrail.journal.postgres.database import PostgresDatabase

log = logging.getLogger("handrail.journal")

WATCHED, SAID, ACCOUNTS = "watched", "said", "accounts"
"""Kinds of notices: the watchers of a session have changed, a run of a session has broadcast something, and users have changed."""
_PAUSE = 0.5
"""Seconds before a lost connection is opened again."""


class Notices:
    """Listens on a separate connection, in a separate thread, once somebody waits for a notice.

    Each subscriber is called in that thread with the kind and the id of what changed. Both are "" if notices may have
    been missed. Then everything has to be checked.
    """

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._subscribers: list[Callable[[str, str], None]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop: int | None = None
        """The write end of a pipe. Closing it stops the thread. None if the thread is not running."""
        self._tried = threading.Event()
        """Set once the thread listens, or its first attempt to connect has failed."""

    def subscribe(self, subscriber: Callable[[str, str], None]) -> None:
        """Call a function with every notice from now on."""
        self._subscribers.append(subscriber)

    def begin(self) -> None:
        """Start the thread, unless it was started before, without waiting until it listens."""
        with self._lock:
            if self._thread is None:
                stopped, self._stop = os.pipe()
                self._thread = threading.Thread(
                    target=self._listen, args=(stopped,), name="handrail-notices", daemon=True
                )
                self._thread.start()

    async def listen(self) -> None:
        """Start the thread, unless it was started before. Returns when it listens or its first attempt to connect has failed."""
        if self._thread is None:
            self.begin()
            await asyncio.to_thread(self._tried.wait)

    def close(self) -> None:
        """Stop listening, and wait until the thread has ended."""
        with self._lock:
            thread, stop, self._stop = self._thread, self._stop, None
            if stop is not None:
                os.close(stop)
        if thread is not None:
            thread.join()

    def _listen(self, stopped: int) -> None:
        try:
            while True:
                with contextlib.suppress(psycopg.Error, JournalError), self._database.connect() as raw:
                    raw.execute(f'LISTEN "{self._database.channel}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # hexadecimal
                    self._tried.set()
                    self._tell("", "")  # notices that were sent before now may have been missed
                    if self._until_stopped(raw, stopped):
                        return
                self._tried.set()
                if select.select([stopped], [], [], _PAUSE)[0]:
                    return
        finally:
            os.close(stopped)

    def _until_stopped(self, raw: psycopg.Connection[Any], stopped: int) -> bool:
        """Pass on each notice until `close` is called, then return True.

        Raises `psycopg.Error` if the connection is lost.
        """
        while stopped not in select.select([raw.fileno(), stopped], [], [])[0]:
            raw.pgconn.consume_input()
            while (notice := raw.pgconn.notifies()) is not None:
                kind, _, id = notice.extra.decode(errors="replace").partition(" ")
                self._tell(kind, id)
        return True

    def _tell(self, kind: str, id: str) -> None:
        for each in self._subscribers:
            each(kind, id)


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

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._heard: list[Callable[[str, bool], None]] = []
        database.subscribe(self._noticed)

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
        await self._database.listen()
        return lambda: self._heard.remove(heard)

    def _noticed(self, kind: str, id: str) -> None:
        if kind in (WATCHED, SAID, ""):
            for each in tuple(self._heard):
                each(id, kind != SAID)
