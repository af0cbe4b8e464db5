"""`FileTree`: what a fork read and changed, over the files that it was forked from.

A tree is pure: it knows nodes, links, reads and changes, but no lock, no disk and no life cycle. Reads are remembered, so a
path or folder that a fork has read stays the same for the fork, unless the fork changes it. The cost of a fork does not depend
on the number of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from handrail.errors import Conflict, FileError
from handrail.resources.paths import ancestors, join, split


class Content(Protocol):
    """The content of a file, whose bytes are loaded when they are needed."""

    def __len__(self) -> int: ...
    def load(self) -> bytes:
        """Return the bytes. Raises `Conflict` if the file has changed since it was looked up, and `FileError` if it can't be read."""
        ...


class Link:
    """A symbolic link, with its target as written."""

    __slots__ = ("target",)

    def __init__(self, target: str) -> None:
        self.target = target

    def __len__(self) -> int:
        return len(os.fsencode(self.target))

    def load(self) -> bytes:
        raise FileError(self.target, "this is a symbolic link, which has no content. Read its target instead")


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


class Unseen(Node, frozen=True, gc=False):
    """A placeholder for a name that was listed but not looked up. Its version says only of which kind it is."""


def loaded(data: bytes | Content) -> bytes:
    """Return the bytes of a file, wherever they are stored."""
    return data if isinstance(data, bytes) else data.load()


def is_file(node: Node) -> bool:
    return bool(node.version) and not node.is_folder


def is_link(node: Node) -> bool:
    return isinstance(node.data, Link)


def special_kind(node: Node) -> str:
    """Return whether a node is a `pipe`, a `socket` or a `device`; "" for any other."""
    return getattr(node.data, "kind", "")


def shown(path: str, node: Node) -> str:
    """Format a path for display. A folder's path ends in `/`."""
    return f"{path}/" if node.is_folder else path


ABSENT = Node(0, None, None)
TOP = Node(1, None, None)

Over = Mapping[str, Mapping[str, tuple[Node, Node]]]
"""Changes by folder and name. For each path: its current node, and the node that its first change is based on."""

Each = Callable[[Any], Iterable[Any]]
"""A function that goes through entries, and may let others work between two of them."""

_NOTHING: Mapping[str, Node] = {}


class Listing(NamedTuple):
    """A folder's members in a layer, a stamp that changes with their names, and the listing of the layer below, if any."""

    members: dict[str, Node]
    stamp: int
    below: Listing | None


class Base(Protocol):
    """What a tree lies over: a store, or the tree of an outer fork."""

    __slots__ = ()

    claimed: dict[object, Over] | None
    """The changes of each prepared fork, until it is applied or dropped. None if nothing was forked yet."""

    def look(self, folder: str, name: str) -> Node:
        """Return the node at a path without recording a read."""
        ...

    def has_folder(self, folder: str) -> bool:
        """Return whether the folder exists, without recording a read. The root always exists."""
        ...

    def names(self, folder: str) -> Sequence[str]:
        """Return the names in a folder without recording a read."""
        ...

    def view(self, folder: str) -> Listing:
        """Return the listing of a folder in the form that a fork records."""
        ...

    def stamp(self, folder: str) -> int:
        """Return a stamp that changes whenever the names in a folder change."""
        ...

    def usage(self) -> tuple[int, int]:
        """Return the number of files and folders, and the total bytes, that count towards the limits."""
        ...


