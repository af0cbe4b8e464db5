"""Verification: checks that runs, sessions and blobs are still what Handrail recorded.

The chains are authoritative. Other tables repeat some of their data for lists and searches, and must agree with them.

A session's chain has a record for each run that began in the session, and for each principal whose decisions are
remembered there. A separate chain lists the sessions. Each of these records contains the MAC of the record with which
the run, the decisions or the session began, so nothing else can take their place. Runs and sessions that Handrail itself
deletes are recorded as forgotten.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from handrail.errors import JournalAltered, RunUnknown
from handrail.journal.records import MESSAGES, OVER, CommitUnit, Entry, QueuedMessage, Verification
from handrail.journal.sql.chains import (
    SESSIONS,
    ChainRecord,
    Chains,
    NewRecord,
    alteration,
    decision_chain,
    decisions_of,
    outside_chain,
    reading,
    run_chain,
    session_chain,
    workspace_chain,
)
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.run_rows import COLUMNS, StoredRun, find_run
from handrail.question import Question

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


def erase_from_lists(
    connection: Connection, chains: Chains, session_ids: Iterable[str], principal: str
) -> None:
    """Write the chains that list sessions, and the runs of these sessions, again: without what was forgotten.

    A principal's decisions in these sessions are deleted. Raises `JournalAltered`, before anything is signed again, if one of the
    chains was altered.
    """
    first: dict[str, bytes] = {}
    for session_id in session_ids:
        own = session_chain(session_id)
        begun = _begun(chains, own, chains.read(connection, own), RUN)
        if begun:  # runs of others
            begun.pop((DECISIONS, principal), None)
            chains.remove(connection, decision_chain(session_id, principal))
            chains.rewrite(connection, own, [NewRecord.again(own, each) for each in begun.values()])
            ((first[session_id],),) = fetch(connection, _FIRST, own)
    records = chains.read(connection, SESSIONS)
    listed = _begun(chains, SESSIONS, records, SESSION).values()
    if first or len(listed) < len(records):
        again = [NewRecord.again(SESSIONS, each, first.get(each.key)) for each in listed]
        chains.rewrite(connection, SESSIONS, again)


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
        yield from alteration(check_session, connection, chains, session_id)

    def check_list() -> None:
        records = chains.read(connection, SESSIONS)
        _compare(chains, SESSIONS, len(records), _begun(chains, SESSIONS, records, SESSION), found)

    yield from alteration(check_list)


def read_decisions(
    connection: Connection, chains: Chains, session_id: str, principal: str
) -> list[ChainRecord]:
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
    chains: Chains, chain: str, records: Iterable[ChainRecord], forgettable: str
) -> dict[tuple[str, str], ChainRecord]:
    """Return the records of everything that began and was not forgotten, by kind and key.

    `forgettable` is the kind of thing that `forgotten` records refer to. Raises `JournalAltered` if something began twice
    without being forgotten in between.
    """
    begun: dict[tuple[str, str], ChainRecord] = {}
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
    begun: dict[tuple[str, str], ChainRecord],
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


OUTCOME, FORK, IMPORT, BEGUN = "outcome", "fork", "import", "begun"
UNIT, VOID = "unit", "void"
STEP, SETTLED, CLEARED = "step", "step settled", "step cleared"
QUESTION, WITHDRAWN, TICKET, BLOB = "question", "withdrawn", "ticket", "blob"
OUTSIDE = "outside"
ANSWER, ANSWER_CLEARED, VOTE, DEPOSIT, CANCELLED = "answer", "answer cleared", "vote", "deposit", "cancel"
MESSAGE, TOLD = "message", "message told"

_INTERNAL = frozenset(
    (
        RUN,
        OUTCOME,
        FORK,
        IMPORT,
        BEGUN,
        UNIT,
        VOID,
        STEP,
        SETTLED,
        CLEARED,
        QUESTION,
        WITHDRAWN,
        TICKET,
        BLOB,
        OUTSIDE,
    )
)
"""The kinds of records in a run's chain that are not entries."""

_BOOKKEEPING = frozenset(
    ("deadline", "call begun", "call tried", "verb", "emitted", STEP, FORK, IMPORT, BLOB, OUTSIDE)
)
"""The kinds of records that do not count as progress of a run."""

