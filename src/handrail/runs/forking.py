"""Forking a run: another run with the same beginning, which goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from handrail.adapter.answer import RecordedAnswer
from handrail.adapter.run_record import decode_begin
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RunError
from handrail.ids import random_id
from handrail.journals import Journal
from handrail.place import RUN, Place, leading_call
from handrail.records import CommitUnit, Entry, RunCopy, RunRow
from handrail.runs.lineage import lineage_of, parted


async def fork(
    journal: Journal, run_id: str, step: int, new_id: str | None = None, *, clock: Clock = SYSTEM_CLOCK
) -> RunRow:
    """A run of its own that has the first `step` answers of the model and what came of them.

    Resumed, it asks the model for the next one. It has a session of its own, which begins as that of the
    first did. Files stay as they are: the fork finds them as they are now, whatever the calls it has in
    common with the first run did to them. Questions that were open in these calls are asked again.
    """
    row = await journal.runs.get(run_id)
    record, begin = row.record, decode_begin(row.record)
    new_id = new_id or random_id()
    entries, units = await journal.calls.entries(run_id), await journal.calls.load(run_id)
    kept = _calls_until(run_id, entries, step)
    now = clock.now().timestamp()
    entries = list(_kept(entries, step, kept, units))
    last = max((entry.at for entry in entries), default=record.began_at)
    deadline = None if begin.deadline is None else begin.deadline + now - last
    copy = RunCopy(
        row=RunRow(
            record=msgspec.structs.replace(
                record,
                id=new_id,
                session_id=new_id,
                began_at=now,
                forked_from=f"{run_id}#{step}",
                begin=parted(begin, await lineage_of(journal, row), new_id, deadline=deadline),
            ),
            status="parked",
            changed_at=now,
        ),
        entries=entries,
        units=[_parted(unit, new_id) for unit in units if (leading_call(unit.place) or 0) <= kept],
        steps=[
            (f"{new_id}{key.removeprefix(run_id)}", value)
            for key, value in await journal.steps.load(run_id)
            if key.startswith(run_id) and (leading_call(key.removeprefix(run_id)) or 0) <= kept
        ],
    )
    await journal.runs.add(copy)
    return await journal.runs.get(new_id)


def _calls_until(run_id: str, entries: Sequence[Entry], step: int) -> int:
    """How many calls the first answers led to."""
    answers = {
        place: entry
        for entry in entries
        if entry.kind == "model answer" and (place := Place.parse(entry.key)).parent == RUN
    }
    if not 0 <= step <= len(answers):
        raise RunError(
            run_id, f"it has no step {step}", f"Fork it from one of 0 to {len(answers)}: 0 is its beginning."
        )
    bodies = (answers[RUN.answer(number)].body for number in range(1, step + 1))
    return sum(len(msgspec.msgpack.decode(body, type=RecordedAnswer).calls) for body in bodies)


def _kept(entries: Sequence[Entry], step: int, calls: int, units: Sequence[CommitUnit]) -> Iterator[Entry]:
    """What belongs to these calls, and what the run itself had heard before the next answer."""
    places = {unit.call_id: unit.place for unit in units}
    after = ("model answer", str(RUN.answer(step + 1)))
    until = next((at for at, entry in enumerate(entries) if (entry.kind, entry.key) == after), len(entries))
    for at, entry in enumerate(entries):
        place = places.get(entry.key, "") if entry.kind in ("undone", "undoing") else entry.key
        call = leading_call(place)
        if at < until if call is None else call <= calls:
            yield entry


def _parted(unit: CommitUnit, new_id: str) -> CommitUnit:
    """A call as the fork has it: its files are the first run's to undo, and its paths count there only."""
    return msgspec.structs.replace(
        unit,
        run_id=new_id,
        session_id=new_id,
        files=(),
        root="",
        reads=[place for place in unit.reads if not place.startswith("file ")],
        writes=[place for place in unit.writes if not place.startswith("file ")],
    )
