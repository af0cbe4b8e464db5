"""Journals altered by something other than Handrail: `verify` says where, and resume, answer and undo are refused."""

import asyncio
import re
import shutil
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from handrail import SqliteJournal
from handrail.cli.runs_commands import app
from handrail.cli.runs_view import verification_lines
from handrail.errors import AnswerRefused, JournalAltered, RunParked
from handrail.journal.records import CommitUnit, Verification
from handrail.question import Answer, Question, Vote
from handrail.runs import cancel, export, fork, import_, undo
from handrail.session import Session
from support.journals import kept
from support.recorded import PROMPT, Recorder, call

pytestmark = pytest.mark.once  # a journal refuses the same bytes under every Python version

Alter = Callable[[sqlite3.Connection], object]


async def park(recorder: Recorder, run_id: str, *script: Any, **options: Any) -> None:
    with pytest.raises(RunParked):
        await recorder.run(run_id, *script, **options)


async def record(folder: Path) -> None:
    """Record two sessions, each with a finished run and a parked run whose question has been answered."""
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder)
    for run_id in ("tea", "cake"):
        session = Session(id=f"table {run_id}", principal="user")
        await recorder.run(f"{run_id}-first", call("note", text="a"), "Noted.", session=session)
        script = (
            call("write", path=f"{run_id}.md", text="x\n"),
            call("note", text="b"),
            call("choose"),
            "end",
        )
        await park(recorder, run_id, *script, session=session)
        (question,) = await recorder.journal.questions.open(run_id)
        recorder.answer(question, {"n": 1})
    recorder.close()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "base"
    asyncio.run(record(folder))
    return folder


@pytest.fixture
def folder(clean: Path, tmp_path: Path) -> Path:
    return copied(clean, tmp_path / "base")


def copied(clean: Path, target: Path) -> Path:
    shutil.copytree(clean, target)
    return target


def alter(folder: Path, how: Alter) -> None:
    """Alter the journal's file, as any program that finds it could."""
    connection = sqlite3.connect(folder / "runs.db", isolation_level=None)
    try:
        how(connection)
    finally:
        connection.close()


def run_sql(query: str) -> Alter:
    return lambda connection: connection.execute(query)


def swap(connection: sqlite3.Connection) -> None:
    """Swap two records of one chain."""
    for was, now in ((3, 99), (4, 3), (99, 4)):
        connection.execute("UPDATE records SET link = ? WHERE chain = 'run tea' AND link = ?", (now, was))


def copy_over(columns: str) -> Alter:
    """Return a function that copies these columns of a record of the run `cake` to the record of `tea` with the same link."""

    def copy(connection: sqlite3.Connection) -> None:
        connection.execute(
            f"""UPDATE records SET ({columns}) = (
                SELECT {columns} FROM records AS other WHERE other.chain = 'run cake' AND other.link = records.link
            ) WHERE chain = 'run tea' AND link = 3"""
        )

    return copy


def forge_answer(connection: sqlite3.Connection) -> None:
    """Forge an answer in the `questions` table, without a record in a chain."""
    connection.execute(
        "UPDATE questions SET answer = (SELECT answer FROM questions WHERE run_id = 'cake') WHERE run_id = 'tea'"
    )


