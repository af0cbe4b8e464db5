"""Copies of a folder, which capture a command's writes without an overlay.

The command works on a copy of the folder, which is checked for changes afterwards. The cost grows with the folder,
because every file is copied (as a reflink if the disk supports it) and checked. Changes are written to the
upper layer in overlay format, as if an overlay had been mounted.
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
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from handrail.resources.facts import Attributes, read_attributes, write_attributes
from handrail.resources.installation import is_below
from handrail.resources.mount import OPAQUE, is_opaque, is_whiteout, remove_tree, strip_marks
from handrail.resources.paths import MAX_PATH, PART, is_reserved, reach

_FICLONE = 0x40049409
_TICKS = 200

Fingerprint = tuple[int, int, int, int, int, int, int]


_Folder = tuple[Sequence[str], str, str]
"""A folder to copy: its path in each layer, in the copy, and relative to the root."""


class Copy:
    """A copy of several layers merged into one folder.

    With `closed`, no link in the copy leads out of it, so a command without a sandbox can't change other files through these
    links.
    """

    def __init__(
        self,
        lowers: Sequence[Path],
        upper: Path,
        target: Path,
        check: Callable[[], None],
        *,
        kept: Sequence[str] = (),
        closed: bool = False,
    ) -> None:
        self._lowers = [os.fspath(lower) for lower in lowers]
        self._upper = os.fspath(upper)
        self._target = os.fspath(target)
        self._check = check
        self._kept = kept
        """Paths that stay as they are, whatever a command makes of them in the copy."""
        self._before: dict[str, Fingerprint] = {}
        self._names: dict[str, set[str]] = {}
        self._attributes: dict[str, Attributes] = {}
        """The attributes of each folder that has any."""
        self._links: dict[int, list[str]] = {}
        """Paths of the upper layer's hard links, by inode. Like an overlay, a copy preserves hard links only there."""
        self._can_share = True
        self._root = os.path.realpath(self._lowers[-1]) if closed else ""
        self._outward: list[str] = []
        """Symbolic links that may lead out of the copy."""
        self.files = 0
        self.size = 0
        self.unread = 0
        """Number of files and folders that could not be read. They are not in the copy and stay unchanged."""
        self.omitted = 0
        """Number of links that are not in the copy, because they lead out of the folder or can't be resolved. They stay unchanged."""

    def make(self) -> None:
        """Make the copy. Then wait briefly until the disk's clock has advanced, so that any later change gets a newer timestamp."""
        stack = [self._upper] if is_opaque(self._upper) else [self._upper, *self._lowers]
        self._copy_folder(stack, self._target, "")
        for path in itertools.chain(
            *self._links.values()
        ):  # creating another hard link changed the file's ctime
            self._before[path] = _fingerprint(f"{self._target}/{path}")
        while sum(map(self._turn_inward, self._outward)):
            pass  # a link may lead through another one
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
        pending: list[_Folder] = [(stack, target, path)]
        made: list[_Folder] = []
        while pending:
            self._check()
            folder = pending.pop()
            with self._unless_unreadable(folder[1], folder[2]):
                pending += self._begin_folder(*folder)
                made.append(folder)
        for stack, target, path in reversed(made):
            with self._unless_unreadable(target, path):
                _copy_metadata(stack[0], target)
                if path:
                    self._note(path, target)

    def _begin_folder(self, stack: Sequence[str], target: str, path: str) -> list[_Folder]:
        """Create a folder in the copy, with its files. Returns its subfolders."""
        with reach(target) as at:
            os.mkdir(at, 0o700)
        folders: list[_Folder] = []
        for name, sources in members(stack).items():
            inner, there = f"{path}/{name}" if path else name, f"{target}/{name}"
            with self._unless_unreadable(there, inner):
                with reach(sources[0]) as source:
                    is_folder = stat.S_ISDIR(os.lstat(source).st_mode)
                if is_folder:
                    folders.append((sources, there, inner))
                elif self._copy_file(sources[0], there, inner):
                    self._note(inner, there)
        return folders

    @contextlib.contextmanager
    def _unless_unreadable(self, target: str, path: str) -> Generator[None]:
        try:
            yield
        except (PermissionError, FileNotFoundError):
            if not path:
                raise
            self.unread += 1
            remove_long(target)  # a partial copy must not count as a change

    def _note(self, path: str, target: str) -> None:
        self._before[path] = _fingerprint(target)
        with reach(target) as at:
            if stat.S_ISDIR(self._before[path][0]) and (attributes := read_attributes(at)):
                self._attributes[path] = attributes
        folder, _, name = path.rpartition("/")
        self._names.setdefault(folder, set()).add(name)

    def _copy_file(self, source: str, target: str, path: str) -> bool:
        with reach(source) as there, reach(target) as at:
            facts = os.lstat(there)
            is_linked = facts.st_nlink > 1 and source == f"{self._upper}/{path}"
            if is_linked and facts.st_ino in self._links:
                with reach(f"{self._target}/{self._links[facts.st_ino][0]}") as first:
                    os.link(first, at, follow_symlinks=False)
            elif stat.S_ISLNK(facts.st_mode):
                os.symlink(os.readlink(there), at)
                if self._root:
                    self._outward.append(path)
            elif stat.S_ISREG(facts.st_mode):
                self._copy_content(there, at)
                self.size += facts.st_size
            elif stat.S_ISFIFO(facts.st_mode) or stat.S_ISSOCK(facts.st_mode):
                os.mknod(at, stat.S_IFMT(facts.st_mode) | 0o600)
            else:
                return False  # devices are not copied
        _copy_metadata(source, target)
        if is_linked:
            self._links.setdefault(facts.st_ino, []).append(path)
        self.files += 1
        return True

    def _turn_inward(self, path: str) -> bool:
        """Change a link if it leads out of the copy, or if its path is too long to resolve. Returns whether it was changed.

        A link to a path in the folder then leads to that path in the copy, and a link to a readable file elsewhere becomes a
        copy of that file. Any other link, or one that can't be resolved, is omitted.
        """
        at, leads = f"{self._target}/{path}", ""
        if path not in self._before or not stat.S_ISLNK(self._before[path][0]):
            return False
        if len(os.fsencode(at)) <= PART:  # a link deeper than that can't be resolved
            if is_below(os.path.realpath(at), self._target):
                return False
            leads = os.readlink(at)
            if not is_below(os.path.normpath(leads), self._root):
                leads = os.path.realpath(os.path.join(self._root, os.path.dirname(path), leads))
        remove_long(at)
        if is_below(leads, self._root):
            os.symlink(self._target + leads[len(self._root) :], at)
        elif os.path.isfile(leads) and os.access(leads, os.R_OK):
            self._copy_content(leads, at)
            os.chmod(at, stat.S_IMODE(os.stat(leads).st_mode) & 0o777)
        else:
            del self._before[path]
            self._names[os.path.dirname(path)].discard(os.path.basename(path))
            self.omitted += 1
            return True
        self._before[path] = _fingerprint(at)
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
        pending: list[tuple[str, Sequence[str]]] = [("", [] if is_opaque(self._upper) else self._lowers)]
        while pending:
            pending += self._settle(*pending.pop())
        root = os.lstat(self._target)
        if _facts(root) != _facts(os.lstat(self._upper)):
            _copy_metadata(self._target, self._upper)

    def _settle(self, path: str, lowers: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
        """Update one folder of the upper layer. Yields its subfolders, with their lower layers.

        Raises `OSError` if its path is too long.
        """
        if len(path) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        prefix = f"{path}/" if path else ""
        with reach(f"{self._target}/{path}" if path else self._target) as folder:
            present = {name for name in os.listdir(folder) if not is_reserved(name)}
        kept = {name for name in self._names.get(path, set()) | present if self._is_kept(prefix + name)}
        now = present - kept
        below = members(lowers)
        for name in sorted(self._names.get(path, set()) - now - kept):
            self._clear(prefix + name)
            if name in below:
                self._reach(path)
                with reach(f"{self._upper}/{prefix}{name}") as at:
                    os.mknod(at, stat.S_IFCHR, 0)
        for name in sorted(now):
            lower = self._settle_member(prefix + name, below.get(name, []))
            if lower is not None:
                yield prefix + name, lower

    def _is_kept(self, path: str) -> bool:
        return any(is_below(f"/{path}", f"/{each}") for each in self._kept)

    def _settle_member(self, path: str, below: Sequence[str]) -> Sequence[str] | None:
        """Update one path of the upper layer. Returns the lower layers of a folder, or None for anything else."""
        source, target = f"{self._target}/{path}", f"{self._upper}/{path}"
        found, before = _fingerprint(source), self._before.get(path)
        if not stat.S_ISDIR(found[0]):
            if found != before:
                self._clear(path)
                self._reach(os.path.dirname(path))
                with reach(source) as left, reach(target) as at:
                    strip_marks(left)
                    self._turn_outward(left)
                    os.rename(left, at)
            return None
        if before is None or not stat.S_ISDIR(before[0]):
            self._clear(path)
            self._reach(path)
            if below:
                with reach(target) as at:
                    os.setxattr(at, OPAQUE, b"y")
            return []
        if found[:3] != before[:3] or _attributes(source) != self._attributes.get(path, ()):
            self._reach(path)
            _copy_metadata(source, target)
        if below:
            with reach(below[0]) as at:
                if not stat.S_ISDIR(os.lstat(at).st_mode) or _is_opaque(target):
                    return []
        return below

    def _turn_outward(self, at: str) -> None:
        """Make a link to a path in the copy lead to the same path in the folder, because the copy will be removed."""
        if self._root and os.path.islink(at):
            target = os.readlink(at)
            if is_below(target, self._target):
                os.unlink(at)
                os.symlink(self._root + target[len(self._target) :], at)

    def _clear(self, path: str) -> None:
        """Remove a path from the upper layer."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a folder above it is missing
            remove_long(f"{self._upper}/{path}")

    def _reach(self, path: str) -> None:
        """Create a folder and its missing parents in the upper layer, with the metadata they have in the copy."""
        missing: list[str] = []
        while path and not _exists(f"{self._upper}/{path}"):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with reach(f"{self._upper}/{path}") as at:
                os.mkdir(at)
            _copy_metadata(f"{self._target}/{path}", f"{self._upper}/{path}")


def members(stack: Sequence[str]) -> dict[str, list[str]]:
    """Return the merged entries of a folder: each name with its paths, topmost first.

    `stack` holds the folder's path in each layer. A subfolder may have a path in several layers, but a file has only
    one.
    """
    found: dict[str, list[str]] = {}
    closed: set[str] = set()
    for at, folder in enumerate(stack):
        try:
            with reach(folder) as here, os.scandir(here) as entries:
                present = [(each.name, each.stat(follow_symlinks=False)) for each in entries]
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name, status in present:
            if name in closed or is_reserved(name):
                continue
            path = f"{folder}/{name}"
            if stat.S_ISDIR(status.st_mode):
                found.setdefault(name, []).append(path)
                if at + 1 < len(stack) and _is_opaque(path):
                    closed.add(name)
            else:
                closed.add(name)
                if name not in found and not is_whiteout(status):
                    found[name] = [path]
    return found


def _is_opaque(path: str) -> bool:
    try:
        with reach(path) as at:
            return is_opaque(at)
    except OSError:  # a folder above a long path is missing
        return False


def _exists(path: str) -> bool:
    try:
        with reach(path) as at:
            return os.path.lexists(at)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _attributes(path: str) -> Attributes:
    with reach(path) as at:
        return read_attributes(at)


def remove_long(path: str) -> None:
    """Remove a file or folder whose path may be longer than a system call accepts."""
    with reach(path) as at:
        remove_tree(Path(at))


def changes(upper: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the path of each entry in an upper layer. A folder's files come first, and then its subfolders, each sorted.

    Links to folders and reserved names are omitted. The kinds are `written`, `folder`, `replaced` (a folder that hides the
    layers below) and `deleted`.
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
    with reach(path) as at:
        facts = os.lstat(at)
    # Programs can't set the ctime, which is the fifth field here.
    return (*_facts(facts), facts.st_ino, facts.st_ctime_ns, facts.st_size, facts.st_mtime_ns)


def _facts(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_mode, facts.st_uid, facts.st_gid


def _copy_metadata(source: str, target: str) -> None:
    """Copy the owner (if allowed), mode, attributes and times; for a link, only owner and times."""
    with reach(source) as original, reach(target) as at:
        facts = os.lstat(original)
        there = os.lstat(at)
        if (facts.st_uid, facts.st_gid) != (there.st_uid, there.st_gid):
            with contextlib.suppress(PermissionError):
                os.chown(at, facts.st_uid, facts.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(facts.st_mode):
            os.chmod(at, stat.S_IMODE(facts.st_mode))
            write_attributes(at, read_attributes(original))
        os.utime(at, ns=(facts.st_atime_ns, facts.st_mtime_ns), follow_symlinks=False)
