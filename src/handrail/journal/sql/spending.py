"""What was spent, in a journal's database: a row for each window, and one for each reservation in it.

Each window has a chain, with a record of its beginning and one for each raise of its cap. So a window whose row was removed is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from handrail.errors import JournalAltered
from handrail.journal.records import Amounts, SpendRaise, SpendState, SpendWindow, negative, sum_of
from handrail.journal.sql.chains import Chains, alteration
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Role, encode, transaction

RAISED = "raised"
_PUT = """INSERT INTO spending (id, ends_at, body, mac) VALUES (?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET body = excluded.body, mac = excluded.mac"""
_RESERVE = "INSERT INTO reservations (spending, id, owner, body, mac) VALUES (?, ?, ?, ?, ?)"
_RESERVED = "SELECT spending, id, owner, body, mac FROM reservations WHERE spending = ?"
_MOST_FORGOTTEN = 1000
"""Maximum number of windows that are deleted in one transaction."""


class SqlSpending(Role):
    """The role `Spending` of a journal."""

    @transaction
    def reserve(
        self, connection: Connection, id: str, amounts: Amounts, caps: Mapping[SpendWindow, Amounts], /
    ) -> SpendState | None:
        chains, owner = self._chains, self._database.owner
        states = [_read(connection, chains, window) for window in sorted(caps, key=_id)]
        for state in states:
            if state.missing(amounts, caps[state.window]):
                return self._with_flight(connection, state)
        body = encode(amounts, "a reservation has")
        for state in states:
            values = state.window.id, id, owner, body
            connection.execute(_RESERVE, (*values, chains.row_mac("reservations", values)))
            counted = sum_of(state.counted, amounts)
            _write(connection, chains, msgspec.structs.replace(state, counted=counted))
        return None

    @transaction
    def settle(
        self, connection: Connection, id: str, amounts: Amounts, warnings: Mapping[SpendWindow, Amounts], /
    ) -> Sequence[SpendState]:
        warned: list[SpendState] = []
        for window in sorted(warnings, key=_id):
            for row in fetch(connection, f"{_RESERVED} AND id = ?", window.id, id):
                reserved = _amounts(self._chains, row)
                state = _read(connection, self._chains, window)
                counted = sum_of(state.counted, negative(reserved), amounts)
                state = msgspec.structs.replace(state, counted=counted)
                connection.execute("DELETE FROM reservations WHERE spending = ? AND id = ?", (window.id, id))
                if not state.warned and _is_over(state, warnings[window], counted):
                    spent = sum_of(counted, negative(self._in_flight(connection, window)))
                    if _is_over(state, warnings[window], spent):
                        state = msgspec.structs.replace(state, warned=True)
                        warned.append(state)
                _write(connection, self._chains, state)
        return warned

    @transaction
    def add(self, connection: Connection, window: SpendWindow, raised: SpendRaise, /) -> SpendState:
        state = _read(connection, self._chains, window)
        if all(each.id != raised.id for each in state.raises):
            raised = msgspec.structs.replace(raised, at=self._database.now())
            state = msgspec.structs.replace(state, raises=(*state.raises, raised), warned=False)
            _write(connection, self._chains, state)
            body = encode(raised, "a raise has")
            self._chains.append(connection, _chain(window.id), RAISED, raised.id, body, at=raised.at)
        return self._with_flight(connection, state)

    @transaction
    def get(self, connection: Connection, window: SpendWindow, /) -> SpendState:
        return self._with_flight(connection, _read(connection, self._chains, window))

    @transaction
    def list(self, connection: Connection, *, since: float = 0.0) -> Sequence[SpendState]:
        query = f"{_SPENT} WHERE ends_at > ? ORDER BY ends_at, id"
        states = [_state(self._chains, row) for row in fetch(connection, query, since)]
        return tuple(self._with_flight(connection, each) for each in states)

    @transaction
    def forget(self, connection: Connection, before: float, /) -> None:
        ended = fetch(
            connection,
            f"SELECT id FROM spending WHERE ends_at < ? ORDER BY ends_at LIMIT {_MOST_FORGOTTEN}",
            before,
        )
        for (id,) in ended:
            _remove(connection, self._chains, id)

    def _with_flight(self, connection: Connection, state: SpendState) -> SpendState:
        return msgspec.structs.replace(state, in_flight=self._in_flight(connection, state.window))

    def _in_flight(self, connection: Connection, window: SpendWindow) -> Amounts:
        """Return what live processes have reserved in a window."""
        leases = self._database.leases
        rows = fetch(connection, _RESERVED, window.id)
        owners = {row[2]: leases.is_at_work(connection, row[2]) for row in rows}
        return sum_of(*(_amounts(self._chains, row) for row in rows if owners[row[2]]))


_SPENT = "SELECT id, ends_at, body, mac FROM spending"


def spend_alterations(connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
    """Yield what was altered in the windows and in the reservations."""
    rows = fetch(connection, _SPENT)
    for row in rows:
        yield from alteration(_state, chains, row)
    present = {row[0] for row in rows}
    for (chain,) in fetch(connection, "SELECT chain FROM chains WHERE chain LIKE 'spending %'"):
        if chain.removeprefix("spending ") not in present:
            yield _removed(chains, chain)
    for row in fetch(connection, _RESERVED.partition(" WHERE")[0]):
        yield from alteration(_amounts, chains, row)


def windows_of(connection: Connection, principal: str) -> list[str]:
    """Return the ids of the windows in which a principal's own spending counts."""
    ids = [id for (id,) in fetch(connection, "SELECT id FROM spending")]
    return [id for id in ids if msgspec.json.decode(id)[:2] == ["principal", principal]]


def erase_windows(connection: Connection, chains: Chains, principal: str) -> None:
    """Delete the windows in which a principal's own spending counts."""
    for id in windows_of(connection, principal):
        _remove(connection, chains, id)


def _remove(connection: Connection, chains: Chains, id: str) -> None:
    connection.execute("DELETE FROM reservations WHERE spending = ?", (id,))
    connection.execute("DELETE FROM spending WHERE id = ?", (id,))
    chains.remove(connection, _chain(id))


def _is_over(state: SpendState, warning: Amounts, spent: Amounts) -> bool:
    return any(spent.get(unit, 0) >= limit for unit, limit in state.limits(warning).items())


def _id(window: SpendWindow) -> str:
    return window.id


def _chain(id: str) -> str:
    return f"spending {id}"


def _removed(chains: Chains, chain: str) -> JournalAltered:
    return chains.altered(chain, 1, "its row was removed")


def _read(connection: Connection, chains: Chains, window: SpendWindow) -> SpendState:
    found = fetch(connection, f"{_SPENT} WHERE id = ?", window.id)
    if found:
        return _state(chains, found[0])
    chain = _chain(window.id)
    if fetch(connection, "SELECT 1 FROM chains WHERE chain = ?", chain):
        raise _removed(chains, chain)
    return SpendState(window=window)


def _state(chains: Chains, row: Sequence[Any]) -> SpendState:
    *values, mac = row
    if not chains.is_row("spending", values, mac):
        raise chains.altered(_chain(row[0]), 1, "its row is not what was recorded")
    return msgspec.msgpack.decode(row[2], type=SpendState)


def _write(connection: Connection, chains: Chains, state: SpendState) -> None:
    """Record the state of a window, which begins its chain if it is new."""
    id, ends_at = state.window.id, state.window.ends_at
    if not fetch(connection, "SELECT 1 FROM spending WHERE id = ?", id):
        chains.append(connection, _chain(id), "begun", id, b"")
    values = id, ends_at, encode(state, "a window has")
    connection.execute(_PUT, (*values, chains.row_mac("spending", values)))


def _amounts(chains: Chains, row: Sequence[Any]) -> Amounts:
    *values, mac = row
    if not chains.is_row("reservations", values, mac):
        raise chains.altered(_chain(row[0]), 1, "a reservation is not what was recorded", what=str(row[1]))
    return msgspec.msgpack.decode(row[3], type=Amounts)
