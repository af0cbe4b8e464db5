"""Compensations: undoing effects on the world that no transaction covers."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from handrail.dispatch.attempt import Attempt
from handrail.dispatch.call import COMPENSATION, Call
from handrail.dispatch.failures import in_short
from handrail.dispatch.transaction import Settled, Transaction, commit_lock_of, new_transaction
from handrail.threads import call_either
from handrail.tools import ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.gate import Gate

log = logging.getLogger("handrail.gate")

_SECONDS = 30.0
"""How long one compensation may take."""


async def compensate(
    gate: Gate, attempt: Attempt, settled: Sequence[Settled]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compensate inner calls, last first. Returns what was compensated and what still stands."""
    compensated: list[str] = []
    left: list[str] = []
    for done in reversed(settled):
        if done.tool is None:
            left.append(done.what)
            continue
        try:
            await asyncio.wait_for(_compensate(gate, attempt, done), _SECONDS)
            compensated.append(done.what)
        except (Exception, asyncio.CancelledError) as error:
            log.error("compensating %s (%s) raised", done.what, done.call_id, exc_info=error)
            left.append(f"{done.what} (compensating it failed: {in_short(error)})")
    return tuple(compensated), tuple(left)


async def _compensate(gate: Gate, attempt: Attempt, done: Settled) -> None:
    """Run one `compensate` handler in a transaction of its own, beside the call that failed."""
    tool = done.tool
    assert tool is not None
    assert tool.compensate is not None
    # It is not counted among the calls: a resumed run does not undo again.
    call = attempt.call
    undoing = Attempt(
        Call(
            gate,
            tool.name,
            None,
            f"{done.call_id}.undo",
            (*call.path[:-1], tool.name),
            call.loop,
            0,
            call.parent,
            call.depth,
            kind=COMPENSATION,
            tool=tool,
            _place=done.place.compensation,
        ),
        attempt.frame,
        started=attempt.started,
        params=done.params,
    )
    transaction = undoing.transaction = new_transaction(undoing, tool)
    context = tool.context_type(undoing)
    try:
        await call_either(tool.compensate, done.params, done.value, context=context)
        undoing.close()
        await _commit(undoing, transaction)
    except BaseException:
        transaction.drop()
        raise
    finally:
        undoing.close()
    transaction.publish()


async def _commit(undoing: Attempt, transaction: Transaction) -> None:
    """Commit what a compensation changed, and record it if the run is recorded."""
    from handrail.dispatch.recording import commit_recorded

    frame = undoing.frame
    if frame.journal is not None and transaction.parent is None:
        async with commit_lock_of(frame.session):
            transaction.prepare()
            await commit_recorded(frame.journal, undoing, ToolResult.ok(None, "It was undone."), False)
        return
    transaction.prepare()
    if transaction.durable is None:
        transaction.apply()
    else:
        transaction.apply_all(undoing.id)


def forget_locals(error: BaseException) -> None:
    """Keep the traceback of an error, but not the objects its frames held."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            pending += [each.__cause__, each.__context__]
