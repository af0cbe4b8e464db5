"""The catalog of a journal's runs: list them, cancel one, forget finished ones, and manage remembered approvals.

What only some of these need is imported where it is used, so that a list of runs is there before the gate could be loaded.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, RunBusy, RunUnknown, SessionUnknown
from handrail.journal.records import OVER, Mark, RunRow

if TYPE_CHECKING:
    from handrail.events import ApprovalRemembered
    from handrail.guard import ApprovalMemory
    from handrail.journal.protocol import Journal

_PAGE = 500

Standing = Literal["queued", "running", "parked", "interrupted", "done", "failed", "cancelled"]
"""The standing of a run: its status, or `interrupted` if it is running without a live owner."""


def standing_of(row: RunRow) -> Standing:
    """Return the standing of a run when its row was read."""
    if row.status == "running" and not row.held:
        return "interrupted"
    return row.status


class RunLine(msgspec.Struct, frozen=True):
    """One run in the list that `list_runs` returns."""

    row: RunRow
    standing: Standing
    unapplied: int = 0
    """How many of the run's calls have recorded file changes that are not applied."""
    workspaces: Sequence[str] = ()
    """The names of the workspaces that the run has."""
    missing: tuple[str, str] | None = None
    """The name of the workspace that the run waits for, and the id of the run that has it; None if it does not wait for one."""

    @property
    def id(self) -> str:
        return self.row.record.id


async def list_runs(
    journal: Journal,
    *,
    session_id: str | None = None,
    principal: str | None = None,
    standing: Collection[Standing] = (),
    limit: int = 100,
    before: Mark | None = None,
) -> Sequence[RunLine]:
    """Return at most `limit` runs, newest first.

    With `session_id`, `principal` or `standing`, only the runs of that session, of that principal or with one of these
    standings are returned. To get the next page, pass the mark of the last run's record as `before`.
    """
    waiting = Counter(unit.run_id for unit in await journal.calls.unapplied())
    holders = await journal.workspaces.holders()
    found: list[RunLine] = []
    while len(found) < limit:
        if session_id is None:
            page = await journal.runs.list(
                principal=principal, limit=_PAGE if standing else limit, before=before
            )
        else:
            whole = await journal.runs.list(session_id=session_id, principal=principal)
            page = [row for row in reversed(whole) if before is None or row.record.mark < before]
        lines = (_line(row, waiting[row.record.id], holders) for row in page)
        found += [line for line in lines if not standing or line.standing in standing]
        if session_id is not None or len(page) < _PAGE:
            break
        before = page[-1].record.mark
    return tuple(found[:limit])


def _line(row: RunRow, unapplied: int, holders: Mapping[str, str]) -> RunLine:
    run_id = row.record.id
    own = [name for name, holder in holders.items() if holder == run_id]
    return RunLine(row, standing_of(row), unapplied, own, _missing(row, holders))


