"""`ClaimTable`: which commits to a folder are under way, in any process, and which were made lately.

A `flock` on the folder itself makes the table exclusive. It needs no file, and the kernel releases it if its holder dies.
A commit takes it twice: to check and enter its claim, and to rename files. It is not held in between, while the
journal records the commit. A commit without a journal needs no claim, because it checks and renames at once. People and
other programs don't take the lock, so a commit still checks what it displaces.

The table is a file in the staging folder to which records are appended:

- *claim*: a commit has checked what it read, and will change these places. After *renaming*, its process has died before it renamed anything.
- *renaming*: it renames files from here on. If its process dies meanwhile, the next process that takes the lock
  finishes what can be finished, so no commit builds on one that is half applied.
- *done*: it renames no more, and its claim is given up.

A claim also ends when the commit's folder is gone, so that giving it up never has to wait. A claim of a dead process stands if a
journal may have recorded its commit, until somebody with that journal finishes or discards the commit.

Each position in the file is a point in time: a commit whose files were renamed after a call looked at them has a
*renaming* record that does not end before the position that the call noted first. So a call checks its reads without the
lock, and under the lock compares them only with the commits made since.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from handrail.concurrency.claims import ADD, WRITE, GaveUp, Places, Stop, clash, never
from handrail.errors import Conflict, FileError
from handrail.resources.directory.disk import Disk, Jail, as_file_error

if TYPE_CHECKING:
    from handrail.resources.directory.area import Area

NAME = "claims"
_PATIENCE = 60.0
"""Seconds to wait for other processes. A process needs the lock for milliseconds, unless it was stopped."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.005
_HEAD = struct.Struct(">QII")
"""The position at which the records begin, and the size and checksum of the claims that stood when the file was written."""
_FRAME = struct.Struct(">II")
"""The size and checksum of a record."""
_LARGE, _KEPT = 256 * 1024, 64 * 1024
"""The size from which the file is written anew, and how many bytes of records it then keeps."""


class ClaimRecord(msgspec.Struct, frozen=True, array_like=True):
    """One record of the table."""

    kind: Literal["claim", "renaming", "done"]
    id: str
    """The commit's folder, relative to `at-work` in the staging folder."""
    journal: str = ""
    """The id of the journal that records the commit; "" if none does."""
    places: Mapping[str, int] = {}
    is_call: bool = True
    """Whether a call makes the commit."""
    run: str = ""
    """The run that makes the commit, with its journal; "" if none does."""


class FolderClaim(msgspec.Struct, frozen=True):
    """What a commit read and changes in a folder."""

    id: str
    places: Places
    journal: str = ""
    since: int | None = None
    """The position that was noted before the call's reads were checked; None if it depends on nothing that it read."""
    is_forced: bool = False
    """Whether the claim stands whatever others have claimed."""
    is_call: bool = True
    run: str = ""
    recheck: Callable[[], None] | None = None
    """Checks again what the call read, if the table no longer says what was committed since; raises `Conflict`."""


