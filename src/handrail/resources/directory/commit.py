"""`Commit`: applies the steps of a manifest, and reverts them.

A manifest is plain data, from which a restarted process can finish the commit. There are three kinds of step:

- *put* exchanges a slot in the commit's own folder with what is at the path. If nothing is there, it moves the slot
  to the path.
- *take* moves what is at the path into a slot.
- *change* changes the mode, owner, group and attributes of a folder.

A step is a single rename, or the change of one folder. It says what it expects to displace, and its opposite is a step too. So
reverting, continuing after a crash and undoing use the same mechanism.

The commit's own folder, which nobody else writes to, shows whether a step was done: a slot that still holds the new
content has not been put. So any process can continue a commit from any point. What a step displaces is checked
after the rename, when nobody can reach it by its path any more. If it is not what was expected, someone has changed
it, and the step is reverted.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from handrail.errors import Conflict, FileError
from handrail.records import CallKey
from handrail.resources.directory.content import Folder, identity, version_of
from handrail.resources.directory.disk import Disk
from handrail.resources.directory.jail import Jail, refusal
from handrail.resources.facts import Facts
from handrail.resources.layer import Node, Over
from handrail.resources.paths import ancestors, join, reserved_in, split


class Step(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One step of a commit, which changes one path."""

    do: Literal["put", "take", "change"]
    path: str
    """The path for display, in which bytes that are not UTF-8 are escaped as `\\xff`. Use `where` to access the file."""
    bytes: str = ""
    """The path in hexadecimal, if it is not UTF-8."""
    slot: str = ""
    """The slot's name in the commit's folder.

    Before the step, the slot holds the new content. After it, the slot holds the displaced content.
    """
    before: str = ""
    """The identity of the displaced content, or "" if nothing is displaced."""
    after: str = ""
    """The identity of the new content."""
    tree: str = ""
    """For a displaced folder, a digest of everything in it."""
    folder: bool = False
    """Whether the new content is a folder. If a folder is already at the path, the step does nothing."""
    facts: Facts | None = None
    """For *change*, the new mode, owner, group and attributes of the folder."""
    old_facts: Facts | None = None

    @property
    def where(self) -> str:
        """The path as it is spelled on disk."""
        return os.fsdecode(binascii.unhexlify(self.bytes)) if self.bytes else self.path

    def opposite(self) -> Step:
        """Return the step that reverts this one."""
        if self.do == "change":
            return msgspec.structs.replace(self, facts=self.old_facts, old_facts=self.facts)
        if self.do == "take":
            return Step(do="put", path=self.path, bytes=self.bytes, slot=self.slot, after=self.before)
        if self.before:
            back = msgspec.structs.replace(self, before=self.after, after=self.before, folder=False)
        else:
            back = Step(do="take", path=self.path, bytes=self.bytes, slot=self.slot, before=self.after)
        return msgspec.structs.replace(back, tree=EMPTY if self.folder else "")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One commit to one folder, as plain data that a journal can record."""

    call_id: str
    run_id: str = ""
    place: str = ""
    root: str
    """Where the root was when the commit was staged. It may have been moved since; `root_id` says which one it is."""
    root_id: str = ""
    staging: str
    folder: str
    """The folder that contains the slots, relative to the staging folder."""
    journal: str = ""
    """The id of the journal whose record decides whether the commit was made, or "" if there is no journal."""
    steps: tuple[Step, ...] = ()

    @property
    def key(self) -> CallKey:
        """The call that made the commit."""
        return CallKey(self.call_id, self.run_id, self.place, self.journal)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(step.where for step in self.steps)


class Change(msgspec.Struct, frozen=True):
    """One changed path of a fork: the new node and the node it replaces."""

    path: str
    node: Node
    base: Node


def step_at(path: str, **fields: Any) -> Step:
    """Create a step for a path, which need not be valid UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raw = os.fsencode(path)
        return Step(path=raw.decode(errors="backslashreplace"), bytes=raw.hex(), **fields)
    return Step(path=path, **fields)


def shown_version(version: int) -> str:
    """Format a version's identity for a manifest. Returns "" for version 0, which means that nothing is there."""
    return f"{identity(version):x}" if version else ""


def digest(members: Iterable[tuple[str, str]]) -> str:
    """Compute a digest of a folder's whole content from the relative paths and identities of its members."""
    found = hashlib.blake2b(digest_size=16)
    for path, version in sorted(members):
        found.update(os.fsencode(path) + b"\0" + version.encode() + b"\0")
    return found.hexdigest()


