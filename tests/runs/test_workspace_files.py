"""Files are copied into workspaces atomically, with their modes and links, and out of them as recorded."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import DefinitionError, FileError, RunError, WorkspaceBusy, WorkspaceNotFoundError
from handrail.journal.any_journal import AnyJournal
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.records import RunRecord
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.resources.workspace import Workspace
from handrail.runs import get_files, list_workspaces, put_files, undo
from support import postgres


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def journal(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AnyJournal]:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    if request.param == "postgres":
        opened: AnyJournal = PostgresJournal(postgres.new_url(), watch=None)
    else:
        opened = (
            MemoryJournal() if request.param == "memory" else SqliteJournal(tmp_path / "runs.db", watch=None)
        )
    yield opened
    opened.close()


def shop(tmp_path: Path, **options: object) -> Workspace:
    return Workspace("shop", cache=tmp_path / "cache", **options)  # type: ignore[arg-type]


def shown(folder: Path) -> dict[str, str]:
    """Return every path below a folder: a link with its target, anything else with its mode and content."""
    found: dict[str, str] = {}
    for at in sorted(folder.rglob("*")):
        path = str(at.relative_to(folder))
        if at.is_symlink():
            found[path] = f"-> {os.readlink(at)}"
        else:
            found[path] = f"{at.stat().st_mode & 0o777:o} {'' if at.is_dir() else at.read_text()}"
    return found


async def recorded(journal: AnyJournal, tmp_path: Path, name: str = "shop") -> dict[str, str]:
    """Return what `get_files` copies to a new folder, in the form of `shown`."""
    target = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
    await get_files(journal, name, target)
    return shown(target)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "sub" / "deep").mkdir(parents=True)
    (source / ".git" / "hooks").mkdir(parents=True)
    (source / "empty").mkdir(mode=0o700)
    (source / "a.txt").write_text("hello")
    (source / "run.sh").write_text("#!/bin/sh")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("a.txt")
    (source / "out").symlink_to("/etc")
    (source / "sub" / "deep" / "f").write_text("deep")
    (source / ".git" / "hooks" / "pre-commit").write_text("programs read this when they start")
    return source


async def test_files_return_as_they_were_put(journal: AnyJournal, tmp_path: Path, source: Path) -> None:
    before = shown(source)
    put = await put_files(journal, shop(tmp_path), source)
    assert await recorded(journal, tmp_path) == before
    assert set(put.paths) == {path for path, state in before.items() if state.startswith(("->", "6"))} | {
        "run.sh", ".git/", ".git/hooks/", "empty/", "sub/", "sub/deep/"
    }  # fmt: skip


async def test_ignored_names_and_pipes_are_left_out(
    journal: AnyJournal, tmp_path: Path, source: Path
) -> None:
    before = shown(source)
    (source / "node_modules").mkdir()
    (source / "node_modules" / "x.js").write_text("x")
    (source / "sub" / "skip.tmp").write_text("x")
    os.mkfifo(source / "pipe")
    await put_files(journal, shop(tmp_path, ignore=["node_modules", "*.tmp"]), source)
    assert await recorded(journal, tmp_path) == before


async def test_a_second_copy_replaces_what_is_in_the_way_and_leaves_the_rest(
    journal: AnyJournal, tmp_path: Path, source: Path
) -> None:
    await put_files(journal, shop(tmp_path), source)
    second = tmp_path / "second"
    (second / "a.txt").mkdir(parents=True)
    (second / "a.txt" / "inner").write_text("a folder now")
    (second / "sub").write_text("a file now")
    (second / "link").write_text("no link")
    await put_files(journal, shop(tmp_path), second)
    found = await recorded(journal, tmp_path)
    assert found["a.txt/inner"].endswith("a folder now")
    assert found["sub"].endswith("a file now")
    assert found["link"].endswith("no link")
    assert "sub/deep" not in found
    assert found["run.sh"] == "755 #!/bin/sh"


async def test_a_single_file_is_copied_under_its_name(
    journal: AnyJournal, tmp_path: Path, source: Path
) -> None:
    await put_files(journal, shop(tmp_path), source / "run.sh")
    assert await recorded(journal, tmp_path) == {"run.sh": "755 #!/bin/sh"}


async def test_undo_removes_what_was_copied(journal: AnyJournal, tmp_path: Path, source: Path) -> None:
    await put_files(journal, shop(tmp_path), source / "a.txt")
    (source / "a.txt").write_text("new")
    put = await put_files(journal, shop(tmp_path), source)
    await undo(journal, put.run_id, put.call_id)
    assert list((await recorded(journal, tmp_path)).values()) == ["644 hello"]


async def test_a_copy_that_fails_changes_nothing(
    journal: AnyJournal, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_files(journal, shop(tmp_path), source / "a.txt")
    monkeypatch.setattr("handrail.resources.workspace.workspace.LARGEST", 3)
    with pytest.raises(RunError, match=r"nothing was copied: .*deep/f.*The workspace is as before"):
        await put_files(journal, shop(tmp_path), source / "sub")
    assert list(await recorded(journal, tmp_path)) == ["a.txt"]


async def test_a_workspace_that_a_run_has_is_refused_but_can_be_read(
    journal: AnyJournal, tmp_path: Path, source: Path
) -> None:
    await put_files(journal, shop(tmp_path), source / "a.txt")
    record = RunRecord(id="r", session_id="r", principal="p", prompt="p", model="m", began_at=1.0)
    await journal.runs.begin(record)
    await journal.workspaces.acquire("shop", "r")
    with pytest.raises(WorkspaceBusy):
        await put_files(journal, shop(tmp_path), source)
    assert list(await recorded(journal, tmp_path)) == ["a.txt"]
    (line,) = await list_workspaces(journal)
    assert (line.name, line.files, line.size, line.run_id) == ("shop", 1, 5, "r")


async def test_a_folder_that_exists_is_filled_and_not_replaced(
    journal: AnyJournal, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`get_files` fills an existing empty folder, whether it is passed as `.` or as a link to it."""
    await put_files(journal, shop(tmp_path), source)
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("there")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    await get_files(journal, "shop", ".")
    await get_files(journal, "shop", tmp_path / "link")
    assert shown(Path.cwd()) == shown(tmp_path / "there") == shown(source)


