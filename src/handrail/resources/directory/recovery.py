"""Recovery: finishes the commits that a journal recorded and a dead process did not apply.

A recorded commit belongs to a root, which is recognized by its identity and not by its path. So the commit is finished
wherever the root is now. A commit whose root is missing stays unapplied. So does one whose staged files are gone, unless the
root shows that it was applied. Every recovery reports these commits, until they can be applied or somebody discards them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from handrail.concurrency.threads import run_in_thread
from handrail.errors import RunUnknown
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit
from handrail.resources.directory.area import MANIFEST, Area, read_manifest
from handrail.resources.directory.commit import Commit, Manifest, shown_version
from handrail.resources.directory.content import version_of
from handrail.resources.directory.disk import Jail
from handrail.resources.directory.roots import (
    INSIDE,
    belongs,
    default_staging,
    read_identity,
    reported,
    staging_folders,
    status_of,
)

log = logging.getLogger("handrail.files")


class Unapplied(msgspec.Struct, frozen=True):
    """A recorded commit that has not been applied, and why."""

    run_id: str
    call_id: str
    root: str
    """Where the folder was when the commit was staged."""
    problem: str

    def __str__(self) -> str:
        return f"What the call {self.call_id!r} of run {self.run_id!r} changed in {self.root!r} is not applied: {self.problem}."


class Recovered(msgspec.Struct, frozen=True):
    """The result of a recovery."""

    finished: tuple[str, ...] = ()
    """Ids of the calls whose commits are now applied."""
    dropped: tuple[str, ...] = ()
    """Ids of the calls that were not recorded or were given up. Their changes were discarded or reverted."""
    left: tuple[str, ...] = ()
    """Paths whose steps could not be done, usually because someone else had changed the paths. They are left as they are."""
    unapplied: tuple[Unapplied, ...] = ()
    """The recorded commits that can't be applied, because their folder or their staged files are not there."""


async def recover(jail: Jail, area: Area, lock: Any, journal: Journal) -> Recovered:
    """Apply the commits that the journal recorded, and settle the other commits of dead processes.

    A recorded commit that can't be applied is logged, and listed in the result. `_Recovery.drop` says which of
    the other commits are kept for `undo`, reverted or discarded.
    """
    units = await journal.calls.unapplied()
    recovery = _Recovery(jail, area, lock)
    finished: list[str] = []
    unapplied: list[Unapplied] = []
    for unit in units:
        if await _is_given_up(journal, unit.run_id, unit.call_id):
            await journal.calls.applied(
                unit
            )  # `discard` was interrupted before its second step, which is this one
            continue
        manifests = [msgspec.convert(each, Manifest) for each in unit.files]
        states = await run_in_thread(lambda manifests=manifests: recovery.finish(manifests))
        if all(state == APPLIED for state in states):
            await journal.calls.applied(unit)
            await run_in_thread(lambda manifests=manifests: recovery.retire(manifests))
            finished.append(unit.call_id)
        for manifest, state in zip(manifests, states, strict=True):
            if state not in (APPLIED, PENDING):
                unapplied.append(Unapplied(unit.run_id, unit.call_id, manifest.root, state))
    if unapplied:  # others may have applied them or given them up since
        still = {(unit.run_id, unit.call_id) for unit in await journal.calls.unapplied()}
        unapplied = [each for each in unapplied if (each.run_id, each.call_id) in still]
    for each in unapplied:
        log.warning("%s", each)
    dropped = await _drop(recovery, journal)
    return Recovered(tuple(finished), tuple(dropped), tuple(sorted(recovery.left)), tuple(unapplied))


async def _drop(recovery: _Recovery, journal: Journal) -> list[str]:
    """Settle the commits of dead processes, except unapplied ones. Returns what `_Recovery.drop` returns."""
    with contextlib.ExitStack() as parts:
        # Ask the journal only after this: until a process is known to be dead, it may record more commits.
        dead = await run_in_thread(lambda: recovery.claim(parts))
        known = {each["folder"] for unit in await journal.calls.unapplied() for each in unit.files}
        begun = await run_in_thread(lambda: recovery.begun(dead, journal.id, known))
        given_up = {key for key in begun if await _is_given_up(journal, *key)}
        return await run_in_thread(lambda: recovery.drop(dead, journal.id, known, given_up))


