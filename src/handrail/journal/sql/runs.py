"""Runs in a journal's database, the leases on them, and the turns of sessions: one run at a time works on a recorded session.

A session's row names its current turn and the run that has it, or had it last. There is no separate lease: a run has its
turn while its owner holds the run's lease. So a run that ends, parks or is left gives its turn up in the same statement, and
the turn of a process that has ended is free.

Each turn has a new id. A session in memory remembers the turn that it has followed the record to, and a run begins on it only
if there was no other turn since. A run that takes the turn of a process whose lease has ended takes that process's run from
it in the same transaction, so the process can't commit to the session any more, although its commits check only the run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from handrail.errors import (
    HandrailError,
    JournalAltered,
    JournalUpgraded,
    MessagesWaiting,
    RunBusy,
    RunError,
    RunUnknown,
    SessionBusy,
    SessionOutdated,
)
from handrail.ids import random_id
from handrail.journal.records import (
    CANCEL,
    MESSAGES,
    OVER,
    Mark,
    QueuedMessage,
    RunCopy,
    RunEnd,
    RunRecord,
    RunRow,
    RunStatus,
    SessionRow,
    SessionTurn,
    SpawnedRun,
    TakenTurn,
    Verification,
)
from handrail.journal.sql.chains import Chains, NewRecord, alteration, outside_chain, run_chain
from handrail.journal.sql.connection import Connection, chunks, fetch, marks
from handrail.journal.sql.database import Database, Role, encode, transaction
from handrail.journal.sql.leases import acquire, check_owner, count_deaths, earliest
from handrail.journal.sql.messages import add_end, move_ends
from handrail.journal.sql.run_rows import (
    COLUMNS,
    WAITING,
    StoredRun,
    check_run,
    find_owned,
    find_run,
    insert_run,
    rescue_runs,
    update_run,
)
from handrail.journal.sql.schema import check_writer
from handrail.journal.sql.spending import spend_alterations
from handrail.journal.sql.verification import (
    BEGUN,
    CANCELLED,
    FORK,
    IMPORT,
    OUTCOME,
    RUN,
    SETTLED,
    STEP,
    UNIT,
    WITHDRAWN,
    add_outside,
    add_to_session,
    check_session,
    end_of,
    forget_in_session,
    verified,
    verify_journal,
    verify_session,
)
from handrail.journal.sql.workspaces import keeper, put_blob, remove_unused_blobs, workspace_alterations

_FIND = """SELECT turns.session_id, turns.principal, turns.turn, turns.run_id, turns.mac, coalesce(owner, ''),
        coalesce(leased_until, 0)
    FROM turns LEFT JOIN runs ON runs.id = turns.run_id WHERE turns.session_id = ? AND turns.principal = ?"""
_SET = """INSERT INTO turns VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (session_id, principal) DO UPDATE SET turn = excluded.turn, run_id = excluded.run_id, mac = excluded.mac"""
_SAME = "turns.session_id = runs.session_id AND turns.principal = runs.principal"
_MISSING = f"""SELECT DISTINCT session_id FROM runs WHERE status IN ('running', 'parked', 'done')
    AND NOT EXISTS (SELECT 1 FROM turns WHERE {_SAME})"""
_FORGET = f"DELETE FROM turns WHERE session_id = ? AND NOT EXISTS (SELECT 1 FROM runs WHERE {_SAME})"

SessionKey = tuple[str, str]
"""The id of a session, and its principal. Sessions of different principals have nothing in common, even if they have the same id."""


class _Row(NamedTuple):
    """The row of a session, with the owner and the lease of the run that it names."""

    session: SessionKey
    turn: str
    run_id: str
    owner: str
    leased_until: float


def begin_turn(
    connection: Connection, database: Database, session: SessionKey, run_id: str, followed: SessionTurn | None
) -> SessionTurn:
    """Give a session's next turn to a new run, and return it. A queued run has its turn since it was claimed, and keeps it.

    Raises `SessionBusy` while another run has the turn, and `SessionOutdated` if the session was not followed to its last turn.
    """
    row = _find(connection, database.chains, session)
    if row is None:
        return _set(connection, database.chains, session, random_id(), run_id)
    is_claimed = row.run_id == run_id and row.owner == database.owner
    if not is_claimed:
        _check_free(connection, database, row)
    if followed is None or followed.id != row.turn:
        raise SessionOutdated(session[0])
    if is_claimed:
        return SessionTurn(row.turn)
    if followed.links is not None and followed.links != _links(connection, row.run_id):
        raise SessionOutdated(session[0])
    _dispossess(connection, database, row)
    return _set(connection, database.chains, session, random_id(), run_id)


def take_turn(
    connection: Connection, database: Database, session: SessionKey, run_id: str, *, is_new: bool = True
) -> None:
    """Give a session's turn to a run that is taken. Raises `SessionBusy` while another run has it.

    Without `is_new`, it is still the same turn, because the run changes nothing that sessions in memory do not look up.
    """
    row = _find(connection, database.chains, session)
    if row is not None and row.run_id != run_id:
        _check_free(connection, database, row)
        _dispossess(connection, database, row)
    turn = random_id() if is_new or row is None else row.turn
    _set(connection, database.chains, session, turn, run_id)


def read_turn(connection: Connection, database: Database, session: SessionKey) -> SessionTurn | None:
    """Return a session's current or last turn; None if it has had none.

    If a run has the turn, or its process has not given it up, the turn is named with the length of that run's record. So it is
    noticed if the run adds to the record.
    """
    row = _find(connection, database.chains, session)
    if row is None:
        return None
    return SessionTurn(row.turn, _links(connection, row.run_id) if row.owner else None)


def add_turn(connection: Connection, chains: Chains, session: SessionKey) -> None:
    """Note that a session was changed by a copy of a run, which no process has."""
    _set(connection, chains, session, random_id(), "")


def forget_turns(connection: Connection, session_ids: Iterable[str]) -> None:
    """Delete the rows of sessions with these ids that have no runs any more."""
    for session_id in session_ids:
        connection.execute(_FORGET, (session_id,))


def turn_alterations(connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
    """Yield an error for each session whose row was changed or removed."""
    for session in fetch(connection, "SELECT session_id, principal FROM turns"):
        yield from alteration(_find, connection, chains, session)
    for (session_id,) in fetch(connection, _MISSING):
        yield _altered(chains, session_id, "removed")


def _find(connection: Connection, chains: Chains, session: SessionKey) -> _Row | None:
    for id, principal, turn, run_id, mac, owner, leased_until in fetch(connection, _FIND, *session):
        if not chains.is_row("turns", (id, principal, turn, run_id), mac):
            raise _altered(chains, id, "changed")
        return _Row((id, principal), turn, run_id, owner, leased_until)
    return None


def _altered(chains: Chains, session_id: str, how: str) -> JournalAltered:
    return chains.altered(f"session {session_id}", 1, f"its row in the table of turns was {how}")


def _set(connection: Connection, chains: Chains, session: SessionKey, turn: str, run_id: str) -> SessionTurn:
    """Write a session's row. In PostgreSQL, two transactions that write the same row conflict, and one is repeated."""
    values = *session, turn, run_id
    connection.execute(_SET, (*values, chains.row_mac("turns", values)))
    return SessionTurn(turn)