LAST = "(SELECT max(link) FROM records AS last WHERE last.chain = records.chain)"
END_MISSING = r"run 'tea', record \d+ \(.+\): it does not match the end of its chain"
ALTERED: dict[str, tuple[Alter, str]] = {
    "a changed record": (
        run_sql("UPDATE records SET body = body || x'00' WHERE chain = 'run tea' AND link = 3"),
        r"run 'tea', record 3 \(.+\): it is not what was recorded there",
    ),
    "a changed key": (
        run_sql("UPDATE records SET key = '.9' WHERE chain = 'run tea' AND link = 4"),
        r"run 'tea', record 4",
    ),
    "a removed record": (
        run_sql("DELETE FROM records WHERE chain = 'run tea' AND link = 4"),
        r"run 'tea', record 4: it is missing",
    ),
    "the last record removed": (
        run_sql(f"DELETE FROM records WHERE chain = 'run tea' AND link = {LAST}"),
        r"run 'tea', record \d+: it is missing",
    ),
    "the last record removed, and the head set back": (
        lambda connection: connection.executescript(
            f"""DELETE FROM records WHERE chain = 'run tea' AND link = {LAST};
            UPDATE chains SET links = links - 1, seal = (
                SELECT mac FROM records WHERE chain = 'run tea' ORDER BY link DESC LIMIT 1
            ) WHERE chain = 'run tea';"""
        ),
        END_MISSING,
    ),
    "the head removed": (
        run_sql("DELETE FROM chains WHERE chain = 'run tea'"),
        END_MISSING,
    ),
    "two records exchanged": (swap, r"run 'tea', record 3"),
    "a body copied from another run": (copy_over("body"), r"run 'tea', record 3"),
    "a record copied from another run": (
        copy_over("kind, key, at, body, mac"),
        r"run 'tea', record 3",
    ),
    "an answer copied from another run": (forge_answer, r"answers and cancellations of run 'tea'.*answer"),
    "a record of another session": (
        run_sql(
            "UPDATE records SET body = (SELECT body FROM records AS o WHERE o.chain = 'run cake-first' AND o.link = 3) "
            "WHERE chain = 'run tea-first' AND link = 3"
        ),
        r"run 'tea-first', record 3",
    ),
    "the beginning of a run": (
        run_sql("UPDATE runs SET record = (SELECT record FROM runs WHERE id = 'cake') WHERE id = 'tea'"),
        r"run 'tea', record 1 \(run tea\): its row in the table of runs is not what was recorded",
    ),
    "the outcome of an earlier run": (
        run_sql("UPDATE runs SET outcome = x'80' WHERE id = 'tea-first'"),
        r"run 'tea-first', record \d+ \(outcome done\): the run's outcome is not what was recorded",
    ),
    "a call made void": (
        run_sql("UPDATE records SET state = 'void' WHERE chain = 'run tea' AND kind = 'unit'"),
        r"run 'tea', record \d+ \(unit .+\): its state is not what was recorded",
    ),
    "a changed question": (
        run_sql("UPDATE questions SET question = (SELECT question FROM questions WHERE run_id = 'cake')"),
        r"run 'tea', record \d+ \(question tea.+\): its row was changed",
    ),
    "a removed question": (
        run_sql("DELETE FROM questions WHERE run_id = 'tea'"),
        r"run 'tea', record \d+ \(question tea.+\): its row is missing",
    ),
}
each_alteration = pytest.mark.parametrize(("how", "where"), ALTERED.values(), ids=ALTERED)


def runs_program(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, [*words, "--journal", str(folder / "runs.db")], prog_name="handrail runs"
    )
    return result.exit_code, result.output


async def resume(folder: Path, run_id: str = "tea") -> str:
    recorder = Recorder(folder)
    try:
        return (await recorder.adapter("end").resume(run_id, PROMPT)).text
    finally:
        recorder.close()


async def answer(folder: Path) -> None:
    recorder = Recorder(folder)
    try:
        (asked,) = await recorder.journal.questions.history("cake")
        question = asked.question.id.replace("cake", "tea")
        rows = await recorder.journal._database.select(
            "SELECT question FROM questions WHERE id = ?", question
        )  # pyright: ignore[reportPrivateUsage]
        assert len(rows) < 2
        recorder.journal.questions.answer(
            Answer(question_id=question, digest="forged", by="user", value={"n": 2})
        )
    finally:
        recorder.close()


async def undo_last(folder: Path) -> None:
    recorder = Recorder(folder)
    try:
        rows = await recorder.journal._database.select(  # pyright: ignore[reportPrivateUsage]
            "SELECT key FROM records WHERE chain = 'run tea' AND kind = 'unit' ORDER BY link DESC LIMIT 1"
        )
        await undo(recorder.journal, "tea", rows[0][0], recorder.files)
    finally:
        recorder.close()


