"""The list of somebody's threads, page by page, those first that were changed last."""

from __future__ import annotations

from typing import Any

from handrail.adapter.run_record import decode_begin
from handrail.records import Mark, RunRecord, RunRow, SessionRow
from handrail.serve import snapshots
from handrail.serve.naming import named_by
from handrail.serve.spending import Spending
from handrail.serve.threads import Threads

_MOST_SEARCHED = 500
"""How many threads one request looks through. What they begin with is in no index: whoever wants more asks again."""
_READ_AT_ONCE = 200
"""Whatever a page has room for: each time the journal is asked, it puts all of somebody's threads in order."""


class Listed:
    """Lists the threads of principals."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._journal = threads.journal
        self._spending = Spending(threads.journal)

    async def page(
        self, principal: str, *, limit: int, before: Mark | None = None, words: str = ""
    ) -> tuple[list[dict[str, Any]], Mark | None]:
        """At most so many after a mark, that begin with a message in which these words are; and where to go on.

        There is no mark where nothing comes after. A page can be short, even empty, and yet not the last:
        where few of those that were looked through have the words.
        """
        found: list[dict[str, Any]] = []
        looked_through = 0
        wanted = words.casefold().split()
        at_once = max(limit, min(_READ_AT_ONCE, _MOST_SEARCHED)) if wanted else limit
        while True:
            rows = await self._journal.sessions(principal, limit=at_once + 1, before=before)
            for row in rows[:at_once]:
                named = named_by(row.session_id)
                if named is not None and named[0] == principal and _has(row.first, wanted):
                    found.append(await self._line(row, named))
                looked_through += 1
                before = (row.changed_at, row.session_id)
                if len(found) == limit:
                    break
            last = not rows or before == (rows[-1].changed_at, rows[-1].session_id)
            if last or not wanted or len(found) == limit or looked_through >= _MOST_SEARCHED:
                return found, None if last else before

    async def _line(self, row: SessionRow, named: tuple[str, str]) -> dict[str, Any]:
        usage, cost = await self._spending.of(row.session_id)
        return {
            "id": named[1],
            "title": snapshots.title([RunRow(record=row.first, status="done")]),
            "status": snapshots.status([row.newest], self._threads.find(*named)),
            "began_at": snapshots.iso(row.first.began_at),
            "updated_at": snapshots.iso(row.changed_at),
            "questions": row.questions,
            "runs": row.runs,
            "usage": snapshots.usage_of(usage),
            "cost": snapshots.money(cost),
        }


def _has(first: RunRecord, words: list[str]) -> bool:
    """Are all of these in what a thread begins with?"""
    if not words:
        return True
    said = (decode_begin(first).message or "").casefold() if first.begin else ""
    return all(word in said for word in words)
