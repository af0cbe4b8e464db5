"""The tickets of a journal: given out by the owner of a run, redeemed by whoever holds one, once."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from handrail.clock import Clock
from handrail.errors import OutcomeUnknown, RunBusy, RunUnknown, TicketError
from handrail.journal import shelf
from handrail.journal.lease import LEASE_SECONDS, is_free
from handrail.journal.writer import Writer
from handrail.records import OVER, Entry, RunRow

_COLUMNS = "text, open, holder, held_until, deposit"


class _Ticket(msgspec.Struct, frozen=True):
    """A ticket as it stands."""

    text: str
    open: bool = True
    holder: str = ""
    held_until: float = 0.0
    deposit: bytes = b""


class _Rows(Protocol):
    """Where the tickets lie. Whatever is asked of it while one of the functions below runs is one moment."""

    def run(self, run_id: str, /) -> tuple[str, str] | None:
        """The status and the owner of a run."""
        ...

    def get(self, run_id: str, place: str, /) -> _Ticket | None: ...
    def put(self, run_id: str, place: str, ticket: _Ticket, /) -> None: ...
    def note(self, run_id: str, entry: Entry, /) -> None: ...


def _issue(rows: _Rows, me: str, now: float, run_id: str, place: str, text: str) -> str:
    _check_mine(rows, me, run_id)
    found = rows.get(run_id, place)
    ticket = _Ticket(text) if found is None else msgspec.structs.replace(found, open=True)
    rows.put(run_id, place, ticket)
    rows.note(run_id, Entry("verb", place, now, b"ticket"))
    return ticket.text


def _claim(rows: _Rows, now: float, run_id: str, place: str, by: str, again: bool) -> bytes:
    ticket = _open_ticket(rows, run_id, place)
    if ticket.deposit:
        return ticket.deposit
    if not is_free(ticket.holder, ticket.held_until, now, by):
        raise TicketError(
            "somebody is redeeming it",
            "Redeem it again when that is done, and you get the same result.",
        )
    if ticket.holder not in ("", by) and not again:
        raise OutcomeUnknown(f"the tool of the ticket {run_id}{place}")
    rows.put(run_id, place, msgspec.structs.replace(ticket, holder=by, held_until=now + LEASE_SECONDS))
    return b""


def _give_back(rows: _Rows, run_id: str, place: str, by: str) -> None:
    ticket = rows.get(run_id, place)
    if ticket is not None and ticket.holder == by and not ticket.deposit:
        rows.put(run_id, place, msgspec.structs.replace(ticket, holder="", held_until=0.0))


def _deposit(rows: _Rows, run_id: str, place: str, by: str, body: bytes) -> None:
    ticket = _open_ticket(rows, run_id, place)
    if ticket.holder != by:
        raise TicketError(
            "it was held for too long without a sign of life, and somebody else redeems it",
            "See to it that the process is not stopped while it works.",
        )
    rows.put(run_id, place, msgspec.structs.replace(ticket, deposit=body))


def _close(rows: _Rows, me: str, run_id: str, places: Sequence[str]) -> Mapping[str, bytes]:
    _check_mine(rows, me, run_id)
    found: dict[str, bytes] = {}
    for place in places:
        ticket = rows.get(run_id, place)
        if ticket is not None:
            rows.put(run_id, place, msgspec.structs.replace(ticket, open=False))
            if ticket.deposit or ticket.holder:
                found[place] = ticket.deposit
    return found


def _check_mine(rows: _Rows, me: str, run_id: str) -> None:
    run = rows.run(run_id)
    if run is None:
        raise RunUnknown(run_id)
    if run[1] != me:
        raise RunBusy(run_id, run[1])


def _open_ticket(rows: _Rows, run_id: str, place: str) -> _Ticket:
    run, ticket = rows.run(run_id), rows.get(run_id, place)
    if run is None or ticket is None:
        raise TicketError(
            "this journal knows nothing of it",
            "Open the journal of the run that gave it out, and not a copy.",
        )
    if run[0] in OVER:
        raise TicketError(f"its run {run_id!r} is over", "Get one from a run that is at work.")
    if not ticket.open:
        raise TicketError(
            "the call it was given out for is over",
            "A handler that gives out a ticket has to wait until it was redeemed.",
        )
    return ticket


class MemoryTickets:
    """Tickets within one process."""

    def __init__(
        self,
        owner: str,
        clock: Clock,
        runs: Mapping[str, RunRow],
        entries: dict[str, dict[tuple[str, str], Entry]],
    ) -> None:
        self._owner = owner
        self._clock = clock
        self._rows = _Kept(runs, entries)

    def issue(self, run_id: str, place: str, text: str, /) -> str:
        return _issue(self._rows, self._owner, self._now(), run_id, place, text)

    async def claim(self, run_id: str, place: str, by: str, again: bool, /) -> bytes:
        return _claim(self._rows, self._now(), run_id, place, by, again)

    async def give_back(self, run_id: str, place: str, by: str, /) -> None:
        _give_back(self._rows, run_id, place, by)

    async def deposit(self, run_id: str, place: str, by: str, body: bytes, /) -> None:
        _deposit(self._rows, run_id, place, by, body)

    async def close(self, run_id: str, places: Sequence[str], /) -> Mapping[str, bytes]:
        return _close(self._rows, self._owner, run_id, places)

    def _now(self) -> float:
        return self._clock.now().timestamp()


class SqliteTickets:
    """Tickets in a journal's file, where other processes find them; each step one transaction."""

    def __init__(self, owner: str, clock: Clock, writer: Writer) -> None:
        self._owner = owner
        self._clock = clock
        self._writer = writer
        self._do = writer.do

    def issue(self, run_id: str, place: str, text: str, /) -> str:
        now = self._now()
        return self._writer.do_now(
            lambda connection: _issue(_InFile(connection), self._owner, now, run_id, place, text)
        )

    async def claim(self, run_id: str, place: str, by: str, again: bool, /) -> bytes:
        now = self._now()
        return await self._do(
            lambda connection: _claim(_InFile(connection), now, run_id, place, by, again), synced=False
        )

    async def give_back(self, run_id: str, place: str, by: str, /) -> None:
        await self._do(lambda connection: _give_back(_InFile(connection), run_id, place, by))

    async def deposit(self, run_id: str, place: str, by: str, body: bytes, /) -> None:
        await self._do(lambda connection: _deposit(_InFile(connection), run_id, place, by, body))

    async def close(self, run_id: str, places: Sequence[str], /) -> Mapping[str, bytes]:
        return await self._do(lambda connection: _close(_InFile(connection), self._owner, run_id, places))

    def _now(self) -> float:
        return self._clock.now().timestamp()


