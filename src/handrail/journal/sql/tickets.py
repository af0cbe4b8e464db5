"""Tickets in a journal's database: the owner of a run issues them, and another process may redeem them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from handrail.errors import OutcomeUnknown, RunUnknown, TicketError
from handrail.journal.records import OVER
from handrail.journal.sql.chains import Chains, reading, run_chain
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Role, transaction
from handrail.journal.sql.leases import LEASE_SECONDS, check_owner
from handrail.journal.sql.run_rows import find_run
from handrail.journal.sql.verification import DEPOSIT, TICKET, add_outside, verified

_COLUMNS = "text, open, holder, held_until, deposit"
_PUT = f"""INSERT INTO tickets (run_id, place, {_COLUMNS}, mac) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (run_id, place) DO UPDATE SET text = excluded.text, open = excluded.open, holder = excluded.holder,
    held_until = excluded.held_until, deposit = excluded.deposit, mac = excluded.mac"""


class _Ticket(msgspec.Struct, frozen=True):
    """The current state of a ticket."""

    text: str
    open: bool = True
    holder: str = ""
    held_until: float = 0.0
    deposit: bytes = b""


class SqlTickets(Role):
    """The role `Tickets` of a journal."""

    def issue(self, run_id: str, place: str, text: str, /) -> str:
        database = self._database
        now = database.now()

        def issue(connection: Connection) -> str:
            check_owner(connection, database.owner, run_id)
            found = _get(connection, database.chains, run_id, place)
            ticket = _Ticket(text) if found is None else msgspec.structs.replace(found, open=True)
            _put(connection, database.chains, run_id, place, ticket)
            chain = run_chain(run_id)
            if found is None:
                database.chains.append(connection, chain, TICKET, place, text.encode(), at=now)
            database.chains.append(connection, chain, "verb", place, b"ticket", at=now)
            return ticket.text

        return database.transact_now(issue)

    async def claim(self, run_id: str, place: str, by: str, again: bool, /) -> bytes:
        database = self._database
        now = database.now()

        def claim(connection: Connection) -> bytes:
            ticket = _get_open(connection, database.chains, run_id, place)
            if ticket.deposit:
                return verified(connection, database.chains, run_id).deposits[place]
            if not database.leases.is_free(connection, ticket.holder, ticket.held_until, now, by):
                raise TicketError(
                    "another process is redeeming it",
                    "When that process has finished, redeem the ticket again to get the same result.",
                )
            if ticket.holder not in ("", by) and not again:
                raise OutcomeUnknown(f"the redemption of ticket {run_id}{place}")
            held = msgspec.structs.replace(ticket, holder=by, held_until=now + LEASE_SECONDS)
            _put(connection, database.chains, run_id, place, held)
            return b""

        return await database.transact(claim, synced=False)

    @transaction
    def release(self, connection: Connection, run_id: str, place: str, by: str, /) -> None:
        database = self._database
        ticket = _get(connection, database.chains, run_id, place)
        if ticket is not None and ticket.holder == by and not ticket.deposit:
            free = msgspec.structs.replace(ticket, holder="", held_until=0.0)
            _put(connection, database.chains, run_id, place, free)

    @transaction
    def deposit(self, connection: Connection, run_id: str, place: str, by: str, body: bytes, /) -> None:
        database = self._database
        now = database.now()
        ticket = _get_open(connection, database.chains, run_id, place)
        if ticket.holder != by:
            raise TicketError(
                "its claim was not renewed in time, and another process is redeeming it",
                "Make sure that the process is not suspended while it works.",
            )
        _put(connection, database.chains, run_id, place, msgspec.structs.replace(ticket, deposit=body))
        add_outside(connection, database.chains, run_id, DEPOSIT, place, body, at=now)

    @transaction
    def close(self, connection: Connection, run_id: str, places: Sequence[str], /) -> Mapping[str, bytes]:
        database = self._database
        check_owner(connection, database.owner, run_id)
        found: dict[str, bytes] = {}
        deposits: Mapping[str, bytes] | None = None
        for place in places:
            ticket = _get(connection, database.chains, run_id, place)
            if ticket is not None:
                closed = msgspec.structs.replace(ticket, open=False)
                _put(connection, database.chains, run_id, place, closed)
                if ticket.deposit or ticket.holder:
                    if deposits is None:
                        deposits = verified(connection, database.chains, run_id).deposits
                    found[place] = deposits.get(place, b"")
        return found


def _get(connection: Connection, chains: Chains, run_id: str, place: str) -> _Ticket | None:
    query = f"SELECT {_COLUMNS}, mac FROM tickets WHERE run_id = ? AND place = ?"
    chain, what = run_chain(run_id), f"{TICKET} {place}"
    with reading(chains, chain, 1, what):
        rows = fetch(connection, query, run_id, place)
    if not rows:
        return None
    *values, mac = rows[0]
    if not chains.is_row("tickets", (run_id, place, *values), mac):
        records = chains.read(connection, chain)
        link = next((each.link for each in records if (each.kind, each.key) == (TICKET, place)), 1)
        raise chains.altered(chain, link, "its row is not what was recorded", what=what)
    return _Ticket(values[0], bool(values[1]), *values[2:])


def _put(connection: Connection, chains: Chains, run_id: str, place: str, ticket: _Ticket) -> None:
    text, is_open, holder, until, deposit = msgspec.structs.astuple(ticket)
    values = run_id, place, text, int(is_open), holder, float(until), deposit
    connection.execute(_PUT, (*values, chains.row_mac("tickets", values)))


def _get_open(connection: Connection, chains: Chains, run_id: str, place: str) -> _Ticket:
    try:
        run = find_run(connection, chains, run_id)
    except RunUnknown:
        run = None
    ticket = _get(connection, chains, run_id, place)
    if run is not None and ticket is None:
        verified(connection, chains, run_id)  # raises `JournalAltered` if the ticket has lost its row
    if run is None or ticket is None:
        raise TicketError(
            "it is not in this journal",
            "Open the journal of the run that issued it, not a copy of the journal.",
        )
    if run.status in OVER:
        raise TicketError(f"its run {run_id!r} is over", "Get a ticket from a run that is still active.")
    if not ticket.open:
        raise TicketError(
            "the call that issued it is over",
            "Let the handler that issues a ticket wait until it has been redeemed.",
        )
    return ticket
