"""The runs of a journal: list them, and forget finished ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Literal

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.journal.lease import is_free
from handrail.journals import Journal
from handrail.records import OVER, Mark, RunRow

Standing = Literal["running", "parked", "interrupted", "done", "failed", "cancelled"]
"""A run's status, or `interrupted` for a running one without a live owner."""

_PAGE = 500


class RunLine(msgspec.Struct, frozen=True):
    """One run in a list."""

    row: RunRow
    standing: Standing

    @property
    def id(self) -> str:
        return self.row.record.id


def standing_of(row: RunRow, now: float) -> Standing:
    """Return a run's standing: its status, or `interrupted` if its owner has died."""
    if row.status == "running" and is_free(row.owner, row.leased_until, now, ""):
        return "interrupted"
    return row.status


async def list_runs(
    journal: Journal,
    *,
    session_id: str | None = None,
    principal: str | None = None,
    standing: Collection[Standing] = (),
    limit: int = 100,
    before: Mark | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Sequence[RunLine]:
    """List runs, newest first, at most `limit`. `standing` filters by standing; empty means all.

    With `principal`, only that principal's runs. For the next page, give the last record's mark as `before`.
    """
    now = clock.now().timestamp()
    found: list[RunLine] = []
    while len(found) < limit:
        if session_id is None:
            page = await journal.runs.list(
                principal=principal, limit=_PAGE if standing else limit, before=before
            )
        else:
            whole = await journal.runs.list(session_id=session_id, principal=principal)
            page = [row for row in reversed(whole) if before is None or row.record.mark < before]
        lines = (RunLine(row, standing_of(row, now)) for row in page)
        found += [line for line in lines if not standing or line.standing in standing]
        if session_id is not None or len(page) < _PAGE:
            break
        before = page[-1].record.mark
    return tuple(found[:limit])


async def forget(
    journal: Journal, *, before: datetime | None = None, keep: int | None = None, dry: bool = False
) -> Sequence[str]:
    """Delete runs from the journal that ended before a time, or are not among the newest `keep`.

    Only finished runs and whole sessions are deleted: each run of a session builds on the earlier ones, so an
    unfinished or newer run keeps the others. Data that a folder keeps for undo stays with the folder. Returns
    the
    ids of the deleted runs; with `dry`, of those that would be deleted.
    """
    if before is None and keep is None:
        raise DefinitionError("nothing says which runs to forget. Give `before`, `keep` or both.")
    if before is not None and before.tzinfo is None:
        raise DefinitionError("`before` has no time zone. Give one, for example `datetime.now(UTC)`.")
    until = None if before is None else before.timestamp()
    sessions: dict[str, list[RunRow]] = {}
    staying: set[str] = set()
    for number, row in enumerate(await _all_runs(journal)):
        session = row.record.session_id
        sessions.setdefault(session, []).append(row)
        kept = keep is not None and number < keep
        if row.status not in OVER or row.owner or kept or (until is not None and row.changed_at >= until):
            staying.add(session)
    going = [row.record.id for session, rows in sessions.items() if session not in staying for row in rows]
    if going and not dry:
        await journal.runs.forget(going)
    return tuple(going)


async def _all_runs(journal: Journal) -> list[RunRow]:
    """Yield every run, newest first."""
    found: dict[str, RunRow] = {}
    before: Mark | None = None
    while True:
        page = await journal.runs.list(limit=_PAGE, before=before)
        found.update((row.record.id, row) for row in page)
        if len(page) < _PAGE:
            return list(found.values())
        before = page[-1].record.mark
