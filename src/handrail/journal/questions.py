"""Questions in a journal's database, including those asked or answered by other processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.clock import Clock
from handrail.errors import AnswerRefused, JournalError
from handrail.journal.answers import answered_already, check_answer, check_repeat, still_fits
from handrail.journal.database import Database, Work, encode
from handrail.journal.decisions import decision_in, put_decision
from handrail.journal.local import LocalQuestions
from handrail.question import Answer, Question
from handrail.records import QuestionRecord

if TYPE_CHECKING:
    from handrail.journals import Check, Mask
    from handrail.protocols import Asker

log = logging.getLogger("handrail.questions")


class SqliteQuestions:
    """Questions in a database.

    `watch` is how often to look for answers given by other processes, in seconds; None for never.
    """

    def __init__(self, database: Database, clock: Clock, key: bytes, watch: float | None) -> None:
        self._database = database
        self._clock = clock
        self._key = key
        self._local = LocalQuestions(clock, key=key, record=self._record)
        self._watch = _Watch(watch, self._look_for_answer)

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        database = self._database
        [(recorded, found, given)] = await database.select(_FIND, question.run_id, question.id)
        earlier = None if found is None else msgspec.msgpack.decode(found, type=Question)
        if earlier is None or earlier.digest != question.digest:
            await database.write(
                question.run_id,
                "INSERT INTO questions (id, question, run_id, asked_at, principal) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET question = excluded.question, principal = excluded.principal, answer = NULL",
                question.id,
                encode(question, "the question has"),
                question.run_id,
                question.asked_at.timestamp(),
                question.principal,
            )
        else:
            question = earlier  # it keeps the expiry time from when it was first asked
            if given is not None:
                answer = msgspec.msgpack.decode(given, type=Answer)
                if still_fits(answer, check):
                    return answer
                query = "UPDATE questions SET answer = NULL WHERE id = ?"
                await database.write(question.run_id, query, question.id)
        with self._watch.watching(question.id):
            try:
                answer = await self._local.ask(question, asker, check, mask)
            except asyncio.CancelledError:
                if not recorded:  # no process can resume the run and ask again
                    database.transact_now(_delete("id = ?", question.id))
                raise
            finally:
                self._local.forget(question.id)  # the answer is in the database
        if answer.outcome in ("timed out", "cancelled"):
            await database.transact(_delete("id = ?", question.id))
        return answer

    def answer(self, answer: Answer, /) -> None:
        """Accept an answer, even to a question that another process asked, or whose run has yet to be resumed."""
        if self._local.is_known(answer.question_id):
            self._local.answer(answer)
            return
        found = self._database.transact_now(lambda connection: _get(connection, answer.question_id))
        question = found.question
        check_answer(question, answer, self._clock.now())
        if question.secret and answer.outcome == "answered":
            check_repeat(question, answer, found.answer, self._key)
        else:
            self._record(answer)

    async def open(self, run_id: str | None = None, /, *, principal: str | None = None) -> Sequence[Question]:
        where, values = ["answer IS NULL"], list[str]()
        for column, value in (("run_id", run_id), ("principal", principal)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        query = f"SELECT question FROM questions WHERE {' AND '.join(where)} ORDER BY asked_at, id"
        rows = await self._database.select(query, *values)
        return tuple(msgspec.msgpack.decode(row[0], type=Question) for row in rows)

    async def history(self, run_id: str, /) -> Sequence[QuestionRecord]:
        query = f"SELECT {_COLUMNS} FROM questions WHERE run_id = ? ORDER BY asked_at, id"
        return tuple(_asked(row) for row in await self._database.select(query, run_id))

    async def withdraw(self, question_id: str, /) -> None:
        await self._local.withdraw(question_id)
        await self._database.transact(_delete("id = ?", question_id))

    async def withdraw_all(self, prefix: str, /) -> None:
        await self._local.withdraw_all(prefix)
        await self._database.transact(_delete("substr(id, 1, length(?)) = ?", prefix, prefix))

    def _record(self, answer: Answer) -> None:
        """Record a final answer before the asker is notified. Raises `AnswerRefused` if a different one is recorded."""
        if answer.outcome not in ("answered", "declined"):
            return  # the question may be asked again
        encoded = encode(answer, f"the answer to {answer.question_id!r} is")
        plain = msgspec.msgpack.decode(encoded, type=Answer)
        now = self._clock.now()

        def record(connection: sqlite3.Connection) -> None:
            query = f"SELECT {_COLUMNS} FROM questions WHERE id = ?"
            row = connection.execute(query, (answer.question_id,)).fetchone()
            if row is None:
                return
            found = _asked(row)
            if found.answer is not None:
                if found.answer != plain:
                    raise answered_already(answer.question_id)
                return
            connection.execute(
                "UPDATE questions SET answer = ?, answered_at = ? WHERE id = ?",
                (encoded, now.timestamp(), answer.question_id),
            )
            decision = decision_in(found.question, plain, now)
            if decision is not None:
                put_decision(connection, decision)

        self._database.transact_now(record)

    async def _look_for_answer(self, question_id: str) -> None:
        """Deliver the answer to a question, if another process recorded one."""
        query = "SELECT answer FROM questions WHERE id = ? AND answer NOT NULL"
        for (answer,) in await self._database.select(query, question_id):
            with contextlib.suppress(AnswerRefused):
                self._local.deliver(msgspec.msgpack.decode(answer, type=Answer))


_COLUMNS = "question, answer, answered_at"
_FIND = """SELECT EXISTS (SELECT 1 FROM runs WHERE id = ?), question, answer
    FROM (SELECT 1) LEFT JOIN questions ON id = ?"""


def _delete(where: str, *values: str) -> Work[None]:
    """Return a job that deletes questions without an answer."""

    def delete(connection: sqlite3.Connection) -> None:
        connection.execute(f"DELETE FROM questions WHERE answer IS NULL AND {where}", values)

    return delete


def _get(connection: sqlite3.Connection, question_id: str) -> QuestionRecord:
    query = f"SELECT {_COLUMNS} FROM questions WHERE id = ?"
    row = connection.execute(query, (question_id,)).fetchone()
    if row is None:
        raise AnswerRefused(question_id, "there is no such question", "Answer one of the open questions.")
    return _asked(row)


def _asked(row: Sequence[Any]) -> QuestionRecord:
    question, answer, answered_at = row
    question = msgspec.msgpack.decode(question, type=Question)
    if answer is None:
        return QuestionRecord(question)
    return QuestionRecord(question, msgspec.msgpack.decode(answer, type=Answer), answered_at)


class _Watch:
    """Calls `look` every few seconds with the id of each question that an asker is waiting for."""

    def __init__(self, every: float | None, look: Callable[[str], Awaitable[None]]) -> None:
        self._every = every
        self._look = look
        self._waiting: dict[asyncio.AbstractEventLoop, dict[str, None]] = {}
        """The questions that are waited for, by event loop. Each loop looks for its own answers."""
        self._tasks: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}

    @contextlib.contextmanager
    def watching(self, question_id: str) -> Generator[None]:
        """Look for the answer to this question until the block ends."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.setdefault(loop, {})
        waiting[question_id] = None
        if self._every is not None and loop not in self._tasks:
            self._tasks[loop] = loop.create_task(self._keep_looking(self._every, waiting))
        try:
            yield
        finally:
            waiting.pop(question_id, None)
            if not waiting:
                self._waiting.pop(loop, None)
                task = self._tasks.pop(loop, None)
                if task is not None:
                    task.cancel()

    async def _keep_looking(self, every: float, waiting: Mapping[str, None]) -> None:
        while True:
            await asyncio.sleep(every)
            for question_id in tuple(waiting):
                try:
                    await self._look(question_id)
                except JournalError:
                    log.warning("could not look for an answer to %s; will retry", question_id, exc_info=True)
