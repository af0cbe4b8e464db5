"""`Workspace`: the name of a folder that Handrail owns. A run opens it on whichever host executes the run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from handrail.concurrency.cancellation import finish
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError, JournalError
from handrail.journal.protocol import Journal, Workspaces
from handrail.journal.records import WORKSPACE, WorkspaceFile, WorkspaceRow, workspace_name
from handrail.resources.directory.filesystem import DIRECTORY_LIMITS
from handrail.resources.layer import FileLimits
from handrail.resources.workspace.cache import WorkspaceCache
from handrail.resources.workspace.filesystem import WorkspaceFilesystem
from handrail.text.spelling import checked_arguments

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
            place = (self.cache or _default_cache()) / journal.id / self.name
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


def _default_cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return home / "handrail" / "workspaces"