def test_a_clean_journal_is_used(folder: Path):
    """In a journal that was not altered, a call can be undone and a run resumed, and `verify` succeeds before and after."""
    code, said = runs_program(folder, "verify")
    assert (code, "nothing was altered" in said) == (0, True)
    asyncio.run(undo_last(folder))
    assert asyncio.run(resume(folder)) == "end"
    assert runs_program(folder, "verify")[0] == 0
    assert runs_program(folder, "verify", "tea")[0] == 0


@each_alteration
def test_verify_says_where(folder: Path, how: Alter, where: str):
    """`handrail runs verify` names the altered run and record, and exits with an error code. For a run of another session, it succeeds."""
    alter(folder, how)
    code, said = runs_program(folder, "verify")
    assert code == 1
    assert_found(said, where)
    code, said = runs_program(folder, "verify", "tea")
    assert code == 1
    assert_found(said, where)
    assert runs_program(folder, "verify", "cake")[0] == 0


def test_verify_prints_the_whole_problem_of_a_run_with_a_long_id():
    """The line that `verify` prints about a run is not cut, even if the run's id is as long as a generated one."""
    id = "a" * 32
    altered = JournalAltered("runs.db", "run", id, 1, f"run {id}", "it was changed")
    found = Verification(records=1, altered=[altered], imported=[])
    assert verification_lines(found)[0].plain == altered.place_and_problem


def assert_found(said: str, where: str) -> None:
    assert re.search(where, said), (where, said)


@each_alteration
async def test_resume_refuses_it(folder: Path, how: Alter, where: str):
    """A run can't be resumed if something in its session was altered, and the error says where. A run of another session can be resumed."""
    alter(folder, how)
    with pytest.raises(JournalAltered, match=where):
        await resume(folder)
    assert await resume(folder, "cake") == "end"


@pytest.mark.parametrize(
    ("how", "where"),
    [
        each
        for name, each in ALTERED.items()
        if "earlier" not in name and "session" not in name and "removed q" not in name
    ],
    ids=[
        name
        for name in ALTERED
        if "earlier" not in name and "session" not in name and "removed q" not in name
    ],
)
async def test_answer_and_undo_refuse_it(folder: Path, how: Alter, where: str):
    """If a run's own records were altered, answering its question and undoing its call are refused."""
    alter(folder, how)
    with pytest.raises(JournalAltered, match=where):
        await answer(folder)
    with pytest.raises(JournalAltered, match=where):
        await undo_last(folder)


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM records WHERE chain = 'run two' AND kind = 'unit'",
        "UPDATE records SET state = 'void' WHERE chain = 'run two' AND kind = 'unit'",
        "UPDATE records SET number = -number WHERE chain = 'run two' AND kind = 'unit'",
        "UPDATE records SET key = (SELECT key FROM records WHERE chain = 'run one' AND kind = 'unit'), kind = 'undone' "
        "WHERE chain = 'run two' AND kind = 'unit'",
    ],
    ids=["removed", "void", "moved", "marked as undone"],
)
async def test_undo_refuses_where_a_later_call_was_altered(tmp_path: Path, query: str):
    """If the record of a later call in the session was altered, undoing an earlier call fails, and the error names the later run."""
    recorder = Recorder(tmp_path)
    session = Session(id="table", principal="user")
    await recorder.run("one", call("note", text="a"), "end", session=session)
    await recorder.run("two", call("note", text="b"), "end", session=session)
    (unit,) = await recorder.journal.calls.load("one")
    alter(tmp_path, run_sql(query))
    with pytest.raises(JournalAltered, match="run 'two'"):
        await undo(recorder.journal, "one", unit.call_id, recorder.files)
    recorder.close()


