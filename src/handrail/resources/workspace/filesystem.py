"""`WorkspaceFilesystem`: a workspace while a run has it. `WorkspaceFork`: one call's version of it.

They work on this host's copy like a `DirectoryFilesystem` and its forks, except for two things. The journal records each
commit with the digests and bytes of its files, so the record is authoritative, whatever happens to the copy. And each file
or link that is looked up is compared with its recorded state. If another program has changed it, the lookup raises
`FileError`. Ignored paths are not compared, and for a folder only the kind is.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from handrail.concurrency.claims import Stop
from handrail.errors import Conflict, FileError, FileLimitReached, UndoRefused
from handrail.journal.records import (
    WORKSPACE,
    CallKey,
    WorkspaceChange,
    WorkspaceDelta,
    WorkspaceFile,
    WorkspaceRow,
)
from handrail.resources.directory.commit import Commit
from handrail.resources.directory.content import Special
from handrail.resources.directory.directory_fork import DirectoryFork
from handrail.resources.directory.filesystem import DirectoryFilesystem
from handrail.resources.layer import FileLimits, Node
from handrail.resources.paths import join
from handrail.resources.workspace.cache import PERMISSIONS, WorkspaceCache, content_at, state_of

log = logging.getLogger("handrail.files")

LARGEST = 64 * 1024 * 1024
"""Maximum bytes of a file that a call writes to a workspace, unless its path is ignored."""


def check_size(path: str, size: int) -> None:
    """Raise `FileLimitReached` if a file of this size is too large for a workspace."""
    if size > LARGEST:
        problem = f"it has {size} bytes, and a workspace keeps files of at most {LARGEST} bytes"
        raise FileLimitReached(path, f"{problem}. Make it smaller, or give it an ignored name")


_IN_WORKSPACE = "its files are in a workspace. Use handrail.runs.undo, without a filesystem"


class WorkspaceFilesystem(DirectoryFilesystem):
    """The files of a workspace on this host, while a run has it. Only forks can change them."""

    __slots__ = ("_broken", "cache", "row")

    def __init__(
        self, row: WorkspaceRow, cache: WorkspaceCache, *, limits: FileLimits, startup_files: Collection[str]
    ) -> None:
        super().__init__(cache.root, limits=limits, startup_files=startup_files, keep_calls=0)
        self.row = row
        self.cache = cache
        self._broken = ""
        """Why the copy can't be used: it lacks a recorded change. "" if it can be used."""

    @property
    def address(self) -> str:
        """The name by which the files are recorded and found again: `workspace:NAME`."""
        return f"{WORKSPACE}{self.row.name}"

    @property
    def folder_id(self) -> str:
        """The id of the workspace, the same on every host."""
        return self.row.id

    def fork(self, owner: str, /, *, writable: bool = True) -> WorkspaceFork:
        """Return a fork for the call `owner`. With `writable=False` it refuses every change."""
        return WorkspaceFork(self, (), self._ground, owner, writable)

    def undo(
        self, call_id: str, /, *, run_id: str = "", place: str = "", journal: str = ""
    ) -> tuple[str, ...]:
        """Always raise `UndoRefused`. `handrail.runs.undo` undoes a call in a workspace instead, on any host."""
        raise UndoRefused(call_id, (), _IN_WORKSPACE)

    def check_undo(self, calls: Iterable[CallKey], /) -> None:
        """Raise what `undo` would raise."""
        for key in calls:
            raise UndoRefused(key.call_id, (), _IN_WORKSPACE)

    def made(self, delta: WorkspaceDelta) -> None:
        """Add a recorded commit to the copy's index. Call this once the commit is applied to the copy."""
        self.cache.note(self.row.id, delta.base + 1, delta.changes)

    def broke(self, why: str) -> None:
        """Refuse every further use of the copy. `why` becomes part of the error message."""
        self._broken = why

    @contextlib.contextmanager
    def _alone(self) -> Generator[DirectoryFork]:
        raise FileError(
            ".", "only the calls of a run can change a workspace. Write through the call's filesystem"
        )
        yield  # pyright: ignore[reportUnreachable]  # makes this a generator

    def _look(self, folder: str, name: str) -> Node:
        node = super()._look(folder, name)
        path = join(folder, name)
        if self._broken:
            raise FileError(path, f"{self._broken}. Resume the run, which repairs this host's copy")
        if not name or self.cache.is_ignored(path) or isinstance(node.data, Special):
            return node
        entry = self.cache.entries.get(path)
        if entry is None and not node.version:
            return node
        if entry is not None:
            is_folder = node.is_folder and entry.state.kind == "folder"
            if is_folder or f"{node.version:x}" == entry.version:
                return node
        found = self._ground.jail.look(path)
        if not self.cache.is_current(path, None if found is None else found[0]):
            how = "created" if entry is None else "changed" if found is not None else "deleted"
            raise FileError(
                path,
                f"something other than Handrail has {how} it in this host's copy of the workspace "
                f"{self.row.name!r}. The next run in the workspace repairs the copy: use another path, or stop here",
            )
        return node


