"""Damaged journals are read exactly as they were written, or the damage is reported. Foreign databases are left untouched."""

import asyncio
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from handrail import SqliteJournal
from handrail.cli.runs_commands import app
from handrail.errors import JournalAltered, JournalError
from handrail.journal.records import RunRecord
from handrail.journal.sql import run_rows
from support.damage import RUNS, Reading, quiet, read_journal, write_journal
from support.texts import WRONG_KEY

pytestmark = pytest.mark.once  # a journal refuses the same bytes under every Python version

PAGE = 4096


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clean") / "runs.db"
    write_journal(path)
    return path


@pytest.fixture(scope="module")
def expected(clean: Path) -> Reading:
    """Provide what is read from the undamaged journal, after checking that a second read gives the same."""
    found = read_journal(clean)
    assert found == read_journal(clean)
    assert not any(isinstance(each, JournalError) for each in found.values())
    return found


@pytest.fixture
def path(clean: Path, tmp_path: Path) -> Path:
    return copied(clean, tmp_path)


def copied(clean: Path, folder: Path) -> Path:
    for suffix in ("", ".key"):
        shutil.copy(f"{clean}{suffix}", folder / f"runs.db{suffix}")
    return folder / "runs.db"


def damaged(found: Reading) -> set[str]:
    """Return the ids of the runs that can't be read completely."""
    return {
        name.split(":")[0] for name, each in found.items() if isinstance(each, JournalError) and ":" in name
    }


def run_of(item: Any) -> str:
    """Return the id of the run that an item of a list belongs to."""
    if isinstance(item, tuple):
        return str(item[0])  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return item.record.id if hasattr(item, "record") else item.run_id


def check(found: Reading, expected: Reading) -> None:
    """Check that everything was read as it was written, or is reported. A list may leave out runs that are reported."""
    if set(found) == {"journal"}:
        assert isinstance(found["journal"], JournalError)
        return
    bad = damaged(found)
    for name, wanted in expected.items():
        got = found[name]
        if isinstance(got, JournalError) or got == wanted:
            continue
        assert isinstance(got, tuple), name
        if name == "sessions of ada":
            assert set(got) <= set(wanted), name
            assert bad, name
        else:
            assert list(got) == [each for each in wanted if run_of(each) not in bad or each in got], name