async def test_files_that_a_workspace_does_not_record_are_refused(
    journal: AnyJournal, tmp_path: Path, source: Path
) -> None:
    os.mkfifo(source / "pipe")
    (source / "skip.tmp").write_text("x")
    (source / ".handrail").write_text("x")
    for name in ("pipe", "skip.tmp", ".handrail"):
        with pytest.raises(FileError, match="does not record a file with this name or of this kind"):
            await put_files(journal, shop(tmp_path, ignore=["*.tmp"]), source / name)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    odd.mkdir()
    (odd / "a").write_text("x")
    assert (await put_files(journal, shop(tmp_path), odd)).paths == ["a"]


async def test_wrong_names_and_places_are_refused(journal: AnyJournal, tmp_path: Path, source: Path) -> None:
    with pytest.raises(FileError, match="there is no such file or folder"):
        await put_files(journal, shop(tmp_path), tmp_path / "missing")
    with pytest.raises(DefinitionError, match="can't be the name of a workspace"):
        Workspace("a/b")
    with pytest.raises(WorkspaceNotFoundError, match="no workspace 'shop'"):
        await get_files(journal, "shop", tmp_path / "out")
    assert await list_workspaces(journal) == []
    await put_files(journal, shop(tmp_path), source)
    with pytest.raises(FileError, match="is not empty"):
        await get_files(journal, "shop", source)
    (tmp_path / "empty").mkdir()
    await get_files(journal, "shop", tmp_path / "empty")
    assert shown(tmp_path / "empty") == shown(source)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
async def test_what_replaces_a_source_during_the_copy_is_neither_followed_nor_waited_for(
    kind: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = MemoryJournal()
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "f").write_text("secret")
    victim = source / ("sub" if kind == "folder" else "a.txt")
    look = os.stat

    def look_and_replace(path: Any, **options: Any) -> os.stat_result:
        found = look(path, **options)
        if path == victim.name and "dir_fd" in options:
            victim.rename(tmp_path / "away")
            if kind == "pipe":
                os.mkfifo(victim)
            else:
                victim.symlink_to(secret if kind == "folder" else secret / "f")
            monkeypatch.setattr(os, "stat", look)
        return found

    monkeypatch.setattr(os, "stat", look_and_replace)
    if kind == "folder":
        await put_files(journal, shop(tmp_path), source)
        assert "sub/f" not in await recorded(journal, tmp_path)
    else:
        with pytest.raises(RunError, match="nothing was copied"):
            await put_files(journal, shop(tmp_path), source)
        assert await recorded(journal, tmp_path) == {}


@pytest.mark.parametrize("change", ["grows", "shrinks", "is rewritten"])
async def test_a_file_that_changes_while_it_is_copied_is_not_recorded(
    change: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, victim = MemoryJournal(), source / "a.txt"

    def change_it(path: str, size: int) -> None:
        if path == "a.txt":
            victim.write_text({"grows": "hello you", "shrinks": "", "is rewritten": "HELLO"}[change])
            os.utime(victim, ns=(1, 1))

    monkeypatch.setattr("handrail.runs.copies.check_size", change_it)
    with pytest.raises(RunError, match=r"'a.txt': it was changed while it was copied"):
        await put_files(journal, shop(tmp_path), source)


async def test_a_file_that_is_too_large_is_not_copied_first(tmp_path: Path, source: Path) -> None:
    with open(source / "large", "wb") as file:
        file.truncate(1 << 40)  # takes no space, but its copy would
    with pytest.raises(RunError, match=r"'large': it has 1099511627776 bytes"):
        await put_files(MemoryJournal(), shop(tmp_path), source)


async def test_the_journal_and_its_key_are_not_copied(tmp_path: Path, source: Path) -> None:
    """Copying the journal, its key or a folder with them into a workspace is refused: a run there could forge records."""
    (source / "state").mkdir(mode=0o700)
    journal = SqliteJournal(source / "state" / "runs.db", watch=None)
    (tmp_path / "link").symlink_to(source)
    for place in (source, tmp_path / "link", source / "state" / "runs.db", source / "state" / "runs.db.key"):
        with pytest.raises(FileError, match="its key would be copied"):
            await put_files(journal, shop(tmp_path), place)
    await put_files(journal, shop(tmp_path), source / "sub")
    journal.close()


async def test_places_that_can_not_be_written_are_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = MemoryJournal()
    await put_files(journal, shop(tmp_path), source)
    with pytest.raises(FileError, match=r"a.txt/out': it is below a file"):
        await get_files(journal, "shop", source / "a.txt" / "out")
    with pytest.raises(FileError, match=r"a.txt': it exists and is not a folder"):
        await get_files(journal, "shop", source / "a.txt")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("handrail.resources.workspace.cache.WorkspaceCache.write", full)
    with pytest.raises(FileError, match=r"out': the files can't be written there: .*No space left"):
        await get_files(journal, "shop", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
