"""The roots that this user's processes are using, so that no two of them overlap.

A root's claims cover the paths below it. If one process used a folder and another a folder inside it, neither would see
the other's claims, so the second one is refused.

Each root in use has a file in the state folder, which its process keeps locked. The kernel releases the lock if the process
dies, and the next process that looks removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from handrail.errors import FileError, JournalError
from handrail.ids import random_id
from handrail.journal.location import create_folders, state_folder

log = logging.getLogger("handrail.files")

_Folder = tuple[int, int]
"""The device and inode of a folder."""


class _OpenRoot(msgspec.Struct, frozen=True):
    path: str
    process: int
    folders: list[_Folder]
    """The root itself, and then the folders that it is in, from the inside out."""


def enter_root(root: Path, fd: int) -> int | None:
    """Note that this process uses a root, and return a descriptor to close when it no longer does.

    Returns None if there is no state folder to note it in. Raises `FileError` if a live process uses a folder that contains the root or that
    is inside it.
    """
    try:
        place = state_folder() / "roots"
        create_folders(place)
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, JournalError):
        return None
    mine = _OpenRoot(str(root), os.getpid(), [*_folders_of(fd)])
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for other in _others(place):
            _refuse_overlap(mine, other)
        file = os.open(place / random_id(), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(file, msgspec.msgpack.encode(mine))
        fcntl.flock(file, fcntl.LOCK_EX)
        return file
    except FileError:
        raise
    except OSError as error:
        log.warning(
            "whether another process uses a folder that overlaps with %s is not known: %s", root, error
        )
        return None
    finally:
        os.close(lock)


def _folders_of(fd: int) -> Iterator[_Folder]:
    """Yield the device and inode of an open folder, and of each folder that it is in."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    last: _Folder | None = None
    try:
        while True:
            status = os.fstat(here)
            found = (status.st_dev, status.st_ino)
            if found == last:  # the root of the filesystem is in itself
                return
            yield found
            last = found
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = above
    finally:
        os.close(here)


def _others(place: Path) -> Iterator[_OpenRoot]:
    """Yield the roots that are in use, and remove the files of those that are not."""
    for name in os.listdir(place):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            file = os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(place / name)
            except BlockingIOError:
                yield msgspec.msgpack.decode(os.pread(file, 1 << 16, 0), type=_OpenRoot)
            finally:
                os.close(file)


def _refuse_overlap(mine: _OpenRoot, other: _OpenRoot) -> None:
    if mine.folders[0] == other.folders[0]:
        return  # the same root: both use its claims
    if other.folders[0] in mine.folders:
        how, outer = f"it is in {other.path!r}", other.path
    elif mine.folders[0] in other.folders:
        how, outer = f"it contains {other.path!r}", mine.path
    else:
        return
    who = "this process" if other.process == os.getpid() else f"the process {other.process}"
    raise FileError(
        mine.path,
        f"{how}, which {who} uses as the root of a DirectoryFilesystem. Calls on two roots that overlap could not be isolated "
        f"from each other: use {outer!r} in both places, or try again when that process has closed its folder",
    )