def damage(kind: str, at: int, data: bytes) -> bytes:
    """Return the data with one bit flipped, with its end cut off, or with one page zeroed, at a place given by `at`."""
    changed = bytearray(data)
    if kind == "flip":
        changed[at // 8 % len(data)] ^= 1 << at % 8
    elif kind == "cut":
        del changed[1 + at % (len(data) - 1) :]  # an empty file is a new journal
    else:
        page = at % (len(data) // PAGE) * PAGE
        changed[page : page + PAGE] = bytes(PAGE)
    return bytes(changed)


@given(kind=st.sampled_from(["flip", "flip", "flip", "cut", "zero"]), at=st.integers(0, 2**21))
def test_any_damage_is_reported_or_harmless(
    clean: Path, expected: Reading, tmp_path_factory: pytest.TempPathFactory, kind: str, at: int
):
    """Wherever a bit is flipped, the file is cut or a page is zeroed, reads give the same data or a `JournalError`.

    A list may leave out the runs for which an error is reported.
    """
    path = copied(clean, tmp_path_factory.mktemp("damaged"))
    path.write_bytes(damage(kind, at, path.read_bytes()))
    check(read_journal(path), expected)
    shutil.rmtree(path.parent)


@given(at=st.integers(0, 255))
def test_a_damaged_key_is_reported(clean: Path, tmp_path_factory: pytest.TempPathFactory, at: int):
    """A flipped bit in the key is reported when the journal is opened."""
    path = copied(clean, tmp_path_factory.mktemp("damaged"))
    key = Path(f"{path}.key")
    key.write_bytes(damage("flip", at, key.read_bytes()))
    with pytest.raises(JournalError, match=WRONG_KEY):
        SqliteJournal(path)


def flip_in(path: Path, text: bytes) -> None:
    """Flip a bit in the only place where these bytes occur in a file."""
    data = bytearray(path.read_bytes())
    assert data.count(text) == 1
    data[data.index(text)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("run_id", ["tea", "tea-2", "cake", "soup"])
def test_the_error_names_the_run_and_the_record_and_the_other_runs_are_readable(
    path: Path, expected: Reading, run_id: str
):
    """One flipped bit in a record makes its run unreadable, and the error names the run and the record. Runs of other sessions can be read."""
    connection = sqlite3.connect(path)
    query = "SELECT link, mac FROM records WHERE chain = ? AND key = ?"
    link, mac = connection.execute(query, (f"run {run_id}", f"{run_id}-call-3")).fetchone()
    session = connection.execute("SELECT session_id FROM runs WHERE id = ?", (run_id,)).fetchone()[0]
    same = {id for (id,) in connection.execute("SELECT id FROM runs WHERE session_id = ?", (session,))}
    connection.close()
    flip_in(path, mac)
    found = read_journal(path)
    for name in ("calls", "entries", "steps", "questions", "votes", "blobs"):
        error = found[f"{run_id}: {name}"]
        assert isinstance(error, JournalAltered)
        assert (error.chain, error.id, error.record) == ("run", run_id, link)
        assert error.what == f"unit {run_id}-call-3"
        for other in set(RUNS) - same:
            assert found[f"{other}: {name}"] == expected[f"{other}: {name}"]
    assert found["runs"] == expected["runs"]


def row_damage(path: Path, run_id: str) -> None:
    """Flip a bit in the MAC of a run's row."""
    connection = sqlite3.connect(path)
    (mac,) = connection.execute("SELECT mac FROM runs WHERE id = ?", (run_id,)).fetchone()
    connection.close()
    flip_in(path, mac)


def test_a_list_leaves_out_a_damaged_run_and_logs_it(
    path: Path, expected: Reading, caplog: pytest.LogCaptureFixture
):
    """A list contains all runs but the damaged one, in one page or in several, and the log names the damaged run once."""
    row_damage(path, "cake")
    journal = SqliteJournal(path, watch=None, inline=True)
    found = [row.record.id for row in asyncio.run(journal.runs.list())]
    pages: list[str] = []
    before = None
    while page := asyncio.run(journal.runs.list(limit=2, before=before)):
        pages += [row.record.id for row in page]
        before = page[-1].record.mark
    journal.close()
    assert found == pages == [row.record.id for row in expected["runs"] if row.record.id != "cake"]
    [logged] = caplog.messages
    assert "a run is not listed: " in logged
    assert "run 'cake', record 1 (run cake): its row" in logged


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["show", "cake"],
        ["verify"],
        ["verify", "cake"],
        ["resume", "cake", "--app", "support.recorded:PROMPT"],
    ],
)
@pytest.mark.parametrize("how", ["row", "record", "page", "cut", "zeros", "text"])
def test_the_command_line_says_it_in_words(path: Path, how: str, words: list[str]):
    """No command shows a traceback, whatever is damaged.

    Each says what is damaged and fails. Only `list` may succeed, if the file as a whole can be read.
    """
    if how == "row":
        row_damage(path, "cake")
    elif how == "record":
        flip_in(path, record_mac(path))
    elif how == "page":
        zero_leaf(path)
    else:
        data = path.read_bytes()
        changed = {"cut": data[: len(data) // 2 + 7], "zeros": bytes(len(data)), "text": b"no database " * 99}
        path.write_bytes(changed[how])
    with quiet():
        result = CliRunner().invoke(app, [*words, "--journal", str(path)], prog_name="handrail runs")
    assert "defect" not in result.output
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if words != ["list"] or how not in ("row", "record", "page"):
        assert result.exit_code != 0
        assert any(each in result.output for each in ("damaged", "not a database", "not a journal"))


def record_mac(path: Path) -> bytes:
    """Return the MAC of a record of the run `cake`, to find it in the file."""
    connection = sqlite3.connect(path)
    query = "SELECT mac FROM records WHERE chain = 'run cake' AND link = 4"
    (mac,) = connection.execute(query).fetchone()
    connection.close()
    return mac


def zero_leaf(path: Path) -> None:
    """Fill with zeros the page that holds a record of the run `cake`."""
    mac, data = record_mac(path), path.read_bytes()
    path.write_bytes(damage("zero", data.index(mac) // PAGE, data))


def test_verify_names_every_damaged_run(path: Path):
    """`handrail runs verify` lists each damaged run with its record."""
    for run_id in ("cake", "soup"):
        row_damage(path, run_id)
    result = CliRunner().invoke(app, ["verify", "--journal", str(path)], prog_name="handrail runs")
    assert result.exit_code == 1
    for run_id in ("cake", "soup"):
        assert f"run '{run_id}', record 1 (run {run_id}): its row" in result.output


# --- foreign files ---


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the mode and the bytes of every file in a folder."""
    return {each.name: (each.stat().st_mode, each.read_bytes()) for each in folder.iterdir()}


@pytest.mark.parametrize("mode", ["DELETE", "WAL", "WAL, in use"])
@pytest.mark.parametrize("table", ["t", "about", "records", ""])
def test_a_foreign_database_is_not_touched(tmp_path: Path, mode: str, table: str):
    """The database of another program, and the files beside it, are unchanged after it was refused as a journal."""
    path = tmp_path / "other.db"
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute(f"PRAGMA journal_mode = {mode.split(',')[0]}")
    if table:
        foreign.execute(f"CREATE TABLE {table} (x)")
        foreign.execute(f"INSERT INTO {table} VALUES (1)")
    else:
        foreign.execute("PRAGMA user_version = 7")
    if "in use" not in mode:
        foreign.close()
    for each in tmp_path.iterdir():
        os.chmod(each, 0o600)
    before = contents(tmp_path)
    with pytest.raises(JournalError, match=r"not a journal|altered its schema"):
        SqliteJournal(path)
    assert contents(tmp_path) == before
    foreign.close()


def test_a_journal_is_recognised_after_a_kill_at_any_moment_of_its_creation(tmp_path: Path):
    """A copy of a new journal, made while the journal is still open, can be opened and has the same id."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    copy = tmp_path / "copy.db"
    for suffix in ("", "-wal", ".key"):
        shutil.copy(tmp_path / f"runs.db{suffix}", f"{copy}{suffix}")
    journal.close()
    again = SqliteJournal(copy)
    assert again.id == journal.id
    again.close()


def test_a_run_that_only_its_id_finds_is_rescued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If scans of the table do not reach a run's row, `rescue_runs` finds it by the id in the name of the run's chain."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    record = RunRecord(id="r", session_id="s", principal="p", prompt="p", model="m", began_at=1.0)
    asyncio.run(journal.runs.begin(record))
    real = run_rows._readable  # pyright: ignore[reportPrivateUsage]  # it stops at damage
    monkeypatch.setattr(
        run_rows,
        "_readable",
        lambda connection, query: () if "FROM runs" in query else real(connection, query),
    )
    database = journal.runs._database  # pyright: ignore[reportPrivateUsage]
    found = asyncio.run(
        database.transact(lambda connection: list(run_rows.rescue_runs(connection, database.chains)))
    )
    assert [each.id for each in found] == ["r"]
    journal.close()


def spoil_index(path: Path, index: str, old: bytes, new: bytes) -> None:
    """Change a key in the first page of an index, so that the index no longer finds its row."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ((root,),) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (index,))
    data = path.read_bytes()
    page = data[(root - 1) * PAGE : root * PAGE]
    assert old in page
    path.write_bytes(data[: (root - 1) * PAGE] + page.replace(old, new) + data[root * PAGE :])


@pytest.mark.parametrize("limit", [1, 100])
def test_a_run_that_a_damaged_index_hides_is_listed_in_its_session(path: Path, limit: int):
    """A session's chain names its runs, so a list of the session notices that the index lacks one."""
    with closing(SqliteJournal(path, watch=None, inline=True)) as journal:
        record = RunRecord(
            id="hidden", session_id="long-id", principal="ada", prompt="p", model="m", began_at=5.0
        )
        asyncio.run(journal.runs.begin(record))
    spoil_index(path, "runs_of_a_session", b"long-id", b"long-ix")
    with closing(SqliteJournal(path, watch=None, inline=True)) as journal:
        rows = asyncio.run(journal.runs.list(session_id="long-id", limit=limit))
        assert [row.record.id for row in rows] == ["hidden"]


def test_neither_a_new_session_nor_one_run_needs_all_runs_to_be_checked(path: Path):
    """Whoever begins a run or reads one does not wait until the whole table of runs has been read."""
    statements: list[str] = []
    with closing(SqliteJournal(path, watch=None, inline=True)) as journal:
        connection: Any = journal._database._connection
        connection.set_trace_callback(statements.append)
        assert asyncio.run(journal.runs.list(session_id="new", limit=1)) == ()
        assert asyncio.run(journal.runs.get("soup")).record.id == "soup"
        assert len(asyncio.run(journal.runs.list(session_id="s"))) == 2
        assert not [each for each in statements if "integrity_check(runs)" in each]
        asyncio.run(journal.runs.list())
        assert [each for each in statements if "integrity_check(runs)" in each]
