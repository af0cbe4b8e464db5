"""The log that a crash leaves: what happens if it is damaged or incomplete when the journal is opened again."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from handrail import SqliteJournal
from handrail.cli.runs_commands import app
from handrail.errors import JournalError
from handrail.journal import sqlite as log_file
from support import TESTS
from support.damage import RUNS, Reading, read_journal

pytestmark = pytest.mark.once  # a journal refuses the same bytes under every Python version

PAGE = 4096
CRASH = """
import os, signal, sys
from pathlib import Path
from handrail import SqliteJournal
from support.damage import write_journal
SqliteJournal.close = lambda self: os.kill(os.getpid(), signal.SIGKILL)
write_journal(Path(sys.argv[1]))
"""
SHARED_LOCK = 0x40000002, 510
"""The offset and the number of the bytes that each process locks while it has the database open."""
IS_LOCKED = f"""
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, {SHARED_LOCK[1]}, {SHARED_LOCK[0]})
        print("free")
    except BlockingIOError:
        print("locked")
"""


def run(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal whose process was killed before it had copied its log into the database."""
    path = tmp_path_factory.mktemp("crashed") / "runs.db"
    ran = run(CRASH, path)
    assert ran.returncode == -9, ran.stderr
    assert log_of(path).stat().st_size > 10 * PAGE
    return path


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-shm")


def copied(crashed: Path, folder: Path) -> Path:
    for suffix in ("", ".key", "-wal", "-shm"):
        shutil.copy(f"{crashed}{suffix}", folder / f"runs.db{suffix}")
    return folder / "runs.db"


@pytest.fixture
def path(crashed: Path, tmp_path: Path) -> Path:
    return copied(crashed, tmp_path)


@pytest.fixture(scope="module")
def expected(crashed: Path, tmp_path_factory: pytest.TempPathFactory) -> Reading:
    """Provide what is read from the journal if its log is undamaged."""
    found = read_journal(copied(crashed, tmp_path_factory.mktemp("expected")))
    assert not any(isinstance(each, JournalError) for each in found.values())
    assert all(any(name.startswith(f"{id}:") for name in found) for id in RUNS)
    return found


def damage(kind: str, at: int, data: bytes) -> bytes | None:
    """Return a log with one bit flipped, its end cut off or a page zeroed, at a place given by `at`; None if it is to be deleted."""
    changed = bytearray(data)
    if kind == "flip":
        changed[at // 8 % len(data)] ^= 1 << at % 8
    elif kind == "cut":
        del changed[at % len(data) :]
    elif kind == "zero":
        page = at % (len(data) // PAGE) * PAGE
        changed[page : page + PAGE] = bytes(PAGE)
    else:
        return None
    return bytes(changed)


@given(kind=st.sampled_from(["flip", "flip", "flip", "cut", "zero", "delete"]), at=st.integers(0, 2**22))
def test_any_damage_is_refused_or_harmless(
    crashed: Path, expected: Reading, tmp_path_factory: pytest.TempPathFactory, kind: str, at: int
):
    """Wherever the log is damaged, either everything can be read or the journal is refused, however often it is opened."""
    path = copied(crashed, tmp_path_factory.mktemp("damaged"))
    changed = damage(kind, at, log_of(path).read_bytes())
    log_of(path).unlink() if changed is None else log_of(path).write_bytes(changed)
    found = read_journal(path)
    if found != expected:
        assert set(found) == {"journal"}
        for _ in range(2):
            with pytest.raises(JournalError, match=r"its log .* is damaged or incomplete"):
                SqliteJournal(path)
    shutil.rmtree(path.parent)


def test_verify_says_what_is_missing(path: Path):
    """`handrail runs verify` says how many pages of the log can still be read, and what to do."""
    data = log_of(path).read_bytes()
    frames = (len(data) - 32) // (PAGE + 24)
    log_of(path).write_bytes(data[: 32 + 3 * (PAGE + 24)])
    shown = CliRunner().invoke(app, ["verify", "--journal", str(path)])
    assert shown.exit_code != 0
    said = " ".join(shown.output.split())
    assert f"of the {frames} pages that were committed to it, only the first 3 can be read" in said
    assert "Restore the journal and its log from a backup" in said


async def test_the_loss_can_be_accepted(path: Path):
    """If the log's index is deleted with the log, the journal opens with the runs that are left."""
    log_of(path).unlink()
    with pytest.raises(JournalError, match="only the first 0 can be read"):
        SqliteJournal(path)
    index_of(path).unlink()
    journal = SqliteJournal(path)
    assert len(await journal.runs.list()) < len(RUNS)
    journal.close()


def test_after_a_restart_of_the_machine_it_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """If the machine was restarted since the log was written, an incomplete log is accepted, and a warning says so."""
    log_of(path).write_bytes(log_of(path).read_bytes()[:-1])
    monkeypatch.setattr(log_file, "_started_at", lambda: float("inf"))
    with caplog.at_level(logging.WARNING):
        SqliteJournal(path).close()
    assert "The machine was restarted before the rest was on disk." in caplog.text


def test_an_index_that_was_half_written_is_no_evidence(path: Path, expected: Reading):
    """If neither copy of the index's header is valid, the log is read as it is."""
    index = bytearray(index_of(path).read_bytes())
    for at in (16, 48 + 16):
        index[at] ^= 1
    index_of(path).write_bytes(index)
    assert read_journal(path) == expected


def test_a_journal_that_is_opened_twice_stays_locked(tmp_path: Path):
    """Opening a journal a second time in the same process does not release SQLite's lock, nor does closing the second journal."""
    path = tmp_path / "runs.db"
    first = SqliteJournal(path)
    assert run(IS_LOCKED, path).stdout == "locked\n"
    second = SqliteJournal(path)
    assert run(IS_LOCKED, path).stdout == "locked\n"
    second.close()
    assert run(IS_LOCKED, path).stdout == "locked\n"
    first.close()
    assert run(IS_LOCKED, path).stdout == "free\n"
