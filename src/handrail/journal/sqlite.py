"""`SqliteJournal`, a journal in one file, and `MemoryJournal`, a journal in memory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError, HandrailError, JournalError
from handrail.ids import NewId, random_id
from handrail.journal.digest import key_beside, new_key
from handrail.journal.location import check_private_files, check_surroundings, create_private_file
from handrail.journal.sql.chains import Chains
from handrail.journal.sql.connection import Connection, compact, is_damage
from handrail.journal.sql.database import UNREADABLE, Database, Job, Moments, unreadable
from handrail.journal.sql.journal import SqlJournal
from handrail.journal.sql.leases import Leases
from handrail.journal.sql.schema import (
    APPLICATION_ID,
    are_intact,
    create_tables,
    distrust_schema,
    find_alteration,
    is_blank,
)
from handrail.text.spelling import checked_arguments

log = logging.getLogger("handrail.journal")

T = TypeVar("T")

MEMORY = ":memory:"
_BUSY_SECONDS = 10.0
_WAIT_FOR_OTHERS = f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}"
_DO_NOT_WAIT = "PRAGMA busy_timeout = 0"
_EVERY = 0.05
"""Seconds between checks for changes to the file. A check takes a few microseconds."""


class SqliteDatabase(Database):
    """A journal's database in one file, or in memory.

    Only `add_now` runs a brief write in the caller's thread, if it can't block and writes are not `synced`.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Clock,
        new_id: str,
        find_key: Callable[[bool], bytes] = lambda is_new: new_key(),
        synced: bool = False,
        inline: bool = False,
        moments: Moments | None = None,
    ) -> None:
        self._synced = synced
        self._syncs = synced
        """Whether the connection syncs at the moment."""
        self._file: OpenFile | None = None
        self._is_blank = False
        """Whether the file was empty when this process opened it, so that this is a new journal."""
        self.checks_indexes = path != MEMORY
        self._intact: dict[str, bool] = {}
        """Whether the tables that have been checked agree with their indexes."""
        self._is_damaged = False
        self._observer: sqlite3.Connection | None = None
        """A second connection, whose change counter shows the changes of all others; None until it is needed."""
        super().__init__(path, clock=clock, new_id=new_id, find_key=find_key, inline=inline, moments=moments)
        if inline and path == MEMORY:  # no other process can open it, so garbage collection may close it
            assert self._connection is not None
            weakref.finalize(self, self._connection.close)

    async def wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end, before = loop.time() + seconds, self._changes()
        while (left := end - loop.time()) > 0:
            await asyncio.sleep(min(_EVERY, left))
            if self._changes() != before:
                return

    def changes(self) -> int | None:
        return self._changes() if self.watches and self.path != MEMORY else None

    def _changes(self) -> int:
        """Return a number that changes whenever another connection changes the file or, in memory, whenever a row is changed."""
        if self.path == MEMORY:
            return 0 if self._connection is None else self._connection.total_changes
        if self._observer is None:
            self._observer = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        return self._observer.execute("PRAGMA data_version").fetchone()[0]

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None
        super().close()

    async def compact(self) -> bool:
        return self.path == MEMORY or await run_in_thread(self._compact)

    def _compact(self) -> bool:
        try:
            with contextlib.closing(
                sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            ) as own:
                distrust_schema(own)
                return compact(own)
        except sqlite3.Error as error:
            raise JournalError(
                self.path,
                f"it can't be compacted: {error}. What was deleted is gone from the journal, but the file may still have its bytes",
                "Check that the disk has room for a second copy of it and that no other process writes all the time. Then try again.",
            ) from error

    def is_intact(self, connection: Connection, *tables: str) -> bool:
        """Return whether these tables agree with their indexes. Each table is checked only once, in time proportional to its rows."""
        for table in tables:
            if table not in self._intact and self.checks_indexes:
                self._intact[table] = are_intact(cast(sqlite3.Connection, connection), table)
        return not self._is_damaged and all(self._intact.get(table, True) for table in tables)

    def note_damage(self) -> None:
        self._is_damaged = True

    def _can_begin(self, shared: Connection) -> bool:
        try:
            shared.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:  # another process is writing; any other error occurs again in the thread
            return False
        return True

    def _run_queued(self, connection: Connection, job: Job[Any]) -> None:
        if self._shared is None:
            self._run(connection, job)
            return
        connection.execute(_WAIT_FOR_OTHERS)
        self._run(connection, job)
        connection.execute(_DO_NOT_WAIT)

    def _close(self, connection: Connection) -> None:
        super()._close(connection)
        if self._file is not None:
            self._file.close()

    def _examine(self) -> None:
        """Look at the file before SQLite does. Raises `JournalError` if SQLite must not open it."""
        self._is_blank = is_blank(self.path)
        check_log(self.path)

    def _open(self, new_id: str) -> Connection:
        if "\0" in self.path:
            raise JournalError(self.path, "its path contains a null byte", "Pass a path without one.")
        self.leases = Leases(self.owner)
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
                connection.execute("BEGIN IMMEDIATE")
                self._identify(connection, new_id, create_tables(connection, self.path), _KEY_ADVICE)
                connection.execute("COMMIT")
                self.chains = Chains(self.id, self.path, self.key)
                if self.path != MEMORY:
                    check_private_files(self.path)
                if self._thread is not None and not self._synced:
                    connection.execute(_DO_NOT_WAIT)
                    self._shared = connection
            except BaseException:
                self._close(connection)  # rolls back
                raise
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, sqlite3.Error) and is_damage(error):
                raise unreadable(self.path, error) from error
            raise JournalError(
                self.path, f"it can't be opened: {error}", "Pass the path of a journal or of a new file."
            ) from error
        except UNREADABLE as error:
            if isinstance(error, HandrailError):
                raise
            raise unreadable(self.path, error) from error
        return connection

    def _execute(self, connection: Connection, job: Job[T]) -> T:
        assert isinstance(connection, sqlite3.Connection)
        if self._synced and self._syncs != job.synced:
            connection.execute(f"PRAGMA synchronous = {'FULL' if job.synced else 'OFF'}")
            self._syncs = job.synced
        if not connection.in_transaction:  # `add_now` may have begun it
            connection.execute("BEGIN IMMEDIATE")
        try:
            value = job.work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # SQLite rolls back on its own if the disk is full
                connection.execute("ROLLBACK")
            raise
        return value

    def _failure(self, connection: Connection, error: BaseException) -> BaseException:
        if not isinstance(error, sqlite3.Error):
            return error
        if is_damage(error):
            return self._unreadable(connection, error)
        return find_alteration(cast(sqlite3.Connection, connection), self.path) or JournalError(
            self.path,
            f"it can't be read or written: {error}",
            "Check the disk, and whether another program has locked the file. Then try again.",
        )

    def _unreadable(self, connection: Connection, error: Exception) -> JournalError:
        return find_alteration(cast(sqlite3.Connection, connection), self.path) or unreadable(
            self.path, error
        )


