"""Tickets: signed texts with which another process can run a call's tool, within a share of the run's budget.

Work done under a ticket is deposited in the journal, and applied once the call's handler has succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from decimal import ROUND_DOWN, Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.concurrency.cancellation import shielded
from handrail.context.facts import Ticket
from handrail.errors import NotSupported
from handrail.run.call_log import keep_fact, log_again
from handrail.run.limits import BudgetTracker, Reservation
from handrail.run.place import Place
from handrail.run.record.format import Deposit, end_of
from handrail.run.record.recorded_calls import apply_inner, charge, settled_by
from handrail.run.transaction import Settled, Transaction
from handrail.session.serialization import count_as_read
from handrail.tools import EFFECTS

if TYPE_CHECKING:
    from handrail.run.call import Attempt

log = logging.getLogger("handrail.gate")

_SMALLEST = Decimal("0.000001")
"""Shares of money are rounded down to a multiple of this amount, in dollars."""


class GivenTicket:
    """A ticket that a call has issued, with the share of the budget reserved for it."""

    __slots__ = ("number", "place", "reserved", "share")

    def __init__(self, number: int, place: Place) -> None:
        self.number = number
        self.place = place
        self.reserved: Reservation | None = None
        self.share: Mapping[str, int | Decimal] = {}


def give_ticket(attempt: Attempt) -> str:
    """Implement the verb `ticket` of one call.

    Raises `NotSupported` without a journal, outside of handlers, and in compensations and probes.
    """
    run = attempt.run
    run_log = run.log
    if not run_log.is_kept:
        raise NotSupported(
            "ticket", "Give the run a journal that other processes can open: Adapter(model, journal=...)."
        )
    if attempt.kind.undoes or not attempt.let_through:
        raise NotSupported(
            "ticket", "Only a tool's handler can issue a ticket, and not inside a compensation or a probe."
        )
    attempt.check()
    _ = (
        attempt.open_transaction.session
    )  # forked now, so that what changes after this counts as changed for the redeemer, too
    number = attempt.next_verb("ticket")
    given = GivenTicket(number, attempt.place.child(number))
    ticket = Ticket(
        run_id=run_log.run_id,
        place=str(given.place),
        call_id=attempt.id,
        session_id=run.session.id,
        tool=attempt.name,
        path=attempt.path,
        depth=attempt.depth,
        deadline=None if run.deadline is None else run.deadline.at,
        budget={} if run.budget is None else _half_of(run.budget),
        capabilities=tuple(sorted(attempt.tool.capabilities)),
        effect=attempt.tool.effect,
    )
    text = ticket.seal(run.people.key)
    first = run_log.journal.tickets.issue(run_log.run_id, ticket.place, text)
    if attempt.tickets is None:
        attempt.tickets = []
    attempt.tickets.append(given)
    if first != text:  # the handler was entered before, and the share of the first ticket may be in use
        ticket = msgspec.structs.replace(ticket, budget=Ticket.open(first, run.people.key).budget)
        text = ticket.seal(run.people.key)
    if run.budget is not None:
        given.share = share_of(ticket)
        given.reserved = run.budget.reserve(**given.share)
    return text


def share_of(ticket: Ticket) -> dict[str, Any]:
    """Return the share of the budget that a ticket carries, as exact numbers."""
    return {
        unit: int(amount) if amount == int(amount) else Decimal(str(amount))
        for unit, amount in ticket.budget.items()
    }


def _half_of(budget: BudgetTracker) -> dict[str, float]:
    """Return half of the remaining amount of every limited unit, rounded down."""
    found: dict[str, float] = {}
    for unit, left in budget.left().items():
        half = max(left, 0) // 2 if isinstance(left, int) else max(left, Decimal(0)) / 2
        found[unit] = float(half if isinstance(half, int) else half.quantize(_SMALLEST, ROUND_DOWN))
    return found


# --- deposits ---------------------------------------------------------------------------------------


async def take_up_tickets(attempt: Attempt) -> None:
    """Close the tickets of a call whose handler has succeeded, apply the work done under them, and close the call's context.

    Each deposit is applied as if it were an inner call that has just finished, in the order in which the
    tickets were issued. If a deposit can't be applied, for example because of a `Conflict` with newer changes, the error
    is raised, and the call must undo or report all deposits. Work under a ticket that is still being redeemed is discarded.
    """
    found = await shielded(_close(attempt))
    transaction, changed = attempt.open_transaction, set[type]()
    for number, (given, deposit) in enumerate(found):
        if deposit is None:
            log.warning(
                "a ticket of %s was still being redeemed when its call ended, so its work is discarded",
                attempt.id,
            )
            _name_unknown(attempt, transaction)
            continue
        inner = attempt.stand_in(given.number)
        try:
            if deposit.reads:
                count_as_read(transaction.session, deposit.reads, changed)
            before = transaction.session.state
            apply_inner(inner, deposit.inner)
            after = transaction.session.state
            changed |= {kind for kind in after if after[kind] is not before.get(kind)}
        except BaseException:
            _settle_all(attempt, transaction, found[number:])
            raise
        inner.close()
        end = end_of(deposit.inner, attempt.run_context, {attempt.name: attempt.tool})
        keep_fact(attempt, msgspec.structs.replace(end, call_id=inner.id, path=inner.path))
    attempt.close()


async def answer_for_tickets(attempt: Attempt, transaction: Transaction) -> None:
    """Close the tickets of a failed call, and note the work done under them, so that the rollback undoes or reports it."""
    try:
        _settle_all(attempt, transaction, await _close(attempt))
    except Exception:  # the rest of the call must still be undone
        log.exception("the tickets of %s could not be closed", attempt.id)


async def _close(attempt: Attempt) -> list[tuple[GivenTicket, Deposit | None]]:
    """Close the call's tickets and settle their shares.

    Returns the tickets whose redemption has begun, each with its deposit, or with None if the redemption has not finished.
    """
    run_log, tickets = attempt.run.log, attempt.tickets or []
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
                charge(attempt.run, deposit, given)
                log_again(attempt, deposit.inner.logged)
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
        for done in settled_by(attempt, deposit.inner.effects):
            transaction.settle(done)


def _name_unknown(attempt: Attempt, transaction: Transaction) -> None:
    """Note a redemption that has not finished, so that it is reported, unless its effects can be rolled back."""
    if not EFFECTS[attempt.tool.effect].transactional:
        what = f"{attempt.name} (under a ticket: it is not known whether it was done)"
        transaction.settle(Settled(what, attempt.id))
