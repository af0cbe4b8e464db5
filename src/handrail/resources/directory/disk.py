"""`Disk`: the operations that change a disk, one method for each.

`Disk` makes no decisions. Tests replace it to stop a process at any point of a commit, or to drop data that was
never synced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from handrail.resources.directory.jail import exchange, move_into
from handrail.resources.facts import SET_ID, Facts, read_attributes, write_facts
from handrail.resources.mount import empty_folder, remove_tree

_CHUNK = 1 << 26


class Disk:
    """The real disk."""

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