EMPTY = digest(())


def in_order(over: Over) -> Iterator[Change]:
    """Yield a fork's changes in the order in which to apply them.

    Removals come first, from the inside out, and then additions, from the outside in. Removing a folder removes
    everything in it, in one step.
    """
    folders = sorted(over, key=len)
    trees = {
        join(folder, name)
        for folder in folders
        for name, (node, base) in over[folder].items()
        if base.is_folder and not node.is_folder
    }
    for folder in reversed(folders):
        if folder in trees or any(path in trees for path in ancestors(folder)):
            continue
        for name, (node, base) in over[folder].items():
            if base.version and not node.version:
                yield Change(join(folder, name), node, base)
    for folder in folders:
        for name, (node, base) in over[folder].items():
            if node.version and not (node.is_folder and base.is_folder and not isinstance(node, Folder)):
                yield Change(join(folder, name), node, base)


def tree_digest(over: Over, path: str) -> str:
    """Return a digest of the content that a fork saw in a folder that it removes."""
    prefix = f"{path}/"
    return digest(
        (join(folder, name)[len(prefix) :], shown_version(base.version))
        for folder, changes in over.items()
        if folder == path or folder.startswith(prefix)
        for name, (_, base) in changes.items()
        if base.version
    )


def opposites(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps that revert the given ones, in the order in which to apply them."""
    return tuple(step.opposite() for step in reversed(steps))


_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV}


class Unexpected(Exception):
    """Raised if what a step displaces is not what the step expects."""


class Commit:
    """One commit to one folder: its slots and the steps that use them."""

    def __init__(self, jail: Jail, disk: Disk, folder: Path, manifest: Manifest) -> None:
        self._jail = jail
        self._disk = disk
        self.folder = folder
        self.manifest = manifest

    def apply(self, *, synced: bool = False, lenient: bool = False) -> None:
        """Do every step or none.

        If someone else has changed a path, restores everything and raises `Conflict` with that path. With `synced`,
        the result survives a power cut. With `lenient`, a folder that should be removed but is not empty is kept.
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
        """Revert every step that was done. Paths that someone has changed since are left as they are."""
        with self._folders() as folders:
            self._take_back([step for step in self.manifest.steps if self.is_done(step)], folders)

    def finish(self, *, synced: bool = False) -> tuple[str, ...]:
        """Do the remaining steps. Returns the paths whose steps failed, which are left as they are.

        A step fails if someone else has changed its path, or if the disk reports an error.
        """
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
        """Return whether a step was done, judging by the slot's content or the folder's facts."""
        if step.do == "change":
            facts = self._jail.facts(step.where)
            return facts is not None and facts != step.old_facts
        slot = _identity_at(self.folder / step.slot)
        return bool(slot) if step.do == "take" else slot != step.after

    def is_begun(self) -> bool:
        """Return whether any *put* or *take* step was done."""
        return any(self.is_done(step) for step in self.manifest.steps if step.do != "change")

    @contextlib.contextmanager
    def _folders(self) -> Generator[Folders]:
        folders = Folders(self._jail, self.folder)
        try:
            yield folders
        finally:
            folders.close()

    def _take_back(self, done: Sequence[Step], folders: Folders) -> None:
        for step in opposites(done):
            with contextlib.suppress(
                Unexpected, OSError
            ):  # someone may have changed the path since, so it is left alone
                self._do(step, folders)

    def _do(self, step: Step, folders: Folders) -> bool:
        """Do one step. Returns False if there was nothing to do, because the folder that it creates already exists."""
        path = step.where
        if reserved_in(path):
            raise Unexpected  # no call makes such a step, so someone has changed the manifest
        folder, name = split(path)
        there, slots = folders.open(folder), folders.slots
        if step.do == "change":
            if step.facts is not None:
                self._disk.change_folder(there, name, step.facts)
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
    """The folders that a commit changes. Each is opened once, through the jail."""

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
        """Sync every folder that was opened.

        A rename changes two folders atomically, so the slots' folder need not be synced.
        """
        for fd in self._open.values():
            disk.sync_folder(fd)

    def close(self) -> None:
        for fd in (*self._open.values(), self.slots):
            os.close(fd)
        self._open.clear()


def members_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the relative path and the identity of everything in a folder, at any depth."""
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