def _missing(row: RunRow, holders: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the workspace that a run needs before a worker can begin or continue it, and the run that has it.

    Returns None if the run does not wait for a worker, needs no workspace, or can get it.
    """
    is_due = row.status == "parked" and row.due_at is not None
    if not row.record.request or not (is_due or standing_of(row) in ("queued", "interrupted")):
        return None
    from handrail.run.record.begin import decode_request

    name = decode_request(row.record).workspace
    holder = holders.get(name, row.record.id)
    return None if holder == row.record.id else (name, holder)


async def children(journal: Journal, run_id: str) -> Sequence[RunRow]:
    """Return the background runs that a run has begun, oldest first. Raises `RunUnknown` if there is no such run."""
    await journal.runs.get(run_id)
    found: list[RunRow] = []
    units = await journal.calls.load(run_id)
    for spawned in (each for unit in units for each in unit.spawned):
        with contextlib.suppress(RunUnknown):  # it was forgotten, or its parent's files are not applied
            row = await journal.runs.get(spawned.run.id)
            if row.record.parent and row.record.parent.run_id == run_id:  # a fork of the run has begun none
                found.append(row)
    return tuple(found)


async def forget(
    journal: Journal,
    *,
    before: datetime | None = None,
    keep: int | None = None,
    standing: Collection[Standing] = (),
    app: str | None = None,
    dry: bool = False,
) -> Sequence[str]:
    """Delete finished runs from the journal, except those that ended at or after `before`, and the newest `keep`.

    With `standing` or `app`, only runs with one of these standings, or of this app, are deleted.

    A run is deleted only together with its whole session, because each run builds on the earlier ones. So a session is
    kept if one of its runs is unfinished, is among the runs to keep, has changes that are not applied, or has begun a background run
    that is unfinished. Data that a folder keeps for undo stays in the folder. Returns the ids of the deleted runs or, with `dry`, of
    those that would be deleted. Raises `DefinitionError` if neither `before` nor `keep` is passed, or if `before` has no time zone.
    """
    if before is None and keep is None:
        raise DefinitionError("forget needs to know which runs to delete. Pass `before`, `keep` or both.")
    if before is not None and before.tzinfo is None:
        raise DefinitionError("`before` has no time zone. Pass one, for example `datetime.now(UTC)`.")
    until = None if before is None else before.timestamp()
    sessions: dict[tuple[str, str], list[RunRow]] = {}
    staying: set[tuple[str, str]] = set()
    for number, row in enumerate(await _all_runs(journal)):
        session = row.record.session_id, row.record.principal
        sessions.setdefault(session, []).append(row)
        kept = keep is not None and number < keep
        is_late = until is not None and row.changed_at >= until
        is_other = (standing and row.status not in standing) or app not in (None, row.record.app)
        if kept or is_late or is_other:
            staying.add(session)
    going = [row.record.id for session, rows in sessions.items() if session not in staying for row in rows]
    return tuple(await journal.runs.forget(going, finished=True, dry=dry))


async def _all_runs(journal: Journal) -> list[RunRow]:
    """Return all runs that `Runs.list` lists, newest first."""
    found: dict[str, RunRow] = {}
    before: Mark | None = None
    while True:
        page = await journal.runs.list(limit=_PAGE, before=before)
        found.update((row.record.id, row) for row in page)
        if len(page) < _PAGE:
            return list(found.values())
        before = page[-1].record.mark


async def approvals(
    journal: Journal, session_id: str, *, principal: str, clock: Clock = SYSTEM_CLOCK
) -> ApprovalMemory:
    """Return the approval memory of a session, which can `.list()` its decisions and `.revoke(id)` one.

    A revocation is recorded, and applies immediately to the session's runs in any process. Nothing else in the
    session is read, so the code that defines its types is not needed. Raises `SessionUnknown` if the principal has no run in
    this session.
    """
    from handrail.guard import ApprovalMemory
    from handrail.guard.remembered import bring_in, decisions_in, keep_decisions
    from handrail.run.record.begin import base_of, decode_begin
    from handrail.session import Session
    from handrail.session.serialization import decode_item

    runs = await journal.runs.list(session_id=session_id, principal=principal)
    if not runs:
        raise SessionUnknown(session_id, principal)
    session = Session(id=session_id, principal=principal)
    base, first = base_of(runs), runs[0].record
    bring_in(session, () if base is None else decisions_in(base))
    if first.begin:
        bring_in(session, [decode_item(fact, session_id) for fact in decode_begin(first).denied])
    await keep_decisions(session, journal, is_restored=True)
    return ApprovalMemory(session, clock)


def approval_json(kept: ApprovalRemembered) -> dict[str, Any]:
    """Return a decision as plain data for JSON."""
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


async def cancel(journal: Journal, run_id: str) -> RunRow:
    """Cancel a run, and return its row.

    If no process is executing the run, it has ended when this returns, and each of its calls has a result, so that later
    runs of its session can continue. Otherwise the process that executes it, which may be this one, stops it within
    seconds, and the returned row has `stopping` set unless the run has ended already. A finished run is left unchanged.
    Raises `RunUnknown` if there is no such run.
    """
    from handrail.run.record.lineage import NEVER_BEGAN, end_cancelled

    row = await journal.runs.get(run_id)
    if row.status in OVER:
        return row
    if row.status == "queued" and await journal.queue.cancel(run_id, NEVER_BEGAN):
        return await journal.runs.get(run_id)
    for _ in range(2):
        try:
            await end_cancelled(journal, run_id)
        except RunBusy:
            await journal.runs.stop(run_id)
        row = await journal.runs.get(run_id)
        if row.status in OVER or row.held:
            break  # otherwise, its process released the run before it saw the request
    return row
