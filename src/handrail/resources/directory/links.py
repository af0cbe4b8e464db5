"""`Linked`: a layer with symbolic links.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any, cast

import msgspec

from handrail.concurrency.claims import claims_on_folder
from handrail.errors import Conflict, FileError, PathRefused
from handrail.protocols import FileInfo, Match
from handrail.resources.directory.area import Area
from handrail.resources.directory.content import Held, OnDisk, Special, is_link
from handrail.resources.directory.disk import Jail
from handrail.resources.facts import Attributes
from handrail.resources.paths import join, on_disk, parse_file_path, parse_path, reserved_in, spelled, split
from handrail.resources.search import encode, line_pattern, sorted_matches
from handrail.resources.startup_files import HOOKS, PLACES, run_by
from handrail.resources.store import TOP, Layer, Node, Shared
from handrail.text.patterns import is_plain

_SMALL_FOLDER = 4096
"""The size of a folder, in bytes, up to which listing it costs less than looking up all startup files."""
_FOLLOWED = 40
"""Maximum number of links in one path, as in Linux."""
_TRIES = 4
"""Maximum number of attempts to read a file that changes while it is read."""


class Ground(Shared):
    """State shared by a directory and all its forks."""

    __slots__ = ("area", "direct", "hidden", "jail", "startup_files")

    def __init__(
        self, *args: Any, jail: Jail, area: Area, hidden: str, startup_files: Collection[str] = ()
    ) -> None:
        super().__init__(*args)
        self.startup_files = startup_files
        """Patterns of the startup files that calls may change without a separate approval."""
        self.jail = jail
        self.area = area
        status = os.fstat(jail.fd)
        self.claims = claims_on_folder(status.st_dev, status.st_ino)
        self.direct = RLock()
        """Held during a change that no call makes: a direct write, an undo or a recovery. Reads don't wait for it."""
        self.hidden = hidden
        """The name of the staging folder if it is in the root, or "" if it is elsewhere."""

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

    def startup_links(self, folders: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield each startup path of these folders that is a link or is in a linked folder, with a path under the root that it leads to.

        The startup paths are those in `PLACES`, those in the folders of `HOOKS`, and names that match a pattern such as `*.pth`, in each of the folders. If a link leads to another
        link, the path is yielded with each target. The same pair may be yielded twice.
        """
        root = ""
        for folder in folders:
            there = self._startup_names(folder)
            if there and not root:
                self.jail.check_in_place()  # the links are followed by path, not from the open folder
                root = os.path.realpath(self.jail.root)
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

    def _startup_names(self, folder: str) -> Collection[str]:
        """Return the names in a folder with which a path in `PLACES` begins, and those of links that are startup files by a pattern.

        A small folder is listed. In a large one, each name in `PLACES` is looked up.
        """
        at = os.path.join(f"/proc/self/fd/{self.jail.fd}", on_disk(folder))
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

    def refuse_installed(self, path: str, *, around: bool = False) -> None:
        """Raise `PathRefused` if a path belongs to the installation that runs Handrail or, with `around`, contains a part of it."""
        if self.jail.is_installed(path, around=around):
            problem = "it belongs to the installation that runs Handrail, which no call can change. Choose another path, or run Handrail from another installation"
            raise PathRefused(path, problem)

    def refuse_around(self, path: str) -> None:
        """Raise `FileError` if a path to be moved or deleted contains a reserved name or a part of the installation, at any depth."""
        self.refuse_installed(parse_path(path).path, around=True)
        reserved = self.jail.find_reserved(parse_path(path).path)
        if reserved:
            problem = f"it contains {reserved!r}, where Handrail keeps its own files, so it can't be moved or deleted. Choose the files in it instead"
            raise FileError(path, problem)


class Linked(Layer):
    """The operations of a filesystem with links. Each resolves the links in its paths first, but `delete` and `move` act on a link itself."""

    __slots__ = ()

    @property
    def _ground(self) -> Ground:
        return cast(Ground, self._shared)

    # --- hooks that forks override; the folder itself records no reads ------------------------------

    def _is_pinned(self, folder: str, name: str) -> bool:
        """Return whether this layer has already read or changed a path. If so, its content must stay the same."""
        return False

    def _forget(self, folder: str, name: str) -> None:
        """Forget that this layer has read a path."""

    def _keep_bytes(self, folder: str, name: str, data: bytes) -> None:
        """Keep the bytes that were read, for repeatable reads."""

    # --- resolution -------------------------------------------------------------------------------

    def _followed(self, path: str, *, last: bool = True) -> str:
        """Return a path with its links resolved. With `last=False`, a link at the end is not resolved.

        Raises `PathRefused` if the path is invalid or hidden, has too many links, or leads out of the root.
        """
        return self._follow(path, last)[0]

    def _follow(self, path: str, last: bool = True) -> tuple[str, Node | None]:
        """Resolve the links in a path, as `_followed` does. Returns the path and its node.

        If the node is None, the caller must look it up.
        """
        at = parse_path(path)
        self._enter()
        self._ground.refuse_hidden(at.path)
        node = self._look(at.folder, at.name) if at.name else TOP
        if node.version:
            if not last or not is_link(node):
                return path, node
        elif self._has_folder(at.folder):
            return path, node
        found = self._walk(path, at.path, last)
        self._ground.refuse_hidden(found)
        if found == at.path:
            return path, None
        return f"{found or '.'}/" if at.as_folder else found or ".", None

    def resolved(self, path: str, /) -> str:
        """Return where a path leads in this layer: normalized, with every link resolved.

        Raises `PathRefused` if the path is invalid or hidden, has too many links, or leads out of the root.
        """
        with self._shared.lock:
            return parse_path(self._followed(path)).path

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
                node = self._look(folder, name)
                if is_link(node) and (names or last):
                    followed += 1
                    if followed > _FOLLOWED:
                        raise PathRefused(
                            given, "it crosses too many links, which may form a cycle. Name another path"
                        )
                    if self._target(given, self._see(folder, name), names):
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
            root = str(self._ground.jail.root)
            if target != root and not target.startswith(f"{root}/"):
                raise PathRefused(given, "a link in it leads out of the root. Name a path inside the root")
            target = target[len(root) :]
        names.extendleft(reversed(spelled(target).split("/")))
        return absolute

    # --- reading ----------------------------------------------------------------------------------

    def read_bytes(self, path: str, /) -> bytes:
        parse_file_path(path)
        with self._shared.lock:
            return self._loaded(self._followed(path))

    def _loaded(self, path: str) -> bytes:
        """Read a file whose path crosses no links. If it changes during its first read, it is read again.

        Raises `Conflict` if it keeps changing, or if it has changed since an earlier read.
        """
        at = parse_file_path(path)
        pinned = self._is_pinned(at.folder, at.name)
        for _ in range(_TRIES):
            try:
                data = super().read_bytes(path)
            except Conflict:
                if pinned:
                    raise
                self._forget(at.folder, at.name)
            else:
                self._keep_bytes(at.folder, at.name, data)
                return data
        raise Conflict([at.path])

    def stat(self, path: str, /) -> FileInfo:
        with self._shared.lock:
            return super().stat(self._followed(path))

    def exists(self, path: str, /) -> bool:
        with self._shared.lock:
            return super().exists(self._followed(path))

    def list(self, path: str = ".", /) -> Sequence[FileInfo]:
        with self._shared.lock:
            return super().list(self._followed(path))

    def _info(self, path: str, node: Node) -> FileInfo:
        """Return information on a link's target, or on the link itself if the target does not exist or may not be used."""
        if is_link(node):
            try:
                at = parse_path(self._followed(path))
            except PathRefused:
                return super()._info(path, node)
            found = self._see(at.folder, at.name) if at.name else TOP
            node = found if found.version else node
        info = super()._info(path, node)
        return msgspec.structs.replace(info, is_special=True) if isinstance(node.data, Special) else info

    def _kind(self, path: str) -> bool | None:
        with self._shared.lock:
            try:
                return super()._kind(self._followed(path))
            except PathRefused:
                return None

    def _kinds(self, folder: str) -> Mapping[str, bool]:
        """Map each name in a folder to whether it is a folder itself. Empty if the path can't be used.

        Of the links, only those to files are included, so that a search does not descend through links, which could form a
        cycle. Names that a caller could not pass back are omitted.
        """
        with self._shared.lock:
            try:
                here = parse_path(self._followed(folder or ".")).path
            except PathRefused:
                return {}
            self._enter()
            found: dict[str, bool] = {}
            for name, node in self._list(here).items():
                if not _can_be_said(join(here, name)):
                    continue
                if is_link(node):
                    if self._kind(join(here, name)) is False:
                        found[name] = False
                else:
                    found[name] = node.data is None
            return found

    def grep(self, pattern: str, /, *, glob: str = "**") -> Sequence[Match]:
        line_pattern(pattern)
        paths = self.glob(glob)
        text = pattern if len(paths) >= WORTH and is_plain(pattern) else None
        without = frozenset[str]() if text is None else self._without(text, paths)
        return sorted_matches(pattern, self._contents_of(path for path in paths if path not in without))

    def _without(self, text: str, paths: Sequence[str]) -> frozenset[str]:
        """Return the files that need not be searched for this text, because ripgrep does not find it in them.

        They still count as read, at the version that they had before ripgrep ran, because the search's result depends on them.
        """
        asked: set[str] = set()
        for path in paths:
            with self._shared.lock:
                at = parse_path(self._followed(path))
                data = self._see(at.folder, at.name).data
                # After a move, the disk may have a different file at this path.
                if (
                    isinstance(data, OnDisk)
                    and path == at.path == data.path
                    and not (data.staged or data.kept)
                ):
                    asked.add(path)
        holding = files_holding(Path(f"/proc/self/fd/{self._ground.jail.fd}"), text, sorted(asked))
        return frozenset() if holding is None else frozenset(asked - holding)

    def _contents_of(self, paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for path in paths:
            with self._shared.lock:
                at = parse_path(self._followed(path))
                node = self._look(at.folder, at.name)
                is_file = isinstance(node.data, OnDisk | Held) and not isinstance(node.data, Special)
                if not is_file or node.size > self._shared.limits.max_file_size:
                    self._see(at.folder, at.name)
                    continue
                data = self._loaded(at.path)
            yield path, data

    def _below(self, path: str, node: Node) -> Sequence[tuple[str, str, Node]]:
        return [(folder, name, self._look(folder, name)) for folder, name, _ in super()._below(path, node)]

    # --- writing ----------------------------------------------------------------------------------

    def write(self, path: str, content: str | bytes, /) -> None:
        parse_file_path(path)
        with self._shared.lock:
            followed, node = self._follow(path)
            at = parse_file_path(followed)
            data = encode(followed, content)
            self._enter(at.path)
            self._store(at, data, self._look(at.folder, at.name) if node is None else node)

    def append(self, path: str, content: str | bytes, /) -> None:
        parse_file_path(path)
        with self._shared.lock:
            super().append(self._followed(path), content)

    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        parse_file_path(path)
        with self._shared.lock:
            return super().edit(self._followed(path), old, new, all=all)

    def mkdir(self, path: str, /) -> None:
        with self._shared.lock:
            super().mkdir(self._followed(path))

    def delete(self, path: str, /, *, recursive: bool = False) -> None:
        with self._shared.lock:
            found = self._followed(path, last=False)
            self._ground.refuse_around(found)
            super().delete(found, recursive=recursive)

    def move(self, source: str, target: str, /) -> None:
        with self._shared.lock:
            found = self._followed(source, last=False)
            self._ground.refuse_around(found)
            super().move(found, self._followed(target, last=False))


def _trail(link: str) -> Iterator[str]:
    """Yield the paths of all links that a link leads through, and the path that it finally leads to, which may come twice."""
    at = link
    for _ in range(_FOLLOWED):
        if not os.path.islink(at):
            break
        at = os.path.normpath(os.path.join(os.path.realpath(os.path.dirname(at)), os.readlink(at)))
        yield at
    yield os.path.realpath(link)


def _can_be_said(path: str) -> bool:
    """Return whether a caller can pass this path back unchanged. A path that starts with `~/` or is too long would be refused."""
    try:
        return parse_path(path).path == path
    except PathRefused:
        return False


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
