"""Whole runs, sessions and chains that something other than Handrail removed or reordered: what is refused, and what `verify` reports."""

import asyncio
import re
import shutil
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from handrail import MemoryJournal, SqliteJournal
from handrail.cli.runs_commands import app
from handrail.errors import JournalAltered, JournalError, RunParked
from handrail.journal.protocol import Journal
from handrail.journal.records import RunRecord, Verification
from handrail.journal.sql.runs import insert_new
from handrail.journal.sql.schema import VERSION
from handrail.runs import export, forget, fork, import_, undo
from handrail.session import Session
from support.recorded import PROMPT, Recorder, call

pytestmark = pytest.mark.once  # a journal refuses the same bytes under every Python version

Alter = Callable[[sqlite3.Connection], object]


async def record(folder: Path) -> None:
    """Record a session with two finished runs and a parked run, and a session with one finished run."""
    recorder = Recorder(folder)
    table = Session(id="table", principal="user")
    await recorder.run("one", call("note", text="a"), "x", session=table)
    await recorder.run("two", call("note", text="b"), "x", session=table)
    with pytest.raises(RunParked):
        await recorder.run("three", call("choose"), "end", session=table)
    (question,) = await recorder.journal.questions.open("three")
    recorder.answer(question, {"n": 1})
    await recorder.run("alone", call("note", text="c"), "x", session=Session(id="other", principal="user"))
    recorder.close()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "base"
    folder.mkdir()
    asyncio.run(record(folder))
    return folder


@pytest.fixture
def folder(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "base"))


def alter(folder: Path, how: Alter) -> None:
    connection = sqlite3.connect(folder / "runs.db", isolation_level=None)
    try:
        how(connection)
    finally:
        connection.close()


def remove_chain(connection: sqlite3.Connection, chain: str) -> None:
    for table in ("records", "chains"):
        connection.execute(f"DELETE FROM {table} WHERE chain = ?", (chain,))


def remove_run(connection: sqlite3.Connection, run_id: str) -> None:
    """Remove a run's records, the heads of its chains, and its rows. Its session's chain still names the run."""
    remove_chain(connection, f"run {run_id}")
    remove_chain(connection, f"outside {run_id}")
    connection.execute("DELETE FROM runs WHERE id = ?", (run_id,))
    for table in ("questions", "tickets", "blob_runs"):
        connection.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))


def move_before(connection: sqlite3.Connection, run_id: str, other: str) -> None:
    """Give the records of a run positions in the journal before those of another run."""
    query = "SELECT number FROM records WHERE chain IN (?, ?) ORDER BY chain = ? DESC, number"
    chains = f"run {run_id}", f"run {other}"
    order = [number for (number,) in connection.execute(query, (*chains, chains[0]))]
    connection.execute("UPDATE records SET number = -number WHERE chain IN (?, ?)", chains)
    for now, was in zip(sorted(order), order, strict=True):
        connection.execute("UPDATE records SET number = ? WHERE number = ?", (now, -was))


def verify(folder: Path, run_id: str | None = None) -> Verification:
    journal = SqliteJournal(folder / "runs.db", watch=None)
    try:
        return asyncio.run(journal.runs.verify(run_id))
    finally:
        journal.close()


async def resume(folder: Path) -> str:
    recorder = Recorder(folder)
    try:
        return (await recorder.adapter("end").resume("three", PROMPT)).text
    finally:
        recorder.close()


async def undo_first(folder: Path) -> None:
    recorder = Recorder(folder)
    try:
        (unit,) = await recorder.journal.calls.load("one")
        await undo(recorder.journal, "one", unit.call_id, recorder.files)
    finally:
        recorder.close()


async def load_session(folder: Path) -> None:
    recorder = Recorder(folder)
    try:
        await recorder.journal.calls.load_session("table")
    finally:
        recorder.close()


ALTERED: dict[str, tuple[Alter, str]] = {
    "a run removed with its heads": (
        lambda c: remove_run(c, "two"),
        r"session 'table', record 2 \(run two\): the run is missing",
    ),
    "a run removed, and the session's chain too": (
        lambda c: (remove_run(c, "two"), remove_chain(c, "session table")),
        r"session 'table', record \d+ \(run (one|three)\): it is missing",
    ),
    "a run removed, and its record in the session's chain": (
        lambda c: (
            remove_run(c, "two"),
            c.execute("DELETE FROM records WHERE chain = 'session table' AND key = 'two'"),
        ),
        r"session 'table', record 2: it is missing",
    ),
    "two runs reordered": (
        lambda c: move_before(c, "two", "one"),
        r"run '(one|two)', record 1 \(run (one|two)\): it is not what",
    ),
}
each_alteration = pytest.mark.parametrize(("how", "where"), ALTERED.values(), ids=ALTERED)


