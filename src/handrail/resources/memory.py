"""`MemoryFilesystem`: files in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.claims import ADD, WRITE, Claims
from handrail.errors import Conflict
from handrail.resources.paths import join, split
from handrail.resources.staging import FileFork
from handrail.resources.store import FileLimits, Files, Store
from handrail.resources.tree import ABSENT, TOP, Listing, Node, refuse_claimed
from handrail.text.spelling import checked_arguments

__all__ = ["FileLimits", "MemoryFilesystem"]

_NOTHING: Mapping[str, Node] = {}


class MemoryStore(Store):
    """The nodes of files in memory, by folder and name."""

    __slots__ = ("_files", "_size", "_stamps", "_tree")

    def __init__(self, limits: FileLimits, clock: Clock) -> None:
        super().__init__(limits, clock, count(TOP.version + 1).__next__)
        self._tree: dict[str, dict[str, Node]] = {"": {}}
        self._stamps: dict[str, int] = {}
        """The stamp of the last change to the names in each folder.

        A folder's stamp is removed with the folder.
        """
        self._files = 0
        self._size = 0

    def look(self, folder: str, name: str) -> Node:
        members = self._tree.get(folder)
        return ABSENT if members is None else members.get(name, ABSENT)

    def has_folder(self, folder: str) -> bool:
        return folder in self._tree

    def members(self, folder: str) -> Mapping[str, Node]:
        return self._tree.get(folder, _NOTHING)

    def names(self, folder: str) -> Sequence[str]:
        return tuple(self._tree.get(folder, _NOTHING))

    def stamp(self, folder: str) -> int:
        return self._stamps.get(folder, 0)

    def view(self, folder: str) -> Listing:
        return Listing(dict(self._tree.get(folder, _NOTHING)), self._stamps.get(folder, 0), None)

    def usage(self) -> tuple[int, int]:
        return self._files, self._size

    def put(self, folder: str, name: str, node: Node, old: Node, base: Node | None = None) -> None:
        members = self._tree[folder]
        if old.data is not None:
            self._size -= len(old.data)
        if node.version:
            if node.data is not None:
                self._size += len(node.data)
            members[name] = node
            if not old.version:
                self._files += 1
                self._stamps[folder] = node.version
                if node.data is None:
                    self._tree[join(folder, name)] = {}
        elif old.version:
            del members[name]
            self._files -= 1
            self._stamps[folder] = self.tick()
            if old.data is None:
                path = join(folder, name)
                del self._tree[path]
                self._stamps.pop(path, None)


@checked_arguments
class MemoryFilesystem(Files):
    """Files in memory. Direct writes take effect immediately. Calls work on forks.

    Safe to use from several threads. A folder is kept when its last file is deleted.
    """

    __slots__ = ()

    def __init__(
        self,
        files: Mapping[str, str | bytes] | None = None,
        *,
        limits: FileLimits = FileLimits(),  # noqa: B008 (it is frozen)
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store = self._tree = MemoryStore(limits, clock)
        for path, content in (files or {}).items():
            self.write(path, content)

    def fork(self, owner: str, /, *, writable: bool = True) -> FileFork:
        """Return a fork for the call `owner`. With `writable=False` it refuses every change."""
        return FileFork(self, (), self._store, owner, writable)

    @property
    def claims(self) -> Claims:
        """The calls that are committing to these files."""
        return self._store.claims

    def _enter(self, change: str = "") -> None:
        store = self._store
        if change and store.claimed:
            refuse_claimed(store.claimed, change)
        if change and store.claims.is_busy:
            place = store.claims.blocked({change: WRITE, f"{split(change)[0]}/": ADD})
            if place is not None:
                raise Conflict([place])  # the call that depends on it has checked it, and is about to commit
