"""`Jail`: gives access to the files under one folder, and to nothing else. `Disk`: the operations that change a disk.

When a path is opened, the kernel itself refuses it if it would leave the folder or cross a symbolic link. So there
is no gap between check and use. `Links` resolves the links that stay inside, one name at a time, through a jail.

This module uses two Linux system calls that Python does not offer, `openat2` and `renameat2`. Without `openat2`, a path
is opened one name at a time with `O_NOFOLLOW`, which is slower but has the same result. Where `renameat2` is not
supported, `move_into` uses a hard link for a file, and a check and a rename for what can't be linked, such as a folder.
`exchange` then raises `NotImplementedError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from handrail.errors import Conflict, FileError, FileLimitReached
from handrail.resources.directory.content import NOT_REGULAR, version_of
from handrail.resources.facts import SET_ID, Attributes, Facts, read_attributes, write_facts
from handrail.resources.installation import installed_in
from handrail.resources.mount import empty_folder, remove_tree
from handrail.resources.paths import (
    PART,
    RESERVED,
    is_reserved,
    join,
    on_disk,
    parts_of,
    reserved_in,
    spelled,
)

_OPENAT2 = 437
"""Number of the `openat2` system call, the same on all common architectures."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RESOLVE = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
_NOREPLACE, _EXCHANGE = 1, 2
_UNKNOWN = {errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.E2BIG}
"""Errors that mean that the kernel or the disk lacks an operation, or that a filter blocks it."""
_TRIES = 100


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _libc(name: str, *arguments: Any) -> Any:
    """Return a function from the C library, or None if it has no such function."""
    try:
        function: Any = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_long
    return function


_syscall = _libc(
    "syscall", ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_How), ctypes.c_size_t
)
_renameat2 = _libc("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)


def _probe() -> bool:
    if _syscall is None or os.uname().sysname != "Linux":
        return False
    try:
        os.close(_openat2(-100, b".", os.O_PATH))  # -100 is AT_FDCWD, the current folder
    except OSError as error:
        return error.errno not in _UNKNOWN
    return True


def _openat2(folder: int, path: bytes, flags: int) -> int:
    how = _How(flags | os.O_CLOEXEC, 0, _RESOLVE)
    number = errno.EAGAIN
    for _ in range(_TRIES):
        found = _syscall(_OPENAT2, folder, path, how, ctypes.sizeof(how))
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def open_by_steps(folder: int, path: bytes, flags: int) -> int:
    """Open a path under a folder one name at a time, without following links."""
    names = [name for name in path.split(b"/") if name != b"."] or [b"."]
    return _open_in_turn(folder, names, flags, _open_name)


def _open_name(folder: int, name: bytes, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _open_in_turn(
    folder: int, parts: Iterable[bytes], flags: int, opened: Callable[[int, bytes, int], int]
) -> int:
    """Open the parts of a path, each in the one before it, and return the last one."""
    *above, last = parts
    here = folder
    try:
        for part in above:
            inner = opened(here, part, os.O_PATH | os.O_DIRECTORY)
            if here != folder:
                os.close(here)
            here = inner
        return opened(here, last, flags)
    finally:
        if here != folder:
            os.close(here)


has_openat2 = _probe()


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open a path of any length under a folder. A path that crosses a link is refused (`ELOOP` or `ENOTDIR`).

    The last name may be a link only with `O_PATH | O_NOFOLLOW`, which opens the link itself.
    """
    encoded = os.fsencode(on_disk(path)) or b"."
    opened = _openat2 if has_openat2 else open_by_steps
    if len(encoded) <= PART:
        return opened(folder, encoded, flags)
    return _open_in_turn(folder, parts_of(encoded), flags, opened)


def move_into(source: int, name: str, target: int, new_name: str) -> None:
    """Rename a file or folder. Raises `FileExistsError` if the target exists."""
    try:
        _rename(source, name, target, new_name, _NOREPLACE)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        _move_by_link(source, name, target, new_name)


def exchange(source: int, name: str, target: int, other: str) -> None:
    """Exchange two existing names. Raises `NotImplementedError` if the kernel or the disk can't do it."""
    try:
        _rename(source, name, target, other, _EXCHANGE)
    except OSError as error:
        if error.errno in _UNKNOWN:
            raise NotImplementedError from None
        raise


def _rename(source: int, name: str, target: int, new_name: str, how: int) -> None:
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _renameat2(source, os.fsencode(name), target, os.fsencode(new_name), how) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new_name)


def _move_by_link(source: int, name: str, target: int, new_name: str) -> None:
    """Emulate `move_into` with a hard link. What can't be linked, such as a folder, is renamed after a check.

    Raises `FileExistsError` if the target exists.
    """
    try:
        os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except (
        PermissionError
    ):  # a folder can't be linked, and a rename would replace an empty folder at the target
        if os.path.lexists(f"/proc/self/fd/{target}/{new_name}"):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new_name) from None
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
    else:
        os.unlink(name, dir_fd=source)


_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG}
"""Errors that mean that a path does not exist in the jail, crosses a link, leads out of the folder or is too long."""


