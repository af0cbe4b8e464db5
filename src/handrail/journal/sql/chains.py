"""Chains of records: each record carries a keyed MAC that also covers the record before it.

A journal's records form chains: one for each run, one for what is added to a run from outside (answers, votes,
cancellations, deposits), one for each principal's decisions in a session, one for each session, one for the
list of sessions, one for each workspace, and one for each step that belongs to no run. Apart from the state of a committed call, which the MAC
does not cover, a record is never changed. It is deleted only with its whole chain, except that the lists of sessions, of a session's
runs and of users are written again without a person who is erased. To take a record back, as when a
commit is voided or a question is withdrawn, another record is added.

The MAC of a record is one half of a keyed BLAKE2b digest of the journal's id, the chain's name, the record, its positions
in the journal and in the chain, and the chain's seal. The other half is the chain's new seal. Only the head of the chain
stores it, and the transaction that adds the next record replaces it. So a changed, moved or copied record does not match its
MAC. Removing a record is detected too, even at the end, because the seal of an earlier record can't be computed without the key.

Removing a whole chain with its head is also detected, because another chain records that it began: a run's chain
records that others began to add to the run, a session's chain records its runs and its principals' decisions, and the
list of sessions records the sessions. For the chains of steps that belong to no run, and of runs that are not recorded,
there is no such record. Replacing the whole file, or a chain and its head, with an older copy is not detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from handrail.errors import JournalAltered
from handrail.journal.sql.connection import Connection, fetch, is_damage
from handrail.journal.sql.schema import find_damage

MAC_BYTES = 32
_PERSON = b"handrail record"
_encode = msgspec.msgpack.Encoder().encode

INSERT = """INSERT INTO records (chain, link, kind, key, at, session_id, body, mac, state, begins)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_INSERT_HEAD = "INSERT INTO chains (chain, links, seal) VALUES (?, ?, ?)"
_REPLACE_HEAD = "UPDATE chains SET links = ?, seal = ? WHERE rowid = ? AND seal = ?"
_REPLACE_OWN_HEAD = f"{_REPLACE_HEAD} AND coalesce((SELECT owner FROM runs WHERE id = ?), ?) = ?"
_CORRECT_HEAD = "UPDATE chains SET seal = ? WHERE rowid = ?"
_CORRECT_RECORD = "UPDATE records SET mac = ? WHERE number = ?"
_Head = tuple[int, int, bytes | bytearray, str]
"""The row id, number of links, and seal of a chain's head, and the session of its last call; "" if that is not known."""
_MOST_HEADS = 10_000
"""Maximum number of heads that a process remembers."""
_READ = """SELECT number, link, kind, key, at, session_id, body, mac, state, begins FROM records
    WHERE chain = ? ORDER BY link"""
_READ_ONE = "SELECT * FROM records WHERE chain = ? AND link = ?"
_STATES = ("", "committed", "applied", "void")


def run_chain(run_id: str) -> str:
    """Return the name of a run's own chain, which holds all its records except those that `outside_chain` holds."""
    return f"run {run_id}"


def outside_chain(run_id: str) -> str:
    """Return the name of the chain that holds what is added to a run from outside: answers, votes, cancellations and deposits."""
    return f"outside {run_id}"


def decision_chain(session_id: str, principal: str) -> str:
    """Return the name of the chain that holds a principal's decisions in a session."""
    return f"decisions {msgspec.json.encode((session_id, principal)).decode()}"


def decisions_of(chain: str) -> tuple[str, str] | None:
    """Return the session and principal whose decisions a chain holds; None for any other chain."""
    try:
        found = msgspec.json.decode(str(chain).removeprefix("decisions "), type=tuple[str, str])
    except (UnicodeError, msgspec.MsgspecError):  # an altered column can hold anything
        return None
    return found if decision_chain(*found) == chain else None


def session_chain(session_id: str) -> str:
    """Return the name of the chain that records which runs began in a session, and who made decisions in it."""
    return f"session {session_id}"


SESSIONS = "sessions"
"""The name of the chain that records which sessions began."""


ERASURES = "erasures"
"""The name of the chain that records which people were erased, by keyed digests of their names."""