_KEY_ADVICE = "Set HANDRAIL_KEY and HANDRAIL_KEY_FILE as they were when the journal was created. If both were unset, restore the key file."

Durability = Literal["process", "power"]
"""The failures that records survive: with `process`, the end of the process, even by `kill -9`; with `power`, also a power cut."""


@checked_arguments
class SqliteJournal(SqlJournal[SqliteDatabase]):
    """A journal in one SQLite file.

    Once a method has returned, its record is available to every process that uses the file. With `durability="process"` it
    survives `kill -9`. With `"power"`, which waits for the disk, it also survives a power cut, unless it can be lost without
    harm, as a renewed lease can. Values of steps and answers that are read from the file are plain data. Several processes may
    use one file; each run has at most one owner. Close the journal when it is no longer needed.

    Raises `JournalError` if the file can't be opened, is not a journal, is damaged, has an altered schema or a different
    version of it, or if the key is missing or is not the journal's. Raises its subclass `JournalExposed` if other users could
    read or change the journal, and `DefinitionError` if `durability` is invalid.

    - `watch`: the number of seconds between checks for answers from other processes; None means never.
    - `inline`: write in the calling thread, for simulations.
    - `moments`: called before and after every transaction, for simulations of crashes.
    """

    broadcasts = None
    accounts = None

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        durability: Durability = "process",
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
        watch: float | None = 0.5,
        inline: bool = False,
        moments: Moments | None = None,
    ) -> None:
        if durability not in ("process", "power"):
            raise DefinitionError(
                f"durability={durability!r} is invalid. Pass 'process', to survive the end of the process, "
                "or 'power', to survive a power cut."
            )
        self.path = fspath(path)
        self.durability: Durability = durability
        self.synced = durability == "power"
        database = SqliteDatabase(
            self.path,
            clock=clock,
            new_id=new_id(),
            find_key=lambda is_new: new_key() if self.path == MEMORY else key_beside(self.path, is_new),
            synced=self.synced,
            inline=inline,
            moments=moments,
        )
        super().__init__(database, clock, watch)


