"""Notices between processes: which run, question or watched session has changed.

They carry only ids, so the receiver looks up what has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg

from handrail.errors import JournalError
from handrail.journal.questions import SqliteQuestions
from handrail.journal.queue import SqliteQueue

if TYPE_CHECKING:
    from handrail.journal.postgres.database import PostgresDatabase
    from handrail.journal.protocol import Check, Mask
    from handrail.protocols import Asker
    from handrail.question import Answer, Question

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

    def start(self) -> None:
        """Start the thread, unless it was started before. Returns when it listens or its first attempt to connect has failed."""
        self.begin()
        self._tried.wait()

    def begin(self) -> None:
        """Start the thread, unless it was started before, without waiting until it listens."""
        with self._lock:
            if self._thread is None:
                stopped, self._stop = os.pipe()
                self._thread = threading.Thread(
                    target=self._listen, args=(stopped,), name="handrail-notices", daemon=True
                )
                self._thread.start()

    @property
    def is_listening(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

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


class PostgresQueue(SqliteQueue):
    """The queue in PostgreSQL, which wakes waiting workers when a notice arrives."""

    notices: Notices
    _waiting: weakref.WeakSet[_Wake]

    def listen(self, notices: Notices) -> None:
        """Wake waiting workers whenever a notice says that a run or question has changed, or notices may have been missed."""
        self.notices = notices
        self._waiting = weakref.WeakSet()
        notices.subscribe(self._noticed)

    def _noticed(self, kind: str, id: str) -> None:
        if kind not in (WATCHED, SAID, ACCOUNTS):  # these change nothing that a worker could take
            self._wake()

    def _wake(self) -> None:
        for each in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                each.loop.call_soon_threadsafe(each.event.set)

    async def wait(self, seconds: float, /) -> None:
        wake = _Wake(asyncio.get_running_loop())
        self._waiting.add(wake)
        if not self.notices.is_listening:
            # Once the thread listens, it wakes all waiting workers, so nothing is missed.
            await asyncio.to_thread(self.notices.start)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                seconds
            ):  # unlike `wait_for` in Python 3.11, it never swallows a cancellation
                await wake.event.wait()


class _Wake:
    """A worker that waits in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.event = asyncio.Event()


class PostgresQuestions(SqliteQuestions):
    """Questions in PostgreSQL. When another process has recorded an answer, a notice wakes the tasks that wait for it."""

    notices: Notices

    def listen(self, notices: Notices) -> None:
        """Look for answers whenever a notice about a question arrives, or notices may have been missed."""
        self.notices = notices
        notices.subscribe(self._noticed)

    def _noticed(self, kind: str, id: str) -> None:
        if kind in ("question", ""):
            self.watch.look_now(id or None)

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        if not self.notices.is_listening and self.watch.is_on:
            await asyncio.to_thread(self.notices.start)
        return await super().ask(question, asker, check, mask)
