"""Rows of the table `runs`: how each run began, its status, its lease and its outcome.

Unlike records, a row is replaced when a run's status or lease changes, so it carries its own MAC.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from handrail.errors import HandrailError, JournalAltered, RunBusy, RunUnknown
from handrail.journal.records import CANCEL, MESSAGES, RunRecord, RunRow, RunStatus
from handrail.journal.sql.chains import Chains, outside_chain, reading, run_chain
from handrail.journal.sql.connection import Connection, chunks, fetch, marks, texts_decoded
from handrail.journal.sql.schema import check_writer


class StoredRun(NamedTuple):
    """A row of the table `runs`, without its MAC."""

    id: str
    session_id: str
    principal: str
    status: RunStatus
    owner: str
    leased_until: float
    began_at: float
    changed_at: float
    signals: int
    """What was asked of the run from outside: `CANCEL`, `MESSAGES`, both or neither."""
    deaths: int
    progress: int
    queue: str
    host: str
    key: str
    due_at: float | None
    legs: int
    record: bytes
    outcome: bytes

    @property
    def session(self) -> tuple[str, str]:
        """The id of the run's session, and its principal."""
        return self.session_id, self.principal

    @property
    def decoded(self) -> RunRecord:
        """The record with which the run began or, until it begins, was submitted."""
        return msgspec.msgpack.decode(self.record, type=RunRecord)

    def shown(self, questions: int, held: bool) -> RunRow:
        """Return the row as readers of the journal see it.

        `questions` is the number of the run's open questions. `held` says whether its owner is alive and holds its lease.
        """
        return RunRow(
            record=self.decoded,
            status=self.status,
            owner=self.owner,
            leased_until=self.leased_until,
            held=held,
            changed_at=self.changed_at,
            outcome=self.outcome,
            questions=questions,
            stopping=bool(self.signals & CANCEL),
            has_messages=bool(self.signals & MESSAGES),
            deaths=self.deaths,
            queue=self.queue,
            host=self.host,
            due_at=self.due_at,
            legs=self.legs,
        )


_OWN = StoredRun._fields
COLUMNS = ", ".join(f"runs.{each}" for each in (*_OWN, "mac"))
WAITING = "(SELECT count(*) FROM questions WHERE run_id = runs.id AND answer IS NULL)"
"""An SQL expression for the number of a run's open questions."""
_INSERT = f"INSERT INTO runs ({', '.join(_OWN)}, mac) VALUES ({', '.join('?' * (len(_OWN) + 1))})"
_UPDATE = f"UPDATE runs SET {', '.join(f'{each} = ?' for each in (*_OWN, 'mac'))} WHERE id = ?"
_REAL = ("leased_until", "began_at", "changed_at", "due_at")


def insert_run(connection: Connection, chains: Chains, row: StoredRun) -> None:
    """Add the row of a new run, and notify other processes. Raises `JournalUpgraded` if this version may not write any more."""
    check_writer(connection, chains.path)
    connection.execute(_INSERT, _sealed(chains, row))
    chains.tell(connection, "run", row.id)


def update_run(connection: Connection, chains: Chains, row: StoredRun, **changes: Any) -> StoredRun:
    """Apply these changes to a run's row, notify other processes, and return the new row.

    Raises `JournalUpgraded` if this version may not write any more.
    """
    check_writer(connection, chains.path)
    changed = row._replace(**changes)
    connection.execute(_UPDATE, (*_sealed(chains, changed), row.id))
    if changed.owner != row.owner:
        chains.fence(connection, row.id, changed.owner)
    chains.tell(connection, "run", row.id)
    return changed


def _sealed(chains: Chains, row: StoredRun) -> tuple[Any, ...]:
    reals = {each: float(getattr(row, each)) for each in _REAL if getattr(row, each) is not None}
    row = row._replace(**reals)  # as SQLite returns them
    return (*row, chains.row_mac("runs", row))


