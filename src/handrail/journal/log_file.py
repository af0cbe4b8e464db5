"""The write-ahead log of a database: whether it still contains everything that was committed to it.

After a crash, SQLite reads the log up to the first frame that does not match its checksum, and ignores the rest. So if
a part of the log is damaged or missing, the transactions after it vanish without an error. The index of the log
remains after a crash too, in the file `-shm`, and says how many frames were committed. SQLite discards it, so the two
are compared before SQLite opens the database. This costs nothing while processes write.

Only the first process that opens a database after a crash reads the log: as long as some process has it open, the
index is in use, and nothing is discarded. Some transactions are not synced, so a power cut may leave a log that lacks
frames which its index counts. So after a restart of the machine, missing frames are only logged as a warning.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from handrail.errors import JournalError

log = logging.getLogger("handrail.journal")

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
