"""Committed calls, entries and steps in a journal's database."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from handrail.concurrency.cancellation import Pending
from handrail.errors import JournalAltered, RunBusy, RunUnknown
from handrail.journal.local import LocalSteps
from handrail.journal.records import CommitUnit, Entry
from handrail.journal.sql.chains import ChainRecord, NewRecord, run_chain, step_chain
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Database, Role, encode, transaction
from handrail.journal.sql.leases import check_owner, is_owner
from handrail.journal.sql.run_rows import find_run
from handrail.journal.sql.runs import insert_spawned
from handrail.journal.sql.verification import (
    CLEARED,
    SETTLED,
    STEP,
    UNIT,
    VOID,
    RunRecords,
    check_session,
    committed_unit,
    entry_of,
    steps_in,
    verified,
    verify_session,
)
from handrail.journal.sql.workspaces import advance

T = TypeVar("T")

log = logging.getLogger("handrail.journal")

_BRIEF = 65_536
"""Maximum size in bytes of a record that `commit_now` writes."""


def _record_of(unit: CommitUnit) -> NewRecord:
    """Return the record of a committed call. Raises `DefinitionError` if a value in it can't be recorded."""
    body = encode(unit, "call {!r} committed", unit.call_id)
    state = "committed" if unit.files else "applied"
    return NewRecord(run_chain(unit.run_id), UNIT, unit.call_id, body, unit.at, unit.session_id, state)


