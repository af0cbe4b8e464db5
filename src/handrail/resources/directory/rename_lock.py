"""`RenameLock`: makes the renames of a commit exclusive among all processes that change the same folder.

The lock is a `flock` of the folder itself, so it needs no file, and the kernel releases it if its holder dies. It is
held for the renames only. People and other programs don't take it, so a commit still checks what it displaces.

A commit of several steps is marked while it is being applied. If its process dies, the next process that takes the
lock finishes the marked commit first, so nobody ever builds on half of one.
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
_PATIENCE = 60.0
"""Seconds to wait for other processes. A process needs the lock for milliseconds, unless it was stopped."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.005


class RenameLock:
    """The lock of one folder, and the mark in its staging folder that names the commit being applied."""

    def __init__(self, jail: Jail, disk: Disk, staging: Path, finish: Callable[[Path], None]) -> None:
        self._jail = jail
        self._disk = disk
        self._staging = staging
        self._finish = finish

    @contextlib.contextmanager
    def held(self, commit: Path | None) -> Generator[None]:
        """Hold the lock. If `commit` is given, mark that commit's folder as being applied.

        First finishes the commit that a dead process left marked. Raises `FileError` if the lock is not free in time.
        """
        fd = self._jail.folder(".", os.O_RDONLY)
        mark = self._staging / MARK
        try:
            _take(fd)
            self._heed(mark)
            if commit is None:
                yield
                return
            self._disk.symlink(str(commit.relative_to(self._staging)), mark)
            try:
                yield
            finally:
                self._disk.forget(mark)
        finally:
            os.close(fd)  # releases the lock

    def _heed(self, mark: Path) -> None:
        try:
            left = os.readlink(mark)
        except OSError:
            return
        parts = Path(left).parts
        if len(parts) == 3 and parts[0] == "at-work" and ".." not in parts:
            self._finish(self._staging / left)
        self._disk.forget(mark)


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
