"""What keeps a journal's database small, and erases a person from it.

Everything of a person is deleted in one transaction, table by table. `ERASERS` says for each table what is deleted. Of what they have
done in the runs of others, such as votes, nothing is deleted: those runs' chains would no longer show who decided. It is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from handrail.errors import ErasureRefused, JournalError
from handrail.journal.records import OVER, Holdings, RunRecord, workspace_name
from handrail.journal.sql.chains import ERASURES, Chains, decisions_of, outside_chain, workspace_chain
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Database, Role, transaction
from handrail.journal.sql.run_rows import COLUMNS, check_run
from handrail.journal.sql.runs import remove_runs, unapplied_calls
from handrail.journal.sql.spending import RAISED, erase_windows, windows_of
from handrail.journal.sql.verification import ANSWER, VOTE, check_session, erase_from_lists
from handrail.journal.sql.workspaces import erase_workspaces, workspaces_of

_ERASED = "erased"


class Person(NamedTuple):
    """Somebody whose data is being deleted."""

    name: str
    holdings: Holdings
    now: float


Eraser = Callable[[Connection, Chains, Person], object]


ERASERS: Sequence[tuple[str, Eraser | None]] = (
    (
        "runs turns questions tickets blob_runs blobs",
        lambda connection, chains, of: remove_runs(connection, chains, of.holdings.runs, of.now),
    ),
    (
        "workspaces workspace_files",
        lambda connection, chains, of: erase_workspaces(
            connection, chains, of.holdings.workspaces, of.holdings.runs
        ),
    ),
    ("spending reservations", lambda connection, chains, of: erase_windows(connection, chains, of.name)),
    ("outbox", lambda connection, chains, of: _erase_told(connection, of.holdings.runs)),
    (
        "records chains",
        lambda connection, chains, of: erase_from_lists(connection, chains, of.holdings.sessions, of.name),
    ),
    ("about workers", None),
)
"""What deletes a person's rows, in this order, with the tables that it is there for. None: no row is about a person.

