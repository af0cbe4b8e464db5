"""A journal's database in PostgreSQL: its schema, its transactions, its leases, and the connection, which is replaced if it is lost.

Each process has one lease by the database's clock, in one row, for all the runs that it owns. A lease has a MAC, and is never
deleted while its process owns runs. A lease that was altered or removed counts as held, so whoever can write only to this table
can't have a live process's runs taken over, unless they restore an earlier row of its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import psycopg
from psycopg import errors

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.cancellation import Pending
from handrail.errors import JournalAltered, JournalError
from handrail.journal.postgres.address import Address
from handrail.journal.postgres.chains import FencedRecord, PostgresChains
from handrail.journal.postgres.notices import ACCOUNTS, SAID, WATCHED, Notices
from handrail.journal.postgres.pooler import check_pooler
from handrail.journal.postgres.sender import Addition, Sender
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.sql.chains import Chains, NewRecord
from handrail.journal.sql.connection import Connection, chunks, fetch, marks
from handrail.journal.sql.database import Database, Job, Moments, Work, deliver, unreadable
from handrail.journal.sql.leases import Leases
from handrail.journal.sql.run_rows import StoredRun
from handrail.journal.sql.schema import TABLES, check_version

if TYPE_CHECKING:
    from handrail.journal.sql.upkeep import Person

_TYPES = {
    # Text is ordered by code points, as in SQLite and in Python, whatever the locale of the database.
    r"\bTEXT\b": 'text COLLATE "C"',
    r"\bBLOB\b": "bytea",
    r"\bREAL\b": "double precision",
    r"\bINTEGER\b": "bigint",
    r"\bnumber bigint PRIMARY KEY\b": "number bigint NOT NULL",
    r"\) WITHOUT ROWID\b": ")",
}
_OWN = (
    # The owner of a run is repeated at the head of its chain, so that one statement adds a record and checks the owner.
    "ALTER TABLE chains ADD COLUMN owner text COLLATE \"C\" NOT NULL DEFAULT ''",
    # Likewise the number of the last record, which the next one must exceed.
    "ALTER TABLE chains ADD COLUMN number bigint NOT NULL",
    "ALTER TABLE chains SET (fillfactor = 60)",
    """CREATE TABLE leases (owner text COLLATE "C" PRIMARY KEY, leased_until double precision NOT NULL,
        mac bytea NOT NULL)""",
    """CREATE TABLE sign_ins (secret bytea PRIMARY KEY, id text COLLATE "C" NOT NULL, name text COLLATE "C" NOT NULL,
        ends_at double precision NOT NULL, body bytea NOT NULL, mac bytea NOT NULL)""",
    """CREATE TABLE audit (number bigint PRIMARY KEY, at double precision NOT NULL,
        who text COLLATE "C" NOT NULL, action text COLLATE "C" NOT NULL, address text COLLATE "C" NOT NULL,
        details text COLLATE "C" NOT NULL, mac bytea NOT NULL)""",
    "CREATE INDEX records_by_number ON records USING brin (number)",
    # PostgreSQL empties unlogged tables after a crash. Watchers register again, and broadcasts are not part of the record.
    """CREATE UNLOGGED TABLE watchers (id text COLLATE "C" PRIMARY KEY, session_id text COLLATE "C" NOT NULL,
        joins bigint NOT NULL, until double precision NOT NULL)""",
    """CREATE UNLOGGED TABLE broadcasts (position bigint NOT NULL, session_id text COLLATE "C" NOT NULL,
        run_id text COLLATE "C" NOT NULL, leg bigint NOT NULL, number bigint NOT NULL, at double precision NOT NULL,
        body bytea NOT NULL, mac bytea NOT NULL, PRIMARY KEY (session_id, position))""",
)
LOCK = "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('handrail'), pg_catalog.hashtext(?))"
_FOUND = """SELECT relname, relkind::text FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = ? AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')"""
_PLANTED = """SELECT tgname, 'trigger' FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
    JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = ? AND NOT tgisinternal
    UNION ALL SELECT rulename, 'rule' FROM pg_rules WHERE schemaname = ?
    UNION ALL SELECT policyname, 'policy' FROM pg_policies WHERE schemaname = ?
    UNION ALL SELECT proname, 'function' FROM pg_proc JOIN pg_namespace ON pg_namespace.oid = pronamespace WHERE nspname = ?
    UNION ALL SELECT oprname, 'operator' FROM pg_operator JOIN pg_namespace ON pg_namespace.oid = oprnamespace WHERE nspname = ?
    UNION ALL SELECT proname, 'function' FROM pg_proc JOIN pg_depend ON refclassid = 'pg_proc'::regclass AND refobjid = pg_proc.oid
    WHERE EXISTS (SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = ? AND (
        (classid = 'pg_class'::regclass AND objid = pg_class.oid)
        OR (classid = 'pg_attrdef'::regclass AND objid IN (SELECT oid FROM pg_attrdef WHERE adrelid = pg_class.oid))
        OR (classid = 'pg_constraint'::regclass AND objid IN (SELECT oid FROM pg_constraint WHERE conrelid = pg_class.oid))))"""
