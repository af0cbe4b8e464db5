"""`LayerStack`: a fork's changes as overlay layers, which are mounted for its commands.

Handrail writes only to the topmost layer, and only while no mount uses it. Once another fork uses a layer, or
another layer is above it, it never changes again. So a nested fork uses its parent's layers unchanged, and adds its
own layers to them when it commits.

A layer is a folder in Linux overlay format (`handrail.resources.mount`). If the device that marks a deletion can't be
created, the mark is an empty file with `user.overlay.whiteout` in a folder with `user.overlay.opaque=x`. Linux 6.8
and later accept such marker files, but only in lower layers, so a layer with one always becomes a lower layer.
Overlays are mounted with `userxattr`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import msgspec

from handrail.concurrency.claims import SLICE
from handrail.errors import FileError
from handrail.resources.directory.area import Area
from handrail.resources.directory.content import Held, OnDisk, Special, facts_of, version_of
from handrail.resources.directory.disk import Disk, Jail, open_beneath
from handrail.resources.facts import SET_ID, Facts, facts_at, write_facts
from handrail.resources.mount import OPAQUE, attribute, is_opaque, is_whiteout, strip_marks
from handrail.resources.paths import MAX_PATH, is_reserved, join, on_disk, reach, spelled, split
from handrail.resources.tree import Link, Node, Over

_WHITEOUT, _ORIGIN = "user.overlay.whiteout", "user.overlay.origin"
MOST = 16
"""Maximum layers of one fork. If there are more, all are merged, because the kernel limits the layers of a mount."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One path in an upper layer."""

    path: str
    kind: str
    """`file`, `folder`, `link`, `gone` or `other`."""
    status: os.stat_result | None = None
    opaque: bool = False
    """For a folder, whether it hides the layers below."""
    copied: bool = False
    """Whether the path was copied up from a lower layer; False for a folder."""
    facts: Facts | None = None
    """For a folder, its mode, owner, group and attributes; otherwise None."""


class Upper:
    """The topmost layer of a fork. It can be written until another layer is put above it."""

    __slots__ = ("_disk", "_written", "folder", "is_marked")

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self.folder = folder
        self.is_marked = False
        """Whether deletions use marker files, which an overlay accepts only in lower layers."""
        self._written: dict[str, _Mark] = {}
        """Each path's state when the fork wrote it or `changed` yielded it. If it differs now, a command has changed it."""

    def put(
        self,
        path: str,
        node: Node,
        base: Node,
        fill: Callable[[OnDisk, Path], None],
        facts_below: Callable[[str], Facts | None],
    ) -> None:
        """Write a node to a path. A deletion is written as a mark, if the layers below may have the path.

        `fill` copies or links a file that is on disk. `facts_below` returns the facts of a folder in the layers
        below, or None if they are not known.
        """
        self._make_way(path, facts_below)
        with self._reach(path) as at:
            self._put(at, path, node, base, fill)
            if os.path.lexists(at):
                self._written[path] = _mark(_entry(path, at))

    @contextlib.contextmanager
    def _reach(self, path: str) -> Generator[Path]:
        with reach(self.folder / on_disk(path)) as at:
            yield Path(at)

    def _put(self, at: Path, path: str, node: Node, base: Node, fill: Callable[[OnDisk, Path], None]) -> None:
        data = node.data
        if not (node.is_folder and base.is_folder and at.is_dir()):
            self._disk.forget(at)
        if not node.version:
            if not self._under_opaque(path):
                self._white_out(at)
        elif data is None:
            if not at.is_dir():
                os.mkdir(at, 0o777)
            if (facts := facts_of(node)) is not None:
                write_facts(at, facts)
            if not base.is_folder:  # otherwise, its content in the lower layers must stay visible
                os.setxattr(at, OPAQUE, b"y")
        elif isinstance(data, Link):
            os.symlink(data.target, at)
        elif isinstance(data, OnDisk):
            fill(data, at)
        elif isinstance(data, Held):
            self._disk.write(at, data.data, data.facts)

    def _make_way(self, path: str, facts_below: Callable[[str], Facts | None]) -> None:
        folder = split(path)[0]
        missing: list[str] = []
        while folder and not self._is_folder(folder):
            missing.append(folder)
            folder = split(folder)[0]
        for folder in reversed(missing):
            with self._reach(folder) as at:
                self._disk.forget(at)  # a whiteout may be there, but the path is a folder again
                os.mkdir(at, 0o777)
                facts = facts_below(folder)
                if facts is not None:
                    write_facts(at, facts)
                self._written[folder] = _mark(_entry(folder, at))

    def _is_folder(self, path: str) -> bool:
        try:
            with self._reach(path) as at:
                return at.is_dir()
        except (FileNotFoundError, NotADirectoryError):  # a folder above a long path is missing
            return False

    def _under_opaque(self, path: str) -> bool:
        folder = split(path)[0]
        while folder:
            with self._reach(folder) as at:
                if is_opaque(at):
                    return True
            folder = split(folder)[0]
        return False

    def _white_out(self, at: Path) -> None:
        try:
            os.mknod(at, stat.S_IFCHR, os.makedev(0, 0))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOTSUP):
                raise
            self._disk.write(at, b"")
            os.setxattr(at, _WHITEOUT, b"y")
            for folder in {at.parent, self.folder}:
                os.setxattr(folder, OPAQUE, b"x")
            self.is_marked = True

    def changed(self) -> Iterator[list[Entry]]:
        """Yield an entry for each path that commands have changed since `changed` last ran, in lists. A folder comes before its content.

        Raises `FileError` if a path is too long, or if a folder can't be read.
        """
        gone = set(self._written)
        pending = [""]
        looked_at, found = 0, list[Entry]()
        while pending:
            folder = pending.pop()
            if looked_at > SLICE:
                yield found
                looked_at, found = 0, []
            for entry in self._entries(folder):
                looked_at += 1
                gone.discard(entry.path)
                if entry.kind == "folder":
                    pending.append(entry.path)
                if self._written.get(entry.path) != _mark(entry):
                    self._written[entry.path] = _mark(entry)
                    found.append(entry)
        for path in sorted(gone):  # these paths were removed and have no whiteouts of their own
            del self._written[path]
            found.append(Entry(path, "gone"))
        yield found

    def _entries(self, folder: str) -> list[Entry]:
        """Return the entries of a folder, sorted. Reserved names are left out, so what a command writes there is discarded.

        Raises `FileError` if the path is too long, or if the folder can't be read.
        """
        if len(folder) > MAX_PATH:
            problem = f"a command nested its folders too deeply. Keep paths below {MAX_PATH} bytes"
            raise FileError(f"{folder[:_SHOWN]}…", problem)
        try:
            with self._reach(folder) as here:
                names = sorted(name for name in os.listdir(here) if not is_reserved(name))
                found: list[Entry] = []
                for name in names:
                    path, at = join(folder, spelled(name)), here / name
                    found.append(_safe(_entry(path, at), at))
                return found
        except PermissionError:
            problem = "a command removed the read permission of this folder. Keep its mode"
            raise FileError(folder, problem) from None