@each_alteration
async def test_every_use_refuses_it(folder: Path, how: Alter, where: str):
    """If a run was removed or reordered, its session can't be loaded, the session's runs can't be resumed or forked, and no call can be undone."""
    alter(folder, how)
    with pytest.raises(JournalAltered, match=where):
        await resume(folder)
    with pytest.raises(JournalAltered, match=where):
        await undo_first(folder)
    with pytest.raises(JournalAltered, match=where):
        await load_session(folder)
    recorder = Recorder(folder)
    with pytest.raises(JournalAltered, match=where):
        await fork(recorder.journal, "three", 0)
    recorder.close()


@each_alteration
def test_verify_says_where(folder: Path, how: Alter, where: str):
    """`verify` says where the alteration is, for the whole journal and for another run of the session, and the command fails.

    For a run of another session, it finds nothing altered.
    """
    alter(folder, how)
    for words in (["verify"], ["verify", "three"]):
        result = CliRunner().invoke(
            app, [*words, "--journal", str(folder / "runs.db")], prog_name="handrail runs"
        )
        assert result.exit_code == 1
        assert re.search(where, str(verify(folder, *words[1:]).altered[0]))
    assert not verify(folder, "alone").altered


@pytest.mark.parametrize("begins_again", [False, True])
def test_a_session_that_was_removed_whole_is_missed(folder: Path, begins_again: bool):
    """`verify` finds that a session was removed, even after a new session has begun with its id. It also finds that the list of sessions was removed."""
    alter(folder, lambda c: (remove_run(c, "alone"), remove_chain(c, "session other")))
    if begins_again:
        journal = SqliteJournal(folder / "runs.db", watch=None)
        asyncio.run(begin(journal, "new", "other"))
        journal.close()
    (found,) = verify(folder).altered
    problem = "the session began again, but was not forgotten" if begins_again else "the session is missing"
    assert (found.chain, found.what, found.problem) == ("sessions", "session other", problem)
    alter(folder, lambda c: remove_chain(c, "sessions"))
    assert {each.chain for each in verify(folder).altered} == {"sessions"}


def test_an_old_copy_of_a_session_s_chain_lacks_the_later_runs(folder: Path, tmp_path: Path):
    """An older copy of a session's chain, restored to hide that a run was removed, is found because it lacks a later run."""
    old = folder.parent / "old.db"
    alter(folder, lambda c: c.execute("VACUUM INTO ?", (str(old),)))
    journal = SqliteJournal(folder / "runs.db", watch=None)
    for name in ("four", "five"):
        asyncio.run(begin(journal, name, "table"))
        asyncio.run(journal.runs.leave(name, "done"))
    journal.close()

    def restore(connection: sqlite3.Connection) -> None:
        remove_run(connection, "four")
        remove_chain(connection, "session table")
        connection.execute("ATTACH ? AS old", (str(old),))
        for table in ("records", "chains"):
            connection.execute(
                f"INSERT INTO main.{table} SELECT * FROM old.{table} WHERE chain = 'session table'"
            )

    alter(folder, restore)
    (found,) = verify(folder).altered
    assert (found.chain, found.id, found.what, found.problem) == (
        "session", "table", "run five", "it is missing",
    )  # fmt: skip


def test_a_run_that_was_begun_again_under_its_id_is_found(folder: Path):
    """`verify` finds that a removed run was replaced by a new run with its id, even if Handrail itself began the new run."""
    alter(folder, lambda c: remove_run(c, "two"))
    journal = SqliteJournal(folder / "runs.db", watch=None)
    asyncio.run(begin(journal, "two", "table"))
    journal.close()
    (found,) = verify(folder).altered
    assert (found.chain, found.what) == ("session", "run two")
    assert found.problem.startswith("the run began again")


@pytest.mark.parametrize(
    ("chain", "where"),
    [
        ("outside three", r"run 'three', record \d+ \(outside\): .* was removed"),
        ('decisions ["table","user"]', r"session 'table', record \d+ \(decisions user\): .* missing"),
    ],
)
async def test_what_others_added_can_not_be_removed_whole(folder: Path, chain: str, where: str):
    """If the whole chain of a run's answers or of a principal's decisions is removed, the run can't be resumed."""
    from handrail.journal.records import Decision

    journal = SqliteJournal(folder / "runs.db", watch=None)
    journal.decisions.write(
        Decision(session_id="table", principal="user", kind="revoked", id="d", at=1.0, body=b"")
    )
    assert not (await journal.runs.verify()).altered
    journal.close()
    alter(
        folder,
        lambda c: (
            remove_chain(c, chain),
            chain.startswith("outside")
            and c.execute("UPDATE questions SET answer = NULL, answered_at = NULL"),
        ),
    )
    with pytest.raises(JournalAltered, match=where):
        await resume(folder)


# --- what Handrail does itself stays verifiable ---


def run_record(run_id: str, session_id: str, at: float = 1.0) -> RunRecord:
    return RunRecord(id=run_id, session_id=session_id, principal="user", prompt="p", model="m", began_at=at)