def find_run(connection: Connection, chains: Chains, run_id: str) -> StoredRun:
    """Return the row of a run. Raises `RunUnknown` if there is no such run, and `JournalAltered` if its row was changed or removed."""
    chain = run_chain(run_id)
    with reading(chains, chain, 1, f"run {run_id}"):
        rows = fetch(connection, f"SELECT {COLUMNS} FROM runs WHERE id = ?", run_id)
        if rows:
            return check_run(chains, rows[0], run_id)
        query = (
            "SELECT 1 FROM chains WHERE chain IN (?, ?) UNION ALL SELECT 1 FROM records WHERE chain IN (?, ?)"
        )
        names = chain, outside_chain(run_id)
        if not fetch(connection, f"{query} LIMIT 1", *names, *names) or not _has_begun(connection, chain):
            raise RunUnknown(run_id)
    raise chains.altered(chain, 1, "its row in the table of runs is missing", what=f"run {run_id}")


def find_owned(
    connection: Connection, chains: Chains, owner: str, run_ids: Collection[str]
) -> dict[str, StoredRun | HandrailError]:
    """Return the row of each run that `owner` owns. For each other run, return `RunBusy`, `RunUnknown` or `JournalAltered`.

    The rows are locked until the end of the transaction.
    """
    found: dict[str, StoredRun | HandrailError] = {}
    for some in chunks(run_ids):
        query = f"SELECT {COLUMNS} FROM runs WHERE id IN ({marks(some)}) /* FOR SHARE */"
        values: dict[str, Any] = {}
        with contextlib.suppress(
            sqlite3.DatabaseError
        ):  # one of them is damaged, so they are read one by one
            values = {each[0]: each for each in fetch(connection, query, *some)}
        for run_id in some:
            try:
                known = values.get(run_id)
                row = check_run(chains, known, run_id) if known else find_run(connection, chains, run_id)
                found[run_id] = row if row.owner == owner else RunBusy(run_id, row.owner)
            except (RunUnknown, JournalAltered) as error:
                found[run_id] = error
    return found


def _has_begun(connection: Connection, chain: str) -> bool:
    """Return whether a chain belongs to a recorded run. Calls, questions and steps may be recorded without a run."""
    query = "SELECT 1 FROM records WHERE chain = ? AND link <= 2 AND kind IN ('run', 'fork', 'import')"
    return bool(fetch(connection, query, chain))


def check_run(chains: Chains, values: Sequence[Any], run_id: str | None = None) -> StoredRun:
    """Check the values of a row that was read from the table, and return the row. Raises `JournalAltered` if it was changed."""
    row, mac = StoredRun(*values[: len(_OWN)]), values[len(_OWN)]
    named = str(row.id) if run_id is None else run_id
    if not chains.is_row("runs", row, mac) or row.id != named:
        problem = "its row in the table of runs is not what was recorded"
        raise chains.altered(run_chain(named), 1, problem, what=f"run {named}")
    return row


def rescue_runs(connection: Connection, chains: Chains) -> Iterator[StoredRun | JournalAltered]:
    """Yield every run that can still be read from a damaged journal, and an error for each altered run that is found.

    A file's table of runs is read without its indexes, and from both ends, because SQLite can't read past a damaged page.
    The chains show runs that the table no longer has.
    """
    found: dict[str, None] = {}
    is_file = isinstance(connection, sqlite3.Connection)
    for order in ("NOT INDEXED ORDER BY rowid", "NOT INDEXED ORDER BY rowid DESC") if is_file else ("",):
        for values in _readable(connection, f"SELECT {COLUMNS} FROM runs {order}"):
            if str(values[0]) not in found:
                found[str(values[0])] = None
                try:
                    yield check_run(chains, values)
                except JournalAltered as altered:
                    yield altered
    for query in ("SELECT chain FROM chains", "SELECT chain FROM records WHERE link = 1"):
        for (chain,) in _readable(connection, query):
            kind, _, id = str(chain).partition(" ")
            if kind == "run" and id not in found:
                found[id] = None
                try:
                    yield find_run(connection, chains, id)
                except RunUnknown:
                    continue
                except JournalAltered as altered:
                    yield altered


def _readable(connection: Connection, query: str) -> Iterator[Any]:
    """Yield the rows that a query finds, up to the first damaged one."""
    with texts_decoded(connection), contextlib.suppress(sqlite3.DatabaseError, OverflowError, MemoryError):
        yield from connection.execute(query)
