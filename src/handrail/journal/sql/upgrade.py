"""Upgrades of a journal's schema: numbered steps, each from a released schema to a later one, in one transaction.

Before a step writes anything, it compares the whole schema with the one that was released, and verifies every record. So what was
altered is never signed again. After it, the journal is verified as this version does it, and only then is the transaction
committed. A chain is only signed again where a step changes what its MACs cover.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from handrail.errors import JournalAltered, JournalError
from handrail.journal.digest import key_check
from handrail.journal.sql.chains import ChainRecord, Chains, alteration
from handrail.journal.sql.connection import Connection, Rows, fetch
from handrail.journal.sql.runs import add_turn, row_alterations
from handrail.journal.sql.schema import VERSION, check_version, not_upgradable
from handrail.journal.sql.verification import FORK, OUTSIDE, RUN, SESSION, verify_journal
from handrail.journal.sql.workspaces import begin_chain, read_unchained

IN_USE = "Stop every process that uses it, such as servers and workers, then try again."
"""What to do about a journal that can't be upgraded while others use it."""


class Subject(NamedTuple):
    """A journal that is being upgraded, in an open transaction."""

    connection: Connection
    path: str
    id: str
    key: bytes
    found: int
    """The version of its schema."""
    chains: Chains
    """Its chains, as this version writes them."""
    create: Callable[[], None]
    """Creates this version's tables and indexes that the journal lacks."""

    @property
    def is_file(self) -> bool:
        """Whether the journal is in SQLite."""
        return isinstance(self.connection, sqlite3.Connection)


class Upgrade(msgspec.Struct, frozen=True, kw_only=True):
    """What an upgrade has done to a journal, or would do."""

    journal: str
    found: int
    """The version that the journal's schema had."""
    version: int
    """The version that it has afterwards."""
    runs: Mapping[str, int] = {}
    """The number of runs, by status. Empty if there is nothing to upgrade."""
    records: int = 0
    """The number of records, all of which were verified."""
    copy: str = ""
    """The copy of the file as it was before; "" for a database, and if there is nothing to upgrade."""


class Step(NamedTuple):
    """One step of an upgrade."""

    target: int
    """The schema that it leads to."""
    oldest: int
    """The oldest schema whose code may write to the journal after it."""
    is_offline: bool
    """Whether no process may use the journal meanwhile. If not, the step only adds tables, and old code goes on beside new code."""
    verify: Callable[[Subject], Iterator[JournalAltered]]
    change: Callable[[Subject], None]


def next_step(path: str, found: int) -> Step | None:
    """Return the step from a schema; None if a journal with it needs no upgrade. Raises `JournalError` if there is none."""
    if found < VERSION and found not in STEPS:
        raise not_upgradable(path, found)
    return STEPS.get(found)


def examine(subject: Subject, step: Step | None, copy: str = "") -> Upgrade:
    """Verify a journal before a step, and return what the step does.

    Raises `JournalError` if the key is not the journal's, or if anything was altered.
    """
    if step is None:
        check_version(subject.connection, subject.path, subject.found)
        return Upgrade(journal=subject.path, found=subject.found, version=subject.found)
    about = dict(subject.connection.execute("SELECT key, value FROM about").fetchall())
    if about.get("key") != key_check(subject.key, subject.id):
        raise JournalError(
            subject.path,
            "its records were not written with this key",
            "Set HANDRAIL_KEY or HANDRAIL_KEY_FILE as they were when it was created, or restore its key file.",
        )
    _refuse(subject, step.verify(subject))
    query = "SELECT status, count(*) FROM runs GROUP BY status ORDER BY status"
    ((records,),) = subject.connection.execute("SELECT count(*) FROM records").fetchall()
    return Upgrade(
        journal=subject.path,
        found=subject.found,
        version=step.target,
        runs=dict(subject.connection.execute(query).fetchall()),
        records=records,
        copy=copy,
    )


