"""The accounts of a server's users in PostgreSQL, which all servers and workers of the journal share.

Accounts are records of a chain, so that a changed, copied, removed or restored one is noticed. Sign-ins and the entries of the audit log
are rows with MACs. The entries have consecutive numbers, so that a removed one is noticed unless it was the last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from handrail.clock import SYSTEM_CLOCK
from handrail.errors import JournalAltered, JournalError
from handrail.journal.postgres.notices import ACCOUNTS
from handrail.journal.protocol import Account, Note, SignIn
from handrail.journal.sql.chains import Chains, NewRecord
from handrail.journal.sql.connection import Connection, fetch

if TYPE_CHECKING:
    from handrail.journal.postgres.database import PostgresDatabase
    from handrail.journal.sql.database import Work

T = TypeVar("T")

log = logging.getLogger("handrail.journal")

CHAIN = "users"
"""The name of the chain of accounts."""
_ADDED, _REMOVED = "added", "removed"
ERASED = "erased"
"""What the audit log says in place of an entry of a person who was erased."""
_FRESH_SECONDS = 2.0
"""Seconds for which what was read is used again, in case a notice was missed."""
_PATIENCE = 5.0
"""Seconds to wait for the database. Event loops wait for it too, so a server can't wait until a lost database is back."""
_TICK = 0.001
_SIGN_IN = "SELECT secret, id, name, ends_at, body, mac FROM sign_ins"


