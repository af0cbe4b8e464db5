"""`SqliteJournal`, a journal in one file, and `MemoryJournal`, a journal in memory."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.ids import NewId, random_id
from handrail.journal.blobs import SqliteBlobs
from handrail.journal.calls import SqliteCalls, SqliteSteps
from handrail.journal.database import MEMORY, Database, Moments
from handrail.journal.decisions import SqliteDecisions
from handrail.journal.digest import key_beside
from handrail.journal.expiry import JournalClock
from handrail.journal.questions import SqliteQuestions
from handrail.journal.queue import SqliteQueue
from handrail.journal.runs import SqliteRuns
from handrail.journal.tickets import SqliteTickets
from handrail.journal.votes import SqliteVotes
from handrail.journal.workspaces import SqliteWorkspaces
from handrail.text.spelling import checked_arguments

Durability = Literal["process", "power"]
"""The failures that records survive: with `process`, the end of the process, even by `kill -9`; with `power`, also a power cut."""


@checked_arguments
class SqliteJournal:
    """A journal in one SQLite file.

    Once a method has returned, its record is available to every process that uses the file. With `durability="process"` it
    survives `kill -9`. With `"power"`, which waits for the disk, it also survives a power cut, unless it can be lost without
    harm, as a renewed lease can. Values of steps and answers that are read from the file are plain data. Several processes may
    use one file; each run has at most one owner. Close the journal when it is no longer needed.

    Raises `JournalError` if the file can't be opened, is not a journal, is damaged, has an altered schema or a different
    version of it, or if the key is missing or is not the journal's. Raises its subclass `JournalExposed` if other users could
    read or change the journal, and `DefinitionError` if `durability` is invalid.

    - `watch`: the number of seconds between checks for answers from other processes; None means never.
    - `inline`: write in the calling thread, for simulations.
    - `moments`: called before and after every transaction, for simulations of crashes.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        durability: Durability = "process",
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
        watch: float | None = 0.5,
        inline: bool = False,
        moments: Moments | None = None,
    ) -> None:
        if durability not in ("process", "power"):
            raise DefinitionError(
                f"durability={durability!r} is invalid. Pass 'process', to survive the end of the process, "
                "or 'power', to survive a power cut."
            )
        self.path = fspath(path)
        self.durability: Durability = durability
        self.synced = durability == "power"
        self._database = database = Database(
            self.path,
            clock=clock,
            new_id=new_id(),
            find_key=None if self.path == MEMORY else lambda is_new: key_beside(self.path, is_new),
            synced=self.synced,
            inline=inline,
            moments=moments,
        )
        self.id = database.id
        self.owner = database.owner
        self.lease = database.leases.seconds
        self.key = database.key
        self.clock = JournalClock(database, clock)
        self.steps = SqliteSteps(database)
        self.runs = SqliteRuns(database, self.steps.forget)
        self.queue = SqliteQueue(database, self.runs, self.steps.forget)
        self.calls = SqliteCalls(database)
        self.questions = SqliteQuestions(database, self.clock, self.key, watch)
        self.decisions = SqliteDecisions(database)
        self.votes = SqliteVotes(database)
        self.tickets = SqliteTickets(database)
        self.blobs = SqliteBlobs(database)
        self.workspaces = SqliteWorkspaces(database)
        self.broadcasts = None  # SQLite can't notify other processes
        self.accounts = None

    def close(self) -> None:
        """Finish pending writes and close the file. Closing it twice is harmless."""
        self.queue.close()
        self._database.close()


@checked_arguments
class MemoryJournal(SqliteJournal):
    """A journal that lives as long as the object, for tests and for runs that no other process will resume."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(MEMORY, clock=clock, watch=None, inline=True)