def carry_out(subject: Subject, step: Step) -> None:
    """Change a journal that was examined, and verify it again if the step signs records.

    Raises `JournalError` if it does not verify. Then roll the transaction back.
    """
    step.change(subject)
    connection = subject.connection
    for key, value in (("schema", step.target), ("oldest", step.oldest)):
        connection.execute(
            "INSERT INTO about VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, str(value)),
        )
    if step.is_offline:
        _refuse(subject, verify(subject))


def verify(subject: Subject) -> Iterator[JournalAltered]:
    """Yield what was altered in a journal whose records this version can verify as they are."""
    yield from verify_journal(subject.connection, subject.chains, None).altered
    yield from row_alterations(subject.connection, subject.chains)


def _refuse(subject: Subject, altered: Iterator[JournalAltered]) -> None:
    """Raise `JournalError` if there is an alteration, since signing altered records would make them look genuine."""
    for first in altered:
        others = sum(1 for _ in altered)
        more = f" (and {others} more)" if others else ""
        raise JournalError(
            subject.path,
            f"it can't be upgraded, because something other than Handrail has altered it: {first.place_and_problem}{more}",
            "Nothing was changed. Restore an unaltered copy, then upgrade that.",
        ) from first


# --- from 13 ------------------------------------------------------------------------------------------

# Since 13, MACs cover whether a record marks its session's first call, so every chain is signed again. Records name the MACs
# of the chains that they note, so the noted chains come first. Sessions have turns and workspaces have chains, which begin here.
# `opens` is called `begins`, so that no process which still runs the code of 13 can add to a chain.

_RENAMED = {"signals": "stopping", "begins": "opens"}
_NAMES = re.compile(rf"\b({'|'.join(_RENAMED)})\b")
_CHANGES = (
    "DROP INDEX one_turn_of_a_session",
    *(f"ALTER TABLE {'runs' if new == 'signals' else 'records'} RENAME COLUMN {old} TO {new}" for new, old in _RENAMED.items()),
)  # fmt: skip
_HEADS = (
    "ALTER TABLE chains RENAME TO chains_of_13",
    "INSERT INTO chains (chain, links, seal) SELECT chain, links, seal FROM chains_of_13 ORDER BY number",
    "DROP TABLE chains_of_13",
)
_ORDER = ("outside", "run", "decisions", "session", "sessions")
"""The kinds of chains that note other chains, or are noted, in an order in which each comes after those that it notes."""
_NOTES = (OUTSIDE, FORK, RUN, "decisions", SESSION)
_PLANTED = """SELECT chain FROM chains WHERE chain LIKE 'workspace %'
    UNION SELECT chain FROM records WHERE chain LIKE 'workspace %'"""
_SIGN = "UPDATE records SET mac = ?, body = ? WHERE chain = ? AND link = ?"
_SEAL = "UPDATE chains SET seal = ? WHERE chain = ?"
_encode = msgspec.msgpack.Encoder().encode


