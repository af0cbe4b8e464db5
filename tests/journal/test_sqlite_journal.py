"""`SqliteJournal`: records survive reopening the file, failed transactions and kills."""

import asyncio
import queue
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

from handrail import Agent, ScriptedModel, SqliteJournal
from handrail.clock import SYSTEM_CLOCK
from handrail.errors import Declined, DefinitionError, JournalError, QuestionCancelled
from handrail.journal.records import CommitUnit
from handrail.journal.sql.database import Job
from handrail.journal.sqlite import SqliteDatabase
from handrail.protocols import Environment
from handrail.question import Answer, Question
from support.texts import WRONG_KEY

Main = Callable[[SqliteJournal], Coroutine[Any, Any, Any]]


class Opened:
    """A journal file that is opened again for each function that uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, main: Main, **options: Any) -> Any:
        async def run() -> Any:
            journal = SqliteJournal(self.path, **options)
            try:
                return await main(journal)
            finally:
                journal.close()

        return asyncio.run(run())


@pytest.fixture
def journal(tmp_path: Path) -> Opened:
    return Opened(tmp_path / "journal.db")


def unit(call_id: str, *files: Any, run_id: str = "run") -> CommitUnit:
    return CommitUnit(
        run_id=run_id, call_id=call_id, events=[b"{}"], result=b'"done"', effects=["paid"], files=list(files),
        reads=["file a"], writes=["file b"],
    )  # fmt: skip


def question(digest: str = "digest") -> Question:
    return Question(
        id="q", kind="input", name="pick", message="Which?", payload={}, schema={}, digest=digest,
        principal="user", asked_by=(), call_id="c", asked_at=datetime(2030, 1, 1, tzinfo=UTC),
    )  # fmt: skip


def answer(value: Any = 1) -> Answer:
    return Answer(question_id="q", digest="digest", by="user", value=value)


@dataclass
class Point:
    x: int


class Model(pydantic.BaseModel):
    y: int


class Overtaken(queue.SimpleQueue[Any]):
    """A queue that receives a job while another thread closes the journal."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.closer = threading.Thread(target=close, daemon=True)
        self._closed = threading.Event()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if item is None:
            super().put(item)
            self._closed.set()
            return
        self.closer.start()
        self._closed.wait(0.05)  # let closing overtake the job, if it can
        super().put(item)


def test_what_was_let_in_before_it_was_closed_is_done(tmp_path: Path):
    """A job that was accepted before the journal was closed is done, so its caller does not wait forever."""
    writer = SqliteDatabase(str(tmp_path / "journal.db"), clock=SYSTEM_CLOCK, new_id="id")
    waiting, writer._jobs = writer._jobs, Overtaken(writer.close)
    done: list[int] = []

    def work() -> None:
        done.append(writer.transact_now(lambda connection: 1))

    waiting.put(Job(lambda connection: None))  # from here on, the writer's thread uses the new queue
    asker = threading.Thread(target=work, daemon=True)
    asker.start()
    asker.join()
    assert done == [1]


@pytest.mark.parametrize(
    ("value", "recorded"),
    [(None, None), (0, 0), ({"a": [1, "b"]}, {"a": [1, "b"]}), (Point(1), {"x": 1}), (Model(y=2), {"y": 2})],
)
def test_a_step_is_run_once_for_all_who_open_the_file(journal: Opened, value: Any, recorded: Any):
    """A step that has succeeded is not run again. After the file is reopened, its value is plain data. A failed step is run again."""
    runs: list[str] = []

    async def failing() -> Any:
        runs.append("failed")
        raise ValueError

    async def working() -> Any:
        runs.append("worked")
        return value

    async def once(journal: SqliteJournal) -> Any:
        with pytest.raises(ValueError):  # noqa: PT011 (ours, raised above)
            await journal.steps.run("key", failing)
        return await journal.steps.run("key", working), await journal.steps.run("key", working)

    assert journal(once) == (value, value)
    assert journal(lambda journal: journal.steps.run("key", failing)) == recorded
    assert runs == ["failed", "worked"]


def test_what_can_not_be_recorded_is_refused(journal: Opened):
    """A value that can't be recorded is refused, the error names the step, and the step may run again."""

    async def nothing_plain() -> Any:
        return object()

    async def main(journal: SqliteJournal) -> Any:
        with pytest.raises(DefinitionError, match="step 'key' returned a value that can't be recorded"):
            await journal.steps.run("key", nothing_plain)

        async def plain() -> int:
            return 1

        return await journal.steps.run("key", plain)

    assert journal(main) == 1