@checked_arguments
class MemoryJournal(SqliteJournal):
    """A journal that lives as long as the object, for tests and for runs that no other process will resume."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(MEMORY, clock=clock, watch=None, inline=True)


# --- the log ------------------------------------------------------------------------------------------

# The write-ahead log of a database: whether it still contains everything that was committed to it.
#
# After a crash, SQLite reads the log up to the first frame that does not match its checksum, and ignores the rest. So if
# a part of the log is damaged or missing, the transactions after it vanish without an error. The index of the log
# remains after a crash too, in the file `-shm`, and says how many frames were committed. SQLite discards it, so the two
# are compared before SQLite opens the database. This costs nothing while processes write.
#
# Only the first process that opens a database after a crash reads the log: as long as some process has it open, the
# index is in use, and nothing is discarded. Some transactions are not synced, so a power cut may leave a log that lacks
# frames which its index counts. So after a restart of the machine, missing frames are only logged as a warning.

_LOG_HEADER = struct.Struct(">8I")
_LOG_MAGIC = 0x377F0682
"""The first word of a log whose checksums are computed from little-endian words. For big-endian words, it is 1 higher."""
_FRAME_HEADER = struct.Struct(">6I")
_INDEX_HEADER = struct.Struct("=3I2BHI5I2I")
_INDEX_BYTES = 2 * _INDEX_HEADER.size + 4
_VERSION = 3007000
_USERS_AT = 128
"""The offset of the byte in the index that each process locks while it has the database open."""
_LOCK = struct.Struct("hhqqi4x")
_NATIVE = "little" if sys.byteorder == "little" else "big"
_WORD = 0xFFFFFFFF


class _Committed(NamedTuple):
    """The state of the log, according to its index."""

    frames: int
    salts: bytes
    copied: int
    """The number of frames whose pages are in the database already."""


def check_log(path: str) -> None:
    """Raise `JournalError` if a database's log lacks frames that were committed. Call it before SQLite opens the database.

    If the machine has been restarted since the log was written, a warning is logged instead.
    """
    committed = _read_index(f"{path}-shm")
    if committed is None or not committed.frames:
        return
    try:
        data = Path(f"{path}-wal").read_bytes()
    except FileNotFoundError:
        data = b""
    if not data and committed.copied == committed.frames:
        return
    found = _intact_frames(data, committed)
    if found == committed.frames:
        return
    problem = (
        f"its log '{path}-wal' is damaged or incomplete: of the {committed.frames} pages that were committed to it, "
        f"only the first {found} can be read"
    )
    if _is_from_before_restart(path):
        log.warning("%s: %s. The machine was restarted before the rest was on disk.", path, problem)
        return
    raise JournalError(
        path,
        problem,
        f"Restore the journal and its log from a backup. To continue without the pages that can't be read, delete '{path}-shm'.",
    )


def _read_index(path: str) -> _Committed | None:
    """Read the index of a log. Returns None if the index is missing, invalid or in use."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _USERS_AT, 1, 0)
        (kind, *_) = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        data = os.pread(fd, _INDEX_BYTES, 0)
    finally:
        os.close(fd)
    if kind != fcntl.F_UNLCK or len(data) < _INDEX_BYTES:
        return None
    (copied,) = struct.unpack_from("=I", data, 2 * _INDEX_HEADER.size)
    # There are two copies, since a process may die while it writes one of them.
    copies = (data[at : at + _INDEX_HEADER.size] for at in (0, _INDEX_HEADER.size))
    found = [each for each in map(_parse_index, copies) if each is not None]
    if not found:
        return None
    frames, salts = min(found)
    return _Committed(frames, salts, copied)


