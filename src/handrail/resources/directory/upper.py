"""A fork's changes as a folder in Linux overlay format, for a command to work on.

A regular file or link is the current content; a character device 0:0 marks a deletion; a folder with
`user.overlay.opaque=y` hides the layers below. Overlays are mounted with `userxattr`.

Where such a device can't be created, an empty file with `user.overlay.whiteout`, in a folder with
`user.overlay.opaque=x`, marks the deletion. Kernels from 6.8 on accept that in lower layers only, so a
layer with such markers always becomes a lower one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from handrail.errors import FileError
from handrail.resources.directory.content import Held, Link, OnDisk, mode_of, version_of
from handrail.resources.directory.disk import Disk
from handrail.resources.layer import Node
from handrail.resources.paths import join, split

_OPAQUE, _WHITEOUT, _ORIGIN = "user.overlay.opaque", "user.overlay.whiteout", "user.overlay.origin"


class Entry(msgspec.Struct, frozen=True):
    """One path in an upper folder."""

    path: str
    kind: str
    """`file`, `folder`, `link`, `gone` or `other`."""
    status: os.stat_result | None = None
    opaque: bool = False
    """For a folder, whether it hides the layers below."""
    copied: bool = False
    """Whether it was copied up from a lower layer."""


class Upper:
    """The topmost layer of a fork, writable until another layer lies above it."""

    __slots__ = ("_disk", "_written", "folder", "is_marked")

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self.folder = folder
        self.is_marked = False
        """Whether deletions use marker files, which an overlay honours in lower layers only."""
        self._written: dict[str, tuple[int, bool]] = {}
        """The marks of what the fork wrote here. Any difference was made by a command."""

    def put(
        self,
        path: str,
        node: Node,
        fill: Callable[[OnDisk, Path], None],
        mode_below: Callable[[str], int | None],
    ) -> None:
        """Put a node at a path. `fill` provides the bytes of a file on disk."""
        self._make_way(path, mode_below)
        at = self.folder / path
        self._disk.forget(at)
        data = node.data
        if not node.version:
            if not self._under_opaque(path):
                self._white_out(at)
        elif data is None:
            os.mkdir(at, 0o777)
            mode = mode_of(node)
            if mode is not None:
                os.chmod(at, mode)
            os.setxattr(at, _OPAQUE, b"y")
        elif isinstance(data, Link):
            os.symlink(data.target, at)
        elif isinstance(data, OnDisk):
            fill(data, at)
        elif isinstance(data, Held):
            self._disk.write(at, data.data, data.like)
        if os.path.lexists(at):
            self._written[path] = _mark(_entry(path, at))

    def _make_way(self, path: str, mode_below: Callable[[str], int | None]) -> None:
        folder = split(path)[0]
        missing: list[str] = []
        while folder and not (self.folder / folder).is_dir():
            missing.append(folder)
            folder = split(folder)[0]
        for folder in reversed(missing):
            at = self.folder / folder
            self._disk.forget(at)  # a whiteout where there is a folder again
            os.mkdir(at, 0o777)
            mode = mode_below(folder)
            if mode is not None:
                os.chmod(at, mode)
            self._written[folder] = _mark(_entry(folder, at))

    def _under_opaque(self, path: str) -> bool:
        folder = split(path)[0]
        while folder:
            if _attribute(self.folder / folder, _OPAQUE) == b"y":
                return True
            folder = split(folder)[0]
        return False

    def _white_out(self, at: Path) -> None:
        try:
            os.mknod(at, stat.S_IFCHR, os.makedev(0, 0))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOTSUP):
                raise
            self._disk.write(at, b"")
            os.setxattr(at, _WHITEOUT, b"y")
            for folder in {at.parent, self.folder}:
                os.setxattr(folder, _OPAQUE, b"x")
            self.is_marked = True

    def changed(self) -> Iterator[Entry]:
        """Yield what a command has changed since the last call, each folder before its content."""
        gone = set(self._written)
        pending = [""]
        while pending:
            folder = pending.pop()
            try:
                with os.scandir(self.folder / folder) as entries:
                    found = sorted(entries, key=lambda entry: entry.name)
            except PermissionError:
                problem = "a command removed the read permission of this folder. Keep its mode"
                raise FileError(folder, problem) from None
            for each in found:
                path = join(folder, each.name)
                entry = _entry(path, Path(each.path))
                gone.discard(path)
                if entry.kind == "folder":
                    pending.append(path)
                if self._written.get(path) != _mark(entry):
                    self._written[path] = _mark(entry)
                    yield entry
        for path in sorted(gone):  # created in this fork, so nothing below needs hiding
            del self._written[path]
            yield Entry(path, "gone")


def strip_marks(path: Path) -> None:
    """Remove all overlay attributes from a file, folder or link."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            if ".overlay." in name:
                os.removexattr(path, name, follow_symlinks=False)


def _mark(entry: Entry) -> tuple[int, bool]:
    return (version_of(entry.status) if entry.status else 0), entry.opaque


def _entry(path: str, at: Path) -> Entry:
    status = os.lstat(at)
    mode = status.st_mode
    if stat.S_ISCHR(mode) and status.st_rdev == 0:
        return Entry(path, "gone", status)
    if stat.S_ISDIR(mode):
        return Entry(path, "folder", status, opaque=_attribute(at, _OPAQUE) == b"y")
    copied = _attribute(at, _ORIGIN) is not None
    if stat.S_ISREG(mode):
        gone = status.st_size == 0 and _attribute(at, _WHITEOUT) is not None
        return Entry(path, "gone" if gone else "file", status, copied=copied)
    return Entry(path, "link" if stat.S_ISLNK(mode) else "other", status, copied=copied)


def _attribute(at: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(at, name, follow_symlinks=False)
    except OSError:
        return None
