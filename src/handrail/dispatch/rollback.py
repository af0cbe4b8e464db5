"""Rollback: discards what one attempt at a call did, and compensates its external effects."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from handrail.cancellation import shielded
from handrail.dispatch.call_log import record_unrepeated
from handrail.dispatch.effects import compensate
from handrail.dispatch.policies import close_policy_context, close_resources
from handrail.dispatch.tickets import answer_for_tickets
from handrail.events import ToolRolledBack
from handrail.raised_errors import log_error
from handrail.threads import run_in_thread

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt

log = logging.getLogger("handrail.gate")


async def undo(attempt: Attempt, reason: str) -> tuple[str, ...]:
    """Drop the attempt's forks and, unless the run continues elsewhere, compensate its effects, last first.

    Returns the effects that could not be undone. A compensation that fails does not stop the others.
    """
    attempt.close()
    if attempt.is_undone:
        return ()
    transaction, frame = attempt.open_transaction, attempt.frame
    if transaction.is_large:
        await shielded(run_in_thread(transaction.drop))
    else:
        transaction.drop()
    if frame.left_to_the_record:
        return ()  # parked, or taken over: the process that continues the run decides
    attempt.settle_effect(transaction)
    if attempt.tickets is not None:
        await shielded(answer_for_tickets(attempt, transaction))
    compensated, left = tuple[str, ...](), tuple[str, ...]()
    if transaction.settled:
        compensated, left = await shielded(compensate(attempt, transaction.settled))
    if attempt.made_resources is not None or attempt.policies_made_resources:
        try:
            await close_resources(attempt)
        except Exception as error:
            log_error(log, logging.ERROR, "closing the resources of %s failed", attempt.name, error=error)
    if attempt.policy_context is not None:
        close_policy_context(attempt)
    _record(attempt, reason, compensated, left)
    return left


def abandon(attempt: Attempt, reason: str) -> tuple[str, ...]:
    """Drop the attempt's forks when nothing can be awaited any more. Returns the effects that were not undone.

    In a run with a journal, the record says that the call began, but not that it ended, as after a crash. So the
    process that resumes the run undoes these effects, even if the call is irreversible and its own outcome is unknown.
    The model is told about those that can't be undone.
    """
    attempt.close()
    if attempt.is_undone:
        return ()
    transaction = attempt.open_transaction
    transaction.drop()
    attempt.settle_effect(transaction)
    left = tuple(dict.fromkeys(done.what for done in transaction.settled or ()))
    _record(attempt, reason, (), left)
    return left


def _record(attempt: Attempt, reason: str, compensated: tuple[str, ...], left: tuple[str, ...]) -> None:
    if attempt.token is not None:
        context = attempt.frame.run_context
        fact = ToolRolledBack(attempt.id, attempt.name, reason, compensated, left, context)
        record_unrepeated(attempt, fact)
