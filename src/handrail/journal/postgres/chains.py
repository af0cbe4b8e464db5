"""Chains of records in PostgreSQL, where one statement adds a record and checks that its run has not been taken over.

The head of a run's chain repeats the run's owner. The statement replaces the head only if both the owner and the seal
are still those that this process knows, and adds the record only if it replaced the head. A process that takes the run
over changes the owner there, so whichever of the two statements comes first, the other one notices.

Many processes add records at the same time, so no counter gives their order. A record's number is the database's time
in microseconds. If needed, it is increased: it must be higher than the numbers of the record before it in its chain, and
of the records that this process has added or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from handrail.errors import JournalAltered
from handrail.journal.postgres.accounts import alterations
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.sql.chains import MAC_BYTES, ChainRecord, Chains, NewRecord, run_chain
from handrail.journal.sql.connection import Connection

NOBODY = "-"
"""The owner at the head of a recorded run's chain while no process owns the run. All chains but those of recorded runs have ""."""

_COLUMNS = "number, chain, link, kind, key, at, session_id, body, mac, state, begins"
_RECORD = f"INSERT INTO records ({_COLUMNS})"
_VALUES = """?::bigint, chain, ?::bigint, ?, ?, ?::double precision, ?, ?::bytea, ?::bytea, ?, ?::bigint"""
_INSERT = f"""WITH head AS (
        INSERT INTO chains (chain, links, seal, number) VALUES (?, ?, ?, ?) RETURNING chain
    ) {_RECORD} SELECT {_VALUES} FROM head"""
_REPLACE = "UPDATE chains SET links = ?, seal = ?, number = ? WHERE chain = ? AND seal = ?"
_APPEND = f"WITH head AS ({_REPLACE} RETURNING chain) {_RECORD} SELECT {_VALUES} FROM head"
FENCED = f"WITH head AS ({_REPLACE} AND owner = ? RETURNING chain) {_RECORD} SELECT {_VALUES} FROM head"
_MOST_HEADS = 10_000


class _Head(NamedTuple):
    links: int
    seal: bytes
    number: int
    owner: str
    session_id: str = ""
    """The session of the last call in the chain; "" if that is not known."""


_EMPTY = _Head(0, b"", 0, "")


class FencedRecord(NewRecord, gc=False):
    """A record to be added by one statement.

    It remembers what was sent, so that it can be found again after a lost connection.
    """

    owners: tuple[str, ...] = ()
    """The owners that its run may have at the head of its chain: this process, and "" if the run need not be recorded."""
    sent: tuple[_Head, bytes, tuple[Any, ...]] | None = None
    """The chain's head after the record, the record's MAC, and the statement's values, as they were sent; None until then."""