def _check_free(connection: Connection, database: Database, row: _Row) -> None:
    """Raise `SessionBusy` if a process holds the lease of the run that has the turn."""
    if not database.leases.is_free(connection, row.owner, row.leased_until, database.now()):
        raise SessionBusy(row.session[0], row.run_id, row.owner)


def _dispossess(connection: Connection, database: Database, row: _Row) -> None:
    """Take the run that has the turn from its process, whose lease has ended. The run can be resumed, as after a crash."""
    if row.owner:
        run = find_run(connection, database.chains, row.run_id)
        progress = verified(connection, database.chains, run.id).progress
        lost = {"owner": "", "leased_until": 0.0, "progress": progress, "deaths": count_deaths(run, progress)}
        update_run(connection, database.chains, run, **lost)


def _links(connection: Connection, run_id: str) -> int:
    query = "SELECT links FROM chains WHERE chain = ?"
    found = connection.execute(query, (run_chain(run_id),)).fetchone()
    return 0 if found is None else found[0]


def begin_run(
    connection: Connection, database: Database, run: RunRecord, followed: SessionTurn | None, now: float
) -> SessionTurn:
    """Record a new run, or begin a queued one that this process has taken, with its lease and its session's turn."""
    queued = _queued(connection, database, run.id)
    if queued is None:
        check_new(connection, run.id)
    turn = begin_turn(connection, database, (run.session_id, run.principal), run.id, followed)
    placed = _placed(connection, run)
    lease = database.owner, database.leases.until(connection, now)
    if queued is None:
        insert_new(connection, database.chains, placed, "running", now, lease=lease)
    else:
        _begin_queued(connection, database.chains, queued, placed, lease, now)
    has_messages = queued is not None and bool(queued.signals & MESSAGES)
    if move_ends(connection, database.chains, placed, now) or has_messages:
        return msgspec.structs.replace(turn, has_messages=True)
    return turn


