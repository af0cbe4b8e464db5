"""`Area`: the staging folder of a root, which holds pending commits and what earlier commits displaced.

    .<name>.handrail/
        identity               which root this folder belongs to
        at-work/<process>/     the forks and commits of one process, which holds a lock on its folder
        done/<when>-<call>-…/  what one of the most recent commits displaced, with its manifest
        claims                 which commits are under way, and which were made lately

The first write or command creates the staging folder, so a process that only reads files never creates one.

A process finishes or reverts the commits that it finds in a staging folder. So each manifest carries a keyed MAC.
Without the key, nobody can plant a commit that a process would carry out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec

from handrail.clock import Clock
from handrail.concurrency.claims import SLICE
from handrail.concurrency.threads import is_on_loop
from handrail.errors import Conflict, FileError, UndoRefused, UnfinishedCommit
from handrail.ids import random_id
from handrail.journal.digest import folder_key
from handrail.journal.records import CallKey
from handrail.resources.directory.claim_table import ClaimRecord, ClaimTable
from handrail.resources.directory.commit import Commit, Manifest, Step, opposites, shown_version
from handrail.resources.directory.content import version_of
from handrail.resources.directory.disk import Disk, Jail, as_file_error
from handrail.resources.directory.history import History, call_digest
from handrail.resources.directory.roots import (
    IDENTITY,
    belongs,
    claim,
    enter_root,
    find_staging,
    network_type,
    read_identity,
    refuse_case_insensitive,
    reported,
    status_of,
)
from handrail.resources.paths import ancestors

log = logging.getLogger("handrail.files")

MANIFEST = "manifest"


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """An encoded manifest with its MAC."""

    mac: bytes
    body: bytes

    def is_genuine(self) -> bool:
        """Return whether this user's Handrail signed it."""
        return hmac.compare_digest(self.mac, _mac(self.body))


def sign(manifest: Manifest) -> bytes:
    """Encode a manifest, with a signature."""
    body = msgspec.msgpack.encode(manifest)
    return msgspec.msgpack.encode(Signed(_mac(body), body))


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest | None:
    """Read a commit's manifest. Returns None if it is missing, incomplete, or not signed with this user's key."""
    signed = _read(folder, name)
    if signed is None:
        return None
    if not signed.is_genuine():
        log.warning(
            "the commit in %s was not signed by this user's Handrail, so it is not carried out. Remove it if nobody "
            "needs it",
            folder,
        )
        return None
    return msgspec.msgpack.decode(signed.body, type=Manifest)


def is_foreign(folder: Path) -> bool:
    """Return whether a folder has a manifest that was not signed with this user's key."""
    signed = _read(folder, MANIFEST)
    return signed is not None and not signed.is_genuine()


def _mac(body: bytes) -> bytes:
    return hashlib.blake2b(body, key=folder_key(), digest_size=32, person=b"handrail commit").digest()


def _read(folder: Path, name: str) -> Signed | None:
    try:
        return msgspec.msgpack.decode((folder / name).read_bytes(), type=Signed)
    except msgspec.ValidationError:  # something other than a signed manifest
        return Signed(b"", b"")
    except (OSError, msgspec.DecodeError):
        return None


_COMMIT, _UNDO, _GONE = "commit", "undo", "gone"
_READY = 8
_TRIES = 8
"""How many times to try to create a process's folder. Another process may mistake it for that of a dead process, and remove it."""


