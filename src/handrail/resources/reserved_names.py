"""`ReservedNames`: finds the reserved names below a root, and caches the content of folders between searches."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from handrail.resources.long_paths import reach
from handrail.resources.paths import is_reserved, join

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
