"""`handrail journal backup` and `restore`, on journals that are in use."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from handrail import runs
from handrail.errors import JournalError
from handrail.journal.any_journal import open_by_name
from handrail.journal.backup import back_up, restore
from handrail.journal.protocol import Journal
from handrail.journal.records import RunRecord
from handrail.journal.sqlite import SqliteJournal
from handrail.resources.workspace import Workspace
from handrail.serve.people import People, people_path
from support import postgres
from support.programs import HANDRAIL, environment

pytestmark = pytest.mark.once  # files and servers do not depend on the Python version


@pytest.fixture(params=["sqlite", "postgres"])
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """Fixture: the name of a new journal, and of one to restore it to."""
    if request.param == "sqlite":
        return str(tmp_path / "runs.db"), str(tmp_path / "restored" / "other.db")
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    monkeypatch.setenv("PATH", str(postgres.programs()), prepend=":")
    url = postgres.new_url()
    return url, url


def remove(name: str) -> None:
    """Remove a PostgreSQL journal, as if its database had been lost."""
    import psycopg

    from handrail.journal.postgres.address import parse_url

    address = parse_url(name)
    with psycopg.connect(address.conninfo) as connection:
        connection.execute(f'DROP SCHEMA "{address.schema}" CASCADE')  # pyright: ignore


async def begin(journal: Journal, id: str) -> None:
    await journal.runs.begin(
        RunRecord(id=id, session_id=id, principal="ada", prompt="p", model="m", began_at=1.0)
    )


async def test_a_journal_is_copied_as_it_is_at_one_moment_while_it_is_written_to(
    places: tuple[str, str], tmp_path: Path
) -> None:
    """The copy has every run that was recorded before, is intact, and has the files of workspaces."""
    (tmp_path / "note.txt").write_text("tea")
    name, other = places
    with closing(open_by_name(name)) as journal:
        await runs.put_files(journal, Workspace("shelf", cache=tmp_path / "cache"), tmp_path / "note.txt")
        for number in range(30):
            await begin(journal, f"before-{number}")
        copying = asyncio.create_task(asyncio.to_thread(back_up, name, tmp_path / "copy"))
        number = 0
        while not copying.done():
            await begin(journal, f"during-{number}")
            number += 1
        await copying
    if name == other:
        remove(name)
    restore(tmp_path / "copy", other)
    with closing(open_by_name(other)) as copy:
        assert not (await copy.runs.verify()).altered
        found = {row.record.id for row in await copy.runs.list(limit=10_000)}
        assert {f"before-{number}" for number in range(30)} <= found
        assert await runs.get_files(copy, "shelf", tmp_path / "taken")
        assert (tmp_path / "taken" / "note.txt").read_text() == "tea"
        await begin(copy, "after")  # it can be used
    with pytest.raises(JournalError):
        restore(tmp_path / "copy", other)


def test_users_and_key_are_copied_and_only_the_owner_can_read_them(tmp_path: Path) -> None:
    SqliteJournal(tmp_path / "runs.db").close()
    people = People(people_path(tmp_path / "runs.db"))
    people.add("ann")
    people.close()
    back_up(str(tmp_path / "runs.db"), tmp_path / "copy")
    assert {each.name for each in (tmp_path / "copy").iterdir()} == {
        "runs.db",
        "runs.db.key",
        "runs.people.db",
    }
    assert {each.stat().st_mode & 0o077 for each in (tmp_path / "copy").iterdir()} == {0}
    restore(tmp_path / "copy", str(tmp_path / "new.db"))
    with closing(People(people_path(tmp_path / "new.db"))) as restored:
        assert restored.find("ann") is not None


def test_neither_an_existing_backup_nor_an_existing_journal_is_replaced(tmp_path: Path) -> None:
    SqliteJournal(tmp_path / "runs.db").close()
    back_up(str(tmp_path / "runs.db"), tmp_path / "copy")
    for again in (
        lambda: back_up(str(tmp_path / "runs.db"), tmp_path / "copy"),
        lambda: restore(tmp_path / "copy", str(tmp_path / "runs.db")),
    ):
        with pytest.raises(JournalError, match="it exists already"):
            again()
    with pytest.raises(JournalError, match="handrail journal backup"):
        restore(tmp_path / "nothing", str(tmp_path / "new.db"))


@pytest.mark.parametrize(
    "left", ["new.db-wal", "new.db-shm", "new.db-journal", "new.db.key", "new.people.db", "new.people.db-wal"]
)
def test_a_journal_is_not_restored_beside_what_is_left_of_another(tmp_path: Path, left: str) -> None:
    """SQLite would apply an old log to the restored file. What lies there is named, and nothing is written."""
    SqliteJournal(tmp_path / "runs.db").close()
    People(people_path(tmp_path / "runs.db")).close()
    back_up(str(tmp_path / "runs.db"), tmp_path / "copy")
    place = tmp_path / "restored"
    place.mkdir(mode=0o700)
    (place / left).write_bytes(b"old")
    with pytest.raises(JournalError, match=rf"{left} lies beside it\. .*move this one away"):
        restore(tmp_path / "copy", str(place / "new.db"))
    assert [(each.name, each.read_bytes()) for each in place.iterdir()] == [(left, b"old")]


@pytest.mark.parametrize(
    "command", ["journal backup small/copy --journal runs.db", "journal restore copy --journal small/a.db"]
)
def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path, command: str) -> None:
    with closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        asyncio.run(begin(journal, "a"))
    back_up(str(tmp_path / "runs.db"), tmp_path / "copy")
    (tmp_path / "small").mkdir()
    words = " ".join([*HANDRAIL, command])
    script = f"mount -t tmpfs -o size=64k tmpfs small && {words}; echo code $?; ls -A small"
    result = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(Path(runs.__file__).parents[2])),
        capture_output=True,
        text=True,
    )
    assert result.stdout == "code 1\n", result
    assert "free space" in result.stderr
    assert "full" in result.stderr or "No space left" in result.stderr
    with closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        assert not asyncio.run(journal.runs.verify()).altered


def test_a_missing_client_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JournalError, match="postgresql-client"):
        back_up("postgresql://ann:opensesame@127.0.0.1:1/x", tmp_path / "copy")
    assert not list(tmp_path.iterdir())


def test_a_database_that_is_down_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(postgres.programs()), prepend=":")
    with pytest.raises(JournalError) as refused:
        back_up("postgresql://ann:opensesame@127.0.0.1:1/x", tmp_path / "copy")
    assert "pg_dump failed" in str(refused.value)
    assert "opensesame" not in str(refused.value)
    assert not list(tmp_path.iterdir())
