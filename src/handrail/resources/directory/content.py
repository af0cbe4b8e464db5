"""The content of a file in a directory: on disk, in memory until it is written, or a link.

A version is one integer that encodes the file's status on disk: device, inode, mode, size, mtime and ctime. A file
with the same version has not changed, so no other state is needed. A folder's version encodes only device, inode
and mode, so it does not depend on what the folder contains.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from handrail.errors import FileError
from handrail.resources.layer import ABSENT, Node

_WORD = (1 << 64) - 1
_IDENTITY = (1 << 64 * 4) - 1
FIRST_VERSION = 1 << 64 * 6
"""The lowest version of a file on disk. Nodes that forks create have lower versions."""


def version_of(found: os.stat_result) -> int:
    """Encode a file's status on disk as a version."""
    number = (1 << 64 | found.st_dev & _WORD) << 64 | found.st_ino
    if stat.S_ISDIR(found.st_mode):
        return (number << 64 | found.st_mode) << 192
    number = ((number << 64 | found.st_mode) << 64 | found.st_size) << 64
    return (number | found.st_mtime_ns & _WORD) << 64 | found.st_ctime_ns & _WORD


def identity(version: int) -> int:
    """Return a version without the parts that a rename or a reboot changes: ctime and device."""
    return version >> 64 & _IDENTITY


class OnDisk:
    """The content and status of a file on disk."""

    __slots__ = ("_kept", "_read", "found", "path", "staged", "version")

    def __init__(
        self, path: str, found: os.stat_result, read: Callable[[str, int], bytes], staged: Path | None = None
    ) -> None:
        self.path = path
        self.found = found
        self.version = version_of(found)
        self.staged = staged
        """The file's path in a layer if one of the call's commands wrote it, or None."""
        self._read = read
        self._kept: bytes | None = None

    def __len__(self) -> int:
        return self.found.st_size

    @property
    def kept(self) -> bool:
        return self._kept is not None

    def load(self) -> bytes:
        return self._read(self.path, self.version) if self._kept is None else self._kept

    def keep(self, data: bytes) -> None:
        """Keep these bytes in memory, so that `load` returns them even if the file changes."""
        self._kept = data


class Held:
    """The content of a file that a call wrote, and the status of the file whose mode and owner it takes, if any."""

    __slots__ = ("data", "like")

    def __init__(self, data: bytes, like: os.stat_result | None) -> None:
        self.data = data
        self.like = like

    def __len__(self) -> int:
        return len(self.data)

    def load(self) -> bytes:
        return self.data


class Link:
    """A symbolic link, with its target as written."""

    __slots__ = ("target",)

    def __init__(self, target: str) -> None:
        self.target = target

    def __len__(self) -> int:
        return len(os.fsencode(self.target))

    def load(self) -> bytes:
        raise FileError(self.target, "this is a symbolic link, which has no content. Read its target instead")


class Other:
    """A pipe, a socket or a device. It can be listed, but not read."""

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 0

    def load(self) -> bytes:
        problem = "this is a pipe, a socket or a device, not a regular file. Choose a regular file"
        raise FileError(self.path, problem)


A_FILE = Node(2, Other(""), None)
A_FOLDER = Node(3, None, None)
A_LINK = Node(4, Link(""), None)
AN_OTHER = Node(5, Other(""), None)
UNSEEN = {"file": A_FILE, "folder": A_FOLDER, "link": A_LINK, "other": AN_OTHER}
"""Placeholder nodes for names in a listing, by kind. Their versions say only which kind they are."""
_UNSEEN_VERSIONS = frozenset(node.version for node in UNSEEN.values())


def is_unseen(node: Node) -> bool:
    """Return whether a node is a placeholder from a listing, whose version says only which kind it is."""
    return node.version in _UNSEEN_VERSIONS


def is_link(node: Node) -> bool:
    return isinstance(node.data, Link)


class Folder(Node, frozen=True):
    """A folder with an explicit mode."""

    mode: int = 0


def like_of(node: Node) -> os.stat_result | None:
    """Return the status of the file whose mode and owner a node takes, or None."""
    data = node.data
    return data.found if isinstance(data, OnDisk) else data.like if isinstance(data, Held) else None


def mode_of(node: Node) -> int | None:
    """Return the mode of a file or folder, or None if the node has none."""
    if isinstance(node, Folder):
        return node.mode
    if node.is_folder:
        return node.version >> 192 & 0o7777 if node.version >= FIRST_VERSION else None
    like = like_of(node)
    return None if like is None else stat.S_IMODE(like.st_mode)


def node_of(path: str, found: tuple[os.stat_result, str] | None, read: Callable[[str, int], bytes]) -> Node:
    """Create the node for what the disk has at a path. `found` is None if nothing is there."""
    if found is None:
        return ABSENT
    status, target = found
    version = version_of(status)
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        return Node(version, None, status.st_mtime)
    if stat.S_ISREG(mode):
        return Node(version, OnDisk(path, status, read), status.st_mtime)
    return Node(version, Link(target) if stat.S_ISLNK(mode) else Other(path), status.st_mtime)