async def test_recovery_leaves_a_forged_commit_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """`unapplied` leaves out and logs a forged commit, so recovery does not apply it. The commits of other runs are returned."""
    journal = SqliteJournal(tmp_path / "runs.db")
    for run_id in ("tea", "cake"):
        unit = CommitUnit(run_id=run_id, call_id=f"{run_id}-1", files=({"path": "a"},))
        await journal.calls.commit(unit)
    journal.close()
    forged = msgspec.msgpack.encode(CommitUnit(run_id="tea", call_id="tea-1", files=({"path": "/etc"},)))
    alter(
        tmp_path,
        lambda connection: connection.execute("UPDATE records SET body = ? WHERE key = 'tea-1'", (forged,)),
    )
    journal = SqliteJournal(tmp_path / "runs.db")
    assert [unit.call_id for unit in await journal.calls.unapplied()] == ["cake-1"]
    assert "run 'tea', record 1 (unit tea-1)" in caplog.text
    journal.close()


async def test_a_cancellation_that_nobody_asked_for_is_refused(tmp_path: Path):
    """If a signal in a run's row was set by hand, `keep` gives `JournalAltered` for the run. After a recorded request to stop, it gives the signal."""
    recorder = Recorder(tmp_path)
    journal = recorder.journal
    await park(recorder, "tea", call("choose"), "end")
    await journal.runs.take("tea")
    alter(tmp_path, run_sql("UPDATE runs SET signals = 1"))
    with pytest.raises(JournalAltered, match="the table of runs"):
        await kept(journal, "tea")
    alter(tmp_path, run_sql("UPDATE runs SET signals = 0"))
    assert not await kept(journal, "tea")
    await journal.runs.stop("tea")
    assert await kept(journal, "tea")
    recorder.close()


async def test_an_answer_from_another_process_is_checked(tmp_path: Path):
    """A forged answer does not reach the asker that waits in this process. An answer that another process recorded does."""
    journal, other = (SqliteJournal(tmp_path / "runs.db", watch=0.001) for _ in range(2))
    question = Question(
        id="q", kind="input", name="pick", message="Which?", payload={}, schema={}, digest="d", principal="user",
        asked_by=(), call_id="c", asked_at=datetime(2030, 1, 1, tzinfo=UTC), run_id="tea",
    )  # fmt: skip
    task = asyncio.ensure_future(journal.questions.ask(question))
    while not await other.questions.open("tea"):
        await asyncio.sleep(0)
    forged = msgspec.msgpack.encode(Answer(question_id="q", digest="d", by="user", value=1000))
    alter(tmp_path, lambda connection: connection.execute("UPDATE questions SET answer = ?", (forged,)))
    with pytest.raises(JournalAltered, match=r"answer q\): it was not recorded"):
        await journal.questions._look_for_answer("q")  # pyright: ignore[reportPrivateUsage]
    assert not task.done()
    alter(tmp_path, run_sql("UPDATE questions SET answer = NULL"))
    other.questions.answer(Answer(question_id="q", digest="d", by="user", value=5))
    assert (await task).value == 5
    journal.close()
    other.close()


# --- what people are shown, and what they decide ---


