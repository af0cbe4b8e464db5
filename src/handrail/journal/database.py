"""A journal's database: the connection on which this process writes, and its transactions."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar, cast

import msgspec

from handrail.clock import Clock
from handrail.concurrency.cancellation import Pending
from handrail.errors import DefinitionError, HandrailError, JournalError
from handrail.journal.chains import Chains, NewRecord, is_damage
from handrail.journal.connection import Connection
from handrail.journal.digest import key_check, new_key
from handrail.journal.lease import HostLeases, Leases, check_not_taken, check_owner, new_owner
from handrail.journal.location import check_private_files, check_surroundings, create_private_file
from handrail.journal.log_file import OpenFile, check_log
from handrail.journal.schema import (
    APPLICATION_ID,
    VERSION,
    are_intact,
    create_tables,
    distrust_schema,
    find_alteration,
    is_blank,
)
from handrail.schema.problems import to_plain

T = TypeVar("T")

Work = Callable[[Connection], T]
Moments = Callable[[Literal["before", "after"], Any], None]
"""A function that is called before each transaction, and again after it, before the caller gets the outcome."""

MEMORY = ":memory:"
_BUSY_SECONDS = 10.0
_WAIT_FOR_OTHERS = f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}"
_DO_NOT_WAIT = "PRAGMA busy_timeout = 0"


_threaded: weakref.WeakSet[Database] = weakref.WeakSet()
"""The open databases whose jobs run in a thread of their own."""


_encode = msgspec.msgpack.Encoder(enc_hook=to_plain).encode


def encode(value: object, what: str, *names: str) -> bytes:
    """Encode a value as plain data.

    Raises `DefinitionError` if that is not possible. Its message begins with `what`, formatted with `names` if there are any.
    """
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        whose = what.format(*names) if names else what
        raise DefinitionError(
            f"{whose} a value that can't be recorded: {error}. Use plain data, a dataclass or a model."
        ) from error


class Database:
    """Runs jobs on the database one after another, each in its own transaction.

    The jobs run in a separate thread. Only `add_now` runs a brief write in the caller's thread, if it can't block and
    writes are not synced. With `inline`, all jobs run in the caller's thread, for databases in memory and for
    simulations, which need a single order of events. `moments` lets a simulation end the process before or after a
    transaction. `find_key` returns the key of the records' MACs, given whether the journal is new. Raises `JournalError`
    if the database can't be opened.
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
        self.leases: Leases = HostLeases(self.owner)
        self._clock = clock
        self._moments = moments
        self._synced = synced
        self._syncs = synced
        """Whether the connection syncs at the moment."""
        self._closed = False
        self._was_forked = False
        """Whether this is a copy in a child process, in which the thread does not run."""
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._waiting = 0
        """How many jobs have been added and have not ended. While there are none, the thread does not use its connection."""
        self._lock = threading.Lock()
        """Held while a job is added, while a job runs in the caller's thread, and while the thread is told to end.

        So no job is added after the thread was told to end.
        """
        self._file: OpenFile | None = None
        self._is_blank = False
        """Whether the file was empty when this process opened it, so that this is a new journal."""
        self._intact: bool | None = None
        """Whether the tables of runs and questions agree with their indexes; None until they have been checked."""
        self._connection: Connection | None = None
        """The connection if all jobs run in the caller's thread; otherwise None."""
        self._shared: sqlite3.Connection | None = None
        """The thread's connection if brief writes may run in the caller's thread; otherwise None."""
        self._thread: threading.Thread | None = None
        if inline:
            self._connection = self._open(new_id)
            if path == MEMORY:  # no other process can open it, so garbage collection may close it
                weakref.finalize(self, self._connection.close)
            return
        is_open = threading.Event()
        opened = Job(lambda connection: None, lambda job: is_open.set())
        self._thread = threading.Thread(
            target=self._write, args=(opened, new_id), name="handrail-journal", daemon=True
        )
        self._thread.start()
        _threaded.add(self)
        is_open.wait()
        if opened.error is not None:
            self._closed = True
            raise opened.error

    def now(self) -> float:
        """Return the current time in seconds since 1970."""
        return self._clock.now().timestamp()

    @property
    def changes(self) -> int:
        """How many rows this process has changed; 0 unless all jobs run in the caller's thread."""
        return 0 if self._connection is None else self._connection.total_changes

    def close(self) -> None:
        """Finish pending jobs and close the database. Closing it twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
                if self._connection is not None:
                    self._close(self._connection)
        if self._thread is not None:
            self._thread.join()

    async def transact(self, work: Work[T], *, synced: bool = True, single: bool = False) -> T:
        """Run `work` in a transaction and return its value once the transaction is committed.

        If `work` raises, the transaction is rolled back, and this raises the error. An error of the database is raised as a
        `JournalError`, and so is an exception that suggests a damaged value, such as a `ValueError`. Also raises
        `JournalError` if the database is closed. Without `synced`, the commit may be lost in a power cut. `single` says that
        at most one statement of `work` writes.
        """
        if self._connection is not None:
            return self._run_inline(self._connection, Job(work, synced=synced, single=single))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(Job(work, lambda job: loop.call_soon_threadsafe(deliver, future, job), synced, single))
        return await future

    def transact_now(self, work: Work[T]) -> T:
        """Run `work` as `transact` does, but synchronously, from any thread."""
        if self._connection is not None:
            return self._run_inline(self._connection, Job(work))
        return self.begin(work).result()

    def begin(self, work: Work[T]) -> Future[T]:
        """Begin to run `work` as `transact` does, from any thread, and return the future of its value."""
        future: Future[T] = Future()
        if self._connection is not None:
            future.set_result(self._run_inline(self._connection, Job(work)))
        else:
            self._put(Job(work, lambda job: deliver(future, job)))
        return future

    async def add(self, run_id: str, record: NewRecord, *, is_recorded: bool = False) -> None:
        """Add a record to the chain of a run that this process owns.

        Raises `RunBusy` if the run is recorded and this process does not own it. If the run is not recorded, the record
        is added, unless `is_recorded` is true. Then `RunUnknown` is raised.
        """
        await self.transact(lambda connection: self._add(connection, run_id, record, is_recorded))

    def _add(self, connection: Connection, run_id: str, record: NewRecord, is_recorded: bool = False) -> bool:
        owner = self.owner
        if not self.chains.append_own(connection, record, (run_id, "" if is_recorded else owner, owner)):
            (check_owner if is_recorded else check_not_taken)(connection, owner, run_id)
            self.chains.append_record(connection, record)
        return True

    @property
    def adds_now(self) -> bool:
        """Whether `add_now` may succeed."""
        return self._connection is not None or self._shared is not None

    def add_now(self, run_id: str, record: NewRecord) -> bool:
        """Add a record as `add` does, in the caller's thread, if this can't block or all jobs run there.

        Returns False if nothing was added and `add` must be awaited instead.
        """
        shared = self._shared
        connection = self._connection or shared
        if connection is None or not self._lock.acquire(blocking=False):
            return False
        job = Job(lambda connection: self._add(connection, run_id, record))
        try:
            if self._waiting or self._closed or (shared is not None and not _begins(shared)):
                return False
            self._run(connection, job)
        finally:
            self._lock.release()
        if job.error is not None:
            raise job.error
        return True

    def add_soon(self, run_id: str, record: NewRecord) -> Pending[bool] | None:
        """Begin to add a record as `add` does, in the journal's thread. Returns None if all jobs run in the caller's thread.

        The pending value is True once the record is added, and False if nothing was added and `add` must be awaited instead.
        """
        return self._begin(lambda connection: self._add(connection, run_id, record))

    def _begin(self, work: Work[bool], *, single: bool = False) -> Pending[bool] | None:
        if self._connection is not None:
            return None
        loop, pending = asyncio.get_running_loop(), Pending[bool]()

        def report(job: Job[bool]) -> None:
            loop.call_soon_threadsafe(pending.settle, job.value, job.error)

        self._put(Job(work, report, single=single))
        return pending

    async def select(self, query: str, *values: object) -> list[Any]:
        """Return the rows that a query finds."""
        return await self.transact(lambda connection: connection.execute(query, values).fetchall())

    def is_intact(self, connection: Connection) -> bool:
        """Return whether the runs and questions agree with their indexes, which lists rely on. This is checked only once."""
        if self._intact is None:
            self._intact = self.path == MEMORY or are_intact(
                cast(sqlite3.Connection, connection), "runs", "questions"
            )
        return self._intact

    def note_damage(self) -> None:
        """Note that a row is damaged, so that lists no longer rely on indexes."""
        self._intact = False

    def _run_inline(self, connection: Connection, job: Job[T]) -> T:
        with self._lock:
            self._check_open()
            self._run(connection, job)
        return job.result()

    def _put(self, job: Job[Any]) -> None:
        with self._lock:
            self._check_open()
            self._waiting += 1
            self._jobs.put(job)

    def _check_open(self) -> None:
        if self._was_forked:
            raise JournalError(
                self.path,
                "it was opened before this process was forked from another one",
                "Open it again in this process.",
            )
        if self._closed:
            raise JournalError(self.path, "it is closed", "Open it again.")

    def _leave_to_parent(self) -> None:
        """Make the copy of this database in a child process unusable: its thread exists only in the parent."""
        self._lock = threading.Lock()  # a thread of the parent may hold the other one
        self._thread, self._closed, self._was_forked = None, True, True

    def _write(self, opened: Job[None], new_id: str) -> None:
        try:
            connection = self._open(new_id)
            if not self._synced and isinstance(connection, sqlite3.Connection):
                connection.execute(_DO_NOT_WAIT)
                self._shared = connection
        except BaseException as error:  # raised again in the thread that opens the journal
            opened.error = error
            return
        finally:
            opened.finish()
        while (job := self._jobs.get()) is not None:
            if self._shared is not None:
                self._shared.execute(_WAIT_FOR_OTHERS)
            self._run(connection, job)
            if self._shared is not None:
                self._shared.execute(_DO_NOT_WAIT)
            with self._lock:
                self._waiting -= 1
            job.finish()
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        connection.close()
        if self._file is not None:
            self._file.close()

    def _examine(self) -> None:
        """Look at the file before SQLite does. Raises `JournalError` if SQLite must not open it."""
        self._is_blank = is_blank(self.path)
        check_log(self.path)

    def _open(self, new_id: str) -> Connection:
        if "\0" in self.path:
            raise JournalError(self.path, "its path contains a null byte", "Pass a path without one.")
        try:
            if self.path != MEMORY:
                check_surroundings(self.path)
                create_private_file(self.path)
                self._file = OpenFile(self.path, self._examine)
                weakref.finalize(self, self._file.close)
            connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                if self.path != MEMORY:
                    distrust_schema(connection)
                if self._is_blank:
                    # This precedes the first change that may stay in the log, so that the file itself is marked as a journal.
                    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute("PRAGMA journal_mode = WAL")
                # With OFF, data survives the process, because the operating system has it; with FULL, it also survives a power cut.
                connection.execute(f"PRAGMA synchronous = {'FULL' if self._synced else 'OFF'}")
                self.id, self.key = _prepare(connection, self.path, new_id, self._find_key)
                self.chains = Chains(self.id, self.path, self.key)
                if self.path != MEMORY:
                    check_private_files(self.path)
            except BaseException:
                self._close(connection)
                raise
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, sqlite3.Error) and is_damage(error):
                raise unreadable(self.path, error) from error
            raise JournalError(
                self.path, f"it can't be opened: {error}", "Pass the path of a journal or of a new file."
            ) from error
        except _UNREADABLE as error:
            if isinstance(error, HandrailError):
                raise
            raise unreadable(self.path, error) from error
        return connection

    def _run(self, connection: Connection, job: Job[Any]) -> None:
        moments = self._moments
        if moments is not None:
            moments("before", connection)
        self._execute(connection, job)
        if moments is not None:
            moments("after", connection)

    def _execute(self, connection: Connection, job: Job[Any]) -> None:
        """Run a job in a transaction, and note its value or error."""
        assert isinstance(connection, sqlite3.Connection)
        try:
            if self._synced and self._syncs != job.synced:
                connection.execute(f"PRAGMA synchronous = {'FULL' if job.synced else 'OFF'}")
                self._syncs = job.synced
            if not connection.in_transaction:  # `add_now` may have begun it
                connection.execute("BEGIN IMMEDIATE")
            try:
                job.value = job.work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite rolls back on its own if the disk is full
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            job.error = find_alteration(connection, self.path) or (
                unreadable(self.path, error)
                if is_damage(error)
                else JournalError(
                    self.path,
                    f"it can't be read or written: {error}",
                    "Check the disk, and whether another program has locked the file. Then try again.",
                )
            )
        except _UNREADABLE as error:
            job.error = error
            if not isinstance(error, HandrailError):
                job.error = find_alteration(connection, self.path) or unreadable(self.path, error)
                job.error.__cause__ = error
        except BaseException as error:
            job.error = error


_UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)
"""Exceptions that are taken as a sign of a value of the wrong kind in the database, such as text that is not UTF-8."""


def unreadable(
    path: str,
    error: Exception,
    advice: str = "`handrail runs verify` lists what is damaged. Restore the file from a backup, or use a new one.",
) -> JournalError:
    """Return the error for a database that can't be read because it is damaged, or for text that it can't store."""
    if isinstance(error, UnicodeEncodeError):
        return JournalError(
            path,
            f"it can't store the text {ascii(error.object)[:80]}, which contains half a character (a lone surrogate)",
            "Correct how the text was decoded.",
        )
    return JournalError(path, f"it is damaged: {type(error).__name__}: {error}", advice)


class Job(Generic[T]):
    """One piece of work on the database, and its value or error."""

    __slots__ = ("_report", "error", "single", "synced", "value", "work")

    def __init__(
        self,
        work: Work[T],
        report: Callable[[Job[T]], object] | None = None,
        synced: bool = True,
        single: bool = False,
    ) -> None:
        self.work = work
        self.synced = synced
        self.single = single
        """Whether at most one statement of the work writes, so that the work needs no transaction around it."""
        self._report = report
        self.value: T | None = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        """Report that the work has ended."""
        if self._report is not None:
            try:
                self._report(self)
            except RuntimeError:  # the caller's loop is closed; the record stays
                return

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # pyright: ignore[reportReturnType]  # set where there is no error


def _begins(connection: sqlite3.Connection) -> bool:
    """Begin a transaction, unless another process is writing. Returns whether it has begun."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.Error:  # any other error occurs again in the thread
        return False
    return True


