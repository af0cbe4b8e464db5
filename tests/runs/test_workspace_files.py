"""Files are copied into workspaces atomically, with their modes and links, and out of them as recorded."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from handrail.errors import DefinitionError, FileError, RunError, WorkspaceBusy, WorkspaceNotFoundError
from handrail.journal.any_journal import AnyJournal
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.records import RunRecord
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
    """Return every path below a folder, with its mode and content."""
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
    monkeypatch.setattr("handrail.resources.workspace.filesystem.LARGEST", 3)
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
    """`get_files` fills an existing empty folder, whether it is given as the current folder or by a link to it."""
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
    with pytest.raises(FileError, match="not an empty folder"):
        await get_files(journal, "shop", source)
    (tmp_path / "empty").mkdir()
    await get_files(journal, "shop", tmp_path / "empty")
    assert shown(tmp_path / "empty") == shown(source)
