"""`Layer`: the operations of a filesystem, built on a few primitives.

A filesystem and its forks share these operations. They have different primitives: how a path is looked up, how a folder
is listed, how reads are recorded, how changes are stored and how usage is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import RLock
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from handrail.clock import Clock
from handrail.concurrency.claims import Claims
from handrail.errors import Conflict, FileError, FileInTheWay, FileLimitReached, FileMissing, PathRefused
from handrail.protocols import FileInfo, Match
from handrail.resources.paths import ParsedPath, ancestors, join, nearest, parse_file_path, parse_path, split
from handrail.resources.search import count_replaceable, decode, encode, find, sorted_matches


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits on a filesystem and its forks. In a `DirectoryFilesystem`, the last two limit what one call adds."""

    max_file_size: int = 16 * 1024 * 1024
    """Maximum bytes in one file."""
    max_files: int = 1_000_000
    """Maximum number of files and folders together."""
    max_total_size: int = 1024 * 1024 * 1024
    """Maximum bytes in all files together."""


class Content(Protocol):
    """The content of a file, whose bytes are loaded when they are needed."""

    def __len__(self) -> int: ...
    def load(self) -> bytes:
        """Return the bytes. Raises `Conflict` if the file has changed since it was looked up, and `FileError` if it can't be read."""
        ...


class Node(msgspec.Struct, frozen=True, gc=False):
    """The state of a path: a file, a folder (which has no data) or nothing (version 0). Immutable."""

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
    """Return the bytes of a file, wherever they are stored."""
    return data if isinstance(data, bytes) else data.load()


ABSENT = Node(0, None, None)
TOP = Node(1, None, None)

Over = Mapping[str, Mapping[str, tuple[Node, Node]]]
"""Changes by folder and name. For each path: its current node, and the node that its first change is based on."""


class Listing(NamedTuple):
    """A folder's members in a layer, a stamp that changes with their names, and the listing of the layer below, if any."""

    members: dict[str, Node]
    stamp: int
    below: Listing | None


class Shared:
    """The state that a root shares with all its forks."""

    __slots__ = ("acquire", "claims", "clock", "limits", "lock", "release", "tick")

    def __init__(self, limits: FileLimits, clock: Clock, tick: Callable[[], int]) -> None:
        self.limits = limits
        self.clock = clock
        self.tick = tick
        self.lock = RLock()
        # `with` costs as much as the lock itself, so the methods that are called most often use these instead.
        self.acquire = self.lock.acquire
        self.release = self.lock.release
        self.claims = Claims(lock=self.lock)


