"""`DirectoryFilesystem`: the files in a real folder. Each call's changes are a transaction."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Generator, Iterable
from pathlib import Path

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.claims import Claim, Claims, Places
from handrail.concurrency.operation import Operation
from handrail.concurrency.threads import is_on_loop
from handrail.errors import Conflict, UndoRefused
from handrail.journal.protocol import Journal
from handrail.journal.records import CallKey
from handrail.resources.directory.commit import Commit
from handrail.resources.directory.disk import DISK, Disk
from handrail.resources.directory.fork import DIRECT, DirectoryFork
from handrail.resources.directory.history import call_digest
from handrail.resources.directory.recovery import Recovered, recover
from handrail.resources.directory.store import DirectoryStore, Links
from handrail.resources.store import FileLimits, Files
from handrail.resources.tree import refuse_claimed
from handrail.text.spelling import checked_arguments

DIRECTORY_LIMITS = FileLimits(max_total_size=16 * 1024 * 1024 * 1024)
"""Default limits of a directory: how much one call may change, and the maximum size of a file that can be read."""
_PATIENCE = 60.0
"""Seconds that a direct write waits for the calls that are committing to its path."""


@checked_arguments
class DirectoryFilesystem(Files):
    """The files under a real folder. No path or link can lead out of it.

    Calls work on forks. Creating a fork copies nothing. A fork's writes stay in memory and in the staging folder until it
    commits. The commit checks that no person, process or other call has changed the same paths, and then renames the writes
    into place. No other file in the folder is changed. A write made directly through this object is a separate commit.
    Raises `DefinitionError` if the folder can't be opened or is found to ignore case, if `staging` is the folder itself,
    contains it, or is deep inside it, or if `startup_files` is a string.

    - `staging`: the folder for pending changes and displaced files, on the same disk. The default is
      `.<name>.handrail` beside the root, or `.staging.handrail` in the root if it is a mount point or nothing can be
      created beside it. A folder directly in the root works too and is then hidden. While the staging folder is in the
      root, no overlay can be mounted for a command.
    - `limits`: how much one call may change, and the maximum size of a file that can be read.
    - `startup_files`: patterns of the startup files that calls may change without a separate approval, such as
      `conftest.py` or `.github/workflows/*`.
    - `keep_calls`, `keep_bytes`: how many commits can be undone, and the maximum bytes to keep for them.
    """

    __slots__ = ("_links",)
    _store: DirectoryStore  # pyright: ignore[reportIncompatibleVariableOverride]  # set once, by `_open`

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        staging: str | os.PathLike[str] | None = None,
        limits: FileLimits = DIRECTORY_LIMITS,
        keep_calls: int = 100,
        keep_bytes: int = 256 * 1024 * 1024,
        startup_files: Collection[str] = (),
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk = DISK,
    ) -> None:
        keep = (keep_calls, keep_bytes)
        self._open(DirectoryStore(root, limits, startup_files, keep, staging=staging, clock=clock, disk=disk))

    def _open(self, store: DirectoryStore) -> None:
        self._store = self._tree = store  # pyright: ignore[reportIncompatibleVariableOverride]  # set once
        self._links = Links(store, store)

    def _enter(self, change: str = "") -> None:
        if change and self._store.claimed:
            refuse_claimed(self._store.claimed, change)

    def resolved(self, path: str, /) -> str:
        """Return where a path leads: normalized, with every link resolved.

        Raises `PathRefused` if the path is invalid or hidden, has too many links, or leads out of the root.
        """
        with self._store.lock:
            return self._at(path).path

    @property
    def root(self) -> Path:
        """The absolute path of the real folder, with links resolved."""
        return self._store.jail.root

    @property
    def folder_id(self) -> str:
        """The id that the folder keeps when it is moved; "" until the first write or command creates the staging folder."""
        area = self._store.area
        return area.root_id if area.root_id or area.is_own() else ""

    @property
    def staging(self) -> Path:
        """The folder where pending changes are kept. The first write or command creates it."""
        return self._store.area.folder

    @property
    def allowed_startup_files(self) -> tuple[str, ...]:
        """The patterns of the startup files that calls may change without a separate approval."""
        return tuple(self._store.startup_files)

    def fork(self, owner: str, /, *, writable: bool = True) -> DirectoryFork:
        """Return a fork for the call `owner`. With `writable=False` it refuses every change."""
        return DirectoryFork(self, (), self._store, owner, writable)

    def undo(
        self, call_id: str, /, *, run_id: str = "", place: str = "", journal: str = ""
    ) -> tuple[str, ...]:
        """Restore what this call's commit displaced, and remove what it created. Returns the restored and removed paths, sorted.

        Call ids can repeat in other conversations, so pass the id of the call's run, and the id of its journal if the run
        was recorded. `handrail.runs.undo` does this, and also tells the model. Raises `UndoRefused` if no commit of the call
        is kept, or if someone has changed its paths since; the error then lists them. Raises `Conflict` if a
        prepared fork is about to change one of its paths, and `FileError` if the folder was moved or replaced, or if the
        disk reports an error.
        """
        store = self._store
        with store.direct:
            store.jail.check_in_place()
            commit = self._kept(CallKey(call_id, run_id, place, journal))
            with self._claiming(commit.manifest.places()):
                return store.area.undo(commit)

    def check_undo(self, calls: Iterable[CallKey], /) -> None:
        """Raise what `undo` would raise now for one of these calls, if they were undone one after another. Changes nothing.

        It may still be refused later, because of what others change in the meantime.
        """
        store = self._store
        restored: dict[str, str] = {}
        with store.direct:
            store.jail.check_in_place()
            for key in calls:
                store.area.check_undo(self._kept(key), restored)

    def _kept(self, key: CallKey) -> Commit:
        """Return the kept commit of a call. Raises `UndoRefused` if none is kept, and `Conflict` if one of its paths is about to change."""
        area, run_id = self._store.area, key.run_id
        commit = area.done(key)
        if commit is None:
            where = f" in run {run_id!r}" if run_id else " outside a run (name the run with run_id=)"
            why = area.history.why_not_kept(call_digest(key))
            raise UndoRefused(key.call_id, (), f"no commit of this call is kept{where}: {why}")
        for path in commit.manifest.paths:
            refuse_claimed(self._store.claimed or {}, path)
        return commit

    def forget(self, calls: Iterable[CallKey], /) -> None:
        """Delete what is kept for undoing these calls. Files in the folder stay as they are.

        Raises `FileError` if the folder was moved or replaced, or if the disk reports an error.
        """
        store = self._store
        with store.direct:
            store.jail.check_in_place()
            for key in calls:
                store.area.forget_kept(key)

    def recover(self, journal: Journal, /) -> Operation[Recovered]:
        """Finish commits that a journal recorded but a dead process did not apply. Call it before using the folder.

        What the journal recorded is applied, and what it did not record is discarded. The changes of a call that was given up
        are reverted. A file that someone else has changed is left as it is, and its path is returned in `left`. A commit that
        can't be applied, because its folder or staged files are missing, stays recorded as unapplied and is returned in
        `unapplied`.
        """
        store = self._store
        return Operation(lambda: recover(store.jail, store.area, store.direct, journal), "recover")

    def close(self) -> None:
        """Close the folder. Its forks can't be used afterwards."""
        with self._store.lock:
            self._store.area.close()
            self._store.jail.close()

    def __enter__(self) -> DirectoryFilesystem:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- writes, each a separate commit --------------------------------------------------------------

    @property
    def claims(self) -> Claims:
        """The calls of this process that are committing to the folder."""
        return self._store.claims

    @contextlib.contextmanager
    def _alone(self) -> Generator[DirectoryFork]:
        with self._store.direct:
            fork = self.fork(DIRECT)
            try:
                yield fork
                with self._claiming(fork.places()):
                    fork.prepare()
                    fork.apply()
            finally:
                fork.drop()

    @contextlib.contextmanager
    def _claiming(self, places: Places) -> Generator[None]:
        """Claim places for a change that no call makes. On an event loop, which must not wait, a clash raises `Conflict`."""
        claims, claim = self._store.claims, Claim(places)
        if not claims.try_enter(claim):
            seconds = 0.0 if is_on_loop() else _PATIENCE
            if not claims.enter_blocking(claim, seconds):
                raise Conflict([claims.blocked(places) or "."])
        try:
            yield
        finally:
            claims.leave(claim)

    def write(self, path: str, content: str | bytes, /) -> None:
        with self._alone() as fork:
            fork.write(path, content)

    def append(self, path: str, content: str | bytes, /) -> None:
        with self._alone() as fork:
            fork.append(path, content)

    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        with self._alone() as fork:
            return fork.edit(path, old, new, all=all)

    def mkdir(self, path: str, /) -> None:
        with self._alone() as fork:
            fork.mkdir(path)

    def delete(self, path: str, /, *, recursive: bool = False) -> None:
        with self._alone() as fork:
            fork.delete(path, recursive=recursive)

    def move(self, source: str, target: str, /) -> None:
        with self._alone() as fork:
            fork.move(source, target)
