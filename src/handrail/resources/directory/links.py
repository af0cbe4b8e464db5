"""`Links`: resolves the symbolic links in paths.

When a file is read or written, the kernel follows no link. A path that crosses a link is resolved by this module, one name
at a time, as the fork sees it. A link's target must be inside the root, and following a link counts as reading it.

If ripgrep is installed, a search of many files for plain text uses it to find the files that contain the text. Its
output only narrows down the files to read. Handrail's own code always finds the matches, so results do not depend on ripgrep.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from handrail.errors import PathRefused
from handrail.resources.directory.content import OnDisk
from handrail.resources.directory.disk import Jail
from handrail.resources.directory.store import DirectoryStore
from handrail.resources.paths import ParsedPath, join, on_disk, parse_path, spelled, split
from handrail.resources.startup_files import HOOKS, PLACES, run_by
from handrail.resources.tree import TOP, FileTree, Node, is_link
from handrail.text.patterns import is_plain

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
