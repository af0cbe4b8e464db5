"""`DirectoryFilesystem`: the files in a real folder. Each call's changes are a transaction."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.claims import Claim, Claims, Places
from handrail.concurrency.operation import Operation
from handrail.concurrency.threads import is_on_loop
from handrail.errors import Conflict, DefinitionError, UndoRefused
from handrail.journal.protocol import Journal
from handrail.journal.records import CallKey
from handrail.resources.directory.area import Area
from handrail.resources.directory.commit import Commit
from handrail.resources.directory.content import UNSEEN, node_of
from handrail.resources.directory.disk import DISK, Disk, Jail
from handrail.resources.directory.fork import DIRECT, DirectoryFork
from handrail.resources.directory.history import call_digest
from handrail.resources.directory.links import Ground, Linked
from handrail.resources.directory.recovery import Recovered, recover
from handrail.resources.directory.roots import case_insensitive, default_staging
from handrail.resources.paths import join, split
from handrail.resources.store import ABSENT, FileLimits, Listing, Node, refuse_claimed
from handrail.text.spelling import checked_arguments

DIRECTORY_LIMITS = FileLimits(max_total_size=16 * 1024 * 1024 * 1024)
"""Default limits of a directory: how much one call may change, and the maximum size of a file that can be read."""
_NAMES_NEAR = 2000
"""Maximum number of names to search for a suggestion."""
_PATIENCE = 60.0
"""Seconds that a direct write waits for the calls that are committing to its path."""
_GET_FLAGS, _CASEFOLD = 0x80086601, 0x40000000
_PROBED = 20


@checked_arguments
class DirectoryFilesystem(Linked):
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

    __slots__ = ()

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
        jail = _open(root)
        given = staging is not None
        aside = Path(staging).absolute() if given else default_staging(jail.root, jail.fd)
        area = Area(jail, disk, aside, clock, (keep_calls, keep_bytes), fixed=given)
        self._shared = Ground(
            limits,
            clock,
            count(16).__next__,
            jail=jail,
            area=area,
            hidden=_inside(jail.root, aside),
            startup_files=_patterns(startup_files),
        )
        self._claimed = {}

    @property
    def root(self) -> Path:
        """The absolute path of the real folder, with links resolved."""
        return self._ground.jail.root

    @property
    def folder_id(self) -> str:
        """The id that the folder keeps when it is moved; "" until the first write or command creates the staging folder."""
        area = self._ground.area
        return area.root_id if area.root_id or area.is_own() else ""

    @property
    def staging(self) -> Path:
        """The folder where pending changes are kept. The first write or command creates it."""
        return self._ground.area.folder

    @property
    def allowed_startup_files(self) -> tuple[str, ...]:
        """The patterns of the startup files that calls may change without a separate approval."""
        return tuple(self._ground.startup_files)

    def fork(self, owner: str, /, *, writable: bool = True) -> DirectoryFork:
        """Return a fork for the call `owner`. With `writable=False` it refuses every change."""
        return DirectoryFork(self, (), self._ground, owner, writable)

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
        ground = self._ground
        with ground.direct:
            ground.jail.check_in_place()
            commit = self._kept(CallKey(call_id, run_id, place, journal))
            with self._claiming(commit.manifest.places()):
                return ground.area.undo(commit)

    def check_undo(self, calls: Iterable[CallKey], /) -> None:
        """Raise what `undo` would raise now for one of these calls, if they were undone one after another. Changes nothing.

        It may still be refused later, because of what others change in the meantime.
        """
        ground = self._ground
        restored: dict[str, str] = {}
        with ground.direct:
            ground.jail.check_in_place()
            for key in calls:
                ground.area.check_undo(self._kept(key), restored)

    def _kept(self, key: CallKey) -> Commit:
        """Return the kept commit of a call. Raises `UndoRefused` if none is kept, and `Conflict` if one of its paths is about to change."""
        area, run_id = self._ground.area, key.run_id
        commit = area.done(key)
        if commit is None:
            where = f" in run {run_id!r}" if run_id else " outside a run (name the run with run_id=)"
            why = area.history.why_not_kept(call_digest(key))
            raise UndoRefused(key.call_id, (), f"no commit of this call is kept{where}: {why}")
        for path in commit.manifest.paths:
            refuse_claimed(self._claimed or {}, path)
        return commit

    def recover(self, journal: Journal, /) -> Operation[Recovered]:
        """Finish commits that a journal recorded but a dead process did not apply. Call it before using the folder.

        What the journal recorded is applied, and what it did not record is discarded. The changes of a call that was given up
        are reverted. A file that someone else has changed is left as it is, and its path is returned in `left`. A commit that
        can't be applied, because its folder or staged files are missing, stays recorded as unapplied and is returned in
        `unapplied`.
        """
        ground = self._ground
        return Operation(lambda: recover(ground.jail, ground.area, ground.direct, journal), "recover")

    def close(self) -> None:
        """Close the folder. Its forks can't be used afterwards."""
        with self._ground.lock:
            self._ground.area.close()
            self._ground.jail.close()

    def __enter__(self) -> DirectoryFilesystem:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- reads --------------------------------------------------------------------------------------

    def _look(self, folder: str, name: str) -> Node:
        if not folder and name == self._ground.hidden and name:
            return ABSENT
        path = join(folder, name)
        return node_of(path, self._ground.jail.look(path), self._ground)

    def _has_folder(self, folder: str) -> bool:
        return not folder or self._look(*split(folder)).is_folder

    def _scan(self, folder: str) -> Iterator[tuple[str, str]]:
        hidden = "" if folder else self._ground.hidden
        return ((name, kind) for name, kind in self._ground.jail.scan(folder) if name != hidden)

    def _list(self, folder: str) -> Mapping[str, Node]:
        return {name: UNSEEN[kind] for name, kind in self._scan(folder)}

    def _names(self, folder: str) -> Sequence[str]:
        return [name for name, _ in self._scan(folder)]

    def _names_near(self, folder: str) -> Sequence[str]:
        return [name for name, _ in islice(self._scan(folder), _NAMES_NEAR)]

    def _stamp(self, folder: str) -> int:
        return _stamp(dict(self._scan(folder)))

    def _view(self, folder: str) -> Listing:
        kinds = dict(self._scan(folder))
        return Listing({name: UNSEEN[kind] for name, kind in kinds.items()}, _stamp(kinds), None)

    def _usage(self) -> tuple[int, int]:
        return 0, 0

    # --- writes, each a separate commit --------------------------------------------------------------

    @property
    def claims(self) -> Claims:
        """The calls of this process that are committing to the folder."""
        return self._ground.claims

    @contextlib.contextmanager
    def _alone(self) -> Generator[DirectoryFork]:
        with self._ground.direct:
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
        claims, claim = self._ground.claims, Claim(places)
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


