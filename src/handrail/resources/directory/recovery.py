"""Recovery after a crash: finish the commits that a journal recorded but nobody applied."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import msgspec

from handrail.journals import Journal
from handrail.records import CommitUnit
from handrail.resources.directory.area import MANIFEST, Area, read_manifest
from handrail.resources.directory.commit import Commit
from handrail.resources.directory.jail import Jail
from handrail.resources.directory.plan import Manifest
from handrail.threads import run_in_thread


class Recovered(msgspec.Struct, frozen=True):
    """What a recovery did."""

    finished: tuple[str, ...] = ()
    """The calls whose commits were finished, or found finished."""
    dropped: tuple[str, ...] = ()
    """The calls that were not recorded: nothing of them was applied."""
    left: tuple[str, ...] = ()
    """The paths that somebody changed meanwhile, which stay as they are."""


async def recover(jail: Jail, area: Area, lock: RLock, journal: Journal) -> Recovered:
    """Apply what the journal says was committed, and discard the rest."""
    units = await journal.calls.unapplied()
    finished: list[str] = []
    left: list[str] = []
    for unit in units:
        manifests = _of_this(unit, jail)
        if manifests:
            left += await run_in_thread(lambda manifests=manifests: _finish(jail, area, lock, manifests))
        if not any(_is_at_work(msgspec.convert(each, Manifest)) for each in unit.files):
            await journal.calls.applied(unit)
            finished.append(unit.call_id)
    known = {manifest.folder for unit in units for manifest in _of_this(unit, jail)}
    dropped = await run_in_thread(lambda: _drop(area, lock, journal.id, known))
    return Recovered(tuple(finished), tuple(dropped), tuple(sorted(left)))


def _is_at_work(manifest: Manifest) -> bool:
    """Whether a commit is unfinished, in any folder."""
    return Path(manifest.staging, "at-work", manifest.folder).exists()


def _of_this(unit: CommitUnit, jail: Jail) -> list[Manifest]:
    found = [msgspec.convert(each, Manifest) for each in unit.files]
    return [manifest for manifest in found if manifest.root == str(jail.root)]


def _finish(jail: Jail, area: Area, lock: Any, manifests: Sequence[Manifest]) -> list[str]:
    left: list[str] = []
    with lock:
        for manifest in manifests:
            folder = area.folder / "at-work" / manifest.folder
            if not folder.exists():
                continue  # it was applied and retired; only the mark was missing
            if read_manifest(folder) is None:
                area.disk.forget(folder / MANIFEST)
                area.write_manifest(folder, manifest)
            commit = Commit(jail, area.disk, folder, manifest)
            left += commit.finish(synced=True)
            area.retire(commit)
    return left


def _drop(area: Area, lock: Any, journal: str, known: set[str]) -> list[str]:
    """Discard the commits of dead processes that this journal has no record of."""
    dropped: list[str] = []
    with lock:
        for part, held in area.abandoned():
            try:
                for commit in list(area.begun(part, journal)):
                    manifest = commit.manifest
                    if manifest.folder in known:
                        continue
                    if commit.is_begun():
                        area.retire(commit)  # applied, and recorded as such
                    else:
                        area.disk.forget(commit.folder)
                        if manifest.call_id:
                            dropped.append(manifest.call_id)
                area.forget_part(part)
            finally:
                os.close(held)
    return dropped
