"""`Layer`: everything that can be done with files, on a few primitives.

A filesystem and its forks differ only in those: how a path is looked at and a folder listed, how
that is remembered as a read, how a change is kept, and how much there is already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import RLock
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from handrail.clock import Clock
from handrail.errors import FileError, FileInTheWay, FileLimitReached, FileMissing, PathRefused
from handrail.protocols import FileInfo, Match
from handrail.resources.paths import Place, ancestors, file_place, join, nearest, place, split
from handrail.resources.search import decode, encode, find, replaced, sorted_matches


@dataclass(frozen=True, slots=True)
class FileLimits:
    """How much a filesystem takes. A fork is held to what it and everything it was forked from hold."""

    max_file_size: int = 16 * 1024 * 1024
    """Bytes in one file."""
    max_files: int = 1_000_000
    """Files and folders together."""
    max_total_size: int = 1024 * 1024 * 1024
    """Bytes in all files together."""


class Content(Protocol):
    """What is in a file that does not lie in memory as it is."""

    def __len__(self) -> int: ...
    def load(self) -> bytes:
        """The bytes; `Conflict` where they are no longer the ones that were seen."""
        ...


class Node(msgspec.Struct, frozen=True, gc=False):
    """What is at a path, never changed once it is made: a file, a folder (no data), or nothing (version 0)."""

    version: int
    data: bytes | Content | None
    modified: datetime | float | None

    @property
    def is_folder(self) -> bool:
        return self.data is None and self.version > 0

    @property
    def size(self) -> int:
        return len(self.data) if self.data else 0


def loaded(data: bytes | Content) -> bytes:
    """The bytes of a file, wherever they lie."""
    return data if isinstance(data, bytes) else data.load()


ABSENT = Node(0, None, None)
TOP = Node(1, None, None)

Over = Mapping[str, Mapping[str, tuple[Node, Node]]]
"""What a fork changed, by folder and name: what is there now, and what was there at the first touch."""


class Listing(NamedTuple):
    """What a layer sees in a folder, when that last changed, and what of it comes from the layer below."""

    members: dict[str, Node]
    stamp: int
    below: Listing | None


class Shared:
    """What the root and all its forks use together."""

    __slots__ = ("acquire", "clock", "limits", "lock", "release", "tick")

    def __init__(self, limits: FileLimits, clock: Clock, tick: Callable[[], int]) -> None:
        self.limits = limits
        self.clock = clock
        self.tick = tick
        self.lock = RLock()
        # A `with` costs as much again as the lock; the three verbs of every commit do without it.
        self.acquire = self.lock.acquire
        self.release = self.lock.release


class Layer:
    """The verbs of `Filesystem`. What they look at and change happens under the one lock."""

    __slots__ = ("_claimed", "_shared")
    _shared: Shared
    _claimed: dict[object, Over] | None
    """What forks of this layer that are prepared, and not yet applied, are about to change."""

    # --- the primitives; all are called with the lock held --------------------------------------

    def _enter(self, change: str = "") -> None:
        """Raise if this layer can't be used any more, or may not make this change."""
        raise NotImplementedError

    def _look(self, folder: str, name: str) -> Node:
        """What is there, without it counting as a read."""
        raise NotImplementedError

    def _see(self, folder: str, name: str) -> Node:
        """What is there, as a read."""
        raise NotImplementedError

    def _list(self, folder: str) -> Mapping[str, Node]:
        """What is in a folder, as a read of which names there are. Not to be changed or kept."""
        raise NotImplementedError

    def _names(self, folder: str) -> Sequence[str]:
        """The names in a folder, without it counting as a read."""
        raise NotImplementedError

    def _names_near(self, folder: str) -> Sequence[str]:
        """The names that whoever misspelt one may have meant."""
        return self._names(folder)

    def _has_folder(self, folder: str) -> bool:
        """Whether there is that folder, without it counting as a read. The root is always there."""
        raise NotImplementedError

    def _put(self, folder: str, name: str, node: Node, old: Node, base: Node | None = None) -> None:
        """Change what is there from `old`; the folder exists, and a folder that goes is empty.

        `base` is what this was decided on, where that is not `old`.
        """
        raise NotImplementedError

    def _view(self, folder: str) -> Listing:
        """The same with all there is to know of it, for a fork to keep."""
        raise NotImplementedError

    def _stamp(self, folder: str) -> int:
        """When the names in a folder last changed."""
        raise NotImplementedError

    def _usage(self) -> tuple[int, int]:
        """How many files and folders there are, and how many bytes."""
        raise NotImplementedError

    # --- reading --------------------------------------------------------------------------------

    def read(self, path: str, /) -> str:
        return decode(path, self.read_bytes(path))

    def read_bytes(self, path: str, /) -> bytes:
        at = file_place(path)
        with self._shared.lock:
            self._enter()
            node = self._see(at.folder, at.name)
        data = node.data
        if data is None:
            self._refuse_no_file(at, node)
        return data if isinstance(data, bytes) else data.load()

    def stat(self, path: str, /) -> FileInfo:
        at = place(path)
        node = self._seen_place(at)
        if not node.version:
            self._refuse_missing(at)
        return self._info(at.path, node)

    def exists(self, path: str, /) -> bool:
        return self._seen_place(place(path)).version > 0

    def list(self, path: str = ".", /) -> Sequence[FileInfo]:
        at = place(path)
        node = self._seen_place(at)
        if not node.version:
            self._refuse_missing(at)
        if node.data is not None:
            raise FileError(
                at.path, "this is a file, and only a folder can be listed. Read it, or list its folder"
            )
        with self._shared.lock:
            self._enter()
            names = sorted(self._list(at.path))
            return tuple(self._info(join(at.path, name), self._see(at.path, name)) for name in names)

    def glob(self, pattern: str, /) -> Sequence[str]:
        return find(pattern, self._kind, self._kinds)

    def grep(self, pattern: str, /, *, glob: str = "**") -> Sequence[Match]:
        return sorted_matches(pattern, self._contents(glob))

    def _contents(self, glob: str) -> Iterator[tuple[str, bytes]]:
        for path in self.glob(glob):
            data = self._seen_place(place(path)).data
            if data is not None:
                yield path, loaded(data)

    def _info(self, path: str, node: Node) -> FileInfo:
        modified = node.modified
        seconds = modified.timestamp() if isinstance(modified, datetime) else modified or 0.0
        return FileInfo(path or ".", node.data is None, node.size, seconds)

    def _seen_place(self, at: Place) -> Node:
        with self._shared.lock:
            self._enter()
            return self._see(at.folder, at.name) if at.name else TOP

    def _kind(self, path: str) -> bool | None:
        node = self._seen_place(place(path))
        return node.data is None if node.version else None

    def _kinds(self, folder: str) -> Mapping[str, bool]:
        with self._shared.lock:
            self._enter()
            return {name: node.data is None for name, node in self._list(folder).items()}

    # --- writing --------------------------------------------------------------------------------

    def write(self, path: str, content: str | bytes, /) -> None:
        at = file_place(path)
        data = encode(path, content)
        shared = self._shared
        shared.acquire()
        try:
            self._enter(at.path)
            self._store(at, data, self._look(at.folder, at.name))
        finally:
            shared.release()

    def append(self, path: str, content: str | bytes, /) -> None:
        at = file_place(path)
        data = encode(path, content)
        with self._shared.lock:
            self._enter(at.path)
            old = self._see(at.folder, at.name)
            self._store(at, (loaded(old.data) if old.data else b"") + data, old)

    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        at = file_place(path)
        with self._shared.lock:
            self._enter(at.path)
            node = self._see(at.folder, at.name)
            if node.data is None:
                self._refuse_no_file(at, node)
            text, count = replaced(at.path, decode(at.path, loaded(node.data)), old, new, every=all)
            self._store(at, encode(at.path, text), node)
        return count

    def mkdir(self, path: str, /) -> None:
        at = place(path)
        with self._shared.lock:
            self._enter(at.path)
            if self._look(at.folder, at.name).is_folder:
                self._see(at.folder, at.name)  # to have found it there is to rely on it
            self._make_folders(at.path)

    def delete(self, path: str, /, *, recursive: bool = False) -> None:
        at = self._not_root(path, "deleted. Delete what is in it")
        with self._shared.lock:
            self._enter(at.path)
            node = self._see(at.folder, at.name)
            if not node.version:
                self._refuse_missing(at)
            below = self._below(at.path, node)
            if below and not recursive:
                problem = "this folder is not empty. Pass recursive=True to delete it with everything in it"
                raise FileError(at.path, problem)
            for folder, name, inner in reversed(below):
                self._put(folder, name, ABSENT, inner)
            self._put(at.folder, at.name, ABSENT, node)

    def move(self, source: str, target: str, /) -> None:
        start = self._not_root(source, "moved. Move what is in it")
        end = self._not_root(target, "replaced. Give the whole new path, with the name at its end")
        if start.path in ancestors(end.path):
            raise PathRefused(target, f"{start.path!r} can't be moved into itself. Choose a path outside it")
        with self._shared.lock:
            self._enter(start.path)
            self._enter(end.path)
            node = self._see(start.folder, start.name)
            if not node.version:
                self._refuse_missing(start)
            if (there := self._see(end.folder, end.name)).version:
                self._refuse_taken(end, there, start.name)
            below = self._below(start.path, node)
            self._make_folders(end.folder)
            for folder, name, inner in reversed(below):
                self._put(folder, name, ABSENT, inner)
            self._put(start.folder, start.name, ABSENT, node)
            self._put_again(end.folder, end.name, node)
            for folder, name, inner in below:
                self._put_again(end.path + folder[len(start.path) :], name, inner)

    def _store(self, at: Place, data: bytes, old: Node) -> None:
        shared = self._shared
        size, old_size = len(data), 0
        if old.version:
            if old.data is None:
                self._see(at.folder, at.name)
                raise FileInTheWay(at.path, "this is a folder. Choose another path, or name a file in it")
            old_size = len(old.data)
        if size > old_size or not old.version:
            self._need_room(at.path, 0 if old.version else 1, size, old_size)
            if not old.version and not self._has_folder(at.folder):
                self._make_folders(at.folder, before=1)
        self._put(at.folder, at.name, Node(shared.tick(), data, shared.clock.now()), old)

    def _put_again(self, folder: str, name: str, node: Node) -> None:
        """The same thing at a new path: its own version, its old time."""
        new = Node(self._shared.tick(), node.data, node.modified)
        self._put(folder, name, new, self._look(folder, name))

    def _make_folders(self, path: str, *, before: int = 0, force: bool = False) -> None:
        """Make a folder with those it lies in, all or none, leaving room for what comes next.

        With `force` nothing is checked, since it was already.
        """
        missing: list[str] = []
        while not self._has_folder(path):
            if not force:
                self._refuse_file(path)
            missing.append(path)
            path = split(path)[0]
        if missing and not force:
            self._need_room(missing[0], len(missing) + before, 0, 0)
        for path in reversed(missing):
            folder, name = split(path)
            node = Node(self._shared.tick(), None, self._shared.clock.now())
            self._put(folder, name, node, self._look(folder, name), ABSENT)

    def _below(self, path: str, node: Node) -> Sequence[tuple[str, str, Node]]:
        """Everything in a folder at any depth, each after the folder it is in."""
        found: list[tuple[str, str, Node]] = []
        folders = [path] if node.is_folder else []
        for folder in folders:
            for name, inner in self._list(folder).items():
                found.append((folder, name, inner))
                if inner.is_folder:
                    folders.append(join(folder, name))
        return found

    # --- refusing -------------------------------------------------------------------------------

    def _not_root(self, path: str, what: str) -> Place:
        at = place(path)
        if not at.name:
            raise PathRefused(path, f"the root itself can't be {what}")
        return at

    def _refuse_file(self, path: str) -> None:
        folder, name = split(path)
        if self._look(folder, name).data is not None:
            self._see(folder, name)
            raise FileInTheWay(
                path, "this is a file, so it can't be a folder. Choose another path, or move the file"
            )

    def _need_room(self, path: str, more: int, size: int, old_size: int) -> None:
        limits = self._shared.limits
        if size > limits.max_file_size:
            problem = f"it would be {size} bytes, and a file may have {limits.max_file_size}. Write less, or several files"
            raise FileLimitReached(path, problem)
        files, total = self._usage()
        if files + more > limits.max_files:
            problem = f"there would be more than {limits.max_files} files and folders. Delete some first"
            raise FileLimitReached(path, problem)
        if size > old_size and total + size - old_size > limits.max_total_size:
            problem = f"all files together would be over {limits.max_total_size} bytes. Delete some first"
            raise FileLimitReached(path, problem)

    def _refuse_no_file(self, at: Place, node: Node) -> NoReturn:
        if node.version:
            raise FileError(at.path, "this is a folder, and a file is wanted. List it to see the files in it")
        self._refuse_missing(at)

    def _refuse_taken(self, at: Place, node: Node, name: str) -> NoReturn:
        if node.is_folder:
            mend = f"To move into it, give the whole new path: {join(at.path, name)!r}"
            raise FileInTheWay(at.path, f"there is a folder already. {mend}")
        raise FileInTheWay(at.path, "there is a file already. Delete it first, or choose another path")

    def _refuse_missing(self, at: Place) -> NoReturn:
        """Say where the path stops being there, and what was probably meant."""
        with self._shared.lock:
            lost = next((p for p in ancestors(at.path) if not self._has_folder(p)), at.path)
            folder, name = split(lost)
            names = self._names_near(folder)
        what = "there is nothing at this path" if lost == at.path else f"there is no folder {lost!r}"
        near = nearest(name, names)
        mend = (
            f"Did you mean {join(folder, near)!r}?"
            if near
            else f"List {folder or '.'!r} to see what is there"
        )
        raise FileMissing(at.path, f"{what}. {mend}")
