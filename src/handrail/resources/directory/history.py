"""`History`: keeps the files that the most recent commits displaced, so that the commits can be undone.

Each kept commit is a folder, whose name says when it was made, by which call, and how many bytes it holds. So a listing
of the names is all that several processes need to share one history. A process claims a kept commit by renaming it.
Only that process may then use or remove it.

The history has a limit on calls and a limit on bytes. Files that also exist elsewhere, such as one that a call has
moved, don't count towards the bytes. If the bytes exceed their limit, a commit that takes more than half of the limit
is removed first, or else the oldest one. So one large call can't push out all others. If a commit is removed because of
the limit on bytes, an empty file takes its place, so that undo can say why the commit is not kept.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from handrail.clock import Clock
from handrail.journal.records import CallKey
from handrail.resources.directory.disk import Disk

_DROPPED = "dropped"


class Sizes(msgspec.Struct):
    """The total sizes of a commit's files, in bytes."""

    own: int = 0
    """Bytes of the files that exist nowhere else."""
    shared: int = 0
    """Bytes of the files that have other names too."""

    def add(self, found: os.stat_result) -> None:
        """Add a file. Folders are not counted."""
        if stat.S_ISDIR(found.st_mode):
            return
        if found.st_nlink == 1:
            self.own += _size(found)
        else:
            self.shared += _size(found)


class KeptCommit(msgspec.Struct, frozen=True):
    """A commit in the history."""

    name: str
    call: str
    """The digest of the call's key (see `call_digest`)."""
    own: int = 0
    """Bytes of the files that existed nowhere else when the commit was made."""
    shared: int = 0
    """Bytes of the files that had other names too when the commit was made."""
    is_dropped: bool = False
    """Whether the displaced files were removed, because the history exceeded its limit on bytes."""


