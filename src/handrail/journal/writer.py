"""The one connection that writes a journal's file: on a thread of its own, or inline."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal

from handrail.errors import JournalError
from handrail.journal.schema import bring_up

Work = Callable[[sqlite3.Connection], Any]
Moments = Callable[[Literal["before", "after"], sqlite3.Connection], None]
"""Hears of each transaction just before it, and when it is durable but nobody has heard of it yet."""

_BUSY_SECONDS = 10.0


def first_row(query: str, *values: Any) -> Work:
    """The first row that a query finds."""
    return lambda connection: connection.execute(query, values).fetchone()


def statement(query: str, *values: Any) -> Work:
    """A statement of which nothing comes back."""

    def carry_out(connection: sqlite3.Connection) -> None:
        connection.execute(query, values)

    return carry_out


class Writer:
    """Carries out work on the file, each piece in a transaction of its own, one after another.

    With `inline` it is done by whoever asks, at once: a simulation has then only one order of things.
    `moments` is for simulations too: it may end the process there.
    """

    def __init__(
        self, path: str, new_id: str, synced: bool, inline: bool, moments: Moments | None = None
    ) -> None:
        self.path = path
        self._moments = moments
        self.id = ""
        self._synced = synced
        self._closed = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._putting = threading.Lock()
        """Held to add a job: behind the last one, which ends the thread, it would never be done."""
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        if inline:
            self._connection = self._open(new_id)
            return
        opened = _Job(lambda connection: None)
        self._thread = threading.Thread(
            target=self._write, args=(opened, new_id), name="handrail-journal", daemon=True
        )
        self._thread.start()
        opened.done.wait()
        if opened.error is not None:
            self._closed = True
            raise opened.error

    def close(self) -> None:
        """Finish what is being written and let go of the file; harmless when called twice."""
        with self._putting:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
                if self._connection is not None:
                    self._connection.close()
        if self._thread is not None:
            self._thread.join()

    async def do(self, work: Work, *, synced: bool = True) -> Any:
        """Have it done and wait until it is recorded."""
        if self._connection is not None:
            return self._outcome(_Job(work, synced=synced))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._put(_Job(work, lambda job: loop.call_soon_threadsafe(_deliver, future, job), synced))
        return await future

    def do_now(self, work: Work) -> Any:
        """The same for whoever can't await it, from any thread."""
        job = _Job(work)
        if self._connection is not None:
            return self._outcome(job)
        self._put(job)
        job.done.wait()
        if job.error is not None:
            raise job.error
        return job.value

    def _outcome(self, job: _Job) -> Any:
        self._check_open()
        assert self._connection is not None
        self._carry_out(self._connection, job)
        if job.error is not None:
            raise job.error
        return job.value

    def _put(self, job: _Job) -> None:
        with self._putting:
            self._check_open()
            self._jobs.put(job)

    def _check_open(self) -> None:
        if self._closed:
            raise JournalError(self.path, "it was closed", "Open it again.")

    def _write(self, opened: _Job, new_id: str) -> None:
        try:
            connection = self._open(new_id)
        except BaseException as error:  # raised where it was to be opened
            opened.error = error
            return
        finally:
            opened.done.set()
        while (job := self._jobs.get()) is not None:
            self._carry_out(connection, job)
        connection.close()

    def _open(self, new_id: str) -> sqlite3.Connection:
        if "\0" in self.path:
            raise JournalError(self.path, "its path holds a zero byte", "Give one without.")
        try:
            connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                # Without it a record outlives the process, since the system has it; with it also the system.
                connection.execute(f"PRAGMA synchronous = {'FULL' if self._synced else 'OFF'}")
                bring_up(connection, self.path, new_id)
                self.id = connection.execute("SELECT value FROM about WHERE key = 'id'").fetchone()[0]
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise JournalError(
                self.path, f"it can't be opened: {error}", "Give the path of a journal, or of a new file."
            ) from error
        return connection

    def _carry_out(self, connection: sqlite3.Connection, job: _Job) -> None:
        moments = self._moments
        if moments is not None:
            moments("before", connection)
        try:
            if self._synced:
                connection.execute(f"PRAGMA synchronous = {'FULL' if job.synced else 'OFF'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                job.value = job.work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # where the disk is full, SQLite may have taken it back itself
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            job.error = JournalError(
                self.path, f"it can't be written: {error}", "See to the disk, and try again."
            )
        except BaseException as error:
            job.error = error
        if moments is not None:
            moments("after", connection)
        job.finish()


class _Job:
    """Something for the writer to do, and what came of it."""

    __slots__ = ("_report", "done", "error", "synced", "value", "work")

    def __init__(
        self, work: Work, report: Callable[[_Job], object] | None = None, synced: bool = True
    ) -> None:
        self.work = work
        self.synced = synced
        self._report = report
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        self.done.set()
        if self._report is not None:
            try:
                self._report(self)
            except RuntimeError:  # the loop that asked has ended; what was recorded is recorded
                return


def _deliver(future: asyncio.Future[Any], job: _Job) -> None:
    if future.done():
        return
    if job.error is not None:
        future.set_exception(job.error)
    else:
        future.set_result(job.value)
