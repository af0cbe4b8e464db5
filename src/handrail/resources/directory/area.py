"""`Area`: the staging folder beside the real one, which holds pending commits and what earlier commits displaced.

    .<name>.handrail/
        identity               which root this folder belongs to
        at-work/<process>/     the forks and commits of one process, which holds a lock on its folder
        done/<when>-<call>/    what one of the most recent commits displaced, with its manifest

The first write creates the staging folder, so a process that only reads never creates one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path

import msgspec

from handrail.clock import Clock
from handrail.errors import Conflict, DefinitionError, FileError, UndoRefused
from handrail.ids import random_id
from handrail.records import CallKey
from handrail.resources.directory.commit import Commit, Manifest, Step, members_of, opposites, shown_version
from handrail.resources.directory.content import version_of
from handrail.resources.directory.disk import Disk
from handrail.resources.directory.jail import Jail
from handrail.resources.directory.staging import (
    IDENTITY,
    belongs,
    claim,
    facts_of,
    find_staging,
    read_identity,
)

log = logging.getLogger("handrail.files")

MANIFEST = "manifest"
_COMMIT, _UNDO = "commit", "undo"
_READY = 8


class Kept(msgspec.Struct, frozen=True):
    """A commit that can be undone: the folder that holds what it displaced, and that folder's size in bytes."""

    folder: Path
    size: int


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
        self._keep_calls, self._keep_bytes = keep
        self._lock = -1
        self._mine: Path | None = None
        self.root_id = ""
        """The root's id, once this process has its own folder."""
        self._numbers = count()
        self._kept: list[Kept] | None = None
        self._synced = False
        self._ready: dict[str, list[Path]] = {}

    # --- the folder -------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The staging folder. Unless it is fixed, it is found by the identity of the root."""
        if self._folder is None:
            self._folder = find_staging(facts_of(self.jail.fd), self._wanted)
        return self._folder

    def at(self, folder: Path) -> Area:
        """Return an area for a different staging folder of the same root."""
        keep = self._keep_calls, self._keep_bytes
        return self if folder == self.folder else Area(self.jail, self.disk, folder, self._clock, keep)

    def is_own(self) -> bool:
        """Return whether the staging folder exists and belongs to this root."""
        found = read_identity(self.folder)
        return found is not None and belongs(found, self.folder, facts_of(self.jail.fd))

    @property
    def mine(self) -> Path:
        """The folder of this process, created on first use."""
        if self._mine is None:
            self._mine = self._make()
        return self._mine

    def _make(self) -> Path:
        root = self.jail.root
        try:
            if os.statvfs(root).f_flag & os.ST_RDONLY or not os.access(root, os.W_OK | os.X_OK):
                raise FileError(".", f"{str(root)!r} is read-only. Make it writable, or use another folder")
            for folder in (self.folder, self.folder / "at-work", self.folder / "done"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
            mine = self.folder / "at-work" / random_id()
            os.mkdir(mine, 0o700)
        except OSError as error:
            if isinstance(error, FileError):
                raise
            why = error.strerror or str(error)
            raise FileError(
                ".", self._with_hint(f"changes can't be staged in {str(self.folder)!r} ({why})")
            ) from None
        lock = os.open(mine, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if facts_of(lock).mount != facts_of(self.jail.fd).mount:
                problem = f"{str(self.folder)!r} is on a different disk from {str(root)!r}"
                raise FileError(".", self._with_hint(problem))
            self._refuse_case_insensitive(mine)
            self.root_id = claim(self.folder, root, self.jail.fd)
        except BaseException:
            os.close(lock)
            os.rmdir(mine)
            raise
        self._lock = lock
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._sweep(mine)
        return mine

    def _with_hint(self, problem: str) -> str:
        return f"{problem}. Pass staging= with a writable folder on the same disk"

    def _refuse_case_insensitive(self, mine: Path) -> None:
        probe = mine / "Probe"
        probe.touch()
        try:
            same = (mine / "pROBE").exists()
        finally:
            probe.unlink()
        if same:
            raise case_insensitive(self.jail.root)

    def _sweep(self, mine: Path) -> None:
        """Settle those commits of dead processes that belong to no journal, and remove these processes' folders.

        A folder that contains a journal's commit is kept.
        """
        for other, lock in self.abandoned(mine):
            try:
                with reported(other):
                    for commit in self.begun(other, ""):
                        with reported(commit.folder):
                            self.settle(commit)
                    self.forget_part(other)
            finally:
                os.close(lock)

    def abandoned(self, mine: Path | None = None) -> Iterator[tuple[Path, int]]:
        """Yield the folder of each dead process, with the descriptor of a lock that this process now holds on it."""
        at_work = self.folder / "at-work"
        if not at_work.is_dir():
            return
        for other in sorted(at_work.iterdir()):
            if other == mine or other == self._mine:
                continue
            try:
                lock = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            yield other, lock

    def begun(self, part: Path, journal: str) -> Iterator[Commit]:
        """Yield the commits in a process's folder that belong to this journal.

        If `journal` is empty, yields the commits that belong to no journal. A journal's commit that has no manifest is
        yielded with an empty one.
        """
        for folder in sorted(part.iterdir()):
            if folder.name.startswith(f"{_COMMIT}-{journal}-") if journal else "-" not in folder.name:
                manifest = read_manifest(folder)
                if manifest is None and journal:
                    where = f"{part.name}/{folder.name}"
                    manifest = Manifest(call_id="", root="", staging="", folder=where, journal=journal)
                if manifest is not None:
                    yield Commit(self.jail, self.disk, folder, manifest)

    def settle(self, commit: Commit) -> tuple[str, ...]:
        """Finish an unrecorded commit if any of its steps was done, and discard it otherwise.

        Returns the paths whose steps failed, which are left as they are.
        """
        if commit.is_begun():
            left = commit.finish()
            if not commit.folder.name.startswith(_UNDO):
                self.retire(commit)
                return left
            self.disk.forget(
                commit.folder
            )  # an undo is not kept, because undoing it would repeat the call's changes
            return left
        self.disk.forget(commit.folder)
        return ()

    def close(self) -> None:
        """Remove this process's folder, unless a journal may still need it, and release the lock."""
        if self._mine is not None:
            with reported(self._mine):
                self.forget_part(self._mine)
            os.close(self._lock)
            self._lock, self._mine, self._synced = -1, None, False
            self._ready.clear()

    def forget_part(self, part: Path) -> None:
        """Remove a process's folder, unless it contains a commit that a journal may have recorded."""
        if not any(any(folder.iterdir()) for folder in part.glob(f"{_COMMIT}-*")):
            self.disk.forget(part)

    # --- commits ----------------------------------------------------------------------------------

    def new_folder(self, kind: str) -> Path:
        """Create an empty folder in this process's folder."""
        folder = self.mine / f"{kind}{self.number()}"
        self.disk.folder(folder, 0o700)
        return folder

    def number(self) -> int:
        """Return a number that this area has not returned before."""
        return next(self._numbers)

    def commit_folder(self, journal: str, *, synced: bool) -> Path:
        """Return an empty folder for a commit, named after the journal that records it, if any.

        With `synced`, several folders are created and synced at once, and later commits use the others.
        """
        if not journal:
            return self.new_folder(_COMMIT)
        if not synced:
            return self.new_folder(f"{_COMMIT}-{journal}-")
        if not self._ready.get(journal):
            self._ready[journal] = [self.new_folder(f"{_COMMIT}-{journal}-") for _ in range(_READY)]
            self._sync_folder(self.mine)
            if not self._synced:
                self.disk.sync_file(self.folder / IDENTITY)
                for each in ("at-work", "done", ".", ".."):
                    self._sync_folder(self.folder / each)
                self._synced = True
        return self._ready[journal].pop()

    def sync(self, folder: Path, slots: list[str]) -> None:
        """Sync a staged commit to disk, except for its manifest, which the journal records."""
        for name in slots:
            self.disk.sync_file(folder / name)
        self._sync_folder(folder)

    def _sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.disk.sync_folder(fd)
        finally:
            os.close(fd)

    def write_manifest(self, folder: Path, manifest: Manifest) -> None:
        self.disk.write(folder / MANIFEST, msgspec.msgpack.encode(manifest))

    def retire(self, commit: Commit) -> None:
        """Keep what an applied commit displaced, and remove the oldest kept commits while they exceed the limits."""
        kept = self._all_kept()
        when = int(self._clock.now().timestamp() * 1_000_000)
        short = _short(commit.manifest.key)
        folder = self.folder / "done" / f"{when:020d}-{short}"
        while folder.exists():
            when += 1
            folder = folder.with_name(f"{when:020d}-{short}")
        self.disk.retire(commit.folder, folder)
        commit.folder = folder
        kept.append(Kept(folder, _size(folder)))
        total = sum(each.size for each in kept)
        while kept and (len(kept) > self._keep_calls or total > self._keep_bytes):
            oldest = kept.pop(0)
            total -= oldest.size
            self.disk.forget(oldest.folder)

    def done(self, key: CallKey) -> Commit | None:
        """Return a call's newest kept commit, or None. The call's run and journal must match too."""
        for kept in reversed(self._all_kept()):
            if kept.folder.name.endswith(f"-{_short(key)}"):
                manifest = read_manifest(kept.folder)
                if manifest is not None and _is_of(manifest.key, key):
                    return Commit(self.jail, self.disk, kept.folder, manifest)
        return None

    def undo(self, commit: Commit) -> tuple[str, ...]:
        """Undo an applied commit by applying the opposite steps as a new commit. Returns the restored paths, sorted.

        Raises `UndoRefused`, and changes nothing, if someone has changed one of its paths since.
        """
        steps = opposites([step for step in commit.manifest.steps if commit.is_done(step)])
        call_id = commit.manifest.call_id
        against = sorted(step.where for step in steps if not self._is_unchanged(step))
        if against:
            raise UndoRefused(call_id, against, "changed since by another call or by someone else")
        pending = self._take_up(commit, msgspec.structs.replace(commit.manifest, steps=steps, journal=""))
        try:
            pending.apply(lenient=True)
        except Conflict as conflict:
            self._give_back(pending, commit)
            raise UndoRefused(
                call_id, conflict.places, "changed just now by another call or by someone else"
            ) from None
        self.disk.forget(pending.folder)
        return tuple(sorted(step.where for step in steps))

    def _is_unchanged(self, step: Step) -> bool:
        """Return whether the step's path still holds what the step expects to displace."""
        found = self.jail.look(step.where)
        if found is None:
            return step.do == "put" and not step.before
        return step.do == "change" or shown_version(version_of(found[0])) == step.before

    def _take_up(self, commit: Commit, manifest: Manifest) -> Commit:
        """Turn a kept commit into a pending one with a new manifest."""
        folder = self.mine / f"{_UNDO}{self.number()}"
        self._kept = [kept for kept in self._all_kept() if kept.folder != commit.folder]
        self.disk.retire(commit.folder, folder)
        self.disk.write(folder / f"{MANIFEST}.new", msgspec.msgpack.encode(manifest))
        os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)
        return Commit(self.jail, self.disk, folder, manifest)

    def _give_back(self, at_work: Commit, kept: Commit) -> None:
        """Move a pending undo back to the kept commits, with the commit's original manifest."""
        self.disk.write(at_work.folder / f"{MANIFEST}.new", msgspec.msgpack.encode(kept.manifest))
        os.replace(at_work.folder / f"{MANIFEST}.new", at_work.folder / MANIFEST)
        self.disk.retire(at_work.folder, kept.folder)
        self._kept = None

    def _all_kept(self) -> list[Kept]:
        if self._kept is None:
            done = self.folder / "done"
            paths = sorted(done.iterdir()) if done.is_dir() and self.is_own() else []
            self._kept = [Kept(path, _size(path)) for path in paths]
        return self._kept


@contextlib.contextmanager
def reported(leftover: Path) -> Generator[None]:
    """Log an `OSError` raised in this block instead of raising it, so that one bad leftover does not stop the cleanup."""
    try:
        yield
    except OSError as error:
        log.warning("%s was not cleaned up, because the disk reported an error: %s", leftover, error)


def read_manifest(folder: Path) -> Manifest | None:
    """Read a commit's manifest. Returns None if it is missing or incomplete."""
    try:
        return msgspec.msgpack.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def case_insensitive(root: Path) -> DefinitionError:
    return DefinitionError(
        f"{str(root)!r} does not distinguish 'a' from 'A', so two paths could be one file. "
        "Use a folder on a case-sensitive disk."
    )


def _size(folder: Path) -> int:
    total = 0
    for path, _ in members_of(folder):
        with contextlib.suppress(OSError):
            total += os.lstat(folder / path).st_size
    return total


def _is_of(found: CallKey, wanted: CallKey) -> bool:
    return found == (wanted if wanted.place else msgspec.structs.replace(wanted, place=found.place))


def _short(key: CallKey) -> str:
    text = "\0".join((key.journal, key.run_id, key.call_id))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
