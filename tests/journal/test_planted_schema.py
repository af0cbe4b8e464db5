"""Schemas altered by something other than Handrail: the journal is refused, and planted code never runs."""

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from handrail import SqliteJournal
from handrail.errors import JournalError
from handrail.question import Answer, Question

pytestmark = pytest.mark.once  # a journal refuses the same bytes under every Python version

FORGET = """CREATE TRIGGER forget AFTER INSERT ON records WHEN new.kind = 'answer' BEGIN
    DELETE FROM records WHERE chain = new.chain; DELETE FROM chains WHERE chain = new.chain;
    UPDATE questions SET answer = NULL WHERE id = new.key; END"""
QUESTION = Question(
    id="tea/.1",
    run_id="tea",
    principal="user",
    kind="approval",
    name="pay",
    message="",
    payload={},
    schema={},
    digest="d",
    asked_by=(),
    call_id="1",
    asked_at=datetime(2026, 1, 1, tzinfo=UTC),
)


def plant(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for each in statements:
            connection.execute(each)
    finally:
        connection.close()


def swap(table: str, kind: str, rest: str) -> tuple[str, ...]:
    """Return statements that rename a table and create something else under its name."""
    return (f"ALTER TABLE {table} RENAME TO was", f"CREATE {kind} {table} {rest}")


PLANTED = {
    "a trigger": ((FORGET,), "trigger 'forget' was added"),
    "a view": (("CREATE VIEW extra AS SELECT * FROM runs",), "view 'extra' was added"),
    "a table": (("CREATE TABLE extra (a)",), "table 'extra' was added"),
    "an index": (("CREATE INDEX extra ON records (key)",), "index 'extra' was added"),
    "a virtual table": (("CREATE VIRTUAL TABLE extra USING rtree (a, b, c)",), "'extra"),
    "a column": (("ALTER TABLE questions ADD COLUMN extra TEXT",), "table 'questions' was changed"),
    "a view instead of a table": (swap("blobs", "VIEW", "AS SELECT * FROM was"), "table 'was' was added"),
    "a view instead of the version": (swap("about", "VIEW", "AS SELECT * FROM was"), "table 'was' was added"),
    "another index": (
        ("DROP INDEX open_questions", "CREATE INDEX open_questions ON questions (asked_at) WHERE id = ''"),
        "index 'open_questions' was changed",
    ),
    "a missing index": (("DROP INDEX open_questions",), "index 'open_questions' was removed"),
    "a missing table": (("DROP TABLE tickets",), "table 'tickets' was removed"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_journal_with_another_schema_is_refused(tmp_path: Path, name: str):
    """A journal whose schema differs from Handrail's is refused, and the error names a difference."""
    path = tmp_path / "runs.db"
    SqliteJournal(path).close()
    SqliteJournal(path).close()
    statements, problem = PLANTED[name]
    plant(path, *statements)
    with pytest.raises(JournalError, match=f"altered its schema.*{problem}"):
        SqliteJournal(path)


def test_a_compacted_journal_is_accepted(tmp_path: Path):
    path = tmp_path / "runs.db"
    SqliteJournal(path).close()
    plant(path, "VACUUM", "REINDEX")
    SqliteJournal(path).close()


def test_another_version_is_still_told_by_its_number(tmp_path: Path):
    """A journal with a different version is refused because of its version, even if its schema differs too."""
    path = tmp_path / "runs.db"
    SqliteJournal(path).close()
    plant(path, "UPDATE about SET value = '99' WHERE key IN ('schema', 'oldest')", "DROP TABLE tickets")
    with pytest.raises(JournalError, match="whose schema is at least 99"):
        SqliteJournal(path)


async def test_a_trigger_planted_in_an_open_journal_never_runs(tmp_path: Path):
    """After a trigger is planted in an open journal, writes fail, and the trigger never runs."""
    path = tmp_path / "runs.db"
    journal = SqliteJournal(path, watch=None)
    journal._database.transact_now(journal.questions._put(QUESTION))  # pyright: ignore[reportPrivateUsage]
    plant(path, FORGET)
    denial = Answer(question_id=QUESTION.id, digest="d", by="user", value={"approved": False})
    with pytest.raises(JournalError, match="the trigger 'forget' was added"):
        journal.questions.answer(denial)
    plant(path, "DROP TRIGGER forget")
    journal.questions.answer(denial)
    [found] = await journal.questions.history("tea")
    assert found.answer == denial
    journal.close()


async def test_a_view_planted_in_an_open_journal_is_not_read(tmp_path: Path):
    path = tmp_path / "runs.db"
    journal = SqliteJournal(path, watch=None)
    assert await journal.runs.list() == ()
    plant(path, *swap("runs", "VIEW", "AS SELECT * FROM was"))
    with pytest.raises(JournalError, match="the table 'was' was added"):
        await journal.runs.list()
    journal.close()


def test_tables_with_large_values_have_rowids(tmp_path: Path) -> None:
    """Tables with BLOB columns have rowids, so that a lookup does not read other runs' large values."""
    journal = SqliteJournal(tmp_path / "runs.db")
    journal.close()
    connection = sqlite3.connect(tmp_path / "runs.db")
    try:
        query = "SELECT name, sql FROM sqlite_schema WHERE type = 'table'"
        tables = dict(connection.execute(query).fetchall())
    finally:
        connection.close()
    assert {"runs", "records", "questions", "tickets", "blobs"} <= tables.keys()
    assert [name for name, sql in tables.items() if "BLOB" in sql and "WITHOUT ROWID" in sql] == []
