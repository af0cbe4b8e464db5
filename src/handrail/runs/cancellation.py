"""Cancellation of a recorded run, whichever process owns it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from handrail.adapter.answer import RecordedAnswer
from handrail.adapter.run_lease import taken
from handrail.adapter.run_record import RunOutcome
from handrail.errors import RunBusy
from handrail.journals import Journal
from handrail.messages import Usage
from handrail.place import Place
from handrail.prompt import OPENER
from handrail.records import OVER, CommitUnit, Entry, RunRow
from handrail.runs.transcript import Unfinished, retold

UNFINISHED = Unfinished(
    "This call was not run: the run was cancelled before it.",
    "This call was under way when its run was cancelled, and what came of it is not known. "
    "Find out before you repeat it.",
)


async def cancel(journal: Journal, run_id: str) -> RunRow:
    """End a run.

    A run without an owner has ended when this returns, and each of its calls has a result, so that later runs
    of
    its session can continue. If another process owns it, that process stops it within seconds; until then the
    returned row has `stopping`. A finished run is left unchanged.
    """
    row = await journal.runs.get(run_id)
    if row.status in OVER:
        return row
    try:
        async with taken(journal, run_id) as row:
            if row.status not in OVER:
                await _end(journal, row)
    except RunBusy:
        await journal.runs.stop(run_id)
    return await journal.runs.get(run_id)


async def _end(journal: Journal, row: RunRow) -> None:
    run_id = row.record.id
    outcome = RunOutcome(
        stop_reason="cancelled",
        messages=await retold(journal, row, UNFINISHED),
        usage=_usage(await journal.calls.entries(run_id)),
        opened=_opened(await journal.calls.load(run_id)),
    )
    await journal.runs.leave(run_id, "cancelled", msgspec.msgpack.encode(outcome))


def _opened(units: Sequence[CommitUnit]) -> list[str]:
    """Return the sections that the run's model has opened."""
    found: list[str] = []
    for unit in units:
        if unit.tool == OPENER and unit.status == "ok" and Place.parse(unit.place).kind == "call":
            found += msgspec.json.decode(unit.result)["value"]
    return list(dict.fromkeys(found))


def _usage(entries: Sequence[Entry]) -> Usage:
    usage = Usage()
    for entry in entries:
        if entry.kind == "model answer":
            answer = msgspec.msgpack.decode(entry.body, type=RecordedAnswer)
            usage += answer.usage or Usage(requests=1)
    return usage
