"""The layers of an overlay, and the marks in them.

In a layer, a regular file or link is the current content, and a character device 0:0 marks a deletion. A folder
with `user.overlay.opaque=y` hides the layers below it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from handrail.resources.paths import RESERVED, is_reserved

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPAQUE = "user.overlay.opaque"


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of an overlay over a real folder, in Linux overlay format."""

    lowers: tuple[Path, ...]
    """Read-only layers, topmost first. The last one is the real folder."""
    upper: Path
    """The folder for writes. It may contain earlier writes."""
    work: Path
    """A private folder for temporary files, on the same disk as `upper`."""
    mounted_at: int = 0
    """The disk's time when the layers were created, in nanoseconds. A command might not see later changes."""

    @property
    def root(self) -> Path:
        """The real folder."""
        return self.lowers[-1]


@runtime_checkable
class Layered(Protocol):
    """Files that a command can work on, such as a fork of a real folder."""

    def layers(self) -> Layers:
        """Return the layers to mount so that a command sees these files and writes to them."""
        ...

    def absorb(self, mounted_at: int) -> tuple[str, ...]:
        """Take over what the command wrote, and return the changed paths."""
        ...


def attribute(path: str | Path, name: str) -> bytes | None:
    """Return the value of a path's extended attribute, or None if it can't be read. Does not follow links."""
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None


def is_opaque(folder: str | Path) -> bool:
    """Return whether a folder hides the layers below it."""
    return attribute(folder, OPAQUE) == b"y"


def is_whiteout(facts: os.stat_result) -> bool:
    """Return whether an entry marks a deletion."""
    return stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0


def strip_marks(path: str | Path) -> None:
    """Remove all overlay attributes from a path, even those that a command set, so that none takes effect."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            if ".overlay." in name:
                os.removexattr(path, name, follow_symlinks=False)


_MASKED = 1000
"""Maximum number of a root's subfolders that are searched for reserved names."""


def mask_reserved(mask: Path, root: Path) -> None:
    """Fill a layer that hides the reserved names in a root, and `.handrail` in its immediate subfolders.

    `.handrail` in the root is hidden even if it is created later. Other reserved names are not searched for, so
    that the cost does not grow with the root. A command can read those, but its changes to them are discarded.
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
    except PermissionError:  # fall back to an empty folder that hides the one below
        os.mkdir(path)
        os.setxattr(path, OPAQUE, b"y")


def remove_tree(path: Path) -> None:
    """Remove a file or folder, if it exists, without following links.

    Works at any depth, and even if the permissions of inner folders forbid it. Each inner folder is moved to the top
    before it is opened, so paths stay short and two descriptors are enough.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        os.chmod(path, 0o700)
    except FileNotFoundError:
        return
    top = os.open(path, _FOLDER)
    try:
        moved = 0
        while folders := _remove_files(top):
            for name in folders:
                os.chmod(name, 0o700, dir_fd=top)
                here = os.open(name, _FOLDER, dir_fd=top)
                try:
                    for inner in _remove_files(here):
                        os.chmod(inner, 0o700, dir_fd=here)
                        while True:
                            moved += 1
                            if not os.path.lexists(f"/proc/self/fd/{top}/{moved}"):
                                break
                        os.rename(inner, str(moved), src_dir_fd=here, dst_dir_fd=top)
                finally:
                    os.close(here)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def _remove_files(folder: int) -> list[str]:
    """Remove everything except folders from an open folder. Returns the names of the folders."""
    folders: list[str] = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=folder)
    return folders
