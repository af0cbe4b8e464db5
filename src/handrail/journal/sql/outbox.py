"""What receivers of notifications were told, in a journal's database: a row for each, which changes, and so has a MAC and no chain."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Role, transaction

_ALTERED = "what the receiver %s was told counts as unknown, because something other than Handrail has altered its row"
_PUT = """INSERT INTO outbox VALUES (?, ?, ?) ON CONFLICT (receiver) DO UPDATE SET state = excluded.state, mac = excluded.mac"""


class SqlOutbox(Role):
    """The role `Outbox` of a journal."""

    @transaction
    def read(self, connection: Connection, receivers: Collection[str], /) -> Mapping[str, bytes]:
        found = {receiver: self._find(connection, receiver) for receiver in receivers}
        return {receiver: state for receiver, state in found.items() if state}

    @transaction
    def replace(self, connection: Connection, receiver: str, before: bytes, after: bytes, /) -> bool:
        if self._find(connection, receiver) != before:
            return False
        connection.execute(_PUT, (receiver, after, self._chains.row_mac("outbox", (receiver, after))))
        return True

    def _find(self, connection: Connection, receiver: str) -> bytes:
        for *row, mac in fetch(connection, "SELECT * FROM outbox WHERE receiver = ?", receiver):
            if self._chains.is_row("outbox", row, mac):
                return row[1]
            self._log_once(receiver, _ALTERED, receiver)
        return b""
