"""A journal's database in PostgreSQL: its transactions, and the connection, which is replaced if it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg
from psycopg import errors

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.cancellation import Pending
from handrail.errors import HandrailError, JournalError
from handrail.journal.chains import NewRecord
from handrail.journal.connection import Connection
from handrail.journal.database import Database, Job, Moments, Work, deliver, unreadable
from handrail.journal.digest import key_check
from handrail.journal.postgres.address import Address
from handrail.journal.postgres.chains import FencedRecord, PostgresChains
from handrail.journal.postgres.leases import DatabaseLeases
from handrail.journal.postgres.schema import create_tables
from handrail.journal.postgres.sender import Addition, Sender
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.schema import VERSION

_CONFLICTS = (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation)
"""Errors of a transaction that lost a race with another. The loser is run again, and then sees the other's changes."""
_LEAST_PATIENCE = 10.0
"""Seconds after which the server ends a transaction that waits for this process, if the lease is not longer.

A host that is cut off or loses power can't end its transactions. Their locks would keep its runs from all other processes.
"""
_LOCK_SECONDS = 10
"""Seconds to wait for a lock while a journal is opened. Any role of the database can take advisory locks, and keep them."""
_MOST_TRIES = 100
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ"
_NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_SAMPLES = 3
_UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)


class PostgresDatabase(Database):
    """Runs jobs on a PostgreSQL database, one after another, each in its own transaction or as a single statement.

    A transaction sees one state of the database. If it conflicts with another process's transaction, it is run again.
    If the connection is lost, the job is run again on a new connection, unless its transaction was already committed. A job
    that is a single statement is run again in any case.
    """

    def __init__(
        self,
        address: Address,
        *,
        clock: Clock,
        new_id: str,
        find_key: Callable[[bool], bytes],
        lease: float,
        inline: bool = False,
        moments: Moments | None = None,
    ) -> None:
        self._address = address
        self._lease = lease
        self._offset = 0.0
        """The database's clock minus this process's monotonic clock, in microseconds."""
        self._error = 0.0
        """Upper bound on the error in `_offset`, in microseconds."""
        self._is_simulated = clock is not SYSTEM_CLOCK
        self._sender: Sender | None = None
        """Sends records from the event loop; None if only the journal's thread or, with `inline`, the caller's can add them."""
        self._sends = os.name == "posix" and not inline and moments is None
        self.channel = ""
        """The name of the channel on which processes tell each other what happened."""
        super().__init__(
            address.shown, clock=clock, new_id=new_id, find_key=find_key, inline=inline, moments=moments
        )

    def now(self) -> float:
        """Return the time of the database, or of the simulated clock, in seconds since 1970."""
        return super().now() if self._is_simulated else self._micros() / 1e6

    def _micros(self) -> int:
        return int(SYSTEM_CLOCK.monotonic() * 1e6 + self._offset)

    def is_intact(self, connection: Connection) -> bool:
        return True

    def note_damage(self) -> None:
        """Do nothing: lists always rely on the database's indexes."""

    async def add(self, run_id: str, record: NewRecord, *, is_recorded: bool = False) -> None:
        fenced = _fenced(record, (self.owner,) if is_recorded else (self.owner, ""))
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._send(fenced, lambda job: deliver(future, job)):
            is_added = await future
        else:
            is_added = await self.transact(self._adding(fenced), single=True)
        if not is_added:
            await super().add(run_id, record, is_recorded=is_recorded)

    def add_soon(self, run_id: str, record: NewRecord) -> Pending[bool] | None:
        fenced = _fenced(record, (self.owner, ""))
        pending: Pending[bool] = Pending()
        if self._send(fenced, lambda job: pending.settle(job.value, job.error)):
            return pending
        return self._begin(self._adding(fenced), single=True)

    def _adding(self, fenced: FencedRecord) -> Work[bool]:
        """Return the work that adds a record by one statement."""

        def add(connection: Connection) -> bool:
            assert isinstance(connection, PostgresConnection)
            if self._sender is not None:
                self._sender.prepare()
            return self._own_chains.append_fenced(connection, fenced)

        return add

    def _send(self, fenced: FencedRecord, deliver: Callable[[Job[bool]], object]) -> bool:
        """Begin to add a record from the event loop, and call `deliver` in the loop when that is over.

        Returns False if only the thread can add it.
        """
        if self._sender is None:
            return False
        loop = asyncio.get_running_loop()
        job = Job(self._adding(fenced), lambda job: loop.call_soon_threadsafe(deliver, job), single=True)
        with self._lock:
            return self._sender.begin(Addition(fenced, job, loop, deliver))

    def _is_idle(self) -> bool:
        return not self._waiting and not self._closed

    def _wake(self) -> None:
        """Give the thread an empty job, unless the database is closed. The caller must hold the lock."""
        if not self._closed:
            self._waiting += 1
            self._jobs.put(Job(lambda connection: None, single=True))

    def _run(self, connection: Connection, job: Job[Any]) -> None:
        if self._sender is not None:
            self._sender.finish()
        super()._run(connection, job)

    def _open(self, new_id: str) -> PostgresConnection:
        self.leases = self._own_leases = DatabaseLeases(
            self.owner, self._lease, self._clock, lambda: self._own_chains, is_simulated=self._is_simulated
        )
        connection = PostgresConnection(self.connect())
        try:
            self._prepare(connection, new_id)
            self._measure(connection)
        except psycopg.Error as error:
            connection.close()
            raise self._failure("it can't be opened", error) from None
        except BaseException:
            connection.close()
            raise
        if self._sends:
            self._sender = Sender(
                connection,
                self._own_chains,
                self._lock,
                is_idle=self._is_idle,
                wake=self._wake,
                run=lambda job: self._execute(connection, job),
            )
        return connection

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection to the server. Raises `JournalError` if that fails."""
        try:
            return self._connect()
        except psycopg.Error as error:
            raise self._failure("it can't be opened", error) from None

    def _connect(self) -> psycopg.Connection[Any]:
        # If the server does not answer for this long, the connection counts as lost.
        seconds = max(2, int(self._lease / 3))
        raw = psycopg.connect(
            self._address.conninfo,
            autocommit=True,
            connect_timeout=seconds,
            application_name="handrail",
            keepalives_idle=seconds,
            keepalives_interval=max(1, seconds // 3),
            keepalives_count=2,
            tcp_user_timeout=seconds * 1000,
        )
        try:
            raw.execute(f'SET search_path = "{self._address.schema}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
            patience = int(1000 * max(self._lease, _LEAST_PATIENCE))
            raw.execute(f"SET idle_in_transaction_session_timeout = {patience}")  # pyright: ignore[reportArgumentType, reportCallIssue]  # a number
        except BaseException:
            raw.close()
            raise
        return raw

    def _prepare(self, connection: PostgresConnection, new_id: str) -> None:
        """Create the tables in an empty schema, or check existing ones, and find the journal's id and key.

        Raises `JournalError` if `create_tables` or `find_key` raises it, or if the journal was created with a different key.
        """
        connection.raw.execute("BEGIN")
        try:
            connection.raw.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")  # pyright: ignore[reportArgumentType, reportCallIssue]  # a number
            if create_tables(connection, self.path, self._address.schema):
                key = self._find_key(True)
                about = (("id", new_id), ("schema", str(VERSION)), ("key", key_check(key, new_id)))
                for each in about:
                    connection.execute("INSERT INTO about VALUES (?, ?)", each)
            else:
                key = self._find_key(False)
            stored: dict[str, str] = dict(connection.execute("SELECT key, value FROM about").fetchall())
            self.id, self.key = str(stored.get("id")), key
            if stored.get("key") != key_check(key, self.id):
                raise JournalError(
                    self.path,
                    "its records were not written with this key",
                    "Use the key with which it was created: in HANDRAIL_KEY, or in the file that `key_file` or HANDRAIL_KEY_FILE names.",
                )
            connection.raw.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise
        digest = hashlib.sha256(f"{self._address.schema} {self.id}".encode()).hexdigest()
        self.channel = f"handrail_{digest[:32]}"
        self.chains = self._own_chains = PostgresChains(
            self.id, self.path, self.key, self.channel, self._micros
        )

    def _measure(self, connection: PostgresConnection) -> None:
        """Measure the database's clock against this process's monotonic clock. Keeps the best measurement so far."""
        for _ in range(_SAMPLES):
            before = SYSTEM_CLOCK.monotonic() * 1e6
            (there,) = connection.execute(_NOW).fetchone()
            after = SYSTEM_CLOCK.monotonic() * 1e6
            if not self._offset or after - before < self._error:
                self._error = after - before
                self._offset = there - (before + after) / 2

    def _execute(self, connection: Connection, job: Job[Any]) -> None:
        assert isinstance(connection, PostgresConnection)
        try:
            job.value = self._until_done(connection, job)
        except psycopg.Error as error:
            job.error = self._failure("it can't be used", error)
        except _UNREADABLE as error:
            job.error = error
            if not isinstance(error, HandrailError):
                job.error = unreadable(self.path, error, "Restore it from a backup.")
                job.error.__cause__ = error
        except BaseException as error:
            job.error = error

    def _until_done(self, connection: PostgresConnection, job: Job[Any]) -> Any:
        """Run a job, and run it again after a conflict or a lost connection, until it is done or has failed."""
        tries, commit = 0, None
        while True:
            try:
                if job.single:
                    return job.work(connection)
                if commit is not None and commit.number and self._is_committed(connection, commit.number):
                    return commit.value
                commit = _Commit()
                return self._in_transaction(connection, job, commit)
            except _CONFLICTS:
                tries += 1
                if tries >= _MOST_TRIES:
                    raise
                time.sleep(min(0.001 * tries, 0.05))
            except psycopg.OperationalError as error:
                if not connection.raw.closed:
                    raise
                self._reconnect(connection, error)

    def _in_transaction(self, connection: PostgresConnection, job: Job[Any], commit: _Commit) -> Any:
        raw, changes = connection.raw, connection.total_changes
        raw.execute(_BEGIN)
        try:
            value = job.work(connection)
            if connection.total_changes > changes:  # to know later if it was committed
                (number,) = connection.execute("SELECT pg_current_xact_id_if_assigned()::text").fetchone()
                commit.number, commit.value = number or "", value
            raw.execute("COMMIT")
            return value
        except BaseException:
            _roll_back(connection)
            raise

    def _is_committed(self, connection: PostgresConnection, number: str) -> bool:
        """Wait for the end of a transaction whose connection was lost, and return whether it was committed."""
        while True:
            (status,) = connection.execute("SELECT pg_xact_status(?::xid8)", (number,)).fetchone()
            if status != "in progress":
                return status == "committed"
            time.sleep(0.02)

    def _reconnect(self, connection: PostgresConnection, lost: psycopg.Error) -> None:
        """Replace a lost connection. Tries at least once, and as long as this process's lease lasts, then raises `lost`."""
        until = SYSTEM_CLOCK.monotonic() + min(self._own_leases.left(), self._lease)
        pause = 0.02
        while True:
            with contextlib.suppress(psycopg.Error):
                connection.raw = self._connect()
                self._measure(connection)
                return
            if SYSTEM_CLOCK.monotonic() + pause >= until:
                raise lost
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _close(self, connection: Connection) -> None:
        if self._sender is not None:
            self._sender.close()
        with contextlib.suppress(psycopg.Error):
            self._own_leases.end(connection)
        super()._close(connection)

    def _failure(self, what: str, error: psycopg.Error) -> JournalError:
        """Return the error for what PostgreSQL or its driver reports, in one line and without the password."""
        said = error.diag.message_primary or str(error)
        lines = (
            self._address.without_secret(said).strip().splitlines()
        )  # the first line is the error, and the others give advice
        line = lines[0].strip().rstrip(".") if lines else type(error).__name__
        is_lost = isinstance(error, psycopg.OperationalError)
        return JournalError(self.path, f"{what}: {line}", _hint(error, line), is_lost=is_lost)


class _Commit:
    """The number and the result of a transaction that was about to be committed."""

    def __init__(self) -> None:
        self.number = ""
        self.value: Any = None


def _fenced(record: NewRecord, owners: tuple[str, ...]) -> FencedRecord:
    return FencedRecord(*msgspec.structs.astuple(record), owners=owners)


def _roll_back(connection: PostgresConnection) -> None:
    connection.prepared = None  # after a rollback, the driver may remove all prepared statements
    if not connection.raw.closed:
        with contextlib.suppress(psycopg.Error):
            connection.raw.execute("ROLLBACK")


def _hint(error: psycopg.Error, line: str) -> str:
    if isinstance(error, errors.InsufficientPrivilege):
        return "Give this user the rights on the schema, or create the journal as its owner."
    if isinstance(error, errors.LockNotAvailable):
        return "Another session holds a lock on it: find it in pg_locks, end it with pg_terminate_backend, and try again."
    if isinstance(error, psycopg.OperationalError):
        if "password" in line:
            return "Set PGPASSWORD or ~/.pgpass to the user's password."
        return "Check the URL, and that the server is running and reachable from this machine."
    return "Check the database and try again."