def check_new(connection: Connection, run_id: str) -> None:
    """Raise `RunError` if there is already a run with this id."""
    if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone():
        raise RunError(
            run_id,
            "the journal already has a run with this id",
            "Resume that run, or give the new run another id.",
        )


def insert_new(
    connection: Connection,
    chains: Chains,
    run: RunRecord,
    status: RunStatus,
    changed_at: float,
    *,
    lease: tuple[str, float] = ("", 0.0),
    outcome: bytes = b"",
    queue: tuple[str, str, str, float | None] = ("", "", "", None),
) -> None:
    """Add a new run. `queue` is the name of its queue, its host, its key and when it is due."""
    record = encode(run, f"run {run.id!r} began with")
    ids = run.id, run.session_id, run.principal
    legs = 1 if lease[0] else 0
    row = StoredRun(*ids, status, *lease, run.began_at, changed_at, 0, 0, 0, *queue, legs, record, outcome)
    insert_run(connection, chains, row)
    chain = run_chain(run.id)
    chains.append(connection, chain, RUN, run.id, record, at=run.began_at)
    chains.fence(connection, run.id, row.owner)
    add_to_session(connection, chains, run.session_id, RUN, run.id, chain, at=run.began_at)
    end, body = end_of(status, outcome)
    if end or body:
        chains.append(connection, chain, OUTCOME, end, body, at=changed_at)


def insert_spawned(connection: Connection, chains: Chains, spawned: SpawnedRun, now: float) -> None:
    """Add a run for a worker to begin. Raises `RunError` if its id is in use."""
    check_new(connection, spawned.run.id)
    insert_queued(connection, chains, spawned.run, now, host=spawned.host, due=now)


def insert_queued(
    connection: Connection,
    chains: Chains,
    run: RunRecord,
    now: float,
    *,
    host: str,
    key: str = "",
    due: float,
) -> None:
    """Add a new run that waits for a worker. In its session, it comes after the runs that have begun."""
    queue = run.queue, host, key, due
    insert_new(connection, chains, _placed(connection, run), "queued", now, queue=queue)


def _queued(connection: Connection, database: Database, run_id: str) -> StoredRun | None:
    """Return the row of a queued run that this process has taken, or None if there is no such run."""
    query = "SELECT 1 FROM runs WHERE id = ? AND status = 'queued' AND owner = ?"
    if connection.execute(query, (run_id, database.owner)).fetchone() is None:
        return None
    return find_run(connection, database.chains, run_id)


def _begin_queued(
    connection: Connection,
    chains: Chains,
    queued: StoredRun,
    run: RunRecord,
    lease: tuple[str, float],
    now: float,
) -> None:
    """Begin a submitted run: replace the record in its row, and set its status to `running`.

    The record with which it was submitted stays in the run's chain.
    """
    submitted = queued.decoded
    run = msgspec.structs.replace(run, request=submitted.request, parent=submitted.parent)
    record = encode(run, f"run {run.id!r} began with")
    chains.append(connection, run_chain(run.id), BEGUN, run.id, record, at=run.began_at)
    changes = {"status": "running", "owner": lease[0], "leased_until": lease[1], "changed_at": now}
    update_run(connection, chains, queued, record=record, began_at=run.began_at, **changes)


