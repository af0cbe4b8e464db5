"""`PostgresJournal`, a journal in a PostgreSQL database, which many machines can share."""

from __future__ import annotations

import math
import os
from os import PathLike

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.ids import NewId, random_id
from handrail.journal.blobs import SqliteBlobs
from handrail.journal.calls import SqliteCalls, SqliteSteps
from handrail.journal.database import Moments
from handrail.journal.decisions import SqliteDecisions
from handrail.journal.digest import shared_key
from handrail.journal.expiry import JournalClock
from handrail.journal.lease import LEASE_SECONDS
from handrail.journal.postgres.address import parse_url
from handrail.journal.runs import SqliteRuns
from handrail.journal.tickets import SqliteTickets
from handrail.journal.votes import SqliteVotes
from handrail.journal.workspaces import SqliteWorkspaces
from handrail.text.spelling import checked_arguments


@checked_arguments
class PostgresJournal:
    """A journal in one schema of a PostgreSQL database.

    Once a method has returned, its record is available to every process on every machine that opens the same URL. Each
    run has at most one owner. A process owns its runs as long as it renews its lease, by the database's clock; after that, any
    other process may take them over. Close the journal when it is no longer needed. Raises `JournalError` if the URL is
    invalid, if the database can't be opened, if its schema is not a journal's, was altered or has a different version, or if the
    key is missing or is not the journal's. Raises `DefinitionError` if `lease` is not a finite number above 0, or if psycopg is
    not installed.

    - `url`: `postgresql://USER@HOST/DATABASE`. Add `?schema=NAME` for a schema other than `handrail`, and `lease=SECONDS`
      for the length of the lease. The password is best kept in `PGPASSWORD` or `~/.pgpass`.
    - `key_file`: the file with the journal's key, which every process needs; None to use `HANDRAIL_KEY`, or the file
      that `HANDRAIL_KEY_FILE` names.
    - `lease`: how many seconds a process keeps its runs after it last renewed its lease. Default: as the URL says, or 30.
    - `synced`: whether files that tools change are synced too, as the records are.
    - `watch`: the number of seconds between checks for answers whose notices were missed; None if no answers from other
      processes are expected.
    - `inline` and `moments`: as for `SqliteJournal`, for simulations.
    """

    def __init__(
        self,
        url: str,
        *,
        key_file: str | PathLike[str] | None = None,
        lease: float | None = None,
        synced: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
        watch: float | None = 5.0,
        inline: bool = False,
        moments: Moments | None = None,
    ) -> None:
        address = parse_url(url)
        if lease is None:
            lease = LEASE_SECONDS if address.lease is None else address.lease
        if not (math.isfinite(lease) and lease > 0):
            raise DefinitionError(
                f"lease={lease!r} is not a finite number of seconds above 0. Pass one, such as 30."
            )
        try:
            from handrail.journal.postgres.accounts import PostgresAccounts
            from handrail.journal.postgres.broadcasts import PostgresBroadcasts
            from handrail.journal.postgres.database import PostgresDatabase
            from handrail.journal.postgres.notices import Notices, PostgresQuestions, PostgresQueue
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("psycopg"):
                raise
            raise DefinitionError(
                "a journal in PostgreSQL needs psycopg, which is not installed. "
                "Install it with: pip install 'handrail[postgres]'"
            ) from None
        self.path = address.shown
        """The URL without its password."""
        self.synced = synced
        self._database = database = PostgresDatabase(
            address,
            clock=clock,
            new_id=new_id(),
            find_key=lambda is_new: shared_key(
                address.shown, None if key_file is None else os.fspath(key_file)
            ),
            lease=lease,
            inline=inline,
            moments=moments,
        )
        self.id = database.id
        self.owner = database.owner
        self.lease = lease
        self.key = database.key
        self.clock = JournalClock(database, clock)
        self.steps = SqliteSteps(database)
        self.runs = SqliteRuns(database, self.steps.forget)
        self.queue = PostgresQueue(database, self.runs, self.steps.forget)
        self.calls = SqliteCalls(database)
        self.questions = PostgresQuestions(database, self.clock, self.key, watch)
        self.decisions = SqliteDecisions(database)
        self.votes = SqliteVotes(database)
        self.tickets = SqliteTickets(database)
        self.blobs = SqliteBlobs(database)
        self.workspaces = SqliteWorkspaces(database)
        self._notices = Notices(database)
        self.queue.listen(self._notices)
        self.questions.listen(self._notices)
        self.broadcasts = PostgresBroadcasts(database, self._notices)
        self.accounts = PostgresAccounts(database, self._notices)

    def close(self) -> None:
        """Finish pending writes and close the connection. Closing it twice is harmless."""
        self._notices.close()
        self._database.close()