_SHOWN = 40
_Mark = tuple[int, bool, Facts | None]


def _safe(entry: Entry, at: Path) -> Entry:
    """Remove the set-user-ID and set-group-ID bits of an entry's file, and return the new entry.

    So a command can't leave a privileged program behind. Other entries are returned unchanged.
    """
    if entry.kind != "file" or entry.status is None or not entry.status.st_mode & SET_ID:
        return entry
    os.chmod(at, stat.S_IMODE(entry.status.st_mode) & ~SET_ID)
    return _entry(entry.path, at)


def _mark(entry: Entry) -> _Mark:
    return (version_of(entry.status) if entry.status else 0), entry.opaque, entry.facts


def _entry(path: str, at: Path) -> Entry:
    status = os.lstat(at)
    mode = status.st_mode
    if is_whiteout(status):
        return Entry(path, "gone", status)
    if stat.S_ISDIR(mode):
        return Entry(path, "folder", status, opaque=is_opaque(at), facts=facts_at(at, status))
    copied = attribute(at, _ORIGIN) is not None
    if stat.S_ISREG(mode):
        gone = status.st_size == 0 and attribute(at, _WHITEOUT) is not None
        return Entry(path, "gone" if gone else "file", status, copied=copied)
    return Entry(path, "link" if stat.S_ISLNK(mode) else "other", status, copied=copied)


