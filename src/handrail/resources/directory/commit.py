"""`Commit`: applies the steps of a manifest, and reverts them.

A manifest is plain data, from which a restarted process can finish the commit. There are three kinds of step:

- *put* exchanges a slot in the commit's own folder with what is at the path. If nothing is there, it moves the slot
  to the path.
- *take* moves what is at the path into a slot.
- *change* changes the mode, owner, group and attributes of a folder.

A step is a single rename, or the change of one folder. It says what it expects to displace, and its opposite is a step too. So
reverting, continuing after a crash and undoing use the same mechanism.

The commit's own folder, which nobody else writes to, shows whether a step was done: a *put* step whose slot still holds
the new content was not. So any process can continue a commit from any point. All renames of a commit are made under the
lock of the root's `ClaimTable`, so no other commit comes between them. People and other programs don't take that lock. So what a
step displaces is checked before the rename, and again afterwards, when nobody can reach it by its path any more. If it is
not what the step expects, someone has changed it. Then it is put back, unless they have put something newer there
meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import signal
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from handrail.concurrency.claims import ADD, AT_ONCE, USE, WRITE, Pace, Stop, never
from handrail.errors import Conflict, FileError
from handrail.journal.records import CallKey
from handrail.resources.directory.claim_table import ClaimTable, FolderClaim
from handrail.resources.directory.content import identity, version_of
from handrail.resources.directory.disk import Disk, Jail, as_file_error, open_beneath
from handrail.resources.directory.history import Sizes
from handrail.resources.facts import Facts
from handrail.resources.paths import ancestors, join, on_disk, reserved_in, spelled, split


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


class Unexpected(Exception):
    """Raised if a path does not hold the content that a step expects there."""


class Busy(Unexpected):
    """Raised if a program is writing to the file that a step displaces."""


_SET_SIGNAL = 10
"""Number of the `F_SETSIG` command of `fcntl`, which Python does not name."""


@contextlib.contextmanager
def unwritten(folder: int, name: str, found: os.stat_result) -> Generator[Callable[[], bool]]:
    """Check that no program has a file open for writing, and yield a function that returns whether this is still so.

    `found` is the file's status. Raises `Busy` if a program has the file open for writing. Some files count as unwritten
    without a check: files that this process can't open or lease, such as those of other users; files on a disk without
    leases; pipes and other special files.
    """
    fd = -1
    try:
        with contextlib.suppress(OSError):  # somebody has replaced the file, or this process may not read it
            if stat.S_ISREG(found.st_mode):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                # If somebody opens a leased file, this process gets a signal. The default signal would end the process.
                fcntl.fcntl(fd, _SET_SIGNAL, signal.SIGURG)
        if fd >= 0 and not _has_no_writer(fd):
            raise Busy
        yield lambda: fd < 0 or _has_no_writer(fd)
    finally:
        if fd >= 0:
            os.close(fd)


def _has_no_writer(fd: int) -> bool:
    """Return False if somebody has a file open for writing, and True if nobody has or the kernel can't tell.

    If a program kept writing to a file after a commit had displaced it, those writes would be lost. The kernel knows the writers: it
    grants a lease only for a file that nobody has open for writing.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno != errno.EAGAIN  # any other error means that this process can't get a lease at all
    return True


