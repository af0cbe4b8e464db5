"""`PostgresJournal`, a journal in a PostgreSQL database, which many machines can share."""

from __future__ import annotations

import math
import os
from os import PathLike
from typing import TYPE_CHECKING

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.ids import NewId, random_id
from handrail.journal.digest import shared_key
from handrail.journal.postgres.address import parse_url
from handrail.journal.sql.database import Moments
from handrail.journal.sql.journal import SqlJournal
from handrail.journal.sql.leases import LEASE_SECONDS
from handrail.text.spelling import checked_arguments

if TYPE_CHECKING:
    from handrail.journal.postgres.database import PostgresDatabase  # noqa: F401  # named in the base class

if TYPE_CHECKING:
    pass


@checked_arguments
class PostgresJournal(SqlJournal["PostgresDatabase"]):
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
            from handrail.journal.postgres.database import PostgresDatabase
            from handrail.journal.postgres.notices import PostgresBroadcasts
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
        database = PostgresDatabase(
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
        super().__init__(database, clock, watch)
        self.broadcasts = PostgresBroadcasts(database)
        self.accounts = PostgresAccounts(database)