def workspace_chain(name: str) -> str:
    """Return the name of the chain that records the versions of a workspace."""
    return f"workspace {name}"


def step_chain(key: str) -> str:
    """Return the name of the chain that holds a step that belongs to no run."""
    return f"step {key}"


@contextlib.contextmanager
def reading(chains: Chains, chain: str, link: int, what: str = "") -> Generator[None]:
    """Raise `JournalAltered`, which names the chain and the record, if SQLite finds damage while the block runs."""
    try:
        yield
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        raise chains.altered(chain, link, f"it can't be read: {error}", what=what) from error


def alteration(check: Callable[..., object], *values: Any) -> Iterator[JournalAltered]:
    """Yield the error that a check of these values raises, if any."""
    try:
        check(*values)
    except JournalAltered as altered:
        yield altered


class ChainRecord(NamedTuple):
    """One record of a chain."""

    number: int
    """Orders the records of the whole journal by when they were added. In PostgreSQL, it is a time in microseconds."""
    link: int
    """The record's 1-based position in its chain."""
    kind: str
    key: str
    at: float
    session_id: str
    body: bytes
    mac: bytes
    state: str
    """The state of a committed call: `committed`, `applied` or `void`; "" for other records. The MAC does not cover it."""
    begins: int
    """1 for a call by which a session's chains are found: its first call in this chain, and maybe later ones; otherwise 0."""


class NewRecord(msgspec.Struct, gc=False):
    """A record that is about to be added to `chain`. The other fields are those of `ChainRecord`."""

    chain: str
    kind: str
    key: str
    body: bytes
    at: float = 0.0
    session_id: str = ""
    state: str = ""

    @classmethod
    def again(cls, chain: str, record: ChainRecord, body: bytes | None = None) -> NewRecord:
        """Return a record as it was read, or with another body, to be added to a chain that is rewritten."""
        body = record.body if body is None else body
        return cls(chain, record.kind, record.key, body, record.at, record.session_id, record.state)


Fence = tuple[str, str, str]
"""The id of a run, the owner to assume if the run is not recorded, and the owner that it must have."""


