"""`Retention`: how long finished runs are kept, and the periodic deletion of those that were kept long enough."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from handrail.errors import DefinitionError, HandrailError, JournalError, JournalUpgraded
from handrail.journal.records import OVER, Mark, RunRow, RunStatus

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal

log = logging.getLogger("handrail.journal")

_EVERY = 3600.0
"""Seconds between two sweeps of a journal, by whichever process."""
_LOOK_SECONDS = 300.0
"""Seconds between two looks of a process whether a sweep is due."""
_PAGE = 200
"""Maximum number of runs that are looked at for one transaction."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule for how long finished runs are kept.

    - `keep`: how long a run is kept after it ended.
    - `standing`: the runs that the rule is for: `done`, `failed` or `cancelled`. Default: all of these.
    - `app`: the app whose runs the rule is for, as `RunRecord.app` names it; None for all.

    Raises `DefinitionError` if `keep` is not above zero, or if a standing is not one of these.
    """

    keep: timedelta
    standing: Collection[RunStatus] = OVER
    app: str | None = None

    def __post_init__(self) -> None:
        if self.keep <= timedelta(0):
            raise DefinitionError(
                f"keep={self.keep!r} is not above zero. Pass how long to keep runs: timedelta(days=90)."
            )
        unknown = sorted({self.standing} if isinstance(self.standing, str) else {*self.standing} - OVER)
        if unknown or not self.standing:
            raise DefinitionError(
                f"standing={self.standing!r} is invalid. Pass a list with some of {', '.join(sorted(OVER))}: runs that have not "
                "ended are kept."
            )

    def lets_go(self, row: RunRow, now: float) -> bool:
        """Return whether the rule is for this run, and it was kept long enough."""
        is_for = row.status in self.standing and self.app in (None, row.record.app)
        return is_for and row.changed_at < now - self.keep.total_seconds()


async def sweep(journal: Journal, rules: Sequence[Retention]) -> int:
    """Delete the sessions that only have runs which one of the rules lets go, and return the number of deleted runs.

    A session is kept as long as `forget` would keep it. What was spent on days before the longest of the rules is deleted too. Each transaction looks at a bounded number of runs, so other processes are not
    held up for long.
    """
    now = journal.clock.now().timestamp()
    before: Mark | None = (now - min(rule.keep for rule in rules).total_seconds(), "")
    gone = 0
    while before is not None:
        page = await journal.runs.list(limit=_PAGE, before=before)
        going: list[str] = []
        for session_id, principal in dict.fromkeys(
            (row.record.session_id, row.record.principal) for row in page
        ):
            rows = await journal.runs.list(session_id=session_id, principal=principal)
            if all(any(rule.lets_go(row, now) for rule in rules) for row in rows):
                going += (row.record.id for row in rows)
        if going:
            gone += len(await journal.runs.forget(going, finished=True))
        before = page[-1].record.mark if len(page) == _PAGE else None
    await journal.spending.forget(now - max(rule.keep for rule in rules).total_seconds())
    return gone


async def keep_sweeping(journal: Journal, rules: Sequence[Retention]) -> None:
    """Sweep the journal once an hour, unless another process with the same rules does. Ends only by being cancelled.

    An error is logged, and the sweep is tried again in the next hour. Raises `JournalUpgraded`, though.
    """
    duty = "retention " + "; ".join(f"{each.keep} {sorted(each.standing)} {each.app}" for each in rules)
    while rules:
        try:
            if await journal.upkeep.is_due(duty, _EVERY):
                gone = await sweep(journal, rules)
                if gone:
                    log.info("%s finished runs were deleted, because they were kept long enough", gone)
        except JournalUpgraded:
            raise
        except HandrailError as error:
            level = error.retry_level if isinstance(error, JournalError) else logging.ERROR
            log.log(level, "runs that were kept long enough could not be deleted; will retry", exc_info=True)
        await asyncio.sleep(_LOOK_SECONDS)