Found = tuple[os.stat_result, str]
"""The status of a path and, for a link, its target."""


class Jail:
    """A folder that is held open, so it stays the same folder even if it is renamed.

    `look`, `folder`, `scan` and `read` treat reserved names at any depth as if they did not exist.
    """

    __slots__ = ("fd", "installed", "root")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.installed = tuple(map(spelled, installed_in(os.path.realpath(root))))
        """The paths below the root that belong to the installation that runs Handrail, which no call can change."""
        self.fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_installed(self, path: str, *, around: bool = False) -> bool:
        """Return whether a path belongs to the installation that runs Handrail or, with `around`, contains a part of it."""
        return any(
            not each
            or path == each
            or path.startswith(f"{each}/")
            or (around and each.startswith(f"{path}/"))
            for each in self.installed
        )

    def check_in_place(self) -> os.stat_result:
        """Return the status of the open folder. Raises `FileError` if its path now leads to a different folder or to none.

        Reads and commits use the open folder, and commands use the path, so both must lead to the same folder.
        """
        try:
            status = os.fstat(self.fd)
            if os.path.samestat(os.stat(self.root), status):
                return status
        except OSError:
            pass
        problem = f"the folder {str(self.root)!r} was moved or replaced while it was open, so nothing was changed. Open the folder again"
        raise FileError(".", problem)

    def close(self) -> None:
        """Close the folder. Safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def look(self, path: str) -> Found | None:
        """Return the status of a path and, for a link, its target. Links are not followed.

        Returns None if nothing is there, or if the path contains a reserved name or crosses a link. Raises `FileError` if
        the disk reports an error.
        """
        if RESERVED in path and reserved_in(path):
            return None
        try:
            fd = open_beneath(self.fd, path, os.O_PATH | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise as_file_error(path, error) from None
        try:
            found = os.fstat(fd)
            return found, os.readlink("", dir_fd=fd) if stat.S_ISLNK(found.st_mode) else ""
        finally:
            os.close(fd)

    def facts(self, path: str) -> Facts | None:
        """Return the mode, owner, group and attributes of a file or folder, or None if it can't be opened."""
        try:
            fd = open_beneath(self.fd, path, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            is_link = stat.S_ISLNK(status.st_mode)
            attributes = () if is_link else read_attributes(f"/proc/self/fd/{fd}", follow=True)
            return Facts(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, attributes)
        finally:
            os.close(fd)

    def attributes(self, path: str) -> Attributes:
        """Return the attributes that a copy of a regular file should have, or () if it can't be opened."""
        facts = self.facts(path)
        return () if facts is None else facts.attributes

    def folder(self, path: str, flags: int = os.O_PATH) -> int:
        """Open a folder and return its descriptor. Raises `OSError` if there is no such folder, or if it can't be opened."""
        if RESERVED in path and reserved_in(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return open_beneath(self.fd, path, flags | os.O_DIRECTORY)

    def scan(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield each name in a folder with its kind: `file`, `folder`, `link` or `other`.

        Reserved names are left out. Yields nothing if the folder does not exist. Raises `FileError` if it can't be read.
        """
        try:
            fd = self.folder(path, os.O_RDONLY)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return
            raise as_file_error(path, error) from None
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not is_reserved(entry.name):
                        yield spelled(entry.name), _kind(entry)
        finally:
            os.close(fd)

    def find_reserved(self, path: str) -> str:
        """Return the path of a reserved name in a folder, at any depth, or "" if none is found.

        Folders that can't be read are skipped.
        """
        pending = [path]
        while pending:
            folder = pending.pop()
            try:
                fd = self.folder(folder, os.O_RDONLY)
            except OSError:
                continue
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if is_reserved(entry.name):
                            return join(folder, spelled(entry.name))
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(join(folder, spelled(entry.name)))
            finally:
                os.close(fd)
        return ""

    def read(self, path: str, version: int, limit: int) -> bytes:
        """Read a file. Raises `Conflict` unless it has this version both before and after the read.

        Raises `FileLimitReached` if it has more than `limit` bytes, and `FileError` if it can't be read or is not a regular file.
        """
        if RESERVED in path and reserved_in(path):
            raise Conflict([path])
        try:
            fd = open_beneath(self.fd, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise Conflict([path]) from None
            raise as_file_error(path, error) from None
        try:
            return read_open(fd, path, version, limit)
        finally:
            os.close(fd)


def read_open(fd: int, path: str, version: int, limit: int) -> bytes:
    """Read an open file. Raises `Conflict` unless it has this version both before and after the read.

    Raises `FileLimitReached` if it has more than `limit` bytes, and `FileError` if it is not a regular file.
    """
    found = os.fstat(fd)
    if version_of(found) != version:
        raise Conflict([path])
    if not stat.S_ISREG(found.st_mode):
        raise FileError(path, NOT_REGULAR)
    if found.st_size > limit:
        problem = f"it has {found.st_size} bytes, and files of at most {limit} bytes can be read. Choose a smaller file"
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


def as_file_error(path: str, error: OSError) -> FileError:
    """Convert an `OSError` from the disk to a `FileError`. For the common errors, the message says what the caller can do."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return FileError(
            path or ".",
            "permission denied. Choose another path, or change its mode",
        )
    if error.errno == errno.EROFS:
        return FileError(
            path or ".", "the disk is read-only, so nothing can be written there. Choose another path"
        )
    if error.errno == errno.ENOSPC or error.errno == errno.EDQUOT:
        return FileLimitReached(path or ".", "the disk is full. Delete something first")
    if error.errno == errno.EXDEV:
        return FileError(
            path or ".",
            "it is on a different disk from the root, so it can't be part of the same commit. Choose another path",
        )
    return FileError(path or ".", f"the disk reported an error: {error.strerror or error}")


_CHUNK = 1 << 26


class Disk:
    """The real disk: one method for each operation that changes it.

    It makes no decisions. Tests replace it to stop a process at any point of a commit, or to drop data that was never synced.
    """

    def folder(self, path: Path, mode: int) -> None:
        """Create a folder."""
        os.mkdir(path, mode)

    def write(self, path: Path, data: bytes, facts: Facts | None = None) -> None:
        """Create a file with these bytes and facts. Without `facts`, it has the mode, owner and group that any new file gets."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            if facts is not None:
                write_facts(fd, facts)
        finally:
            os.close(fd)

    def copy(self, source: int, path: Path, like: os.stat_result) -> None:
        """Copy an open file to a new path, with its attributes, and with the mode, owner and times in `like`.

        The copy does not get set-ID bits. Uses a reflink if the disk supports it.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                while os.copy_file_range(source, fd, _CHUNK):
                    pass
            except OSError:
                os.lseek(source, 0, os.SEEK_SET)
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
                while part := os.read(source, 1 << 20):
                    left = memoryview(part)
                    while left:
                        left = left[os.write(fd, left) :]
            mode = stat.S_IMODE(like.st_mode) & ~SET_ID
            write_facts(fd, Facts(mode, like.st_uid, like.st_gid, read_attributes(source)))
            os.utime(fd, ns=(like.st_atime_ns, like.st_mtime_ns))
        finally:
            os.close(fd)

    def link(self, folder: int, name: str, path: Path) -> None:
        """Create a hard link to a file."""
        os.link(name, path, src_dir_fd=folder, follow_symlinks=False)

    def symlink(self, target: str, path: Path) -> None:
        """Create a symbolic link."""
        os.symlink(target, path)

    def place(self, source: int, name: str, target: int, new_name: str) -> None:
        """Rename a file or folder. Raises `FileExistsError` if the target exists."""
        move_into(source, name, target, new_name)

    def exchange(self, source: int, name: str, target: int, other: str) -> None:
        """Exchange the files at two paths.

        If the disk can't exchange files, the file at the target is linked aside and then replaced. There is always a file at
        the target, but a change between the two steps is noticed only afterwards.
        """
        try:
            exchange(source, name, target, other)
        except NotImplementedError:
            aside = f"{name}.old"
            os.link(other, aside, src_dir_fd=target, dst_dir_fd=source, follow_symlinks=False)
            os.rename(name, other, src_dir_fd=source, dst_dir_fd=target)
            os.rename(aside, name, src_dir_fd=source, dst_dir_fd=source)

    def change_folder(self, folder: int, name: str, facts: Facts) -> None:
        """Change the mode, owner, group and attributes of a folder."""
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            write_facts(fd, facts)
        finally:
            os.close(fd)

    def special(self, path: Path, status: os.stat_result) -> None:
        """Create a pipe or a socket with the mode and owner in `status`, without set-ID bits. Nobody listens to the socket."""
        os.mknod(path, stat.S_IFMT(status.st_mode) | 0o600)
        with contextlib.suppress(PermissionError):  # only root can change the owner
            os.chown(path, status.st_uid, status.st_gid, follow_symlinks=False)
        os.chmod(path, stat.S_IMODE(status.st_mode) & ~SET_ID)

    def append(self, fd: int, data: bytes, offset: int) -> None:
        """Write bytes at the end of an open file, whose size is `offset`."""
        left = memoryview(data)
        while left:
            written = os.pwrite(fd, left, offset)
            left, offset = left[written:], offset + written

    def sync_file(self, path: Path) -> None:
        """Sync the content of a file or folder. A link, pipe, socket or device has none, and is left alone."""
        kind = stat.S_IFMT(os.lstat(path).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            return
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError:  # its mode keeps its own owner from reading it
            os.sync()
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, fd: int) -> None:
        """Sync the entries of a folder."""
        os.fsync(fd)

    def retire(self, path: Path, new_path: Path) -> None:
        """Rename one of Handrail's own folders."""
        os.rename(path, new_path)

    def forget(self, path: Path) -> None:
        """Remove one of Handrail's own files, or a folder with everything in it. Does nothing if it does not exist."""
        remove_tree(path)

    def empty(self, path: Path) -> None:
        """Remove everything in one of Handrail's own folders."""
        empty_folder(path)


DISK = Disk()
