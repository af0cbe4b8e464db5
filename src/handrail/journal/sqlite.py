"""`SqliteJournal`: the record of runs in one file, which a restarted process goes on from."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Sequence
from os import PathLike, fspath
from queue import SimpleQueue
from typing import Any, Literal, TypeVar, cast

import msgspec
import pydantic_core

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import AnswerRefused, DefinitionError, JournalError
from handrail.ids import NewId, random_id
from handrail.journal.memory import MemoryJournal
from handrail.protocols import Check, CommitUnit, Environment
from handrail.question import Answer, Question

T = TypeVar("T")

Durability = Literal["process", "power"]
"""What the record outlives: the end of the process, `kill -9` too, or also a power cut."""

SCHEMA = 1
"""Which shape the file has. A journal of another shape is refused, never guessed at."""
_TABLES = """
    CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE steps (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE questions (id TEXT PRIMARY KEY, question BLOB NOT NULL, answer BLOB) WITHOUT ROWID;
    CREATE TABLE units (
        number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, call_id TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('committed', 'applied', 'void')), unit BLOB NOT NULL
    );
    CREATE INDEX units_of_a_run ON units (run_id);
    CREATE INDEX units_to_apply ON units (number) WHERE state = 'committed';
"""
_BUSY_SECONDS = 10.0
_STANDING = ("answered", "declined")
"""Answers that stand; one that timed out or was cancelled may be asked for again."""

Work = Callable[[sqlite3.Connection], Any]


class SqliteJournal(MemoryJournal):
    """Steps, questions and commits in one SQLite file, written by one thread.

    What a method has recorded is there for whoever opens the file again: after `kill -9` with
    `durability="process"`, after a power cut with `"power"`, where each record waits for the disk.
    Values of steps and answers come back as plain data. Close it when it is no longer needed; one
    process at a time uses a journal.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        durability: Durability = "process",
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
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
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        opened = _Job(lambda connection: None)
        self._thread = threading.Thread(
            target=self._write, args=(opened, new_id()), name="handrail-journal", daemon=True
        )
        self._thread.start()
        opened.done.wait()
        if opened.error is not None:
            self._closed = True
            raise opened.error
        self.id = cast(str, opened.value)

    def close(self) -> None:
        """Finish what is being written and let go of the file; harmless when called twice."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    # --- steps and questions ----------------------------------------------------------------------

    async def step(self, key: str, function: Callable[[], Awaitable[T]], /) -> T:
        """Run `function` for this key until it succeeds once; afterwards give its recorded value."""

        async def recorded() -> Any:
            row = await self._do(_first("SELECT value FROM steps WHERE key = ?", key))
            if row is not None:
                return msgspec.msgpack.decode(row[0])
            value = await function()
            encoded = _encode(value, f"step {key!r} gave")
            await self._do(_run("INSERT OR REPLACE INTO steps VALUES (?, ?)", key, encoded))
            return value

        return cast(T, await super().step(key, recorded))

    async def ask(
        self, question: Question, environment: Environment | None = None, check: Check | None = None, /
    ) -> Answer:
        row = await self._do(_first("SELECT question, answer FROM questions WHERE id = ?", question.id))
        if row is not None:
            asked = msgspec.msgpack.decode(row[0], type=Question)
            if asked.digest != question.digest:
                raise AnswerRefused(
                    question.id, "another question with this id was asked already", "Give each its own id."
                )
            if row[1] is not None:
                return msgspec.msgpack.decode(row[1], type=Answer)
        else:
            await self._do(
                _run("INSERT INTO questions VALUES (?, ?, NULL)", question.id, _encode(question, "asking"))
            )
        answer = await super().ask(question, environment, check)
        if answer.outcome in _STANDING:
            encoded = _encode(answer, f"the answer to {question.id!r} is")
            await self._do(_run("UPDATE questions SET answer = ? WHERE id = ?", encoded, question.id))
        return answer

    # --- commits ----------------------------------------------------------------------------------

    async def commit(self, unit: CommitUnit, /) -> None:
        """Record everything one call changed, in one transaction: from here on it is committed."""
        state = "committed" if unit.files else "applied"
        await self._do(
            _run(
                "INSERT INTO units (run_id, call_id, state, unit) VALUES (?, ?, ?, ?)",
                unit.run_id,
                unit.call_id,
                state,
                _encode(unit, f"call {unit.call_id!r} committed"),
            )
        )

    async def applied(self, unit: CommitUnit, /) -> None:
        """Note that the files of a unit are as it says. Lost in a power cut it is found out again."""
        await self._turn(unit, "applied", synced=False)

    async def void(self, unit: CommitUnit, /) -> None:
        await self._turn(unit, "void", synced=True)

    async def unapplied(self) -> Sequence[CommitUnit]:
        return await self._fetch("SELECT unit FROM units WHERE state = 'committed' ORDER BY number")

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        return await self._fetch(
            "SELECT unit FROM units WHERE run_id = ? AND state != 'void' ORDER BY number", run_id
        )

    async def _turn(self, unit: CommitUnit, state: str, *, synced: bool) -> None:
        turn = _run(
            "UPDATE units SET state = ? WHERE run_id = ? AND call_id = ? AND state = 'committed'",
            state,
            unit.run_id,
            unit.call_id,
        )
        await self._do(turn, synced=synced)

    async def _fetch(self, query: str, *values: Any) -> tuple[CommitUnit, ...]:
        rows = await self._do(lambda connection: connection.execute(query, values).fetchall())
        return tuple(msgspec.msgpack.decode(row[0], type=CommitUnit) for row in rows)

    # --- the one thread that writes -----------------------------------------------------------------

    async def _do(self, work: Work, *, synced: bool = True) -> Any:
        """Have the writer do something in a transaction of its own, and wait until it is recorded."""
        if self._closed:
            raise JournalError(self.path, "it was closed", "Open it again.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put(_Job(work, lambda job: loop.call_soon_threadsafe(_deliver, future, job), synced))
        return await future

    def _write(self, opened: _Job, new_id: str) -> None:
        try:
            connection = _open(self.path, new_id, self.synced)
            opened.value = connection.execute("SELECT value FROM about WHERE key = 'id'").fetchone()[0]
        except JournalError as error:
            opened.error = error
            return
        except sqlite3.Error as error:
            opened.error = JournalError(
                self.path, f"it can't be opened: {error}", "Give the path of a journal, or of a new file."
            )
            return
        finally:
            opened.done.set()
        while (job := self._jobs.get()) is not None:
            self._carry_out(connection, job)
        connection.close()

    def _carry_out(self, connection: sqlite3.Connection, job: _Job) -> None:
        try:
            if self.synced:
                connection.execute(f"PRAGMA synchronous = {'FULL' if job.synced else 'OFF'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                job.value = job.work(connection)
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            job.error = JournalError(
                self.path, f"it can't be written: {error}", "See to the disk, and try again."
            )
        except BaseException as error:
            job.error = error
        job.finish()


class _Job:
    """Something for the writer to do, and what came of it."""

    __slots__ = ("_report", "done", "error", "synced", "value", "work")

    def __init__(
        self, work: Work, report: Callable[[_Job], object] | None = None, synced: bool = True
    ) -> None:
        self.work = work
        self.synced = synced
        self._report = report
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        self.done.set()
        if self._report is not None:
            try:
                self._report(self)
            except RuntimeError:  # the loop that asked has ended; what was recorded is recorded
                return


def _deliver(future: asyncio.Future[Any], job: _Job) -> None:
    if future.done():
        return
    if job.error is not None:
        future.set_exception(job.error)
    else:
        future.set_result(job.value)


def _open(path: str, new_id: str, synced: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # Without it a record outlives the process, since the system has it; with it also the system.
        connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'OFF'}")
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO about VALUES ('schema', ?), ('id', ?)", (str(SCHEMA), new_id))
        connection.execute("COMMIT")
        _check_schema(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_schema(connection: sqlite3.Connection, path: str) -> None:
    try:
        row = connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
    except sqlite3.OperationalError:
        row = None
    if row is None:
        raise JournalError(
            path, "this is a database, and no journal", "Give the path of a journal, or of a new file."
        )
    if row[0] != str(SCHEMA):
        raise JournalError(
            path,
            f"its schema is {row[0]}, and this version of Handrail has {SCHEMA}",
            "Use the version that wrote it, or a new file.",
        )


def _first(query: str, *values: Any) -> Work:
    return lambda connection: connection.execute(query, values).fetchone()


def _run(query: str, *values: Any) -> Work:
    def run(connection: sqlite3.Connection) -> None:
        connection.execute(query, values)

    return run


def _encode(value: Any, what: str) -> bytes:
    try:
        return msgspec.msgpack.encode(value, enc_hook=pydantic_core.to_jsonable_python)
    except (TypeError, ValueError, OverflowError) as error:
        raise DefinitionError(
            f"{what} something that can't be recorded: {error}. Give plain data, a dataclass or a model."
        ) from error