async def _is_given_up(journal: Journal, run_id: str, call_id: str) -> bool:
    try:
        entries = await journal.calls.entries(run_id)
    except RunUnknown:  # the run was forgotten, which only happens to finished runs
        return False
    return any(entry.kind == "undone" and entry.key == call_id for entry in entries)


# --- the state of a commit ------------------------------------------------------------------------------

APPLIED = "applied"
PENDING = "the process that recorded the changes ended before it applied them. The next run with this folder and journal applies them"
_MOVE_BACK = "If the folder was moved, open it at its new place with the same journal; otherwise restore what is missing"


def state_of(manifest: Manifest) -> str:
    """Return `APPLIED`, `PENDING`, or why a recorded commit can't be applied.

    The root is looked for only where it was when the commit was staged. Nothing is changed.
    """
    staging, root = Path(manifest.staging), Path(manifest.root)
    try:
        jail = Jail(root)
    except OSError:
        return f"the folder is not there. {_MOVE_BACK}"
    try:
        found = read_identity(staging)
        if found is None or found.id != manifest.root_id:
            return f"{str(staging)!r}, where its files are staged, is not there. {_MOVE_BACK}"
        if not belongs(found, staging, status_of(jail.fd)):
            return f"a different folder is there now. {_MOVE_BACK}"
        return _state_in(manifest, staging, jail)
    finally:
        jail.close()


def _state_in(manifest: Manifest, staging: Path, jail: Jail) -> str:
    """Return the state of a commit, given its root and the staging folder that belongs to it."""
    if (staging / "at-work" / manifest.folder).exists():
        return PENDING
    if _is_retired(manifest, staging) or _shows(manifest, jail):
        return APPLIED
    return f"its staged files are gone from {str(staging)!r}. Check what it changed, and then discard it"


def _is_retired(manifest: Manifest, staging: Path) -> bool:
    """Return whether a commit was applied and is kept for undo."""
    try:
        kept = sorted((staging / "done").iterdir(), reverse=True)
    except OSError:
        return False
    for folder in kept:
        found = read_manifest(folder)
        if found is not None and found.folder == manifest.folder and found.key == manifest.key:
            return True
    return False


def _shows(manifest: Manifest, jail: Jail) -> bool:
    """Return whether the root shows everything that a commit changed, except the facts of folders."""
    for step in manifest.steps:
        found = jail.look(step.path)
        if step.do == "put":
            if found is None or shown_version(version_of(found[0])) != step.after:
                return False
        elif step.do == "take" and found is not None:
            return False
    return True


# --- the recovery of one root -----------------------------------------------------------------------------