def deliver(future: asyncio.Future[T] | Future[T], job: Job[T]) -> None:
    """Set a future to the outcome of a job, unless its task was cancelled."""
    if future.done():
        return
    if job.error is not None:
        future.set_exception(job.error)
    else:
        future.set_result(job.result())


def _prepare(
    connection: sqlite3.Connection, path: str, new_id: str, find_key: Callable[[bool], bytes]
) -> tuple[str, bytes]:
    """Create the tables in an empty database, or check existing ones, and return the journal's id and key.

    Raises `JournalError` if `create_tables` or `find_key` raises it, or if the journal was created with a different key.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        if create_tables(connection, path):
            key = find_key(True)
            about = (("id", new_id), ("schema", str(VERSION)), ("key", key_check(key, new_id)))
            connection.executemany("INSERT INTO about VALUES (?, ?)", about)
        else:
            key = find_key(False)
        about = dict(connection.execute("SELECT key, value FROM about").fetchall())
        id = str(about.get("id"))
        if about.get("key") != key_check(key, id):
            raise JournalError(
                path,
                "its records were not written with this key",
                "Set HANDRAIL_KEY and HANDRAIL_KEY_FILE as they were when the journal was created. If both were unset, restore the key file.",
            )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return id, key


def _random_key(is_new: bool) -> bytes:
    return new_key()


def _after_fork() -> None:
    for database in list(_threaded):
        database._leave_to_parent()  # pyright: ignore[reportPrivateUsage]  # it is this module's own class


os.register_at_fork(after_in_child=_after_fork)
