"""Journal files that several processes use: each run has one owner, and files of other versions are refused."""

import sqlite3
import textwrap
from pathlib import Path

import pytest

from handrail import Prompt, tool
from handrail.errors import JournalError, JournalUpgraded, RunBusy, RunParked
from handrail.journal.sql.schema import VERSION
from handrail.journal.sqlite import SqliteJournal
from handrail.runs import list_runs, show
from support import TESTS, warm_python
from support.recorded import PROMPT, Recorder, call

FIRST = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE steps (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE questions (id TEXT PRIMARY KEY, question BLOB NOT NULL, answer BLOB) WITHOUT ROWID;
CREATE TABLE units (
    number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, call_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('committed', 'applied', 'void')), unit BLOB NOT NULL
);
CREATE INDEX units_of_a_run ON units (run_id);
CREATE INDEX units_to_apply ON units (number) WHERE state = 'committed';
INSERT INTO about VALUES ('schema', '1'), ('id', 'old');
"""


def test_a_journal_of_an_older_version_is_refused(tmp_path: Path):
    """A journal of the first version is refused with an error that names its version and what to use instead, and its tables are not changed."""
    path = tmp_path / "runs.db"
    connection = sqlite3.connect(path)
    connection.executescript(FIRST)
    connection.close()
    with pytest.raises(JournalError, match=r"version 1\b") as caught:
        SqliteJournal(path)
    assert "Use the version of Handrail that wrote it" in str(caught.value)
    connection = sqlite3.connect(path)
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert tables == {"about", "steps", "questions", "units"}


def test_a_journal_of_a_newer_version_is_refused(tmp_path: Path):
    """A journal to which this version may not write any more is refused with an error that has both versions."""
    path = tmp_path / "runs.db"
    SqliteJournal(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE about SET value = ? WHERE key IN ('schema', 'oldest')", (str(VERSION + 1),)
        )
    connection.close()
    with pytest.raises(JournalUpgraded, match="newer version of Handrail") as caught:
        SqliteJournal(path)
    assert caught.value.oldest == VERSION + 1
    assert f"schema {VERSION}" in str(caught.value)


HOLDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support.recorded import Recorder, call
from handrail import Prompt, tool

@tool(effect="pure")
async def wait() -> str:
    \"\"\"Wait.\"\"\"
    print("holding", flush=True)
    await asyncio.sleep(600)
    return "waited"

async def main():
    recorder = Recorder(Path(sys.argv[2]))
    await recorder.run("r", call("wait"), "end", prompt=Prompt("p", "Do.", tools=[wait]))

asyncio.run(main())
"""


async def test_one_process_has_a_run_and_a_dead_one_has_none(tmp_path: Path):
    """A run can't be taken while its owner is alive, and the error names the owner. After the owner is killed, it can."""
    holder = warm_python.start(["-c", textwrap.dedent(HOLDER), TESTS, tmp_path])
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        recorder = Recorder(tmp_path)
        with pytest.raises(RunBusy) as busy:
            await recorder.adapter("end").resume("r", Prompt("p", "Do."))
        assert f"/{holder.pid}/" in busy.value.owner
        (line,) = await list_runs(recorder.journal)
        assert line.standing == "running"
    finally:
        holder.close()
    (line,) = await list_runs(recorder.journal)
    assert line.standing == "interrupted"
    assert line.row.leased_until > recorder.journal._database.now()  # pyright: ignore[reportPrivateUsage]  # the lease has not expired

    @tool(effect="pure")
    async def wait() -> str:
        """Wait."""
        return "waited"

    response = await recorder.adapter("end").resume("r", Prompt("p", "Do.", tools=[wait]))
    assert response.text == "end"
    recorder.close()


async def test_an_answer_given_by_another_process_is_taken(tmp_path: Path):
    """A process that parked a run can resume it with an answer that was given in another process."""
    recorder = Recorder(tmp_path)
    with pytest.raises(RunParked):
        await recorder.run("r", call("choose"), "end")
    other = SqliteJournal(tmp_path / "runs.db", watch=None)
    (question,) = await other.questions.open("r")
    Recorder.answer(type("Other", (), {"journal": other})(), question, {"n": 4})  # pyright: ignore[reportArgumentType]
    other.close()
    response = await recorder.adapter("end").resume("r", PROMPT)
    assert response.text == "end"
    assert (await show(recorder.journal, "r")).turns[0].calls[0].message == "got 4"
    recorder.close()
