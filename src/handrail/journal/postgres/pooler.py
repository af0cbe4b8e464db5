"""Connection poolers such as pgbouncer: the refusal of those on which a journal can't listen for notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from handrail.errors import JournalError

_PATIENCE = 5.0
"""Maximum seconds to wait for a notice. Only a journal that is refused waits for so long."""


def check_pooler(
    shown: str, raw: psycopg.Connection[Any], connect: Callable[[], psycopg.Connection[Any]]
) -> None:
    """Raise `JournalError` if a pooler gives this connection a different session of PostgreSQL for each transaction.

    Settings such as `search_path` and what `LISTEN` asks for belong to a session. A connection without a pooler, whose process
    on the server is the one that answered it first, is not tried further. `connect` opens a second connection.
    """
    row = raw.execute("SELECT pg_backend_pid()").fetchone()
    if row == (raw.info.backend_pid,):
        return
    raw.execute("LISTEN handrail_pooler")
    with connect() as other:
        other.execute("NOTIFY handrail_pooler")
        is_heard = any(True for _ in raw.notifies(timeout=_PATIENCE, stop_after=1))
    raw.execute("UNLISTEN handrail_pooler")
    if not is_heard:
        raise JournalError(
            shown,
            "it is reached through a connection pooler that shares its sessions, such as pgbouncer with "
            "pool_mode = transaction, so the journal can't LISTEN for notices",
            "Connect to PostgreSQL directly, or use pool_mode = session.",
        )
