"""`WorkspaceCache`: this host's copy of a workspace, and the index of what it should contain.

    <number>/
        lock       held by the process that uses this copy
        index      the state of each path when Handrail last wrote or checked it
        files/     the files themselves

A copy is disposable. Each time a run opens the workspace, the copy is first made equal to what the journal has recorded:
paths that differ are replaced, and paths that are not recorded are removed. An ignored or reserved path is left alone,
unless the folder that contains it is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from handrail.journal.records import WorkspaceChange, WorkspaceFile
from handrail.resources.directory.content import version_of
from handrail.resources.paths import is_reserved, join, on_disk, spelled

PERMISSIONS = 0o1777
"""The bits of a mode that are recorded."""
_LENGTH = 4


class IndexEntry(msgspec.Struct, array_like=True):
    """The recorded state of a path, and the version of the local file when it was last seen in that state, or "" if unknown."""

    state: WorkspaceFile
    version: str = ""


class _Frame(msgspec.Struct, array_like=True):
    """A part of the index file: the entries that have changed since the previous part. None stands for a removed path."""

    id: str
    version: int
    entries: dict[str, IndexEntry | None]


class WorkspaceCache:
    """One copy of a workspace on this host. Its methods block."""

    def __init__(self, folder: Path, lock: int, is_ignored: Callable[[str], bool]) -> None:
        self.folder = folder
        self.root = folder / "files"
        self._lock = lock
        self.is_ignored = is_ignored
        self.version = 0
        self.entries: dict[str, IndexEntry] = {}
        self._expected: dict[str, WorkspaceFile | None] = {}
        """The states that a recorded commit is bringing about. Until it is noted, a path may be in its old state or in this one."""

    @classmethod
    def claim(cls, place: Path, is_ignored: Callable[[str], bool]) -> WorkspaceCache:
        """Claim the first copy below `place` that is not in use, or make a new one."""
        place.mkdir(0o700, parents=True, exist_ok=True)
        for number in count(1):
            folder = place / str(number)
            folder.mkdir(0o700, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            cache = cls(folder, lock, is_ignored)
            cache.root.mkdir(0o700, exist_ok=True)
            return cache
        raise AssertionError  # the numbers do not end

    def close(self) -> None:
        """Release the copy."""
        os.close(self._lock)

    # --- the index ----------------------------------------------------------------------------------

    def load(self, id: str) -> None:
        """Read the index, up to the first part that can't be read. An index of a different workspace counts as empty."""
        self.version, self.entries = 0, {}
        for frame in _frames(self.folder / "index"):
            if frame.id != id:
                self.version, self.entries = 0, {}
                return
            self.version = frame.version
            for path, entry in frame.entries.items():
                if entry is None:
                    self.entries.pop(path, None)
                else:
                    self.entries[path] = entry

    def save(self, id: str, version: int) -> None:
        """Write the whole index."""
        self.version = version
        new = self.folder / "index.new"
        new.write_bytes(_encode(_Frame(id, version, dict(self.entries))))
        os.replace(new, self.folder / "index")

    def note(self, id: str, version: int, changes: Iterable[WorkspaceChange]) -> None:
        """Append a commit to the index, after it was applied to the copy."""
        frame = _Frame(id, version, {})
        for change in changes:
            entry = None if change.new is None else IndexEntry(change.new, self._version_at(change.path))
            frame.entries[change.path] = entry
            if entry is None:
                self.entries.pop(change.path, None)
            else:
                self.entries[change.path] = entry
            self._expected.pop(change.path, None)
        self.version = version
        with open(self.folder / "index", "ab") as file:
            file.write(_encode(frame))

    def expect(self, changes: Iterable[WorkspaceChange]) -> None:
        """Let paths be in the state in which a recorded commit is about to put them. `note` ends this."""
        self._expected.update((change.path, change.new) for change in changes)

    def _version_at(self, path: str) -> str:
        try:
            return shown_status(os.lstat(self.at(path)))
        except OSError:  # somebody has just removed the file, and the next lookup will notice
            return ""

    # --- the files ----------------------------------------------------------------------------------

    def at(self, path: str) -> Path:
        """Return where a path of the workspace is on this host."""
        return self.root / on_disk(path)

    def is_current(self, path: str, status: os.stat_result | None) -> bool:
        """Return whether a path holds what is recorded. For a folder, only the kind is compared.

        A file or link is read and compared only if its status has changed.
        """
        expected = self._expected.get(path, ...)
        if expected is not ... and self._is_in(expected, path, status):
            return True
        entry = self.entries.get(path)
        if status is None or entry is None:
            return status is None and entry is None
        if kind_of(status) != entry.state.kind:
            return False
        if entry.state.kind == "folder" or shown_status(status) == entry.version:
            return True
        if self._state_of(path, status) != entry.state:
            return False
        entry.version = shown_status(status)
        return True

    def _is_in(self, state: WorkspaceFile | None, path: str, status: os.stat_result | None) -> bool:
        if status is None or state is None:
            return status is None and state is None
        if kind_of(status) != state.kind:
            return False
        return state.kind == "folder" or self._state_of(path, status) == state

    def _state_of(self, path: str, status: os.stat_result) -> WorkspaceFile | None:
        try:
            return state_of(self.at(path), status)
        except OSError:
            return None

    def _walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every path that is neither ignored nor reserved, folders before their members.

        The caller may remove each path before it requests the next one. A folder that this user can't list and change
        gets the mode 0o700.
        """
        pending = [""]
        while pending:
            folder = pending.pop()
            at = self.at(folder)
            if not os.access(at, os.R_OK | os.W_OK | os.X_OK):
                os.chmod(at, 0o700)
            with os.scandir(at) as entries:
                for entry in entries:
                    path = join(folder, spelled(entry.name))
                    if is_reserved(entry.name) or self.is_ignored(path):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    yield path, status
                    if stat.S_ISDIR(status.st_mode) and os.path.lexists(self.at(path)):
                        pending.append(path)

    # --- repair -------------------------------------------------------------------------------------

    def settle(self, wanted: Mapping[str, WorkspaceFile]) -> dict[str, WorkspaceFile]:
        """Remove the paths that are not wanted or are of the wrong kind, and create the folders. Returns the files and links to be written.

        A missing file whose content another file already has is copied from that file, and is not returned.
        """
        kept: dict[str, IndexEntry] = {}
        for path, status in self._walk():
            state = wanted.get(path)
            if state is None or kind_of(status) != state.kind:
                _remove(self.at(path))
            elif state.kind != "folder" and self._is_as(path, status, state):
                kept[path] = IndexEntry(state, self._version_at(path))
        self.entries = kept
        for path, state in sorted(wanted.items()):
            if state.kind == "folder":
                self.at(path).mkdir(0o700, exist_ok=True)
        missing = {
            path: state for path, state in wanted.items() if state.kind != "folder" and path not in kept
        }
        here = {entry.state.digest: path for path, entry in kept.items() if entry.state.kind == "file"}
        for path, state in list(missing.items()):
            if state.kind == "file" and state.digest in here:
                self.write(path, state, content_at(self.at(here[state.digest])))
                del missing[path]
        return missing

    def _is_as(self, path: str, status: os.stat_result, state: WorkspaceFile) -> bool:
        """Return whether a file or link has this content. If only its mode differs, the mode is corrected."""
        entry = self.entries.get(path)
        if entry is not None and entry.state == state and entry.version == shown_status(status):
            return True
        found = self._state_of(path, status)
        if found is None or (found.digest, found.size) != (state.digest, state.size):
            return False
        if found.mode != state.mode:
            os.chmod(self.at(path), state.mode)
        return True

    def write(self, path: str, state: WorkspaceFile, data: bytes) -> None:
        """Write a file or a link, in place of whatever is at its path."""
        at, new = self.at(path), self.folder / "incoming"
        _remove(new)
        if state.kind == "link":
            os.symlink(os.fsdecode(data), new)
        else:
            new.write_bytes(data)
            os.chmod(new, state.mode)
        if os.path.lexists(at) and not stat.S_ISREG(os.lstat(at).st_mode):
            _remove(at)
        os.replace(new, at)
        self.entries[path] = IndexEntry(state, self._version_at(path))

    def finish(self, wanted: Mapping[str, WorkspaceFile]) -> None:
        """Set the modes of the folders, inner ones first, and add the folders to the entries."""
        for path in sorted((path for path, state in wanted.items() if state.kind == "folder"), reverse=True):
            at = self.at(path)
            if os.stat(at).st_mode & PERMISSIONS != wanted[path].mode:
                os.chmod(at, wanted[path].mode)
            self.entries[path] = IndexEntry(wanted[path])

    def force(self, changes: Iterable[WorkspaceChange], read: Callable[[str], bytes]) -> None:
        """Make these changes, whatever is at their paths now. `read` returns the bytes that have a given digest."""
        changes = sorted(changes, key=lambda change: change.path)
        for change in reversed(changes):
            if change.new is None:
                _remove(self.at(change.path))
        for change in changes:
            if change.new is None:
                continue
            if change.new.kind == "folder":
                if not self.at(change.path).is_dir() or self.at(change.path).is_symlink():
                    _remove(self.at(change.path))
                    self.at(change.path).mkdir()
                os.chmod(self.at(change.path), change.new.mode)
            else:
                self.write(change.path, change.new, read(change.new.digest))


def kind_of(status: os.stat_result) -> str:
    """Return the kind of a path as a workspace records it, or "other" for a pipe, a socket or a device."""
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "link" if stat.S_ISLNK(mode) else "other"


def state_of(at: Path, status: os.stat_result) -> WorkspaceFile | None:
    """Return the state of the file, folder or link at a path on disk; None for a pipe, a socket or a device."""
    kind, mode = kind_of(status), status.st_mode & PERMISSIONS
    if kind == "folder":
        return WorkspaceFile("folder", mode)
    if kind == "link":
        target = os.fsencode(os.readlink(at))
        return WorkspaceFile("link", 0, hashlib.sha256(target).hexdigest(), len(target))
    if kind != "file":
        return None
    with _readable(at, status) as file:
        return WorkspaceFile("file", mode, hashlib.file_digest(file, "sha256").hexdigest(), status.st_size)


def content_at(at: Path) -> bytes:
    """Return the content of a file, or the target of a link as written, as bytes."""
    status = os.lstat(at)
    if stat.S_ISLNK(status.st_mode):
        return os.fsencode(os.readlink(at))
    with _readable(at, status) as file:
        return file.read()


def shown_status(status: os.stat_result) -> str:
    """Format the parts of a file's status that show whether its content has changed."""
    return f"{version_of(status):x}"