def test_units_come_back_in_order(journal: Opened):
    """A run's units are loaded unchanged and in order, without voided ones."""
    files = {"root": "/r", "steps": [{"do": "put", "path": "a"}]}

    async def write(journal: SqliteJournal) -> None:
        for each in (unit("1", files), unit("2"), unit("other", run_id="another"), unit("3", files)):
            await journal.calls.commit(each)
        await journal.calls.applied(unit("1", files))
        await journal.calls.void(unit("3", files))
        await journal.calls.commit(unit("4", files))

    async def read(journal: SqliteJournal) -> Any:
        return (
            await journal.calls.load("run"),
            await journal.calls.unapplied(),
            await journal.calls.load("nobody"),
        )

    journal(write)
    loaded, unapplied, none = journal(read)
    assert [each.call_id for each in loaded] == ["1", "2", "4"]
    assert loaded[0] == unit("1", files)
    assert loaded[1] == unit("2")
    assert [each.call_id for each in unapplied] == ["4"]
    assert none == ()


def test_a_call_that_was_void_can_be_committed_again(journal: Opened):
    """A call whose unit was voided can be committed again, and only the last unit is loaded."""

    async def main(journal: SqliteJournal) -> Any:
        for _ in range(2):
            await journal.calls.commit(unit("1", {"a": 1}))
            await journal.calls.void(unit("1", {"a": 1}))
        await journal.calls.commit(unit("1", {"a": 2}))
        await journal.calls.applied(unit("1", {"a": 2}))
        return await journal.calls.load("run"), await journal.calls.unapplied()

    assert journal(main) == ((unit("1", {"a": 2}),), ())


class Somebody(Environment):
    """A person who always gives the same answer, or raises the same error."""

    run_mode = "user"

    def __init__(self, says: Answer | Exception) -> None:
        self._says = says

    async def ask(self, question: Question, /) -> Answer:
        if isinstance(self._says, Exception):
            raise self._says
        return self._says


def asked(says: Answer | Exception, question: Question) -> Main:
    return lambda journal: journal.questions.ask(question, Somebody(says))  # pyright: ignore[reportArgumentType]  # its run_mode is a str


def test_an_answer_stands_for_all_who_open_the_file(journal: Opened):
    """A recorded answer is returned whenever its question is asked again, but not if the digest differs."""
    assert journal(asked(answer(), question())) == answer()
    assert journal(asked(answer(value="other"), question())) == answer()
    assert journal(lambda journal: journal.questions.ask(question())) == answer()
    another = msgspec.structs.replace(answer(value="new"), digest="another")
    assert journal(asked(another, question("another"))) == another
    assert journal(lambda journal: journal.questions.ask(question("another"))) == another


def test_a_question_that_was_withdrawn_may_be_asked_again(journal: Opened):
    """A question that was cancelled can be asked again, but one that was declined is settled."""
    assert journal(asked(QuestionCancelled("q"), question())).outcome == "cancelled"
    assert journal(asked(Declined("q", "no"), question())).outcome == "declined"
    assert journal(asked(answer(), question())).outcome == "declined"


def test_an_answered_question_is_not_withdrawn(journal: Opened):
    """Withdrawing a call's questions does not remove their recorded answers."""
    given = journal(asked(answer(), question()))

    async def withdraw_and_ask(journal: SqliteJournal) -> Any:
        await journal.questions.withdraw_all("q")
        assert await journal.questions.history(question().run_id), "a recorded answer was withdrawn"
        return await journal.questions.ask(question())

    assert journal(withdraw_and_ask) == given


def test_it_is_the_same_journal_whenever_it_is_opened(journal: Opened, tmp_path: Path):
    """A journal's id is stable and differs between files. `durability="power"` syncs to disk, and "process" does not."""

    async def about(journal: SqliteJournal) -> Any:
        rows = await journal._database.transact(
            lambda connection: [
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
            ]
        )
        return journal.id, journal.synced, rows

    first, again = journal(about), journal(about, durability="power")
    assert first[0] == again[0] != Opened(tmp_path / "other.db")(about)[0]
    assert (first[1:], again[1:]) == ((False, ["wal", 0]), (True, ["wal", 2]))


