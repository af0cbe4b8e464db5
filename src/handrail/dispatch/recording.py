"""A commit with a record: what a journal is given of a call, and in which order that and the files go."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handrail.protocols import CommitUnit, Journal
from handrail.schema import to_json
from handrail.threads import run_in_thread
from handrail.tools import ToolResult

log = logging.getLogger("handrail.gate")

if TYPE_CHECKING:
    from handrail.dispatch.call import LiveCall


def commit_unit(
    call: LiveCall, result: ToolResult[Any], files: Sequence[Mapping[str, Any]] = ()
) -> CommitUnit:
    """Everything a call changes, as plain data."""
    transaction = call.open_transaction
    return CommitUnit(
        run_id=call.run_context.run_id,
        call_id=call.id,
        events=[to_json(event) for event in transaction.events],
        result=to_json({"message": result.message, "value": result.value, "success": result.success}),
        effects=[done.what for done in transaction.settled or ()],
        files=files,
    )


async def commit_recorded(journal: Journal, call: LiveCall, result: ToolResult[Any]) -> None:
    """Record what a prepared call changes, then change it. To be called with nobody else committing.

    1 staged bytes are written beside their targets, and synced if the journal is; 2 the journal
    records all of it in one transaction: from here on it is committed; 3 the files are renamed into
    place; 4 the journal notes that. A file that somebody changed between the check and 3 stays
    theirs: all others go back, and the record is made void before this raises `Conflict`.
    """
    transaction = call.open_transaction
    if transaction.durable is None:
        await journal.commit(commit_unit(call, result))
        transaction.apply()
        return
    synced = journal.synced
    files = await run_in_thread(lambda: transaction.stage(call.id, journal.id, synced))  # 1
    unit = commit_unit(call, result, files)
    await journal.commit(unit)  # 2
    try:
        await run_in_thread(lambda: transaction.apply_durable(synced))  # 3
        transaction.apply_others()
    except BaseException:
        if files:
            await journal.void(unit)
        raise
    if files:
        try:
            await journal.applied(unit)  # 4
        except Exception:  # it is applied all the same: whoever recovers finds that out
            log.exception("%s is committed and applied, but the journal could not note that", call.id)
