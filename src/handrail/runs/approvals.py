"""Approvals and denials of a whole session, from the record."""

from __future__ import annotations

from typing import Any

from handrail.adapter.run_record import base_of, decode_begin
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import RunUnknown
from handrail.events import ApprovalRemembered
from handrail.guard import ApprovalMemory
from handrail.guard.memory import bring_in, decisions_in, keep_decisions
from handrail.journals import Journal
from handrail.session import Session
from handrail.session.serialization import decode_item


async def approvals(
    journal: Journal, session_id: str, *, principal: str, clock: Clock = SYSTEM_CLOCK
) -> ApprovalMemory:
    """Return the decisions of a session: `.list()` them, or `.revoke(id)` one.

    A revocation is recorded, and applies at once to a run of the session in any process. Nothing else of the
    session is read, so its code is not needed. `RunUnknown` if the principal has no run in such a session.
    """
    runs = await journal.runs.list(session_id=session_id, principal=principal)
    if not runs:
        raise RunUnknown(session_id)
    session = Session(id=session_id, principal=principal)
    base, first = base_of(runs), runs[0].record
    bring_in(session, () if base is None else decisions_in(base))
    if first.begin:
        bring_in(session, [decode_item(fact, session_id) for fact in decode_begin(first).denied])
    await keep_decisions(session, journal)
    return ApprovalMemory(session, clock)


def approval_json(kept: ApprovalRemembered) -> dict[str, Any]:
    """Format a decision for programs."""
    return {
        "id": kept.id,
        "tool": kept.tool,
        "covers": kept.covers,
        "scope": kept.scope,
        "approved": kept.approved,
        "reason": kept.reason,
        "by": kept.by,
        "at": kept.at.isoformat(),
    }
