"""`Store`: the files of a root, and what the root shares with its forks. `Files`: the operations of `Filesystem` on a store or a fork."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import RLock
from typing import TYPE_CHECKING, NoReturn

from handrail.clock import Clock
from handrail.concurrency.claims import Claims
from handrail.errors import Conflict, FileError, FileInTheWay, FileLimitReached, FileMissing, PathRefused
from handrail.protocols import FileInfo, Match
from handrail.resources.paths import ParsedPath, ancestors, join, nearest, parse_file_path, parse_path, split
from handrail.resources.search import count_replaceable, decode, encode, find, line_pattern, sorted_matches
from handrail.resources.tree import (
    ABSENT,
    TOP,
    Base,
    Content,
    FileTree,
    Node,
    Over,
    Unseen,
    is_link,
    loaded,
    special_kind,
)

if TYPE_CHECKING:
    from handrail.resources.directory.store import Links

_TRIES = 4
"""Maximum number of attempts to read a file that changes while it is read."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits on a filesystem and its forks. In a `DirectoryFilesystem`, the last two limit what one call adds."""

    max_file_size: int = 16 * 1024 * 1024
    """Maximum bytes in one file."""
    max_files: int = 1_000_000
    """Maximum number of files and folders together."""
    max_total_size: int = 1024 * 1024 * 1024
    """Maximum bytes in all files together."""


class Store(Base):
    """The files of a root, as they are now. Its forks share its lock, clock, limits and claims, and use it with the lock held."""

    __slots__ = ("acquire", "claimed", "claims", "clock", "limits", "lock", "release", "tick")

    def __init__(self, limits: FileLimits, clock: Clock, tick: Callable[[], int]) -> None:
        self.limits = limits
        self.clock = clock
        self.tick = tick
        self.lock = RLock()
        # `with` costs as much as the lock itself, so the methods that are called most often use these instead.
        self.acquire = self.lock.acquire
        self.release = self.lock.release
        self.claims = Claims(lock=self.lock)
        self.claimed: dict[object, Over] | None = {}

    def members(self, folder: str) -> Mapping[str, Node]:
        """Return the members of a folder. Callers must not change or keep the mapping."""
        raise NotImplementedError

    def names_near(self, folder: str) -> Sequence[str]:
        """Return the existing names that can be suggested for a misspelled one."""
        return self.names(folder)

    def put(self, folder: str, name: str, node: Node, old: Node, base: Node | None = None) -> None:
        """Change a path, as `FileTree.put` does, in a store that is changed directly."""
        raise NotImplementedError

    # A store does not record what is read.

    def see(self, folder: str, name: str) -> Node:
        return self.look(folder, name)

    def own(self, folder: str, name: str) -> Node | None:
        return None

    def forget(self, folder: str, name: str) -> None:
        pass


