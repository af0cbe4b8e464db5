"""`DirectoryStore`: the files of a real folder, as they are on the disk now. `Links`: resolves the symbolic links in paths.

When a file is read or written, the kernel follows no link. A path that crosses a link is resolved by `Links`, one name
at a time, as the fork sees it. A link's target must be inside the root, and following a link counts as reading it.

If ripgrep is installed, a search of many files for plain text uses it to find the files that contain the text. Its
output only narrows down the files to read. Handrail's own code always finds the matches, so results do not depend on ripgrep.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from threading import RLock

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.claims import claims_on_folder
from handrail.errors import DefinitionError, FileError, PathRefused
from handrail.resources.directory.area import Area
from handrail.resources.directory.content import UNSEEN, OnDisk, node_of
from handrail.resources.directory.disk import DISK, Disk, Jail
from handrail.resources.directory.roots import case_insensitive, default_staging
from handrail.resources.facts import Attributes
from handrail.resources.paths import ParsedPath, join, on_disk, parse_path, reserved_in, spelled, split
from handrail.resources.startup_files import HOOKS, PLACES, run_by
from handrail.resources.store import FileLimits, Store
from handrail.resources.tree import ABSENT, TOP, FileTree, Listing, Node, is_link
from handrail.text.patterns import is_plain

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


_SMALL_FOLDER = 4096
"""The size of a folder, in bytes, up to which listing it costs less than looking up all startup files."""
_FOLLOWED = 40
"""Maximum number of links in one path, as in Linux."""


class Links:
    """Resolves the links in paths, as a folder or one of its forks sees them. Its users hold the store's lock."""

    __slots__ = ("_store", "_tree", "run_as")

    def __init__(self, store: DirectoryStore, tree: DirectoryStore | FileTree) -> None:
        self._store = store
        self._tree = tree
        self.run_as: dict[str, str] = {}
        """For each path that the path of a startup file led a fork to: the program, with the startup file's path."""

    def follow(self, path: str, *, last: bool = True) -> tuple[str, Node | None]:
        """Return a path with its links resolved, and its node. With `last=False`, a link at the end is not resolved.

        If the node is None, the caller must look it up. Raises `PathRefused` if the path is invalid or hidden, has too many
        links, or leads out of the root.
        """
        at = parse_path(path)
        self._store.refuse_hidden(at.path)
        node = self._tree.look(at.folder, at.name) if at.name else TOP
        if node.version:
            if not last or not is_link(node):
                return path, node
        elif self._tree.has_folder(at.folder):
            return path, node
        target = self._walk(path, at.path, last)
        self._store.refuse_hidden(target)
        if target == at.path:
            return path, None
        followed = f"{target or '.'}/" if at.as_folder else target or "."
        if last and self._tree is not self._store and (program := run_by(path)):
            self.run_as[followed] = f"{program}, as {path}"
        return followed, None

    def _walk(self, given: str, path: str, last: bool) -> str:
        names = deque(path.split("/"))
        folder, followed = "", 0
        while names:
            name = names.popleft()
            if name == "..":
                if not folder:
                    raise PathRefused(
                        given, "a link in it leads out of the root. Name a path inside the root"
                    )
                folder = split(folder)[0]
            elif name not in ("", "."):
                node = self._tree.look(folder, name)
                if is_link(node) and (names or last):
                    followed += 1
                    if followed > _FOLLOWED:
                        raise PathRefused(
                            given, "it crosses too many links, which may form a cycle. Name another path"
                        )
                    if self._target(given, self._tree.see(folder, name), names):
                        folder = ""
                else:
                    folder = join(folder, name)
        return folder

    def _target(self, given: str, node: Node, names: deque[str]) -> bool:
        """Prepend a link's target to the remaining names. Returns True if the target is absolute.

        Raises `PathRefused` if an absolute target leads out of the root.
        """
        target: str = getattr(node.data, "target", "")
        absolute = target.startswith("/")
        if absolute:
            root = str(self._store.jail.root)
            if target != root and not target.startswith(f"{root}/"):
                raise PathRefused(given, "a link in it leads out of the root. Name a path inside the root")
            target = target[len(root) :]
        names.extendleft(reversed(spelled(target).split("/")))
        return absolute

    def refuse_around(self, path: str) -> None:
        """Raise `FileError` if a path to be moved or deleted contains a reserved name or a part of the installation, at any depth."""
        self._store.refuse_around(path)

    def without(self, pattern: str, paths: Sequence[str], at: Callable[[str], ParsedPath]) -> Collection[str]:
        """Return the files that need not be searched for a pattern, because ripgrep does not find it in them.

        They still count as read, at the version that they had before ripgrep ran, because the search's result depends on them.
        `at` returns where a path leads.
        """
        if len(paths) < WORTH or not is_plain(pattern):
            return ()
        asked: set[str] = set()
        for path in paths:
            with self._store.lock:
                place = at(path)
                data = self._tree.see(place.folder, place.name).data
                # After a move, the disk may have a different file at this path.
                if (
                    isinstance(data, OnDisk)
                    and path == place.path == data.path
                    and not (data.staged or data.kept)
                ):
                    asked.add(path)
        holding = files_holding(Path(f"/proc/self/fd/{self._store.jail.fd}"), pattern, sorted(asked))
        return frozenset() if holding is None else frozenset(asked - holding)