"""Finds everything in the schema that could run foreign code, and the functions elsewhere that its defaults, checks or indexes call."""


def statements() -> Iterator[str]:
    """Yield the statements that create the tables."""
    for each in TABLES:
        for pattern, type in _TYPES.items():
            each = re.sub(pattern, type, each)
        yield each
    yield from _OWN


def create_tables(connection: PostgresConnection, shown: str, schema: str) -> bool:
    """Create the tables in an empty schema and return True. If there are tables, check them and return False.

    Only an empty schema is locked, because several processes may open a new journal at once. Raises `JournalError` for a
    schema that is not a journal's, has a different version, lacks a table, or contains triggers or other code.
    """
    found = find_tables(connection, shown, schema)
    if not found:
        connection.execute(LOCK, (schema,))
        found = find_tables(connection, shown, schema)
    if not found:
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        for each in statements():
            connection.execute(each)
        return True
    wanted = {
        match[1] for each in statements() if (match := re.match(r"CREATE (?:UNLOGGED )?TABLE (\w+)", each))
    }
    check_version(connection, shown, find_version(connection, shown))
    for name in sorted(wanted):
        if found.get(name) != "r":
            raise altered(shown, f"the table {name!r} was {'changed' if name in found else 'removed'}")
    return False


def find_version(connection: PostgresConnection, shown: str) -> int:
    """Return the version of a journal's schema. Raises `JournalError` if it says none."""
    row = connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
    if row is None or not str(row[0]).isdecimal():
        raise altered(shown, "the version is missing")
    return int(row[0])


def find_tables(connection: PostgresConnection, shown: str, schema: str) -> dict[str, str]:
    """Return the kind of each table and similar in a schema. Raises `JournalError` if it is not a journal's, or contains code."""
    found: dict[str, str] = dict(connection.execute(_FOUND, (schema,)).fetchall())
    if found and (found.get("about") != "r" or found.get("records") != "r"):
        raise JournalError(
            shown,
            f"the schema {schema!r} of this database is not a journal",
            "Use an empty one: add ?schema=NAME to the URL.",
        )
    # This comes before any table is used, since even reading one could run foreign code.
    for name, kind in connection.execute(_PLANTED, (schema,) * 6).fetchall():
        raise altered(shown, f"the {kind} {name!r} was added")
    return found


def altered(shown: str, problem: str) -> JournalError:
    """Return the error for a schema that something else has altered."""
    return JournalError(
        shown,
        f"something other than Handrail has altered its schema: {problem}",
        "Nothing was read or written. Restore an unaltered copy, or use a new schema.",
    )


_TIME = "coalesce(CAST(? AS double precision), extract(epoch FROM clock_timestamp()))"
_RENEW = f"""INSERT INTO leases VALUES (?, {_TIME} + ?, '')
    ON CONFLICT (owner) DO UPDATE SET leased_until = excluded.leased_until RETURNING leased_until"""