class WorkspaceFork(DirectoryFork):
    """One call's version of a workspace. The journal records its commit as a list of changed paths with their digests."""

    __slots__ = ("_delta", "_places")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._delta: WorkspaceDelta | None = None
        self._places: dict[str, Path] = {}
        """Where the bytes with each digest are staged."""

    @property
    def _workspace(self) -> WorkspaceFilesystem:
        return cast(WorkspaceFilesystem, self._line[0]._parent if self._line else self._parent)

    def stage(self, key: CallKey, /, *, synced: bool = False) -> Mapping[str, Any] | None:
        """Write the changes to the staging folder, and compute their digests. Returns None, because nothing will need recovery.

        Raises `FileLimitReached` if a file is too large to be recorded. `synced` has no effect, because the copy is disposable.
        """
        if self._commit is None:
            super().stage(CallKey(key.call_id, key.run_id, key.place))
            self._delta = self._changed_states()
        return None

    def enter(self, stop: Stop, *, keep: bool) -> None:
        """Do nothing, because no other process uses this host's copy."""

    def others_committed(self) -> bool:
        """Return False, because no other process uses this host's copy."""
        return False

    def delta(self) -> WorkspaceDelta | None:
        """Return the staged changes that the journal must record, or None if there are none."""
        return self._delta

    def content(self, digest: str) -> bytes:
        """Return the staged bytes that have this digest."""
        return content_at(self._places[digest])

    def _lasting(self, path: str, node: Node) -> str:
        """Return the recorded state of the file or folder at a path, because its status on disk differs from host to host.

        Returns "" for a missing path, for a node that a fork created, and for an ignored path, which stays on its host. Returns
        the status on disk if the node is not in the recorded state.
        """
        status = super()._lasting(path, node)
        cache = self._workspace.cache
        if not status or cache.is_ignored(path):
            return ""
        entry = cache.entries.get(path)
        if entry is None or not (entry.state.kind == "folder" or entry.version == status):
            return status  # for example an older state, which no host has any more
        return f"{entry.state.kind} {entry.state.mode:o} {entry.state.digest}"

    def _changed_states(self) -> WorkspaceDelta | None:
        commit, files = self._commit, self._workspace
        if commit is None:
            return None
        entries, is_ignored = files.cache.entries, files.cache.is_ignored
        new: dict[str, WorkspaceFile | None] = {}
        for step in self.pace.each(commit.manifest.steps, "hashing files"):
            path, old = step.path, entries.get(step.path)
            if step.tree:
                new.update(dict.fromkeys((each for each in entries if each.startswith(f"{path}/")), None))
            if step.do == "take":
                new[path] = None
            elif step.do == "put":
                is_there = step.folder and old is not None and old.state.kind == "folder" and path not in new
                new[path] = old.state if is_there and old else self._state_in(commit.folder / step.slot, path)
            elif step.facts is not None:
                new[path] = WorkspaceFile("folder", step.facts.mode & PERMISSIONS)
        before = {path: entry.state for path in new if (entry := entries.get(path)) is not None}
        changes = [
            WorkspaceChange(path, before.get(path), state)
            for path, state in sorted(new.items())
            if before.get(path) != state and not is_ignored(path)
        ]
        row = files.row
        return (
            WorkspaceDelta(name=row.name, id=row.id, base=files.cache.version, changes=changes)
            if changes
            else None
        )

    def _state_in(self, slot: Path, path: str) -> WorkspaceFile | None:
        state = state_of(slot, os.lstat(slot))
        if state is not None and state.digest and not self._workspace.cache.is_ignored(path):
            check_size(path, state.size)
            self._places[state.digest] = slot
        return state

    def apply(self, *, synced: bool = False) -> None:
        """Commit the changes to the outer fork, or to this host's copy once the journal has recorded them.

        The record is final, so a path of the copy that somebody has changed meanwhile is overwritten. If
        overwriting fails, the copy refuses every further use. `synced` has no effect, because the copy is disposable.
        """
        if self._line:
            super().apply()
            return
        files, delta = self._workspace, self._delta
        if delta is not None:
            files.cache.expect(delta.changes)
        try:
            super().apply()
        except (Conflict, OSError) as error:
            log.warning("a recorded commit is written over this host's copy of a workspace: %s", error)
            try:
                if delta is not None:
                    files.cache.force(delta.changes, self.content)
            except OSError as failure:
                files.broke(f"a recorded change could not be written to this host's copy: {failure}")
            self.drop()
        if delta is not None:
            files.made(delta)

    def _put_away(self, commit: Commit) -> None:
        """Remove what a finished commit displaced. It is not needed for `undo`, because the journal has it."""
        self._ground.area.discard(commit)

    def revert(self) -> None:
        """Refuse further use of the copy, if this fork has changes that the journal recorded. The record itself is not reverted."""
        if self._delta is not None:
            self._workspace.broke("a recorded change was not completed on this host")
