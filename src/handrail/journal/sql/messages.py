"""Messages to runs in a journal's database.

Each message, each edit of one, and each delivery is a record in the run's `outside` chain. A signal in the run's row says that
messages wait, so a run that is sent none never looks for any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from handrail.journal.local import check_edit, check_message
from handrail.journal.protocol import Choose
from handrail.journal.records import MESSAGES, QueuedMessage, RunRecord, RunStatus
from handrail.journal.sql.chains import Chains, run_chain
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Role, encode, transaction
from handrail.journal.sql.leases import check_owner
from handrail.journal.sql.run_rows import StoredRun, find_run, update_run
from handrail.journal.sql.verification import MESSAGE, TOLD, add_outside, verified


class SqlMessages(Role):
    """The role `Messages` of a journal."""

    @transaction
    def send(self, connection: Connection, run_id: str, message: QueuedMessage, /) -> RunStatus:
        row, known = self._read(connection, run_id)
        message = msgspec.structs.replace(message, at=self._database.now(), state="waiting")
        if check_message(run_id, message, known, row.principal, row.status):
            self._write(connection, row, known, message)
        return row.status

    @transaction
    def edit(self, connection: Connection, run_id: str, message: QueuedMessage, /) -> None:
        row, known = self._read(connection, run_id)
        message = msgspec.structs.replace(message, at=self._database.now())
        check_edit(run_id, message, known, row.principal, row.status)
        self._write(connection, row, known, message)

    @transaction
    def deliver(self, connection: Connection, run_id: str, choose: Choose, /) -> None:
        chains, owner = self._chains, self._database.owner
        check_owner(connection, owner, run_id)
        row, known = self._read(connection, run_id)
        chosen = choose([each for each in known.values() if each.state == "waiting"])
        if chosen is not None:
            ids, entry = chosen
            known = {**known, **{id: msgspec.structs.replace(known[id], state="told") for id in ids}}
            body = msgspec.msgpack.encode(list(ids))
            add_outside(connection, chains, run_id, TOLD, entry.key, body, at=entry.at)
            chains.append(connection, run_chain(run_id), entry.kind, entry.key, entry.body, at=entry.at)
        _signal(connection, chains, row, known)

    @transaction
    def list(self, connection: Connection, run_id: str, /) -> Sequence[QueuedMessage]:
        return tuple(self._read(connection, run_id)[1].values())

    def _read(self, connection: Connection, run_id: str) -> tuple[StoredRun, Mapping[str, QueuedMessage]]:
        """Return the row of a run and the messages to it, by id, in the order in which they were accepted."""
        row = find_run(connection, self._chains, run_id)
        return row, verified(connection, self._chains, run_id).messages

    def _write(
        self,
        connection: Connection,
        row: StoredRun,
        known: Mapping[str, QueuedMessage],
        message: QueuedMessage,
    ) -> None:
        _add(connection, self._chains, row.id, message)
        _signal(connection, self._chains, row, {**known, message.id: message})


def add_end(connection: Connection, chains: Chains, run_id: str, message: QueuedMessage) -> StoredRun:
    """Send the end of a background run to its parent, and return that run's row. If it is over, the end waits for the session's next run.

    Raises `RunUnknown` if there is no such run, and `JournalAltered` if its record was altered.
    """
    row, known = find_run(connection, chains, run_id), verified(connection, chains, run_id).messages
    if message.id not in known:
        _add(connection, chains, run_id, message)
        _signal(connection, chains, row, {**known, message.id: message})
    return row


def move_ends(connection: Connection, chains: Chains, run: RunRecord, now: float) -> bool:
    """Move what was sent to the runs of a session after they had ended to a run that begins in it. Returns whether there was anything."""
    query = f"""SELECT id FROM runs WHERE session_id = ? AND principal = ? AND signals & {MESSAGES} != 0
        AND status IN ('done', 'failed', 'cancelled') ORDER BY began_at, id"""
    earlier_runs = fetch(connection, query, run.session_id, run.principal)
    for (id,) in earlier_runs:
        earlier, known = find_run(connection, chains, id), verified(connection, chains, id).messages
        waiting = [each for each in known.values() if each.state == "waiting"]
        body = msgspec.msgpack.encode([each.id for each in waiting])
        add_outside(connection, chains, id, TOLD, run.id, body, at=now)
        _signal(connection, chains, earlier, {})
        for message in waiting:
            add_end(connection, chains, run.id, message)
    return bool(earlier_runs)


def _add(connection: Connection, chains: Chains, run_id: str, message: QueuedMessage) -> None:
    body = encode(message, f"message {message.id!r} has")
    add_outside(connection, chains, run_id, MESSAGE, message.id, body, at=message.at)


def _signal(
    connection: Connection, chains: Chains, row: StoredRun, known: Mapping[str, QueuedMessage]
) -> None:
    """Set or clear the signal that messages wait."""
    waits = any(each.state == "waiting" for each in known.values())
    signals = row.signals | MESSAGES if waits else row.signals & ~MESSAGES
    if signals != row.signals:
        update_run(connection, chains, row, signals=signals)
