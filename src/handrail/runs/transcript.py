"""Transcripts of runs and sessions, read from the record."""

from __future__ import annotations

from handrail.adapter.recorded_messages import retold
from handrail.adapter.recorded_session import load_session
from handrail.adapter.run_record import decode_outcome
from handrail.errors import SessionUnknown
from handrail.journals import Journal
from handrail.messages import Message
from handrail.records import OVER
from handrail.session import Session


async def session(
    journal: Journal, session_id: str, *, principal: str, session: Session | None = None
) -> Session:
    """Return a principal's session, with everything that its runs have committed, and what was said in finished runs.

    A run can begin on the returned session until another run works on the session. Then it must be loaded again. Raises
    `SessionUnknown` if the principal has no run in a session with this id. If the session was created with its own slice rules,
    pass `session`: an empty session with the same id and rules.
    """
    rows = await journal.runs.list(session_id=session_id, principal=principal)
    if not rows:
        raise SessionUnknown(session_id, principal)
    return await load_session(journal, rows[0], session)


async def said(journal: Journal, run_id: str) -> list[Message]:
    """Return the messages that a run has added to its session's conversation so far.

    For an unfinished run they come from the record, in which open calls have no result. Such messages can be shown,
    but can't be sent to a model. Raises `RunError` if the run is unfinished and has begun, and an earlier run of its session
    is not over.
    """
    row = await journal.runs.get(run_id)
    return decode_outcome(row).messages if row.status in OVER else await retold(journal, row)
