"""The lineage of a run: the session that earlier runs left to it."""

from __future__ import annotations

import msgspec

from handrail.adapter.recorded_session import logs_of, run_end
from handrail.adapter.requests import begun_runs, check_begun
from handrail.adapter.run_record import base_of, decode_begin, decode_outcome
from handrail.adapter.undone_calls import undone_in
from handrail.errors import RunError
from handrail.journals import Journal
from handrail.messages import Message
from handrail.records import OVER, CommitUnit, Decision, RunRow
from handrail.session.serialization import decode_item, encode_item


class Lineage(msgspec.Struct, frozen=True):
    """The session as it was when a run began: a saved session, and the commits and messages since it was saved."""

    base: bytes | None
    events: list[bytes]
    said: list[Message]
    shown: list[str]
    logged: list[bytes]
    denied: list[bytes] = []
    """The session's remembered denials and all its revocations. Approvals are left out: they never apply to another session."""


async def lineage_of(journal: Journal, row: RunRow) -> Lineage:
    """Return the session that earlier runs left to this one. Events are not decoded, so their types are not needed.

    Raises `RunError` if this run has not begun, or if an earlier one is not over.
    """
    record = row.record
    check_begun(row)
    runs = await begun_runs(journal, record.session_id, record.principal)
    history = await journal.calls.history(record.session_id)
    undone = (await undone_in(journal, record.session_id, record.principal)).calls
    first = decode_begin(runs[0].record)
    events, said, shown = list(first.events), list(first.said), list(first.shown)
    logged = list(first.logged)
    ids: list[str] = []
    for earlier in runs:
        if earlier.record.id == record.id:
            break
        if earlier.status not in OVER:
            raise RunError(
                record.id,
                f"the run {earlier.record.id!r} of the same session, on which it builds, is not over",
                "Resume or cancel that run first.",
            )
        ids.append(earlier.record.id)
        records = [each for run_id, each in history if run_id == earlier.record.id]
        outcome = decode_outcome(earlier)
        logs = logs_of(earlier, records)
        logged += [*logs.copied(), *outcome.logged, encode_item(run_end(earlier, logs), record.session_id)]
        said += outcome.messages
        shown += outcome.opened
    for run_id, each in history:
        if isinstance(each, CommitUnit) and run_id in ids and each.call_id not in undone:
            events += [bytes(event) for event in each.events]
    decisions = await journal.decisions.read(record.session_id, record.principal)
    denied = [*first.denied, *(each.body for each in decisions if not _approves(each))]
    return Lineage(base_of(runs), events, said, shown, logged, denied)


def _approves(decision: Decision) -> bool:
    return decision.kind == "remembered" and decode_item(decision.body, decision.session_id).approved
