"""Votes in a journal's database: what people said to questions that a quorum decides."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from handrail.errors import AnswerRefused
from handrail.journal.database import Database, encode
from handrail.question import Vote


class SqliteVotes:
    """Votes in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def cast(self, run_id: str, vote: Vote, /) -> Sequence[Vote]:
        encoded = encode(vote, "a vote")

        def record(connection: sqlite3.Connection) -> Sequence[Vote]:
            before = _read(connection, vote.question_id, vote.digest)
            mine = next((each for each in before if each.by == vote.by), None)
            if mine is None:
                connection.execute(
                    "INSERT INTO votes (run_id, question_id, vote) VALUES (?, ?, ?)",
                    (run_id, vote.question_id, encoded),
                )
                return (*before, vote)
            if mine.approved != vote.approved:
                raise AnswerRefused(
                    vote.question_id, f"{vote.by!r} has voted already", "The first vote counts."
                )
            return before

        return await self._database.transact(record)

    async def on(self, run_id: str, question_id: str, digest: str, /) -> Sequence[Vote]:
        return await self._database.transact(lambda connection: _read(connection, question_id, digest))


def _read(connection: sqlite3.Connection, question_id: str, digest: str) -> Sequence[Vote]:
    query = "SELECT vote FROM votes WHERE question_id = ? ORDER BY number"
    found = (msgspec.msgpack.decode(row[0], type=Vote) for row in connection.execute(query, (question_id,)))
    return tuple(vote for vote in found if vote.digest == digest)
