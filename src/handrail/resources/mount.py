"""The folders an overlay is mounted from, and the marks in them.

A regular file or link is the current content; a character device 0:0 marks a deletion; a folder with
`user.overlay.opaque=y` hides the layers below.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from handrail.resources.paths import RESERVED, is_reserved

OPAQUE = "user.overlay.opaque"


@dataclass(frozen=True, slots=True)
class Layers:
    """A folder and the writes over it, in Linux overlay format."""

    lowers: tuple[Path, ...]
    """Read-only layers, topmost first. The last one is the real folder."""
    upper: Path
    """The folder for writes. It may contain earlier writes."""
    work: Path
    """A private folder on the same filesystem as `upper`."""
    mounted_at: int = 0
    """The disk's time when the layers were created, in nanoseconds. Later changes may not have been seen."""

    @property
    def root(self) -> Path:
        """The real folder."""
        return self.lowers[-1]


@runtime_checkable
class Layered(Protocol):
    """Files that a command can work on, such as a fork of a real folder."""

    def layers(self) -> Layers:
        """Return the layers to mount, so that a command sees these files and writes into them."""
        ...

    def absorb(self, mounted_at: int) -> tuple[str, ...]:
        """Take over what the command wrote, and return its paths."""
        ...


def attribute(path: str | Path, name: str) -> bytes | None:
    """Return an extended attribute of a path itself, if it has one."""
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None


def is_opaque(folder: str | Path) -> bool:
    """Return whether this folder hides the layers below it."""
    return attribute(folder, OPAQUE) == b"y"


def is_whiteout(facts: os.stat_result) -> bool:
    """Return whether this entry marks a deletion."""
    return stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0


def strip_marks(path: str | Path) -> None:
    """Remove all overlay attributes, including those that a command has set, so that none has an effect."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            if ".overlay." in name:
                os.removexattr(path, name, follow_symlinks=False)


_MASKED = 1000
"""Maximum number of folders in a root that are looked through for reserved names."""


def mask_reserved(mask: Path, root: Path) -> None:
    """Fill a layer that hides the reserved names of a root: `.handrail`, even one made later, and what its folders have.

    Deeper ones are not looked for, so that the cost does not grow with the root. A command may read those,
    and never changes them.
    """
    _white_out(mask / RESERVED)
    folders: list[str] = []
    with os.scandir(root) as entries:
        for entry in entries:
            if is_reserved(entry.name):
                if entry.name != RESERVED:
                    _white_out(mask / entry.name)
            elif len(folders) < _MASKED and entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
    for name in folders:
        if os.path.lexists(root / name / RESERVED):
            (mask / name).mkdir()
            _white_out(mask / name / RESERVED)
            shutil.copystat(root / name, mask / name)
            facts = os.stat(root / name)
            with contextlib.suppress(PermissionError):
                os.chown(mask / name, facts.st_uid, facts.st_gid)


def _white_out(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError:  # the next best: an empty folder that hides the one below
        os.mkdir(path)
        os.setxattr(path, OPAQUE, b"y")


def remove_tree(path: Path) -> None:
    """Remove a file or folder, if it exists, without following links.

    Works without permissions on its folders.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
    except FileNotFoundError:
        return
    pending = [path]
    folders: list[Path] = []
    while pending:
        folder = pending.pop()
        folders.append(folder)
        try:
            entries = list(os.scandir(folder))
        except PermissionError:
            os.chmod(folder, 0o700)
            entries = list(os.scandir(folder))
        if entries and not os.access(folder, os.W_OK | os.X_OK):
            os.chmod(folder, 0o700)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)
    for folder in reversed(folders):
        try:
            os.rmdir(folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