class ClaimTable:
    """The table of one folder, as one process reads and writes it. All methods may be called from any thread, and may block."""

    def __init__(self, jail: Jail, disk: Disk, owner: Area) -> None:
        self._jail = jail
        self._disk = disk
        self._owner = owner
        self._mutex = threading.RLock()
        """Held while the fields below change, but not while anything is written: event loops ask for the position."""
        self._file = -1
        self._forget()

    def _forget(self) -> None:
        self._base = self._begin = self._end = 0
        """The position of the first record, its offset in the file, and the offset up to which the file was read."""
        self._live: dict[str, ClaimRecord] = {}
        self._renaming: ClaimRecord | None = None
        self._recent: list[tuple[int, ClaimRecord, Places]] = []
        """For each commit: the position at which its *renaming* record ends, that record, and what the commit changed."""

    def close(self) -> None:
        """Close the file. It is opened again when it is needed."""
        with self._mutex:
            file, self._file = self._file, -1
            self._forget()
            if file >= 0:
                os.close(file)

    # --- claims -----------------------------------------------------------------------------------

    def position(self) -> int:
        """Return the current position, without taking the lock; 0 if there is no table yet. Note it before you check what a call has read.

        This does not search for the staging folder of a root that was moved.
        """
        with self._mutex:
            is_known = self._file >= 0 or os.path.lexists(self._owner.expected / NAME)
            if not is_known or not self._open():
                return 0
            return self._base + os.fstat(self._file).st_size - self._begin

    def has_commits_since(self, position: int, but: str) -> bool:
        """Return whether a call has committed to the folder since a position, except for the commit with the id `but`.

        Returns True if somebody holds the lock just now, or if the table no longer says what was committed since.
        """
        if not self.position():
            return False
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._jail.fd)
        try:
            if not _lock(fd):
                return True
            self._read()
            if 0 < position < self._base:
                return True
            # A commit at this very position may have renamed files since: it notes that it is done only afterwards.
            others = (record for end, record, _ in self._recent if end >= position and record.is_call)
            return any(record.id != but for record in others)
        finally:
            os.close(fd)

    def enter(self, claim: FolderClaim, *, keep: bool, stop: Stop = never) -> None:
        """Check a claim against the other commits, after waiting for those that clash with it. With `keep`, hold it.

        Raises `Conflict` if a commit has changed what the call read or changes, `UnfinishedCommit` if a dead process may still
        have to change it, `GaveUp` if `stop` returns True while this waits, and `FileError` if a commit takes too long.
        """
        if not keep and not self.position():
            return  # nobody has committed anything to this folder
        with self._clear(claim, stop):
            if keep:
                self._append(
                    ClaimRecord("claim", claim.id, claim.journal, claim.places, claim.is_call, claim.run)
                )

    @contextlib.contextmanager
    def held(self, claim: FolderClaim, stop: Stop = never) -> Generator[None]:
        """Hold the lock, with a commit recorded as renaming files. If its claim was not entered before, it is checked first.

        If a dead process left a commit half applied, that commit is settled first. Raises the errors of `enter`.
        """
        with self._clear(claim, stop):
            places: Places = {} if claim.id in self._live else claim.places
            self._append(ClaimRecord("renaming", claim.id, claim.journal, places, claim.is_call))
            try:
                yield
            finally:
                with contextlib.suppress(
                    OSError, FileError
                ):  # the commit is complete or reverted without it, too
                    self._append(ClaimRecord("done", claim.id))

    @contextlib.contextmanager
    def _clear(self, claim: FolderClaim, stop: Stop) -> Generator[None]:
        """Hold the lock while no other claim clashes with this one."""
        pause, waited = _FIRST_PAUSE, 0.0
        while True:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._jail.fd)
            try:
                if _lock(fd):
                    self._read()
                    self._settle()
                    place = self._blocked(claim)
                    if place is None:
                        self._check_since(claim)
                        yield
                        return
            finally:
                os.close(fd)  # releases the lock
            if stop():
                raise GaveUp
            if waited > _PATIENCE:
                problem = f"another process has been changing this folder for {_PATIENCE:.0f} seconds. End it, or try again later"
                raise FileError(".", problem)
            time.sleep(pause)
            waited += pause
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _blocked(self, claim: FolderClaim) -> str | None:
        if claim.is_forced:
            return None
        for other in tuple(self._live.values()):
            if other.id == claim.id or (place := clash(other.places, claim.places)) is None:
                continue
            standing = self._owner.standing_of(other.id)
            if standing == "live":
                if _is_overtaken(other, claim):
                    continue
                return place
            if standing == "dead" and other.journal:
                raise self._owner.unfinished(other, place)
            self._live.pop(other.id, None)
        return None

    def _check_since(self, claim: FolderClaim) -> None:
        since = claim.since
        if since is None:
            return
        if 0 < since < self._base:
            if claim.recheck is not None:  # somebody has deleted the staging folder, or the check took long
                claim.recheck()
            return
        for end, record, changed in reversed(self._recent):
            if end < since:
                return
            if record.id != claim.id and (place := clash(changed, claim.places)) is not None:
                raise Conflict([place])

    def _settle(self) -> None:
        """Settle the commit that a process was applying when it died, if there is one."""
        left = self._renaming
        if left is None:
            return
        if self._owner.settle_interrupted(self._owner.folder / "at-work" / left.id) or not left.journal:
            self._append(ClaimRecord("done", left.id))
        else:  # nothing was renamed: the claim stands, and calls from here on don't conflict with what has not happened
            self._append(msgspec.structs.replace(left, kind="claim"))
        self._renaming = None

    # --- the file ---------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Open the newest file, unless it is open already. Returns False if there is none."""
        if self._file >= 0:
            if os.fstat(self._file).st_nlink:
                return True
            self.close()
        try:
            self._file = os.open(self._owner.folder / NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        head = os.pread(self._file, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            self.close()
            return False
        self._base, size, checksum = _HEAD.unpack(head)
        body = os.pread(self._file, size, _HEAD.size)
        self._begin = self._end = _HEAD.size + size
        if len(body) < size or zlib.crc32(body) != checksum:
            self.close()
            return False
        self._live = {each.id: each for each in msgspec.msgpack.decode(body, type=list[ClaimRecord])}
        return True

    def _read(self) -> None:
        """Read the records that were appended since the last time. The caller holds the lock."""
        with self._mutex:
            is_open = self._open()
        if not is_open:
            self._write_anew(list(self._owner.left_claims()), b"", 0)
        with self._mutex:
            size = os.fstat(self._file).st_size
            data = os.pread(self._file, size - self._end, self._end) if size > self._end else b""
            at = 0
            while at < len(data):
                length, checksum = (
                    _FRAME.unpack_from(data, at) if len(data) - at >= _FRAME.size else (len(data), 0)
                )
                body = data[at + _FRAME.size : at + _FRAME.size + length]
                if len(body) < length or zlib.crc32(body) != checksum:
                    break  # a process died while it wrote this
                at += _FRAME.size + length
                self._take(
                    msgspec.msgpack.decode(body, type=ClaimRecord), self._base + self._end + at - self._begin
                )
            self._end += at
            is_torn = at < len(data)
            if not is_torn and self._end <= _LARGE:
                return
            # Positions that others have noted may lie in what is cut off, so later records get higher ones.
            kept = os.pread(self._file, self._end - self._begin, self._begin)
            start = next((start for start in _starts(kept) if len(kept) - start <= _KEPT), len(kept))
            base = self._base + size - self._begin - (len(kept) - start)
            renaming, live = self._renaming, list(self._live.values())
        try:
            self._write_anew([each for each in live if self._stands(each)], kept[start:], base)
        except FileError:
            if is_torn:
                raise
        self._renaming = self._renaming or renaming

    def _stands(self, record: ClaimRecord) -> bool:
        return self._owner.standing_of(record.id) != "gone"

    def _take(self, record: ClaimRecord, end: int) -> None:
        """Follow a record that ends at a position."""
        id = record.id
        if record.kind == "done":
            self._live.pop(id, None)
            self._renaming = None
            return
        if record.kind == "claim":
            self._live[id] = record
            self._renaming = None
            return
        claimed = self._live.get(id, record)
        changed = {
            place: mode & (ADD | WRITE) for place, mode in claimed.places.items() if mode & (ADD | WRITE)
        }
        self._recent.append((end, record, changed))
        self._renaming = claimed

    def _append(self, record: ClaimRecord) -> None:
        """Append a record. The caller holds the lock, and has read the file to its end."""
        body = msgspec.msgpack.encode(record)
        data = _FRAME.pack(len(body), zlib.crc32(body)) + body
        try:
            with self._mutex:
                file, end = (
                    os.dup(self._file),
                    self._end,
                )  # the file may be closed while this waits for the disk
            try:
                self._disk.append(file, data, end)
            finally:
                os.close(file)
        except OSError as error:
            raise as_file_error(".", error) from None
        with self._mutex:
            if self._end == end:
                self._end += len(data)
                self._take(record, self._base + self._end - self._begin)

    def _write_anew(self, live: list[ClaimRecord], records: bytes, base: int) -> None:
        """Replace the file by one with these claims and records. Without `base`, its positions begin at the present time."""
        body = msgspec.msgpack.encode(live)
        new = self._owner.folder / f"{NAME}.new"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                head = _HEAD.pack(base or os.fstat(fd).st_ctime_ns, len(body), zlib.crc32(body))
                self._disk.append(fd, head + body + records, 0)
            finally:
                os.close(fd)
            os.rename(new, self._owner.folder / NAME)
        except OSError as error:
            raise as_file_error(".", error) from None
        with self._mutex:
            self.close()
            if self._open() and records:
                self._follow(records)

    def _follow(self, records: bytes) -> None:
        for start in _starts(records):
            length, _ = _FRAME.unpack_from(records, start)
            body = records[start + _FRAME.size : start + _FRAME.size + length]
            self._take(
                msgspec.msgpack.decode(body, type=ClaimRecord), self._base + start + _FRAME.size + length
            )
        self._end = self._begin + len(records)


def _is_overtaken(other: ClaimRecord, claim: FolderClaim) -> bool:
    """Return whether another process's claim is void, because the run that made it has been taken over by the process that asks.

    Only the run's owner can record its calls, and a run whose changes are recorded but not applied is not resumed.
    """
    return bool(claim.run) and claim.run == other.run and _process(claim.id) != _process(other.id)


def _process(id: str) -> str:
    return id.partition("/")[0]


def _starts(records: bytes) -> Generator[int]:
    """Yield where each record starts in bytes that hold whole records."""
    at = 0
    while at < len(records):
        yield at
        length, _ = _FRAME.unpack_from(records, at)
        at += _FRAME.size + length


def _lock(fd: int) -> bool:
    """Take the lock of an open folder, and return whether it was free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise as_file_error(".", error) from None
