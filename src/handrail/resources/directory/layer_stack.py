"""`LayerStack`: a fork's changes as overlay layers that commands are mounted on.

Only the topmost layer is ever written, and only while nothing is mounted on it. Once another fork
uses it, or another layer lies above it, it never changes again. So a nested fork uses its parent's
layers unchanged, and its own become more of them when it commits.
"""

from __future__ import annotations

import os
from pathlib import Path

from handrail.resources.directory.area import Area
from handrail.resources.directory.content import OnDisk
from handrail.resources.directory.jail import Jail
from handrail.resources.directory.syscalls import open_beneath
from handrail.resources.directory.upper import Upper, strip_marks
from handrail.resources.layer import Node, Over
from handrail.resources.paths import join, split

MOST = 16
"""Maximum layers of one fork. They are merged beyond this, because a mount takes only so many."""


class LayerStack:
    """The layers of one fork, oldest first, and the writable one on top."""

    __slots__ = ("_area", "_flushed", "_folders", "_frozen", "_jail", "top")

    def __init__(self, area: Area) -> None:
        self._area = area
        self._jail: Jail = area.jail
        self._frozen: list[Path] = []
        self._flushed: dict[str, int] = {}
        self._folders: list[Path] = []
        self.top: Upper | None = None

    def ready(self, over: Over) -> Upper:
        """Return the topmost layer, after writing all pending changes to it."""
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
        """Take over the layers of a fork that has committed into this one."""
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
        """The layers under the topmost one, topmost first."""
        return tuple(reversed(self._frozen))

    def work(self) -> Path:
        """Create a work folder for the overlay."""
        return self._own("work")

    def took(self, path: str, node: Node) -> None:
        """Record that the topmost layer already has this node, which a command created."""
        self._flushed[path] = node.version

    def forget(self) -> None:
        """Remove all layers."""
        for folder in self._folders:
            self._area.disk.forget(folder)
        self._folders.clear()

    def _own(self, kind: str) -> Path:
        folder = self._area.new_folder(kind)
        self._folders.append(folder)
        return folder

    def _new_top(self) -> Upper:
        folder = self._own("upper")
        os.chmod(folder, mode_below(self._jail, "") or 0o755)  # it is the root that a command sees
        self.top = Upper(self._area.disk, folder)
        return self.top

    def _pending(self, over: Over) -> list[tuple[str, Node]]:
        return sorted(
            (join(folder, name), node)
            for folder, changes in over.items()
            for name, (node, _) in changes.items()
            if self._flushed.get(join(folder, name)) != node.version
        )

    def _flush(self, over: Over, top: Upper, *, linked: bool) -> None:
        for path, node in self._pending(over):
            self._flushed[path] = node.version
            if _stands(over, path):
                top.put(path, node, self._link if linked else self._copy, lambda p: mode_below(self._jail, p))

    def _flatten(self, over: Over) -> None:
        """Merge all layers into one. Nobody writes to it, so it may share files with them."""
        self._frozen, self._flushed, self.top = [], {}, None
        flat = self._new_top()
        self._flush(over, flat, linked=True)
        self._frozen.append(flat.folder)
        self.top = None

    def _copy(self, content: OnDisk, path: Path) -> None:
        copy_out(self._jail, self._area, content, path)

    def _link(self, content: OnDisk, path: Path) -> None:
        if content.staged is not None:
            os.link(content.staged, path, follow_symlinks=False)
        else:
            self._copy(content, path)


def copy_out(jail: Jail, area: Area, content: OnDisk, path: Path) -> None:
    """Copy a file from disk: from the folder, or from where a command of this call put it."""
    if content.staged is None:
        source = open_beneath(jail.fd, content.path, os.O_RDONLY | os.O_NONBLOCK)
    else:
        source = os.open(content.staged, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        area.disk.copy(source, path, content.found)
    finally:
        os.close(source)
    strip_marks(path)


def mode_below(jail: Jail, folder: str) -> int | None:
    """Return the mode of a folder on disk."""
    found = jail.look(folder or ".")
    return None if found is None else found[0].st_mode & 0o7777


def _stands(over: Over, path: str) -> bool:
    """Whether every folder above a path still exists here; below a removed one, nothing needs hiding."""
    folder = split(path)[0]
    while folder:
        above, name = split(folder)
        change = over.get(above, {}).get(name)
        if change is not None and not change[0].is_folder:
            return False
        folder = above
    return True
