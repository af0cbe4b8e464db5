"""`DirectoryFilesystem`: the files of a real folder, each call's changes a transaction of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, UndoRefused
from handrail.journals import Journal
from handrail.operation import Operation
from handrail.resources.directory.area import Area, case_insensitive
from handrail.resources.directory.disk import DISK, Disk
from handrail.resources.directory.fork import DirectoryFork, Ground, refuse_hidden
from handrail.resources.directory.jail import Jail
from handrail.resources.directory.links import Linked
from handrail.resources.directory.recovery import Recovered, recover
from handrail.resources.directory.stored import UNSEEN, node_of
from handrail.resources.directory.undoing import undo
from handrail.resources.layer import ABSENT, FileLimits, Listing, Node
from handrail.resources.overlay import refuse_claimed
from handrail.resources.paths import join, split

DIRECTORY_LIMITS = FileLimits(max_total_size=16 * 1024 * 1024 * 1024)
"""Of a directory the limits hold for what one call changes, and for one file that is read."""
_NAMES_NEAR = 2000
"""Names that are looked through for the one that was meant."""
_GET_FLAGS, _CASEFOLD = 0x80086601, 0x40000000
_PROBED = 20


class DirectoryFilesystem(Linked):
    """The files under a real folder, and nothing else: no path, and no link, leads out of it.

    Calls work on forks. A fork costs nothing to make and reads go to the disk; what it writes lies
    beside the folder until it commits, which renames it into place after checking that nobody else
    changed the same paths: a person, another process, another call. Only those paths are ever
    touched. What is written here directly is a commit of its own.

    - `staging`: where changes lie until they are committed, and what was displaced after: a folder on
      the same disk, by default `.<name>.handrail` beside the root. It may be a folder in the root
      itself, which is then not to be seen through here; a command's overlay can't be mounted over
      such a one.
    - `limits`: how much one call may change, and how large a file may be to be read.
    - `keep_calls`, `keep_bytes`: how many commits can be undone, and how many bytes are kept for that.
    """

    __slots__ = ("_ground",)

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        staging: str | os.PathLike[str] | None = None,
        limits: FileLimits = DIRECTORY_LIMITS,
        keep_calls: int = 100,
        keep_bytes: int = 256 * 1024 * 1024,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk = DISK,
    ) -> None:
        jail = _open(root)
        aside = jail.root.parent / f".{jail.root.name}.handrail" if staging is None else Path(staging)
        aside = aside.absolute()
        area = Area(jail, disk, aside, clock, (keep_calls, keep_bytes))
        self._ground = Ground(
            limits, clock, count(16).__next__, jail=jail, area=area, hidden=_inside(jail.root, aside)
        )
        self._shared = self._ground
        self._claimed = {}

    @property
    def root(self) -> Path:
        """The folder."""
        return self._ground.jail.root

    @property
    def staging(self) -> Path:
        """Where changes lie until they are committed. It is there once something was written."""
        return self._ground.area.folder

    def fork(self, owner: str, /, *, writable: bool = True) -> DirectoryFork:
        """A version of its own for the call `owner`; without `writable` it refuses every change."""
        return DirectoryFork(self, (), self._ground, owner, writable)

    def undo(self, call_id: str, /) -> tuple[str, ...]:
        """Put back what the commit of this call displaced, and take away what it brought.

        `UndoRefused` where somebody has changed one of its paths since, naming them, or where nothing
        is kept of it any more. Returns the paths that were changed, sorted.
        """
        ground = self._ground
        with ground.lock:
            commit = ground.area.done(call_id)
            if commit is None:
                raise UndoRefused(call_id, (), "nothing is kept of it: it changed no files, or is too old")
            for path in commit.manifest.paths:
                refuse_claimed(self._claimed or {}, path)
            return undo(ground.jail, ground.area, commit)

    def recover(self, journal: Journal, /) -> Operation[Recovered]:
        """Finish what was recorded in a journal and not applied, because the process ended in between.

        Only forward: what is recorded is applied, and what is not never was. A file that somebody
        changed meanwhile stays as it is, and is named. To be called before the folder is used.
        """
        ground = self._ground
        return Operation(lambda: recover(ground.jail, ground.area, ground.lock, journal), "recover")

    def close(self) -> None:
        """Let go of the folder. Forks of it can't be used any more."""
        with self._ground.lock:
            self._ground.area.close()
            self._ground.jail.close()

    def __enter__(self) -> DirectoryFilesystem:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- looking ----------------------------------------------------------------------------------

    def _enter(self, change: str = "") -> None:
        if change and self._claimed:
            refuse_claimed(self._claimed, change)

    def _look(self, folder: str, name: str) -> Node:
        if not folder and name == self._ground.hidden and name:
            return ABSENT
        path = join(folder, name)
        return node_of(path, self._ground.jail.look(path), self._read)

    def _read(self, path: str, version: int) -> bytes:
        return self._ground.jail.read(path, version, self._ground.limits.max_file_size)

    def _see(self, folder: str, name: str) -> Node:
        return self._look(folder, name)

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

    @property
    def _root_path(self) -> str:
        return str(self._ground.jail.root)

    def _refuse_ours(self, path: str) -> None:
        refuse_hidden(self._ground.hidden, path)

    def _is_pinned(self, folder: str, name: str) -> bool:
        return False

    def _forget(self, folder: str, name: str) -> None:
        pass

    def _keep_bytes(self, folder: str, name: str, data: bytes) -> None:
        pass

    # --- changing: each a commit of its own ---------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Generator[DirectoryFork]:
        with self._ground.lock:
            fork = self.fork("direct")
            try:
                yield fork
                fork.prepare()
                fork.apply()
            finally:
                fork.drop()

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


def _stamp(kinds: Mapping[str, str]) -> int:
    return hash(frozenset(kinds.items())) & (1 << 64) - 1


def _open(root: str | os.PathLike[str]) -> Jail:
    path = Path(root)
    try:
        real = path.resolve(strict=True)
        jail = Jail(real)
    except NotADirectoryError:
        raise DefinitionError(f"{str(path)!r} is not a folder. Give the path of one.") from None
    except OSError as error:
        raise DefinitionError(
            f"the folder {str(path)!r} can't be opened: {error.strerror}. Give the path of one that is there."
        ) from None
    if _ignores_case(jail):
        raise case_insensitive(real)
    return jail


def _ignores_case(jail: Jail) -> bool:
    """What can be seen without writing anything: the folder's own flag, and names that are there."""
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
                        # A second link to one file is not a second spelling of one name.
                        return other not in [name for name, _ in jail.scan("")]
        return False
    finally:
        os.close(fd)


def _inside(root: Path, staging: Path) -> str:
    """The name in the root that the staging folder has, where it lies directly in it."""
    resolved = staging.parent.resolve() / staging.name
    if resolved == root or resolved in root.parents:
        raise DefinitionError(f"staging={str(staging)!r} is the folder itself, or around it. Give another.")
    if root in resolved.parents and resolved.parent != root:
        raise DefinitionError(
            f"staging={str(staging)!r} lies deep in the folder. Put it beside the folder, or directly in it."
        )
    return resolved.name if resolved.parent == root else ""
