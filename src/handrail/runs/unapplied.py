"""Recorded file changes that are not applied, for example because their folder or their staged files are missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import run_in_thread
from handrail.errors import HandrailError, RunError
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, Entry
from handrail.run.record.lease import acquire_run
from handrail.run.record.undone import UndoneCall
from handrail.runs.undo import check_nobody_works

if TYPE_CHECKING:
    from handrail.resources.directory.recovery import Unapplied

log = logging.getLogger("handrail.files")


async def unapplied(journal: Journal, run_id: str | None = None) -> Sequence[Unapplied]:
    """Return the calls whose recorded file changes are not applied, each with its folder and the reason.

    Without `run_id`, the calls of all runs are returned.
    """
    units = [unit for unit in await journal.calls.unapplied() if run_id in (None, unit.run_id)]
    if not units:
        return ()
    from handrail.resources.directory.recovery import unapplied_in

    return await run_in_thread(lambda: tuple(each for unit in units for each in unapplied_in(unit)))


async def discard(
    journal: Journal, run_id: str, call_id: str, *, clock: Clock = SYSTEM_CLOCK
) -> Sequence[str]:
    """Give up the file changes of a call that are recorded but not applied. Returns their paths.

    What the call changed in the session stays, and the model is told in the session's next turn that the files were not
    changed. Those changes that had already reached the folder are reverted, and other calls may change its files again: now, if the
    folder is where it was, or else when it is next opened with this journal. Raises `RunError` if the call has no such changes, and
    `RunBusy` or `SessionBusy` if a live process owns a run of the session.
    """
    await check_nobody_works(journal, await journal.runs.get(run_id))
    async with acquire_run(journal, run_id, turn="same"):
        return await _discard(journal, run_id, call_id, clock)


async def _discard(journal: Journal, run_id: str, call_id: str, clock: Clock) -> Sequence[str]:
    found = [
        unit for unit in await journal.calls.unapplied() if (unit.run_id, unit.call_id) == (run_id, call_id)
    ]
    if not found:
        raise RunError(
            run_id,
            f"its call {call_id!r} has no changes that wait to be applied",
            "`handrail runs show` lists the calls that have such changes.",
        )
    unit = found[0]
    places = [place for place in unit.writes if place.startswith("file ")]
    given_up = UndoneCall(unit.tool, places, discarded=True)
    now = clock.now().timestamp()
    await journal.calls.note(run_id, Entry("undone", call_id, now, msgspec.msgpack.encode(given_up)))
    await journal.calls.applied(unit)
    await _release(journal, unit)
    return [place.removeprefix("file ") for place in places]


async def _release(journal: Journal, unit: CommitUnit) -> None:
    """Revert and remove what a call that was given up has staged, where its folders are in place. Nobody else may do that."""
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.directory.recovery import pending_in

    for manifest in await run_in_thread(lambda: pending_in(unit)):
        try:
            with DirectoryFilesystem(manifest.root, staging=manifest.staging) as files:
                await files.recover(journal)
        except HandrailError as error:  # the next run with the folder and this journal tries again
            log.warning("what %r had staged in %r is still there: %s", unit.call_id, manifest.root, error)