def test_commits_from_several_tasks_are_all_recorded(journal: Opened):
    """Commits from several tasks are all recorded, in the order in which the tasks were created."""

    async def main(journal: SqliteJournal) -> Any:
        await asyncio.gather(*[journal.calls.commit(unit(str(number))) for number in range(100)])
        return [each.call_id for each in await journal.calls.load("run")]

    assert journal(main) == [str(number) for number in range(100)]


def test_a_transaction_that_fails_leaves_nothing(journal: Opened):
    """A failed transaction leaves no changes, and the journal stays usable."""

    def half(connection: Any) -> None:
        connection.execute("INSERT INTO chains (chain, links, seal) VALUES ('half', 0, x'')")
        connection.execute("INSERT INTO records (nonsense) VALUES (1)")

    async def main(journal: SqliteJournal) -> Any:
        with pytest.raises(JournalError, match="it can't be read or written: table records has no column"):
            await journal._database.transact(half)
        await journal.calls.commit(unit("1"))
        halves = await journal._database.transact(
            lambda connection: connection.execute("SELECT * FROM chains WHERE chain = 'half'").fetchall()
        )
        return halves, len(await journal.calls.load("run"))

    assert journal(main) == ([], 1)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path):
    """A file that is not a journal, or one with a different schema version, is refused with the reason. So is an invalid `durability`."""
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE t (x)")
    other.close()
    SqliteJournal(tmp_path / "newer.db").close()
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute("UPDATE about SET value = '99' WHERE key IN ('schema', 'oldest')")
    newer.commit()
    newer.close()
    (tmp_path / "text.db").write_text("this is no database " * 100)
    for name, words in (
        ("other.db", "but not a journal"),
        ("newer.db", "whose schema is at least 99"),
        ("text.db", "it can't be opened: file is not a database"),
        (".", "it can't be opened: unable to open database file"),
        ("a\0b", "its path contains a null byte. Pass a path without one"),
    ):
        with pytest.raises(JournalError, match=words):
            SqliteJournal(tmp_path / name)
    with pytest.raises(DefinitionError, match="durability='forever' is invalid"):
        SqliteJournal(tmp_path / "new.db", durability="forever")  # pyright: ignore[reportArgumentType]


async def test_a_closed_journal_says_so(tmp_path: Path):
    """A journal may be closed twice. Reading from it afterwards raises an error that says that it is closed."""
    journal = SqliteJournal(tmp_path / "journal.db")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="it is closed"):
        await journal.calls.load("run")


def test_what_was_recorded_outlives_a_kill(tmp_path: Path):
    """Every commit that has returned survives `kill -9`."""
    script = textwrap.dedent("""
        import asyncio, os, signal, sys
        from handrail import SqliteJournal
        from handrail.journal.records import CommitUnit
        async def main():
            journal = SqliteJournal(sys.argv[1])
            for number in range(20):
                await journal.calls.commit(CommitUnit(run_id="run", call_id=str(number), events=[], result=b""))
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """)
    path = tmp_path / "journal.db"
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -9
    assert len(Opened(path)(lambda journal: journal.calls.load("run"))) == 20


def test_the_runs_of_a_session_are_found_without_going_through_all_of_somebody_s(journal: Opened):
    """A session's runs are found by an index, without a scan of the principal's other sessions."""

    async def explain(opened: SqliteJournal) -> list[str]:
        connection: Any = opened._database._connection
        assert connection is not None
        queries: list[str] = []
        connection.set_trace_callback(queries.append)
        await opened.runs.list(session_id="s", principal="p")
        connection.set_trace_callback(None)
        found = [each for each in queries if each.startswith("SELECT") and "FROM runs" in each]
        return [row[3] for query in found for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]

    plan = journal(explain, inline=True)
    assert any("runs_of_a_session" in line for line in plan), plan
    assert not [line for line in plan if line.startswith("SCAN") and "runs" in line], plan


