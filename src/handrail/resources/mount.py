"""The layers of an overlay, and the marks in them.

In a layer, a character device 0:0 marks a deletion, and a file or link is the current content of its path. A folder is
merged with the content that it has in the layers below. With `user.overlay.opaque=y`, it hides that content instead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from handrail.resources.paths import RESERVED, ancestors, is_reserved, join, reach

_SETTLED = 2 * 10**9
"""A folder's ctime is relied on only if the folder was read more than this many nanoseconds after it had changed.

Disks record times in steps, so a second change soon after the first could go unnoticed.
"""


class ReservedNames:
    """Finds the reserved names in a root. Thread-safe.

    A folder is read again only if its ctime has changed, or was too recent at the last read to be relied on. Unlike the
    mtime, the ctime can't be set back.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._known: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {}
        """The ctime of each folder (0 if it was too recent to be relied on), its subfolders, and the reserved names in it."""

    def find(self, now: int) -> list[str]:
        """Return the path of each reserved name. `now` is the disk's time in nanoseconds.

        Folders that can't be read are left out. Nothing below a reserved name is searched.
        """
        known, found = self._known, dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]]()
        pending, paths = [""], list[str]()
        while pending:
            folder = pending.pop()
            at = f"{self._root}/{folder}"
            try:
                with reach(at) as here:
                    changed = os.lstat(here).st_ctime_ns
                    before = known.get(folder)
                    if before is None or before[0] != changed:
                        before = (changed if changed + _SETTLED < now else 0, *_read(here, folder))
            except OSError:  # the folder was removed meanwhile, or may not be read
                continue
            found[folder] = before
            pending += before[1]
            paths += before[2]
        self._known = found
        return paths


def _read(at: str, folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    subfolders: list[str] = []
    reserved: list[str] = []
    with os.scandir(at) as entries:
        for entry in entries:
            if is_reserved(entry.name):
                reserved.append(join(folder, entry.name))
            elif entry.is_dir(follow_symlinks=False):
                subfolders.append(join(folder, entry.name))
    return tuple(subfolders), tuple(reserved)


@lru_cache(maxsize=16)
def reserved_names(root: Path) -> ReservedNames:
    """Return the `ReservedNames` of a root. The 16 most recently used are cached, so that later commands reuse what was read."""
    return ReservedNames(root)


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
    """The disk's time when the layers were created, in nanoseconds, or 0 if unknown. A command might not see later changes."""

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
        """Take over the command's changes, and return the changed paths. `mounted_at` is `Layers.mounted_at`."""
        ...


def attribute(path: str | Path, name: str) -> bytes | None:
    """Return the value of a path's extended attribute, or None if it can't be read. Does not follow links."""
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return None


def is_opaque(folder: str | Path) -> bool:
    """Return whether a folder hides the content that it has in the layers below."""
    return attribute(folder, OPAQUE) == b"y"


def is_whiteout(facts: os.stat_result) -> bool:
    """Return whether an entry is a character device 0:0, which marks a deletion."""
    return stat.S_ISCHR(facts.st_mode) and facts.st_rdev == 0


def strip_marks(path: str | Path) -> None:
    """Remove the overlay attributes of a path, so that those set by a command have no effect. Stops silently at the first `OSError`."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            if ".overlay." in name:
                os.removexattr(path, name, follow_symlinks=False)


def mask_reserved(mask: Path, root: Path) -> None:
    """Fill a layer that hides the reserved names in a root, at any depth.

    `.handrail` in the root is hidden even if it is created later. Any other reserved name is hidden only if it exists now,
    in a folder that this process can read.
    """
    now = os.lstat(mask).st_ctime_ns
    around: dict[str, None] = {}
    for path in {RESERVED: None, **dict.fromkeys(reserved_names(root).find(now))}:
        for folder in ancestors(path):
            if folder not in around:
                around[folder] = None
                with reach(mask / folder) as at:
                    os.mkdir(at)
        with reach(mask / path) as at:
            _white_out(at)
    # Inner folders come first, because an outer folder may get a mode that denies access to them.
    for folder in sorted(around, reverse=True):
        with (
            contextlib.suppress(FileNotFoundError),  # the folder was removed meanwhile
            reach(mask / folder) as at,
            reach(root / folder) as original,
        ):
            _imitate(at, original)


def _imitate(folder: str, original: str) -> None:
    """Give a folder in the mask the mode, times, attributes and, if allowed, owner and group of the original.

    Commands see the folder in the mask instead of the original.
    """
    facts = os.stat(original)
    with contextlib.suppress(PermissionError):
        os.chown(folder, facts.st_uid, facts.st_gid)
    shutil.copystat(original, folder)
    strip_marks(folder)


def _white_out(path: str) -> None:
    try:
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    except PermissionError:  # not allowed to make devices, so an opaque empty folder hides the content below
        os.mkdir(path)
        os.setxattr(path, OPAQUE, b"y")


def remove_tree(path: Path) -> None:
    """Remove a file or folder, if it exists, without following links.

    Works at any depth, even if the modes of the folder and its subfolders forbid it.
    """
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(path)
            return
        if stat.S_IMODE(mode) != 0o700:
            os.chmod(path, 0o700)
    except FileNotFoundError:
        return
    empty_folder(path)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def empty_folder(path: Path) -> None:
    """Remove everything in a folder, at any depth, without following links.

    A folder inside a subfolder is moved up into `path` before it is opened, so paths stay short and few descriptors are open at once.
    """
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
