"""Questions in a journal's database, including those asked or answered by other processes, and votes on those that a quorum decides.

Time goes on while nobody runs a run. A question ends when somebody next looks at it after its expiry: whoever asks it again,
answers it, votes on it or lists it. `settle` decides that in the same transaction that would record an answer, by the
journal's clock. So either the answer or the expiry is recorded, once, and everybody sees the same end from then on.

Each vote is a record in the run's `outside` chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.clock import Clock
from handrail.errors import AnswerRefused, JournalAltered, JournalError
from handrail.journal.answers import (
    already_answered,
    check_answer,
    check_repeat,
    has_expired,
    still_fits,
    unanswered,
)
from handrail.journal.decisions import decision_in, put_decision
from handrail.journal.local import LocalQuestions
from handrail.journal.records import QuestionRecord
from handrail.journal.sql.chains import Chains, run_chain
from handrail.journal.sql.connection import Connection, fetch
from handrail.journal.sql.database import Database, Role, Work, encode, transaction
from handrail.journal.sql.leases import check_not_taken
from handrail.journal.sql.queue import make_due
from handrail.journal.sql.run_rows import rescue_runs
from handrail.journal.sql.runs import withdraw
from handrail.journal.sql.verification import (
    ANSWER,
    ANSWER_CLEARED,
    QUESTION,
    VOTE,
    add_outside,
    read_outside,
    verified,
)
from handrail.journal.sql.workspaces import put_blob
from handrail.question import Answer, Question, Vote

if TYPE_CHECKING:
    from handrail.journal.protocol import Check, Mask
    from handrail.protocols import Asker


def counted_from(question: Question, now: datetime) -> Question:
    """Return the question as asked `now`, by the clock that will decide when it expires and how long it has waited.

    The asker's own clock may show a different time.
    """
    expires_at = question.expires_at and now + (question.expires_at - question.asked_at)
    return msgspec.structs.replace(question, asked_at=now, expires_at=expires_at)


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
        answer = unanswered(question, "timed out")
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


log = logging.getLogger("handrail.questions")


class SqlQuestions(Role):
    """The role `Questions` of a journal. Its clock decides when they expire.

    `watch` is the number of seconds between checks for answers from other processes; None means no regular checks.
    """

    log = log

    def __init__(self, database: Database, clock: Clock, key: bytes, watch: float | None) -> None:
        super().__init__(database)
        self._clock = clock
        self._key = key
        self._local = LocalQuestions(clock, key=key, record=self._record)
        self.watch = Watch(watch, self._look_for_answer)
        database.subscribe(self._noticed)
        self._verified: dict[str, Any] = {}
        """The rows of open questions that have been verified, by question id."""

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        database = self._database
        if self.watch.is_on:
            await database.listen()
        recorded, found = await database.transact(lambda connection: self._find(connection, question))
        if found is None or found.question.digest != question.digest:
            question = counted_from(question, self._clock.now())
            await database.transact(self._put(question))
        else:
            question = found.question  # the question keeps its original expiry
            if found.answer is not None:
                if still_fits(found.answer, check):
                    return found.answer
                await database.transact(self._clear(question))
        with self.watch.watching(question.id):
            try:
                answer = await self._local.ask(question, asker, check, mask)
            except asyncio.CancelledError:
                if not recorded:  # no process can resume the run and ask again
                    database.transact_now(self._withdraw("id = ?", question.id))
                raise
            finally:
                self._local.forget(question.id)  # whatever must last is in the database
        if answer.outcome == "cancelled":
            await database.transact(self._withdraw("id = ?", question.id))
        return answer

    def _find(self, connection: Connection, question: Question) -> tuple[bool, QuestionRecord | None]:
        """Return whether the question's run is recorded, and the recorded question, which ends now if its time is over.

        The question is None if it was not asked before, or was withdrawn. Otherwise this raises `JournalAltered` if the run's
        records were altered.
        """
        query = (
            "SELECT EXISTS (SELECT 1 FROM runs WHERE id = ?), EXISTS (SELECT 1 FROM questions WHERE id = ?)"
        )
        recorded, asked = connection.execute(query, (question.run_id, question.id)).fetchone()
        found = _get(connection, self._chains, question.id) if asked else None
        if found is not None and found.question.digest == question.digest:
            found = settle(connection, self._database, found)
        return bool(recorded), found

    def _put(self, question: Question) -> Work[None]:
        database = self._database
        encoded, at = encode(question, f"question {question.id!r} has"), question.asked_at.timestamp()

        def put(connection: Connection) -> None:
            check_not_taken(connection, database.owner, question.run_id)
            self._drop_answer(connection, question, at)
            connection.execute(_PUT, (question.id, encoded, question.run_id, at, question.principal))
            chain = run_chain(question.run_id)
            database.chains.append(connection, chain, QUESTION, question.id, encoded, at=at)

        return put

    def _clear(self, question: Question) -> Work[None]:
        """Return a function that deletes an answer that can no longer be used, so that the question is asked again."""
        database, now = self._database, self._clock.now().timestamp()

        def clear(connection: Connection) -> None:
            check_not_taken(connection, database.owner, question.run_id)
            self._drop_answer(connection, question, now)

        return clear

    def _drop_answer(self, connection: Connection, question: Question, now: float) -> None:
        query = "UPDATE questions SET answer = NULL WHERE id = ? AND answer IS NOT NULL"
        if connection.execute(query, (question.id,)).rowcount:
            add_outside(connection, self._chains, question.run_id, ANSWER_CLEARED, question.id, b"", at=now)

    def _withdraw(self, where: str, *values: str) -> Work[None]:
        chains, now = self._chains, self._clock.now().timestamp()
        return lambda connection: withdraw(connection, chains, now, where, *values)

    def answer(self, answer: Answer, /) -> None:
        """Accept an answer, even if another process asked the question, or if its run has not been resumed yet.

        Raises `AnswerRefused` if there is no such question, if the answer is not valid, or if the question has a different
        answer already or has expired. An answer that may contain a secret is also refused if nothing in this process waits for it, unless it
        repeats the recorded answer.
        """
        if self._local.is_known(answer.question_id):
            self._local.answer(answer)
            return
        database = self._database

        def look(connection: Connection) -> QuestionRecord:
            return settle(connection, database, _get(connection, database.chains, answer.question_id))

        found = database.transact_now(look)
        question = found.question
        check_answer(question, answer)
        if question.secret and answer.outcome == "answered":
            check_repeat(question, answer, found.answer, self._key)
            return
        recorded = self._record(answer)
        if recorded != answer:
            raise already_answered(question, recorded)

    async def open(self, run_id: str | None = None, /, *, principal: str | None = None) -> Sequence[Question]:
        where, values = ["answer IS NULL"], list[str]()
        for column, value in (("run_id", run_id), ("principal", principal)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        query = f"SELECT {_OPEN} FROM questions WHERE {' AND '.join(where)} ORDER BY asked_at, id"

        def find(connection: Connection) -> list[Question]:
            if not self._database.is_intact(
                connection, "runs", "questions"
            ):  # nothing more is written to a damaged file
                rescued, now = _decoded(self._rescue(connection, run_id)), self._clock.now()
                return [each for each in rescued if not has_expired(each, now)]
            checked: dict[str, bool] = {}
            asked = _decoded(
                row[1]
                for row in fetch(connection, query, *values)
                if self._is_recorded(connection, row, checked, lists_all=run_id is None)
            )
            records = [settle(connection, self._database, QuestionRecord(each)) for each in asked]
            return [each.question for each in records if each.answer is None]

        found = await self._database.transact(find)
        found.sort(key=lambda each: (each.asked_at, each.id))
        return tuple(each for each in found if principal in (None, each.principal))

    def _rescue(self, connection: Connection, run_id: str | None) -> list[bytes]:
        """Return the open questions of one run, or of every run that can still be read, in a damaged journal.

        Raises `JournalAltered` if the run `run_id` was altered. Without `run_id`, altered runs are left out and logged.
        """
        if run_id is not None:
            return list(verified(connection, self._chains, run_id).open_questions.values())
        found: list[bytes] = []
        for row in rescue_runs(connection, self._chains):
            try:
                if isinstance(row, JournalAltered):
                    raise row
                found += verified(connection, self._chains, row.id).open_questions.values()
            except JournalAltered as error:
                self._log_once(error.id, _NOT_SHOWN, error.id, error)
        return found

    def _is_recorded(
        self, connection: Connection, row: Any, checked: dict[str, bool], *, lists_all: bool
    ) -> bool:
        """Return whether a row is what its run recorded, so that nobody is shown anything else.

        A row that was verified before is only compared, so listing the same questions again is cheap. In a list of all
        runs, an altered run is left out and logged once; otherwise this raises `JournalAltered`.
        """
        id, run_id = row[0], row[2]
        if self._verified.get(id) == row:
            return True
        if checked.get(run_id) is False:
            return False
        try:
            if run_id not in checked:  # a run is verified with all its questions
                verified(connection, self._chains, run_id)
        except JournalAltered as error:
            if not lists_all:
                raise
            checked[run_id] = False
            self._log_once(run_id, _NOT_SHOWN, run_id, error)
            return False
        checked[run_id] = True
        if len(self._verified) >= _MOST_VERIFIED:
            self._verified.clear()
        self._verified[id] = row
        return True

    @transaction
    def history(self, connection: Connection, run_id: str, /) -> Sequence[QuestionRecord]:
        database = self._database
        asked = verified(connection, database.chains, run_id).questions.values()
        records = [settle(connection, database, decoded(each)) for each in asked]
        return tuple(sorted(records, key=lambda each: (each.question.asked_at, each.question.id)))

    async def withdraw(self, question_id: str, /) -> None:
        await self._local.withdraw(question_id)
        await self._database.transact(self._withdraw("id = ?", question_id))

    async def withdraw_all(self, prefix: str, /) -> None:
        await self._local.withdraw_all(prefix)
        await self._database.transact(self._withdraw("substr(id, 1, length(?)) = ?", prefix, prefix))

    def _record(self, answer: Answer) -> Answer:
        """Record an answer before the asker is notified, and return how the question ended.

        That is not this answer if the question has expired or a different answer is recorded. A cancellation is not recorded,
        because the question may be asked again. Nor is an answer if the question is not in the database.
        """
        if answer.outcome == "cancelled":
            return answer
        plain = _plain(answer)

        def record(connection: Connection) -> Answer | None:
            if not connection.execute(
                "SELECT 1 FROM questions WHERE id = ?", (answer.question_id,)
            ).fetchone():
                return None
            asked = _get(connection, self._chains, answer.question_id)
            settled = settle(connection, self._database, asked, plain).answer
            if asked.answer is None and settled == plain:
                run_id, at = asked.question.run_id, self._database.now()
                for each in answer.attachments:
                    if each.is_here:
                        put_blob(connection, self._chains, each.content, run_id, at=at)
            return settled

        recorded = self._database.transact_now(record)
        return answer if recorded is None or recorded == plain else recorded

    def _noticed(self, kind: str, id: str) -> None:
        if kind in ("question", ""):
            self.watch.look_now(id or None)

    async def _look_for_answer(self, question_id: str) -> None:
        """Deliver the answer to a question, if another process recorded one."""
        query = "SELECT 1 FROM questions WHERE id = ? AND answer IS NOT NULL"

        def find(connection: Connection) -> Answer | None:
            if not connection.execute(query, (question_id,)).fetchone():
                return None
            return _get(connection, self._chains, question_id).answer

        answer = await self._database.transact(find)
        if answer is not None:
            with contextlib.suppress(AnswerRefused):
                self._local.deliver(answer)


_NOT_SHOWN = "the questions of run %s are not shown: %s"
_OPEN = "id, question, run_id, principal, asked_at"
_MOST_VERIFIED = 10_000
_PUT = """INSERT INTO questions (id, question, run_id, asked_at, principal) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET question = excluded.question, principal = excluded.principal, answer = NULL,
    asked_at = excluded.asked_at"""


def _decoded(bodies: Iterable[bytes]) -> list[Question]:
    return [msgspec.msgpack.decode(body, type=Question) for body in bodies]


def _plain(answer: Answer) -> Answer:
    """Return the answer as it is read from the database. Raises `DefinitionError` if its value can't be recorded."""
    encoded = encode(answer, f"the answer to {answer.question_id!r} is")
    return msgspec.msgpack.decode(encoded, type=Answer)


