"""`Workspace`: the name of a folder that Handrail owns. A run opens it on whichever host executes the run.

A run works on this host's copy like on a `DirectoryFilesystem`, except for two things. The journal records each
commit with the digests and bytes of its files, so the record is authoritative, whatever happens to the copy. And each file
or link that is looked up is compared with its recorded state. If another program has changed it, the lookup raises
`FileError`. Ignored paths are not compared, and for a folder only the kind is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from handrail.concurrency.cancellation import finish
from handrail.concurrency.claims import Stop
from handrail.concurrency.threads import run_in_thread
from handrail.errors import Conflict, DefinitionError, FileError, FileLimitReached, JournalError, UndoRefused
from handrail.journal.protocol import Journal, Workspaces
from handrail.journal.records import (
    WORKSPACE,
    CallKey,
    WorkspaceChange,
    WorkspaceDelta,
    WorkspaceFile,
    WorkspaceRow,
    workspace_name,
)
from handrail.resources.directory.commit import Commit
from handrail.resources.directory.content import Special
from handrail.resources.directory.filesystem import DIRECTORY_LIMITS, DirectoryFilesystem
from handrail.resources.directory.fork import DirectoryFork
from handrail.resources.directory.store import DirectoryStore
from handrail.resources.paths import join
from handrail.resources.store import FileLimits
from handrail.resources.tree import Node
from handrail.resources.workspace.cache import PERMISSIONS, WorkspaceCache, content_at, state_of
from handrail.text.spelling import checked_arguments

log = logging.getLogger("handrail.files")

LARGEST = 64 * 1024 * 1024
"""Maximum bytes of a file that a call writes to a workspace, unless its path is ignored."""


def check_size(path: str, size: int) -> None:
    """Raise `FileLimitReached` if a file of this size is too large for a workspace."""
    if size > LARGEST:
        problem = f"it has {size} bytes, and a workspace keeps files of at most {LARGEST} bytes"
        raise FileLimitReached(path, f"{problem}. Make it smaller, or give it an ignored name")


_IN_WORKSPACE = "its files are in a workspace. Use handrail.runs.undo, without a filesystem"


class WorkspaceStore(DirectoryStore):
    """This host's copy of a workspace.

    The journal records each commit with the digests and bytes of its files, so the record is authoritative, whatever happens to the
    copy. What is looked up is compared with it: if another program has changed it, the lookup raises `FileError`. Ignored paths
    are not compared, and of a folder only its kind.
    """

    __slots__ = ("_broken", "cache", "row")

    def __init__(
        self, row: WorkspaceRow, cache: WorkspaceCache, *, limits: FileLimits, startup_files: Collection[str]
    ) -> None:
        super().__init__(cache.root, limits, startup_files, (0, 0))
        self.row = row
        self.cache = cache
        self._broken = ""
        """Why the copy can't be used: it lacks a recorded change. "" if it can be used."""

    def made(self, delta: WorkspaceDelta) -> None:
        """Add a recorded commit to the copy's index. Call this once the commit is applied to the copy."""
        self.cache.note(self.row.id, delta.base + 1, delta.changes)

    def broke(self, why: str) -> None:
        """Refuse every further use of the copy. `why` becomes part of the error message."""
        self._broken = why

    def look(self, folder: str, name: str) -> Node:
        node = super().look(folder, name)
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
        found = self.jail.look(path)
        if not self.cache.is_current(path, None if found is None else found[0]):
            how = "created" if entry is None else "changed" if found is not None else "deleted"
            raise FileError(
                path,
                f"something other than Handrail has {how} it in this host's copy of the workspace "
                f"{self.row.name!r}. The next run in the workspace repairs the copy: use another path, or stop here",
            )
        return node


class WorkspaceFilesystem(DirectoryFilesystem):
    """The files of a workspace on this host, while a run has it. Only forks can change them."""

    __slots__ = ()
    _store: WorkspaceStore  # pyright: ignore[reportIncompatibleVariableOverride]  # set once

    def __init__(
        self, row: WorkspaceRow, cache: WorkspaceCache, *, limits: FileLimits, startup_files: Collection[str]
    ) -> None:
        self._open(WorkspaceStore(row, cache, limits=limits, startup_files=startup_files))

    @property
    def address(self) -> str:
        """The name by which the files are recorded and found again: `workspace:NAME`."""
        return f"{WORKSPACE}{self._store.row.name}"

    @property
    def folder_id(self) -> str:
        """The id of the workspace, the same on every host."""
        return self._store.row.id

    def fork(self, owner: str, /, *, writable: bool = True) -> WorkspaceFork:
        """Return a fork for the call `owner`. With `writable=False` it refuses every change."""
        return WorkspaceFork(self, (), self._store, owner, writable)

    def undo(
        self, call_id: str, /, *, run_id: str = "", place: str = "", journal: str = ""
    ) -> tuple[str, ...]:
        """Always raise `UndoRefused`. `handrail.runs.undo` undoes a call in a workspace instead, on any host."""
        raise UndoRefused(call_id, (), _IN_WORKSPACE)

    def check_undo(self, calls: Iterable[CallKey], /) -> None:
        """Raise what `undo` would raise."""
        for key in calls:
            raise UndoRefused(key.call_id, (), _IN_WORKSPACE)

    @contextlib.contextmanager
    def _alone(self) -> Generator[DirectoryFork]:
        raise FileError(
            ".", "only the calls of a run can change a workspace. Write through the call's filesystem"
        )
        yield  # pyright: ignore[reportUnreachable]  # makes this a generator