_SEAL = "UPDATE leases SET mac = ? WHERE owner = ?"
_LOST = "SELECT DISTINCT owner FROM runs WHERE owner != '' AND owner NOT IN (SELECT owner FROM leases)"
_LONG_GONE = 3600.0

log = logging.getLogger("handrail.journal")


class DatabaseLeases(Leases):
    """The leases of the processes that share a database. Only the database's clock decides when a lease ends.

    With `is_simulated`, the given clock stands in for the database's. `find_chains` returns the chains of the open journal.
    """

    free = """(owner = '' OR NOT EXISTS (
        SELECT 1 FROM leases WHERE leases.owner = runs.owner AND leases.leased_until > :now
    ))"""

    def __init__(
        self,
        owner: str,
        seconds: float,
        clock: Clock,
        find_chains: Callable[[], Chains],
        *,
        is_simulated: bool,
    ) -> None:
        super().__init__(owner, seconds)
        self._clock = clock
        self._find_chains = find_chains
        self._is_simulated = is_simulated
        self.renewed: float | None = None
        """When this process last renewed its lease, by its own monotonic clock; None if it never took one."""

    def _now(self) -> float | None:
        """Return the simulated time of the database, or None to use the database's own clock."""
        return self._clock.now().timestamp() if self._is_simulated else None

    def until(self, connection: Connection, now: float) -> float:
        # Read before the statement, so that this process counts the lease as ended before the database does.
        began = self._clock.monotonic()
        # The database's clock decides, so the MAC follows in a second statement.
        row = connection.execute(_RENEW, (self._owner, self._now(), self.seconds)).fetchone()
        mac = self._find_chains().row_mac("leases", (self._owner, row[0]))
        connection.execute(_SEAL, (mac, self._owner))
        self.renewed = began
        return 0.0  # a run's row does not repeat the process's lease

    def renew(self, connection: Connection, chains: Chains, row: StoredRun, now: float) -> None:
        if self._is_simulated or self.renewed is None or self._left() < 0.8 * self.seconds:
            self.until(connection, now)

    def _left(self) -> float:
        return 0.0 if self.renewed is None else self.renewed + self.seconds - self._clock.monotonic()

    def is_lapsed(self) -> bool:
        return self.renewed is not None and self._left() <= 0

    def left(self) -> float:
        """Return how many more seconds this process certainly holds its lease; the full length if it never had one."""
        return self.seconds if self.renewed is None else self._left()

    def is_free(
        self, connection: Connection, owner: str, leased_until: float, now: float, me: str = ""
    ) -> bool:
        if not owner or owner == me:
            return True
        if leased_until:  # a claim on a ticket, which is not held by a process's lease
            return now >= leased_until
        return not self.is_at_work(connection, owner)

    def is_at_work(self, connection: Connection, owner: str) -> bool:
        # Lock the row, so that its process can't renew the lease while its run is taken over.
        query = (
            f"SELECT leased_until > {_TIME}, leased_until, mac FROM leases WHERE owner = ? /* FOR SHARE */"
        )
        row = connection.execute(query, (self._now(), owner)).fetchone()
        if row is None:
            owned = connection.execute("SELECT 1 FROM runs WHERE owner = ? LIMIT 1", (owner,)).fetchone()
            return owned is not None and self._is_refused(owner)
        return bool(row[0]) or (not self._is_own(owner, *row[1:]) and self._is_refused(owner))

    def _is_own(self, owner: str, until: float, mac: bytes) -> bool:
        return self._find_chains().is_row("leases", (owner, until), mac)

    def _is_refused(self, owner: str) -> bool:
        log.warning("the lease of %s was altered or removed, so its runs are not taken over", owner)
        return True

    def is_announced(self, owner: str, until: float, now: float) -> bool:
        return until > now

    def held(self, connection: Connection, now: float) -> Callable[[str, float], bool]:
        query = f"SELECT owner, leased_until, mac FROM leases WHERE leased_until <= {_TIME}"
        rows = connection.execute(query, (self._now(),)).fetchall()
        ended = {"", *(owner for owner, *lease in rows if self._is_own(owner, *lease))}
        return lambda owner, until: owner not in ended

    def alterations(self, connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
        for owner, until, mac in fetch(connection, "SELECT owner, leased_until, mac FROM leases"):
            if not self._is_own(owner, until, mac):
                yield chains.altered(f"lease {owner}", 1, "its row was changed")
        for (owner,) in fetch(connection, _LOST):
            yield chains.altered(f"lease {owner}", 1, "it was removed")

    def end(self, connection: Connection) -> None:
        """Delete this process's lease, and leases that expired long ago, unless their processes still own runs."""
        unused = "NOT EXISTS (SELECT 1 FROM runs WHERE runs.owner = leases.owner)"
        connection.execute(f"DELETE FROM leases WHERE owner = ? AND {unused}", (self._owner,))
        connection.execute(
            f"DELETE FROM leases WHERE leased_until < {_TIME} - ? AND {unused}",
            (self._now(), _LONG_GONE),
        )


T = TypeVar("T")

_CONFLICTS = (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation)
"""Errors of a transaction that lost a race with another. The loser is run again, and then sees the other's changes."""
_LEAST_PATIENCE = 10.0
"""Seconds after which the server ends a transaction that waits for this process, if the lease is not longer.

A host that is cut off or loses power can't end its transactions. Their locks would keep its runs from all other processes.
"""
LOCK_SECONDS = 10
"""Seconds to wait for a lock while a journal is opened. Any role of the database can take advisory locks, and keep them."""
_MOST_TRIES = 100
_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ"
NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_SAMPLES = 3
_KEY_ADVICE = "Use the key with which it was created: in HANDRAIL_KEY, or in the file that `key_file` or HANDRAIL_KEY_FILE names."


def _erase_broadcasts(connection: Connection, chains: Chains, person: Person) -> None:
    for some in chunks(person.holdings.sessions):
        for table in ("watchers", "broadcasts"):
            connection.execute(f"DELETE FROM {table} WHERE session_id IN ({marks(some)})", some)


class PostgresDatabase(Database):
    """Runs jobs on a PostgreSQL database, one after another, each in its own transaction or as a single statement.

    A transaction sees one state of the database. If it conflicts with another process's transaction, it is run again.
    If the connection is lost, the job is run again on a new connection, unless its transaction was already committed. A job
    that is a single statement is run again in any case.
    """

    erasers = (
        ("watchers broadcasts", _erase_broadcasts),
        (
            "sign_ins audit",
            None,
        ),  # `PostgresAccounts.erase` deletes them, and the account's records in the chain of users
        ("leases", None),
    )

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
        self._is_down = False
        """Whether the database did not answer when it was last used, of which this has warned."""
        self.channel = ""
        """The name of the channel on which processes tell each other what happened."""
        self.notices = Notices(self)
        self._waiters: weakref.WeakSet[_Wake] = weakref.WeakSet()
        self.notices.subscribe(self._noticed)
        super().__init__(
            address.shown, clock=clock, new_id=new_id, find_key=find_key, inline=inline, moments=moments
        )

    def now(self) -> float:
        """Return the time of the database, or of the simulated clock, in seconds since 1970."""
        return super().now() if self._is_simulated else self._micros() / 1e6

    def _micros(self) -> int:
        return int(SYSTEM_CLOCK.monotonic() * 1e6 + self._offset)

    def subscribe(self, noticed: Callable[[str, str], None]) -> None:
        self.notices.subscribe(noticed)

    async def listen(self) -> None:
        await self.notices.listen()

    async def wait(self, seconds: float) -> None:
        wake = _Wake(asyncio.get_running_loop())
        self._waiters.add(wake)
        await self.notices.listen()  # once the thread listens, it wakes all who wait, so nothing is missed
        with contextlib.suppress(TimeoutError):
            # Unlike `wait_for` in Python 3.11, this never swallows a cancellation.
            async with asyncio.timeout(seconds):
                await wake.event.wait()

    def _noticed(self, kind: str, id: str) -> None:
        if kind not in (WATCHED, SAID, ACCOUNTS):  # these change nothing that a worker could take
            for each in tuple(self._waiters):
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    each.loop.call_soon_threadsafe(each.event.set)

    def close(self) -> None:
        self.notices.close()
        super().close()

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
        if self._is_down and job.error is None:
            self._is_down = False
            log.info("journal %r: the database answers again", self.path)

    def _open(self, new_id: str) -> PostgresConnection:
        self.leases = self._own_leases = DatabaseLeases(
            self.owner, self._lease, self._clock, lambda: self._own_chains, is_simulated=self._is_simulated
        )
        connection = PostgresConnection(self.connect())
        try:
            check_pooler(self.path, connection.raw, self.connect)
            self._prepare(connection, new_id)
            self._measure(connection)
        except psycopg.Error as error:
            connection.close()
            raise self._refusal("it can't be opened", error) from None
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
                run=lambda job: super(PostgresDatabase, self)._run(connection, job),
            )
        return connection

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection to the server. Raises `JournalError` if that fails."""
        try:
            return self._connect()
        except psycopg.Error as error:
            raise self._refusal("it can't be opened", error) from None

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
        """Create the tables in an empty schema, or check existing ones, and find the journal's id and key."""
        connection.raw.execute("BEGIN")
        try:
            connection.raw.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")  # pyright: ignore[reportArgumentType, reportCallIssue]  # a number
            is_new = create_tables(connection, self.path, self._address.schema)
            self._identify(connection, new_id, is_new, _KEY_ADVICE)
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
            (there,) = connection.execute(NOW).fetchone()
            after = SYSTEM_CLOCK.monotonic() * 1e6
            if not self._offset or after - before < self._error:
                self._error = after - before
                self._offset = there - (before + after) / 2

    def _execute(self, connection: Connection, job: Job[T]) -> T:
        """Run a job, and run it again after a conflict or a lost connection, until it is done or has failed."""
        assert isinstance(connection, PostgresConnection)
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

    def _in_transaction(self, connection: PostgresConnection, job: Job[T], commit: _Commit) -> T:
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
            self._warn(lost)
            if SYSTEM_CLOCK.monotonic() + pause >= until:
                raise lost
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _warn(self, lost: psycopg.Error) -> None:
        """Warn that the database does not answer, once until it does again, however many runs need it."""
        if not self._is_down:
            self._is_down = True
            log.warning("%s Will retry.", self._refusal("it can't be used for now", lost))

    def _close(self, connection: Connection) -> None:
        if self._sender is not None:
            self._sender.close()
        with contextlib.suppress(psycopg.Error):
            self._own_leases.end(connection)
        super()._close(connection)

    def _failure(self, connection: Connection, error: BaseException) -> BaseException:
        if not isinstance(error, psycopg.Error):
            return error
        if isinstance(error, psycopg.OperationalError):
            self._warn(error)
        return self._refusal("it can't be used", error)

    def _unreadable(self, connection: Connection, error: Exception) -> JournalError:
        return unreadable(self.path, error, "Restore it from a backup.")

    def _refusal(self, what: str, error: psycopg.Error) -> JournalError:
        return refusal(self._address, what, error)


class _Wake:
    """A worker that waits in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.event = asyncio.Event()


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


def refusal(address: Address, what: str, error: psycopg.Error) -> JournalError:
    """Return the error for what PostgreSQL or its driver reports, in one line and without the password."""
    said = error.diag.message_primary or str(error)
    lines = (
        address.without_secret(said).strip().splitlines()
    )  # the first is the error, the others give advice
    line = lines[0].strip().rstrip(".") if lines else type(error).__name__
    is_lost = isinstance(error, psycopg.OperationalError)
    return JournalError(address.shown, f"{what}: {line}", _hint(error, line), is_lost=is_lost)


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