def _placed(connection: Connection, run: RunRecord) -> RunRecord:
    """Return the run with a start time after that of its session's last run, even if the clock was set back or stands still."""
    query = "SELECT max(began_at) FROM runs WHERE session_id = ? AND status != 'queued'"
    last = connection.execute(query, (run.session_id,)).fetchone()[0]
    if last is None or run.began_at > last:
        return run
    return msgspec.structs.replace(run, began_at=math.nextafter(last, math.inf))


# The plus keeps SQLite from using the principal's index, since a principal has many more runs than a session.
# No `WITH`: the connection's authorizer could not tell its name from that of a planted view.
_SESSIONS = f"""SELECT session, number, changed,
        (SELECT id FROM runs WHERE +principal = :principal AND session_id = session ORDER BY began_at, id LIMIT 1),
        (SELECT count(*) FROM questions JOIN runs ON runs.id = questions.run_id
            WHERE runs.principal = :principal AND session_id = session AND answer IS NULL),
        {COLUMNS}, {WAITING}
    FROM (
        SELECT session_id AS session, count(*) AS number, max(changed_at) AS changed
        FROM runs WHERE principal = :principal GROUP BY session_id
        HAVING CAST(:mark AS DOUBLE PRECISION) IS NULL OR (max(changed_at), session_id) < (:mark, :id)
        ORDER BY changed DESC, session DESC LIMIT :limit
    ) AS found JOIN runs ON runs.id = (
        SELECT id FROM runs WHERE +principal = :principal AND session_id = session
        ORDER BY began_at DESC, id DESC LIMIT 1
    ) ORDER BY changed DESC, session DESC"""

_MOST_SESSIONS = 10_000
"""Maximum number of sessions that a process remembers to have checked."""