def startup_links(jail: Jail, folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each startup path of these folders that is a link or is in a linked folder, with a path under the root that it leads to.

    The startup paths are those in `PLACES`, those in the folders of `HOOKS`, and names that match a pattern such as `*.pth`, in each of the folders. If a link leads to another
    link, the path is yielded with each target. The same pair may be yielded twice.
    """
    root = ""
    for folder in folders:
        there = _startup_names(jail, folder)
        if there and not root:
            jail.check_in_place()  # the links are followed by path, not from the open folder
            root = os.path.realpath(jail.root)
        places = [place for name in there for place in PLACES.get(name, (name,))]
        for hooks in HOOKS:
            if hooks in places:
                with contextlib.suppress(OSError):
                    listed = os.listdir(os.path.join(root, on_disk(join(folder, hooks))))
                    places += [f"{hooks}/{spelled(name)}" for name in listed]
        for place in places:
            at = os.path.join(root, on_disk(join(folder, place)))
            if os.path.islink(at) or ("/" in place and os.path.islink(os.path.dirname(at))):
                for target in _trail(at):
                    if target.startswith(f"{root}/"):
                        yield join(folder, place), spelled(target[len(root) + 1 :])


def _startup_names(jail: Jail, folder: str) -> Collection[str]:
    """Return the names in a folder with which a path in `PLACES` begins, and those of links that are startup files by a pattern.

    A small folder is listed. In a large one, each name in `PLACES` is looked up.
    """
    at = os.path.join(f"/proc/self/fd/{jail.fd}", on_disk(folder))
    try:
        if os.stat(at).st_size > _SMALL_FOLDER:
            return [name for name in PLACES if os.path.lexists(os.path.join(at, name))]
        with os.scandir(at) as entries:
            return [
                spelled(each.name)
                for each in entries
                if each.name in PLACES or (each.is_symlink() and run_by(spelled(each.name), is_link=True))
            ]
    except OSError:  # the call has made the folder, or somebody has just removed it
        return ()


def _trail(link: str) -> Iterator[str]:
    """Yield the paths of all links that a link leads through, and the path that it finally leads to, which may come twice."""
    at = link
    for _ in range(_FOLLOWED):
        if not os.path.islink(at):
            break
        at = os.path.normpath(os.path.join(os.path.realpath(os.path.dirname(at)), os.readlink(at)))
        yield at
    yield os.path.realpath(link)


_AT_ONCE = 500
"""Maximum number of files per ripgrep process, so that their names fit on a command line."""
WORTH = 32
"""Minimum number of files to search with ripgrep. For fewer files, starting it takes longer than it saves."""


def files_holding(root: Path, text: str, paths: Sequence[str]) -> set[str] | None:
    """Return the files among `paths` that contain this text, or None if ripgrep is missing or fails."""
    program = _ripgrep()
    if program is None:
        return None
    holding: set[str] = set()
    left = iter(paths)
    while some := list(islice(left, _AT_ONCE)):
        found = _holding(program, root, text, some)
        if found is None:
            return None
        holding |= found
    return holding


def _holding(program: str, root: Path, text: str, paths: list[str]) -> set[str] | None:
    told = ["--no-config", "--files-with-matches", "--fixed-strings", "--case-sensitive", "--text", "--null"]
    told += ["--encoding", "none", "--no-messages", "--threads", "2", "--regexp", text, "--"]
    names = [f"./{on_disk(path)}" for path in paths]
    try:
        ran = subprocess.run(
            [program, *told, *names], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except (OSError, UnicodeError):  # ripgrep was removed, or the text can't be passed on a command line
        return None
    if ran.returncode not in (0, 1):  # status 2 means an error, so the output may be incomplete
        return None
    return {spelled(os.fsdecode(name)).removeprefix("./") for name in ran.stdout.split(b"\0") if name}


@lru_cache(maxsize=1)
def _ripgrep() -> str | None:
    return shutil.which("rg")
