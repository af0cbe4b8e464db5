"""`Overlay`: a layer over another layer. It holds only what was read or changed through it.

Reads are remembered, so a path or folder that a fork has read stays the same for the fork, unless the fork changes it. The
cost of a fork does not depend on the number of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from handrail.concurrency.claims import AT_ONCE, Pace
from handrail.errors import ContextExpired, EffectRefused
from handrail.resources.paths import join, split
from handrail.resources.store import ABSENT, TOP, Layer, Listing, Node, Shared, refuse_claimed

_NOTHING: Mapping[str, Node] = {}
OPEN, PREPARED, OVER = 0, 1, 2


class Overlay(Layer):
    """A fork's view of the files, with a record of what the fork read and changed."""

    __slots__ = (
        "_bytes",
        "_files",
        "_kept",
        "_line",
        "_listed",
        "_over",
        "_owner",
        "_parent",
        "_plain",
        "_sealed",
        "_seen",
        "_stamps",
        "_state",
        "_torn",
        "_writable",
        "pace",
    )

    def __init__(
        self, parent: Layer, line: tuple[Overlay, ...], shared: Shared, owner: str, writable: bool
    ) -> None:
        self._parent = parent
        self._line = line
        self._shared = shared
        self._owner = owner
        self._writable = writable
        self._state = OPEN
        self._sealed = False
        self.pace: Pace = AT_ONCE
        """How work on all of this fork's files proceeds."""
        # The changes made in this fork, the nodes read, and the listings of folders whose names were read.
        self._over: dict[str, dict[str, tuple[Node, Node]]] | None = None
        self._seen: dict[str, dict[str, Node]] | None = None
        self._listed: dict[str, Listing] | None = None
        # The names of the folders that `_kept_in` returns, by parent folder. Computed on first use.
        self._kept: dict[str, set[str]] | None = None
        # Used once this fork has been forked: the stamps of its folders, the changes of its prepared forks, and the paths that
        # this fork and one of its forks read at different versions.
        self._stamps: dict[str, int] | None = None
        self._claimed = None
        self._torn: set[str] | None = None
        self._plain = True  # whether only files were written, with no deletions and no new folders
        self._files = 0
        self._bytes = 0

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
            if self._claimed:
                refuse_claimed(self._claimed, change)
        for fork in self._line:
            if fork._state:
                raise ContextExpired(fork._owner)

    def _own(self, folder: str, name: str) -> Node | None:
        """Return the node at a path according to this fork's changes, reads and listings, or None if they don't include the path."""
        if self._over is not None:
            changes = self._over.get(folder)
            if changes is not None:
                change = changes.get(name)
                if change is not None:
                    return change[0]
        if self._seen is not None:
            names = self._seen.get(folder)
            if names is not None:
                node = names.get(name)
                if node is not None:
                    return node
        if self._listed is not None:
            listing = self._listed.get(folder)
            if listing is not None:
                return self._unless_kept(folder, name, listing.members.get(name, ABSENT))
        return None

    def _look(self, folder: str, name: str) -> Node:
        if self._over is None and self._seen is None and self._listed is None:
            return self._parent._look(folder, name)
        node = self._own(folder, name)
        if node is not None:
            return node
        if not self._reaches(folder):
            return ABSENT
        return self._unless_kept(folder, name, self._parent._look(folder, name))

    def _reaches(self, folder: str) -> bool:
        """Return whether the parent's files in a folder are visible here.

        The nearest path that this fork has recorded, from the folder upwards, decides. The files are hidden if that path is
        missing or a file.
        """
        node = None
        while folder and node is None:
            folder, name = split(folder)
            node = self._own(folder, name)
        return node is None or node.is_folder

    def _unless_kept(self, folder: str, name: str, node: Node) -> Node:
        return TOP if not node.is_folder and name in self._kept_in(folder) else node

    def _kept_in(self, folder: str) -> Iterable[str]:
        """Return the names of the subfolders in which, at any depth, this fork changed something or read something that existed.

        They stay visible in this fork even if others delete them.
        """
        if self._kept is None:
            self._kept = {}
            for path in self._over or ():
                self._keep(path)
            for path, names in (self._seen or {}).items():
                if any(node.version for node in names.values()):
                    self._keep(path)
        return self._kept.get(folder, ())

    def _keep(self, path: str) -> None:
        kept = self._kept
        while path and kept is not None:
            path, name = split(path)
            names = kept.setdefault(path, set())
            if name in names:
                return
            names.add(name)

    def _see(self, folder: str, name: str) -> Node:
        node = self._look(folder, name)
        if self._over is None or name not in self._over.get(folder, _NOTHING):
            if self._seen is None:
                self._seen = {}
            self._seen.setdefault(folder, {})[name] = node
            if node.version and self._kept is not None:
                self._keep(folder)
        return node

    def _has_folder(self, folder: str) -> bool:
        if self._over is None and self._seen is None and self._listed is None:
            return self._parent._has_folder(folder)
        return not folder or self._look(*split(folder)).is_folder

    def _through(self, folder: str) -> Listing:
        """Return a folder's listing as this fork sees it through its parent, without the fork's own changes."""
        if self._listed is not None and folder in self._listed:
            return self._listed[folder]
        listing = self._parent._view(folder)
        if not self._reaches(folder):
            listing.members.clear()
        for name, node in (self._seen or {}).get(folder, _NOTHING).items():
            if node.version:
                listing.members[name] = node
            else:
                listing.members.pop(name, None)
        return listing

    def _view(self, folder: str) -> Listing:
        below = self._through(folder)
        members = dict(self._with_changes(folder, below.members))
        return Listing(members, self._stamped(folder, below.stamp), below)

    def _with_changes(self, folder: str, members: dict[str, Node]) -> dict[str, Node]:
        changes = (self._over or {}).get(folder)
        kept = self._kept_in(folder)
        if not changes and not kept:
            return members
        members = {**members, **{name: TOP for name in kept if not members.get(name, ABSENT).is_folder}}
        members.update((name, node) for name, (node, _) in (changes or {}).items())
        return {name: node for name, node in members.items() if node.version}

    def _list(self, folder: str) -> Mapping[str, Node]:
        if self._listed is None:
            self._listed = {}
        listing = self._listed[folder] = self._through(folder)
        return self._with_changes(folder, listing.members)

    def _names(self, folder: str) -> Sequence[str]:
        return tuple(self._with_changes(folder, self._through(folder).members))

    def _stamp(self, folder: str) -> int:
        listing = (self._listed or {}).get(folder)
        stamp = self._parent._stamp(folder) if listing is None else listing.stamp
        return self._stamped(folder, stamp)

    def _stamped(self, folder: str, below: int) -> int:
        """Combine the parent's stamp with this fork's own, so that the result changes whenever either changes."""
        return below << 64 | (self._stamps or {}).get(folder, 0)

    def _usage(self) -> tuple[int, int]:
        files, size = self._parent._usage()
        return files + self._files, size + self._bytes

    def _put(self, folder: str, name: str, node: Node, old: Node, base: Node | None = None) -> None:
        change = (node, old if base is None else base)
        over = self._over
        if over is None:
            over = self._over = {}
        if folder not in over:
            over[folder] = {name: change}
            self._keep(folder)
        else:
            changes = over[folder]
            changes[name] = (node, changes[name][1]) if name in changes else change
        data, old_data = node.data, old.data
        if data is None:
            self._plain = False
        self._bytes += (len(data) if data else 0) - (len(old_data) if old_data else 0)
        if not (node.version and old.version):
            self._files += 1 if node.version else -1 if old.version else 0
            if self._stamps is not None:
                self._stamps[folder] = self._shared.tick()

    def _adopt(self, child: Overlay) -> None:
        """Record the reads that a nested fork made through this one as reads of this fork."""
        over, torn = self._over or {}, set(child._torn or ())
        for folder, names in (child._seen or {}).items():
            for name, node in names.items():
                if name in over.get(folder, _NOTHING):
                    continue
                self._seen = seen = self._seen if self._seen is not None else {}
                if seen.setdefault(folder, {}).setdefault(name, node).version != node.version:
                    torn.add(shown(join(folder, name), node))
                if node.version:
                    self._keep(folder)
        for folder, (_, _, below) in (child._listed or {}).items():
            if below is not None:
                self._listed = listed = self._listed if self._listed is not None else {}
                if listed.setdefault(folder, below).stamp != below.stamp:
                    torn.add(f"{folder or '.'}/")
        if torn:
            self._torn = torn | (self._torn or set())


def shown(path: str, node: Node) -> str:
    """Format a path for display. A folder's path ends in `/`."""
    return f"{path}/" if node.is_folder else path