class WorkspaceFork(DirectoryFork):
    """One call's version of a workspace. The journal records its commit as a list of changed paths with their digests."""

    __slots__ = ("_delta", "_places")

    _store: WorkspaceStore  # pyright: ignore[reportIncompatibleVariableOverride]  # set once

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._delta: WorkspaceDelta | None = None
        self._places: dict[str, Path] = {}
        """Where the bytes with each digest are staged."""

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
        cache = self._store.cache
        if not status or cache.is_ignored(path):
            return ""
        entry = cache.entries.get(path)
        if entry is None or not (entry.state.kind == "folder" or entry.version == status):
            return status  # for example an older state, which no host has any more
        return f"{entry.state.kind} {entry.state.mode:o} {entry.state.digest}"

    def _changed_states(self) -> WorkspaceDelta | None:
        commit, store = self._commit, self._store
        if commit is None:
            return None
        entries, is_ignored = store.cache.entries, store.cache.is_ignored
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
        row = store.row
        return (
            WorkspaceDelta(name=row.name, id=row.id, base=store.cache.version, changes=changes)
            if changes
            else None
        )

    def _state_in(self, slot: Path, path: str) -> WorkspaceFile | None:
        state = state_of(slot, os.lstat(slot))
        if state is not None and state.digest and not self._store.cache.is_ignored(path):
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
        store, delta = self._store, self._delta
        if delta is not None:
            store.cache.expect(delta.changes)
        try:
            super().apply()
        except (Conflict, OSError) as error:
            log.warning("a recorded commit is written over this host's copy of a workspace: %s", error)
            try:
                if delta is not None:
                    store.cache.force(delta.changes, self.content)
            except OSError as failure:
                store.broke(f"a recorded change could not be written to this host's copy: {failure}")
            self.drop()
        if delta is not None:
            store.made(delta)

    def _put_away(self, commit: Commit) -> None:
        """Remove what a finished commit displaced. It is not needed for `undo`, because the journal has it."""
        self._store.area.discard(commit)

    def revert(self) -> None:
        """Refuse further use of the copy, if this fork has changes that the journal recorded. The record itself is not reverted."""
        if self._delta is not None:
            self._store.broke("a recorded change was not completed on this host")