class SqlCalls(Role):
    """The role `Calls` of a journal."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._applying: set[str] = set()
        """The ids of the calls that change files, and that this process is committing or applying."""

    def commit_now(self, unit: CommitUnit, /) -> bool:
        database = self._database
        if not database.adds_now or unit.spawned:
            return False
        record = _record_of(unit)
        return len(record.body) <= _BRIEF and database.add_now(unit.run_id, record)

    def commit_soon(self, unit: CommitUnit, /) -> Pending[bool] | None:
        return None if unit.spawned else self._database.add_soon(unit.run_id, _record_of(unit))

    async def commit(self, unit: CommitUnit, /) -> None:
        database, record = self._database, _record_of(unit)
        if unit.files:
            self._applying.add(unit.call_id)

        def commit(connection: Connection) -> None:
            check_owner(connection, database.owner, unit.run_id)
            for delta in unit.workspaces:
                advance(connection, database, unit.run_id, delta)
            database.chains.append_record(connection, record)
            if not unit.files:
                self._spawn(connection, unit)

        try:
            if unit.workspaces or unit.spawned:
                await database.transact(commit)
            else:
                await database.add(unit.run_id, record)
        except BaseException:
            self._applying.discard(unit.call_id)
            raise

    async def applied(self, unit: CommitUnit, /) -> None:
        self._applying.discard(unit.call_id)
        await self._settle(unit, "applied", synced=False)  # after a power cut, recovery may apply it again

    async def void(self, unit: CommitUnit, /) -> None:
        self._applying.discard(unit.call_id)
        await self._settle(unit, "void", synced=True)

    def _spawn(self, connection: Connection, unit: CommitUnit) -> None:
        """Submit the background runs that a committed call has begun."""
        database = self._database
        for each in unit.spawned:
            insert_spawned(connection, database.chains, each, database.now())

    async def _settle(self, unit: CommitUnit, state: str, *, synced: bool) -> None:
        database = self._database
        chain, now = run_chain(unit.run_id), database.now()
        query = """UPDATE records INDEXED BY units_to_apply SET state = ?
            WHERE chain = ? AND key = ? AND state = 'committed' RETURNING link"""

        def settle(connection: Connection) -> None:
            found = connection.execute(query, (state, chain, unit.call_id)).fetchall()
            if state == "void":
                for (link,) in found:
                    database.chains.append(connection, chain, VOID, unit.call_id, b"%d" % link, at=now)
            elif found:
                self._spawn(connection, unit)

        await database.transact(settle, synced=synced)

    async def unapplied(self) -> Sequence[CommitUnit]:
        database = self._database
        query = """SELECT number, chain FROM records INDEXED BY units_to_apply
            WHERE state = 'committed' ORDER BY number"""

        def find(connection: Connection) -> list[CommitUnit]:
            chains: dict[str, dict[int, ChainRecord]] = {}
            found: list[CommitUnit] = []
            for number, chain in fetch(connection, query):
                if chain not in chains:
                    chains[chain] = self._units_in(connection, chain)
                if number in chains[chain]:
                    found.append(committed_unit(chains[chain][number]))
            return found

        return tuple(unit for unit in await database.transact(find) if unit.call_id not in self._applying)

    def _units_in(self, connection: Connection, chain: str) -> dict[int, ChainRecord]:
        """Return the records of the calls in a run's chain that were committed and not voided, by their numbers.

        The result is empty if another live process owns the run, or if the run was altered. An alteration is logged.
        """
        database, run_id = self._database, str(chain).removeprefix("run ")
        try:
            with contextlib.suppress(RunUnknown):
                row = find_run(connection, database.chains, run_id)
                if row.owner != database.owner and database.leases.is_at_work(connection, row.owner):
                    return {}
            records = verified(connection, database.chains, run_id)
        except JournalAltered as altered:  # recovery continues with the files of other runs
            log.error("the files of a run were not recovered: %s", altered)
            return {}
        return {each.number: each for each in records.units}

    @transaction
    def load(self, connection: Connection, run_id: str, /) -> Sequence[CommitUnit]:
        return tuple(map(committed_unit, verified(connection, self._chains, run_id).units))

    async def load_session(self, session_id: str, /) -> Sequence[CommitUnit]:
        records = await self._records_of(session_id)
        return tuple(map(committed_unit, sorted(each for _, units, _ in records for each in units)))

    async def history(self, session_id: str, /) -> Sequence[tuple[str, CommitUnit | Entry]]:
        found: list[tuple[ChainRecord, str, CommitUnit | Entry]] = []
        for run_id, units, run in await self._records_of(session_id):
            found += [(each, run_id, committed_unit(each)) for each in units]
            found += [(each, run_id, entry_of(each)) for each in run.newest]
        return tuple((run_id, what) for _, run_id, what in sorted(found, key=lambda each: each[0]))

    @transaction
    def _records_of(
        self, connection: Connection, session_id: str
    ) -> list[tuple[str, list[ChainRecord], RunRecords]]:
        """Return the verified records of each run in a session: the run's id, its units in the session, and all its records."""
        query = "SELECT DISTINCT chain FROM records WHERE session_id = ? AND begins = 1"
        ids = dict.fromkeys(check_session(connection, self._chains, session_id))
        ids |= dict.fromkeys(chain.removeprefix("run ") for (chain,) in fetch(connection, query, session_id))
        runs = [(run_id, verified(connection, self._chains, run_id)) for run_id in ids]
        return [(id, [each for each in run.units if each.session_id == session_id], run) for id, run in runs]

    @transaction
    def later(self, connection: Connection, unit: CommitUnit, /) -> Sequence[CommitUnit]:
        last = "SELECT max(number) FROM records WHERE chain = ? AND kind = 'unit' AND key = ? AND state != 'void'"
        # Each half of the UNION finds every run with later records. A damaged page may hide a run from one half, but not from both.
        since = """SELECT chain FROM records WHERE number > ? AND chain LIKE 'run %' UNION SELECT chain FROM chains
            WHERE chain LIKE 'run %' AND (
                SELECT number FROM records WHERE records.chain = chains.chain ORDER BY link DESC LIMIT 1
            ) > ?"""
        verify_session(connection, self._chains, unit.run_id)
        ((number,),) = fetch(connection, last, run_chain(unit.run_id), unit.call_id)
        found: list[ChainRecord] = []
        if number is None:
            return ()
        for (chain,) in fetch(connection, since, number, number):
            # Verified, because a call that somebody removed may have built on this one.
            records = verified(connection, self._chains, str(chain).removeprefix("run "))
            undone = {each.key for each in records.own if each.kind == "undone"}
            found += [each for each in records.units if each.number > number and each.key not in undone]
        return tuple(map(committed_unit, sorted(found)))

    async def note(self, run_id: str, entry: Entry, /, *, from_outside: bool = False) -> None:
        database = self._database

        if not from_outside:
            record = NewRecord(run_chain(run_id), entry.kind, entry.key, entry.body, entry.at)
            await database.add(run_id, record, is_recorded=True)
            return

        def note(connection: Connection) -> None:
            row = find_run(connection, database.chains, run_id)
            if not database.leases.is_free(connection, row.owner, row.leased_until, database.now()):
                raise RunBusy(run_id, row.owner)
            verified(connection, database.chains, run_id)
            database.chains.append(
                connection, run_chain(run_id), entry.kind, entry.key, entry.body, at=entry.at
            )

        await database.transact(note)

    @transaction
    def entries(self, connection: Connection, run_id: str, /) -> Sequence[Entry]:
        return tuple(verified(connection, self._chains, run_id).entries)

    @transaction
    def marks(self, connection: Connection, session_id: str, /) -> Sequence[tuple[str, Entry]]:
        query = """SELECT DISTINCT runs.id FROM runs JOIN records ON chain = 'run ' || runs.id
            WHERE runs.session_id = ? AND kind IN ('undone', 'told')"""

        marks: list[tuple[ChainRecord, str]] = []
        for (run_id,) in fetch(connection, query, session_id):
            records = verified(connection, self._chains, run_id)
            marks += [(each, run_id) for each in records.own if each.kind in ("undone", "told")]
        newest: dict[tuple[str, str, str], tuple[str, Entry]] = {}
        for each, run_id in sorted(marks):
            name = run_id, each.kind, each.key
            newest.pop(name, None)  # a later entry replaces an earlier one
            newest[name] = run_id, Entry(cast("Any", each.kind), each.key, each.at, each.body)
        return tuple(newest.values())


