"""A journal's database: its schema, and the only connection that writes to it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

import msgspec
import pydantic_core

from handrail.clock import Clock
from handrail.errors import DefinitionError, JournalError
from handrail.journal.chains import Chains
from handrail.journal.digest import key_check, new_key
from handrail.journal.lease import new_owner
from handrail.journal.location import check_private_files, create_private_file

T = TypeVar("T")

Work = Callable[[sqlite3.Connection], T]
Moments = Callable[[Literal["before", "after"], sqlite3.Connection], None]
"""A function that is called before each transaction, and again once it is durable but its caller is not notified yet."""

MEMORY = ":memory:"
SCHEMA = 6
"""Version of the schema. A journal with another version is refused."""

_BUSY_SECONDS = 10.0
_TABLES: Sequence[str] = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL, principal TEXT NOT NULL, status TEXT NOT NULL,
        owner TEXT NOT NULL, leased_until REAL NOT NULL, began_at REAL NOT NULL, changed_at REAL NOT NULL,
        record BLOB NOT NULL, outcome BLOB NOT NULL, stopping INTEGER NOT NULL DEFAULT 0,
        deaths INTEGER NOT NULL DEFAULT 0, progress INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID""",
    "CREATE INDEX runs_by_time ON runs (began_at)",
    "CREATE INDEX runs_of_a_session ON runs (session_id, began_at)",
    "CREATE INDEX runs_of_a_principal ON runs (principal, began_at)",
    "CREATE INDEX sessions_of_a_principal ON runs (principal, session_id, began_at, changed_at)",
    """CREATE TABLE records (
        number INTEGER PRIMARY KEY, chain TEXT NOT NULL, link INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL,
        at REAL NOT NULL, session_id TEXT NOT NULL, body BLOB NOT NULL, mac BLOB NOT NULL, state TEXT NOT NULL,
        UNIQUE (chain, link)
    )""",
    "CREATE INDEX undone_calls ON records (chain, key) WHERE kind IN ('undone', 'told')",
    "CREATE INDEX units_of_a_session ON records (session_id) WHERE session_id != ''",
    "CREATE INDEX units_to_apply ON records (chain, key) WHERE state = 'committed'",
    """CREATE TABLE chains (
        number INTEGER PRIMARY KEY, chain TEXT NOT NULL UNIQUE, links INTEGER NOT NULL, seal BLOB NOT NULL
    )""",
    """CREATE TABLE questions (
        id TEXT PRIMARY KEY, question BLOB NOT NULL, answer BLOB, answered_at REAL, run_id TEXT NOT NULL,
        asked_at REAL NOT NULL, principal TEXT NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX questions_of_a_run ON questions (run_id)",
    "CREATE INDEX open_questions ON questions (asked_at) WHERE answer IS NULL",
    "CREATE INDEX open_questions_to_a_principal ON questions (principal, asked_at) WHERE answer IS NULL",
    """CREATE TABLE tickets (
        run_id TEXT NOT NULL, place TEXT NOT NULL, text TEXT NOT NULL, open INTEGER NOT NULL,
        holder TEXT NOT NULL, held_until REAL NOT NULL, deposit BLOB NOT NULL, PRIMARY KEY (run_id, place)
    ) WITHOUT ROWID""",
    "CREATE TABLE blobs (digest TEXT PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE blob_runs (run_id TEXT, digest TEXT, PRIMARY KEY (run_id, digest)) WITHOUT ROWID",
    "CREATE INDEX runs_of_a_blob ON blob_runs (digest)",
)


def encode(value: object, what: str) -> bytes:
    """Encode a value as plain data. `what` introduces the error message if the value can't be recorded."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=pydantic_core.to_jsonable_python)
    except (TypeError, ValueError, OverflowError) as error:
        raise DefinitionError(
            f"{what} a value that can't be recorded: {error}. Pass plain data, a dataclass or a model."
        ) from error


