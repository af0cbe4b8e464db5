"""The staging folder of a root: its location, and which root it belongs to. Also the roots that are in use.

By default, a staging folder is beside its root. If the root is a mount point, or if nothing can be created beside it, the
staging folder is in the root, under a reserved name.

The file `identity` in a staging folder gives the root an id, which stays the same when the root is moved or mounted
elsewhere. The file also records the inodes of the root and of the staging folder, and when the root was created. So
neither a copy of a root nor a folder that replaces it has the identity of the original. Device numbers are not
recorded, because they change when a disk is mounted again, but root and staging folder must be on the same device.

A root's claims cover the paths below it. If one process of this user used a folder and another a folder inside it, neither
would see the other's claims, so the second one is refused. Each root in use has a file in the state folder, which its process
keeps locked. The kernel releases the lock if the process dies, and the next process that looks removes the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import stat
import struct
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from handrail.errors import DefinitionError, FileError, JournalError
from handrail.ids import random_id
from handrail.journal.location import create_folders, state_folder
from handrail.resources.paths import is_reserved

log = logging.getLogger("handrail.files")

IDENTITY = "identity"
INSIDE = ".staging.handrail"
"""Name of a staging folder that is in its root."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a root, as its staging folder records it."""

    id: str
    inode: int
    """The root's inode."""
    born: int
    """When the root was created, in nanoseconds since 1970, or 0 if the disk does not say."""
    own_inode: int
    """The inode of the staging folder."""


class FolderStatus(NamedTuple):
    """The device, inode and creation time that identify a folder on disk, with its owner and its mount."""

    device: int
    inode: int
    born: int
    """When it was created, in nanoseconds since 1970, or 0 if the disk does not say."""
    owner: int
    mount: int
    """The mount that it was opened through, or its device if the kernel does not say.

    Files can't be renamed from one mount to another, even on the same disk.
    """


# --- statx, which Python does not offer ---------------------------------------------------------------

_AT_EMPTY_PATH, _STATX_BASIC, _STATX_BORN, _STATX_MOUNT = 0x1000, 0x07FF, 0x0800, 0x1000


def _find_statx() -> Any:
    try:
        function: Any = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)
    return function


_statx = _find_statx()


def status_of(folder: int) -> FolderStatus:
    """Return the status of an open folder."""
    found = os.fstat(folder)
    born, mount = 0, found.st_dev
    if _statx is not None:
        buffer = ctypes.create_string_buffer(256)
        if not _statx(folder, b"", _AT_EMPTY_PATH, _STATX_BASIC | _STATX_BORN | _STATX_MOUNT, buffer):
            (mask,) = struct.unpack_from("I", buffer, 0)
            if mask & _STATX_BORN:
                seconds, nanoseconds = struct.unpack_from("qI", buffer, 80)
                born = seconds * 1_000_000_000 + nanoseconds
            if mask & _STATX_MOUNT:
                (mount,) = struct.unpack_from("Q", buffer, 144)
    return FolderStatus(found.st_dev, found.st_ino, born, found.st_uid, mount)


_NETWORK = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gfs2", "ocfs2", "beegfs"]
)
_NETWORK_FUSE = frozenset(["sshfs", "glusterfs", "s3fs", "goofys", "rclone", "ceph-fuse", "cvmfs2"])


def network_type(folder: int) -> str:
    """Return the type of the filesystem of an open folder if other machines can change it too; otherwise ""."""
    mount = str(status_of(folder).mount)
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts,
    ):
        for line in mounts:
            fields = line.split()
            if fields[0] == mount:
                kind = fields[fields.index("-") + 1]
                return kind if kind in _NETWORK or kind.removeprefix("fuse.") in _NETWORK_FUSE else ""
    return ""


# --- location ------------------------------------------------------------------------------------------