class Area:
    """One process's part of a root's staging folder."""

    def __init__(
        self, jail: Jail, disk: Disk, folder: Path, clock: Clock, keep: tuple[int, int], *, fixed: bool = True
    ) -> None:
        self.jail = jail
        self.disk = disk
        self._wanted = folder
        self._folder = folder if fixed else None
        self._clock = clock
        self._keep = keep
        self.table = ClaimTable(jail, disk, self)
        self._guard = threading.RLock()
        """Held while the folders of this process are made and given away, but not while files are written."""
        self._lock = -1
        self._root_lock: int | None = None
        self._is_entered = False
        self._process = 0
        self._mine: Path | None = None
        self.root_id = ""
        """The root's id, or "" until it is known."""
        self._numbers = count()
        self._not_kept: list[Commit] = []
        self._synced = False
        self._ready: dict[str, list[Path]] = {}
        self._removals: list[threading.Thread] = []
        """The threads that remove large folders."""
        self._spare: Path | None = None
        """An empty folder to reuse for the next commit, because creating and removing folders is slow; None if there is none."""

    # --- the folder -------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The staging folder. Unless it is fixed, it is found by the identity of the root."""
        if self._folder is None:
            self._folder = find_staging(status_of(self.jail.fd), self._wanted)
        return self._folder

    @property
    def expected(self) -> Path:
        """Where the staging folder is, as far as is known without searching for it."""
        return self._folder or self._wanted

    def at(self, folder: Path) -> Area:
        """Return the area of the same root with this staging folder, which may be this area itself."""
        return self if folder == self.folder else Area(self.jail, self.disk, folder, self._clock, self._keep)

    @cached_property
    def history(self) -> History:
        """The commits that can be undone."""
        return History(self.folder / "done", self.disk, self._clock, *self._keep)

    def is_own(self) -> bool:
        """Return whether the staging folder exists and belongs to this root. If so, sets `root_id`."""
        found = read_identity(self.folder)
        if found is None or not belongs(found, self.folder, status_of(self.jail.fd)):
            return False
        self.root_id = found.id
        return True

    @property
    def mine(self) -> Path:
        """The folder of this process, created on first use. A forked process gets its own folder."""
        if self._mine is None or self._process != os.getpid():
            with self._guard:
                if self._mine is None or self._process != os.getpid():
                    self.abandon()
                    self._mine, self._process = self._make(), os.getpid()
                return self._mine
        return self._mine

    def enter_root(self) -> None:
        """Note that this process uses the root. Raises `FileError` if a root that overlaps with it is in use."""
        with self._guard:
            if not self._is_entered:
                self._root_lock = enter_root(self.jail.root, self.jail.fd)
                self._is_entered = True
                if shared := network_type(self.jail.fd):
                    log.warning(
                        "%s is on a network filesystem (%s). Calls are isolated from those of this machine only: for several "
                        "machines, use a Workspace",
                        self.jail.root,
                        shared,
                    )

    def abandon(self) -> None:
        """Stop using this process's folder, for example if somebody deleted it or if it belongs to a parent process."""
        if self._root_lock is not None:
            os.close(self._root_lock)
        self._root_lock, self._is_entered = None, False
        if self._lock >= 0:
            os.close(self._lock)
        self._lock, self._mine, self._synced = -1, None, False
        self.table.close()
        self._not_kept.clear()
        self._ready.clear()
        self._spare = None

    def _make(self) -> Path:
        root = self.jail.root
        try:
            if os.statvfs(root).f_flag & os.ST_RDONLY or not os.access(root, os.W_OK | os.X_OK):
                raise FileError(".", f"{str(root)!r} is read-only. Make it writable, or use another folder")
            mine = self._make_part()
        except OSError as error:
            if isinstance(error, FileError):
                raise
            why = error.strerror or str(error)
            raise FileError(
                ".", self._with_hint(f"changes can't be staged in {str(self.folder)!r} ({why})")
            ) from None
        try:
            if status_of(self._lock).mount != status_of(self.jail.fd).mount:
                problem = f"{str(self.folder)!r} is on a different disk from {str(root)!r}"
                raise FileError(".", self._with_hint(problem))
            refuse_case_insensitive(mine, root)
            self.root_id = claim(self.folder, root, self.jail.fd)
            self.enter_root()
        except BaseException:
            self.abandon()
            os.rmdir(mine)
            raise
        self._sweep(mine)
        return mine

    def _make_part(self) -> Path:
        """Create and lock a folder for this process.

        Before the folder is locked, a different process may mistake it for the folder of a dead process, and remove it. In
        that case, a new one is created. Raises `FileError` if this happens too often.
        """
        for _ in range(_TRIES):
            for folder in (self.folder, self.folder / "at-work", self.folder / "done"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            mine = self.folder / "at-work" / random_id()
            with contextlib.suppress(FileNotFoundError):
                os.mkdir(mine, 0o700)
                lock = os.open(mine, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if os.path.samestat(os.stat(mine), os.fstat(lock)):
                        self._lock, lock = lock, -1
                        return mine
                finally:
                    if lock >= 0:
                        os.close(lock)
        raise FileError(".", self._with_hint(f"somebody keeps deleting {str(self.folder)!r}"))

    def _with_hint(self, problem: str) -> str:
        return f"{problem}. Pass staging= with a writable folder on the same disk"

    def _sweep(self, mine: Path) -> None:
        """Settle the undos of dead processes, and their commits that belong to no journal. Then remove these processes' folders.

        A folder that may still be needed is kept (see `forget_part`).
        """
        for other, lock in self.abandoned(mine):
            try:
                with reported(other):
                    self._settle_part(other)
            finally:
                os.close(lock)

    @contextlib.contextmanager
    def unused(self, part: str) -> Generator[bool]:
        """Lock a process's folder. Yields whether no other live process uses it; True if it can't be opened."""
        try:
            lock = os.open(self.folder / "at-work" / part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield True
            return
        try:
            mine = self._lock >= 0 and os.path.samestat(os.fstat(lock), os.fstat(self._lock))
            if not mine:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(lock)

    def abandoned(self, mine: Path | None = None) -> Iterator[tuple[Path, int]]:
        """Yield the folder of each dead process, with the descriptor of a lock on it, which the caller must close."""
        at_work = self.folder / "at-work"
        for other in sorted(at_work.iterdir()) if at_work.is_dir() else ():
            if other in (mine, self._mine):
                continue
            try:
                lock = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.lstat(other)
            except OSError:  # a live process uses it, or another process has just removed it
                os.close(lock)
                continue
            yield other, lock

    def begun(self, part: Path, journal: str) -> Iterator[Commit]:
        """Yield the commits in a process's folder that belong to this journal.

        If `journal` is empty, yields undos and the commits that belong to no journal. An undo or a journal's commit whose
        manifest can't be used is yielded with an empty one.
        """
        for folder in sorted(part.iterdir()):
            name = folder.name
            if name.startswith(f"{_COMMIT}-{journal}-" if journal else (_COMMIT, _UNDO)) and (
                journal or not name.startswith(f"{_COMMIT}-")
            ):
                manifest = read_manifest(
                    folder, f"{_UNDO}-{part.name}" if name.startswith(_UNDO) else MANIFEST
                )
                if manifest is None and journal:
                    where = f"{part.name}/{folder.name}"
                    manifest = Manifest(call_id="", root="", staging="", folder=where, journal=journal)
                if manifest is None and name.startswith(_UNDO):
                    manifest = Manifest(call_id="", root="", staging="", folder="")
                if manifest is not None:
                    yield self.commit(folder, manifest)

    def commit(self, folder: Path, manifest: Manifest, manifest_size: int | None = None) -> Commit:
        """Return the commit whose slots are in this folder. For a new commit, `manifest_size` is the size of its manifest."""
        return Commit(self.jail, self.disk, folder, manifest, self.table, manifest_size)

    def settle_interrupted(self, folder: Path) -> bool:
        """Settle the commit that a process was applying when it died. Returns False if it had changed nothing."""
        undo = folder.name.startswith(_UNDO)
        manifest = read_manifest(folder, f"{_UNDO}-{folder.parent.name}" if undo else MANIFEST)
        if manifest is not None:
            with reported(folder):
                return self.commit(folder, manifest).settle_interrupted(atomic=not (undo or manifest.journal))
        return False

    def standing_of(self, id: str) -> Literal["live", "dead", "gone"]:
        """Return whether the process of a commit is alive, or else whether the commit's folder is still there."""
        if not os.path.lexists(self.folder / "at-work" / id):
            return "gone"
        part = id.partition("/")[0]
        if self._mine is not None and part == self._mine.name:
            return "live"
        with self.unused(part) as unused:
            return "dead" if unused else "live"

    def left_claims(self) -> Iterator[ClaimRecord]:
        """Yield the claims of the commits that dead processes left behind and that a journal may have recorded."""
        for part, lock in self.abandoned():
            try:
                for folder in part.glob(f"{_COMMIT}-*"):
                    manifest = read_manifest(folder)
                    if manifest is not None:
                        yield ClaimRecord(
                            "claim", f"{part.name}/{folder.name}", manifest.journal, manifest.places()
                        )
            finally:
                os.close(lock)

    def unfinished(self, record: ClaimRecord, place: str) -> UnfinishedCommit:
        """Return the error for a place that a dead process may still have to change."""
        manifest = read_manifest(self.folder / "at-work" / record.id)
        run_id, call_id = ("", "") if manifest is None else (manifest.run_id, manifest.call_id)
        return UnfinishedCommit(place, record.journal, run_id, call_id)

    def settle(self, commit: Commit) -> tuple[str, ...]:
        """Finish an unrecorded commit if a *put* or *take* step was done, and discard it otherwise.

        A commit that can't be finished is reverted. An undo that was not begun, or can't be finished, is moved back into
        the history. Returns the paths whose steps failed. They are left as they are.
        """
        is_undo = commit.folder.name.startswith(_UNDO)
        begun = commit.is_begun()
        left = commit.finish(atomic=not is_undo) if begun else ()
        if is_undo and (left or not begun):
            self._give_back(commit.folder)
        elif left:
            self.discard(commit)
        elif is_undo or not begun:
            self._remove(commit.folder)  # an undo is not kept: undoing it would repeat the call's changes
        else:
            self.retire(commit)
        return left

    def close(self) -> None:
        """Remove this process's folder, unless a journal or an undo may still need it, and release the lock."""
        if self._mine is not None and self._process == os.getpid():
            for removal in self._removals:
                removal.join()
            with reported(self._mine):
                self._settle_part(self._mine)
        self.abandon()

    def _settle_part(self, part: Path) -> None:
        for commit in list(self.begun(part, "")):
            with reported(commit.folder):
                self.settle(commit)
        self.forget_part(part)

    def forget_part(self, part: Path) -> None:
        """Remove a process's folder, unless something in it may still be needed.

        It is kept if it holds a commit that a journal may have recorded, an undo, or a commit that this user's Handrail did not make.
        """
        kept = (*part.glob(f"{_COMMIT}-*"), *part.glob(f"{_UNDO}*"))
        if not any(any(folder.iterdir()) for folder in kept) and not any(map(is_foreign, part.iterdir())):
            self.disk.forget(part)

    # --- commits ----------------------------------------------------------------------------------

    def new_folder(self, kind: str) -> Path:
        """Create an empty folder in this process's folder, which is created again if somebody has deleted it."""
        folder = self.mine / f"{kind}{self.number()}"
        try:
            self.disk.folder(folder, 0o700)
        except FileNotFoundError:
            self.abandon()
            folder = self.mine / folder.name
            self.disk.folder(folder, 0o700)
        return folder

    def _reused_folder(self, kind: str) -> Path:
        """Return an empty folder, as `new_folder` does. It may be the emptied folder of an old commit.

        After a power cut, files that were removed from a reused folder may be back, so a synced commit that a journal
        records gets a new one.
        """
        mine, spare = self.mine, self._spare  # `mine` comes first: in a forked process, it clears `_spare`
        self._spare = None
        if spare is not None:
            folder = mine / f"{kind}{self.number()}"
            try:
                self.disk.retire(spare, folder)
                return folder
            except FileNotFoundError:  # somebody has deleted the spare folder
                pass
            except OSError:
                self._spare = spare  # the next commit may use it
                raise
        return self.new_folder(kind)

    def number(self) -> int:
        """Return a number that this area has not returned before."""
        return next(self._numbers)

    def commit_folder(self, journal: str, *, synced: bool) -> Path:
        """Return an empty folder for a commit, named after the journal that records it, if any.

        With `synced` and a journal, several folders are created and synced at once, and later commits use the others.
        """
        kind = f"{_COMMIT}-{journal}-" if journal else _COMMIT
        with self._guard:
            if not (journal and synced):
                return self._reused_folder(kind)
            mine = self.mine  # in a forked process, this clears the parent's `_ready`
            if self._ready.get(journal):
                return self._ready[journal].pop()
        ready = [self.new_folder(kind) for _ in range(_READY)]
        self._sync_folder(mine)
        if not self._synced:
            self.disk.sync_file(self.folder / IDENTITY)
            for each in ("at-work", "done", ".", ".."):
                self._sync_folder(self.folder / each)
            self._synced = True
        with self._guard:
            self._ready.setdefault(journal, []).extend(ready[1:])
        return ready[0]

    def sync(self, folder: Path, slots: Iterable[str]) -> None:
        """Sync a commit's folder and these files in it. A manifest that the journal records need not be among them."""
        for name in slots:
            self.disk.sync_file(folder / name)
        self._sync_folder(folder)

    def _sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.disk.sync_folder(fd)
        finally:
            os.close(fd)

    def write_manifest(self, folder: Path, manifest: Manifest, name: str = MANIFEST) -> int:
        """Write a signed manifest, and return its size."""
        signed = sign(manifest)
        self.disk.write(folder / name, signed)
        return len(signed)

    def retire(self, commit: Commit) -> None:
        """Move an applied commit to the history, which keeps what it displaced, within its limits.

        If the disk reports an error, it is only logged, because the commit itself is complete. The next commit tries again.
        """
        with self._guard:
            waiting, self._not_kept = [*self._not_kept, commit], []
            for each in waiting:
                try:
                    call = call_digest(each.manifest.key)
                    each.folder = self.history.add(each.folder, call, self._drop_kept, each.sizes)
                except OSError as error:
                    log.warning(
                        "the call %r can't be undone for now, because what it displaced could not be kept: %s",
                        each.manifest.call_id,
                        error,
                    )
                    if each.folder.exists():
                        self._not_kept.append(each)

    def discard(self, commit: Commit) -> None:
        """Remove a commit's folder. If some of its steps could not be reverted, the commit is moved to the history instead."""
        if commit.is_stuck:
            self.retire(commit)
        else:
            with reported(commit.folder):
                self._remove(commit.folder)

    def _remove(self, folder: Path) -> None:
        """Remove a commit's folder. It is renamed first, so that a partly removed folder never counts as a commit."""
        gone = folder.with_name(f"{_GONE}.{folder.name}")
        with contextlib.suppress(FileNotFoundError):
            self.disk.retire(folder, gone)
            self.forget(gone)

    def forget(self, folder: Path) -> None:
        """Remove one of this process's own folders. If an event loop runs in this thread and the folder is large, another thread removes it."""
        if not self._is_left_to_thread(folder):
            self.disk.forget(folder)
            return

        def remove() -> None:
            with reported(folder):
                self.disk.forget(folder)

        removal = threading.Thread(target=remove, name="handrail-removal", daemon=True)
        self._removals = [each for each in self._removals if each.is_alive()]
        self._removals.append(removal)
        removal.start()

    def _is_left_to_thread(self, folder: Path) -> bool:
        return is_on_loop() and not _has_few(folder)

    def _drop_kept(self, folder: Path) -> None:
        """Remove a commit from the history. Raises `FileNotFoundError` if a different process has claimed it."""
        gone = self.mine / f"{_GONE}{self.number()}"
        self.disk.retire(folder, gone)
        if self._spare is None and not self._is_left_to_thread(gone):
            self.disk.empty(gone)
            self._spare = gone
        else:
            self.forget(gone)

    def forget_kept(self, key: CallKey) -> None:
        """Delete what is kept for undoing a call, also if another user has signed it."""
        if not self.is_own():
            raise FileError(".", "its staging folder is gone, or belongs to a different folder")
        call = call_digest(key)
        if not self.history.find(call):
            self.done(key)  # an undo that was cut off may have moved it
        self.history.forget(call, self._drop_kept)

    def done(self, key: CallKey) -> Commit | None:
        """Return a call's newest kept commit, or None if none is kept.

        The commit's run and journal must match the key's, and so must its place, if the key has one.
        """
        found = self._find(key)
        if found is None:
            # A process that died, or an undo that failed, may have left the commit in a process's folder.
            if self.is_own():
                self._sweep(self.mine)
                for commit in list(self.begun(self.mine, "")):
                    if commit.folder.name.startswith(_UNDO):
                        with reported(commit.folder):
                            self.settle(commit)
            found = self._find(key)
        return found

    def _find(self, key: CallKey) -> Commit | None:
        for kept in self.history.find(call_digest(key)) if self.is_own() else ():
            folder = self.history.path(kept)
            manifest = read_manifest(folder)
            if manifest is not None and _is_of(manifest.key, key):
                return self.commit(folder, manifest)
        return None

    def undo(self, commit: Commit) -> tuple[str, ...]:
        """Undo an applied commit by applying the opposite steps as a new commit. Returns the restored and removed paths, sorted.

        As for any commit, the manifest is written first. Then the kept commit is claimed, and its files are renamed. The kept
        commit is removed last, so it is still there if anything fails before that. Raises `UndoRefused` if a path has
        changed after the commit, or if another process has just undone or removed the commit. Raises `FileError` if the disk
        reports an error.
        """
        steps = self._steps_back(commit, {})
        call_id, synced = commit.manifest.call_id, bool(commit.manifest.journal)
        manifest = msgspec.structs.replace(commit.manifest, steps=steps, journal="")
        folder = self.mine / f"{_UNDO}{self.number()}.{commit.folder.name}"
        name = f"{_UNDO}-{self.mine.name}"
        try:
            self.disk.forget(commit.folder / name)
            self.write_manifest(commit.folder, manifest, name)
            if synced:
                self.sync(commit.folder, [name])
            self.disk.retire(commit.folder, folder)
        except OSError as error:
            if not commit.folder.exists():
                raise UndoRefused(call_id, (), "a different process has just undone or removed it") from None
            with contextlib.suppress(OSError):
                self.disk.forget(commit.folder / name)
            raise as_file_error(".", error) from None
        pending = self.commit(folder, manifest)
        pending.claim = msgspec.structs.replace(pending.claim, is_call=False)
        try:
            pending.apply(synced=synced, lenient=True)
        except BaseException as error:
            with reported(folder):
                self._give_back(folder)
            if isinstance(error, Conflict):
                problem = "its files were changed just now by another call or by someone else"
                raise UndoRefused(call_id, error.places, problem) from None
            raise
        with reported(folder):
            self._remove(folder)
        return tuple(sorted(step.path for step in steps))

    def check_undo(self, commit: Commit, restored: dict[str, str]) -> None:
        """Raise `UndoRefused` if `undo` would be refused after others, which were checked with the same `restored`.

        `restored` has the identities of what those will have put at their paths, and gets what this one will put at its own.
        What they will restore inside a folder is not known, so it is not checked.
        """
        for step in self._steps_back(commit, restored):
            if step.do != "change":
                restored[step.path] = step.after

    def _steps_back(self, commit: Commit, restored: Mapping[str, str]) -> tuple[Step, ...]:
        """Return the steps that undo a commit. Raises `UndoRefused` if they can't be done. See `check_undo` for `restored`."""
        steps = opposites([step for step in commit.manifest.steps if commit.is_done(step)])
        call_id = commit.manifest.call_id
        installed = sorted(
            step.path for step in steps if self.jail.is_installed(step.path, around=bool(step.before))
        )
        if installed:
            problem = (
                "its files belong to the installation that runs Handrail now, which nothing here can change"
            )
            raise UndoRefused(call_id, installed, problem)
        against = sorted(step.path for step in steps if not self._is_unchanged(step, restored))
        if against:
            raise UndoRefused(
                call_id, against, "its files have been changed since by another call or by someone else"
            )
        return steps

    def _is_unchanged(self, step: Step, restored: Mapping[str, str]) -> bool:
        """Return whether the step's path still holds what the step expects to displace; for a *change*, whether the path exists."""
        if step.path in restored:
            now = restored[step.path]
            return bool(now) if step.do == "change" else now == step.before
        if any(above in restored for above in ancestors(step.path)):
            return True
        found = self.jail.look(step.path)
        if found is None:
            return step.do == "put" and not step.before
        return step.do == "change" or shown_version(version_of(found[0])) == step.before

    def _give_back(self, folder: Path) -> None:
        """Move a claimed commit back into the history. Its slots show which of its steps are still to be undone."""
        with contextlib.suppress(OSError):
            self.disk.forget(folder / f"{_UNDO}-{folder.parent.name}")
        self.history.put_back(folder, folder.name.partition(".")[2])


def _has_few(folder: Path) -> bool:
    """Return whether a folder has so few files and folders in it, at any depth, that removing it takes no time to speak of."""
    left, pending = SLICE, [folder]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                left -= 1
                if not left:
                    return False
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry.path))
    return True


def _is_of(found: CallKey, wanted: CallKey) -> bool:
    return found == (wanted if wanted.place else msgspec.structs.replace(wanted, place=found.place))