class _Kept:
    """The rows in memory."""

    def __init__(self, runs: Mapping[str, RunRow], entries: dict[str, dict[tuple[str, str], Entry]]) -> None:
        self._runs = runs
        self._entries = entries
        self._tickets: dict[tuple[str, str], _Ticket] = {}

    def run(self, run_id: str, /) -> tuple[str, str] | None:
        row = self._runs.get(run_id)
        return None if row is None else (row.status, row.owner)

    def get(self, run_id: str, place: str, /) -> _Ticket | None:
        return self._tickets.get((run_id, place))

    def put(self, run_id: str, place: str, ticket: _Ticket, /) -> None:
        self._tickets[run_id, place] = ticket

    def note(self, run_id: str, entry: Entry, /) -> None:
        self._entries.setdefault(run_id, {})[entry.kind, entry.key] = entry


class _InFile:
    """The rows in the file, within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute

    def run(self, run_id: str, /) -> Any:
        return self._execute("SELECT status, owner FROM runs WHERE id = ?", (run_id,)).fetchone()

    def get(self, run_id: str, place: str, /) -> _Ticket | None:
        query = f"SELECT {_COLUMNS} FROM tickets WHERE run_id = ? AND place = ?"
        row = self._execute(query, (run_id, place)).fetchone()
        return None if row is None else _Ticket(row[0], bool(row[1]), *row[2:])

    def put(self, run_id: str, place: str, ticket: _Ticket, /) -> None:
        values = (run_id, place, *msgspec.structs.astuple(ticket))
        query = f"INSERT OR REPLACE INTO tickets (run_id, place, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._execute(query, values)

    def note(self, run_id: str, entry: Entry, /) -> None:
        shelf.put_entries(self._connection, run_id, [entry])