_ATTEMPT = re.compile(r"~\d+")
"""Matches the number of an attempt in the text of a place, such as `~2`."""


def entry_of(record: ChainRecord) -> Entry:
    """Return the entry in a record that is not one of the journal's own."""
    return Entry(record.kind, record.key, record.at, record.body)  # pyright: ignore[reportArgumentType]  # what is not internal is an entry


class RunRecords:
    """The verified records of one run."""

    def __init__(self, own: list[ChainRecord], outside: list[ChainRecord]) -> None:
        self.own = own
        self.outside = outside

    @property
    def units(self) -> list[ChainRecord]:
        """The committed calls that were not voided."""
        void = self.voided
        return [each for each in self.own if each.kind == UNIT and each.link not in void]

    @property
    def voided(self) -> set[int]:
        """The positions in the chain of the committed calls that were voided."""
        return {int(each.body) for each in self.own if each.kind == VOID}

    @property
    def newest(self) -> list[ChainRecord]:
        """The records of the newest entry of each kind and key, in the order in which they were recorded."""
        found: dict[tuple[str, str], ChainRecord] = {}
        for each in self.own:
            if each.kind not in _INTERNAL:
                found.pop((each.kind, each.key), None)
                found[each.kind, each.key] = each
        return list(found.values())

    @property
    def entries(self) -> list[Entry]:
        """The newest entry of each kind and key, in the order in which they were recorded."""
        return [entry_of(each) for each in self.newest]

    @property
    def steps(self) -> dict[str, bytes | None]:
        """The encoded values of the run's steps, by key; None for a step that was reserved but never settled."""
        return steps_in(self.own)

    @property
    def questions(self) -> dict[str, tuple[bytes, bytes | None, float | None]]:
        """The encoded questions by id, each with its encoded answer and the time of that answer.

        Answer and time are None for an open question. Withdrawn questions are left out.
        """
        asked: dict[str, ChainRecord] = {}
        for each in self.own:
            if each.kind == QUESTION:
                asked[each.key] = each
            elif each.kind == WITHDRAWN:
                asked.pop(each.key, None)
        given: dict[str, ChainRecord] = {}
        for each in self.outside:
            if each.kind == ANSWER:
                given[each.key] = each
            elif each.kind == ANSWER_CLEARED:
                given.pop(each.key, None)
        found: dict[str, tuple[bytes, bytes | None, float | None]] = {}
        for id, question in asked.items():
            answer = given.get(id)
            found[id] = (
                (question.body, None, None) if answer is None else (question.body, answer.body, answer.at)
            )
        return found

    @property
    def open_questions(self) -> dict[str, bytes]:
        """The encoded questions that have no answer, by id."""
        return {id: question for id, (question, answer, _) in self.questions.items() if answer is None}

    @property
    def blobs(self) -> set[str]:
        """The digests of the blobs that the run refers to."""
        return {each.key for each in self.own if each.kind == BLOB}

    @property
    def tickets(self) -> dict[str, bytes]:
        """The texts of the tickets that the run has issued, as bytes, by place."""
        return {each.key: each.body for each in self.own if each.kind == TICKET}

    @property
    def deposits(self) -> dict[str, bytes]:
        """The deposits for the run's tickets, by place."""
        return {each.key: each.body for each in self.outside if each.kind == DEPOSIT}

    @property
    def messages(self) -> dict[str, QueuedMessage]:
        """The messages that were sent to the run, by id, in the order in which they were accepted."""
        sent: dict[str, QueuedMessage] = {}
        for each in self.outside:
            if each.kind == MESSAGE:
                sent[each.key] = msgspec.msgpack.decode(each.body, type=QueuedMessage)
            elif each.kind == TOLD:
                for id in msgspec.msgpack.decode(each.body, type=list[str]):
                    sent[id] = msgspec.structs.replace(sent[id], state="told")
        return sent

    @property
    def cancelled(self) -> bool:
        """Whether somebody has asked for the run to be cancelled."""
        return any(each.kind == CANCELLED for each in self.outside)

    @property
    def outcome(self) -> tuple[str, bytes]:
        """The status and outcome that were recorded last, both empty if there are none.

        The status is "" unless the run is over.
        """
        ends = [each for each in self.own if each.kind == OUTCOME]
        return (ends[-1].key, ends[-1].body) if ends else ("", b"")

    @property
    def progress(self) -> int:
        """A number that increases as the run progresses. Records that every attempt repeats do not count."""
        done = {(each.kind, _ATTEMPT.sub("", each.key)) for each in self.own if each.kind not in _BOOKKEEPING}
        return len(done) + len(self.outside)