class _Renamed:
    """A connection to a journal of schema 13, for statements with the names of today."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

        self.whole = connection

    @property
    def total_changes(self) -> int:
        return self.whole.total_changes

    def execute(self, query: str, values: Sequence[Any] | Mapping[str, Any] = (), /) -> Rows:
        return self.whole.execute(_NAMES.sub(lambda match: _RENAMED[match[1]], query), values)

    def close(self) -> None:
        self.whole.close()


class _Chains13(Chains):
    """Reads chains of schema 13, whose MACs do not cover `begins`."""

    def _digest(
        self, chain: str, record: Any, number: int, link: int, begins: int, seal: bytes | bytearray
    ) -> bytes:
        hashed = self._keyed.copy()
        hashed.update(_encode((
            self._journal, chain, number, link, record.kind, record.key, record.at, record.session_id, seal, record.body
        )))  # fmt: skip
        return hashed.digest()

    def _read(self, connection: Connection, chain: str) -> list[ChainRecord]:
        found, sessions = super()._read(connection, chain), {""}
        for each in found:
            is_new = bool(each.begins)
            if each.begins not in (0, 1) or (
                not each.session_id if is_new else each.session_id not in sessions
            ):
                raise self.altered(chain, each.link, "it is not what was recorded there", each)
            sessions.add(each.session_id)
        return found

    def find_damage(self, connection: Connection) -> Iterator[JournalAltered]:
        found = cast(_Renamed, connection).whole
        return super().find_damage(found) if isinstance(found, sqlite3.Connection) else iter(())


def _read_13(subject: Subject) -> tuple[_Renamed, _Chains13]:
    return _Renamed(subject.connection), _Chains13(subject.id, subject.path, subject.key)


def _verify_13(subject: Subject) -> Iterator[JournalAltered]:
    connection, chains = _read_13(subject)
    for each in verify_journal(connection, chains, None).altered:
        if each.chain != "workspace":
            yield each
    for (chain,) in fetch(connection, _PLANTED):
        yield chains.altered(chain, 1, "workspaces had no such records")
    yield from alteration(read_unchained, connection, chains)


def _change_13(subject: Subject) -> None:
    connection = subject.connection
    old, chains = _read_13(subject)
    workspaces = read_unchained(old, chains)
    sessions = connection.execute(
        "SELECT DISTINCT session_id, principal FROM runs WHERE status != 'queued'"
    ).fetchall()
    _sign(subject, old, chains)
    for each in _CHANGES:
        connection.execute(each)
    if subject.is_file:
        rename, fill, drop = _HEADS
        connection.execute(rename)
        subject.create()
        connection.execute(fill)
        connection.execute(drop)
    else:
        _sign_leases(subject)
        subject.create()
    for session in sessions:
        add_turn(connection, subject.chains, session)
    for each in workspaces:
        begin_chain(connection, subject.chains, each)


def _sign(subject: Subject, old: _Renamed, chains: _Chains13) -> None:
    """Sign every chain again, with what this version's MACs cover."""
    connection = subject.connection
    marks = ", ".join("?" * len(_NOTES))
    noted: dict[bytes, bytes] = {
        body: b""
        for (body,) in connection.execute(
            f"SELECT body FROM records WHERE kind IN ({marks})", _NOTES
        ).fetchall()
    }
    names = connection.execute("SELECT chain, min(number) FROM records GROUP BY chain ORDER BY 2").fetchall()
    for chain, _ in sorted(names, key=lambda each: _rank(each[0])):
        seal, answers = b"", dict[str, int]()
        for record in chains.read(old, chain):
            body = noted.get(record.body) or _converted(record, answers)
            record_now = record._replace(body=body)
            mac, seal = subject.chains.sign(chain, record_now, seal)
            if record.mac in noted:
                noted[record.mac] = mac
            connection.execute(_SIGN, (mac, body, chain, record.link))
        connection.execute(_SEAL, (seal, chain))


def _rank(chain: str) -> int:
    kind = chain.partition(" ")[0]
    return _ORDER.index(kind) if kind in _ORDER else 0


def _converted(record: ChainRecord, answers: dict[str, int]) -> bytes:
    """Return what a record contains, in the form of today. `answers` has the number of the last answer in each conversation."""
    place = record.key.rstrip("0123456789")
    if record.kind == "model answer":
        answers[place[:-1]] = int(record.key[len(place) :])
    if record.kind != "advice":
        return record.body
    return _encode({**msgspec.msgpack.decode(record.body), "after": answers.get(place[:-1], 0)})


def _sign_leases(subject: Subject) -> None:
    """Sign the leases, all of which have ended. A process that owns runs and has none gets one, or it would count as at work."""
    connection = subject.connection
    connection.execute(
        "INSERT INTO leases SELECT DISTINCT owner, 0 FROM runs WHERE owner != '' ON CONFLICT DO NOTHING"
    )
    connection.execute("ALTER TABLE leases ADD COLUMN mac bytea")
    for lease in connection.execute("SELECT owner, leased_until FROM leases").fetchall():
        mac = subject.chains.row_mac("leases", lease)
        connection.execute("UPDATE leases SET mac = ? WHERE owner = ?", (mac, lease[0]))
    connection.execute("ALTER TABLE leases ALTER COLUMN mac SET NOT NULL")


STEPS: dict[int, Step] = {13: Step(VERSION, VERSION, True, _verify_13, _change_13)}
"""The steps, by the schema that they begin from. A step to a schema that was released never changes again."""