class History:
    """The kept commits of one folder, oldest first. Other processes may add and remove some at any time."""

    def __init__(self, folder: Path, disk: Disk, clock: Clock, keep_calls: int, keep_bytes: int) -> None:
        self._folder = folder
        self._disk = disk
        self._clock = clock
        self.keep_calls = keep_calls
        self.keep_bytes = keep_bytes
        self._kept: list[KeptCommit] = []
        self._total = 0
        """An upper bound on the bytes that are kept, which counts shared files too."""
        self._listed_at = -1

    def add(
        self, commit: Path, call: str, remove: Callable[[Path], None], sizes: Sizes | None = None
    ) -> Path:
        """Move a commit's folder into the history, and remove what exceeds the limits. Returns the new path.

        `remove` claims and removes a folder, or raises `FileNotFoundError` if another process has claimed it. Without
        `sizes`, the bytes in the commit's folder are counted.
        """
        try:
            listed_at = os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            self._disk.folder(self._folder, 0o700)
            listed_at = -1
        if listed_at != self._listed_at or listed_at < 0:
            self._list()
        sizes = _sizes(commit) if sizes is None else sizes
        own, shared = sizes.own, sizes.shared
        when = int(self._clock.now().timestamp() * 1_000_000)
        if self._kept:
            when = max(when, int(self._kept[-1].name.partition("-")[0]) + 1)
        while True:
            kept = KeptCommit(f"{when:020d}-{call}-{own}-{shared}", call, own, shared)
            new = self.path(kept)
            try:
                self._disk.retire(commit, new)
                break
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            when += 1  # a different process took this name in the same microsecond
        self._kept.append(kept)
        self._total += own + shared
        self._trim(remove)
        # The rename above has changed the folder's mtime, so it is read again.
        self._listed_at = os.stat(self._folder).st_mtime_ns
        return new

    def find(self, call: str) -> Iterable[KeptCommit]:
        """Return the commits of a call in the history, newest first, including those whose files were removed."""
        self._list()
        return [kept for kept in reversed(self._kept) if kept.call == call]

    def forget(self, call: str, remove: Callable[[Path], None]) -> None:
        """Remove the commits of a call, as `add` removes those that exceed the limits."""
        for kept in self.find(call):
            self._remove(kept, remove)

    @property
    def is_full(self) -> bool:
        """Whether the history holds as many commits as it may, so that adding one removes the oldest."""
        return len(self._kept) >= self.keep_calls

    def why_not_kept(self, call: str) -> str:
        """Explain why there is no kept commit of a call."""
        if any(kept.is_dropped for kept in self.find(call)):
            return f"what it replaced was too large to keep, because at most {self.keep_bytes} bytes are kept"
        if self.is_full:
            return f"it changed no files, was undone already, or is too old: only the last {self.keep_calls} calls are kept"
        return "it changed no files here, or it was undone already"

    def path(self, kept: KeptCommit) -> Path:
        """Return the folder of a kept commit."""
        return self._folder / kept.name

    def put_back(self, commit: Path, name: str) -> None:
        """Move a claimed commit back into the history, under its old name."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        self._disk.retire(commit, self._folder / name)
        self._listed_at = -1

    def _list(self) -> None:
        try:
            names = sorted(os.listdir(self._folder))
        except FileNotFoundError:
            names = []
        self._kept = [kept for name in names if (kept := _parse(name)) is not None]
        self._total = sum(kept.own + kept.shared for kept in self._kept)

    def _trim(self, remove: Callable[[Path], None]) -> None:
        kept = self._kept
        while len(kept) > self.keep_calls:
            self._total -= kept[0].own + kept[0].shared
            self._remove(kept.pop(0), remove)
        if self._total <= self.keep_bytes:
            return
        while True:
            links = {each.name: _links(self.path(each)) for each in kept if each.shared}
            held = _held(links.values())
            own = {each.name: each.own for each in kept if each.name not in links}
            if sum(own.values()) + sum(held.values()) <= self.keep_bytes:
                return
            sizes = own | {name: sum(held.get(inode, 0) for inode in here) for name, here in links.items()}
            large = (each for each in kept if sizes[each.name] > self.keep_bytes // 2)
            victim = next(large, None) or next(each for each in kept if not each.is_dropped)
            at = kept.index(victim)
            self._total -= victim.own + victim.shared
            kept[at] = KeptCommit(
                f"{victim.name.partition('-')[0]}-{victim.call}-{_DROPPED}", victim.call, is_dropped=True
            )
            with contextlib.suppress(OSError):  # the file only explains why the commit is gone
                os.close(os.open(self.path(kept[at]), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._remove(victim, remove)

    def _remove(self, kept: KeptCommit, remove: Callable[[Path], None]) -> None:
        with contextlib.suppress(FileNotFoundError):  # a different process has claimed it
            if kept.is_dropped:
                os.unlink(self.path(kept))
            else:
                remove(self.path(kept))


def call_digest(key: CallKey) -> str:
    """Return the digest under which a call's commits are kept. It depends on the ids of the journal, the run and the call."""
    text = "\0".join((key.journal, key.run_id, key.call_id))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _parse(name: str) -> KeptCommit | None:
    when, _, rest = name.partition("-")
    call, *sizes = rest.split("-")
    if not when.isdecimal():
        return None
    if sizes == [_DROPPED]:
        return KeptCommit(name, call, is_dropped=True)
    own, shared = (int(size) if size.isdecimal() else 0 for size in (*sizes, "", "")[:2])
    return KeptCommit(name, call, own, shared)


_Links = dict[tuple[int, int], tuple[int, int, int]]
"""For each file in a commit: how many of its names are in the commit, how many names it has in total, and its size."""


def _held(links: Iterable[_Links]) -> dict[tuple[int, int], int]:
    """Return the size of each file that has no name outside these commits, by inode."""
    seen: dict[tuple[int, int], int] = {}
    held: dict[tuple[int, int], int] = {}
    for each in links:
        for inode, (here, names, size) in each.items():
            seen[inode] = seen.get(inode, 0) + here
            if seen[inode] == names:
                held[inode] = size
    return held


def _sizes(folder: Path) -> Sizes:
    sizes = Sizes()
    for found in _files(folder):
        sizes.add(found)
    return sizes


def _links(folder: Path) -> _Links:
    links: _Links = {}
    for found in _files(folder):
        inode = (found.st_dev, found.st_ino)
        links[inode] = (links.get(inode, (0,))[0] + 1, found.st_nlink, _size(found))
    return links


def _files(folder: Path) -> Iterable[os.stat_result]:
    pending = [os.fspath(folder)]
    while pending:
        here = pending.pop()
        with contextlib.suppress(OSError), os.scandir(here) as entries:  # others may be removing the folder
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield entry.stat(follow_symlinks=False)


def _size(found: os.stat_result) -> int:
    return min(found.st_size, found.st_blocks * 512)  # a sparse file takes up less space than its size