async def begin(journal: Journal, run_id: str, session_id: str) -> None:
    """Begin a run on a session that includes everything recorded."""
    followed = await journal.runs.turn(session_id, "user")
    await journal.runs.begin(run_record(run_id, session_id), followed=followed)


async def test_forgotten_sessions_are_not_missed(folder: Path):
    """After Handrail forgets a session, or one run of a session, `verify` finds nothing altered. The ids may be used again."""
    recorder = Recorder(folder)
    journal = recorder.journal
    assert await forget(journal, before=datetime.now(UTC) + timedelta(hours=1)) == ("alone",)
    assert not (await journal.runs.verify()).altered
    await begin(journal, "alone", "other")
    assert not (await journal.runs.verify()).altered
    await journal.runs.forget(["two"])  # only a part of its session
    assert not (await journal.runs.verify()).altered
    await begin(journal, "two", "table")
    await journal.runs.leave("two", "done")
    assert not (await journal.runs.verify()).altered
    assert (await journal.runs.take("three")).record.id == "three"
    recorder.close()


async def test_an_old_copy_of_a_forgotten_run_is_found(folder: Path):
    """If a forgotten run is put back, with its row and its chain's head, other runs of its session can't be resumed."""
    old = folder.parent / "old.db"
    alter(folder, lambda c: c.execute("VACUUM INTO ?", (str(old),)))
    journal = SqliteJournal(folder / "runs.db", watch=None)
    await journal.runs.forget(["two"])
    journal.close()

    def restore(connection: sqlite3.Connection) -> None:
        connection.execute("ATTACH ? AS old", (str(old),))
        for table in ("records", "chains"):
            connection.execute(f"INSERT INTO main.{table} SELECT * FROM old.{table} WHERE chain = 'run two'")
        connection.execute("INSERT INTO main.runs SELECT * FROM old.runs WHERE id = 'two'")

    alter(folder, restore)
    with pytest.raises(JournalAltered, match=r"session 'table', record \d+ \(run two\)"):
        await resume(folder)


def test_a_journal_of_an_earlier_version_is_refused_in_words(folder: Path):
    """A journal with an older schema that no release had is refused, and the error names it."""
    alter(folder, lambda c: c.execute("UPDATE about SET value = ? WHERE key = 'schema'", (str(VERSION - 1),)))
    with pytest.raises(JournalError, match=f"version {VERSION - 1}. Only those of releases can be upgraded"):
        SqliteJournal(folder / "runs.db")


STEPS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from("abcd"), st.sampled_from(["s", "t"])),
    st.tuples(st.just("forget"), st.sets(st.sampled_from("abcd"), min_size=1), st.just("")),
    st.tuples(st.just("fork"), st.sampled_from("abcd"), st.sampled_from("ab")),
    st.tuples(st.just("import"), st.sampled_from("abcd"), st.sampled_from(["s", "t"])),
    st.tuples(st.just("fail"), st.sampled_from("abcd"), st.sampled_from(["s", "t"])),
)


@given(steps=st.lists(STEPS, max_size=12))
async def test_whatever_handrail_does_verifies(steps: list[tuple[str, str | set[str], str]], exported: Path):
    """Runs that begin in any order, forks, imports, forgotten runs and failed transactions leave a valid journal.

    Deleting a run directly from the database then makes it invalid.
    """
    journal = MemoryJournal()
    for kind, one, two in steps:
        try:
            if kind == "begin":
                await begin(journal, str(one), two)
            elif kind == "fork":
                await fork(journal, str(one), 0, two)
            elif kind == "import":
                await import_(journal, exported, run_id=str(one), session_id=two)
            elif kind == "forget":
                await journal.runs.forget(sorted(one))
            else:
                await fail(journal, str(one), two)
        except (JournalError, RuntimeError, LookupError, ValueError):
            pass
        assert not (await journal.runs.verify()).altered
    for row in await journal.runs.list():
        assert not (await journal.runs.verify(row.record.id)).altered
    for row in (await journal.runs.list())[:1]:
        gone = row.record.id
        journal._database.transact_now(lambda c, gone=gone: remove_run(cast(Any, c), gone))  # pyright: ignore[reportPrivateUsage]
        assert (await journal.runs.verify()).altered
    journal.close()


async def fail(journal: MemoryJournal, run_id: str, session_id: str) -> None:
    """Begin a run in a transaction that is rolled back."""
    begin = run_record(run_id, session_id)

    def work(connection: Any) -> None:
        insert_new(connection, journal._database.chains, begin, "running", 0.0)  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError

    journal._database.transact_now(work)  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(scope="module")
def exported(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(clean, tmp_path_factory.mktemp("exported") / "base"))

    async def write() -> None:
        recorder = Recorder(folder)
        await export(recorder.journal, "alone", folder / "run.jsonl")
        recorder.close()

    asyncio.run(write())
    return folder / "run.jsonl"