class Database:
    """Runs jobs on the database one after another, each in its own transaction.

    The jobs run in a thread of their own. With `inline` they run at once in the caller's thread, for databases
    in memory and for simulations, which need a single order of events. `moments` lets a simulation end the process
    before or after a transaction. `find_key` returns the key of the records' MACs, given whether the journal is new.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Clock,
        new_id: str,
        find_key: Callable[[bool], bytes] | None = None,
        synced: bool = False,
        inline: bool = False,
        moments: Moments | None = None,
    ) -> None:
        self.path = path
        self.id = ""
        self.key = b""
        self.chains: Chains
        self._find_key: Callable[[bool], bytes] = find_key or _random_key
        self.owner = new_owner()
        """The name under which this process owns runs."""
        self._clock = clock
        self._moments = moments
        self._synced = synced
        self._closed = False
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        """Held while a job is added, so that none is added after the job that ends the thread; with `inline`,
        while a job runs.
        """
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        if inline:
            self._connection = self._open(new_id)
            if path == MEMORY:  # no other process can open it, so garbage collection may close it
                weakref.finalize(self, self._connection.close)
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

    def now(self) -> float:
        """Return the current time in seconds since 1970."""
        return self._clock.now().timestamp()

    def close(self) -> None:
        """Finish pending jobs and close the database. Closing it twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
                if self._connection is not None:
                    self._connection.close()
        if self._thread is not None:
            self._thread.join()

    async def transact(self, work: Work[T], *, synced: bool = True) -> T:
        """Run `work` in a transaction and return its value once the transaction is recorded."""
        if self._connection is not None:
            return self._run_inline(self._connection, _Job(work, synced=synced))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(_Job(work, lambda job: loop.call_soon_threadsafe(_deliver, future, job), synced))
        return await future

    def transact_now(self, work: Work[T]) -> T:
        """Run `work` in a transaction synchronously, from any thread.

        Returns its value once the transaction is recorded.
        """
        job = _Job(work)
        if self._connection is not None:
            return self._run_inline(self._connection, job)
        self._put(job)
        job.done.wait()
        return job.result()

    async def select(self, query: str, *values: object) -> list[Any]:
        """Return the rows that a query finds."""
        return await self.transact(lambda connection: connection.execute(query, values).fetchall())

    def _run_inline(self, connection: sqlite3.Connection, job: _Job[T]) -> T:
        with self._lock:
            self._check_open()
            self._run(connection, job)
        return job.result()

    def _put(self, job: _Job[Any]) -> None:
        with self._lock:
            self._check_open()
            self._jobs.put(job)

    def _check_open(self) -> None:
        if self._closed:
            raise JournalError(self.path, "it is closed", "Open it again.")

    def _write(self, opened: _Job[None], new_id: str) -> None:
        try:
            connection = self._open(new_id)
        except BaseException as error:  # raised again in the thread that opens the journal
            opened.error = error
            return
        finally:
            opened.done.set()
        while (job := self._jobs.get()) is not None:
            self._run(connection, job)
        connection.close()

    def _open(self, new_id: str) -> sqlite3.Connection:
        if "\0" in self.path:
            raise JournalError(self.path, "its path contains a zero byte", "Pass a path without one.")
        try:
            if self.path != MEMORY:
                create_private_file(self.path)
            connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                # OFF survives the end of the process, since the system has the data; FULL also survives a power cut.
                connection.execute(f"PRAGMA synchronous = {'FULL' if self._synced else 'OFF'}")
                self.id, self.key = _prepare(connection, self.path, new_id, self._find_key)
                self.chains = Chains(self.id, self.path, self.key)
                if self.path != MEMORY:
                    check_private_files(self.path)
            except BaseException:
                connection.close()
                raise
        except (sqlite3.Error, OSError) as error:
            raise JournalError(
                self.path, f"it can't be opened: {error}", "Pass the path of a journal or of a new file."
            ) from error
        return connection

    def _run(self, connection: sqlite3.Connection, job: _Job[Any]) -> None:
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
                if connection.in_transaction:  # SQLite rolls back by itself if the disk is full
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            job.error = JournalError(
                self.path, f"it can't be written: {error}", "Check the disk and try again."
            )
        except BaseException as error:
            job.error = error
        if moments is not None:
            moments("after", connection)
        job.finish()


class _Job(Generic[T]):
    """One piece of work, and its value or error."""

    __slots__ = ("_report", "done", "error", "synced", "value", "work")

    def __init__(
        self, work: Work[T], report: Callable[[_Job[T]], object] | None = None, synced: bool = True
    ) -> None:
        self.work = work
        self.synced = synced
        self._report = report
        self.done = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        self.done.set()
        if self._report is not None:
            try:
                self._report(self)
            except RuntimeError:  # the caller's loop has ended; the record stays
                return

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # pyright: ignore[reportReturnType]  # set where there is no error


def _deliver(future: asyncio.Future[T], job: _Job[T]) -> None:
    if future.done():
        return
    if job.error is not None:
        future.set_exception(job.error)
    else:
        future.set_result(job.result())


def _prepare(
    connection: sqlite3.Connection, path: str, new_id: str, find_key: Callable[[bool], bytes]
) -> tuple[str, bytes]:
    """Create the tables in an empty database, and return the journal's id and key."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        is_new = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if is_new:
            for table in _TABLES:
                connection.execute(table)
            key = find_key(True)
            about = (("id", new_id), ("schema", str(SCHEMA)), ("key", key_check(key, new_id)))
            connection.executemany("INSERT INTO about VALUES (?, ?)", about)
        else:
            _check_schema(connection, path)
            key = find_key(False)
        about = dict(connection.execute("SELECT key, value FROM about").fetchall())
        id = str(about.get("id"))
        if about.get("key") != key_check(key, id):
            raise JournalError(
                path, "its records were not written with this key", "Restore the original key."
            )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return id, key


def _random_key(is_new: bool) -> bytes:
    return new_key()


def _check_schema(connection: sqlite3.Connection, path: str) -> None:
    try:
        row = connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
    except sqlite3.OperationalError:
        row = None
    if row is None or not str(row[0]).isdecimal():
        raise JournalError(
            path, "this is a database, but not a journal", "Pass the path of a journal or of a new file."
        )
    if int(row[0]) != SCHEMA:
        raise JournalError(
            path,
            f"its schema has version {row[0]}, but this version of Handrail uses {SCHEMA}",
            "Use the version of Handrail that wrote it, or a new file.",
        )