def add_outside(
    connection: Connection,
    chains: Chains,
    run_id: str,
    kind: str,
    key: str,
    body: bytes,
    *,
    at: float,
) -> None:
    """Add a record to a run's `outside` chain, such as an answer, a vote, a deposit, a message or a request to cancel.

    The first record of that chain is noted in the run's own chain.
    """
    chain = outside_chain(run_id)
    if chains.append(connection, chain, kind, key, body, at=at) == 1:
        chains.append(connection, run_chain(run_id), OUTSIDE, "", chains.head(connection, chain), at=at)


def steps_in(records: list[ChainRecord]) -> dict[str, bytes | None]:
    """Return the encoded values of the steps in a chain, by key; None for a step that was reserved but never settled.

    Steps that were cleared are left out.
    """
    found: dict[str, bytes | None] = {}
    for each in records:
        if each.kind == STEP:
            found.setdefault(each.key, None)
        elif each.kind == SETTLED:
            found[each.key] = each.body
        elif each.kind == CLEARED:
            found.pop(each.key, None)
    return found


def end_of(status: str, outcome: bytes) -> tuple[str, bytes]:
    """Return a run's status and outcome as they are recorded. The status is "" unless the run is over."""
    return (status if status in OVER else "", outcome)


def verified(connection: Connection, chains: Chains, run_id: str) -> RunRecords:
    """Return the records of a run. Raises `JournalAltered` if they, or the tables that repeat them, were altered."""
    records = _read(connection, chains, run_id)
    with reading(chains, run_chain(run_id), 1, f"{RUN} {run_id}"):
        _check_indexes(connection, chains, run_id, records)
        _check_row(connection, chains, run_id, records)
        _check_questions(connection, chains, run_id, records)
        _check_tickets(connection, chains, run_id, records)
    return records


_INDEXES = """SELECT link, 'state' FROM records INDEXED BY units_to_apply WHERE chain = :chain AND state = 'committed'
    UNION ALL SELECT link, 'kind' FROM records INDEXED BY undone_calls WHERE chain = :chain AND kind IN ('undone', 'told')"""


def _check_indexes(connection: Connection, chains: Chains, run_id: str, records: RunRecords) -> None:
    """Raise `JournalAltered` if a call's state is not what was recorded, or if an index of calls disagrees with the records."""
    chain, void = run_chain(run_id), records.voided
    expected: set[tuple[int, str]] = set()
    for each in records.own:
        if each.kind == UNIT and (each.state == "void") != (each.link in void):
            raise chains.altered(chain, each.link, "its state is not what was recorded", each)
        if each.state == "committed":
            expected.add((each.link, "state"))
        if each.kind in ("undone", "told"):
            expected.add((each.link, "kind"))
    found = set(connection.execute(_INDEXES, {"chain": chain}).fetchall())
    for link, _ in sorted(expected ^ found):
        raise chains.altered(chain, link, "an index of the journal does not agree with it")


def read_outside(connection: Connection, chains: Chains, run_id: str) -> list[ChainRecord]:
    """Return what was added to a run from outside. Raises `JournalAltered` if the records of the run were altered."""
    return _read(connection, chains, run_id).outside


def _read(connection: Connection, chains: Chains, run_id: str) -> RunRecords:
    records = RunRecords(
        chains.read(connection, run_chain(run_id)), chains.read(connection, outside_chain(run_id))
    )
    _check_outside(chains, run_id, records)
    return records