IGNORED = ("__pycache__", "node_modules", ".venv")
"""Default for `ignore`: the names of files and folders that stay on the host where they were created."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FETCHED = 8 * 1024 * 1024
"""Maximum bytes that are fetched at a time, unless a single file is larger."""


@checked_arguments
class Workspace:
    """A folder that Handrail owns, and that moves with its run. Pass it to a run as its `filesystem`.

    Its files are recorded in the run's journal. A call's changes are part of the record of the call. Before the
    call is recorded, none of them is visible outside the call. Afterwards, all of them are visible, on whichever
    host the run continues. One run at a time has a workspace; a second one is refused with `WorkspaceBusy`. Each
    host keeps a copy. When a run opens the workspace there, only content that the copy lacks is fetched.
    Files, links, folders and permissions are recorded; owners, attributes, pipes and sockets are not.

    - `name`: 1 to 100 letters, digits, `.`, `_` and `-`, starting with a letter or digit. Runs with the same
      journal and name work on the same files.
    - `cache`: the folder for this host's copies. Default: `handrail/workspaces` below `$XDG_CACHE_HOME`, or below
      `~/.cache` unless `$XDG_CACHE_HOME` is an absolute path.
    - `ignore`: patterns of what is not recorded. A name, such as `node_modules` or `*.pyc`, is ignored at any depth. A
      pattern with a `/`, such as `build/out`, is compared with the whole path. What is in an ignored folder is ignored too.
    - `limits`, `startup_files`: as for `DirectoryFilesystem`.
    """

    __slots__ = ("cache", "ignore", "limits", "name", "startup_files")

    def __init__(
        self,
        name: str,
        *,
        cache: str | os.PathLike[str] | None = None,
        ignore: Collection[str] = IGNORED,
        limits: FileLimits = DIRECTORY_LIMITS,
        startup_files: Collection[str] = (),
    ) -> None:
        if not _NAME.fullmatch(name):
            raise DefinitionError(
                f"{name!r} can't be the name of a workspace. Use up to 100 letters, digits, '.', '_' and '-', and begin "
                "with a letter or digit."
            )
        for what, given in (("ignore", ignore), ("startup_files", startup_files)):
            if isinstance(given, str):
                raise DefinitionError(f"{what} is a string. Pass a list of names: [{given!r}].")
        self.name = name
        self.cache = None if cache is None else Path(cache)
        self.ignore = tuple(each.rstrip("/") for each in ignore)  # `build/` is the folder `build`
        self.limits = limits
        self.startup_files = tuple(startup_files)

    @classmethod
    def named(cls, address: str, *, startup_files: Collection[str] = ()) -> Workspace | None:
        """Return the workspace with the address `workspace:NAME`, or None for any other address.

        Raises `DefinitionError` if the name is invalid.
        """
        if not address.startswith(WORKSPACE):
            return None
        return cls(workspace_name(address), startup_files=startup_files)

    @property
    def address(self) -> str:
        """The workspace as it is named on the command line and in records: `workspace:NAME`."""
        return f"{WORKSPACE}{self.name}"

    @property
    def allowed_startup_files(self) -> tuple[str, ...]:
        """The patterns of the startup files that calls may change without a separate approval."""
        return self.startup_files

    def opened(self, journal: Journal, run_id: str, /) -> AbstractAsyncContextManager[WorkspaceFilesystem]:
        """Open the files for a run until the block ends. This host's copy is brought up to date first.

        Raises `WorkspaceBusy` while a different run has the workspace.
        """
        return self._opened(journal, run_id)

    @contextlib.asynccontextmanager
    async def _opened(self, journal: Journal, run_id: str) -> AsyncGenerator[WorkspaceFilesystem]:
        row = await journal.workspaces.acquire(self.name, run_id)
        try:
            place = (self.cache or default_cache()) / journal.id / self.name
            cache = await run_in_thread(lambda: WorkspaceCache.claim(place, self._is_ignored))
            try:
                await bring(cache, journal.workspaces, row)
                files = WorkspaceFilesystem(row, cache, limits=self.limits, startup_files=self.startup_files)
                with files:
                    yield files
            finally:
                cache.close()
        finally:
            with contextlib.suppress(
                JournalError
            ):  # another process can acquire the workspace once this lease has expired
                await finish(journal.workspaces.release(self.name, run_id))

    def _is_ignored(self, path: str) -> bool:
        return is_ignored(path, self.ignore)


async def bring(cache: WorkspaceCache, workspaces: Workspaces, row: WorkspaceRow) -> None:
    """Make this host's copy equal to the recorded version, except for ignored and reserved paths. Only content that the copy lacks is fetched."""
    await run_in_thread(lambda: cache.load(row.id))
    if cache.version > row.version:
        cache.version, cache.entries = 0, {}
    wanted = {path: entry.state for path, entry in cache.entries.items()} if cache.version else {}
    for path, state in (await workspaces.files(row.name, since=cache.version)).items():
        if state is None:
            wanted.pop(path, None)
        else:
            wanted[path] = state
    missing = await run_in_thread(lambda: cache.settle(wanted))
    while missing:
        some = _some(missing)
        found = await workspaces.fetch({state.digest for state in some.values()})
        await run_in_thread(lambda some=some, found=found: _write_all(cache, some, found))
        for path in some:
            del missing[path]
    await run_in_thread(lambda: _finish(cache, wanted, row))


def _write_all(cache: WorkspaceCache, some: Mapping[str, WorkspaceFile], found: Mapping[str, bytes]) -> None:
    for path, state in some.items():
        cache.write(path, state, found[state.digest])


def _finish(cache: WorkspaceCache, wanted: Mapping[str, WorkspaceFile], row: WorkspaceRow) -> None:
    cache.finish(wanted)
    cache.save(row.id, row.version)


def _some(missing: Mapping[str, WorkspaceFile]) -> dict[str, WorkspaceFile]:
    """Return the first of the missing files: at most `_FETCHED` bytes in total, or a single larger file."""
    some: dict[str, WorkspaceFile] = {}
    size = 0
    for path, state in missing.items():
        size += state.size
        if some and size > _FETCHED:
            break
        some[path] = state
    return some


@lru_cache(maxsize=65536)
def is_ignored(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path, or a folder that it is in, matches one of these patterns.

    A pattern with a `/` is compared with the path from the root, and any other pattern with the name alone.
    """
    parts = path.split("/")
    paths = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(
        any(fnmatchcase(each, pattern) for each in (paths if "/" in pattern else parts))
        for pattern in patterns
    )


def default_cache() -> Path:
    """Return the folder for this host's copies of workspaces."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return home / "handrail" / "workspaces"