class Layer:
    """The operations of `Filesystem`. Each operation holds one shared lock while it looks up or changes files."""

    __slots__ = ("_claimed", "_shared")
    _shared: Shared
    _claimed: dict[object, Over] | None
    """The changes of each prepared fork of this layer, until it is applied or dropped. None for a fork that was never forked itself."""

    # --- primitives, called with the lock held ----------------------------------------------------

    def _enter(self, change: str = "") -> None:
        """Raise an error if this layer is closed or may not change the path `change`."""
        if change and self._claimed:
            refuse_claimed(self._claimed, change)

    def _look(self, folder: str, name: str) -> Node:
        """Return the node at a path without recording a read."""
        raise NotImplementedError

    def _see(self, folder: str, name: str) -> Node:
        """Return the node at a path and record the read, in layers that record reads."""
        return self._look(folder, name)

    def _list(self, folder: str) -> Mapping[str, Node]:
        """Return the members of a folder and record the read, in layers that record reads. Callers must not change or keep the mapping."""
        raise NotImplementedError

    def _names(self, folder: str) -> Sequence[str]:
        """Return the names in a folder without recording a read."""
        raise NotImplementedError

    def _names_near(self, folder: str) -> Sequence[str]:
        """Return the existing names that can be suggested for a misspelled one."""
        return self._names(folder)

    def _has_folder(self, folder: str) -> bool:
        """Return whether the folder exists, without recording a read. The root always exists."""
        raise NotImplementedError

    def _put(self, folder: str, name: str, node: Node, old: Node, base: Node | None = None) -> None:
        """Replace the node `old` at a path with `node`. The folder must exist, and a folder to be removed must be empty.

        `base` is the node on which the change is based, if that is not `old`.
        """
        raise NotImplementedError

    def _view(self, folder: str) -> Listing:
        """Return the listing of a folder in the form that a fork records."""
        raise NotImplementedError

    def _stamp(self, folder: str) -> int:
        """Return a stamp that changes whenever the names in a folder change."""
        raise NotImplementedError

    def _usage(self) -> tuple[int, int]:
        """Return the number of files and folders, and the total bytes, that count towards the limits."""
        raise NotImplementedError

    # --- reading --------------------------------------------------------------------------------

    def read(self, path: str, /) -> str:
        return decode(path, self.read_bytes(path))

    def read_bytes(self, path: str, /) -> bytes:
        at = parse_file_path(path)
        with self._shared.lock:
            self._enter()
            node = self._see(at.folder, at.name)
        data = node.data
        if data is None:
            self._refuse_no_file(at, node)
        return data if isinstance(data, bytes) else data.load()

    def stat(self, path: str, /) -> FileInfo:
        at = parse_path(path)
        node = self._see_path(at)
        if not node.version:
            self._refuse_missing(at)
        return self._info(at.path, node)

    def exists(self, path: str, /) -> bool:
        return self._see_path(parse_path(path)).version > 0

    def list(self, path: str = ".", /) -> Sequence[FileInfo]:
        at = parse_path(path)
        node = self._see_path(at)
        if not node.version:
            self._refuse_missing(at)
        if node.data is not None:
            raise FileError(at.path, "this is a file, not a folder. Read it, or list its folder")
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
            data = self._see_path(parse_path(path)).data
            if data is not None:
                yield path, loaded(data)

    def _info(self, path: str, node: Node) -> FileInfo:
        modified = node.modified
        seconds = modified.timestamp() if isinstance(modified, datetime) else modified or 0.0
        return FileInfo(path or ".", node.data is None, node.size, seconds)

    def _see_path(self, at: ParsedPath) -> Node:
        with self._shared.lock:
            self._enter()
            return self._see(at.folder, at.name) if at.name else TOP

    def _kind(self, path: str) -> bool | None:
        node = self._see_path(parse_path(path))
        return node.data is None if node.version else None

    def _kinds(self, folder: str) -> Mapping[str, bool]:
        with self._shared.lock:
            self._enter()
            return {name: node.data is None for name, node in self._list(folder).items()}

    # --- writing --------------------------------------------------------------------------------

    def write(self, path: str, content: str | bytes, /) -> None:
        at = parse_file_path(path)
        data = encode(path, content)
        shared = self._shared
        shared.acquire()
        try:
            self._enter(at.path)
            self._store(at, data, self._look(at.folder, at.name))
        finally:
            shared.release()

    def append(self, path: str, content: str | bytes, /) -> None:
        at = parse_file_path(path)
        data = encode(path, content)
        with self._shared.lock:
            self._enter(at.path)
            old = self._see(at.folder, at.name)
            self._need_room(at.path, 0, old.size + len(data), old.size)
            self._store(at, (loaded(old.data) if old.data else b"") + data, old)

    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        at = parse_file_path(path)
        with self._shared.lock:
            self._enter(at.path)
            node = self._see(at.folder, at.name)
            if node.data is None:
                self._refuse_no_file(at, node)
            data = loaded(node.data)
            text = decode(at.path, data)
            count = count_replaceable(at.path, text, old, new, every=all)
            longer = len(encode(at.path, new)) - len(encode(at.path, old))
            if (
                longer > 0
            ):  # the result could be thousands of times larger, so its size is checked before it is built
                self._need_room(at.path, 0, len(data) + count * longer, len(data))
            self._store(at, encode(at.path, text.replace(old, new)), node)
        return count

    def mkdir(self, path: str, /) -> None:
        at = parse_path(path)
        with self._shared.lock:
            self._enter(at.path)
            if self._look(at.folder, at.name).is_folder:
                self._see(at.folder, at.name)  # an existing folder counts as read
            self._make_folders(at.path)

    def delete(self, path: str, /, *, recursive: bool = False) -> None:
        at = self._not_root(path, "deleted. Delete its content instead")
        with self._shared.lock:
            self._enter(at.path)
            node = self._see(at.folder, at.name)
            if not node.version:
                self._refuse_missing(at)
            below = self._below(at.path, node)
            if below and not recursive:
                problem = "this folder is not empty. Pass recursive=True to delete it with its content"
                raise FileError(at.path, problem)
            for folder, name, inner in reversed(below):
                self._put(folder, name, ABSENT, inner)
            self._put(at.folder, at.name, ABSENT, node)

    def move(self, source: str, target: str, /) -> None:
        start = self._not_root(source, "moved. Move its content instead")
        end = self._not_root(target, "replaced. Pass the full new path, including the name")
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
            self._put_again(end.folder, end.name, node, start.path)
            for folder, name, inner in below:
                self._put_again(end.path + folder[len(start.path) :], name, inner, join(folder, name))

    def _store(self, at: ParsedPath, data: bytes, old: Node) -> None:
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

    def _put_again(self, folder: str, name: str, node: Node, source: str) -> None:
        """Put the content of the path `source` at a new path, with a new version and the original modification time."""
        new = Node(self._shared.tick(), node.data, node.modified)
        self._put(folder, name, new, self._look(folder, name))

    def _make_folders(self, path: str, *, before: int = 0, force: bool = False) -> None:
        """Create a folder and its missing parents.

        Raises `FileError`, and creates nothing, if a file is in the way, or if there is no room for the folders and for
        `before` more entries. With `force`, neither is checked.
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
        """Return the entries of a folder at any depth, or nothing for a file. An entry comes after the folder that contains it."""
        found: list[tuple[str, str, Node]] = []
        folders = [path] if node.is_folder else []
        for folder in folders:
            for name, inner in self._list(folder).items():
                found.append((folder, name, inner))
                if inner.is_folder:
                    folders.append(join(folder, name))
        return found

    # --- refusals -----------------------------------------------------------------------------------

    def _not_root(self, path: str, what: str) -> ParsedPath:
        at = parse_path(path)
        if not at.name:
            raise PathRefused(path, f"the root can't be {what}")
        return at

    def _refuse_file(self, path: str) -> None:
        folder, name = split(path)
        if self._look(folder, name).data is not None:
            self._see(folder, name)
            raise FileInTheWay(
                path, "this is a file, so it can't contain others. Choose another path, or move the file"
            )

    def _need_room(self, path: str, more: int, size: int, old_size: int) -> None:
        limits = self._shared.limits
        if size > limits.max_file_size:
            problem = f"it would have {size} bytes, and the limit for a file is {limits.max_file_size}. Write less, or several files"
            raise FileLimitReached(path, problem)
        files, total = self._usage()
        if files + more > limits.max_files:
            problem = (
                f"the limit of {limits.max_files} files and folders would be exceeded. Delete some first"
            )
            raise FileLimitReached(path, problem)
        if size > old_size and total + size - old_size > limits.max_total_size:
            problem = f"the limit of {limits.max_total_size} bytes in total would be exceeded. Delete some files first"
            raise FileLimitReached(path, problem)

    def _refuse_no_file(self, at: ParsedPath, node: Node) -> NoReturn:
        if node.version:
            raise FileError(at.path, "this is a folder, not a file. List it to see the files in it")
        self._refuse_missing(at)

    def _refuse_taken(self, at: ParsedPath, node: Node, name: str) -> NoReturn:
        if node.is_folder:
            hint = f"To move into it, give the full new path: {join(at.path, name)!r}"
            raise FileInTheWay(at.path, f"a folder exists there already. {hint}")
        raise FileInTheWay(at.path, "a file exists there already. Delete it first, or choose another path")

    def _refuse_missing(self, at: ParsedPath) -> NoReturn:
        """Raise `FileMissing`. Its message says which part of the path is missing, and suggests a similar name or listing a folder."""
        with self._shared.lock:
            lost = next((p for p in ancestors(at.path) if not self._has_folder(p)), at.path)
            folder, name = split(lost)
            names = self._names_near(folder)
        what = "nothing exists at this path" if lost == at.path else f"there is no folder {lost!r}"
        near = nearest(name, names)
        hint = (
            f"Did you mean {join(folder, near)!r}?"
            if near
            else f"List {folder or '.'!r} to see what is there"
        )
        raise FileMissing(at.path, f"{what}. {hint}")


def clashes(over: Over, claimed: Mapping[object, Over]) -> set[str]:
    """Return the paths in `over` that conflict with the pending changes of prepared forks."""
    mine = _weights(over)
    found: set[str] = set()
    for other in claimed.values():
        theirs = _weights(other)
        found.update(path for path, hard in mine.items() if path in theirs and (hard or theirs[path]))
        found.update(path for path in mine if any(theirs.get(above) for above in ancestors(path)))
        found.update(above for path in theirs for above in ancestors(path) if mine.get(above))
    return found


def refuse_claimed(claimed: Mapping[object, Over], path: str) -> None:
    """Raise `Conflict` if changing this path would conflict with the pending changes of a prepared fork."""
    folder, name = split(path)
    if found := clashes({folder: {name: (ABSENT, ABSENT)}}, claimed):
        raise Conflict(sorted(found))


def _weights(over: Over) -> dict[str, bool]:
    """Map each changed path to False if the new node is a folder, and to True otherwise."""
    return {
        join(folder, name): not node.is_folder
        for folder, changes in over.items()
        for name, (node, _) in changes.items()
    }
