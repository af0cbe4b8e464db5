"""`DirectoryStore`: the files of a real folder, as they are on the disk now, with what the folder shares with its forks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from threading import RLock

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.claims import claims_on_folder
from handrail.errors import DefinitionError, FileError, PathRefused
from handrail.resources.directory.area import Area
from handrail.resources.directory.content import UNSEEN, node_of
from handrail.resources.directory.disk import DISK, Disk, Jail
from handrail.resources.directory.roots import case_insensitive, default_staging
from handrail.resources.facts import Attributes
from handrail.resources.paths import join, reserved_in, split
from handrail.resources.store import FileLimits, Store
from handrail.resources.tree import ABSENT, Listing, Node

_NAMES_NEAR = 2000
"""Maximum number of names to search for a suggestion."""
_GET_FLAGS, _CASEFOLD = 0x80086601, 0x40000000
_PROBED = 20


class DirectoryStore(Store):
    """The files of a real folder. Nothing is changed through it: every change is a commit of a fork."""

    __slots__ = ("area", "direct", "hidden", "jail", "startup_files")

    def __init__(
        self,
        root: str | os.PathLike[str],
        limits: FileLimits,
        startup_files: Collection[str],
        keep: tuple[int, int],
        *,
        staging: str | os.PathLike[str] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        disk: Disk = DISK,
    ) -> None:
        jail = _open(root)
        aside = default_staging(jail.root, jail.fd) if staging is None else Path(staging).absolute()
        area = Area(jail, disk, aside, clock, keep, fixed=staging is not None)
        super().__init__(limits, clock, count(16).__next__)
        self.jail = jail
        self.area = area
        self.hidden = _inside(jail.root, aside)
        """The name of the staging folder if it is in the root, or "" if it is elsewhere."""
        self.startup_files = _patterns(startup_files)
        """Patterns of the startup files that calls may change without a separate approval."""
        status = os.fstat(jail.fd)
        self.claims = claims_on_folder(status.st_dev, status.st_ino)
        self.direct = RLock()
        """Held during a change that no call makes: a direct write, an undo or a recovery. Reads don't wait for it."""

    def look(self, folder: str, name: str) -> Node:
        if not folder and name == self.hidden and name:
            return ABSENT
        path = join(folder, name)
        return node_of(path, self.jail.look(path), self)

    def has_folder(self, folder: str) -> bool:
        return not folder or self.look(*split(folder)).is_folder

    def members(self, folder: str) -> Mapping[str, Node]:
        return {name: UNSEEN[kind] for name, kind in self._scan(folder)}

    def names(self, folder: str) -> Sequence[str]:
        return [name for name, _ in self._scan(folder)]

    def names_near(self, folder: str) -> Sequence[str]:
        return [name for name, _ in islice(self._scan(folder), _NAMES_NEAR)]

    def stamp(self, folder: str) -> int:
        return _stamp(dict(self._scan(folder)))

    def view(self, folder: str) -> Listing:
        kinds = dict(self._scan(folder))
        return Listing({name: UNSEEN[kind] for name, kind in kinds.items()}, _stamp(kinds), None)

    def usage(self) -> tuple[int, int]:
        return 0, 0

    def _scan(self, folder: str) -> Iterator[tuple[str, str]]:
        hidden = "" if folder else self.hidden
        return ((name, kind) for name, kind in self.jail.scan(folder) if name != hidden)

    def read(self, path: str, version: int) -> bytes:
        """Read a file in the folder. Raises the errors of `Jail.read`, such as `Conflict` if it no longer has this version."""
        return self.jail.read(path, version, self.limits.max_file_size)

    def attributes(self, path: str) -> Attributes:
        """Return the extended attributes that a copy of a file in the folder should have, or () if it can't be opened."""
        return self.jail.attributes(path)

    def refuse_hidden(self, path: str) -> None:
        """Raise `PathRefused` if a path is in the staging folder or contains a reserved name."""
        if reserved := reserved_in(path):
            raise PathRefused(path, f"{reserved!r} is reserved for Handrail's own files. Choose another path")
        hidden = self.hidden
        if hidden and (path == hidden or path.startswith(f"{hidden}/")):
            raise PathRefused(path, "uncommitted changes are staged there. Choose another path")

    def refuse_installed(self, path: str, *, around: bool = False) -> None:
        """Raise `PathRefused` if a path belongs to the installation that runs Handrail or, with `around`, contains a part of it."""
        if self.jail.is_installed(path, around=around):
            problem = "it belongs to the installation that runs Handrail, which no call can change. Choose another path, or run Handrail from another installation"
            raise PathRefused(path, problem)

    def refuse_around(self, path: str) -> None:
        """Raise `FileError` if a path to be moved or deleted contains a reserved name or a part of the installation, at any depth."""
        self.refuse_installed(path, around=True)
        reserved = self.jail.find_reserved(path)
        if reserved:
            problem = f"it contains {reserved!r}, where Handrail keeps its own files, so it can't be moved or deleted. Choose the files in it instead"
            raise FileError(path, problem)


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
