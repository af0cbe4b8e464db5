"""A journal's database: the connection on which this process writes, and its transactions."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import wraps
from queue import SimpleQueue
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

import msgspec

from handrail.clock import Clock
from handrail.concurrency.cancellation import Pending
from handrail.errors import DefinitionError, HandrailError, JournalError
from handrail.journal.digest import key_check
from handrail.journal.sql.connection import Connection
from handrail.journal.sql.leases import Leases, check_not_taken, check_owner, new_owner
from handrail.journal.sql.schema import OLDEST, VERSION
from handrail.schema.problems import to_plain

if TYPE_CHECKING:
    from handrail.journal.sql.chains import Chains, NewRecord
    from handrail.journal.sql.upkeep import Eraser

T = TypeVar("T")


Work = Callable[[Connection], T]
Moments = Callable[[Literal["before", "after"], Any], None]
"""A function that is called before each transaction, and again after it, before the caller gets the outcome."""

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

    The jobs run in a separate thread or, with `inline`, in the caller's thread, for databases in memory and for
    simulations, which need a single order of events. `moments` lets a simulation end the process before or after a
    transaction. `find_key` returns the key of the records' MACs, given whether the journal is new. Raises `JournalError`
    if the database can't be opened.
    """

    chains: Chains
    leases: Leases
    watches = True
    """Whether this process looks for what other processes have changed."""
    erasers: Sequence[tuple[str, Eraser | None]] = ()
    """What deletes a person's rows in tables that only this kind of database has, as `handrail.journal.sql.upkeep.ERASERS` says."""
    checks_indexes = False
    """Whether indexes may disagree with their tables, so that they are checked before they are relied on."""

    def __init__(
        self,
        path: str,
        *,
        clock: Clock,
        new_id: str,
        find_key: Callable[[bool], bytes],
        inline: bool = False,
        moments: Moments | None = None,
    ) -> None:
        self.path = path
        self.id = ""
        self.key = b""
        self._find_key = find_key
        self.owner = new_owner()
        """The name under which this process owns runs."""
        self._clock = clock
        self._moments = moments
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
        self._connection: Connection | None = None
        """The connection if all jobs run in the caller's thread; otherwise None."""
        self._shared: Connection | None = None
        """The thread's connection if brief writes may run in the caller's thread; otherwise None."""
        self._thread: threading.Thread | None = None
        if inline:
            self._connection = self._open(new_id)
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

    def _open(self, new_id: str) -> Connection:
        """Open the connection, with `chains` and `leases`. A new journal gets this id."""
        raise NotImplementedError

    def _execute(self, connection: Connection, job: Job[T]) -> T:
        """Run a job in a transaction, and return its value."""
        raise NotImplementedError

    def _failure(self, connection: Connection, error: BaseException) -> BaseException:
        """Return the error to report for one that a job has raised."""
        raise NotImplementedError

    def _unreadable(self, connection: Connection, error: Exception) -> JournalError:
        """Return the error to report for an exception that suggests a damaged value."""
        raise NotImplementedError

    def is_intact(self, connection: Connection, *tables: str) -> bool:
        """Return whether these tables agree with their indexes, which lists and counts rely on."""
        return True

    def note_damage(self) -> None:
        """Note that a row is damaged, so that lists no longer rely on indexes."""

    def _can_begin(self, shared: Connection) -> bool:
        """Begin a transaction on the thread's connection, unless that would block. Returns whether it has begun."""
        raise NotImplementedError

    def now(self) -> float:
        """Return the current time in seconds since 1970."""
        return self._clock.now().timestamp()

    def changes(self) -> int | None:
        """Return a number that changes whenever another process has changed the database; None if it can't be told cheaply."""
        return None

    async def wait(self, seconds: float) -> None:
        """Wait until the database may have changed, but at most this many seconds."""
        raise NotImplementedError

    def subscribe(self, noticed: Callable[[str, str], None]) -> None:
        """Call a function, in any thread, with the kind and the id of what other processes have changed, if they send notices."""

    async def listen(self) -> None:
        """Begin to receive notices from other processes, if they send any."""

    async def compact(self) -> bool:
        """Rewrite the file without what was deleted, as `Upkeep.compact` does. A database does that on its own."""
        return True

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
            if self._waiting or self._closed or (shared is not None and not self._can_begin(shared)):
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
        except BaseException as error:  # raised again in the thread that opens the journal
            opened.error = error
            return
        finally:
            opened.finish()
        while (job := self._jobs.get()) is not None:
            self._run_queued(connection, job)
            with self._lock:
                self._waiting -= 1
            job.finish()
        self._close(connection)

    def _run_queued(self, connection: Connection, job: Job[Any]) -> None:
        """Run a job in the journal's thread."""
        self._run(connection, job)

    def _close(self, connection: Connection) -> None:
        connection.close()

    def _run(self, connection: Connection, job: Job[Any]) -> None:
        """Run a job, and note its value or error."""
        moments = self._moments
        if moments is not None:
            moments("before", connection)
        try:
            job.value = self._execute(connection, job)
        except UNREADABLE as error:
            job.error = error
            if not isinstance(error, HandrailError):
                job.error = self._unreadable(connection, error)
                job.error.__cause__ = error
        except BaseException as error:
            job.error = self._failure(connection, error)
        if moments is not None:
            moments("after", connection)

    def _identify(self, connection: Connection, new_id: str, is_new: bool, advice: str) -> None:
        """Find the journal's id and key, or give them to a new journal.

        Raises `JournalError` if `find_key` raises it or, with this advice, if the journal was created with a different key.
        """
        self.key = key = self._find_key(is_new)
        if is_new:
            versions = ("schema", str(VERSION)), ("oldest", str(OLDEST))
            for each in (("id", new_id), *versions, ("key", key_check(key, new_id))):
                connection.execute("INSERT INTO about VALUES (?, ?)", each)
        about = dict(connection.execute("SELECT key, value FROM about").fetchall())
        self.id = str(about.get("id"))
        if about.get("key") != key_check(key, self.id):
            raise JournalError(self.path, "its records were not written with this key", advice)


UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)
"""Exceptions that are taken as a sign of a value of the wrong kind in the database, such as text that is not UTF-8."""


P = ParamSpec("P")
R = TypeVar("R", bound="Role")


class Role:
    """A role of a journal, in its database."""

    log = logging.getLogger("handrail.journal")

    def __init__(self, database: Database) -> None:
        self._database = database
        self._chains = database.chains
        self._logged: set[str] = set()

    def _log_once(self, key: str, text: str, *values: object) -> None:
        """Log an error about what was altered, unless this role has logged one with this key."""
        if key not in self._logged:
            self._logged.add(key)
            self.log.error(text, *values)


def transaction(
    work: Callable[Concatenate[R, Connection, P], T],
) -> Callable[Concatenate[R, P], CoroutineType[Any, Any, T]]:
    """Make a method of a role a coroutine function, which runs the method in a transaction, in the journal's thread."""

    @wraps(work)
    async def transact(self: R, *args: P.args, **named: P.kwargs) -> T:
        return await self._database.transact(lambda connection: work(self, connection, *args, **named))  # pyright: ignore[reportPrivateUsage]  # it is this module's own class

    return transact


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


def deliver(future: asyncio.Future[T] | Future[T], job: Job[T]) -> None:
    """Set a future to the outcome of a job, unless its task was cancelled."""
    if future.done():
        return
    if job.error is not None:
        future.set_exception(job.error)
    else:
        future.set_result(job.result())


def _after_fork() -> None:
    for database in list(_threaded):
        database._leave_to_parent()  # pyright: ignore[reportPrivateUsage]  # it is this module's own class


os.register_at_fork(after_in_child=_after_fork)
