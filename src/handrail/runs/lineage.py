"""What a run builds on: the session it began with, as data that needs no other run."""

from __future__ import annotations

import msgspec

from handrail.adapter.run_record import RunBegin, base_of, decode_begin, decode_outcome
from handrail.adapter.undone_calls import undone_in
from handrail.errors import RunError
from handrail.journals import Journal
from handrail.messages import Message
from handrail.records import OVER, Decision, RunRow
from handrail.session.serialization import decode_item, under_id


class Lineage(msgspec.Struct, frozen=True):
    """The session as a run found it: a saved one, what was committed since, and what was said since."""

    base: bytes | None
    events: list[bytes]
    said: list[Message]
    shown: list[str]
    denied: list[bytes] = []
    """What was denied for the whole session, and what was taken back: approvals are for no other session."""


async def lineage_of(journal: Journal, row: RunRow) -> Lineage:
    """What earlier runs of the session left to this one. Nothing is decoded, so no code is needed."""
    record = row.record
    runs = await journal.runs.list(session_id=record.session_id)
    units = await journal.calls.load_session(record.session_id)
    undone = (await undone_in(journal, record.session_id)).calls
    first = decode_begin(runs[0].record)
    events, said, shown = list(first.events), list(first.said), list(first.shown)
    for earlier in runs:
        if earlier.record.id == record.id:
            break
        if earlier.status not in OVER:
            raise RunError(
                record.id,
                f"the run {earlier.record.id!r} of the same session, on which it builds, is not over",
                "Resume or cancel that one first.",
            )
        for unit in units:
            if unit.run_id == earlier.record.id and unit.call_id not in undone:
                events += [bytes(event) for event in unit.events]
        outcome = decode_outcome(earlier)
        said += outcome.messages
        shown += outcome.opened
    decisions = await journal.decisions.read(record.session_id, record.principal)
    denied = [*first.denied, *(each.body for each in decisions if not _approves(each))]
    return Lineage(base_of(runs), events, said, shown, denied)


def _approves(decision: Decision) -> bool:
    return decision.kind == "remembered" and decode_item(decision.body, decision.session_id).approved


def parted(begin: RunBegin, lineage: Lineage, session_id: str, **changes: object) -> bytes:
    """How a run began, so that it can stand alone in a session of this id."""
    base = None if lineage.base is None else under_id(lineage.base, session_id)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            begin,
            base=base,
            events=lineage.events,
            said=lineage.said,
            shown=lineage.shown,
            denied=lineage.denied,
            **changes,
        )
    )