def default_staging(root: Path, folder: int) -> Path:
    """Return the default path of a root's staging folder. `folder` is the open root."""
    beside = root.parent / f".{root.name}.handrail"
    try:
        around = os.open(root.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return root / INSIDE
    try:
        is_mount_point = root == root.parent or status_of(around).mount != status_of(folder).mount
    finally:
        os.close(around)
    if is_mount_point or not (os.path.lexists(beside) or os.access(root.parent, os.W_OK | os.X_OK)):
        return root / INSIDE
    return beside


def find_staging(root: FolderStatus, wanted: Path) -> Path:
    """Return the path of a root's staging folder: `wanted`, or another path beside it if the root was renamed.

    If the root has none yet, returns a path that no other root's staging folder has.
    """
    found = read_identity(wanted)
    if found is not None and belongs(found, wanted, root):
        return wanted
    for each in staging_folders(wanted.parent):
        other = read_identity(each)
        if other is not None and belongs(other, each, root):
            return each  # the root was renamed
    if found is None:
        return wanted
    stem = wanted.name.removesuffix(".handrail")
    return wanted.with_name(f"{stem}-{root.inode:x}.handrail")


def staging_folders(around: Path) -> Iterator[Path]:
    """Yield the paths in a folder that have reserved names, as staging folders do."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(around)):
            if is_reserved(name):
                yield around / name


def refuse_case_insensitive(folder: Path, root: Path) -> None:
    """Raise `DefinitionError` if the disk of this folder ignores case. A file is created in the folder to find out."""
    probe = folder / "Probe"
    probe.touch()
    try:
        same = (folder / "pROBE").exists()
    finally:
        probe.unlink()
    if same:
        raise case_insensitive(root)


def case_insensitive(root: Path) -> DefinitionError:
    return DefinitionError(
        f"{str(root)!r} does not distinguish 'a' from 'A', so two paths could be one file. "
        "Use a folder on a case-sensitive disk."
    )


# --- identity -------------------------------------------------------------------------------------------


def read_identity(staging: Path) -> Identity | None:
    """Return the identity that a staging folder records, or None if it is missing or can't be read."""
    try:
        return msgspec.json.decode((staging / IDENTITY).read_bytes(), type=Identity)
    except (OSError, msgspec.DecodeError):
        return None


def belongs(found: Identity, staging: Path, root: FolderStatus) -> bool:
    """Return whether a staging folder that records this identity belongs to this root and is private."""
    try:
        own = os.lstat(staging)
    except OSError:
        return False
    return (
        (found.inode, found.own_inode, root.device) == (root.inode, own.st_ino, own.st_dev)
        and (found.born == root.born or not found.born or not root.born)
        and _is_private(own, root)
    )


def claim(staging: Path, root: Path, folder: int) -> str:
    """Return the id of a root from its staging folder, which must exist. The first claim creates the id.

    Raises `FileError` if the staging folder belongs to a different root, is not a folder, or can be changed by other users.
    """
    facts, own = status_of(folder), os.lstat(staging)
    if not stat.S_ISDIR(own.st_mode) or not _is_private(own, facts):
        problem = f"{str(staging)!r} is not a folder, or other users can change it, so nothing can be staged there. Remove it, or pass a different staging="
        raise FileError(".", problem)
    found = read_identity(staging)
    if found is None:
        made = Identity(id=random_id(), inode=facts.inode, born=facts.born, own_inode=own.st_ino)
        _put(staging, made, replace=(staging / IDENTITY).exists())
        found = read_identity(staging)
    if found is None or not belongs(found, staging, facts):
        raise FileError(
            ".",
            f"{str(staging)!r} holds the staged changes of a different folder, or of one that was at {str(root)!r} "
            "before. Pass a different staging=",
        )
    return found.id


def _is_private(staging: os.stat_result, root: FolderStatus) -> bool:
    """Return whether nobody but this user or the owner of the root can change the content of a staging folder."""
    return staging.st_uid in (os.geteuid(), root.owner) and not staging.st_mode & _OTHERS_WRITE


def _put(staging: Path, identity: Identity, *, replace: bool) -> None:
    """Write an identity atomically. Unless `replace` is set, keep an existing one if the disk supports hard links."""
    made = staging / f"{IDENTITY}.{random_id()}"
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(identity))
        if not replace:
            try:
                os.link(made, staging / IDENTITY)
                return
            except FileExistsError:
                return
            except OSError:  # the disk does not support hard links
                pass
        os.rename(made, staging / IDENTITY)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)


@contextlib.contextmanager
def reported(leftover: Path) -> Generator[None]:
    """Log an `OSError` raised in this block instead of raising it, so that one bad leftover does not stop the cleanup."""
    try:
        yield
    except OSError as error:
        log.warning("%s was not cleaned up, because the disk reported an error: %s", leftover, error)


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
    # A root's claims cover the paths below it. If one process used a folder and another a folder inside it, neither would see
    # the other's claims.
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
