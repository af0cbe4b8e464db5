"""Votes in a journal's database, on questions that a quorum decides.

Each vote is a record in the run's `outside` chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from handrail.errors import AnswerRefused
from handrail.journal.answers import refusal
from handrail.journal.connection import Connection
from handrail.journal.database import Database, encode
from handrail.journal.expiry import decoded, settle
from handrail.journal.records import QuestionRecord
from handrail.journal.verification import VOTE, add_outside, read_outside, verified
from handrail.question import Vote


class SqliteVotes:
    """The role `Votes` of a journal."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def cast(self, run_id: str, vote: Vote, /) -> Sequence[Vote]:
        chains, encoded = self._database.chains, encode(vote, "a vote has")

        def record(connection: Connection) -> Sequence[Vote] | AnswerRefused:
            asked = self._asked(connection, run_id, vote)
            if asked.answer is not None and asked.answer.outcome == "timed out":
                return refusal(
                    asked.question, asked.answer
                )  # raising it here would undo the record of the expiry
            before = self._read(connection, run_id, vote.question_id, vote.digest)
            mine = next((each for each in before if (each.by, each.since) == (vote.by, vote.since)), None)
            if mine is None:
                add_outside(connection, chains, run_id, VOTE, vote.question_id, encoded, at=vote.at)
                return (*before, vote)
            if mine.approved != vote.approved:
                raise AnswerRefused(
                    vote.question_id, f"{vote.by!r} has already voted differently", "The first vote counts."
                )
            return before

        votes = await self._database.transact(record)
        if isinstance(votes, AnswerRefused):
            raise votes
        return votes

    def _asked(self, connection: Connection, run_id: str, vote: Vote) -> QuestionRecord:
        """Return the question that a vote is on, which ends now if its time is over.

        Raises `AnswerRefused` unless the run asked exactly this question, and `JournalAltered` if the run was altered.
        """
        found = verified(connection, self._database.chains, run_id).questions.get(vote.question_id)
        if found is None:
            raise AnswerRefused(vote.question_id, "there is no such question", "Vote on an open question.")
        asked = decoded(found)
        if asked.question.digest != vote.digest:
            raise AnswerRefused(
                vote.question_id,
                "its digest does not match this question's",
                "Read the question again, and vote on that version of it.",
            )
        return settle(connection, self._database, asked)

    async def on(self, run_id: str, question_id: str, digest: str, /) -> Sequence[Vote]:
        return await self._database.transact(
            lambda connection: self._read(connection, run_id, question_id, digest)
        )

    def _read(self, connection: Connection, run_id: str, question_id: str, digest: str) -> Sequence[Vote]:
        records = read_outside(connection, self._database.chains, run_id)
        found = (
            msgspec.msgpack.decode(each.body, type=Vote)
            for each in records
            if each.kind == VOTE and each.key == question_id
        )
        return tuple(vote for vote in found if vote.digest == digest)
