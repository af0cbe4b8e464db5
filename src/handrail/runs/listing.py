"""Which runs there are, and how each stands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.journal.lease import is_free
from handrail.journals import Journal
from handrail.records import Mark, RunRow

Standing = Literal["running", "parked", "interrupted", "done", "failed", "cancelled"]
"""As a run's status, but for one that is said to be running and that nobody has: `interrupted`."""

_PAGE = 500


class RunLine(msgspec.Struct, frozen=True):
    """One run in a list."""

    row: RunRow
    standing: Standing

    @property
    def id(self) -> str:
        return self.row.record.id


def standing_of(row: RunRow, now: float) -> Standing:
    """How a run stands: what its status says, unless the process that had it is gone."""
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
    """Runs, the newest first, at most `limit`; `standing` names which are wanted, all if it is empty.

    With `principal` only that one's. The next page is what is `before` the mark of the last one's record.
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