class PostgresChains(Chains):
    """Appends records to chains in PostgreSQL. `micros` returns the time of the database in microseconds."""

    def __init__(self, journal: str, path: str, key: bytes, channel: str, micros: Callable[[], int]) -> None:
        super().__init__(journal, path, key)
        self.channel = channel
        """The channel on which processes tell each other what has changed."""
        self._micros = micros
        self._known: dict[str, _Head] = {}
        """The heads of chains as this process last wrote them. Each is compared with the stored one before it is replaced."""

    def append_record(self, connection: Connection, record: NewRecord) -> int:
        chain = record.chain
        for head in (self._known.get(chain), None):
            if head is None:
                head = self._stored_head(connection, chain)
            after, _, values = self._next(record, head)
            if not head.links:
                added = connection.execute(_INSERT, (chain, *after[:3], *values))
            else:
                added = connection.execute(_APPEND, (*after[:3], chain, head.seal, *values))
            if added.rowcount:
                self._note(chain, after)
                return after.links
            # Another process has added to the chain, or a transaction was rolled back.
            self._known.pop(chain, None)
        raise AssertionError("the head was read in this transaction, and still did not match")

    def append_fenced(self, connection: PostgresConnection, record: FencedRecord) -> bool:
        """Add a record to the chain of a run that this process owns, by one statement outside of any transaction.

        Returns False, and adds nothing, unless the run has one of the record's owners and this process knows the current
        head of its chain. Called again after a lost connection, it sends the same statement again. If the
        server is still executing the first one, the second one waits for it. Only one of them adds the record, because both
        replace the same head.
        """
        was_sent = record.sent is not None
        values = self.begin_fenced(record) if record.sent is None else record.sent[2]
        if values is None:
            return False
        if self.end_fenced(record, connection.change(FENCED, values)):
            return True
        return was_sent and self._is_added(connection, record)

    def begin_fenced(self, record: FencedRecord) -> tuple[Any, ...] | None:
        """Return the values of the statement that adds a record, and keep them in `record.sent`.

        Returns None unless this process knows the head of the run's chain, and that head has one of the record's owners.
        """
        chain = record.chain
        head = self._known.get(chain)
        if head is None or head.owner not in record.owners:
            return None
        after, mac, values = self._next(record, head)
        record.sent = after, mac, (*after[:3], chain, head.seal, head.owner, *values)
        return record.sent[2]

    def end_fenced(self, record: FencedRecord, changed: int) -> bool:
        """Note that the statement for a record has changed this many rows. Returns whether it has added the record."""
        assert record.sent is not None
        if changed:
            self._known[record.chain] = record.sent[0]
            return True
        self._known.pop(record.chain, None)
        return False

    def _is_added(self, connection: PostgresConnection, record: FencedRecord) -> bool:
        assert record.sent is not None
        head, mac, _ = record.sent
        query = "SELECT mac FROM records WHERE chain = ? AND link = ?"
        row = connection.execute(query, (record.chain, head.links)).fetchone()
        return row is not None and row[0] == mac

    def _next(self, record: NewRecord, head: _Head) -> tuple[_Head, bytes, tuple[Any, ...]]:
        """Return a chain's head after its next record, that record's MAC, and the values of its columns."""
        number = self._last = max(self._last + 1, head.number + 1, self._micros())
        link, session_id = head.links + 1, record.session_id
        begins = 1 if session_id and session_id != head.session_id else 0
        digest = self._digest(record.chain, record, number, link, begins, head.seal)
        mac, seal = digest[:MAC_BYTES], digest[MAC_BYTES:]
        kind, key, at, body, state = record.kind, record.key, record.at, record.body, record.state
        values = (number, link, kind, key, at, session_id, body, mac, state, begins)
        return _Head(link, seal, number, head.owner, session_id or head.session_id), mac, values

    def _note(self, chain: str, head: _Head) -> None:
        if len(self._known) >= _MOST_HEADS:
            self._known.clear()
        self._known[chain] = head

    def _stored_head(self, connection: Connection, chain: str) -> _Head:
        query = "SELECT links, seal, number, owner FROM chains WHERE chain = ?"
        row = connection.execute(query, (chain,)).fetchone()
        return _EMPTY if row is None else _Head(*row)

    def fence(self, connection: Connection, run_id: str, owner: str) -> None:
        chain, owner = run_chain(run_id), owner or NOBODY
        connection.execute("UPDATE chains SET owner = ? WHERE chain = ?", (owner, chain))
        if chain in self._known:
            self._known[chain] = self._known[chain]._replace(owner=owner)

    def tell(self, connection: Connection, kind: str, id: str) -> None:
        connection.execute("SELECT pg_notify(?, ?)", (self.channel, f"{kind} {id}"[:2000]))

    def remove(self, connection: Connection, chain: str) -> None:
        super().remove(connection, chain)
        self._known.pop(chain, None)

    def read(self, connection: Connection, chain: str) -> list[ChainRecord]:
        found = super().read(connection, chain)
        if found:  # what this process adds next comes after everything that it has seen
            self._last = max(self._last, found[-1].number)
            head = self._stored_head(connection, chain)
            if (head.number, head.owner) != (found[-1].number, self._owner_of(connection, chain)):
                raise self.altered(chain, len(found), "it does not match the end of its chain", found[-1])
        return found

    def _owner_of(self, connection: Connection, chain: str) -> str:
        """Return the owner that the head of a chain must name."""
        run_id = chain.removeprefix("run ")
        query = "SELECT owner FROM runs WHERE id = ?"
        row = connection.execute(query, (run_id,)).fetchone() if run_id != chain else None
        return "" if row is None else row[0] or NOBODY

    def find_damage(self, connection: Connection) -> Iterator[JournalAltered]:
        return alterations(connection, self)  # PostgreSQL reports a damaged page when it is read
