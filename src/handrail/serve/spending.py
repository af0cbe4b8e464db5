"""`Spending`: what threads have cost, without going through their runs each time somebody looks at a list."""

from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal

from handrail.journals import Journal
from handrail.messages import Usage
from handrail.records import OVER
from handrail.runs import show

_MOST_KEPT = 20_000


class Spending:
    """Usage and cost by session. What a run that is over has cost is read once, while there is room to keep it."""

    def __init__(self, journal: Journal, most_kept: int = _MOST_KEPT) -> None:
        self._journal = journal
        self._most_kept = most_kept
        self._kept: OrderedDict[tuple[str, float], tuple[Usage, Decimal | None]] = OrderedDict()

    async def of(self, session_id: str) -> tuple[Usage, Decimal | None]:
        """What the runs of a session have cost so far; no cost where no price of any of them is known."""
        usage, known = Usage(), list[Decimal]()
        for row in await self._journal.runs.list(session_id=session_id):
            key = (row.record.id, row.changed_at)
            found = self._kept.get(key)
            if found is None:
                tree = await show(self._journal, row.record.id)
                found = (tree.usage, tree.cost)
                if row.status in OVER:
                    self._kept[key] = found
                    if len(self._kept) > self._most_kept:
                        self._kept.popitem(last=False)
            usage += found[0]
            if found[1] is not None:
                known.append(found[1])
        return usage, sum(known, Decimal(0)) if known else None
