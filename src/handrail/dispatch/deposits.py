"""Deposits: what other processes did under the tickets of a call, at the end of that call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from handrail.cancellation import shielded
from handrail.dispatch.attempt import Attempt
from handrail.dispatch.call import Call
from handrail.dispatch.replaying import Deposit, apply_inner, end_as_recorded, settled_by
from handrail.dispatch.tickets import GivenTicket, charge
from handrail.dispatch.transaction import Settled, Transaction
from handrail.place import inner_call_id
from handrail.tools import EFFECTS

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("handrail.gate")


async def take_up_tickets(attempt: Attempt) -> None:
    """Close the tickets of a call whose handler has succeeded, and apply what was done under them.

    Each is applied as an inner call that has just finished, in the order the tickets were given out.
    Where one does not fit any more, this raises, and the call answers for all of them.
    """
    found = await shielded(_close(attempt))
    transaction = attempt.open_transaction
    for number, (given, deposit) in enumerate(found):
        if deposit is None:
            log.warning(
                "a ticket of %s was being redeemed when its call ended, and counts for nothing", attempt.id
            )
            _name_unknown(attempt, transaction)
            continue
        inner = _inner_of(attempt, given)
        try:
            apply_inner(inner, deposit.inner)
        except BaseException:
            _settle_all(attempt, transaction, found[number:])
            raise
        record = deposit.inner
        end_as_recorded(inner, record.status, record.result, record.seconds)


async def answer_for_tickets(attempt: Attempt, transaction: Transaction) -> None:
    """Close the tickets of a call that failed: undo or report everything that was done under them."""
    try:
        _settle_all(attempt, transaction, await _close(attempt))
    except Exception:  # what else there is to undo is undone all the same
        log.exception("the tickets of %s could not be closed", attempt.id)


async def _close(attempt: Attempt) -> list[tuple[GivenTicket, Deposit | None]]:
    """Close the call's tickets and settle their shares. Returns the tickets that somebody redeemed or had begun to."""
    run_log, tickets = attempt.frame.log, attempt.tickets or []
    attempt.tickets = None
    deposits: Mapping[str, bytes] = {}
    found: list[tuple[GivenTicket, Deposit | None]] = []
    try:
        deposits = await run_log.journal.tickets.close(run_log.run_id, [str(each.place) for each in tickets])
    finally:
        for given in tickets:
            body = deposits.get(str(given.place))
            deposit = msgspec.msgpack.decode(body, type=Deposit) if body else None
            if deposit is not None:
                charge(attempt.frame, deposit, given)
            elif given.reserved is not None:
                given.reserved.release()
            if body is not None:
                found.append((given, deposit))
    return found


def _settle_all(
    attempt: Attempt, transaction: Transaction, found: Sequence[tuple[GivenTicket, Deposit | None]]
) -> None:
    for _, deposit in found:
        if deposit is None:
            _name_unknown(attempt, transaction)
            continue
        for done in settled_by(attempt, deposit.inner):
            transaction.settle(done)


def _name_unknown(attempt: Attempt, transaction: Transaction) -> None:
    """Report a redemption that never finished, if its effects can't be rolled back."""
    if not EFFECTS[attempt.tool.effect].transactional:
        what = f"{attempt.name} (under a ticket: it is not known whether it was done)"
        transaction.settle(Settled(what, attempt.id))


def _inner_of(attempt: Attempt, given: GivenTicket) -> Attempt:
    """The call that was made elsewhere, as an inner call of this one."""
    call = attempt.call
    inner = Call(
        call.gate,
        call.name,
        call.arguments,
        inner_call_id(call.id, attempt.number, given.number),
        call.path,
        call.loop,
        given.number,
        attempt,
        call.depth,
        tool=call.tool,
    )
    return Attempt(inner, attempt.frame)
