"""`FileFork`: a call's own version of the files, which is committed or dropped when the call ends.

`FileView` is what the call's handler and its policies see of it: the verbs, without the steps of a commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import msgspec

from handrail.concurrency.claims import ADD, READ, USE, WRITE
from handrail.errors import Conflict, ContextError, ContextExpired
from handrail.protocols import FileInfo, Filesystem, Match
from handrail.resources.diff import diff
from handrail.resources.facts import Facts
from handrail.resources.paths import ancestors, join, split
from handrail.resources.startup_files import run_by
from handrail.resources.store import ABSENT, Node, Over, clashes, loaded
from handrail.resources.tree import OVER, PREPARED, Overlay, shown


class FileView:
    """The verbs of a call's fork of the files, and nothing else.

    Only the gate commits or drops the fork. `fork_behind` returns it to the parts of Handrail that need more than the verbs.
    """

    __slots__ = ("_fork",)

    def __init__(self, fork: Filesystem) -> None:
        self._fork: Any = fork

    def read(self, path: str, /) -> str:
        return self._fork.read(path)

    def read_bytes(self, path: str, /) -> bytes:
        return self._fork.read_bytes(path)

    def write(self, path: str, content: str | bytes, /) -> None:
        self._fork.write(path, content)

    def append(self, path: str, content: str | bytes, /) -> None:
        self._fork.append(path, content)

    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        return self._fork.edit(path, old, new, all=all)

    def list(self, path: str = ".", /) -> Sequence[FileInfo]:
        return self._fork.list(path)

    def glob(self, pattern: str, /) -> Sequence[str]:
        return self._fork.glob(pattern)

    def grep(self, pattern: str, /, *, glob: str = "**") -> Iterable[Match]:
        return self._fork.grep(pattern, glob=glob)

    def stat(self, path: str, /) -> FileInfo:
        return self._fork.stat(path)

    def exists(self, path: str, /) -> bool:
        return self._fork.exists(path)

    def delete(self, path: str, /, *, recursive: bool = False) -> None:
        self._fork.delete(path, recursive=recursive)

    def mkdir(self, path: str, /) -> None:
        self._fork.mkdir(path)

    def move(self, source: str, target: str, /) -> None:
        self._fork.move(source, target)


class LinkedFileView(FileView):
    """A view of files that may contain links."""

    __slots__ = ()

    def resolved(self, path: str, /) -> str:
        """Return where a path leads: normalized, with every link resolved."""
        return self._fork.resolved(path)


def fork_behind(files: Any) -> Any:
    """Return the fork behind a view of files. Anything else is returned as it is."""
    return files._fork if isinstance(files, FileView) else files  # pyright: ignore[reportPrivateUsage]  # the seam to it


T = TypeVar("T")


class FileChange(msgspec.Struct, frozen=True):
    """One path that a call read or changed."""

    path: str
    kind: Literal["read", "file", "folder", "link", "pipe", "socket", "gone"]
    data: bytes = b""
    facts: Facts | None = None
    base: str = ""
    """The version that the call read or based its change on, in a form that another process can compare, or "" if there is no such form."""


class FileFork(Overlay):
    """One call's version of the files, which is either committed to the files it was forked from or dropped.

    Reads are repeatable: if others have changed a file meanwhile, it still has the same content in the fork, or reading it
    again raises `Conflict`. Once the fork is prepared or dropped, reading or writing files through it or a fork of it raises
    `ContextExpired`, in every thread.
    """

    __slots__ = ()

    is_durable: ClassVar[bool] = False

    def fork(self, owner: str, /, *, writable: bool = True) -> Self:
        """Return a fork that commits to this one.

        With `writable=False`, or if this fork is read-only, the new fork refuses every change.
        """
        self._enter()
        if self._claimed is None:
            self._stamps = {}
            self._claimed = {}
        return type(self)(self, (*self._line, self), self._shared, owner, writable and self._writable)

    def handler_view(self) -> FileView:
        """Return this fork's verbs for the call's handler, which can't commit through them."""
        return FileView(self)

    def _each(self, entries: Collection[T]) -> Iterator[T]:
        """Yield the entries. A durable fork gives up the lock, which the caller holds, between slices of them. A commit in memory is atomic."""
        return self.pace.each(entries, lock=self._shared.lock if self.is_durable else None)

    # --- the end of a call ------------------------------------------------------------------------

    def seal(self) -> None:
        """Refuse further changes, so that exactly the current content will be committed."""
        with self._shared.lock:
            self._sealed = True

    def stale(self) -> tuple[str, ...]:
        """Return the paths that have changed since this fork, or a nested fork that has ended, read them.

        Includes the paths that this fork and its nested forks read at different versions. A path that ends in `/` stands
        for a folder or for the names in it.
        """
        if self._seen is None and self._listed is None and self._torn is None:
            return ()
        with self._shared.lock:
            parent = self._parent
            found = set(self._torn or ())
            for folder, name, node in self._each(self._all_seen()):
                if parent._look(folder, name).version != node.version:
                    found.add(shown(join(folder, name), node))
            for folder, listing in self._each(list((self._listed or {}).items())):
                if parent._stamp(folder) != listing.stamp:
                    found.add(f"{folder or '.'}/")
            return tuple(sorted(found))

    def places(self, *, reads: bool = True) -> dict[str, int]:
        """Return what a commit of this fork depends on and changes, in the form of a claim.

        A path that ends in `/` stands for the names in a folder. Without `reads`, what the fork read is left out.
        """
        with self._shared.lock:
            places: dict[str, int] = {}
            if reads:
                for folder, name, _ in self._each(self._all_seen()):
                    places[join(folder, name)] = READ
                places.update((f"{folder}/", READ) for folder in self._listed or ())
            over = self._over or {}
            for folder, name, node, base in self._each(_flat(over)):
                path = join(folder, name)
                is_new_folder = node.is_folder and not base.version
                places[path] = places.get(path, 0) | (ADD if is_new_folder else WRITE)
                if node.is_folder != base.is_folder or bool(node.version) != bool(base.version):
                    places[f"{folder}/"] = places.get(f"{folder}/", 0) | ADD
            for folder in self._each(list(over)):
                for above in (*ancestors(folder), folder) if folder else ():
                    places[above] = places.get(above, 0) | USE
            return places

    def prepare(self) -> None:
        """Close the fork and check that it can be committed.

        Raises `Conflict` with the paths that conflict with someone else's changes, or with all changed paths if the files
        would exceed a limit together with what others have committed. Raises `ContextExpired` if this fork or an outer one has
        ended, or if there are changes and the outer fork is sealed.
        """
        shared = self._shared
        shared.acquire()
        try:
            if self._state or self._line:
                self._enter()
            self._state = OVER
            over = self._over
            if over is not None:
                if self._into_sealed():
                    raise ContextExpired(self._line[-1]._owner)
                self._check(over)
                if self._over is not over:
                    raise ContextExpired(self._owner)  # it was dropped meanwhile
                if self._parent._claimed is not None:
                    self._parent._claimed[self] = over
            self._state = PREPARED
        finally:
            shared.release()

    def apply(self) -> None:
        """Commit the changes to the files that were forked. Discards them if an outer fork has ended or the nearest outer fork is sealed.

        The reads then count as reads by the nearest outer fork, unless an outer fork has ended. Raises `ContextError` unless
        the fork is prepared.
        """
        shared = self._shared
        shared.acquire()
        try:
            if self._state != PREPARED:
                raise ContextError(
                    f"the fork of {self._owner!r} is not prepared, so it can't be applied. Call prepare() first"
                )
            self._state = OVER
            if self._line and not any(fork._state for fork in self._line):
                self._line[-1]._adopt(self)
            if self._line and (self._into_sealed() or any(fork._state for fork in self._line)):
                self._over = None  # an outer fork has ended, or the nearest one is sealed
            if self._over is not None:
                self._merge(self._over)
            self._release()
            self._seen = self._listed = self._torn = None
        finally:
            shared.release()

    def drop(self) -> None:
        """Close the fork and discard its changes. Its reads then count as reads by the nearest outer fork, unless an outer fork has ended."""
        with self._shared.lock:
            if self._state != OVER and self._line and not any(fork._state for fork in self._line):
                self._line[-1]._adopt(self)
            self._release()
            self._state = OVER
            self._over = self._seen = self._listed = self._torn = None

    # --- replay -----------------------------------------------------------------------------------

    def file_changes(self) -> list[FileChange]:
        """Return the paths that this fork looked up or changed, as plain data that another process can `redo`.

        Listings of folders are not included.
        """
        with self._shared.lock:
            found = [
                FileChange(join(folder, name), "read", base=self._lasting(join(folder, name), node))
                for folder, name, node in self._each(self._all_seen())
            ]
            for path, node, base in self._each(list(self._changes())):
                found.append(self._change(path, node, self._lasting(path, base)))
            return found

    def read_places(self) -> list[str]:
        """Return the paths and folder listings that this fork read, in the journal's format."""
        with self._shared.lock:
            seen = [join(folder, name) for folder, names in (self._seen or {}).items() for name in names]
            listed = [f"{folder}/" for folder in self._listed or ()]
            return [f"file {path}" for path in (*seen, *listed)]

    def written_places(self) -> list[str]:
        """Return the paths that this fork changed, in the journal's format."""
        return [f"file {path}" for path in self.changed]

    def changed_paths(self) -> tuple[str, ...]:
        """Return the paths that a commit of this fork changes."""
        return self.changed

    def deletes(self) -> bool:
        """Return whether a commit of this fork deletes a file, other than by moving it."""
        with self._shared.lock:
            found = list(self._changes())
        new = {id(node.data) for _, node, base in found if not base.version}
        return any(
            is_file(base) and not is_file(node) and id(base.data) not in new for _, node, base in found
        )

    def redo(self, changes: Sequence[Any]) -> None:
        """Repeat the reads and changes of another fork of the same files.

        Raises `Conflict` if a file whose version was recorded has changed since then.
        """
        again = [msgspec.convert(each, FileChange) for each in changes]
        with self._shared.lock:
            against = [
                each.path
                for each in again
                if each.base and each.base != self._lasting(each.path, self._parent._look(*split(each.path)))
            ]
            if against:
                raise Conflict(sorted(set(against)))
            for each in again:
                if each.kind == "read":
                    self._see(*split(each.path))
            again.sort(key=_depth)
            for each in reversed(again):
                if each.kind == "gone":
                    folder, name = split(each.path)
                    self._put(folder, name, ABSENT, self._look(folder, name))
            for each in again:
                if each.kind not in ("gone", "read"):
                    folder, name = split(each.path)
                    old = self._look(folder, name)
                    if not self._has_folder(folder):
                        self._make_folders(folder, force=True)
                    self._put(folder, name, self._node_again(each, old), old)

    def _lasting(self, path: str, node: Node) -> str:
        """Return the version of the node at a path in a form that outlives the process, or "" if there is none."""
        return ""

    def _change(self, path: str, node: Node, base: str) -> FileChange:
        if not node.version:
            return FileChange(path, "gone", base=base)
        if node.data is None:
            return FileChange(path, "folder", facts=self._facts_of(path, node), base=base)
        return FileChange(path, "file", loaded(node.data), self._facts_of(path, node), base)

    def _node_again(self, change: FileChange, old: Node) -> Node:
        now = self._shared.clock.now()
        return Node(self._shared.tick(), None if change.kind == "folder" else change.data, now)

    @property
    def changed(self) -> tuple[str, ...]:
        """The paths that a commit of this fork changes, sorted. A folder's path ends in `/`."""
        with self._shared.lock:
            found = [shown(path, node if node.version else base) for path, node, base in self._changes()]
        return tuple(sorted(found))

    def changes(self) -> Iterator[tuple[str, bytes | None, bytes | None]]:
        """Yield the path, the old bytes and the new bytes of each file that a commit changes, sorted by path. None means no file."""
        with self._shared.lock:
            found = sorted(((path, base.data, node.data) for path, node, base in self._changes()), key=_path)
        return (
            (path, None if old is None else self._bytes_of(old), None if new is None else self._bytes_of(new))
            for path, old, new in found
            if old is not None or new is not None
        )

    def _bytes_of(self, data: Any) -> bytes:
        return loaded(data)

    def diff(self) -> str:
        """Return the changes as a unified diff. The content of binary and very large files is not shown."""
        with self._shared.lock:
            changes, later = list(self._changes()), self._run_later()
        return diff(changes, self._facts_of, later)

    def _run_later(self) -> Mapping[str, str]:
        """Return each startup file that was changed or deleted, with the program that runs it."""
        changed = (path for path, *nodes in self._changes() if any(map(is_file, nodes)))
        return {path: program for path in changed if (program := run_by(path))}

    def _facts_of(self, path: str, node: Node) -> Facts | None:
        """Return the mode, owner, group and attributes of a file or folder, or None if they are not recorded."""
        return None

    def _all_seen(self) -> list[tuple[str, str, Node]]:
        return [
            (folder, name, node)
            for folder, names in (self._seen or {}).items()
            for name, node in names.items()
        ]

    def _changes(self) -> Iterator[tuple[str, Node, Node]]:
        for folder, changes in (self._over or {}).items():
            for name, (node, base) in changes.items():
                if node.version or base.version:
                    yield join(folder, name), node, base

    def _check(self, over: Over) -> None:
        parent = self._parent
        against: list[str] = []
        for folder, name, node, base in self._each(_flat(over)):
            now = parent._look(folder, name)
            if now.version != base.version:
                if not (now.is_folder and node.is_folder):
                    against.append(join(folder, name))
            elif now.version:
                if now.data is None and not node.is_folder:
                    against.extend(self._left_in(join(folder, name), over))
            elif not parent._has_folder(folder):
                against.extend(self._files_above(folder, over))
        # From here on, nobody else gets the lock until the changes are entered.
        if parent._claimed:
            against.extend(clashes(over, parent._claimed))
        if self._files > 0 or self._bytes > 0:
            files, size = self._usage()
            limits = self._shared.limits
            if files > limits.max_files or size > limits.max_total_size:
                against.extend(self.changed)
        if against:
            raise Conflict(sorted(set(against)))

    def _into_sealed(self) -> bool:
        """Return whether the outer fork is sealed, so that it accepts no changes."""
        return bool(self._line) and self._line[-1]._sealed

    def _release(self) -> None:
        if self._parent._claimed is not None:
            self._parent._claimed.pop(self, None)

    def _left_in(self, path: str, over: Over) -> Iterator[str]:
        """Return an iterator over the paths that someone else added to a folder that this fork removes."""
        gone = over.get(path, {})
        return (join(path, name) for name in self._parent._names(path) if name not in gone)

    def _files_above(self, folder: str, over: Over) -> Iterator[str]:
        """Yield the paths where this fork needs a folder but someone else has put a file."""
        for path in (*ancestors(folder), folder):
            above, name = split(path)
            if self._parent._look(above, name).data is not None and name not in over.get(above, {}):
                yield path

    def _merge(self, over: Over) -> None:
        """Apply the changes to the parent: removals from the inside out, then additions from the outside in."""
        parent = self._parent
        folders = over if len(over) == 1 else sorted(over, key=len)
        if not self._plain:
            for folder in self._each(tuple(folders)[::-1]):
                for name, (node, base) in self._each(over[folder].items()):
                    old = parent._look(folder, name)
                    goes = not node.version or (old.data is None) != (node.data is None)
                    if goes and (old.version or (self._line and not node.version)):
                        # In an outer fork, a file that was created and deleted again also counts as written.
                        parent._put(folder, name, ABSENT, old, base)
        for folder in self._each(folders):
            for name, (node, base) in self._each(over[folder].items()):
                if node.version:
                    old = parent._look(folder, name)
                    if not old.version and not parent._has_folder(folder):
                        parent._make_folders(folder, force=True)
                    if node.data is not None or not old.version:
                        parent._put(folder, name, node, old, base)


def is_file(node: Node) -> bool:
    return bool(node.version) and not node.is_folder


def _flat(over: Over) -> list[tuple[str, str, Node, Node]]:
    """Return the folder, the name, the new node and the old node of each change."""
    return [
        (folder, name, node, base)
        for folder, changes in over.items()
        for name, (node, base) in changes.items()
    ]


def _depth(change: FileChange) -> tuple[int, str]:
    return change.path.count("/"), change.path


def _path(change: tuple[str, Any, Any]) -> str:
    return change[0]
