"""Cancellation of runs that no process executes."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import msgspec

from handrail.adapter.answer import spent_by
from handrail.adapter.recorded_messages import Unfinished, retold
from handrail.adapter.run_lease import acquire_run
from handrail.adapter.run_record import RunOutcome
from handrail.errors import RunBusy
from handrail.journals import Journal
from handrail.place import RUN, Place
from handrail.prompt import OPENER
from handrail.records import OVER, CommitUnit

UNFINISHED = Unfinished(
    "This call did not run: the run was cancelled first.",
    "This call was in progress when its run was cancelled, and its outcome is unknown. "
    "Find out what it did before you repeat it.",
)


NEVER_BEGAN = msgspec.msgpack.encode(
    RunOutcome(stop_reason="cancelled", cost=Decimal(0), error="it was cancelled before it began")
)


async def end_cancelled(journal: Journal, run_id: str) -> None:
    """End a run as cancelled, unless it is over. Each of its calls then has a result. Raises `RunBusy` if a process executes it.

    Another run may work on the session meanwhile, because nothing more is committed to it.
    """
    async with acquire_run(journal, run_id, turn="none") as row:
        if row.status == "queued":
            await journal.runs.leave(run_id, "cancelled", NEVER_BEGAN)
        elif row.status not in OVER:
            usage, cost = spent_by(await journal.calls.entries(run_id))
            outcome = RunOutcome(
                stop_reason="cancelled",
                messages=await retold(journal, row, UNFINISHED),
                usage=usage,
                cost=cost if row.status == "parked" else None,  # otherwise a request may have been lost
                opened=_opened(await journal.calls.load(run_id)),
            )
            await journal.runs.leave(run_id, "cancelled", msgspec.msgpack.encode(outcome))


async def end_stopped(journal: Journal, run_id: str) -> bool:
    """End a run as cancelled if somebody asked for that and its process left it unfinished. Returns whether it was ended here.

    Submitted runs are left to the workers, which end them.
    """
    row = await journal.runs.get(run_id)
    if not row.stopping or row.queue or row.status in OVER:
        return False
    try:
        await end_cancelled(journal, run_id)
    except RunBusy:
        return False
    return True


def _opened(units: Sequence[CommitUnit]) -> list[str]:
    """Return the paths of the sections that the run's model has opened."""
    found: list[str] = []
    for unit in units:
        place = Place.parse(unit.place)
        if unit.tool == OPENER and unit.status == "ok" and (place.parent, place.kind) == (RUN, "call"):
            found += msgspec.json.decode(unit.result)["value"]
    return list(dict.fromkeys(found))
