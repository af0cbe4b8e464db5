"""Recorded file changes that are not applied, for example because their folder or their staged files are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from handrail.adapter.undone_calls import UndoneCall
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RunError
from handrail.journals import Journal
from handrail.records import Entry
from handrail.runs.undo import check_nobody_works
from handrail.threads import run_in_thread

if TYPE_CHECKING:
    from handrail.resources.directory.recovery import Unapplied


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
    changed. If the folder is opened later, those changes that had already reached it are reverted. Raises `RunError` if
    the call has no such changes, and `RunBusy` if a live process owns a run of the session.
    """
    row = await journal.runs.get(run_id)
    await check_nobody_works(journal, row)
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
    await journal.calls.note(
        run_id, Entry("undone", call_id, now, msgspec.msgpack.encode(given_up)), from_outside=True
    )
    await journal.calls.applied(unit)
    return [place.removeprefix("file ") for place in places]