class SqlRuns(Role):
    """The role `Runs` of a journal. `lost` is called with the id of each run whose cached values may be out of date."""

    def __init__(self, database: Database, lost: Callable[[str], None]) -> None:
        super().__init__(database)
        self._lost = lost
        self._checked_sessions: set[str] = set()
        """Sessions whose runs the indexes were seen to find all of."""
        self.claimed: dict[str, RunStatus] = {}
        """The runs that this process has claimed, and not taken since, with their statuses before."""

    @transaction
    def begin(
        self, connection: Connection, run: RunRecord, /, *, followed: SessionTurn | None = None
    ) -> SessionTurn:
        database = self._database
        now = database.now()
        return begin_run(connection, database, run, followed, now)

    @transaction
    def turn(self, connection: Connection, session_id: str, principal: str, /) -> SessionTurn | None:
        database = self._database
        return read_turn(connection, database, (session_id, principal))

    async def take(self, run_id: str, /, *, turn: TakenTurn = "new") -> RunRow:
        database = self._database
        now = database.now()

        def take(connection: Connection) -> RunRow:
            row = find_run(connection, database.chains, run_id)
            if not database.leases.is_free(connection, row.owner, row.leased_until, now, database.owner):
                raise RunBusy(run_id, row.owner)
            if turn != "none" and not (turn == "new" and row.status in OVER):
                take_turn(connection, database, row.session, run_id, is_new=turn == "new")
            same = {"status": row.status, "due_at": row.due_at, "legs": row.legs}
            changes: dict[str, Any] = {"signals": row.signals & MESSAGES} if turn == "new" else same
            taken = acquire(connection, database, row, now, **changes)
            return msgspec.structs.replace(self.shown(connection, row), deaths=taken.deaths, legs=taken.legs)

        taken = await database.transact(take)
        status = self.claimed.pop(run_id, taken.status)
        taken = msgspec.structs.replace(
            taken, before=status if taken.owner == database.owner else taken.status
        )
        self._lost(run_id)  # another process may have had the run
        return taken

    async def keep(self, *run_ids: str) -> Mapping[str, int | HandrailError]:
        database = self._database
        now = database.now()

        def keep(connection: Connection) -> Mapping[str, int | HandrailError]:
            try:
                check_writer(connection, database.path)
            except JournalUpgraded as error:
                return dict.fromkeys(run_ids, error)
            found = find_owned(connection, database.chains, database.owner, run_ids)
            kept: dict[str, int | HandrailError] = {}
            for run_id, row in found.items():
                kept[run_id] = _renew(connection, database, row, now) if isinstance(row, StoredRun) else row
            return kept

        return await database.transact(keep, synced=False)

    @transaction
    def stop(self, connection: Connection, run_id: str, /) -> None:
        database = self._database
        now = database.now()
        row = find_run(connection, database.chains, run_id)
        update_run(connection, database.chains, row, signals=row.signals | CANCEL)
        add_outside(connection, database.chains, run_id, CANCELLED, "", b"", at=now)

    async def leave(
        self,
        run_id: str,
        status: RunStatus,
        outcome: bytes = b"",
        /,
        *,
        due_at: float | None = None,
        all_told: bool = False,
    ) -> None:
        database = self._database
        now = database.now()

        def leave(connection: Connection) -> None:
            check_owner(connection, database.owner, run_id)
            row = find_run(connection, database.chains, run_id)
            if all_told and status in OVER and row.signals & MESSAGES:
                raise MessagesWaiting(run_id)
            release(connection, database.chains, row, status, outcome, now, due_at)

        await database.transact(leave)
        self._lost(run_id)

    @transaction
    def get(self, connection: Connection, run_id: str, /) -> RunRow:
        database = self._database
        return self.shown(connection, find_run(connection, database.chains, run_id))

    def shown(self, connection: Connection, row: StoredRun) -> RunRow:
        """Return a row as readers of the journal see it."""
        database = self._database
        if database.is_intact(
            connection, "questions"
        ):  # the row has been found already, whatever the other runs are like
            query = f"SELECT {WAITING} FROM runs WHERE id = ?"
            questions = connection.execute(query, (row.id,)).fetchone()[0]
        else:
            questions = len(verified(connection, database.chains, row.id).open_questions)
        held = bool(row.owner) and database.leases.held(connection, database.now())(
            row.owner, row.leased_until
        )
        return row.shown(questions, held)

    @transaction
    def list(
        self,
        connection: Connection,
        *,
        session_id: str | None = None,
        principal: str | None = None,
        limit: int = 100,
        before: Mark | None = None,
    ) -> Sequence[RunRow]:
        where: dict[str, Any] = {"TRUE": None}
        if session_id is not None:
            where["session_id = ?"] = session_id
        if principal is not None:  # with a session, the session's index finds fewer rows
            where["principal = ?" if session_id is None else "+principal = ?"] = principal
        values = [value for value in where.values() if value is not None]
        if session_id is not None:
            order = f"began_at, id{' LIMIT 1' if limit == 1 else ''}"
        else:
            if before is not None:
                where["(began_at, id) < (?, ?)"] = None
                values += before
            order = "began_at DESC, id DESC LIMIT ?"
            values.append(limit)
        query = f"SELECT {COLUMNS}, {WAITING} FROM runs WHERE {' AND '.join(where)} ORDER BY {order}"
        with contextlib.suppress(JournalAltered):  # the rows are then checked one by one
            if self._is_found(connection, session_id):
                held = self._database.leases.held(connection, self._database.now())
                return tuple(self._checked(row, held) for row in fetch(connection, query, *values))
        rows = [
            row
            for row in self._rescue(connection)
            if session_id in (None, row.record.session_id)
            and principal in (None, row.record.principal)
            and (before is None or row.record.mark < before)
        ]
        if session_id is not None:
            return tuple(rows[:1] if limit == 1 else rows)
        return tuple(rows[: -limit - 1 : -1])

    def _is_found(self, connection: Connection, session_id: str | None) -> bool:
        """Return whether the indexes find all runs or, with `session_id`, all runs of that session, and their questions.

        A session's chain names its runs, so those can be checked without reading all other runs, each of which would take 3 µs.
        """
        database = self._database
        if session_id is None or not database.checks_indexes:
            return database.is_intact(connection, "runs", "questions")
        if session_id not in self._checked_sessions:
            try:
                query = f"SELECT {COLUMNS} FROM runs WHERE session_id = ? ORDER BY began_at, id"
                rows = [check_run(self._chains, row) for row in fetch(connection, query, session_id)]
                ids = check_session(connection, self._chains, session_id)
            except JournalAltered:
                return database.is_intact(connection, "runs", "questions")
            marks = [(row.began_at, row.id) for row in rows]
            if sorted(ids) != sorted(row.id for row in rows) or marks != sorted(marks):
                return False
            if len(self._checked_sessions) >= _MOST_SESSIONS:
                self._checked_sessions.clear()
            self._checked_sessions.add(session_id)
        return database.is_intact(connection, "questions")

    def _checked(self, values: Sequence[Any], held: Callable[[str, float], bool]) -> RunRow:
        row = check_run(self._chains, values)
        return row.shown(values[-1], bool(row.owner) and held(row.owner, row.leased_until))

    def _rescue(self, connection: Connection) -> list[RunRow]:
        """Return the runs of a damaged journal that are not damaged themselves, oldest first. The others are logged once."""
        database = self._database
        database.note_damage()
        found: list[RunRow] = []
        for row in rescue_runs(connection, database.chains):
            try:
                if isinstance(row, JournalAltered):
                    raise row
                found.append(self.shown(connection, row))
            except JournalAltered as altered:
                self._log_once(str(altered), "a run is not listed: %s", altered)
        return sorted(found, key=lambda row: row.record.mark)

    @transaction
    def sessions(
        self, connection: Connection, principal: str, /, *, limit: int = 100, before: Mark | None = None
    ) -> Sequence[SessionRow]:
        at, id = before or (None, None)
        values = {"principal": principal, "limit": limit, "mark": at, "id": id}
        with contextlib.suppress(JournalAltered):
            if self._database.is_intact(connection, "runs", "questions"):
                held = self._database.leases.held(connection, self._database.now())
                return tuple(
                    SessionRow(
                        session_id=session_id,
                        runs=number,
                        changed_at=changed,
                        first=find_run(connection, self._chains, first).decoded,
                        questions=waiting,
                        newest=self._checked(newest, held),
                    )
                    for session_id, number, changed, first, waiting, *newest in connection.execute(
                        _SESSIONS, values
                    ).fetchall()
                )
        return tuple(self._rescue_sessions(connection, principal, before)[:limit])

    def _rescue_sessions(
        self, connection: Connection, principal: str, before: Mark | None
    ) -> list[SessionRow]:
        """Return a principal's sessions in a damaged journal, most recently changed first.

        A session is left out if its chain or one of its runs is damaged.
        """
        sessions: dict[str, list[RunRow]] = {}
        rescued = self._rescue(connection)
        ids = {row.record.id for row in rescued}
        for row in rescued:
            if row.record.principal == principal:
                sessions.setdefault(row.record.session_id, []).append(row)
        found: list[SessionRow] = []
        for session_id, rows in sessions.items():
            with contextlib.suppress(JournalAltered):  # `verify` reports it
                if not ids.issuperset(check_session(connection, self._chains, session_id)):
                    continue
                found.append(
                    SessionRow(
                        session_id=session_id,
                        runs=len(rows),
                        changed_at=max(row.changed_at for row in rows),
                        first=rows[0].record,
                        newest=rows[-1],
                        questions=sum(row.questions for row in rows),
                    )
                )
        found = [each for each in found if before is None or each.mark < before]
        return sorted(found, key=lambda each: each.mark, reverse=True)

    @transaction
    def add(self, connection: Connection, copy: RunCopy, /) -> None:
        run, row, chains = copy.row.record, copy.row, self._chains
        chain, now = run_chain(run.id), self._database.now()
        check_new(connection, run.id)
        if copy.forked_from:
            source, _, step = copy.forked_from.rpartition("#")
            verify_session(connection, chains, source)
            head = chains.head(connection, run_chain(source))
            chains.append(connection, chain, FORK, f"{source}#{step}", head, at=now)
        else:
            chains.append(connection, chain, IMPORT, run.id, b"unverified", at=now)
        insert_new(connection, chains, run, row.status, row.changed_at, outcome=row.outcome)
        add_turn(connection, chains, (run.session_id, run.principal))
        for entry in copy.entries:
            chains.append(connection, chain, entry.kind, entry.key, entry.body, at=entry.at)
        for unit in copy.units:
            body = msgspec.msgpack.encode(unit)
            record = NewRecord(chain, UNIT, unit.call_id, body, unit.at, unit.session_id, "applied")
            chains.append_record(connection, record)
        for key, value in copy.steps:
            chains.append(connection, chain, STEP, key, b"", at=now)
            if value is not None:
                chains.append(connection, chain, SETTLED, key, value, at=now)
        for data in copy.blobs:
            put_blob(connection, chains, data, run.id, at=now)

    @transaction
    def verify(self, connection: Connection, run_id: str | None = None, /) -> Verification:
        database = self._database
        if run_id is not None:
            find_run(connection, database.chains, run_id)  # raises `RunUnknown` if there is no such run
        found = verify_journal(connection, database.chains, run_id)
        if run_id is not None:
            return found
        leases = database.leases.alterations(connection, database.chains)
        others = row_alterations(connection, database.chains)
        return msgspec.structs.replace(found, altered=[*found.altered, *others, *leases])

    async def forget(
        self, run_ids: Sequence[str], /, *, finished: bool = False, dry: bool = False
    ) -> Sequence[str]:
        now = self._database.now()

        def forget(connection: Connection) -> Sequence[str]:
            going = _finished(connection, self._chains, run_ids) if finished else run_ids
            if not dry:
                remove_runs(connection, self._chains, going, now)
            return going

        gone = await self._database.transact(forget)
        for run_id in gone:
            self._lost(run_id)
        return gone