class Chains:
    """Appends records to chains, and verifies chains when it reads them."""

    def __init__(self, journal: str, path: str, key: bytes) -> None:
        self._journal = journal
        self.path = path
        self._heads: dict[str, _Head] = {}
        """The heads of chains, as this process last wrote them.

        The seal is compared with the stored one before a head is replaced.
        """
        self.records_read = 0
        """The number of records that were read and verified."""
        self._last = 0
        """The number of the last record that this process added; in PostgreSQL, the highest that it has added or read."""
        self._connection: Connection | None = None
        self._execute: Callable[..., sqlite3.Cursor]
        """Executes statements on `_connection`, always with the same cursor, since creating one takes as long as a short statement."""
        self._keyed = hashlib.blake2b(key=key, digest_size=2 * MAC_BYTES, person=_PERSON)

    def _digest(
        self,
        chain: str,
        record: NewRecord | ChainRecord,
        number: int,
        link: int,
        begins: int,
        seal: bytes | bytearray,
    ) -> bytes:
        hashed = self._keyed.copy()
        hashed.update(_encode((
            self._journal, chain, number, link, record.kind, record.key, record.at, record.session_id, begins, seal, record.body
        )))  # fmt: skip
        return hashed.digest()

    def append(
        self,
        connection: Connection,
        chain: str,
        kind: str,
        key: str,
        body: bytes,
        *,
        at: float = 0.0,
        session_id: str = "",
        state: str = "",
    ) -> int:
        """Add a record to a chain, in the open transaction. Returns its position in the chain."""
        return self.append_record(connection, NewRecord(chain, kind, key, body, at, session_id, state))

    def append_record(self, connection: Connection, record: NewRecord) -> int:
        """Add a record to its chain, in the open transaction. Returns its position in the chain."""
        chain = record.chain
        for known in (self._heads.get(chain), None):  # what this process knows may be out of date
            link = self._extend(connection, record, known or self._head(connection, chain), _REPLACE_HEAD)
            if link:
                return link
        raise AssertionError("the head was read in this transaction, and still did not match")

    def append_own(self, connection: Connection, record: NewRecord, fence: Fence) -> bool:
        """Add a record to the chain of a run if the run has the owner that `fence` names. Returns False if nothing was added.

        The owner is checked by the statement that replaces the head, so this only works if this process knows the head.
        """
        head = self._heads.get(record.chain)
        return head is not None and self._extend(connection, record, head, _REPLACE_OWN_HEAD, fence) != 0

    def _extend(
        self,
        connection: Connection,
        record: NewRecord,
        head: _Head,
        replace: str,
        fence: Fence | tuple[()] = (),
    ) -> int:
        """Add a record after this head, and return its position in the chain.

        Returns 0, and adds nothing, if the statement `replace` does not replace the head, because `head` is out of date
        or the run has a different owner from the one in `fence`.
        """
        if self._connection is not connection:
            self._connection = connection
            self._execute = cast(sqlite3.Connection, connection).cursor().execute
        execute, chain, session_id = self._execute, record.chain, record.session_id
        row, links, seal, session = head
        link, number = links + 1, self._last + 1
        begins = 1 if session_id and session_id != session else 0
        mac, new = self._seal(record, number, link, begins, seal)
        if not links:
            row = execute(_INSERT_HEAD, (chain, link, new)).lastrowid or 0
        elif not execute(replace, (link, new, row, seal, *fence)).rowcount:
            # Another process has added to the chain or taken the run, or a transaction was rolled back.
            self._heads.pop(chain, None)
            return 0
        body = bytearray(record.body)
        values = (
            chain,
            link,
            record.kind,
            record.key,
            record.at,
            session_id,
            body,
            mac,
            record.state,
            begins,
        )
        added = execute(INSERT, values).lastrowid
        if added != number:  # another process has added to the journal, or a transaction was rolled back
            number = added or 0
            mac, new = self._seal(record, number, link, begins, seal)
            execute(_CORRECT_HEAD, (new, row))
            execute(_CORRECT_RECORD, (mac, number))
        self._last = number
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        self._heads[chain] = row, link, new, session_id or session
        return link

    def _seal(
        self, record: NewRecord, number: int, link: int, begins: int, seal: bytes | bytearray
    ) -> tuple[bytearray, bytearray]:
        """Return the MAC of a record and the new seal of its chain.

        They are bytearrays, because sqlite3 looks up an adapter for each `bytes` object, which takes longer than binding it.
        """
        digest = self._digest(record.chain, record, number, link, begins, seal)
        return bytearray(digest[:MAC_BYTES]), bytearray(digest[MAC_BYTES:])

    def sign(self, chain: str, record: ChainRecord, seal: bytes) -> tuple[bytes, bytes]:
        """Return the MAC of a record that is to have this content, and the new seal of its chain. `seal` is the one before it."""
        digest = self._digest(chain, record, record.number, record.link, record.begins, seal)
        return digest[:MAC_BYTES], digest[MAC_BYTES:]

    def _head(self, connection: Connection, chain: str) -> _Head:
        query = "SELECT rowid, links, seal, '' FROM chains WHERE chain = ?"
        return connection.execute(query, (chain,)).fetchone() or (0, 0, b"", "")

    def remove(self, connection: Connection, chain: str) -> None:
        """Remove the records of a chain, and its head."""
        connection.execute("DELETE FROM records WHERE chain = ?", (chain,))
        connection.execute("DELETE FROM chains WHERE chain = ?", (chain,))
        self._heads.pop(chain, None)

    def rewrite(self, connection: Connection, chain: str, records: Iterable[NewRecord]) -> None:
        """Replace a chain's records. Read the chain in the same transaction first, so that nothing that was altered is signed."""
        self.remove(connection, chain)
        for each in records:
            self.append_record(connection, each)

    def head(self, connection: Connection, chain: str) -> bytes:
        """Return the MAC of a chain's last record, or b"" for an empty chain."""
        query = "SELECT mac FROM records WHERE chain = ? ORDER BY link DESC LIMIT 1"
        row = connection.execute(query, (chain,)).fetchone()
        return b"" if row is None else row[0]

    def fence(self, connection: Connection, run_id: str, owner: str) -> None:
        """Note the owner of a run at the head of its chain, in the open transaction.

        In SQLite the run's row is enough, so this does nothing.
        """

    def tell(self, connection: Connection, kind: str, id: str) -> None:
        """Tell other processes that a run or question has changed, once the open transaction is committed.

        In SQLite this does nothing, because other processes check the file for changes.
        """

    def find_damage(self, connection: Connection) -> Iterator[JournalAltered]:
        """Yield what is wrong besides the records: with the file's structure or, in PostgreSQL, with the rows of users' sessions and the audit log."""
        for problem in find_damage(cast(sqlite3.Connection, connection)):
            yield JournalAltered(self.path, "file", "", 0, "", problem)

    def row_mac(self, table: str, values: Sequence[object]) -> bytes:
        """Return the MAC of a row that belongs to no chain and may be updated, such as the row of a run."""
        hashed = self._keyed.copy()
        hashed.update(_encode((self._journal, table, values)))
        return hashed.digest()[:MAC_BYTES]

    def mark(self, principal: str) -> str:
        """Return a keyed digest of a person's name, which tells whether something was theirs without naming them."""
        return self.row_mac("person", (principal,)).hex()

    def is_row(self, table: str, values: Sequence[object], mac: object) -> bool:
        """Return whether the values of a row match its MAC."""
        try:
            return self.row_mac(table, values) == mac
        except (TypeError, ValueError, OverflowError):  # Handrail never writes such a value
            return False

    def read(self, connection: Connection, chain: str) -> list[ChainRecord]:
        """Return the records of a chain, in order. Raises `JournalAltered` if they are not as they were written."""
        with reading(self, chain, 1):
            return self._read(connection, chain)

    def _read(self, connection: Connection, chain: str) -> list[ChainRecord]:
        found: list[ChainRecord] = []
        seal = b""
        for row in self._rows(connection, chain):
            record = ChainRecord(*row)
            expected = len(found) + 1
            if record.link != expected:
                raise self.altered(chain, expected, "it is missing")
            digest = self._of(chain, record, seal)
            mac, seal = digest[:MAC_BYTES], digest[MAC_BYTES:]
            if record.mac != mac or record.state not in _STATES:
                raise self.altered(chain, record.link, "it is not what was recorded there", record)
            found.append(record)
        query = "SELECT links, seal FROM chains WHERE chain = ?"
        links, sealed = next(iter(fetch(connection, query, chain)), (0, b""))
        if not isinstance(links, int) or links > len(found):
            raise self.altered(chain, len(found) + 1, "it is missing")
        if (links, sealed) != (len(found), seal):
            raise self.altered(
                chain, len(found), "it does not match the end of its chain", found[-1] if found else None
            )
        self.records_read += len(found)
        return found

    def _rows(self, connection: Connection, chain: str) -> list[Any]:
        """Return the rows of a chain. If one is damaged, raises a `JournalAltered` that names the first record that can't be read."""
        try:
            return fetch(connection, _READ, chain)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
        link = 1
        with contextlib.suppress(sqlite3.Error):
            while connection.execute(_READ_ONE, (chain, link)).fetchone():
                link += 1
        raise self.altered(chain, link, "it can't be read, because the file is damaged")

    def _of(self, chain: str, record: ChainRecord, seal: bytes) -> bytes:
        try:
            return self._digest(chain, record, record.number, record.link, record.begins, seal)
        except (TypeError, ValueError, OverflowError):  # Handrail never writes such a value
            raise self.altered(chain, record.link, "it is not what was recorded there", record) from None

    def altered(
        self, chain: str, link: int, problem: str, record: ChainRecord | None = None, what: str = ""
    ) -> JournalAltered:
        """Create the error for an altered record of a chain."""
        kind, _, id = str(chain).partition(" ")  # an altered column can hold anything
        if record is not None and not what:
            what = f"{record.kind} {record.key}".strip()
        return JournalAltered(self.path, kind, id, link, what, problem)