class Step(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One step of a commit, which changes one path."""

    do: Literal["put", "take", "change"]
    path: str
    """The path as Handrail spells it (see `spelled`), with escapes such as `\\xff`."""
    slot: str = ""
    """The slot's name in the commit's folder; "" for *change*.

    Before *put*, the slot holds the new content. After *put* or *take*, it holds the displaced content, if any.
    """
    before: str = ""
    """The identity of the displaced content, or "" if nothing is displaced."""
    after: str = ""
    """The identity of the new content; "" for *take* and *change*."""
    tree: str = ""
    """For a displaced folder, a digest of everything in it; otherwise ""."""
    folder: bool = False
    """Whether the new content is a folder. If such a step displaces nothing and a folder is at the path already, it does nothing."""
    facts: Facts | None = None
    """For *change*, the new mode, owner, group and attributes of the folder; otherwise None."""
    old_facts: Facts | None = None

    def opposite(self) -> Step:
        """Return the step that reverts this one."""
        if self.do == "change":
            return msgspec.structs.replace(self, facts=self.old_facts, old_facts=self.facts)
        if self.do == "take":
            return Step(do="put", path=self.path, slot=self.slot, after=self.before)
        if self.before:
            back = msgspec.structs.replace(self, before=self.after, after=self.before, folder=False)
        else:
            back = Step(do="take", path=self.path, slot=self.slot, before=self.after)
        return msgspec.structs.replace(back, tree=EMPTY if self.folder else "")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One commit to one folder, as plain data that a journal can record."""

    call_id: str
    run_id: str = ""
    place: str = ""
    root: str
    """The path of the root when the commit was staged. The root may have been moved since; `root_id` identifies it."""
    root_id: str = ""
    staging: str
    folder: str
    """The folder that contains the slots, relative to `at-work` in the staging folder."""
    journal: str = ""
    """The id of the journal whose record decides whether the commit was made, or "" if there is no journal."""
    steps: tuple[Step, ...] = ()

    @property
    def key(self) -> CallKey:
        """The key of the call that made the commit."""
        return CallKey(self.call_id, self.run_id, self.place, self.journal)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(step.path for step in self.steps)

    def places(self) -> dict[str, int]:
        """Return what the commit changes, in the form of a claim."""
        places: dict[str, int] = {}
        for step in self.steps:
            folder, _ = split(step.path)
            places[step.path] = places.get(step.path, 0) | (ADD if step.folder and not step.before else WRITE)
            places[f"{folder}/"] = places.get(f"{folder}/", 0) | ADD
            for above in ancestors(step.path):
                places[above] = places.get(above, 0) | USE
        return places


def shown_version(version: int) -> str:
    """Format a version's identity for a manifest. Returns "" for version 0, which means that nothing is there."""
    return f"{identity(version):x}" if version else ""


def folder_digest(members: Iterable[tuple[str, str]]) -> str:
    """Compute a digest of a folder's whole content from the relative paths and identities of its members."""
    found = hashlib.blake2b(digest_size=16)
    for path, version in sorted(members):
        found.update(os.fsencode(path) + b"\0" + version.encode() + b"\0")
    return found.hexdigest()


EMPTY = folder_digest(())


def opposites(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps that revert the given ones, in the order in which to apply them."""
    return tuple(step.opposite() for step in reversed(steps))


_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV}


class Commit:
    """One commit to one folder: its slots and the steps that use them."""

    def __init__(
        self,
        jail: Jail,
        disk: Disk,
        folder: Path,
        manifest: Manifest,
        table: ClaimTable,
        manifest_size: int | None = None,
    ) -> None:
        self._jail = jail
        self._disk = disk
        self._table = table
        self.folder = folder
        self.manifest = manifest
        self.is_stuck = False
        """Whether some steps could not be reverted, so that the slots may hold content that is nowhere else."""
        self.sizes = None if manifest_size is None else Sizes(own=manifest_size)
        """The bytes in the commit's folder once it is applied, or None if the folder must be listed to count them."""
        self._claim: FolderClaim | None = None

    @property
    def claim(self) -> FolderClaim:
        """What the commit depends on and changes. A call that makes it sets this, with what it read."""
        if self._claim is None:
            id = "/".join(self.folder.parts[-2:])
            self._claim = FolderClaim(id, self.manifest.places(), self.manifest.journal)
        return self._claim

    @claim.setter
    def claim(self, claim: FolderClaim) -> None:
        self._claim = claim

    def enter(self, stop: Stop = never) -> None:
        """Claim what the commit depends on and changes, before a journal records it. Raises the errors of `ClaimTable.enter`."""
        if not self.folder.exists():
            raise self._deleted()
        self._table.enter(self.claim, keep=True, stop=stop)

    def apply(self, *, synced: bool = False, lenient: bool = False, pace: Pace = AT_ONCE) -> None:
        """Do every step or none.

        If someone else has changed a path, restores everything and raises `Conflict` with that path. Raises
        `FileError` if another program is writing to a path, if the folder's lock is not free in time, if the staged changes
        were deleted, or if the disk reports an error. The error names the paths that could not be restored, if any. With
        `synced`, the result survives a power cut. With `lenient`, a folder that should be removed but is not empty is kept.
        Raises `GaveUp`, having changed nothing, if `pace` says that it must stop before the first change.
        """
        with self._folders() as folders:
            with self._table.held(self.claim, pace.stop):
                self._do_all(folders, lenient, pace)
            if synced:
                self._sync_all(folders)

    def _do_all(self, folders: Folders, lenient: bool, pace: Pace) -> None:
        path = "."
        try:
            if changed := self._changed(folders, pace):
                path = changed
                raise Unexpected
            for step in pace.to_its_end().each(self.manifest.steps, "applying files"):
                path = step.path
                try:
                    self._do(step, folders)
                except Unexpected:
                    if not (lenient and step.do == "take" and step.tree == EMPTY and self._is_filled(path)):
                        raise
        except BaseException as error:
            self._fail(path, error, self._take_back(folders))

    def _changed(self, folders: Folders, pace: Pace) -> str:
        """Return the first path whose content is not what its step expects to displace, or "" if there is no such path.

        The first step is left out, because doing it includes this check. A call that read files between the renames of
        another commit expects some of them in their old state. Its commit must fail before its first rename. If it
        began to rename files and its process died, the commit could not be finished.
        """
        for step in pace.each(self.manifest.steps[1:]):
            if step.do == "change" or step.tree == EMPTY or (step.folder and not step.before):
                continue  # a *change* displaces nothing, and a folder may already exist or be kept because it is not empty
            folder, name = split(step.path)
            with contextlib.suppress(OSError):  # the folder may not exist until an earlier step creates it
                if _identity_in(folders.open(folder), on_disk(name)) != step.before:
                    return step.path
        return ""

    def _count(self, step: Step, displaced: os.stat_result | None) -> None:
        """Add what a step displaced to `sizes`. If that is a folder or unknown, `sizes` becomes None, because its bytes are not known."""
        if displaced is None or step.tree:
            self.sizes = None
        elif self.sizes is not None:
            self.sizes.add(displaced)

    def _sync_all(self, folders: Folders) -> None:
        """Sync the folders that were changed. If that fails, reverts the steps and raises an error, as `_fail` does."""
        try:
            folders.sync(self._disk)
        except BaseException as error:
            self.is_stuck = True  # until the steps are reverted: getting the lock again may fail
            with self._alone():
                stuck = self._take_back(folders)
            self.is_stuck = False
            self._fail(".", error, stuck)

    def _fail(self, path: str, error: BaseException, stuck: list[str]) -> NoReturn:
        """Raise the error for a commit that failed at `path`. `stuck` lists the paths that could not be restored."""
        if stuck:
            self.is_stuck = True
            problem = f"the changes could not be completed ({_reason(error)}), and what was there before could not be restored in {', '.join(stuck)}. Undo this call"
            raise FileError(stuck[0], problem) from error
        if isinstance(error, Busy):
            problem = "another program is writing to this file. Try again when that program has closed it"
            raise FileError(path, problem) from None
        if isinstance(error, Unexpected) or (isinstance(error, OSError) and error.errno in _GONE):
            raise Conflict([path]) from None
        if isinstance(error, OSError) and not isinstance(error, FileError):
            raise as_file_error(path, error) from None
        raise error

    def revert(self) -> None:
        """Revert every step that was done. Paths that someone else has changed after the step are left as they are."""
        with self._folders() as folders, self._alone():
            self.is_stuck = bool(self._take_back(folders))

    def finish(self, *, synced: bool = False, atomic: bool = False) -> tuple[str, ...]:
        """Do the remaining steps. Returns the paths whose steps failed. They are left as they are.

        A step fails if someone else has changed its path, or if the disk reports an error. With `atomic`, all other
        steps are then reverted. Otherwise they stay done. With `synced`, the result survives a power cut.
        """
        with self._folders() as folders:
            with self._alone():
                left = self._finish(folders, atomic)
            if synced:
                folders.sync(self._disk)
        return left

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock of the table, whatever others have claimed.

        A recorded commit has kept its claim, unless it has renamed all its files. Then others may have claimed the same places
        since, and there is nothing left to do, or only what this commit itself has changed is put back.
        """
        return self._table.held(FolderClaim(self.claim.id, self.manifest.places(), is_forced=True))

    def settle_interrupted(self, *, atomic: bool) -> bool:
        """Finish a commit whose process died while it held the lock, if a *put* or *take* step was done. The caller holds the lock.

        With `atomic`, a commit that can't be finished is reverted. Returns whether a step was done.
        """
        if not self.is_begun():
            return False
        with self._folders() as folders:
            self._finish(folders, atomic)
        return True

    def _finish(self, folders: Folders, atomic: bool) -> tuple[str, ...]:
        left = self._do_rest(folders)
        if left and atomic:
            self.is_stuck = bool(self._take_back(folders))
        return left

    def _do_rest(self, folders: Folders) -> tuple[str, ...]:
        left: list[str] = []
        for step in self.manifest.steps:
            try:
                if not self.is_done(step):
                    self._do(step, folders)
                elif step.do != "change" and not self._was_checked(step, folders):
                    left.append(step.path)
            except (Unexpected, OSError):
                left.append(step.path)
        return tuple(left)

    def _was_checked(self, step: Step, folders: Folders) -> bool:
        """Return whether a step that was done displaced what it expected.

        If it displaced something else, and the process died before it could check, the displaced content is put back,
        unless somebody has put something newer at the path.
        """
        displaced = _identity_in(folders.slots, step.slot)
        if displaced == step.before or not displaced:
            return True
        folder, name = split(step.path)
        name, there = on_disk(name), folders.open(folder)
        now = _identity_in(there, name)
        if step.do == "take" and not now:
            self._disk.place(folders.slots, step.slot, there, name)
        elif step.do == "put" and now == step.after:
            self._exchange_back(step, there, name, folders.slots)
        return False

    def is_done(self, step: Step) -> bool:
        """Return whether a step was done, judging by the slot's content or the folder's facts."""
        if step.do == "change":
            facts = self._jail.facts(step.path)
            return facts is not None and facts != step.old_facts
        slot = _identity_at(self.folder / step.slot)
        return bool(slot) if step.do == "take" else slot != step.after

    def is_begun(self) -> bool:
        """Return whether any *put* or *take* step was done."""
        return any(self.is_done(step) for step in self.manifest.steps if step.do != "change")

    def is_touched(self) -> bool:
        """Return whether any step was done. A *change* also counts as done if another program has changed the folder's facts."""
        return any(map(self.is_done, self.manifest.steps))

    @contextlib.contextmanager
    def _folders(self) -> Generator[Folders]:
        try:
            folders = Folders(self._jail, self.folder)
        except FileNotFoundError:
            raise self._deleted() from None
        try:
            yield folders
        finally:
            folders.close()

    def _deleted(self) -> FileError:
        problem = "the staged changes were deleted, so they can't be applied or reverted. Check the file, then try again"
        return FileError(self.manifest.paths[0], problem)

    def _take_back(self, folders: Folders) -> list[str]:
        """Revert the steps that were done. Returns the paths that could not be restored.

        A path that someone else has changed after the step is left alone, and is not returned. Nor is a folder whose facts
        could not be restored.
        """
        stuck: list[str] = []
        self.sizes = None
        for step in reversed(self.manifest.steps):
            with contextlib.suppress(Unexpected, OSError):
                if self.is_done(step):
                    self._do(step.opposite(), folders)
            if step.do != "change" and self._is_left(step):
                stuck.append(step.path)
        return sorted(stuck)

    def _is_left(self, step: Step) -> bool:
        """Return whether a step has not been reverted: its path still has the content of a *put*, or still lacks the content of a *take*."""
        found = self._jail.look(step.path)
        if step.do == "put":
            return found is not None and shown_version(version_of(found[0])) == step.after
        return found is None and bool(_identity_at(self.folder / step.slot))

    def _do(self, step: Step, folders: Folders) -> None:
        """Do one step. Does nothing if the folder that it creates already exists.

        Raises `Unexpected` if the disk does not have what the step expects, and its subclass `Busy` if a program is
        writing to the file.
        """
        path = step.path
        if reserved_in(path) or self._jail.is_installed(path, around=bool(step.before)):
            raise Unexpected  # no call makes such a step, so someone has changed the manifest, or another installation made it
        folder, name = split(path)
        name = on_disk(name)
        there, slots = folders.open(folder), folders.slots
        if step.do == "change":
            if step.facts is not None:
                self._disk.change_folder(there, name, step.facts)
        elif not step.before:
            self._create(step, there, name, slots)
        else:
            found = _status_in(there, name)
            if found is None or not _is_expected(step, there, name, found):
                raise Unexpected
            if step.do == "take":
                self._count(step, self._take(step, there, name, slots))
            else:
                self._count(step, self._exchange(step, there, name, slots, found))

    def _take(self, step: Step, there: int, name: str, slots: int) -> os.stat_result | None:
        """Move what is at a path into the slot, and return its status.

        Raises `Unexpected`, and moves it back, if it is not what the step expects.
        """
        self._disk.place(there, name, slots, step.slot)
        # The content may have been changed between the check and the rename. Now nobody can reach it by its path.
        displaced = _status_in(slots, step.slot)
        if not _is_expected(step, slots, step.slot, displaced):
            self._disk.place(slots, step.slot, there, name)
            raise Unexpected
        return displaced

    def _exchange(
        self, step: Step, there: int, name: str, slots: int, found: os.stat_result
    ) -> os.stat_result | None:
        """Exchange the slot with what is at a path, and return the status of what was displaced.

        Returns None if somebody has just deleted the staging folder. Raises `Busy` if another program is writing to the
        path, and `Unexpected` if the path does not hold what the step expects. In both cases, anything displaced is put back.
        """
        with unwritten(there, name, found) as is_unwritten:
            self._disk.exchange(slots, step.slot, there, name)
            displaced = _status_in(slots, step.slot)
            if displaced is None:
                return None  # somebody deleted the staging folder just now, so there is nothing to put back
            busy = not is_unwritten()
            if busy or not _is_expected(step, slots, step.slot, displaced):
                self._exchange_back(step, there, name, slots)
                raise Busy if busy else Unexpected
        return displaced

    def _create(self, step: Step, there: int, name: str, slots: int) -> None:
        try:
            self._disk.place(slots, step.slot, there, name)
        except FileExistsError:
            found = os.stat(name, dir_fd=there, follow_symlinks=False)
            if not (step.folder and stat.S_ISDIR(found.st_mode)):
                raise Unexpected from None

    def _exchange_back(self, step: Step, there: int, name: str, slots: int) -> None:
        """Put back what someone else had at a path, unless they have put something newer there meanwhile."""
        ours = step.after
        while True:
            theirs = _identity_in(slots, step.slot)
            try:
                self._disk.exchange(slots, step.slot, there, name)
            except FileNotFoundError:  # somebody has deleted what this step had put there
                try:
                    self._disk.place(slots, step.slot, there, name)
                except FileExistsError:
                    continue
                return
            if _identity_in(slots, step.slot) == ours:
                return
            ours = theirs  # the slot now has what they saved meanwhile, which is newer than what was just put back

    def _is_filled(self, path: str) -> bool:
        return next(self._jail.scan(path), None) is not None


def _is_expected(step: Step, folder: int, name: str, found: os.stat_result | None) -> bool:
    """Return whether a name in a folder holds what a step expects to displace. `found` is the name's status, if any."""
    if _identity_of(found) != step.before:
        return False
    return not step.tree or folder_digest(members_of(folder, name)) == step.tree


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def members_of(folder: int, name: str) -> Iterator[tuple[str, str]]:
    """Yield the relative path and the identity of everything in a folder, at any depth. `folder` is a descriptor of its parent."""
    top = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        pending = [""]
        while pending:
            prefix = pending.pop()
            here = open_beneath(top, prefix, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with os.scandir(here) as entries:
                    for entry in entries:
                        path = join(prefix, spelled(entry.name))
                        yield path, shown_version(version_of(entry.stat(follow_symlinks=False)))
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(path)
            finally:
                os.close(here)
    finally:
        os.close(top)


def _identity_at(path: Path) -> str:
    try:
        return shown_version(version_of(os.lstat(path)))
    except FileNotFoundError:
        return ""


def _identity_in(folder: int, name: str) -> str:
    return _identity_of(_status_in(folder, name))


def _identity_of(found: os.stat_result | None) -> str:
    return "" if found is None else shown_version(version_of(found))


def _status_in(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