class FileTree:
    """The nodes that a fork sees, with a record of what it read and changed. Its users hold the store's lock."""

    __slots__ = (
        "base",
        "claimed",
        "files",
        "is_plain",
        "kept",
        "listed",
        "over",
        "seen",
        "size",
        "stamps",
        "tick",
        "torn",
    )

    def __init__(self, base: Base, tick: Callable[[], int]) -> None:
        self.base = base
        self.tick = tick
        # The changes made in this fork, the nodes read, and the listings of folders whose names were read.
        self.over: dict[str, dict[str, tuple[Node, Node]]] | None = None
        self.seen: dict[str, dict[str, Node]] | None = None
        self.listed: dict[str, Listing] | None = None
        # The names of the folders that `_kept_in` returns, by parent folder. Computed on first use.
        self.kept: dict[str, set[str]] | None = None
        # Used once this fork has been forked: the stamps of its folders, the changes of its prepared forks, and the paths that
        # this fork and one of its forks read at different versions.
        self.stamps: dict[str, int] | None = None
        self.claimed: dict[object, Over] | None = None
        self.torn: set[str] | None = None
        self.is_plain = True  # whether only files were written, with no deletions and no new folders
        self.files = 0
        self.size = 0

    # --- looking ------------------------------------------------------------------------------------

    def own(self, folder: str, name: str) -> Node | None:
        """Return the node at a path according to this fork's changes, reads and listings, or None if they don't say what it is."""
        if self.over is not None:
            changes = self.over.get(folder)
            if changes is not None:
                change = changes.get(name)
                if change is not None:
                    return change[0]
        if self.seen is not None:
            names = self.seen.get(folder)
            if names is not None:
                node = names.get(name)
                if node is not None:
                    return node
        if self.listed is not None:
            listing = self.listed.get(folder)
            if listing is not None:
                node = self._unless_kept(folder, name, listing.members.get(name, ABSENT))
                return None if isinstance(node, Unseen) else node
        return None

    def look(self, folder: str, name: str) -> Node:
        if self.over is None and self.seen is None and self.listed is None:
            return self.base.look(folder, name)
        node = self.own(folder, name)
        if node is not None:
            return node
        if not self._reaches(folder):
            return ABSENT
        return self._unless_kept(folder, name, self.base.look(folder, name))

    def see(self, folder: str, name: str) -> Node:
        """Return the node at a path and record the read."""
        node = self.look(folder, name)
        if self.over is None or name not in self.over.get(folder, _NOTHING):
            if self.seen is None:
                self.seen = {}
            self.seen.setdefault(folder, {})[name] = node
            if node.version and self.kept is not None:
                self._keep(folder)
        return node

    def forget(self, folder: str, name: str) -> None:
        """Forget that a path was read."""
        (self.seen or {}).get(folder, {}).pop(name, None)

    def has_folder(self, folder: str) -> bool:
        if self.over is None and self.seen is None and self.listed is None:
            return self.base.has_folder(folder)
        return not folder or self.look(*split(folder)).is_folder

    def members(self, folder: str) -> Mapping[str, Node]:
        """Return the members of a folder and record the read. Callers must not change or keep the mapping."""
        if self.listed is None:
            self.listed = {}
        listing = self.listed[folder] = self._through(folder)
        return self._with_changes(folder, listing.members)

    def names(self, folder: str) -> Sequence[str]:
        return tuple(self._with_changes(folder, self._through(folder).members))

    def names_near(self, folder: str) -> Sequence[str]:
        """Return the existing names that can be suggested for a misspelled one."""
        return self.names(folder)

    def view(self, folder: str) -> Listing:
        below = self._through(folder)
        members = dict(self._with_changes(folder, below.members))
        return Listing(members, self._stamped(folder, below.stamp), below)

    def stamp(self, folder: str) -> int:
        listing = (self.listed or {}).get(folder)
        stamp = self.base.stamp(folder) if listing is None else listing.stamp
        return self._stamped(folder, stamp)

    def usage(self) -> tuple[int, int]:
        files, size = self.base.usage()
        return files + self.files, size + self.size

    def _reaches(self, folder: str) -> bool:
        """Return whether the files in a folder of the base are visible here.

        The nearest path that this fork has recorded, from the folder upwards, decides. The files are hidden if that path is
        missing or a file.
        """
        node = None
        while folder and node is None:
            folder, name = split(folder)
            node = self.own(folder, name)
        return node is None or node.is_folder

    def _unless_kept(self, folder: str, name: str, node: Node) -> Node:
        return TOP if not node.is_folder and name in self._kept_in(folder) else node

    def _kept_in(self, folder: str) -> Iterable[str]:
        """Return the names of the subfolders in which, at any depth, this fork changed something or read something that existed.

        They stay visible in this fork even if others delete them.
        """
        if self.kept is None:
            self.kept = {}
            for path in self.over or ():
                self._keep(path)
            for path, names in (self.seen or {}).items():
                if any(node.version for node in names.values()):
                    self._keep(path)
        return self.kept.get(folder, ())

    def _keep(self, path: str) -> None:
        kept = self.kept
        while path and kept is not None:
            path, name = split(path)
            names = kept.setdefault(path, set())
            if name in names:
                return
            names.add(name)

    def _through(self, folder: str) -> Listing:
        """Return a folder's listing as this fork sees it through its base, without the fork's own changes."""
        if self.listed is not None and folder in self.listed:
            return self.listed[folder]
        listing = self.base.view(folder)
        if not self._reaches(folder):
            listing.members.clear()
        for name, node in (self.seen or {}).get(folder, _NOTHING).items():
            if node.version:
                listing.members[name] = node
            else:
                listing.members.pop(name, None)
        return listing

    def _with_changes(self, folder: str, members: dict[str, Node]) -> dict[str, Node]:
        changes = (self.over or {}).get(folder)
        kept = self._kept_in(folder)
        if not changes and not kept:
            return members
        members = {**members, **{name: TOP for name in kept if not members.get(name, ABSENT).is_folder}}
        members.update((name, node) for name, (node, _) in (changes or {}).items())
        return {name: node for name, node in members.items() if node.version}

    def _stamped(self, folder: str, below: int) -> int:
        """Combine the base's stamp with this fork's own, so that the result changes whenever either changes."""
        return below << 64 | (self.stamps or {}).get(folder, 0)

    # --- changing -----------------------------------------------------------------------------------

    def put(self, folder: str, name: str, node: Node, old: Node, base: Node | None = None) -> None:
        """Replace the node `old` at a path with `node`. The folder must exist, and a folder to be removed must be empty.

        `base` is the node on which the change is based, if that is not `old`.
        """
        change = (node, old if base is None else base)
        over = self.over
        if over is None:
            over = self.over = {}
        if folder not in over:
            over[folder] = {name: change}
            self._keep(folder)
        else:
            changes = over[folder]
            changes[name] = (node, changes[name][1]) if name in changes else change
        data, old_data = node.data, old.data
        if data is None:
            self.is_plain = False
        self.size += (len(data) if data else 0) - (len(old_data) if old_data else 0)
        if not (node.version and old.version):
            self.files += 1 if node.version else -1 if old.version else 0
            if self.stamps is not None:
                self.stamps[folder] = self.tick()

    def branch(self) -> None:
        """Prepare to be forked: from here on, the tree stamps its folders and holds the changes of prepared forks."""
        if self.claimed is None:
            self.stamps = {}
            self.claimed = {}

    def adopt(self, child: FileTree) -> None:
        """Record the reads that a nested fork made through this one as reads of this fork."""
        over, torn = self.over or {}, set(child.torn or ())
        for folder, name, node in child.reads():
            if name in over.get(folder, _NOTHING):
                continue
            self.seen = seen = self.seen if self.seen is not None else {}
            if seen.setdefault(folder, {}).setdefault(name, node).version != node.version:
                torn.add(shown(join(folder, name), node))
            if node.version:
                self._keep(folder)
        for folder, (_, _, below) in (child.listed or {}).items():
            if below is not None:
                self.listed = listed = self.listed if self.listed is not None else {}
                if listed.setdefault(folder, below).stamp != below.stamp:
                    torn.add(f"{folder or '.'}/")
        if torn:
            self.torn = torn | (self.torn or set())

    # --- the record ---------------------------------------------------------------------------------

    def reads(self) -> list[tuple[str, str, Node]]:
        """Return the folder, the name and the node of each path read."""
        return [
            (folder, name, node)
            for folder, names in (self.seen or {}).items()
            for name, node in names.items()
        ]

    def changes(self) -> Iterator[tuple[str, Node, Node]]:
        """Yield the path, the new node and the old node of each change that a commit makes."""
        for folder, name, node, base in writes(self.over or {}):
            if node.version or base.version:
                yield join(folder, name), node, base

    def conflicts(self, over: Over, each: Each) -> list[str]:
        """Return the paths whose changes conflict with what the base holds now. `over` are the tree's changes."""
        under = self.base
        against: list[str] = []
        for folder, name, node, base in each(writes(over)):
            now = under.look(folder, name)
            if now.version != base.version:
                if not (now.is_folder and node.is_folder):
                    against.append(join(folder, name))
            elif now.version:
                if (
                    now.data is None and not node.is_folder
                ):  # others may have added to a folder that is removed
                    path = join(folder, name)
                    gone = over.get(path, {})
                    against.extend(join(path, other) for other in under.names(path) if other not in gone)
            elif not under.has_folder(folder):  # others may have put a file where a folder is needed
                for path in (*ancestors(folder), folder):
                    above, last = split(path)
                    if under.look(above, last).data is not None and last not in over.get(above, {}):
                        against.append(path)
        return against


def writes(over: Over) -> list[tuple[str, str, Node, Node]]:
    """Return the folder, the name, the new node and the old node of each change."""
    return [
        (folder, name, node, base)
        for folder, changes in over.items()
        for name, (node, base) in changes.items()
    ]


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
