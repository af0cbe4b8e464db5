"""Tickets: a call as a signed text from which another process can run its tool, with a share of its budget."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_DOWN, Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.context.ticket import Ticket
from handrail.errors import NotSupported
from handrail.limits import BudgetTracker, Reservation
from handrail.messages import Usage
from handrail.place import Place

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt
    from handrail.dispatch.frame import Frame

_SMALLEST = Decimal("0.000001")
"""The smallest share of money."""
_NOBODY = Usage()


class GivenTicket:
    """A ticket that a call issued, and the share of the budget reserved for it."""

    __slots__ = ("number", "place", "reserved", "share")

    def __init__(self, number: int, place: Place) -> None:
        self.number = number
        self.place = place
        self.reserved: Reservation | None = None
        self.share: Mapping[str, int | Decimal] = {}


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What was spent under a ticket."""

    spent: dict[str, Decimal] = {}
    usage: Usage = _NOBODY
    cost: Decimal | None = None


def give_ticket(attempt: Attempt) -> str:
    """The verb `ticket` of one call."""
    frame = attempt.frame
    log = frame.log
    if not log.is_kept:
        raise NotSupported(
            "ticket", "Give the run a journal that other processes can reach: Adapter(model, journal=...)."
        )
    if attempt.kind.undoes or not attempt.let_through:
        raise NotSupported("ticket", "Only the handler of a tool can give one out.")
    attempt.check()
    number = attempt.next_verb("ticket")
    given = GivenTicket(number, attempt.place.child(number))
    ticket = Ticket(
        run_id=log.run_id,
        place=str(given.place),
        call_id=attempt.id,
        session_id=frame.session.id,
        tool=attempt.name,
        path=attempt.path,
        depth=attempt.depth,
        deadline=None if frame.deadline is None else frame.deadline.at,
        budget={} if frame.budget is None else _half_of(frame.budget),
        capabilities=tuple(sorted(attempt.tool.capabilities)),
        effect=attempt.tool.effect,
    )
    text = ticket.seal(frame.key)
    first = log.journal.tickets.issue(log.run_id, ticket.place, text)
    if attempt.tickets is None:
        attempt.tickets = []
    attempt.tickets.append(given)
    if first != text:  # the handler was entered before: its share may be in use already
        ticket = msgspec.structs.replace(ticket, budget=Ticket.open(first, frame.key).budget)
        text = ticket.seal(frame.key)
    if frame.budget is not None:
        given.share = share_of(ticket)
        given.reserved = frame.budget.reserve(**given.share)
    return text


def share_of(ticket: Ticket) -> dict[str, Any]:
    """The share of the budget that a ticket carries, exactly."""
    return {
        unit: int(amount) if amount == int(amount) else Decimal(str(amount))
        for unit, amount in ticket.budget.items()
    }


def _half_of(budget: BudgetTracker) -> dict[str, float]:
    """Half of what is left of every bounded unit, rounded down."""
    found: dict[str, float] = {}
    for unit, left in budget.left().items():
        half = max(left, 0) // 2 if isinstance(left, int) else max(left, Decimal(0)) / 2
        found[unit] = float(half if isinstance(half, int) else half.quantize(_SMALLEST, ROUND_DOWN))
    return found


def charge(frame: Frame, spent: Spent, given: GivenTicket | None = None) -> None:
    """Charge what was spent under a ticket, and release the rest of its share."""
    if spent.usage != _NOBODY:
        frame.spending.add(spent.usage, spent.cost)
    if given is not None and given.reserved is not None:
        given.reserved.settle(**{**dict.fromkeys(given.share, 0), **spent.spent})
    elif given is None and frame.budget is not None:
        frame.budget.reserve().settle(**spent.spent)