class _Recovery:
    """The recovery of one root. Its methods block."""

    def __init__(self, jail: Jail, area: Area, lock: Any) -> None:
        self._jail = jail
        self._area = area
        self._lock = lock
        self.left: list[str] = []

    def finish(self, manifests: Sequence[Manifest]) -> list[str]:
        """Finish the commits that belong to this root. Returns the state of every given commit.

        A finished commit stays staged until the journal has recorded it as applied, because later commits may remove it from
        the history.
        """
        with self._lock:
            found = self._staging_folders(manifests)
            return [self._finish(each, found) for each in manifests]

    def retire(self, manifests: Sequence[Manifest]) -> None:
        """Move finished commits of dead processes to the history, if they belong to this root."""
        with self._lock:
            found = self._staging_folders(manifests)
            for manifest in manifests:
                staging = found.get(manifest.root_id)
                if staging is not None:
                    with self._claimed(manifest, staging) as commit:
                        if commit is not None:
                            self._area.at(staging).retire(commit)

    def _staging_folders(self, manifests: Iterable[Manifest]) -> Mapping[str, Path]:
        """Return the staging folders of this root, by the root id that each one records.

        There may be several, because a root that is moved or mounted elsewhere may get another one there.
        """
        root, facts = self._jail.root, status_of(self._jail.fd)
        places = [self._area.folder, default_staging(root, self._jail.fd), root / INSIDE]
        places += [Path(each.staging) for each in manifests]
        places += staging_folders(root.parent)
        found: dict[str, Path] = {}
        for place in dict.fromkeys(places):
            identity = read_identity(place)
            if identity is not None and belongs(identity, place, facts):
                found.setdefault(identity.id, place)
        return found

    def _finish(self, manifest: Manifest, found: Mapping[str, Path]) -> str:
        staging = found.get(manifest.root_id)
        if staging is None:
            return state_of(manifest)
        state = _state_in(manifest, staging, self._jail)
        if state != PENDING:
            return state
        with self._claimed(manifest, staging) as commit:
            if commit is None:  # its process is about to apply it, or has applied or reverted it meanwhile
                state = _state_in(manifest, staging, self._jail)
                # The process that uses it may have applied it, but not told the journal yet.
                return APPLIED if state == PENDING and _shows(manifest, self._jail) else state
            if read_manifest(commit.folder) is None:
                self._area.disk.forget(commit.folder / MANIFEST)
                self._area.write_manifest(commit.folder, manifest)
            self.left += commit.finish(synced=True)
        return APPLIED

    @contextlib.contextmanager
    def _claimed(self, manifest: Manifest, staging: Path) -> Generator[Commit | None]:
        """Yield the staged commit of a dead process, locked against other processes. Yields None if it is in use or gone."""
        area, folder = self._area.at(staging), staging / "at-work" / manifest.folder
        with area.unused(folder.parent.name) as unused:
            yield area.commit(folder, manifest) if unused and folder.exists() else None

    def claim(self, parts: contextlib.ExitStack) -> list[Path]:
        """Lock the folders of all dead processes, until `parts` is closed, and return them."""
        dead: list[Path] = []
        with self._lock:
            for part, held in self._area.abandoned() if self._area.is_own() else ():
                parts.callback(os.close, held)
                dead.append(part)
        return dead

    def begun(self, dead: Sequence[Path], journal: str, known: set[str]) -> list[tuple[str, str]]:
        """Return the run and call ids of the dead processes' commits that were begun and are not in `known`."""
        found: list[tuple[str, str]] = []
        with self._lock:
            for part in dead:
                for commit in self._area.begun(part, journal):
                    if commit.manifest.folder not in known and commit.is_touched():
                        found.append((commit.manifest.run_id, commit.manifest.call_id))
        return found

    def drop(
        self, dead: Sequence[Path], journal: str, known: set[str], given_up: set[tuple[str, str]]
    ) -> list[str]:
        """Settle the commits of dead processes, except those in `known`, which are still to be applied.

        A commit whose steps were not begun was never recorded, and is discarded. A commit whose steps were begun is kept for
        `undo`, because the journal has recorded it as applied. If somebody has given such a commit up, it is reverted and
        discarded. Returns the ids of the calls whose commits were discarded.
        """
        dropped: list[str] = []
        area = self._area
        with self._lock:
            for part in dead:
                with reported(part):
                    for commit in list(area.begun(part, journal)):
                        manifest = commit.manifest
                        if manifest.folder in known:
                            continue
                        with reported(commit.folder):
                            is_begun = commit.is_touched()
                            is_given_up = (manifest.run_id, manifest.call_id) in given_up
                            if is_begun and not is_given_up:
                                area.retire(commit)  # the journal recorded this commit as applied
                                continue
                            if is_begun:
                                commit.revert()
                            area.disk.forget(commit.folder)
                            if manifest.call_id:
                                dropped.append(manifest.call_id)
                    area.forget_part(part)
        return dropped


def unapplied_in(unit: CommitUnit) -> list[Unapplied]:
    """Return an `Unapplied` for each folder to which a recorded commit has not been applied yet."""
    found: list[Unapplied] = []
    for each in unit.files:
        manifest = msgspec.convert(each, Manifest)
        state = state_of(manifest)
        if state != APPLIED:
            found.append(Unapplied(unit.run_id, unit.call_id, manifest.root, state))
    return found


def pending_in(unit: CommitUnit) -> list[Manifest]:
    """Return the manifests of a recorded commit whose folder and staged files are where they were."""
    manifests = [msgspec.convert(each, Manifest) for each in unit.files]
    return [manifest for manifest in manifests if state_of(manifest) == PENDING]