def test_a_journal_without_its_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A journal whose key is missing, damaged or different is refused when it is opened, and no new key is created."""
    path, key = tmp_path / "runs.db", tmp_path / "runs.db.key"
    SqliteJournal(path).close()
    first = key.read_bytes()
    key.unlink()
    with pytest.raises(
        JournalError, match=r"its key 'runs.db.key' is missing. Restore the original file or, if"
    ):
        SqliteJournal(path)
    assert not key.exists()
    for other, problem in ((first[1:], "has 31 bytes"), (bytes(32), WRONG_KEY)):
        key.write_bytes(other)
        key.chmod(0o600)
        with pytest.raises(JournalError, match=problem):
            SqliteJournal(path)
    key.write_bytes(first)
    SqliteJournal(path).close()
    monkeypatch.setenv("HANDRAIL_KEY", "the key of another journal")
    with pytest.raises(JournalError, match=WRONG_KEY):
        SqliteJournal(path)
    monkeypatch.delenv("HANDRAIL_KEY")
    monkeypatch.setenv("HANDRAIL_KEY_FILE", str(tmp_path / "missing"))
    with pytest.raises(JournalError, match="can't be read from"):
        SqliteJournal(path)
    (tmp_path / "shared").write_text("the key of another journal")
    (tmp_path / "shared").chmod(0o600)
    monkeypatch.setenv("HANDRAIL_KEY_FILE", str(tmp_path / "shared"))
    with pytest.raises(JournalError, match=WRONG_KEY):
        SqliteJournal(path)


def test_a_secret_that_could_be_guessed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, file = tmp_path / "runs.db", tmp_path / "key"
    file.touch(mode=0o600)
    for secret, problem in (("", "is empty"), ("x" * 15, "has 15 bytes, so it could be guessed")):
        file.write_text(f"{secret}\n")
        monkeypatch.setenv("HANDRAIL_KEY", secret)
        monkeypatch.setenv("HANDRAIL_KEY_FILE", str(file))
        with pytest.raises(JournalError, match=f"{problem}. Use a long random secret, such as"):
            SqliteJournal(path)
    monkeypatch.setenv("HANDRAIL_KEY", "x" * 16)
    SqliteJournal(path).close()


async def test_a_mark_that_was_rolled_back_is_made_again(tmp_path: Path):
    """A session's first call in a chain is marked. If its transaction is rolled back, the session's next call is marked instead.

    `verify` finds a mark that was changed.
    """
    journal = SqliteJournal(tmp_path / "journal.db", watch=None)
    await journal.calls.commit(CommitUnit(run_id="run", call_id="a", session_id="s"))
    database = journal._database

    def fail(connection: Any) -> None:
        database.chains.append(connection, "run run", "unit", "lost", b"", session_id="t", state="applied")
        raise OSError("rolled back")

    with pytest.raises(OSError, match="rolled back"):
        await database.transact(fail)
    await journal.calls.commit(CommitUnit(run_id="run", call_id="b", session_id="t"))
    assert [each.call_id for each in await journal.calls.load_session("t")] == ["b"]
    for value in (0, 2):
        await database.select(f"UPDATE records SET begins = {value} WHERE key = 'b'")
        assert (await journal.runs.verify()).altered, (
            "`verify` did not find a changed mark, by which a session finds its calls"
        )
    journal.close()


FORKING = """
    import os, sys
    from handrail import Agent, ScriptedModel, SqliteJournal
    from handrail.errors import JournalError

    journal = SqliteJournal(sys.argv[1])
    agent = Agent(ScriptedModel(lambda request: "hello"), "Greet.")
    agent.run("Hi.", journal=journal).wait()
    child = os.fork()
    if not child:
        try:
            agent.run("Hi.", journal=journal).wait()
        except JournalError as error:
            print(error, flush=True)
        journal.close()
        own = SqliteJournal(sys.argv[1])
        print(agent.run("Hi.", journal=own).wait().text, flush=True)
        own.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(agent.run("Hi.", journal=journal).wait().text)
    journal.close()
"""


@pytest.mark.once
def test_a_journal_from_before_a_fork_is_refused_in_the_child(tmp_path: Path):
    """Its thread runs only in the parent, so the child would wait for ever. Opened again, it works in both."""
    script = [sys.executable, "-c", textwrap.dedent(FORKING), str(tmp_path / "runs.db")]
    refused, *texts = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "Open it again in this process" in refused
    assert texts == ["hello", "hello"]


@pytest.mark.parametrize(
    "look",
    [lambda journal, id: journal.runs.list(session_id=id), lambda journal, id: journal.runs.get(id)],
    ids=["session", "run"],
)
async def test_a_lone_surrogate_is_not_told_as_damage(tmp_path: Path, look: Callable[..., Any]) -> None:
    """An id that can't be stored is refused, and the error shows it. The journal stays usable."""
    with closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        agent = Agent(ScriptedModel(["done", "done"]), "Do.")
        with pytest.raises(JournalError, match=r"can't store the text 'a\\ud800'.*half a character"):
            await look(journal, "a\ud800")
        assert (await agent.run("go", journal=journal)).text == "done"
