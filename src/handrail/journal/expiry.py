"""Expiry: how a question ends whose time is over.

Time goes on while nobody runs a run. A question ends when somebody next looks at it after its expiry: whoever asks it again,
answers it, votes on it or lists it. `settle` decides that in the same transaction that would record an answer, by the
journal's clock. So either the answer or the expiry is recorded, once, and everybody sees the same end from then on.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from handrail.clock import Clock
from handrail.journal.connection import Connection
from handrail.journal.database import Database, encode
from handrail.journal.decisions import decision_in, put_decision
from handrail.journal.queue import make_due
from handrail.journal.records import QuestionRecord
from handrail.journal.verification import ANSWER, add_outside
from handrail.question import Answer, Question


class JournalClock:
    """The clock of a journal's database, which decides when questions expire."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self.monotonic = clock.monotonic

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._database.now(), UTC)


def has_expired(question: Question, now: datetime) -> bool:
    """Return whether the question's time is over at `now`."""
    return question.expires_at is not None and now >= question.expires_at


def timed_out(question: Question) -> Answer:
    """Return how a question ends that nobody has answered in time."""
    return Answer(question_id=question.id, digest=question.digest, by=question.principal, outcome="timed out")


def counted_from(question: Question, now: datetime) -> Question:
    """Return the question with an expiry that is counted from `now`, by the clock that will decide it.

    The asker's own clock may show a different time.
    """
    if question.expires_at is None:
        return question
    return msgspec.structs.replace(question, expires_at=now + (question.expires_at - question.asked_at))


def decoded(found: tuple[bytes, bytes | None, float | None]) -> QuestionRecord:
    """Return the question, answer and time that `RunRecords.questions` has."""
    question = msgspec.msgpack.decode(found[0], type=Question)
    if found[1] is None:
        return QuestionRecord(question)
    return QuestionRecord(question, msgspec.msgpack.decode(found[1], type=Answer), found[2])


def settle(
    connection: Connection, database: Database, asked: QuestionRecord, answer: Answer | None = None
) -> QuestionRecord:
    """Record how a question ends, and return its record, which has no answer if the question stays open.

    An answer that is already recorded stands. Otherwise, a question whose time is over by the journal's clock has timed
    out. Otherwise it ends with `answer`, if that is given, as plain data. The run is then due for a worker.
    """
    if asked.answer is not None:
        return asked
    question, chains = asked.question, database.chains
    at = database.now()
    now = datetime.fromtimestamp(at, UTC)
    if has_expired(question, now):
        answer = timed_out(question)
    if answer is None:
        return asked
    encoded = encode(answer, f"the answer to {question.id!r} is")
    connection.execute(
        "UPDATE questions SET answer = ?, answered_at = ? WHERE id = ?", (encoded, at, question.id)
    )
    add_outside(connection, chains, question.run_id, ANSWER, question.id, encoded, at=at)
    make_due(connection, chains, question.run_id, at)
    chains.tell(connection, "question", question.id)
    decision = decision_in(question, answer, now)
    if decision is not None:
        put_decision(connection, chains, decision)
    return QuestionRecord(question, answer, at)
