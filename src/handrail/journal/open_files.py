"""The database files that this process has open with SQLite.

SQLite uses POSIX locks. When a process closes any descriptor of a file, the kernel releases all of the process's locks
on that file. So a file that this process has open with SQLite must not be opened in any other way, or other processes
could delete the log that this process is writing to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

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