class PostgresAccounts:
    """Accounts in a journal's database. What was read is used again until a notice says that another process has changed it."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._changes = 0
        self._known: dict[str, Future[Any]] = {}
        """What was read, or is being read, by what it is."""
        self._fresh_until = 0.0
        self._oldest: tuple[Future[Any], float] | None = None
        """A read that has no result yet, and when it was begun."""
        database.subscribe(self._noticed)

    def add(self, account: Account, /) -> bool:
        def add(connection: Connection) -> bool:
            chains, known = self._database.chains, self._read_accounts(connection)
            before = known.get(account.name)
            if before is not None and before.removed_at is None:
                return False
            last = max((each.removed_at or each.added_at for each in known.values()), default=0.0)
            added = msgspec.structs.replace(account, added_at=max(account.added_at, last + _TICK))
            body = msgspec.msgpack.encode(added)
            chains.append(connection, CHAIN, _ADDED, account.name, body, at=added.added_at)
            return self._tell(connection)

        return self._change(add)

    def tell_at(self, name: str, urls: tuple[str, ...], /) -> bool:
        def change(connection: Connection) -> bool:
            account = self._read_accounts(connection).get(name)
            if account is None or account.removed_at is not None:
                return False
            body = msgspec.msgpack.encode(msgspec.structs.replace(account, notify=urls))
            at = self._database.now()
            self._database.chains.append(connection, CHAIN, _ADDED, name, body, at=at)
            return self._tell(connection)

        return self._change(change)

    def remove(self, name: str, /) -> bool:
        def remove(connection: Connection) -> bool:
            account = self._read_accounts(connection).get(name)
            connection.execute("DELETE FROM sign_ins WHERE name = ?", (name,))
            if account is not None and account.removed_at is None:
                at = max(self._database.now(), account.added_at + _TICK)
                self._database.chains.append(connection, CHAIN, _REMOVED, name, b"", at=at)
            self._tell(connection)
            return account is not None and account.removed_at is None

        return self._change(remove)

    def all(self) -> Mapping[str, Account]:
        return self._look_up("accounts", self._read_accounts)

    def find(self, name: str, /) -> Account | None:
        return self.all().get(name)

    def begin(self, sign_in: SignIn, /) -> None:
        row = (sign_in.secret, sign_in.id, sign_in.name, sign_in.ends_at, msgspec.msgpack.encode(sign_in))
        mac = self._database.chains.row_mac("sign_ins", row)

        def begin(connection: Connection) -> None:
            connection.execute("DELETE FROM sign_ins WHERE ends_at < ?", (sign_in.began_at,))
            connection.execute("INSERT INTO sign_ins VALUES (?, ?, ?, ?, ?, ?)", (*row, mac))

        self._change(begin)

    def session(self, *, secret: bytes = b"", id: str = "") -> SignIn | None:
        query = f"{_SIGN_IN} WHERE secret = ? OR id = ?"
        found = self._look_up(
            f"{secret.hex()} {id}", lambda connection: self._read_sign_ins(connection, query, secret, id)
        )
        return found[0] if found else None

    def sessions(self) -> Sequence[SignIn]:
        found = self._look_up("sessions", lambda connection: self._read_sign_ins(connection, _SIGN_IN))
        return sorted(found, key=lambda each: each.began_at)

    def end(self, *, id: str | None = None, name: str | None = None) -> int:
        query = """DELETE FROM sign_ins WHERE (CAST(:id AS text) IS NULL OR id = :id)
            AND (CAST(:name AS text) IS NULL OR name = :name)"""

        def end(connection: Connection) -> int:
            ended = connection.execute(query, {"id": id, "name": name}).rowcount
            self._tell(connection)
            return ended

        return self._change(end)

    def note(self, note: Note, /) -> None:
        def add(connection: Connection) -> None:
            self._add_note(connection, note)

        def report(done: Future[None]) -> None:
            if done.exception() is not None:
                log.error("an entry of the audit log was lost: %s", note, exc_info=done.exception())

        self._database.begin(add).add_done_callback(report)  # no request waits for it

    def _add_note(self, connection: Connection, note: Note) -> None:
        # Of two processes that choose the same number, one is run again once the other's entry is visible.
        values = msgspec.structs.astuple(note)
        (number,) = connection.execute("SELECT coalesce(max(number), 0) + 1 FROM audit").fetchone()
        mac = self._database.chains.row_mac("audit", (number, *values))
        connection.execute("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", (number, *values, mac))

    def notes(self, *, who: str | None, after: int, limit: int | None) -> Sequence[tuple[int, Note]]:
        def read(connection: Connection) -> Sequence[tuple[int, Note]]:
            found: list[tuple[int, Note]] = []
            most = limit if who is None else None
            for number, entry in _entries(connection, self._database.chains, after, most):
                if isinstance(entry, JournalAltered):
                    raise entry
                if who in (None, entry.who):
                    found.append((number, entry))
            return found[:limit]

        return self._database.transact_now(read)

    def erase(self, name: str, note: Note, /) -> int:
        """Delete everything of a person. The numbers of their entries stay, so that a missing number still shows that an entry was removed."""

        def erase(connection: Connection) -> int:
            chains, erased = self._database.chains, 0
            accounts = [each for each in chains.read(connection, CHAIN) if each.key != name]
            is_known = name in self._read_accounts(connection)
            if is_known:
                chains.rewrite(connection, CHAIN, [NewRecord.again(CHAIN, each) for each in accounts])
            is_known |= bool(connection.execute("DELETE FROM sign_ins WHERE name = ?", (name,)).rowcount)
            for number, entry in list(_entries(connection, chains)):
                if isinstance(entry, JournalAltered):
                    raise entry
                if entry.is_about(name):
                    erased += 1
                    values = (entry.at, "", ERASED, "", "{}")
                    mac = chains.row_mac("audit", (number, *values))
                    query = "UPDATE audit SET at = ?, who = ?, action = ?, address = ?, details = ?, mac = ? WHERE number = ?"
                    connection.execute(query, (*values, mac, number))
            if is_known or erased:
                self._add_note(connection, note)
            self._tell(connection)
            return erased

        return self._change(erase)

    def compact(self) -> bool:
        return True

    def refresh(self) -> None:
        with self._lock:
            self._changes += 1
            self._known.clear()

    def generation(self) -> tuple[Any, ...]:
        self._database.notices.begin()
        return self._changes, SYSTEM_CLOCK.monotonic() // _FRESH_SECONDS

    def close(self) -> None:
        """Do nothing: the journal closes its database."""

    def _noticed(self, kind: str, id: str) -> None:
        if kind in (ACCOUNTS, ""):
            self.refresh()

    def _tell(self, connection: Connection) -> bool:
        self._database.chains.tell(connection, ACCOUNTS, "")
        return True

    def _change(self, work: Work[T]) -> T:
        changed = self._database.transact_now(work)
        self.refresh()
        return changed

    def _look_up(self, what: str, read: Callable[[Connection], T]) -> T:
        """Return what was read a moment ago, or read it. Raises `JournalError` if the database does not answer for a while."""
        with self._lock:
            now = SYSTEM_CLOCK.monotonic()
            if now >= self._fresh_until:
                self._known.clear()
                self._fresh_until = now + _FRESH_SECONDS
            if self._oldest is not None and self._oldest[0].done():
                self._oldest = None
            if self._oldest is not None and now - self._oldest[1] > _PATIENCE:
                raise self._silence()
            found: Future[T] | None = self._known.get(what)
            if found is None:
                found = self._known[what] = self._database.begin(read)
                self._oldest = self._oldest or (found, now)
        try:
            return found.result(_PATIENCE)
        except TimeoutError:
            raise self._silence() from None

    def _silence(self) -> JournalError:
        return JournalError(
            self._database.path,
            "its users can't be read, because the database does not answer",
            "Check that the server is running and reachable from this machine.",
            is_lost=True,
        )

    def _read_accounts(self, connection: Connection) -> dict[str, Account]:
        found: dict[str, Account] = {}
        for each in self._database.chains.read(connection, CHAIN):
            if each.kind == _ADDED:
                found[each.key] = msgspec.msgpack.decode(each.body, type=Account)
            elif each.kind == _REMOVED:
                found[each.key] = msgspec.structs.replace(found[each.key], removed_at=each.at)
        return dict(sorted(found.items()))

    def _read_sign_ins(self, connection: Connection, query: str, *values: object) -> list[SignIn]:
        found: list[SignIn] = []
        for *row, mac in fetch(connection, query, *values):
            if self._database.chains.is_row("sign_ins", row, mac):
                found.append(msgspec.msgpack.decode(row[-1], type=SignIn))
            else:
                log.error("the session %s is refused: something other than Handrail wrote its row", row[1])
        return found


def alterations(connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
    """Yield each session and each entry of the audit log that was altered, and the first of those that were removed together."""
    for *row, mac in fetch(connection, _SIGN_IN):
        chains.records_read += 1
        if not chains.is_row("sign_ins", row, mac):
            yield chains.altered(f"sign-in {row[1]}", 1, "something other than Handrail wrote its row")
    for _, entry in _entries(connection, chains):
        if isinstance(entry, JournalAltered):
            yield entry


def _entries(
    connection: Connection, chains: Chains, after: int = 0, limit: int | None = None
) -> Iterator[tuple[int, Note | JournalAltered]]:
    """Yield the audit log's entries after this number, or what is wrong with them."""
    query = """SELECT number, at, who, action, address, details, mac FROM audit WHERE number > :after
        ORDER BY number LIMIT :limit"""
    for number, *values, mac in fetch(connection, query, after=after, limit=limit):
        chains.records_read += 1
        if number != after + 1:
            yield after + 1, chains.altered(f"audit {after + 1}", 1, "it is missing")
        if chains.is_row("audit", (number, *values), mac):
            yield number, Note(*values)
        else:
            yield number, chains.altered(f"audit {number}", 1, "its row was changed")
        after = number
