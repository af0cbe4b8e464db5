"""`RenameLock`: makes the renames of a commit exclusive among all Handrail processes that use the same folder.

The lock is a `flock` on the folder itself, so it needs no file, and the kernel releases it if its holder dies. It is
held for the renames only. People and other programs don't take it, so a commit still checks what it displaces.

A commit is marked while it is being applied. If its process dies, the next process that takes the lock settles the
marked commit first, so no commit builds on one that is half applied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path

from handrail.errors import FileError
from handrail.resources.directory.disk import Disk
from handrail.resources.directory.jail import Jail, refusal

MARK = "renaming"
_LENGTH = 1024
_PATIENCE = 60.0
"""Seconds to wait for other processes. A process needs the lock for milliseconds, unless it was stopped."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.005


class RenameLock:
    """The lock of one folder, and the file in its staging folder that names the commit being applied."""

    def __init__(
        self, jail: Jail, disk: Disk, staging: Callable[[], Path], settle: Callable[[Path], None]
    ) -> None:
        self._jail = jail
        self._disk = disk
        self._staging = staging
        self._settle = settle
        self._marks = -1

    @contextlib.contextmanager
    def held(self, commit: Path) -> Generator[None]:
        """Hold the lock, with the folder of a commit marked as being applied.

        If a dead process left a commit marked, that commit is settled first. Raises `FileError` if the lock is not free in
        time, or if the disk reports an error.
        """
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._jail.fd)
        try:
            _take(fd)
            marks = self._open()
            left = os.pread(marks, _LENGTH, 0).partition(b"\0")[0]
            if left:
                self._heed(os.fsdecode(left))
            try:
                # the commit's path in the staging folder, which is always at-work/<process>/<commit>
                self._disk.mark(marks, os.fsencode("/".join(commit.parts[-3:])) + b"\0")
            except OSError as error:
                raise refusal(".", error) from None
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # a mark may stay: the commit is complete or reverted
                    self._disk.mark(marks, b"\0")
        finally:
            os.close(fd)  # releases the lock

    def _open(self) -> int:
        if self._marks < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._marks = os.open(self._staging() / MARK, flags, 0o600)
            except OSError as error:
                raise refusal(".", error) from None
        return self._marks

    def close(self) -> None:
        """Close the file with the mark. It is opened again when it is needed."""
        marks, self._marks = self._marks, -1
        if marks >= 0:
            os.close(marks)

    def _heed(self, left: str) -> None:
        parts = Path(left).parts
        if len(parts) == 3 and parts[0] == "at-work" and ".." not in parts:
            self._settle(self._staging() / left)


def _take(fd: int) -> None:
    pause, waited = _FIRST_PAUSE, 0.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise refusal(".", error) from None
        if waited > _PATIENCE:
            problem = f"another process has been changing this folder for {_PATIENCE:.0f} seconds. End it, or try again later"
            raise FileError(".", problem)
        time.sleep(pause)
        waited += pause
        pause = min(pause * 2, _LONGEST_PAUSE)
