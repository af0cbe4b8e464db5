"""`SqlJournal`: the roles of a journal in a database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Generic, TypeVar

from handrail.clock import Clock
from handrail.journal.decisions import SqlDecisions
from handrail.journal.sql.calls import SqlCalls, SqlSteps
from handrail.journal.sql.database import Database
from handrail.journal.sql.messages import SqlMessages
from handrail.journal.sql.outbox import SqlOutbox
from handrail.journal.sql.questions import SqlQuestions, SqlVotes
from handrail.journal.sql.queue import SqlQueue
from handrail.journal.sql.runs import SqlRuns
from handrail.journal.sql.spending import SqlSpending
from handrail.journal.sql.tickets import SqlTickets
from handrail.journal.sql.upkeep import SqlUpkeep
from handrail.journal.sql.workspaces import SqlBlobs, SqlWorkspaces

D = TypeVar("D", bound=Database)


class JournalClock:
    """The clock of a journal's database, which decides when questions expire."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self.monotonic = clock.monotonic

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._database.now(), UTC)


class SqlJournal(Generic[D]):
    """A journal in a database.

    `watch` is the number of seconds between checks for answers from other processes; None means never, also for cancellations.
    """

    def __init__(self, database: D, clock: Clock, watch: float | None) -> None:
        self._database = database
        database.watches = watch is not None
        self.id = database.id
        self.owner = database.owner
        self.lease = database.leases.seconds
        self.key = database.key
        self.clock = JournalClock(database, clock)
        self.steps = SqlSteps(database)
        self.runs = SqlRuns(database, self.steps.forget)
        self.queue = SqlQueue(database, self.runs, self.steps.forget)
        self.calls = SqlCalls(database)
        self.questions = SqlQuestions(database, self.clock, self.key, watch)
        self.decisions = SqlDecisions(database)
        self.votes = SqlVotes(database)
        self.outbox = SqlOutbox(database)
        self.messages = SqlMessages(database)
        self.tickets = SqlTickets(database)
        self.spending = SqlSpending(database)
        self.blobs = SqlBlobs(database)
        self.workspaces = SqlWorkspaces(database)
        self.upkeep = SqlUpkeep(database, self.steps.forget)

    def close(self) -> None:
        """Finish pending writes and close the database. Closing it twice is harmless."""
        self._database.close()
