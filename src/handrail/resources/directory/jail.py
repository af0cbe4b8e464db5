"""`Jail`: access to what lies under one folder, and to nothing else.

The kernel refuses every path that would leave the folder or cross a symbolic link, at the moment it
is opened, so there is no gap between check and use. Links that stay inside are followed by the layer
above, one name at a time, through here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from handrail.errors import Conflict, FileError, FileLimitReached
from handrail.resources.directory.content import version_of
from handrail.resources.directory.syscalls import open_beneath

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG}
"""Errors that mean nothing is there, including behind a link and above the folder."""


Found = tuple[os.stat_result, str]
"""The status of a path and, for a link, its target."""


class Jail:
    """A folder, held open while this is in use. It stays the same folder when renamed."""

    __slots__ = ("fd", "root")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the folder. Safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def look(self, path: str) -> Found | None:
        """Return what is at a path, without following links; None for nothing, or behind a link."""
        try:
            fd = open_beneath(self.fd, path, os.O_PATH | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise refusal(path, error) from None
        try:
            found = os.fstat(fd)
            return found, os.readlink("", dir_fd=fd) if stat.S_ISLNK(found.st_mode) else ""
        finally:
            os.close(fd)

    def folder(self, path: str, flags: int = os.O_PATH) -> int:
        """Open a folder. Raises `OSError` if there is none."""
        return open_beneath(self.fd, path, flags | os.O_DIRECTORY)

    def scan(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the names in a folder with their kind: `file`, `folder`, `link` or `other`. A missing folder has none."""
        try:
            fd = self.folder(path, os.O_RDONLY)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return
            raise refusal(path, error) from None
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    yield entry.name, _kind(entry)
        finally:
            os.close(fd)

    def read(self, path: str, version: int, limit: int) -> bytes:
        """Read the file seen at this version. Raises `Conflict` if it has changed."""
        try:
            fd = open_beneath(self.fd, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise Conflict([path]) from None
            raise refusal(path, error) from None
        try:
            return read_open(fd, path, version, limit)
        finally:
            os.close(fd)


def read_open(fd: int, path: str, version: int, limit: int) -> bytes:
    """Read an open file, if it is at this version before and after."""
    found = os.fstat(fd)
    if version_of(found) != version:
        raise Conflict([path])
    if not stat.S_ISREG(found.st_mode):
        raise FileError(path, "this is a pipe, a socket or a device, not a regular file")
    if found.st_size > limit:
        problem = f"it has {found.st_size} bytes and the limit for reading a file is {limit}. Read a part of it another way"
        raise FileLimitReached(path, problem)
    parts: list[bytes] = []
    left = found.st_size
    while left > 0 and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    if version_of(os.fstat(fd)) != version:
        raise Conflict([path])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def refusal(path: str, error: OSError) -> FileError:
    """Turn an error of the disk into one for the caller who gave the path."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return FileError(
            path or ".",
            "permission denied. Choose another path, or change its mode",
        )
    if error.errno == errno.EROFS:
        return FileError(path or ".", "the disk is read-only. Nothing can be written there")
    if error.errno == errno.ENOSPC or error.errno == errno.EDQUOT:
        return FileLimitReached(path or ".", "the disk is full. Delete something first")
    if error.errno == errno.EXDEV:
        return FileError(
            path or ".", "it is on another disk than the root, so it can't be part of the same commit"
        )
    return FileError(path or ".", f"the disk reported an error: {error.strerror or error}")