def _check_outside(chains: Chains, run_id: str, records: RunRecords) -> None:
    """Raise `JournalAltered` unless the `outside` chain begins with the record that the run's own chain notes."""
    noted = [each for each in records.own if each.kind == OUTSIDE]
    if [each.body for each in noted] != [each.mac for each in records.outside[:1]]:
        chain = run_chain(run_id)
        if not noted:
            raise chains.altered(
                chain,
                len(records.own),
                "the run has no note of the answers, votes or cancellations that were added to it",
                what=OUTSIDE,
            )
        problem = "what others added to the run (answers, votes, cancellations) was removed"
        raise chains.altered(chain, noted[0].link, problem, noted[0])


def _check_row(connection: Connection, chains: Chains, run_id: str, records: RunRecords) -> None:
    chain = run_chain(run_id)
    rows = fetch(connection, f"SELECT {COLUMNS} FROM runs WHERE id = ?", run_id)
    began = next((each for each in reversed(records.own) if each.kind in (BEGUN, RUN)), None)
    if began is None:
        if rows:
            raise chains.altered(chain, 1, "it is missing", what=f"{RUN} {run_id}")
        return
    if not rows:
        raise chains.altered(chain, began.link, "its row in the table of runs is missing", began)
    row = StoredRun(*rows[0][:-1])
    if row.record == began.body:
        record = row.decoded
        if (run_id, row.session_id, row.principal, row.began_at) == (
            record.id,
            record.session_id,
            record.principal,
            record.began_at,
        ):
            if end_of(row.status, row.outcome) != records.outcome:
                end = next((each for each in reversed(records.own) if each.kind == OUTCOME), began)
                raise chains.altered(chain, end.link, "the run's outcome is not what was recorded", end)
            waits = any(each.state == "waiting" for each in records.messages.values())
            if chains.is_row("runs", row, rows[0][-1]) and waits == bool(row.signals & MESSAGES):
                return
    raise chains.altered(chain, began.link, "its row in the table of runs is not what was recorded", began)


def _check_questions(connection: Connection, chains: Chains, run_id: str, records: RunRecords) -> None:
    query = "SELECT id, question, answer, answered_at, principal, asked_at FROM questions WHERE run_id = ?"
    rows: dict[str, tuple[Any, ...]] = {row[0]: row[1:] for row in fetch(connection, query, run_id)}
    expected = records.questions
    for id in {**expected, **rows}:
        wanted, found = expected.get(id), rows.get(id)
        if wanted is None or found is None or not _is_row_of(wanted[0], found):
            link = next((each.link for each in reversed(records.own) if each.key == id), 0)
            problem = (
                "it was not recorded"
                if wanted is None
                else "its row is missing"
                if found is None
                else "its row was changed"
            )
            raise chains.altered(run_chain(run_id), link, problem, what=f"{QUESTION} {id}")
        if wanted[1:] != (found[1], None if found[1] is None else found[2]):
            link = next((each.link for each in reversed(records.outside) if each.key == id), 0)
            problem = "its row is not what was recorded" if link else "it was not recorded"
            raise chains.altered(outside_chain(run_id), link, problem, what=f"{ANSWER} {id}")


def _is_row_of(question: bytes, row: tuple[Any, ...]) -> bool:
    if row[0] != question:
        return False
    asked = msgspec.msgpack.decode(question, type=Question)
    return row[3:] == (asked.principal, asked.asked_at.timestamp())


def _check_tickets(connection: Connection, chains: Chains, run_id: str, records: RunRecords) -> None:
    rows = fetch(connection, "SELECT place, text, deposit FROM tickets WHERE run_id = ?", run_id)
    texts: dict[str, bytes] = {}
    deposits: dict[str, bytes] = {}
    for place, text, deposit in rows:
        texts[place] = str(text).encode(errors="surrogateescape")
        if deposit:
            deposits[place] = deposit
    for kind, chain, own, expected, found in (
        (TICKET, run_chain(run_id), records.own, records.tickets, texts),
        (DEPOSIT, outside_chain(run_id), records.outside, records.deposits, deposits),
    ):
        for place in {**expected, **found}:
            if expected.get(place) != found.get(place):
                link = next((each.link for each in own if (each.kind, each.key) == (kind, place)), 0)
                raise chains.altered(chain, link, "its row is not what was recorded", what=f"{kind} {place}")