@contextlib.contextmanager
def _readable(at: Path, status: os.stat_result) -> Generator[Any]:
    """Open one of this user's files for reading. If its mode denies that, the mode is changed until the block ends."""
    mode = stat.S_IMODE(status.st_mode)
    is_unreadable = not mode & stat.S_IRUSR and os.geteuid() != 0
    if is_unreadable:
        os.chmod(at, mode | stat.S_IRUSR)
    try:
        with open(at, "rb") as file:
            yield file
    finally:
        if is_unreadable:
            os.chmod(at, mode)


def _remove(at: Path) -> None:
    if at.is_dir() and not at.is_symlink():
        for folder, _, _ in os.walk(at):
            os.chmod(folder, 0o700)
        shutil.rmtree(at)
    else:
        at.unlink(missing_ok=True)


def _encode(frame: _Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(_LENGTH) + body


def _frames(index: Path) -> Iterator[_Frame]:
    """Yield the parts of an index, up to the first that can't be read. A process that died may have left one incomplete."""
    try:
        data = index.read_bytes()
    except OSError:
        return
    while len(data) >= _LENGTH:
        end = _LENGTH + int.from_bytes(data[:_LENGTH])
        body, data = data[_LENGTH:end], data[end:]
        try:
            yield msgspec.msgpack.decode(body, type=_Frame)
        except msgspec.MsgspecError:
            return
