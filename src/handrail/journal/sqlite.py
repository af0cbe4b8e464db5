"""`SqliteJournal`: the record of runs in one file, which a restarted process goes on from."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from os import PathLike, fspath
from typing import Any, Literal, TypeVar, cast

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import AnswerRefused, DefinitionError, RunBusy, RunUnknown
from handrail.ids import NewId, random_id
from handrail.journal import shelf
from handrail.journal.decisions import SqliteDecisions
from handrail.journal.desk import check_answer
from handrail.journal.digest import key_beside
from handrail.journal.lease import LEASE_SECONDS, is_dead, is_free
from handrail.journal.memory import MemoryJournal, after_last, check_nobodys, run_exists
from handrail.journal.recorded import Kept, encode, plain, still_fits
from handrail.journal.schema import SCHEMA
from handrail.journal.seal import check_repeat
from handrail.journal.tickets import SqliteTickets
from handrail.journal.watching import Watch
from handrail.journal.writer import Moments, Work, Writer, first_row, statement
from handrail.protocols import Asker
from handrail.question import Answer, Question
from handrail.records import (
    OVER,
    Asked,
    Check,
    CommitUnit,
    DecisionBox,
    Entry,
    Mark,
    Mask,
    RunCopy,
    RunRecord,
    RunRow,
    RunStatus,
    SessionRow,
)

__all__ = ["SCHEMA", "Durability", "SqliteJournal"]

T = TypeVar("T")

Durability = Literal["process", "power"]
"""What the record outlives: the end of the process, `kill -9` too, or also a power cut."""

_STANDING = ("answered", "declined")
"""Answers that stand; one that timed out or was cancelled may be asked for again."""


class SqliteJournal(MemoryJournal):
    """Runs, steps, questions and commits in one SQLite file, written by one thread.

    What a method has recorded is there for whoever opens the file again: after `kill -9` with
    `durability="process"`, after a power cut with `"power"`, where each record waits for the disk.
    Values of steps and answers come back as plain data. Several processes may use one file; each run
    has one owner. Close it when it is no longer needed.

    - `watch`: how often to look for answers that another process gave, in seconds; None: never.
    - `inline`: write in the thread that asks, for simulations.
    - `moments`: hears of every transaction before and after it, for simulations of crashes.
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
                f"durability={durability!r} is not possible. Give 'process', which outlives the process, "
                "or 'power', which outlives a power cut."
            )
        super().__init__(clock)
        self.path = fspath(path)
        self.durability: Durability = durability
        self.synced = durability == "power"
        self._watch = Watch(watch, self._look_for_answer)
        self._applying: set[str] = set()
        """The calls whose files are being changed now."""
        self._writer = Writer(self.path, new_id(), self.synced, inline, moments)
        self._do = self._writer.do
        self.id = self._writer.id
        self.key = key_beside(self.path)
        self.desk.keep, self.desk.stays = self._keep_answer, lambda question: False
        self.desk.key = self.key
        self.tickets = SqliteTickets(self.owner, clock, self._writer)
        self._in_file = SqliteDecisions(self.owner, clock, self._writer)

    @property
    def decisions(self) -> DecisionBox:
        return self._in_file

    def close(self) -> None:
        """Finish what is being written and let go of the file; harmless when called twice."""
        self._writer.close()

    # --- runs -------------------------------------------------------------------------------------

    async def begin(self, run: RunRecord, /) -> None:
        """Record a new run and take it."""
        now = self._now()

        def begin(connection: sqlite3.Connection) -> None:
            if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run.id,)).fetchone():
                raise run_exists(run.id)
            query = "SELECT max(began_at) FROM runs WHERE session_id = ?"
            placed = after_last(run, connection.execute(query, (run.session_id,)).fetchone()[0])
            encoded = encode(placed, f"run {run.id!r} began with")
            until = now + LEASE_SECONDS
            values = (run.id, run.session_id, run.principal, self.owner, until, placed.began_at, now, encoded)
            connection.execute(
                "INSERT INTO runs "
                "(id, session_id, principal, status, owner, leased_until, began_at, changed_at, record, outcome) "
                "VALUES (?, ?, ?, 'running', ?, ?, ?, ?, ?, x'')",
                values,
            )

        await self._do(begin)

    async def take(self, run_id: str, /) -> RunRow:
        """Take a run over to go on with it. What is returned is how it stood before."""
        now = self._now()

        def take(connection: sqlite3.Connection) -> RunRow:
            row = shelf.row_of(connection, run_id)
            if not is_free(row.owner, row.leased_until, now, self.owner):
                raise RunBusy(run_id, row.owner)
            status = row.status if row.status in OVER else "running"
            connection.execute(
                "UPDATE runs SET status = ?, owner = ?, leased_until = ?, changed_at = ?, stopping = 0 WHERE id = ?",
                (status, self.owner, now + LEASE_SECONDS, now, run_id),
            )
            return row

        taken = await self._do(take)
        # What its steps gave is what the file says: another process may have had the run.
        self._forget_steps(run_id)
        return taken

    async def keep(self, run_id: str, /) -> bool:
        """Renew the lease; True: somebody has asked for the run to be cancelled."""
        now = self._now()

        def keep(connection: sqlite3.Connection) -> bool:
            self._check_mine(connection, run_id)
            connection.execute("UPDATE runs SET leased_until = ? WHERE id = ?", (now + LEASE_SECONDS, run_id))
            return bool(shelf.row_of(connection, run_id).stopping)

        return await self._do(keep, synced=False)

    async def stop(self, run_id: str, /) -> None:
        """Ask the process that has a run to cancel it."""

        def stop(connection: sqlite3.Connection) -> None:
            shelf.row_of(connection, run_id)  # `RunUnknown` where there is none
            connection.execute("UPDATE runs SET stopping = 1 WHERE id = ?", (run_id,))

        await self._do(stop)

    async def leave(self, run_id: str, status: RunStatus, outcome: bytes = b"", /) -> None:
        """Let go of a run, and say where it stands."""
        now = self._now()

        def leave(connection: sqlite3.Connection) -> None:
            self._check_mine(connection, run_id)
            connection.execute(
                "UPDATE runs SET status = ?, owner = '', leased_until = 0, changed_at = ?, outcome = ?, stopping = 0 "
                "WHERE id = ?",
                (status, now, outcome, run_id),
            )
            if status in OVER:
                connection.execute("DELETE FROM questions WHERE run_id = ? AND answer IS NULL", (run_id,))

        await self._do(leave)
        self._forget_steps(run_id)  # the file has them

    async def run(self, run_id: str, /) -> RunRow:
        """A run as it stands."""
        return await self._do(lambda connection: shelf.row_of(connection, run_id))

    async def runs(
        self,
        *,
        session_id: str | None = None,
        principal: str | None = None,
        limit: int = 100,
        before: Mark | None = None,
    ) -> Sequence[RunRow]:
        """Runs, of everybody or of one, the newest first; of a session all of them, the oldest first."""
        return await self._do(lambda connection: shelf.runs(connection, session_id, principal, limit, before))

    async def sessions(
        self, principal: str, /, *, limit: int = 100, before: Mark | None = None
    ) -> Sequence[SessionRow]:
        return await self._do(lambda connection: shelf.sessions(connection, principal, limit, before))

    async def note(self, run_id: str, entry: Entry, /, *, from_outside: bool = False) -> None:
        """Record something that happened in a run this process has; from outside, in one that nobody has."""

        def note(connection: sqlite3.Connection) -> None:
            if from_outside:
                check_nobodys(shelf.row_of(connection, run_id), self._now())
            else:
                self._check_mine(connection, run_id)
            shelf.put_entries(connection, run_id, [entry])

        await self._do(note)

    async def entries(self, run_id: str, /) -> Sequence[Entry]:
        """What happened in a run, in order."""
        query = "SELECT kind, key, at, body FROM entries WHERE run_id = ? ORDER BY number"
        rows = await self._do(lambda connection: connection.execute(query, (run_id,)).fetchall())
        return tuple(Entry(*row) for row in rows)

    async def marks(self, session_id: str, /) -> Sequence[tuple[str, Entry]]:
        return await self._do(lambda connection: shelf.marks(connection, session_id))

    async def bring(self, copy: RunCopy, /) -> None:
        encoded = encode(copy.row.record, "a run that is brought in began with")

        def bring(connection: sqlite3.Connection) -> None:
            run_id = copy.row.record.id
            if connection.execute("SELECT 1 FROM runs WHERE id = ?", (run_id,)).fetchone():
                raise run_exists(run_id)
            shelf.put(connection, copy, encoded)

        await self._do(bring)

    async def forget(self, run_ids: Sequence[str], /) -> None:
        await self._do(lambda connection: shelf.remove(connection, run_ids))
        for run_id in run_ids:
            self._forget_steps(run_id)

    async def asked(self, run_id: str, /) -> Sequence[Asked]:
        return await self._do(lambda connection: shelf.asked(connection, run_id))

    async def steps(self, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        return await self._do(lambda connection: shelf.steps(connection, run_id))

    def _check_mine(self, connection: sqlite3.Connection, run_id: str) -> None:
        """Only the owner of a run adds to it: whoever was overtaken learns so here."""
        row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
        if row is None:
            raise RunUnknown(run_id)
        if row[0] != self.owner:
            raise RunBusy(run_id, row[0])

    # --- steps ------------------------------------------------------------------------------------

    async def step(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
        """Run `function` for this key until it succeeds once; afterwards give its recorded value."""

        async def recorded() -> Any:
            row = await self._do(lambda connection: self._reserve(connection, key, run_id))
            if row is not None and row[0] is not None:
                return msgspec.msgpack.decode(row[0])
            try:
                value = await (function() if row is None or unsettled is None else unsettled())
                encoded = encode(value, f"step {key!r} gave")
            except Exception:  # one that was cancelled may have happened, and stays reserved
                if row is None:  # so does one found like that, until it is decided
                    with contextlib.suppress(RunBusy):  # whoever has the run now decides
                        await self._do(
                            self._of_mine(run_id, "DELETE FROM steps WHERE key = ? AND value IS NULL", key)
                        )
                raise
            await self._do(
                self._of_mine(
                    run_id, "UPDATE steps SET value = ? WHERE key = ? AND value IS NULL", encoded, key
                )
            )
            return value

        return cast(T, await super().step(key, recorded, run_id=run_id))

    def _reserve(self, connection: sqlite3.Connection, key: str, run_id: str) -> Any:
        row = connection.execute("SELECT value FROM steps WHERE key = ?", (key,)).fetchone()
        if row is None:
            if run_id:
                self._check_mine(connection, run_id)
            connection.execute("INSERT INTO steps VALUES (?, ?, NULL)", (key, run_id))
        return row

    def _of_mine(self, run_id: str, query: str, *values: Any) -> Work:
        """Carried out only while the run is this process's: what another has recorded since stays as it is."""

        def carry_out(connection: sqlite3.Connection) -> None:
            self._check_not_taken(connection, run_id)
            connection.execute(query, values)

        return carry_out

    def _check_not_taken(self, connection: sqlite3.Connection, run_id: str) -> None:
        """The same for what need not belong to a recorded run."""
        row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
        if row is not None and row[0] != self.owner:
            raise RunBusy(run_id, row[0])

    # --- questions --------------------------------------------------------------------------------

    async def ask(
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        row = await self._do(first_row("SELECT question, answer FROM questions WHERE id = ?", question.id))
        if row is not None:
            asked = msgspec.msgpack.decode(row[0], type=Question)
            if asked.digest == question.digest:
                question = asked  # it was asked before, and has the time it was given then
                if row[1] is not None:
                    answer = msgspec.msgpack.decode(row[1], type=Answer)
                    if still_fits(answer, check):
                        return answer
                    await self._do(
                        self._of_mine(
                            question.run_id, "UPDATE questions SET answer = NULL WHERE id = ?", question.id
                        )
                    )
            else:
                await self._do(
                    self._of_mine(
                        question.run_id,
                        "UPDATE questions SET question = ?, principal = ?, answer = NULL WHERE id = ?",
                        encode(question, "asking"),
                        question.principal,
                        question.id,
                    )
                )
        else:
            await self._do(
                self._of_mine(
                    question.run_id,
                    "INSERT INTO questions (id, question, run_id, asked_at, principal) VALUES (?, ?, ?, ?, ?)",
                    question.id,
                    encode(question, "asking"),
                    question.run_id,
                    question.asked_at.timestamp(),
                    question.principal,
                )
            )
        with self._watch.on(question.id):
            try:
                answer = await self.desk.ask(question, asker, check, mask)
            finally:
                self.desk.forget(question.id)  # the file has it
        if answer.outcome in ("timed out", "cancelled"):
            await self._do(statement("DELETE FROM questions WHERE id = ? AND answer IS NULL", question.id))
        return answer

    def answer(self, answer: Answer, /) -> None:
        """Take an answer, also to a question that another process asked, or one that has ended."""
        if self.desk.stands(answer.question_id):
            self.desk.answer(answer)
            return
        found = self._writer.do_now(lambda connection: shelf.asked_as(connection, answer.question_id))
        question = found.question
        check_answer(question, answer, self._clock.now())
        if question.secret and answer.outcome == "answered":
            check_repeat(question, answer, found.answer, self.key)
        else:
            self._keep_answer(answer)

    async def questions(
        self, run_id: str | None = None, /, *, principal: str | None = None
    ) -> Sequence[Question]:
        return await self._do(lambda connection: shelf.questions(connection, run_id, principal))

    async def withdraw(self, prefix: str, /, *, alone: bool = False) -> None:
        await super().withdraw(prefix, alone=alone)
        which = "id = ?" if alone else "substr(id, 1, length(?)) = ?"
        values = (prefix,) if alone else (prefix, prefix)
        await self._do(statement(f"DELETE FROM questions WHERE answer IS NULL AND {which}", *values))

    def _keep_answer(self, answer: Answer) -> None:
        """Record an answer that stands, before anybody hears of it; `AnswerRefused` if there is another."""
        if answer.outcome not in _STANDING:
            return
        kept = Kept(**msgspec.structs.asdict(answer), at=self._clock.now().timestamp())
        encoded = encode(kept, f"the answer to {answer.question_id!r} is")

        def keep(connection: sqlite3.Connection) -> None:
            query = "SELECT answer, question FROM questions WHERE id = ?"
            found = connection.execute(query, (answer.question_id,)).fetchone()
            if found is not None and found[0] is not None:
                if msgspec.msgpack.decode(found[0], type=Answer) != plain(encoded):
                    raise AnswerRefused(
                        answer.question_id, "it was answered already", "The first answer counts."
                    )
                return
            connection.execute("UPDATE questions SET answer = ? WHERE id = ?", (encoded, answer.question_id))
            if found is not None:
                self._in_file.take(
                    connection, msgspec.msgpack.decode(found[1], type=Question), plain(encoded)
                )

        self._writer.do_now(keep)

    async def _look_for_answer(self, question_id: str) -> None:
        """Let an answer be heard that another process took."""
        row = await self._do(
            first_row("SELECT answer FROM questions WHERE id = ? AND answer NOT NULL", question_id)
        )
        if row is not None:
            with contextlib.suppress(AnswerRefused):
                self.desk.take(msgspec.msgpack.decode(row[0], type=Answer))

    # --- commits ----------------------------------------------------------------------------------

    async def commit(self, unit: CommitUnit, /) -> None:
        """Record everything one call changed, in one transaction: from here on it is committed."""
        state = "committed" if unit.files else "applied"
        encoded = encode(unit, f"call {unit.call_id!r} committed")

        def commit(connection: sqlite3.Connection) -> None:
            self._check_not_taken(connection, unit.run_id)
            connection.execute(
                "INSERT INTO units (run_id, call_id, state, unit, session_id) VALUES (?, ?, ?, ?, ?)",
                (unit.run_id, unit.call_id, state, encoded, unit.session_id),
            )

        if unit.files:
            self._applying.add(unit.call_id)
        try:
            await self._do(commit)
        except BaseException:
            self._applying.discard(unit.call_id)
            raise

    async def applied(self, unit: CommitUnit, /) -> None:
        """Note that the files of a unit are as it says. Lost in a power cut it is found out again."""
        self._applying.discard(unit.call_id)
        await self._turn(unit, "applied", synced=False)

    async def void(self, unit: CommitUnit, /) -> None:
        self._applying.discard(unit.call_id)
        await self._turn(unit, "void", synced=True)

    async def unapplied(self) -> Sequence[CommitUnit]:
        """Those that nobody is about to apply: neither this process nor another that lives."""
        return tuple(
            unit
            for unit, owner in await self._do(shelf.unapplied)
            if (not owner or owner == self.owner or is_dead(owner)) and unit.call_id not in self._applying
        )

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        return await self._fetch(
            "SELECT unit FROM units WHERE run_id = ? AND state != 'void' ORDER BY number", run_id
        )

    async def load_session(self, session_id: str, /) -> Sequence[CommitUnit]:
        return await self._fetch(
            "SELECT unit FROM units WHERE session_id = ? AND state != 'void' ORDER BY number", session_id
        )

    async def later(self, unit: CommitUnit, /) -> Sequence[CommitUnit]:
        return await self._do(lambda connection: shelf.later(connection, unit))

    async def _turn(self, unit: CommitUnit, state: str, *, synced: bool) -> None:
        turn = statement(
            "UPDATE units SET state = ? WHERE run_id = ? AND call_id = ? AND state = 'committed'",
            state,
            unit.run_id,
            unit.call_id,
        )
        await self._do(turn, synced=synced)

    async def _fetch(self, query: str, *values: Any) -> tuple[CommitUnit, ...]:
        rows = await self._do(lambda connection: connection.execute(query, values).fetchall())
        return tuple(msgspec.msgpack.decode(row[0], type=CommitUnit) for row in rows)