def verify_session(connection: Connection, chains: Chains, run_id: str) -> RunRecords:
    """Verify a run, the other runs of its session, and its principal's decisions there, and return the run's records.

    If the run is not recorded, only the records under its id are verified. Raises the first `JournalAltered`.
    """
    records = verified(connection, chains, run_id)
    try:
        run = find_run(connection, chains, run_id)
    except RunUnknown:
        return records
    for other in check_session(connection, chains, run.session_id):
        if other != run_id:
            verified(connection, chains, other)
    read_decisions(connection, chains, run.session_id, run.principal)
    return records


def verify_journal(connection: Connection, chains: Chains, run_id: str | None) -> Verification:
    """Verify one run and its session, or the whole journal, and return the findings."""
    before = chains.records_read
    altered = tuple(_alterations(connection, chains, run_id))
    query = "SELECT chain FROM records WHERE link = 1 AND kind = ? ORDER BY number"
    imported = [chain.removeprefix("run ") for (chain,) in connection.execute(query, (IMPORT,))]
    return Verification(
        records=chains.records_read - before,
        altered=altered,
        imported=[id for id in imported if run_id in (None, id)],
    )


def _alterations(connection: Connection, chains: Chains, run_id: str | None) -> Iterator[JournalAltered]:
    """Yield the first alteration in each run, session and other chain, each altered blob, and what `Chains.find_damage` yields.

    If `run_id` is given, yield only the first alteration in that run's session.
    """
    if run_id is not None:
        yield from alteration(verify_session, connection, chains, run_id)
        return
    runs: dict[str, None] = {}
    sessions: dict[str, None] = {}
    others: dict[str, None] = {}
    for (chain,) in fetch(connection, "SELECT chain FROM records UNION SELECT chain FROM chains"):
        kind, _, id = str(chain).partition(" ")
        if kind in ("run", "outside"):
            runs[id] = None
        elif kind == "session":
            sessions[id] = None
        elif chain != SESSIONS:
            others[chain] = None
    query = "SELECT id FROM runs UNION SELECT run_id FROM questions UNION SELECT run_id FROM tickets"
    runs.update((id, None) for (id,) in fetch(connection, query))
    versions: dict[str, int] = {}
    for id in runs:
        try:
            for unit in map(committed_unit, verified(connection, chains, id).units):
                for delta in unit.workspaces:
                    versions[delta.name] = max(versions.get(delta.name, 0), delta.base + 1)
        except JournalAltered as altered:
            yield altered
    for name, version in versions.items():
        chain = workspace_chain(name)
        found = connection.execute("SELECT links FROM chains WHERE chain = ?", (chain,)).fetchone()
        if found is None or found[0] < version:
            yield chains.altered(chain, version, "its versions were set back: a run has recorded a newer one")
    for chain in others:
        owner = decisions_of(chain)
        if owner is None:
            yield from alteration(chains.read, connection, chain)
        else:
            yield from alteration(read_decisions, connection, chains, *owner)
    yield from session_alterations(connection, chains, sessions)
    yield from _blob_alterations(connection, chains)
    yield from chains.find_damage(connection)


def _blob_alterations(connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
    try:
        digests = [digest for (digest,) in fetch(connection, "SELECT digest FROM blobs")]
        query = "SELECT key FROM records WHERE kind = ? UNION SELECT digest FROM workspace_files WHERE digest != ''"
        noted = [digest for (digest,) in fetch(connection, query, BLOB)]
    except sqlite3.Error:  # the check of the whole file reports it
        return
    for digest in {**dict.fromkeys(digests), **dict.fromkeys(noted)}:
        try:
            with reading(chains, f"blob {digest}", 1):
                found = fetch(connection, "SELECT data FROM blobs WHERE digest = ?", digest)
            if not found or not is_intact(digest, found[0][0]):
                problem = "its bytes were changed" if found else "its bytes are missing"
                raise chains.altered(f"blob {digest}", 1, problem)
        except JournalAltered as altered:
            yield altered


def is_intact(digest: str, data: object) -> bool:
    """Return whether a blob's bytes still have its digest."""
    return isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == digest


def committed_unit(record: ChainRecord) -> CommitUnit:
    """Decode the committed call in a record."""
    return msgspec.msgpack.decode(record.body, type=CommitUnit)