def _parse_index(data: bytes) -> tuple[int, bytes] | None:
    version, _, _, is_ready, _, _, frames, _, _, _, _, _, *checksum = _INDEX_HEADER.unpack(data)
    summed = data[:-8]
    if version != _VERSION or not is_ready or _checksum(summed, _NATIVE, (0, 0)) != tuple(checksum):
        return None
    return frames, data[32:40]


def _intact_frames(data: bytes, committed: _Committed) -> int:
    """Return how many of the committed frames SQLite would read from a log."""
    if len(data) < _LOG_HEADER.size:
        return 0
    magic, version, page, _, _, _, *checksum = _LOG_HEADER.unpack_from(data)
    order = "big" if magic & 1 else "little"
    last = _checksum(data[:24], order, (0, 0))
    if magic & ~1 != _LOG_MAGIC or version != _VERSION or last != tuple(checksum):
        return 0
    if data[16:24] != committed.salts:
        return 0
    size = _FRAME_HEADER.size + page
    for number in range(committed.frames):
        at = _LOG_HEADER.size + number * size
        frame = data[at : at + size]
        if len(frame) < size or frame[8:16] != committed.salts:
            return number
        last = _checksum(frame[24:], order, _checksum(frame[:8], order, last))
        if last != _FRAME_HEADER.unpack_from(frame)[4:]:
            return number
    return committed.frames


def _checksum(data: bytes, order: str, start: tuple[int, int]) -> tuple[int, int]:
    """Return SQLite's checksum of data, continued from `start`. The length of the data is a multiple of eight bytes."""
    words: Sequence[int] = struct.unpack(f"{'<' if order == 'little' else '>'}{len(data) // 4}I", data)
    one, two = start
    pairs = iter(words)
    for first, second in zip(pairs, pairs, strict=True):
        one = one + first + two & _WORD
        two = two + second + one & _WORD
    return one, two


def _is_from_before_restart(path: str) -> bool:
    """Return whether the machine was restarted after the last write to the log or, if there is no log, to the database."""
    try:
        status = os.stat(f"{path}-wal")
    except FileNotFoundError:
        status = os.stat(path)
    return status.st_mtime < _started_at()


def _started_at() -> float:
    """Return when the machine was started, in seconds since 1970, or 0 if it is not known."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)


_lock = threading.RLock()
"""Held while a file is examined, marked as open, or closed.

It is reentrant because garbage collection, which closes forgotten journals, may happen while a file is examined.
"""
_open: dict[tuple[int, int, int], int] = {}
"""How many times each file is open, by process, device and inode. A forked process has none of its parent's locks."""


class OpenFile:
    """Marks a file as open in this process until it is closed.

    Unless this process already has the file open, `examine` is called first. It may open and close the file.

    SQLite uses POSIX locks. When a process closes any descriptor of a file, the kernel releases all of the process's locks on that file.
    So a file that this process has open with SQLite must not be opened in any other way, or other processes could delete the log
    that this process is writing to.
    """

    __slots__ = ("_key",)

    def __init__(self, path: str, examine: Callable[[], None]) -> None:
        with _lock:
            found = os.stat(path)
            self._key: tuple[int, int, int] | None = (os.getpid(), found.st_dev, found.st_ino)
            if self._key not in _open:
                examine()
            _open[self._key] = _open.get(self._key, 0) + 1

    def close(self) -> None:
        """Note that SQLite has closed the file. Closing it twice is harmless."""
        with _lock:
            key, self._key = self._key, None
            if key is not None:
                _open[key] -= 1
                if not _open[key]:
                    del _open[key]