def _get(connection: Connection, chains: Chains, question_id: str) -> QuestionRecord:
    """Return a question as it was recorded.

    Raises `AnswerRefused` if there is no such question, and `JournalAltered` if the run's records were altered.
    """
    query = "SELECT run_id FROM questions WHERE id = ?"
    row = connection.execute(query, (question_id,)).fetchone()
    if row is None:
        raise AnswerRefused(question_id, "there is no such question", "Answer one of the open questions.")
    return decoded(verified(connection, chains, row[0]).questions[question_id])


class Watch:
    """Calls `look` with the id of each question that an asker waits for: every `every` seconds, and in `look_now`.

    If `every` is None, it calls `look` only in `look_now`.
    """

    def __init__(self, every: float | None, look: Callable[[str], Awaitable[None]]) -> None:
        self._every = every
        self._look = look
        self._waiting: dict[asyncio.AbstractEventLoop, dict[str, None]] = {}
        """The questions that askers wait for, by event loop. Each loop looks for its own answers."""
        self._tasks: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}

    @contextlib.contextmanager
    def watching(self, question_id: str) -> Generator[None]:
        """Look for the answer to this question until the block ends: periodically if this watch is on, and in `look_now`."""
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

    @property
    def is_on(self) -> bool:
        """Whether answers from other processes are looked for periodically."""
        return self._every is not None

    def look_now(self, question_id: str | None) -> None:
        """Look for the answer to a question, or to all questions if `question_id` is None. This is thread-safe.

        Questions that no asker waits for are skipped.
        """
        for loop, waiting in tuple(self._waiting.items()):
            for each in tuple(waiting) if question_id is None else (question_id,):
                if each in waiting:
                    with contextlib.suppress(RuntimeError):  # the asker's loop is closed
                        asyncio.run_coroutine_threadsafe(self._try_to_look(each), loop)

    async def _try_to_look(self, question_id: str) -> None:
        try:
            await self._look(question_id)
        except JournalError as error:
            log.log(
                error.retry_level,
                "could not look for an answer to %s; will retry",
                question_id,
                exc_info=True,
            )

    async def _keep_looking(self, every: float, waiting: Mapping[str, None]) -> None:
        while True:
            await asyncio.sleep(every)
            for question_id in tuple(waiting):
                await self._try_to_look(question_id)


class SqlVotes(Role):
    """The role `Votes` of a journal."""

    async def cast(self, run_id: str, vote: Vote, /) -> Sequence[Vote]:
        chains, encoded = self._chains, encode(vote, "a vote has")

        def record(connection: Connection) -> Sequence[Vote] | AnswerRefused:
            asked = self._asked(connection, run_id, vote)
            if asked.answer is not None and asked.answer.outcome == "timed out":
                return already_answered(
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
        found = verified(connection, self._chains, run_id).questions.get(vote.question_id)
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

    @transaction
    def on(self, connection: Connection, run_id: str, question_id: str, digest: str, /) -> Sequence[Vote]:
        return self._read(connection, run_id, question_id, digest)

    def _read(self, connection: Connection, run_id: str, question_id: str, digest: str) -> Sequence[Vote]:
        records = read_outside(connection, self._chains, run_id)
        found = (
            msgspec.msgpack.decode(each.body, type=Vote)
            for each in records
            if each.kind == VOTE and each.key == question_id
        )
        return tuple(vote for vote in found if vote.digest == digest)