class SqlSteps(Role):
    """The role `Steps` of a journal. A value that is read from the database is returned as plain data."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._local = LocalSteps()
        self._known: dict[str, dict[str, bytes | None]] = {}
        """The verified steps of runs that this process has owned. While it owns a run, no other process can add steps to it."""

    def forget(self, run_id: str) -> None:
        """Drop this process's cached values of a run's steps."""
        self._known.pop(run_id, None)
        self._local.forget(run_id)

    async def run(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        async def recorded() -> Any:
            row = await self._reserved(key, run_id)
            if row is None:
                self._note(run_id, key, None)
            elif row[0] is not None:
                return msgspec.msgpack.decode(row[0])
            if run_id and self._database.leases.is_lapsed():
                await self._database.transact(lambda connection: self._still_owns(connection, run_id))
            try:
                value = await (function() if row is None or unsettled is None else unsettled())
                encoded = encode(value, f"step {key!r} returned")
            except Exception:  # a step that was cancelled may have happened, so it stays reserved
                if row is None:  # an earlier reservation stays until its outcome is decided
                    with contextlib.suppress(RunBusy):  # the new owner decides
                        await self._add(run_id, key, CLEARED, b"")
                raise
            await self._add(run_id, key, SETTLED, encoded)
            return value

        return await self._local.run(key, recorded, run_id=run_id)

    @transaction
    def load(self, connection: Connection, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        return tuple(sorted(verified(connection, self._chains, run_id).steps.items()))

    async def _reserved(self, key: str, run_id: str) -> tuple[bytes | None] | None:
        """Reserve a step, and return what `_reserve` returns.

        If this process knows the steps of the run, and this step is not among them, reserving it is a single write.
        """
        if run_id and key not in self._known.get(run_id, {key: None}):
            with contextlib.suppress(RunBusy):  # the new owner may have settled the step
                record = NewRecord(run_chain(run_id), STEP, key, b"", self._database.now())
                await self._database.add(run_id, record, is_recorded=True)
                return None
        return await self._database.transact(lambda connection: self._reserve(connection, key, run_id))

    def _still_owns(self, connection: Connection, run_id: str) -> None:
        """Renew this process's lease, which was not renewed in time.

        Raises `RunBusy` if the run was taken over meanwhile.
        """
        database = self._database
        check_owner(connection, database.owner, run_id)
        database.leases.until(connection, database.now())

    def _reserve(self, connection: Connection, key: str, run_id: str) -> tuple[bytes | None] | None:
        """Reserve a step and return None. If it is already reserved, return `(value,)`, which is `(None,)` until it is settled."""
        chains, chain = self._chains, _chain_of(run_id, key)
        known = self._known.get(run_id)
        if known is None or not is_owner(connection, self._database.owner, run_id):
            known = steps_in(chains.read(connection, chain))
        if key in known:
            return (known[key],)
        if run_id:
            check_owner(connection, self._database.owner, run_id)
            self._known[run_id] = known
        chains.append(connection, chain, STEP, key, b"", at=self._database.now())
        return None

    async def _add(self, run_id: str, key: str, kind: str, body: bytes) -> None:
        database = self._database
        record = NewRecord(_chain_of(run_id, key), kind, key, body, database.now())
        if run_id:
            await database.add(run_id, record)
        else:
            await database.transact(lambda connection: database.chains.append_record(connection, record))
        if kind == SETTLED:
            self._note(run_id, key, body)
        else:
            self._known.get(run_id, {}).pop(key, None)

    def _note(self, run_id: str, key: str, value: bytes | None) -> None:
        if run_id in self._known:
            self._known[run_id][key] = value


def _chain_of(run_id: str, key: str) -> str:
    return run_chain(run_id) if run_id else step_chain(key)