A test compares these tables with those of the schema. Those that only PostgreSQL has are in `Database.erasers`.
"""


def _erase_told(connection: Connection, runs: Sequence[str]) -> None:
    """Delete what receivers were told, if that names a question of one of these runs. At worst, others are told theirs twice."""
    for receiver, state in fetch(connection, "SELECT receiver, state FROM outbox"):
        if any(run_id.encode() in state for run_id in runs):
            connection.execute("DELETE FROM outbox WHERE receiver = ?", (receiver,))


class SqlUpkeep(Role):
    """The role `Upkeep` of a journal. `lost` is called with the id of each run that was erased."""

    def __init__(self, database: Database, lost: Callable[[str], None]) -> None:
        super().__init__(database)
        self._lost = lost

    @transaction
    def holdings(self, connection: Connection, principal: str, /) -> Holdings:
        return self._person(connection, principal).holdings

    async def erase(self, principal: str, /) -> Holdings:
        held = await self._erase(principal)
        for run_id in held.runs:
            self._lost(run_id)
        return held

    @transaction
    def _erase(self, connection: Connection, principal: str) -> Holdings:
        chains, person = self._chains, self._person(connection, principal)
        held = person.holdings
        if held.unfinished or held.unapplied:
            raise ErasureRefused(principal, held.unfinished, held.unapplied)
        self._check(connection, held)
        before = connection.total_changes
        for _, erase in (*self._database.erasers, *ERASERS):
            if erase is not None:
                erase(connection, chains, person)
        if connection.total_changes == before:
            return held
        count = {"runs": len(held.runs), "sessions": len(held.sessions), "workspaces": len(held.workspaces)}
        body = msgspec.msgpack.encode(count)
        chains.append(connection, ERASURES, _ERASED, held.digest, body, at=person.now)
        return msgspec.structs.replace(held, erased_at=person.now)

    def _check(self, connection: Connection, held: Holdings) -> None:
        """Raise `JournalAltered` if what says whose runs these are was altered, since an erasure would hide that, or leave some out."""
        chains = self._chains
        for row in connection.execute(f"SELECT {COLUMNS} FROM runs"):
            check_run(chains, row)
        for session_id in held.sessions:
            check_session(connection, chains, session_id)
        for name in (*held.workspaces, *held.shared):
            chains.read(connection, workspace_chain(name))

    async def compact(self) -> bool:
        return await self._database.compact()

    @transaction
    def is_due(self, connection: Connection, duty: str, every: float, /) -> bool:
        now = self._database.now()
        row = connection.execute("SELECT value FROM about WHERE key = ?", (duty,)).fetchone()
        if row is not None and 0 <= now - float(row[0]) < every:
            return False
        connection.execute(
            "INSERT INTO about VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (duty, str(now)),
        )
        return True

    def _person(self, connection: Connection, name: str) -> Person:
        """Find everything of a person. Raises `JournalError` if an index would not find all of their runs."""
        database, chains = self._database, self._chains
        if not database.is_intact(connection, "runs", "questions"):
            advice = "`handrail runs verify` lists what is damaged. Restore the file from a backup first."
            raise JournalError(
                database.path, "it is damaged, so not everything of a person can be found", advice
            )
        query = "SELECT id, session_id, status, owner, leased_until FROM runs WHERE principal = ? ORDER BY began_at, id"
        rows = fetch(connection, query, name)
        held = database.leases.held(connection, database.now())
        own = {session_id: None for _, session_id, *_ in rows}
        decided = (decisions_of(chain) for (chain,) in fetch(connection, _DECISIONS))
        own.update((owner[0], None) for owner in decided if owner is not None and owner[1] == name)
        runs = dict.fromkeys(id for id, *_ in rows)
        runs.update((id, None) for (id,) in fetch(connection, _ASKED, name))
        for session_id in own:
            if fetch(connection, _OTHERS, session_id, name):
                continue
            for (chain,) in fetch(connection, _UNRECORDED, session_id):
                runs[chain.partition(" ")[2]] = None
        only, shared = workspaces_of(connection, chains, name, _users(connection))
        newest = fetch(
            connection, "SELECT max(at) FROM records WHERE chain = ? AND key = ?", ERASURES, chains.mark(name)
        )
        return Person(
            name,
            Holdings(
                principal=name,
                digest=chains.mark(name),
                runs=list(runs),
                sessions=list(own),
                unfinished=[
                    (id, "running" if status in OVER else status)
                    for id, _, status, owner, until in rows
                    if status not in OVER or (owner and held(owner, until))
                ],
                unapplied=unapplied_calls(connection, runs),
                workspaces=only,
                shared=shared,
                votes=list(_votes(connection, name, runs)),
                erased_at=newest[0][0],
            ),
            database.now(),
        )


_DECISIONS = "SELECT chain FROM chains WHERE chain LIKE 'decisions %'"
_OTHERS = "SELECT 1 FROM runs WHERE session_id = ? AND principal != ? LIMIT 1"
_ASKED = "SELECT DISTINCT run_id FROM questions WHERE principal = ? AND run_id NOT IN (SELECT id FROM runs)"
_UNRECORDED = """SELECT DISTINCT chain FROM records WHERE begins = 1 AND session_id = ?
    AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.id = substr(chain, 5))"""


class _Folder(msgspec.Struct):
    """The part of how a run began, or of its request, that says where it works."""

    folder: str = ""


class _By(msgspec.Struct):
    """The part of a vote, an answer or a decision that says who gave it."""

    by: str = ""


class _Decided(msgspec.Struct):
    item: _By


def _users(connection: Connection) -> Mapping[str, set[str]]:
    """Return the principals of the runs in each workspace."""
    found: dict[str, set[str]] = {}
    if not fetch(connection, "SELECT 1 FROM workspaces LIMIT 1"):
        return found
    for (body,) in connection.execute("SELECT record FROM runs"):
        run = msgspec.msgpack.decode(body, type=RunRecord)
        for each in (run.begin, run.request):
            name = workspace_name(msgspec.msgpack.decode(each, type=_Folder).folder) if each else ""
            if name:
                found.setdefault(name, set()).add(run.principal)
    return found


def _votes(connection: Connection, name: str, runs: Mapping[str, None]) -> Iterator[tuple[str, str]]:
    """Yield the votes, answers, decisions and raises of a cap that a person gave in the runs, sessions and windows of others."""
    own = {*map(outside_chain, runs), *(f"spending {each}" for each in windows_of(connection, name))}
    query = "SELECT chain, kind, body FROM records WHERE kind IN (?, ?, ?, 'remembered', 'revoked')"
    for chain, kind, body in connection.execute(query, (VOTE, ANSWER, RAISED)):
        owner = decisions_of(chain)
        if owner is not None:
            if owner[1] != name and msgspec.json.decode(body, type=_Decided).item.by == name:
                yield "decision", owner[0]
        elif chain not in own and msgspec.msgpack.decode(body, type=_By).by == name:
            yield "raise of a cap" if kind == RAISED else kind, chain.partition(" ")[2]