class LayerStack:
    """The layers of one fork, oldest first, and the writable layer on top."""

    __slots__ = ("_area", "_flushed", "_folders", "_frozen", "_jail", "top")

    def __init__(self, area: Area) -> None:
        self._area = area
        self._jail: Jail = area.jail
        self._frozen: list[Path] = []
        self._flushed: dict[str, int] = {}
        self._folders: list[Path] = []
        self.top: Upper | None = None

    def write_ahead(self, over: Over, turn: Callable[[], object]) -> None:
        """Write most pending changes to the topmost layer, in slices. Between two of them, `turn` lets others have the lock."""
        pending = self._pending(over)
        if len(pending) <= SLICE:
            return
        for done, (path, node, base) in enumerate(pending, 1):
            if not done % SLICE:
                turn()
            folder, name = split(path)
            is_pending = self._flushed.get(path) != node.version
            if (
                is_pending and over.get(folder, {}).get(name, (None,))[0] is node
            ):  # not written by another thread meanwhile
                self._write(over, self.top or self._new_top(), path, node, base, linked=False)

    def ready(self, over: Over) -> Upper:
        """Write all pending changes to the topmost layer, and return the layer that a command can write to."""
        top = self.top or self._new_top()
        self._flush(over, top, linked=False)
        if top.is_marked:
            self._frozen.append(top.folder)
            top = self._new_top()
        return top

    def freeze(self, over: Over) -> tuple[Path, ...]:
        """Return all changes so far as frozen layers, topmost first."""
        if self.top is not None or self._pending(over):
            self._frozen.append(self.ready(over).folder)
            self.top = None
        if len(self._frozen) > MOST:
            self._flatten(over)
        return tuple(reversed(self._frozen))

    def adopt(self, inner: LayerStack, over: Over) -> None:
        """Take over the layers of a fork that was committed into this one."""
        if self.top is not None:
            self._frozen.append(self.top.folder)
            self.top = None
        self._frozen += inner._frozen
        if inner.top is not None:
            self._frozen.append(inner.top.folder)
        self._flushed.update(inner._flushed)
        self._folders += inner._folders
        inner._folders = []
        if len(self._frozen) > MOST:
            self._flatten(over)

    @property
    def below(self) -> tuple[Path, ...]:
        """The frozen layers, topmost first."""
        return tuple(reversed(self._frozen))

    def work(self) -> Path:
        """Create a work folder for the overlay."""
        return self._own("work")

    def took(self, path: str, node: Node) -> None:
        """Record that the topmost layer already holds this node."""
        self._flushed[path] = node.version

    def forget(self) -> None:
        """Remove all layers and work folders of this stack from disk."""
        for folder in self._folders:
            self._area.forget(folder)
        self._folders.clear()

    def _own(self, kind: str) -> Path:
        folder = self._area.new_folder(kind)
        self._folders.append(folder)
        return folder

    def _new_top(self) -> Upper:
        folder = self._own("upper")
        write_facts(folder, self._jail.facts(".") or Facts(0o755))  # a command sees this folder as its root
        self.top = Upper(self._area.disk, folder)
        return self.top

    def _pending(self, over: Over) -> list[tuple[str, Node, Node]]:
        found = (
            (join(folder, name), node, base)
            for folder, changes in over.items()
            for name, (node, base) in changes.items()
            if self._flushed.get(join(folder, name)) != node.version
        )
        return sorted(found, key=lambda change: change[0])

    def _flush(self, over: Over, top: Upper, *, linked: bool) -> None:
        for path, node, base in self._pending(over):
            self._write(over, top, path, node, base, linked=linked)

    def _write(self, over: Over, top: Upper, path: str, node: Node, base: Node, *, linked: bool) -> None:
        self._flushed[path] = node.version
        if _stands(over, path):
            top.put(path, node, base, self._link if linked else self._copy, self._jail.facts)

    def _flatten(self, over: Over) -> None:
        """Merge all layers into one. The merged layer is never written, so it may share files with the old ones."""
        self._frozen, self._flushed, self.top = [], {}, None
        flat = self._new_top()
        self._flush(over, flat, linked=True)
        self._frozen.append(flat.folder)
        self.top = None

    def _copy(self, content: OnDisk, path: Path) -> None:
        copy_out(self._jail, self._area, content, path)

    def _link(self, content: OnDisk, path: Path) -> None:
        if content.staged is not None and not isinstance(content, Special):
            with reach(content.staged) as staged:
                os.link(staged, path, follow_symlinks=False)
        else:
            self._copy(content, path)


def copy_out(jail: Jail, area: Area, content: OnDisk, path: Path) -> None:
    """Copy a file to a path, from the folder or from the layer to which a command wrote it.

    For a pipe or a socket, a new one is created. Raises `FileError` for a device.
    """
    if isinstance(content, Special):
        if content.kind == "device":
            raise FileError(content.path, "this is a device, which can't be copied. Leave it where it is")
        area.disk.special(path, content.found)
        return
    if content.staged is None:
        source = open_beneath(jail.fd, content.path, os.O_RDONLY | os.O_NONBLOCK)
    else:
        with reach(content.staged) as staged:
            source = os.open(staged, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        area.disk.copy(source, path, content.found)
    finally:
        os.close(source)
    strip_marks(path)


def _stands(over: Over, path: str) -> bool:
    """Return whether every folder above a path still exists in this fork.

    Paths in a removed folder need no whiteouts.
    """
    folder = split(path)[0]
    while folder:
        above, name = split(folder)
        change = over.get(above, {}).get(name)
        if change is not None and not change[0].is_folder:
            return False
        folder = above
    return True
