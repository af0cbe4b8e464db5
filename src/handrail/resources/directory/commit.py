"""`Commit`: carrying out the steps of a manifest, and taking them back.

Whether a step was done is read off the commit's own folder, which nobody else writes to: a slot that
still holds what was to come has not been put. So a commit can be gone on with from any point, by
whichever process. What a step displaces is looked at once it is displaced, when nobody can reach it by
its path any more; if it is not what was expected, somebody changed it meanwhile, and it goes back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from handrail.errors import Conflict, FileError
from handrail.resources.directory.disk import Disk
from handrail.resources.directory.jail import Jail, refusal
from handrail.resources.directory.plan import EMPTY, Manifest, Step, digest, opposites, shown_version
from handrail.resources.directory.stored import version_of
from handrail.resources.paths import join, split

_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV}


class Unexpected(Exception):
    """What was displaced, or would be, is not what the step was decided on."""


class Commit:
    """One commit to one folder: where its slots are, and what is to be done with them."""

    def __init__(self, jail: Jail, disk: Disk, folder: Path, manifest: Manifest) -> None:
        self._jail = jail
        self._disk = disk
        self.folder = folder
        self.manifest = manifest

    def apply(self, *, synced: bool = False, lenient: bool = False) -> None:
        """Do every step, or none: `Conflict` names what somebody else changed, once all is as it was.

        With `synced` it outlives a power cut when this returns. With `lenient` a folder that was to
        go and has something in it stays.
        """
        done: list[Step] = []
        with self._folders() as folders:
            for step in self.manifest.steps:
                path = step.where
                try:
                    if self._do(step, folders):
                        done.append(step)
                except Unexpected:
                    if lenient and step.do == "take" and step.tree == EMPTY and self._is_filled(path):
                        continue
                    self._take_back(done, folders)
                    raise Conflict([path]) from None
                except OSError as error:
                    self._take_back(done, folders)
                    if error.errno in _GONE:
                        raise Conflict([path]) from None
                    raise error if isinstance(error, FileError) else refusal(path, error) from None
            if synced:
                folders.sync(self._disk)

    def revert(self) -> None:
        """Take everything back that was done, leaving what somebody changed since."""
        with self._folders() as folders:
            self._take_back([step for step in self.manifest.steps if self.is_done(step)], folders)

    def finish(self, *, synced: bool = False) -> tuple[str, ...]:
        """Do what is not done yet; what somebody else changed meanwhile stays theirs and is named."""
        left: list[str] = []
        with self._folders() as folders:
            for step in self.manifest.steps:
                if not self.is_done(step):
                    try:
                        self._do(step, folders)
                    except (Unexpected, OSError):
                        left.append(step.where)
            if synced:
                folders.sync(self._disk)
        return tuple(left)

    def is_done(self, step: Step) -> bool:
        """Whether a step was carried out, by what its slot holds."""
        if step.do == "mode":
            found = self._jail.look(step.where)
            return found is not None and stat.S_IMODE(found[0].st_mode) == step.mode
        slot = _identity_at(self.folder / step.slot)
        return bool(slot) if step.do == "take" else slot != step.after

    def is_begun(self) -> bool:
        """Whether any file was put or taken."""
        return any(self.is_done(step) for step in self.manifest.steps if step.do != "mode")

    @contextlib.contextmanager
    def _folders(self) -> Generator[Folders]:
        folders = Folders(self._jail, self.folder)
        try:
            yield folders
        finally:
            folders.close()

    def _take_back(self, done: Sequence[Step], folders: Folders) -> None:
        for step in opposites(done):
            with contextlib.suppress(Unexpected, OSError):  # somebody changed it since: it is theirs
                self._do(step, folders)

    def _do(self, step: Step, folders: Folders) -> bool:
        """Do one step. False: a folder that was to come is there already, which is as good."""
        path = step.where
        folder, name = split(path)
        there, slots = folders.open(folder), folders.slots
        if step.do == "mode":
            self._disk.chmod(there, name, step.mode)
        elif step.do == "take":
            self._disk.place(there, name, slots, step.slot)
            if not self._as_expected(step):
                self._disk.place(slots, step.slot, there, name)
                raise Unexpected
        elif step.before:
            self._disk.exchange(slots, step.slot, there, name)
            if not self._as_expected(step):
                self._disk.exchange(slots, step.slot, there, name)
                raise Unexpected
        else:
            try:
                self._disk.place(slots, step.slot, there, name)
            except FileExistsError:
                found = os.stat(name, dir_fd=there, follow_symlinks=False)
                if step.folder and stat.S_ISDIR(found.st_mode):
                    return False
                raise Unexpected from None
        return True

    def _is_filled(self, path: str) -> bool:
        return next(self._jail.scan(path), None) is not None

    def _as_expected(self, step: Step) -> bool:
        slot = self.folder / step.slot
        if _identity_at(slot) != step.before:
            return False
        return not step.tree or digest(members_of(slot)) == step.tree


class Folders:
    """The folders a commit works in, each opened once, in the jail."""

    def __init__(self, jail: Jail, slots: Path) -> None:
        self._jail = jail
        self._open: dict[str, int] = {}
        self.slots = os.open(slots, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open(self, folder: str) -> int:
        fd = self._open.get(folder)
        if fd is None:
            fd = self._open[folder] = self._jail.folder(folder, os.O_RDONLY)
        return fd

    def sync(self, disk: Disk) -> None:
        """A rename is one change of two folders, so that one of them synced is enough."""
        for fd in self._open.values():
            disk.sync_folder(fd)

    def close(self) -> None:
        for fd in (*self._open.values(), self.slots):
            os.close(fd)
        self._open.clear()


def members_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Everything in a folder of ours at any depth: paths from there, and their identities."""
    pending = [(folder, "")]
    while pending:
        here, prefix = pending.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                path = join(prefix, entry.name)
                yield path, shown_version(version_of(entry.stat(follow_symlinks=False)))
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), path))


def _identity_at(path: Path) -> str:
    try:
        return shown_version(version_of(os.lstat(path)))
    except FileNotFoundError:
        return ""
