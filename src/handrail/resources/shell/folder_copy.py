"""Copies of a folder, which capture a command's writes if no overlay can be mounted.

The command works on a copy of the folder, which is checked for changes afterwards. The cost grows with the folder,
because every file is copied (as a reflink if the disk supports it) and checked. Changes are written to the
upper layer in overlay format, so callers see no difference.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from handrail.resources.facts import Attributes, read_attributes, write_attributes
from handrail.resources.mount import OPAQUE, is_opaque, is_whiteout, remove_tree, strip_marks
from handrail.resources.paths import is_reserved

_FICLONE = 0x40049409
_TICKS = 200

Fingerprint = tuple[int, int, int, int, int, int, int]


class Copy:
    """A copy of several layers merged into one folder."""

    def __init__(self, lowers: Sequence[Path], upper: Path, target: Path, check: Callable[[], None]) -> None:
        self._lowers = [os.fspath(lower) for lower in lowers]
        self._upper = os.fspath(upper)
        self._target = os.fspath(target)
        self._check = check
        self._before: dict[str, Fingerprint] = {}
        self._names: dict[str, set[str]] = {}
        self._attributes: dict[str, Attributes] = {}
        """The attributes of each folder that has any."""
        self._links: dict[int, list[str]] = {}
        """Paths of the upper layer's hard links, by inode. Like an overlay, a copy preserves hard links only there."""
        self._can_share = True
        self.files = 0
        self.size = 0
        self.unread = 0
        """Number of files and folders that could not be read. They are not in the copy and stay unchanged."""

    def make(self) -> None:
        """Copy everything. Then wait until any later change gets a newer timestamp than the copies."""
        stack = [self._upper] if is_opaque(self._upper) else [self._upper, *self._lowers]
        self._copy_folder(stack, self._target, "")
        for path in itertools.chain(
            *self._links.values()
        ):  # creating another hard link changed the file's ctime
            self._before[path] = _fingerprint(f"{self._target}/{path}")
        newest = max((found[4] for found in self._before.values()), default=0)
        stamp = f"{self._target}.stamp"
        Path(stamp).touch()
        for _ in range(_TICKS):
            os.utime(stamp)
            if os.stat(stamp).st_ctime_ns > newest:
                break
            time.sleep(0.001)
        os.unlink(stamp)

    def _copy_folder(self, stack: Sequence[str], target: str, path: str) -> None:
        self._check()
        os.mkdir(target, 0o700)
        for name, sources in members(stack).items():
            inner, there = f"{path}/{name}" if path else name, f"{target}/{name}"
            try:
                if stat.S_ISDIR(os.lstat(sources[0]).st_mode):
                    self._copy_folder(sources, there, inner)
                elif not self._copy_file(sources[0], there, inner):
                    continue
            except (PermissionError, FileNotFoundError):
                self.unread += 1
                remove_tree(Path(there))  # a partial copy must not count as a change
                continue
            self._before[inner] = _fingerprint(there)
            if stat.S_ISDIR(self._before[inner][0]) and (attributes := read_attributes(there)):
                self._attributes[inner] = attributes
            self._names.setdefault(path, set()).add(name)
        _copy_metadata(stack[0], target)

    def _copy_file(self, source: str, target: str, path: str) -> bool:
        facts = os.lstat(source)
        is_linked = facts.st_nlink > 1 and source == f"{self._upper}/{path}"
        if is_linked and facts.st_ino in self._links:
            os.link(f"{self._target}/{self._links[facts.st_ino][0]}", target, follow_symlinks=False)
        elif stat.S_ISLNK(facts.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISREG(facts.st_mode):
            self._copy_content(source, target)
            self.size += facts.st_size
        elif stat.S_ISFIFO(facts.st_mode) or stat.S_ISSOCK(facts.st_mode):
            os.mknod(target, stat.S_IFMT(facts.st_mode) | 0o600)
        else:
            return False  # devices are not copied
        _copy_metadata(source, target)
        if is_linked:
            self._links.setdefault(facts.st_ino, []).append(path)
        self.files += 1
        return True

    def _copy_content(self, source: str, target: str) -> None:
        if self._can_share:
            with open(source, "rb") as reading, open(target, "wb") as writing:
                try:
                    fcntl.ioctl(writing, _FICLONE, reading.fileno())
                    return
                except OSError as error:
                    self._can_share = error.errno not in (
                        errno.EOPNOTSUPP,
                        errno.ENOTTY,
                        errno.EXDEV,
                        errno.EINVAL,
                    )
        shutil.copyfile(source, target)

    def write_back(self) -> None:
        """Update the upper layer so that the merged view equals the copy."""
        self._settle("", [] if is_opaque(self._upper) else self._lowers)
        root = os.lstat(self._target)
        if _facts(root) != _facts(os.lstat(self._upper)):
            _copy_metadata(self._target, self._upper)

    def _settle(self, path: str, lowers: Sequence[str]) -> None:
        folder = f"{self._target}/{path}" if path else self._target
        prefix = f"{path}/" if path else ""
        now = {name for name in os.listdir(folder) if not is_reserved(name)}
        below = members(lowers)
        for name in sorted(self._names.get(path, set()) - now):
            self._clear(prefix + name)
            if name in below:
                self._reach(path)
                os.mknod(f"{self._upper}/{prefix}{name}", stat.S_IFCHR, 0)
        for name in sorted(now):
            self._settle_member(prefix + name, below.get(name, []))

    def _settle_member(self, path: str, below: Sequence[str]) -> None:
        source, target = f"{self._target}/{path}", f"{self._upper}/{path}"
        found, before = _fingerprint(source), self._before.get(path)
        if not stat.S_ISDIR(found[0]):
            if found != before:
                self._clear(path)
                self._reach(os.path.dirname(path))
                strip_marks(source)
                os.rename(source, target)
            return
        if before is None or not stat.S_ISDIR(before[0]):
            self._clear(path)
            self._reach(path)
            if below:
                os.setxattr(target, OPAQUE, b"y")
            below = []
        elif found[:3] != before[:3] or read_attributes(source) != self._attributes.get(path, ()):
            self._reach(path)
            _copy_metadata(source, target)
        if below and (not stat.S_ISDIR(os.lstat(below[0]).st_mode) or is_opaque(target)):
            below = []
        self._settle(path, below)

    def _clear(self, path: str) -> None:
        """Remove a path from the upper layer."""
        remove_tree(Path(self._upper, path))

    def _reach(self, path: str) -> None:
        """Create a folder and its missing parents in the upper layer, with the metadata they have in the copy."""
        at = self._upper
        for name in path.split("/") if path else ():
            at = f"{at}/{name}"
            if not os.path.lexists(at):
                os.mkdir(at)
                _copy_metadata(self._target + at[len(self._upper) :], at)


def members(stack: Sequence[str]) -> dict[str, list[str]]:
    """Return the merged entries of a folder: each name with its paths, topmost first.

    `stack` holds the folder's path in each layer. A subfolder may have a path in several layers, but a file has only
    one.
    """
    found: dict[str, list[str]] = {}
    closed: set[str] = set()
    for at, folder in enumerate(stack):
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.name in closed or is_reserved(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                found.setdefault(entry.name, []).append(entry.path)
                if at + 1 < len(stack) and is_opaque(entry.path):
                    closed.add(entry.name)
            else:
                closed.add(entry.name)
                if entry.name not in found and not is_whiteout(entry.stat(follow_symlinks=False)):
                    found[entry.name] = [entry.path]
    return found


def changes(upper: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the path of each entry in an upper layer, sorted within each folder.

    The kinds are `written`, `folder`, `replaced` (a folder that hides the layers below) and `deleted`.
    """
    for folder, folders, files in os.walk(upper):
        folders[:] = sorted(name for name in folders if not is_reserved(name))
        place = os.path.relpath(folder, upper)
        if place != ".":
            yield ("replaced" if is_opaque(folder) else "folder"), place
        for name in sorted(name for name in files if not is_reserved(name)):
            path = os.path.normpath(f"{place}/{name}")
            yield ("deleted" if is_whiteout(os.lstat(f"{folder}/{name}")) else "written"), path


def _fingerprint(path: str) -> Fingerprint:
    facts = os.lstat(path)
    # The ctime (the fifth field) can't be forged.
    return (*_facts(facts), facts.st_ino, facts.st_ctime_ns, facts.st_size, facts.st_mtime_ns)


def _facts(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_mode, facts.st_uid, facts.st_gid


def _copy_metadata(source: str, target: str) -> None:
    """Copy owner, attributes, mode and times."""
    facts = os.lstat(source)
    there = os.lstat(target)
    if (facts.st_uid, facts.st_gid) != (there.st_uid, there.st_gid):
        with contextlib.suppress(PermissionError):
            os.chown(target, facts.st_uid, facts.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(facts.st_mode):
        os.chmod(target, stat.S_IMODE(facts.st_mode))
        write_attributes(target, read_attributes(source))
    os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns), follow_symlinks=False)