def row_alterations(connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
    """Yield what was altered in the rows of workspaces, of sessions' turns and of what was spent."""
    yield from workspace_alterations(connection, chains)
    yield from turn_alterations(connection, chains)
    yield from spend_alterations(connection, chains)


def release(
    connection: Connection,
    chains: Chains,
    row: StoredRun,
    status: RunStatus,
    outcome: bytes,
    now: float,
    due_at: float | None = None,
) -> None:
    """Release a run's lease, and set its status and outcome. If the run is over, its open questions are withdrawn.

    Otherwise it is due at `due_at`, or earlier if it was due earlier. Without either time, a queued run is due now. A submitted
    run that somebody has asked to stop is due now, or within a second if it has a due time, because a worker has to end it.
    """
    stops = bool(row.signals & CANCEL) and status not in OVER
    signals = (CANCEL if stops else 0) | (row.signals & MESSAGES)
    left = {"status": status, "owner": "", "leased_until": 0.0, "outcome": outcome, "signals": signals}
    left["deaths"] = row.deaths if status in OVER else 0
    due = None if status in OVER else earliest(row.due_at, due_at)
    if row.queue and (stops or (due is None and status == "queued")):
        # A run with a due time waits up to a second, so that a leg that fails is not repeated at once.
        due = now if due is None else min(due, now + 1)
    released = update_run(connection, chains, row, changed_at=now, due_at=due, **left)
    if end_of(status, outcome) != end_of(row.status, row.outcome):
        end, body = end_of(status, outcome)
        chains.append(connection, run_chain(row.id), OUTCOME, end, body, at=now)
    if status in OVER:
        withdraw(connection, chains, now, "run_id = ?", row.id)
        _end_background(connection, chains, released, now)


def _end_background(connection: Connection, chains: Chains, row: StoredRun, now: float) -> None:
    """Send the end of a background run to its parent. If that is over, submit the run that is to be woken, if there is one."""
    child = row.decoded
    if (parent := child.parent) is None:
        return
    outcome = msgspec.msgpack.decode(row.outcome, type=RunEnd) if row.outcome else RunEnd()
    left = {
        unit: amount - outcome.spent[unit] for unit, amount in parent.share.items() if unit in outcome.spent
    }
    text, by = outcome.text if row.status == "done" else outcome.error, child.principal
    end = QueuedMessage(
        id=row.id, text=text, by=by, at=now, child=row.id, agent=child.prompt, end=row.status, left=left
    )
    try:
        above = add_end(connection, chains, parent.run_id, end)
    except (RunUnknown, JournalAltered):
        return  # the end of a run does not depend on its parent
    if above.status in OVER and parent.wake:
        woken = msgspec.msgpack.decode(parent.wake, type=SpawnedRun)
        query = "SELECT 1 FROM runs WHERE session_id = ? AND principal = ? AND status = 'queued'"
        if connection.execute(query, above.session).fetchone() is None:
            run = msgspec.structs.replace(woken.run, began_at=now)
            insert_spawned(connection, chains, msgspec.structs.replace(woken, run=run), now)


def withdraw(connection: Connection, chains: Chains, now: float, where: str, *values: str) -> None:
    """Delete the questions without an answer that match the SQL condition `where`, and record that they were withdrawn."""
    query = f"DELETE FROM questions WHERE answer IS NULL AND {where} RETURNING id, run_id"
    for id, run_id in sorted(connection.execute(query, values).fetchall()):
        chains.append(connection, run_chain(run_id), WITHDRAWN, id, b"", at=now)


def _renew(connection: Connection, database: Database, row: StoredRun, now: float) -> int | HandrailError:
    """Renew the lease of a run. Returns its signals, or an error if a request to cancel it can't be verified."""
    database.leases.renew(connection, database.chains, row, now)
    try:
        if row.signals & CANCEL and not verified(connection, database.chains, row.id).cancelled:
            return row.signals & ~CANCEL
        return row.signals
    except JournalAltered as error:
        return error


def _finished(connection: Connection, chains: Chains, run_ids: Sequence[str]) -> Sequence[str]:
    """Return those of these runs whose sessions may be deleted, as `Runs.forget` says."""
    going, needed = dict.fromkeys(run_ids), set[str]()
    for (record,) in fetch(
        connection, "SELECT record FROM runs WHERE status IN ('queued', 'running', 'parked')"
    ):
        parent = msgspec.msgpack.decode(record, type=RunRecord).parent
        needed.add("" if parent is None else parent.run_id)
    seen: set[SessionKey] = set()
    for run_id in run_ids:
        query = "SELECT session_id, principal FROM runs WHERE id = ?"
        for session in fetch(connection, query, run_id):
            if tuple(session) not in seen:
                seen.add(tuple(session))
                query = "SELECT id, status, owner FROM runs WHERE session_id = ? AND principal = ?"
                rows = fetch(connection, query, *session)
                is_used = any(
                    id not in going or id in needed or status not in OVER or owner
                    for id, status, owner in rows
                )
                is_altered = any(alteration(check_session, connection, chains, session[0]))
                if is_used or is_altered or unapplied_calls(connection, [id for id, *_ in rows]):
                    for id, *_ in rows:
                        going.pop(id, None)
    return list(going)


def unapplied_calls(connection: Connection, run_ids: Iterable[str]) -> list[tuple[str, str]]:
    """Return the run and the id of each call of these runs whose file changes are recorded but not applied."""
    found: list[tuple[str, str]] = []
    for some in chunks(map(run_chain, run_ids)):
        query = f"SELECT chain, key FROM records WHERE state = 'committed' AND chain IN ({marks(some)})"
        found += [(chain.removeprefix("run "), key) for chain, key in fetch(connection, query, *some)]
    return found


def remove_runs(connection: Connection, chains: Chains, run_ids: Iterable[str], now: float) -> None:
    """Delete runs with everything recorded for them, and the decisions of sessions that then have no run."""
    for some in chunks(run_ids):
        _remove(connection, chains, some, now)


def _remove(connection: Connection, chains: Chains, run_ids: tuple[str, ...], now: float) -> None:
    each = marks(run_ids)
    for table in ("questions", "tickets"):
        connection.execute(f"DELETE FROM {table} WHERE run_id IN ({each})", run_ids)
    digests: dict[str, None] = {}
    for names in (run_ids, tuple(map(keeper, run_ids))):
        query = f"DELETE FROM blob_runs WHERE run_id IN ({each}) RETURNING digest"
        digests.update(dict.fromkeys(digest for (digest,) in connection.execute(query, names).fetchall()))
    query = f"SELECT session_id, id FROM runs WHERE id IN ({each})"
    sessions: dict[str, list[str]] = {}
    for session_id, run_id in connection.execute(query, run_ids):
        sessions.setdefault(session_id, []).append(run_id)
    for run_id in run_ids:
        chains.remove(connection, run_chain(run_id))
        chains.remove(connection, outside_chain(run_id))
    connection.execute(f"DELETE FROM runs WHERE id IN ({each})", run_ids)
    for session_id, gone in sessions.items():
        forget_in_session(connection, chains, session_id, gone, at=now)
    forget_turns(connection, sessions)
    remove_unused_blobs(connection, digests)