def asked_in(run_id: str, **more: Any) -> Question:
    shown: dict[str, Any] = {
        "kind": "approval", "name": "pay", "message": "Pay?", "payload": {"to": "Ada"}, "schema": {}, "digest": "d",
        "principal": "user", "asked_by": (), "call_id": "c", "asked_at": datetime(2030, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    return Question(id=f"{run_id}.1", run_id=run_id, **shown | more)


def put(journal: SqliteJournal, question: Question) -> None:
    journal._database.transact_now(journal.questions._put(question))  # pyright: ignore[reportPrivateUsage]


SHOWN: dict[str, str] = {
    "the text": "question = forge(question)",
    "the principal": "principal = 'other'",
    "the time": "asked_at = asked_at + 1",
    "the run": "run_id = 'cake'",
}


def alter_question(folder: Path, what: str) -> None:
    """Alter one column of run `tea`'s row in the `questions` table."""

    def change(connection: sqlite3.Connection) -> None:
        connection.create_function("forge", 1, lambda body: body.replace(b"Ada", b"Bob"))
        connection.execute(f"UPDATE questions SET {SHOWN[what]} WHERE run_id = 'tea'")

    alter(folder, change)


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("what", SHOWN)
async def test_an_altered_question_is_not_listed(tmp_path: Path, what: str, seen_before: bool):
    """A list of all questions leaves out an altered one, and a list of the questions of its run raises `JournalAltered`."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    for run_id in ("tea", "cake", "soup"):
        put(journal, asked_in(run_id))
    if seen_before:
        assert len(await journal.questions.open()) == 3
    alter_question(tmp_path, what)
    listed = {each.id for each in await journal.questions.open()}
    assert "tea.1" not in listed
    assert "soup.1" in listed
    with pytest.raises(JournalAltered, match=r"question tea.1"):
        await journal.questions.open("cake" if what == "the run" else "tea")
    journal.close()


async def test_a_planted_question_is_not_listed(tmp_path: Path):
    """A question that no run asked is not listed."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    planted = msgspec.msgpack.encode(asked_in("tea"))
    row = ("tea.1", planted, "tea", asked_in("tea").asked_at.timestamp(), "user")
    insert = "INSERT INTO questions (id, question, run_id, asked_at, principal) VALUES (?, ?, ?, ?, ?)"
    alter(tmp_path, lambda connection: connection.execute(insert, row))
    assert await journal.questions.open() == ()
    assert await journal.questions.open(principal="user") == ()
    journal.close()


async def test_questions_are_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Listing open questions a second time does not read their runs' chains again, so polling many waiting runs is cheap."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    for number in range(5):
        put(journal, asked_in(f"run{number}"))
    chains = journal._database.chains  # pyright: ignore[reportPrivateUsage]
    read, seen = chains.read, list[str]()

    def count(connection: sqlite3.Connection, chain: str) -> Any:
        seen.append(chain)
        return read(connection, chain)

    monkeypatch.setattr(chains, "read", count)
    assert len(await journal.questions.open()) == 5
    assert len(seen) == 10
    assert len(await journal.questions.open()) == 5
    assert len(await journal.questions.open("run3")) == 1
    assert len(seen) == 10
    journal.close()


async def test_a_vote_needs_the_question_that_was_recorded(tmp_path: Path):
    """A vote is refused if the run did not ask its question, if its digest does not match, or if the question was altered."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    put(journal, asked_in("tea"))
    put(journal, asked_in("cake"))
    vote = Vote(question_id="tea.1", digest="d", by="fay", roles=(), approved=True)
    with pytest.raises(AnswerRefused, match="there is no such question"):
        await journal.votes.cast("cake", vote)
    with pytest.raises(AnswerRefused, match="there is no such question"):
        await journal.votes.cast("tea", msgspec.structs.replace(vote, question_id="tea.2"))
    with pytest.raises(AnswerRefused, match="its digest does not match"):
        await journal.votes.cast("tea", msgspec.structs.replace(vote, digest="e"))
    alter_question(tmp_path, "the text")
    with pytest.raises(JournalAltered):
        await journal.votes.cast("tea", vote)
    assert await journal.votes.on("tea", "tea.1", "d") == ()
    journal.close()


# --- any altered row ---

PROTECTED = {
    "records": ("chain", "link", "kind", "key", "at", "session_id", "body", "mac"),
    "chains": ("chain", "links", "seal"),
    "runs": ("id", "session_id", "principal", "began_at", "record", "outcome"),
    "questions": ("id", "question", "answer", "run_id", "principal", "asked_at"),
}


@pytest.fixture(scope="module")
def rich(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a journal with a fork, an import, an undone call, a cancelled run, and a run that was asked to stop."""
    folder = copied(clean, tmp_path_factory.mktemp("rich") / "base")

    async def more() -> None:
        recorder = Recorder(folder)
        journal = recorder.journal
        await fork(journal, "tea", 1, "forked")
        await export(journal, "cake", folder / "cake.jsonl")
        await import_(journal, folder / "cake.jsonl", run_id="imported")
        await park(recorder, "waiting", call("choose"), call("choose"), "end")
        await park(recorder, "over", call("choose"), "end")
        await journal.runs.stop("waiting")
        await cancel(journal, "over")
        recorder.close()

    asyncio.run(more())
    asyncio.run(undo_last(folder))
    return folder


def verified(folder: Path) -> Any:
    journal = SqliteJournal(folder / "runs.db")
    try:
        return asyncio.run(journal.runs.verify())
    finally:
        journal.close()


def test_a_fork_names_its_source_and_an_import_is_marked(rich: Path):
    """A fork's first record names its source run and step, and holds a MAC from the source's chain. An import's first record marks it as imported."""
    found = verified(rich)
    assert (list(found.altered), list(found.imported)) == ([], ["imported"])
    connection = sqlite3.connect(rich / "runs.db")
    first = "SELECT kind, key, body FROM records WHERE chain = ? AND link = 1"
    kind, key, head = connection.execute(first, ("run forked",)).fetchone()
    assert (kind, key) == ("fork", "tea#1")
    assert connection.execute("SELECT 1 FROM records WHERE chain = 'run tea' AND mac = ?", (head,)).fetchone()
    assert connection.execute(first, ("run imported",)).fetchone()[:2] == ("import", "imported")
    connection.close()
    assert "is not verified: imported" in runs_program(rich, "verify")[1]


@given(data=st.data())
def test_any_altered_row_is_found(rich: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    """`verify` finds any alteration of protected columns: a changed value, a removed row, two rows exchanged, or one row copied over another."""
    folder = copied(rich, tmp_path_factory.mktemp("altered") / "base")
    table = data.draw(st.sampled_from(sorted(PROTECTED)))
    how = data.draw(st.sampled_from(["change", "remove", "exchange", "copy"]))

    def change(connection: sqlite3.Connection) -> None:
        columns = PROTECTED[table]
        keys = {"records": "number", "chains": "chain", "runs": "id", "questions": "id"}
        ids = [row[0] for row in connection.execute(f"SELECT {keys[table]} FROM {table} ORDER BY 1")]
        one = data.draw(st.sampled_from(ids))
        if how == "remove":
            connection.execute(f"DELETE FROM {table} WHERE {keys[table]} = ?", (one,))
            return
        if how == "change":
            column = data.draw(st.sampled_from(columns))
            value = data.draw(st.sampled_from([b"", b"\x80", "", "x", 0, 7, 1e9]))
            query = f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {keys[table]} = ?"
            connection.execute(query, (value, one))
            return
        other = data.draw(st.sampled_from([each for each in ids if each != one]))
        own = [each for each in columns if each not in (keys[table], "chain", "link")]
        query = f"SELECT {', '.join(own)} FROM {table} WHERE {keys[table]} = ?"
        rows = {each: connection.execute(query, (each,)).fetchone() for each in (one, other)}
        update = f"UPDATE {table} SET {', '.join(f'{each} = ?' for each in own)} WHERE {keys[table]} = ?"
        connection.execute(update, (*rows[other], one))
        if how == "exchange":
            connection.execute(update, (*rows[one], other))

    def contents(where: Path) -> list[Any]:
        connection = sqlite3.connect(where / "runs.db")
        connection.text_factory = lambda found: ("text", found)
        try:
            columns = ", ".join(PROTECTED[table])
            return sorted(map(repr, connection.execute(f"SELECT {columns} FROM {table}")))
        finally:
            connection.close()

    before = contents(folder)
    alter(folder, change)
    found = verified(folder)
    assert bool(found.altered) == (contents(folder) != before)