class Files:
    """The operations of `Filesystem`. Each holds the store's lock while it looks up or changes files.

    In files with links, each resolves the links in its paths first, but `delete` and `move` act on a link itself.
    """

    __slots__ = ("_store", "_tree")
    _store: Store
    _tree: Store | FileTree
    """What the operations look up and change: the store itself, or the tree of a fork."""
    _links: Links | None = None
    """None if there can be no links."""

    # --- called with the lock held ------------------------------------------------------------------

    def _enter(self, change: str = "") -> None:
        """Raise an error if the files are closed, or if the path `change` may not be changed."""
        raise NotImplementedError

    def _keep(self, content: Content, data: bytes) -> None:
        """Keep the bytes of a file that were read, for repeatable reads."""

    def _at(self, path: str, *, last: bool = True) -> ParsedPath:
        """Return where a path leads. With `last=False`, a link at the end is not resolved."""
        if self._links is None:
            return parse_path(path)
        self._enter()
        return parse_path(self._links.follow(path, last=last)[0])

    def _file_at(self, path: str) -> ParsedPath:
        at = parse_file_path(path)
        if self._links is None:
            return at
        self._enter()
        return parse_file_path(self._links.follow(path)[0])

    def _see(self, at: ParsedPath) -> Node:
        self._enter()
        return self._tree.see(at.folder, at.name) if at.name else TOP

    def _load(self, at: ParsedPath) -> bytes:
        """Read a file. If it changes during its first read, it is read again.

        Raises `Conflict` if it keeps changing, or if it has changed since an earlier read.
        """
        self._enter()
        tree = self._tree
        is_pinned = self._links is not None and tree.own(at.folder, at.name) is not None
        for _ in range(_TRIES):
            node = tree.see(at.folder, at.name)
            content = node.data
            if content is None:
                self._refuse_no_file(at, node)
            if isinstance(content, bytes):
                return content
            try:
                data = content.load()
            except Conflict:
                if is_pinned:
                    raise
                tree.forget(at.folder, at.name)
            else:
                self._keep(content, data)
                return data
        raise Conflict([at.path])

    # --- reading --------------------------------------------------------------------------------

    def read(self, path: str, /) -> str:
        return decode(path, self.read_bytes(path))

    def read_bytes(self, path: str, /) -> bytes:
        at = parse_file_path(path)
        with self._store.lock:
            if self._links is not None:
                return self._load(self._file_at(path))
            self._enter()
            node = self._tree.see(at.folder, at.name)
            return self._refuse_no_file(at, node) if node.data is None else loaded(node.data)

    def stat(self, path: str, /) -> FileInfo:
        with self._store.lock:
            at = self._at(path)
            node = self._see(at)
            if not node.version:
                self._refuse_missing(at)
            return self._info(at.path, node)

    def exists(self, path: str, /) -> bool:
        with self._store.lock:
            return self._see(self._at(path)).version > 0

    def list(self, path: str = ".", /) -> Sequence[FileInfo]:
        with self._store.lock:
            at = self._at(path)
            node = self._see(at)
            if not node.version:
                self._refuse_missing(at)
            if node.data is not None:
                raise FileError(at.path, "this is a file, not a folder. Read it, or list its folder")
            names = sorted(self._tree.members(at.path))
            return tuple(self._info(join(at.path, name), self._tree.see(at.path, name)) for name in names)

    def glob(self, pattern: str, /) -> Sequence[str]:
        return find(pattern, self._kind, self._kinds)

    def grep(self, pattern: str, /, *, glob: str = "**") -> Sequence[Match]:
        line_pattern(pattern)
        paths = self.glob(glob)
        without = () if self._links is None else self._links.without(pattern, paths, self._at)
        return sorted_matches(pattern, self._contents(path for path in paths if path not in without))

    def _contents(self, paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for path in paths:
            with self._store.lock:
                at = self._at(path)
                self._enter()
                node = self._tree.look(at.folder, at.name)
                is_regular = node.data is not None and not is_link(node) and not special_kind(node)
                if not is_regular or node.size > self._store.limits.max_file_size:
                    self._tree.see(at.folder, at.name)
                    continue
                data = self._load(at)
            yield path, data

    def _info(self, path: str, node: Node) -> FileInfo:
        """Return information on a node; for a link, on its target, or on the link itself if the target does not exist or may not be used."""
        if self._links is not None and is_link(node):
            try:
                target = self._see(self._at(path))
            except PathRefused:
                target = ABSENT
            node = target if target.version else node
        modified = node.modified
        seconds = modified.timestamp() if isinstance(modified, datetime) else modified or 0.0
        return FileInfo(path or ".", node.data is None, node.size, seconds, bool(special_kind(node)))

    def _kind(self, path: str) -> bool | None:
        with self._store.lock:
            try:
                node = self._see(self._at(path))
            except PathRefused:
                if self._links is None:
                    raise
                return None
            return node.data is None if node.version else None

    def _kinds(self, folder: str) -> Mapping[str, bool]:
        """Map each name in a folder to whether it is a folder itself. In files with links, empty if the path can't be used.

        Of the links, only those to files are included, so that a search does not descend through links, which could form a
        cycle. Names that a caller could not pass back are omitted.
        """
        with self._store.lock:
            if self._links is None:
                self._enter()
                return {name: node.data is None for name, node in self._tree.members(folder).items()}
            try:
                here = self._at(folder or ".").path
            except PathRefused:
                return {}
            self._enter()
            kinds: dict[str, bool] = {}
            for name, node in self._tree.members(here).items():
                path = join(here, name)
                if not _can_be_passed(path):
                    continue
                if not is_link(node):
                    kinds[name] = node.data is None
                elif self._kind(path) is False:
                    kinds[name] = False
            return kinds

    # --- writing --------------------------------------------------------------------------------

    def write(self, path: str, content: str | bytes, /) -> None:
        at = parse_file_path(path)
        store, node = self._store, None
        store.acquire()
        try:
            if self._links is not None:
                self._enter()
                path, node = self._links.follow(path)
                at = parse_file_path(path)
            data = encode(path, content)
            self._enter(at.path)
            self._save(at, data, self._tree.look(at.folder, at.name) if node is None else node)
        finally:
            store.release()

    def append(self, path: str, content: str | bytes, /) -> None:
        with self._store.lock:
            at = self._file_at(path)
            data = encode(path, content)
            self._enter(at.path)
            old = self._tree.see(at.folder, at.name)
            self._need_room(at.path, 0, old.size + len(data), old.size)
            self._save(at, (loaded(old.data) if old.data else b"") + data, old)

    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        with self._store.lock:
            at = self._file_at(path)
            self._enter(at.path)
            node = self._tree.see(at.folder, at.name)
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
            self._save(at, encode(at.path, text.replace(old, new)), node)
        return count

    def mkdir(self, path: str, /) -> None:
        with self._store.lock:
            at = self._at(path)
            self._enter(at.path)
            if self._tree.look(at.folder, at.name).is_folder:
                self._tree.see(at.folder, at.name)  # an existing folder counts as read
            self._make_folders(at.path)

    def delete(self, path: str, /, *, recursive: bool = False) -> None:
        with self._store.lock:
            at = self._movable(path, "deleted. Delete its content instead", is_leaving=True)
            self._enter(at.path)
            node = self._tree.see(at.folder, at.name)
            if not node.version:
                self._refuse_missing(at)
            below = self._below(at.path, node)
            if below and not recursive:
                problem = "this folder is not empty. Pass recursive=True to delete it with its content"
                raise FileError(at.path, problem)
            self._remove(at, node, below)

    def move(self, source: str, target: str, /) -> None:
        with self._store.lock:
            start = self._movable(source, "moved. Move its content instead", is_leaving=True)
            end = self._movable(target, "replaced. Pass the full new path, including the name")
            if start.path in ancestors(end.path):
                raise PathRefused(
                    target, f"{start.path!r} can't be moved into itself. Choose a path outside it"
                )
            self._enter(start.path)
            self._enter(end.path)
            node = self._tree.see(start.folder, start.name)
            if not node.version:
                self._refuse_missing(start)
            if (there := self._tree.see(end.folder, end.name)).version:
                self._refuse_taken(end, there, start.name)
            below = self._below(start.path, node)
            self._make_folders(end.folder)
            self._remove(start, node, below)
            self._put_again(end.folder, end.name, node, start.path)
            for folder, name, inner in below:
                self._put_again(end.path + folder[len(start.path) :], name, inner, join(folder, name))

    def _movable(self, path: str, what: str, *, is_leaving: bool = False) -> ParsedPath:
        """Return where a path that is not the root leads. With `is_leaving`, what is there is to be moved or deleted."""
        at = self._at(path, last=False)
        if is_leaving and self._links is not None:
            self._links.refuse_around(at.path)
        if not at.name:
            raise PathRefused(path, f"the root can't be {what}")
        return at

    def _save(self, at: ParsedPath, data: bytes, old: Node) -> None:
        store = self._store
        size, old_size = len(data), 0
        if old.version:
            if old.data is None:
                self._tree.see(at.folder, at.name)
                raise FileInTheWay(at.path, "this is a folder. Choose another path, or name a file in it")
            old_size = len(old.data)
        if size > old_size or not old.version:
            self._need_room(at.path, 0 if old.version else 1, size, old_size)
            if not old.version and not self._tree.has_folder(at.folder):
                self._make_folders(at.folder, before=1)
        self._tree.put(at.folder, at.name, Node(store.tick(), data, store.clock.now()), old)

    def _remove(self, at: ParsedPath, node: Node, below: Sequence[tuple[str, str, Node]]) -> None:
        for folder, name, inner in reversed(below):
            self._tree.put(folder, name, ABSENT, inner)
        self._tree.put(at.folder, at.name, ABSENT, node)

    def _put_again(self, folder: str, name: str, node: Node, source: str) -> None:
        """Put the content of the path `source` at a new path, with a new version and the original modification time."""
        new = Node(self._store.tick(), node.data, node.modified)
        self._tree.put(folder, name, new, self._tree.look(folder, name))

    def _make_folders(self, path: str, *, before: int = 0, force: bool = False) -> None:
        """Create a folder and its missing parents.

        Raises `FileError`, and creates nothing, if a file is in the way, or if there is no room for the folders and for
        `before` more entries. With `force`, neither is checked.
        """
        missing: list[str] = []
        while not self._tree.has_folder(path):
            if not force:
                self._refuse_file(path)
            missing.append(path)
            path = split(path)[0]
        if missing and not force:
            self._need_room(missing[0], len(missing) + before, 0, 0)
        for path in reversed(missing):
            folder, name = split(path)
            node = Node(self._store.tick(), None, self._store.clock.now())
            self._tree.put(folder, name, node, self._tree.look(folder, name), ABSENT)

    def _below(self, path: str, node: Node) -> Sequence[tuple[str, str, Node]]:
        """Return the entries of a folder at any depth, or nothing for a file. An entry comes after the folder that contains it."""
        found: list[tuple[str, str, Node]] = []
        folders = [path] if node.is_folder else []
        for folder in folders:
            for name, inner in self._tree.members(folder).items():
                inner = self._tree.look(folder, name) if isinstance(inner, Unseen) else inner
                found.append((folder, name, inner))
                if inner.is_folder:
                    folders.append(join(folder, name))
        return found

    # --- refusals -----------------------------------------------------------------------------------

    def _refuse_file(self, path: str) -> None:
        folder, name = split(path)
        if self._tree.look(folder, name).data is not None:
            self._tree.see(folder, name)
            raise FileInTheWay(
                path, "this is a file, so it can't contain others. Choose another path, or move the file"
            )

    def _need_room(self, path: str, more: int, size: int, old_size: int) -> None:
        limits = self._store.limits
        if size > limits.max_file_size:
            problem = f"it would have {size} bytes, and the limit for a file is {limits.max_file_size}. Write less, or several files"
            raise FileLimitReached(path, problem)
        files, total = self._tree.usage()
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
        has_folder = self._tree.has_folder
        lost = next((p for p in ancestors(at.path) if not has_folder(p)), at.path)
        folder, name = split(lost)
        what = "nothing exists at this path" if lost == at.path else f"there is no folder {lost!r}"
        near = nearest(name, self._tree.names_near(folder))
        hint = (
            f"Did you mean {join(folder, near)!r}?"
            if near
            else f"List {folder or '.'!r} to see what is there"
        )
        raise FileMissing(at.path, f"{what}. {hint}")


def _can_be_passed(path: str) -> bool:
    """Return whether a caller can pass this path back unchanged. A path that starts with `~/` or is too long would be refused."""
    try:
        return parse_path(path).path == path
    except PathRefused:
        return False
