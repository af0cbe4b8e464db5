"""Recorded commits: what a journal stores of a call, and in which order record and files are written."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handrail.cancellation import shielded
from handrail.dispatch.replaying import inner_call, write_result
from handrail.events import CallStatus
from handrail.journals import Journal
from handrail.records import CommitUnit
from handrail.resources.paths import folder_of
from handrail.session.serialization import encode_item
from handrail.threads import run_in_thread
from handrail.tools import ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt

log = logging.getLogger("handrail.gate")

_LONGEST_DIFF = 64 * 1024
"""Maximum characters of a recorded diff; the files themselves are kept whole."""


def commit_unit(
    attempt: Attempt,
    result: ToolResult[Any],
    charged: bool,
    status: CallStatus = "ok",
    files: Sequence[Mapping[str, Any]] = (),
    diff: str = "",
) -> CommitUnit:
    """Return a finished call and everything it changed as plain data."""
    transaction = attempt.transaction if result.success else None
    frame = attempt.frame
    session = frame.session
    return CommitUnit(
        run_id=attempt.run_context.request_id,
        call_id=attempt.id,
        events=[]
        if transaction is None
        else [encode_item(event, session.id) for event in transaction.events],
        result=write_result(result),
        effects=[] if transaction is None else [done.what for done in transaction.settled or ()],
        files=files,
        session_id=session.id,
        place=str(attempt.call.place),
        tool=attempt.name,
        arguments=_text(attempt),
        status=status,
        at=frame.began_at.timestamp() + attempt.started,
        seconds=attempt.elapsed,
        reads=[] if transaction is None else transaction.reads(),
        writes=[] if transaction is None else transaction.writes(),
        diff=diff[:_LONGEST_DIFF],
        charged=charged,
        root=folder_of(frame.filesystem),
        decision=attempt.decision,
    )


def _text(attempt: Attempt) -> str:
    """Return the arguments as they can be shown, with secrets masked."""
    try:
        return attempt.tool.dump(attempt.params).decode()
    except Exception:  # they could not be parsed
        return ""


async def record_end(attempt: Attempt, result: ToolResult[Any], status: CallStatus, charged: bool) -> bool:
    """Record the end of a call that changed nothing, unless it ended because the whole run does.

    Returns whether it is recorded.
    """
    log = attempt.frame.log
    if not log.is_kept or log.closed or attempt.kind.undoes:
        return False
    if status == "cancelled" or attempt.frame.cancellation.cancelled:
        return False
    if attempt.parent is None:
        await shielded(log.journal.calls.commit(commit_unit(attempt, result, charged, status)))
        return True
    inner = inner_call(attempt, result, status)
    return await shielded(log.note("inner call", attempt.call.place, inner))


async def commit_recorded(journal: Journal, attempt: Attempt, result: ToolResult[Any], charged: bool) -> None:
    """Record what a prepared call changes, then change it. Nobody else may commit meanwhile.

    1. Staged bytes are written beside their targets, and synced if the journal is. 2. The journal records
    all of it in one transaction, the commit point. 3. The files are renamed into place. 4. The journal
    notes that. If somebody changed a file between the check and 3, it stays theirs: all others are
    reverted, and the record is voided before this raises `Conflict`.
    """
    transaction = attempt.open_transaction
    if transaction.durable is None:
        await journal.calls.commit(commit_unit(attempt, result, charged))
        transaction.apply()
        return
    synced = journal.synced

    def stage() -> tuple[list[Mapping[str, Any]], str]:
        diff = transaction.file_diff()
        return transaction.stage(attempt.id, journal.id, synced), diff

    files, diff = await run_in_thread(stage)  # 1
    unit = commit_unit(attempt, result, charged, files=files, diff=diff)
    await journal.calls.commit(unit)  # 2
    try:
        await run_in_thread(lambda: transaction.apply_durable(synced))  # 3
        transaction.apply_others()
    except BaseException:
        if files:
            await journal.calls.void(unit)
        raise
    if files:
        try:
            await journal.calls.applied(unit)  # 4
        except Exception:  # applied all the same; recovery finds that out
            log.exception("%s is committed and applied, but the journal could not note that", attempt.id)