def _patterns(given: Collection[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise DefinitionError(f"startup_files is a string. Pass a list of patterns: [{given!r}].")
    return tuple(given)


def _stamp(kinds: Mapping[str, str]) -> int:
    return hash(frozenset(kinds.items())) & (1 << 64) - 1


def _open(root: str | os.PathLike[str]) -> Jail:
    path = Path(root)
    try:
        real = path.resolve(strict=True)
        jail = Jail(real)
    except NotADirectoryError:
        raise DefinitionError(f"{str(path)!r} is not a folder. Pass the path of a folder.") from None
    except OSError as error:
        raise DefinitionError(
            f"the folder {str(path)!r} can't be opened: {error.strerror}. Pass the path of a folder that exists and can be opened."
        ) from None
    if _ignores_case(jail):
        raise case_insensitive(real)
    return jail


def _ignores_case(jail: Jail) -> bool:
    """Return whether the folder is known to ignore case.

    Writes nothing: it checks the folder's flags and existing names.
    """
    try:
        fd = jail.folder(".", os.O_RDONLY)
    except OSError:
        return False
    try:
        with contextlib.suppress(OSError):
            (flags,) = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0)))
            if flags & _CASEFOLD:
                return True
        with os.scandir(fd) as entries:
            for entry in islice(entries, _PROBED):
                other = entry.name.swapcase()
                with contextlib.suppress(OSError):
                    if other != entry.name and os.path.samestat(
                        os.stat(other, dir_fd=fd, follow_symlinks=False), entry.stat(follow_symlinks=False)
                    ):
                        # If the folder lists both names, they are hard links to one file, not two spellings of one name.
                        return other not in [name for name, _ in jail.scan("")]
        return False
    finally:
        os.close(fd)


def _inside(root: Path, staging: Path) -> str:
    """Return the staging folder's name if it is directly in the root, or "" if it is outside.

    Raises `DefinitionError` if the staging folder is the root, contains the root, or is deeper inside it.
    """
    resolved = staging.parent.resolve() / staging.name
    if resolved == root or resolved in root.parents:
        raise DefinitionError(
            f"staging={str(staging)!r} is the folder itself or contains it. Choose another folder."
        )
    if root in resolved.parents and resolved.parent != root:
        raise DefinitionError(
            f"staging={str(staging)!r} is deep inside the folder. Put it beside the folder, or directly in it."
        )
    return resolved.name if resolved.parent == root else ""
