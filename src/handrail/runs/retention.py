"""Forgetting runs that are over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from handrail.errors import DefinitionError
from handrail.journals import Journal
from handrail.records import OVER, Mark, RunRow

_PAGE = 1000


async def forget(
    journal: Journal, *, before: datetime | None = None, keep: int | None = None, dry: bool = False
) -> Sequence[str]:
    """Take runs out of the journal that ended before a time, or are not among the newest `keep`.

    Only those that are over, and only whole sessions: each run of a session builds on those before it, so
    one that is not over, or not to go yet, keeps the others. What a folder keeps for undoing is the folder's.
    Returns the ids of those that went; with `dry`, that would.
    """
    if before is None and keep is None:
        raise DefinitionError("nothing says which runs to forget. Give `before`, `keep` or both.")
    if before is not None and before.tzinfo is None:
        raise DefinitionError("`before` has no time zone. Give one, for example `datetime.now(UTC)`.")
    until = None if before is None else before.timestamp()
    sessions: dict[str, list[RunRow]] = {}
    staying: set[str] = set()
    for number, row in enumerate(await _all(journal)):
        session = row.record.session_id
        sessions.setdefault(session, []).append(row)
        kept = keep is not None and number < keep
        if row.status not in OVER or row.owner or kept or (until is not None and row.changed_at >= until):
            staying.add(session)
    going = [row.record.id for session, rows in sessions.items() if session not in staying for row in rows]
    if going and not dry:
        await journal.runs.forget(going)
    return tuple(going)


async def _all(journal: Journal) -> list[RunRow]:
    """Every run, the newest first."""
    found: dict[str, RunRow] = {}
    before: Mark | None = None
    while True:
        page = await journal.runs.list(limit=_PAGE, before=before)
        found.update((row.record.id, row) for row in page)
        if len(page) < _PAGE:
            return list(found.values())
        before = page[-1].record.mark
