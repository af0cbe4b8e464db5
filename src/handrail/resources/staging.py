"""`FileFork`: a call's own version of the files, which is committed or dropped when the call ends.

`FileView` is what the call's handler and its policies see of it: the verbs, without the steps of a commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import msgspec

from handrail.concurrency.claims import ADD, AT_ONCE, READ, USE, WRITE, Pace
from handrail.errors import Conflict, ContextError, ContextExpired, EffectRefused
from handrail.protocols import FileInfo, Filesystem, Match
from handrail.resources.diff import diff
from handrail.resources.facts import Facts
from handrail.resources.paths import ancestors, join, split
from handrail.resources.startup_files import run_by
from handrail.resources.store import Files, Store
from handrail.resources.tree import (
    ABSENT,
    FileTree,
    Node,
    Over,
    clashes,
    is_file,
    loaded,
    refuse_claimed,
    shown,
    writes,
)

OPEN, PREPARED, OVER = 0, 1, 2


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


class FileFork(Files):
    """One call's version of the files, which is either committed to the files it was forked from or dropped.

    Reads are repeatable: if others have changed a file meanwhile, it still has the same content in the fork, or reading it
    again raises `Conflict`. Once the fork is prepared or dropped, reading or writing files through it or a fork of it raises
    `ContextExpired`, in every thread.
    """

    __slots__ = ("_line", "_owner", "_parent", "_sealed", "_state", "_writable", "pace")
    _tree: FileTree  # pyright: ignore[reportIncompatibleVariableOverride]  # set once

    is_durable: ClassVar[bool] = False

    def __init__(
        self,
        parent: Files,
        line: tuple[FileFork, ...],
        store: Store,
        owner: str,
        writable: bool,
        tree: FileTree | None = None,
    ) -> None:
        self._parent = parent
        self._line = line
        """The outer forks, outermost first."""
        self._store = store
        self._tree = FileTree(parent._tree, store.tick) if tree is None else tree  # pyright: ignore[reportIncompatibleVariableOverride]  # set once
        self._owner = owner
        self._writable = writable
        self._state = OPEN
        self._sealed = False
        self.pace: Pace = AT_ONCE
        """How work on all of this fork's files proceeds."""

    def fork(self, owner: str, /, *, writable: bool = True) -> Self:
        """Return a fork that commits to this one.

        With `writable=False`, or if this fork is read-only, the new fork refuses every change.
        """
        self._enter()
        self._tree.branch()
        return type(self)(self, (*self._line, self), self._store, owner, writable and self._writable)

    def handler_view(self) -> FileView:
        """Return this fork's verbs for the call's handler, which can't commit through them."""
        return FileView(self)

    def _enter(self, change: str = "") -> None:
        if self._state:
            raise ContextExpired(self._owner)
        if change:
            if self._sealed:
                raise ContextExpired(self._owner)
            if not self._writable:
                raise EffectRefused(
                    self._owner, None, f"it may not write {change!r}, which needs effect='staged'"
                )
            if self._tree.claimed:
                refuse_claimed(self._tree.claimed, change)
        for fork in self._line:
            if fork._state:
                raise ContextExpired(fork._owner)

    def _each(self, entries: Collection[T]) -> Iterator[T]:
        """Yield the entries. A durable fork gives up the lock, which the caller holds, between slices of them. A commit in memory is atomic."""
        return self.pace.each(entries, lock=self._store.lock if self.is_durable else None)

    # --- the end of a call ------------------------------------------------------------------------

    def seal(self) -> None:
        """Refuse further changes, so that exactly the current content will be committed."""
        with self._store.lock:
            self._sealed = True

    def stale(self) -> tuple[str, ...]:
        """Return the paths that have changed since this fork, or a nested fork that has ended, read them.

        Includes the paths that this fork and its nested forks read at different versions. A path that ends in `/` stands
        for a folder or for the names in it.
        """
        tree = self._tree
        if tree.seen is None and tree.listed is None and tree.torn is None:
            return ()
        with self._store.lock:
            base = tree.base
            places = set(tree.torn or ())
            for folder, name, node in self._each(tree.reads()):
                if base.look(folder, name).version != node.version:
                    places.add(shown(join(folder, name), node))
            for folder, listing in self._each(list((tree.listed or {}).items())):
                if base.stamp(folder) != listing.stamp:
                    places.add(f"{folder or '.'}/")
            return tuple(sorted(places))

    def places(self, *, reads: bool = True) -> dict[str, int]:
        """Return what a commit of this fork depends on and changes, in the form of a claim.

        A path that ends in `/` stands for the names in a folder. Without `reads`, what the fork read is left out.
        """
        with self._store.lock:
            tree = self._tree
            places: dict[str, int] = {}
            if reads:
                for folder, name, _ in self._each(tree.reads()):
                    places[join(folder, name)] = READ
                places.update((f"{folder}/", READ) for folder in tree.listed or ())
            over = tree.over or {}
            for folder, name, node, base in self._each(writes(over)):
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
        store = self._store
        store.acquire()
        try:
            if self._state or self._line:
                self._enter()
            self._state = OVER
            tree = self._tree
            over = tree.over
            if over is not None:
                if self._into_sealed():
                    raise ContextExpired(self._line[-1]._owner)
                self._check(over)
                if tree.over is not over:
                    raise ContextExpired(self._owner)  # it was dropped meanwhile
                if tree.base.claimed is not None:
                    tree.base.claimed[self] = over
            self._state = PREPARED
        finally:
            store.release()

    def apply(self) -> None:
        """Commit the changes to the files that were forked. Discards them if an outer fork has ended or the nearest outer fork is sealed.

        The reads then count as reads by the nearest outer fork, unless an outer fork has ended. Raises `ContextError` unless
        the fork is prepared.
        """
        store = self._store
        store.acquire()
        try:
            if self._state != PREPARED:
                raise ContextError(
                    f"the fork of {self._owner!r} is not prepared, so it can't be applied. Call prepare() first"
                )
            self._state = OVER
            tree = self._tree
            if self._line and not any(fork._state for fork in self._line):
                self._line[-1]._tree.adopt(tree)
            if self._line and self._is_outer_over():
                tree.over = None
            if tree.over is not None:
                self._merge(tree.over)
            self._release()
            tree.seen = tree.listed = tree.torn = None
        finally:
            store.release()

    def drop(self) -> None:
        """Close the fork and discard its changes. Its reads then count as reads by the nearest outer fork, unless an outer fork has ended."""
        with self._store.lock:
            tree = self._tree
            if self._state != OVER and self._line and not any(fork._state for fork in self._line):
                self._line[-1]._tree.adopt(tree)
            self._release()
            self._state = OVER
            tree.over = tree.seen = tree.listed = tree.torn = None

    def _check(self, over: Over) -> None:
        tree = self._tree
        against = tree.conflicts(over, self._each)
        # From here on, nobody else gets the lock until the changes are entered.
        if tree.base.claimed:
            against.extend(clashes(over, tree.base.claimed))
        if tree.files > 0 or tree.size > 0:
            files, size = tree.usage()
            limits = self._store.limits
            if files > limits.max_files or size > limits.max_total_size:
                against.extend(self.changed)
        if against:
            raise Conflict(sorted(set(against)))

    def _into_sealed(self) -> bool:
        """Return whether the outer fork is sealed, so that it accepts no changes."""
        return bool(self._line) and self._line[-1]._sealed

    def _is_outer_over(self) -> bool:
        """Return whether an outer fork has ended, or the nearest one is sealed."""
        return self._into_sealed() or any(fork._state for fork in self._line)

    def _release(self) -> None:
        if self._tree.base.claimed is not None:
            self._tree.base.claimed.pop(self, None)

    def _merge(self, over: Over) -> None:
        """Apply the changes to the parent: removals from the inside out, then additions from the outside in."""
        under = self._parent._tree
        folders = over if len(over) == 1 else sorted(over, key=len)
        if not self._tree.is_plain:
            for folder in self._each(tuple(folders)[::-1]):
                for name, (node, base) in self._each(over[folder].items()):
                    old = under.look(folder, name)
                    goes = not node.version or (old.data is None) != (node.data is None)
                    if goes and (old.version or (self._line and not node.version)):
                        # In an outer fork, a file that was created and deleted again also counts as written.
                        under.put(folder, name, ABSENT, old, base)
        for folder in self._each(folders):
            for name, (node, base) in self._each(over[folder].items()):
                if node.version:
                    old = under.look(folder, name)
                    if not old.version and not under.has_folder(folder):
                        self._parent._make_folders(folder, force=True)
                    if node.data is not None or not old.version:
                        under.put(folder, name, node, old, base)

    # --- the changes --------------------------------------------------------------------------------

    @property
    def changed(self) -> tuple[str, ...]:
        """The paths that a commit of this fork changes, sorted. A folder's path ends in `/`."""
        with self._store.lock:
            paths = [shown(path, node if node.version else base) for path, node, base in self._tree.changes()]
        return tuple(sorted(paths))

    def changed_paths(self) -> tuple[str, ...]:
        """Return the paths that a commit of this fork changes."""
        return self.changed

    def changes(self) -> Iterator[tuple[str, bytes | None, bytes | None]]:
        """Yield the path, the old bytes and the new bytes of each file that a commit changes, sorted by path. None means no file."""
        with self._store.lock:
            found = sorted(
                ((path, base.data, node.data) for path, node, base in self._tree.changes()),
                key=lambda change: change[0],
            )
        return (
            (path, None if old is None else self._bytes_of(old), None if new is None else self._bytes_of(new))
            for path, old, new in found
            if old is not None or new is not None
        )

    def deletes(self) -> bool:
        """Return whether a commit of this fork deletes a file, other than by moving it."""
        with self._store.lock:
            changes = list(self._tree.changes())
        new = {id(node.data) for _, node, base in changes if not base.version}
        return any(
            is_file(base) and not is_file(node) and id(base.data) not in new for _, node, base in changes
        )

    def diff(self) -> str:
        """Return the changes as a unified diff. The content of binary and very large files is not shown."""
        with self._store.lock:
            changes, later = list(self._tree.changes()), self._run_later()
        return diff(changes, self._facts_of, later)

    def read_places(self) -> list[str]:
        """Return the paths and folder listings that this fork read, in the journal's format."""
        with self._store.lock:
            seen = [join(folder, name) for folder, name, _ in self._tree.reads()]
            listed = [f"{folder}/" for folder in self._tree.listed or ()]
            return [f"file {path}" for path in (*seen, *listed)]

    def written_places(self) -> list[str]:
        """Return the paths that this fork changed, in the journal's format."""
        return [f"file {path}" for path in self.changed]

    def _bytes_of(self, data: Any) -> bytes:
        return loaded(data)

    def _run_later(self) -> Mapping[str, str]:
        """Return each startup file that was changed or deleted, with the program that runs it."""
        changed = (path for path, *nodes in self._tree.changes() if any(map(is_file, nodes)))
        return {path: program for path in changed if (program := run_by(path))}

    def _facts_of(self, path: str, node: Node) -> Facts | None:
        """Return the mode, owner, group and attributes of a file or folder, or None if they are not recorded."""
        return None

    # --- replay -----------------------------------------------------------------------------------

    def file_changes(self) -> list[FileChange]:
        """Return the paths that this fork looked up or changed, as plain data that another process can `redo`.

        Listings of folders are not included.
        """
        with self._store.lock:
            found = [
                FileChange(join(folder, name), "read", base=self._lasting(join(folder, name), node))
                for folder, name, node in self._each(self._tree.reads())
            ]
            for path, node, base in self._each(list(self._tree.changes())):
                found.append(self._change(path, node, self._lasting(path, base)))
            return found

    def redo(self, changes: Sequence[Any]) -> None:
        """Repeat the reads and changes of another fork of the same files.

        Raises `Conflict` if a file whose version was recorded has changed since then.
        """
        again = [msgspec.convert(each, FileChange) for each in changes]
        tree = self._tree
        with self._store.lock:
            against = [
                each.path
                for each in again
                if each.base and each.base != self._lasting(each.path, tree.base.look(*split(each.path)))
            ]
            if against:
                raise Conflict(sorted(set(against)))
            for each in again:
                if each.kind == "read":
                    tree.see(*split(each.path))
            again.sort(key=lambda change: (change.path.count("/"), change.path))
            for each in reversed(again):
                if each.kind == "gone":
                    folder, name = split(each.path)
                    self._tree.put(folder, name, ABSENT, tree.look(folder, name))
            for each in again:
                if each.kind not in ("gone", "read"):
                    folder, name = split(each.path)
                    old = tree.look(folder, name)
                    if not tree.has_folder(folder):
                        self._make_folders(folder, force=True)
                    self._tree.put(folder, name, self._node_again(each, old), old)

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
        now = self._store.clock.now()
        return Node(self._store.tick(), None if change.kind == "folder" else change.data, now)
