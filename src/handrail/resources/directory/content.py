"""The content of a path in a directory: a file on disk, a file in memory, a link, a pipe, a socket or a device.

The version of a file on disk is one integer that encodes its status: device, inode, mode, size, mtime and ctime. A file
with the same version has not changed, so no other state is needed. A folder's version encodes only device, inode
and mode, so it does not depend on what the folder contains.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from handrail.errors import FileError
from handrail.resources.facts import SET_ID, Attributes, Facts
from handrail.resources.tree import ABSENT, Link, Node, Unseen

_WORD = (1 << 64) - 1
_IDENTITY = (1 << 64 * 4) - 1
FIRST_VERSION = 1 << 64 * 6
"""The lowest version of a file or folder on disk. Nodes that forks create have lower versions."""


def version_of(found: os.stat_result) -> int:
    """Encode a file's status on disk as a version. A folder's version does not depend on its size or times."""
    number = (1 << 64 | found.st_dev & _WORD) << 64 | found.st_ino
    if stat.S_ISDIR(found.st_mode):
        return (number << 64 | found.st_mode) << 192
    number = ((number << 64 | found.st_mode) << 64 | found.st_size) << 64
    return (number | found.st_mtime_ns & _WORD) << 64 | found.st_ctime_ns & _WORD


def identity(version: int) -> int:
    """Return a version without the parts that a rename or a reboot changes: ctime and device."""
    return version >> 64 & _IDENTITY


class Source(Protocol):
    """A place from which the content and the attributes of a file on disk are read."""

    def read(self, path: str, version: int) -> bytes:
        """Return the bytes. Raises `Conflict` if the file no longer has this version, and `FileError` if it can't be read."""
        ...

    def attributes(self, path: str) -> Attributes:
        """Return the extended attributes that a copy of the file should have."""
        ...


class OnDisk:
    """The content and status of a file on disk."""

    __slots__ = ("_attributes", "_kept", "_source", "found", "path", "staged", "version")

    def __init__(self, path: str, found: os.stat_result, source: Source, staged: Path | None = None) -> None:
        self.path = path
        self.found = found
        self.version = version_of(found)
        self.staged = staged
        """The file's path in a layer if one of the call's commands wrote it, or None."""
        self._source = source
        self._kept: bytes | None = None
        self._attributes: Attributes | None = None

    @property
    def facts(self) -> Facts:
        """The file's mode, owner, group and attributes. Changing the attributes makes a new version, so they are read once."""
        if self._attributes is None:
            self._attributes = self._source.attributes(self.path)
        found = self.found
        return Facts(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, self._attributes)

    def __len__(self) -> int:
        return self.found.st_size

    @property
    def kept(self) -> bool:
        return self._kept is not None

    def load(self) -> bytes:
        return self._source.read(self.path, self.version) if self._kept is None else self._kept

    def keep(self, data: bytes) -> None:
        """Keep these bytes in memory, so that `load` returns them even if the file changes."""
        self._kept = data


class Held:
    """The content of a file that a call wrote. `facts` are the facts that the file gets; None means those of any new file."""

    __slots__ = ("data", "facts")

    def __init__(self, data: bytes, facts: Facts | None) -> None:
        self.data = data
        self.facts = facts

    def __len__(self) -> int:
        return len(self.data)

    def load(self) -> bytes:
        return self.data


class Special(OnDisk):
    """A pipe, a socket or a device. It can be listed, moved and deleted, but neither read nor written."""

    __slots__ = ()

    def __len__(self) -> int:
        return 0

    @property
    def is_new(self) -> bool:
        """Whether it does not exist on disk yet."""
        return self.found.st_ino == 0

    @property
    def kind(self) -> str:
        mode = self.found.st_mode
        return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"

    def load(self) -> bytes:
        raise FileError(self.path, NOT_REGULAR)


NOT_REGULAR = "this is a pipe, a socket or a device, not a regular file. Choose a regular file"


def is_pipe_or_socket(status: os.stat_result | None) -> bool:
    return status is not None and (stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode))


class _Unlooked:
    """The content of a file that was listed but not looked up."""

    __slots__ = ()

    def __len__(self) -> int:
        return 0

    def load(self) -> bytes:
        raise FileError("", "this file was listed but not looked up. Look it up before you read it")


UNSEEN = {
    "file": Unseen(2, _Unlooked(), None),
    "folder": Unseen(3, None, None),
    "link": Unseen(4, Link(""), None),
    "other": Unseen(5, _Unlooked(), None),
}
"""Placeholder nodes for names in a listing, by kind."""


class Folder(Node, frozen=True):
    """A folder with explicit facts."""

    facts: Facts = Facts(0)


def facts_of(node: Node) -> Facts | None:
    """Return the mode, owner, group and attributes of a file or folder, or None if the node does not record them.

    A node for a folder on disk does not record them.
    """
    if isinstance(node, Folder):
        return node.facts
    data = node.data
    return data.facts if isinstance(data, OnDisk | Held) else None


def facts_for_new_content(node: Node) -> Facts | None:
    """Return the facts that new content at a node's path inherits, without set-ID bits; None if there are none to inherit."""
    facts = facts_of(node)
    if facts is None or isinstance(node.data, Special):
        return None
    return Facts(facts.mode & ~SET_ID, facts.uid, facts.gid, facts.attributes)


def mode_of(node: Node) -> int | None:
    """Return the mode of a file or folder, or None if the node does not record it."""
    if isinstance(node, Folder):
        return node.facts.mode
    if node.is_folder:
        return node.version >> 192 & 0o7777 if node.version >= FIRST_VERSION else None
    data = node.data
    if isinstance(data, OnDisk):
        return stat.S_IMODE(data.found.st_mode)
    return data.facts.mode if isinstance(data, Held) and data.facts is not None else None


def node_of(path: str, found: tuple[os.stat_result, str] | None, source: Source) -> Node:
    """Create the node of a path from its status on disk and, for a link, its target. `found` is None if nothing is there."""
    if found is None:
        return ABSENT
    status, target = found
    version = version_of(status)
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        return Node(version, None, status.st_mtime)
    if stat.S_ISREG(mode):
        return Node(version, OnDisk(path, status, source), status.st_mtime)
    return Node(
        version, Link(target) if stat.S_ISLNK(mode) else Special(path, status, source), status.st_mtime
    )
