"""Sessions in a journal: chains that record which runs began, so that a whole run can't be removed unnoticed.

A session's chain has a record for each run that began in the session, and for each principal whose decisions are
remembered there. A separate chain lists the sessions. Each of these records contains the MAC of the record with which
the run, the decisions or the session began, so nothing else can take their place. Runs and sessions that Handrail itself
deletes are recorded as forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from handrail.errors import JournalAltered
from handrail.journal.chains import SESSIONS, Chains, Record, decision_chain, fetch, reading, session_chain
from handrail.journal.connection import Connection

RUN, DECISIONS, SESSION, FORGOTTEN = "run", "decisions", "session", "forgotten"

_RUNS = """SELECT runs.id, records.mac FROM runs LEFT JOIN records
    ON records.chain = 'run ' || runs.id AND records.link <= 2 AND records.kind = 'run' WHERE runs.session_id = ?"""
"""Finds the MAC of the record with which each run began: for a forked or imported run, the second record of its chain."""
_FIRST = "SELECT mac FROM records WHERE chain = ? AND link = 1"


def add_to_session(
    connection: Connection,
    chains: Chains,
    session_id: str,
    kind: str,
    key: str,
    chain: str,
    *,
    at: float,
) -> None:
    """Record that a chain began in a session: the chain of a run, or of a principal's decisions.

    The MAC of the chain's newest record identifies it.
    """
    own = session_chain(session_id)
    if chains.append(connection, own, kind, key, chains.head(connection, chain), at=at) == 1:
        chains.append(connection, SESSIONS, SESSION, session_id, chains.head(connection, own), at=at)


def forget_in_session(
    connection: Connection, chains: Chains, session_id: str, run_ids: Iterable[str], *, at: float
) -> None:
    """Record that runs of a session were deleted.

    If the session has no other runs, delete its decisions and its chain instead, and record that the session was deleted.
    """
    own = session_chain(session_id)
    if connection.execute("SELECT 1 FROM runs WHERE session_id = ? LIMIT 1", (session_id,)).fetchone():
        for run_id in run_ids:
            chains.append(connection, own, FORGOTTEN, run_id, b"", at=at)
        return
    query = "SELECT DISTINCT key FROM records WHERE chain = ? AND kind = ?"
    for (principal,) in connection.execute(query, (own, DECISIONS)).fetchall():
        chains.remove(connection, decision_chain(session_id, principal))
    chains.remove(connection, own)
    chains.append(connection, SESSIONS, FORGOTTEN, session_id, b"", at=at)


def check_session(connection: Connection, chains: Chains, session_id: str) -> list[str]:
    """Return the ids of a session's runs, in the order in which they were recorded. The runs themselves are not verified.

    Raises `JournalAltered` unless the session has exactly the runs that began in it and were not forgotten, and every
    chain of decisions that began in it.
    """
    chain = session_chain(session_id)
    with reading(chains, chain, 1):
        return _check_session(connection, chains, session_id, chain)


def _check_session(connection: Connection, chains: Chains, session_id: str, chain: str) -> list[str]:
    records = chains.read(connection, chain)
    begun = _begun(chains, chain, records, RUN)
    found: dict[tuple[str, str], object] = {
        (RUN, run_id): mac for run_id, mac in fetch(connection, _RUNS, session_id)
    }
    for kind, principal in begun:
        if kind == DECISIONS:
            rows = fetch(connection, _FIRST, decision_chain(session_id, principal))
            if rows:
                found[kind, principal] = rows[0][0]
    _compare(chains, chain, len(records), begun, found)
    return [key for kind, key in begun if kind == RUN]


def session_alterations(
    connection: Connection, chains: Chains, session_ids: Iterable[str]
) -> Iterator[JournalAltered]:
    """Yield the first alteration of each session, and of the list of sessions."""
    found: dict[tuple[str, str], object] = {}
    for session_id in session_ids:
        rows = fetch(connection, _FIRST, session_chain(session_id))
        found[SESSION, session_id] = rows[0][0] if rows else None
    owners = {str(id): None for (id,) in fetch(connection, "SELECT DISTINCT session_id FROM runs")}
    for session_id in {**dict.fromkeys(session_ids), **owners}:
        try:
            check_session(connection, chains, session_id)
        except JournalAltered as altered:
            yield altered
    try:
        records = chains.read(connection, SESSIONS)
        _compare(chains, SESSIONS, len(records), _begun(chains, SESSIONS, records, SESSION), found)
    except JournalAltered as altered:
        yield altered


def read_decisions(connection: Connection, chains: Chains, session_id: str, principal: str) -> list[Record]:
    """Return a principal's decisions in a session.

    Raises `JournalAltered` if they or the session's chain were altered, or if that chain does not record how they began.
    """
    records = chains.read(connection, decision_chain(session_id, principal))
    if records:
        chain = session_chain(session_id)
        members = chains.read(connection, chain)
        began = _begun(chains, chain, members, RUN).get((DECISIONS, principal))
        if began is None or began.body != records[0].mac:
            raise chains.altered(chain, len(members) + 1, "it is missing", what=f"{DECISIONS} {principal}")
    return records


def _begun(
    chains: Chains, chain: str, records: Iterable[Record], forgettable: str
) -> dict[tuple[str, str], Record]:
    """Return the records of everything that began and was not forgotten, by kind and key.

    `forgettable` is the kind of thing that `forgotten` records refer to. Raises `JournalAltered` if something began twice
    without being forgotten in between.
    """
    begun: dict[tuple[str, str], Record] = {}
    for each in records:
        if each.kind == FORGOTTEN:
            begun.pop((forgettable, each.key), None)
        elif (each.kind, each.key) in begun:
            problem = f"the {each.kind} began again, but was not forgotten"
            raise chains.altered(chain, each.link, problem, each)
        else:
            begun[each.kind, each.key] = each
    return begun


def _compare(
    chains: Chains,
    chain: str,
    length: int,
    begun: dict[tuple[str, str], Record],
    found: dict[tuple[str, str], object],
) -> None:
    for name, record in begun.items():
        if name not in found:
            verb = "are" if record.kind == DECISIONS else "is"
            raise chains.altered(chain, record.link, f"the {record.kind} {verb} missing", record)
        if found[name] != record.body:
            raise chains.altered(
                chain, record.link, f"the {record.kind} began with a different record", record
            )
    for kind, key in found:
        if (kind, key) not in begun:
            raise chains.altered(chain, length + 1, "it is missing", what=f"{kind} {key}")
