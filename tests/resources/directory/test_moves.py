"""A folder is recognized by its identity: a recorded commit is applied to it wherever it is, and to no other folder."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from handrail import DirectoryFilesystem, SqliteJournal
from handrail.errors import FileError, UndoRefused
from handrail.journal.records import CommitUnit
from handrail.resources.directory import Recovered
from resources.directory.crashes import KILLED, Crashes, Killed, picked
from resources.directory.crashing import RUN, snapshot
from support.filesystems import fill
from support.texts import NO_COMMIT_KEPT

once = pytest.mark.once  # subprocesses that are killed behave the same under every Python version


@pytest.fixture(scope="module")
def killed() -> Iterator[Killed]:
    made = Killed()
    yield made
    made.close()


@pytest.fixture
def crashes(tmp_path: Path, killed: Killed) -> Crashes:
    """Provide a `Crashes` in an empty folder."""
    base = tmp_path / "base"
    base.mkdir()
    return Crashes(base, killed)


def recover(root: Path, journal: Path) -> tuple[Recovered, list[CommitUnit], list[CommitUnit]]:
    """Recover a folder. Returns what was recovered, the run's recorded units, and the units still unapplied."""

    async def main() -> tuple[Recovered, list[CommitUnit], list[CommitUnit]]:
        opened = SqliteJournal(journal)
        files = DirectoryFilesystem(root)
        try:
            recovered = await files.recover(opened)
            return recovered, list(await opened.calls.load(RUN)), list(await opened.calls.unapplied())
        finally:
            files.close()
            opened.close()

    return asyncio.run(main())


def nothing(base: Path) -> Path:
    return base / "root"


def with_the_folder_around_it(base: Path) -> Path:
    """Move the project's folder together with its staging folder, as happens if the folder around them is renamed."""
    (base / "elsewhere").mkdir()
    for name in ("root", ".root.handrail"):
        if (base / name).exists():
            (base / name).rename(base / "elsewhere" / name)
    return base / "elsewhere" / "root"


def renamed(base: Path) -> Path:
    """Rename the project's folder, which leaves its staging folder under the old name."""
    return (base / "root").rename(base / "renamed")


def renamed_and_moved(base: Path) -> Path:
    """Move the project and its staging folder, and then rename the project."""
    at = with_the_folder_around_it(base)
    return at.rename(at.with_name("renamed"))


def alone(base: Path) -> Path:
    """Move the project's folder elsewhere and give it a new name, which leaves its staging folder behind."""
    (base / "elsewhere").mkdir()
    return (base / "root").rename(base / "elsewhere" / "other")


MOVES: list[Callable[[Path], Path]] = [nothing, with_the_folder_around_it, renamed, renamed_and_moved, alone]


@once
@pytest.mark.parametrize("move", MOVES)
def test_a_moved_project_recovers_its_commit_at_its_new_place(crashes: Crashes, move: Callable[[Path], Path]):
    """Recovery of a moved project completes a recorded commit and reverts any other, at whatever point the process was killed."""
    crashes.fresh()
    before = snapshot(crashes.base / "root")
    assert crashes.run(seed=5) == 0
    after, points = snapshot(crashes.base / "root"), crashes.said()["points"]
    outcomes: set[bool] = set()
    for at in picked(points, 6):
        shutil.rmtree(crashes.base / "elsewhere", ignore_errors=True)
        shutil.rmtree(crashes.base / "renamed", ignore_errors=True)
        crashes.fresh()
        assert crashes.run(at, seed=5) == KILLED
        root = move(crashes.base)
        recovered, units, unapplied = recover(root, crashes.base / "journal.db")
        assert snapshot(root) == (after if units else before), f"killed at {at}"
        assert (recovered.unapplied, recovered.left, unapplied) == ((), (), [])
        outcomes.add(bool(units))
    assert outcomes == {True, False}


def taken_away(base: Path) -> Callable[[], None]:
    """Move the project and its staging folder away, as if their disk had been removed."""
    away = base.parent / "away"
    away.mkdir(exist_ok=True)
    names = [name for name in ("root", ".root.handrail") if (base / name).exists()]
    for name in names:
        (base / name).rename(away / name)

    def back() -> None:
        for name in names:
            (away / name).rename(base / name)

    return back


def replaced(base: Path) -> Callable[[], None]:
    """Put a different folder in the project's place, as happens at a mount point once its disk is unmounted."""
    back = taken_away(base)
    (base / "root").mkdir()

    def back_again() -> None:
        (base / "root").rmdir()
        back()

    return back_again


def replaced_beside_its_staging(base: Path) -> Callable[[], None]:
    """Put a different folder in the project's place, beside the project's own staging folder."""
    away = (base / "root").rename(base.parent / "away")
    (base / "root").mkdir()

    def back() -> None:
        (base / "root").rmdir()
        away.rename(base / "root")

    return back


def without_staging(base: Path) -> Callable[[], None]:
    """Take away the staging folder only."""
    if not (base / ".root.handrail").exists():
        return lambda: None
    away = (base / ".root.handrail").rename(base.parent / "away")

    def back() -> None:
        shutil.rmtree(base / ".root.handrail", ignore_errors=True)
        away.rename(base / ".root.handrail")

    return back


# Each of these returns a function that restores what it took away.
ABSENCES = [taken_away, replaced, replaced_beside_its_staging, without_staging]


@once
@pytest.mark.parametrize("absence", ABSENCES)
def test_a_commit_whose_folder_is_missing_stays_unapplied_until_it_is_there_again(
    crashes: Crashes, absence: Callable[[Path], Callable[[], None]]
):
    """While the folder or its staged files are missing, no file is changed, and a recorded commit is reported as unapplied.

    A commit whose files were all in place may be missing from the report. Once everything is back, recovery completes the commit.
    """
    crashes.fresh()
    before = snapshot(crashes.base / "root")
    assert crashes.run(seed=6) == 0
    after, points = snapshot(crashes.base / "root"), crashes.said()["points"]
    journal = crashes.base / "journal.db"
    waited = 0
    for at in picked(points, 6):
        crashes.fresh()
        shutil.rmtree(crashes.base.parent / "away", ignore_errors=True)
        assert crashes.run(at, seed=6) == KILLED
        torn = snapshot(crashes.base / "root")
        back = absence(crashes.base)
        other = crashes.base / "root"
        if not other.exists():
            other = crashes.base.parent / "other"
            other.mkdir(exist_ok=True)
        found = snapshot(other)
        recovered, units, unapplied = recover(other, journal)
        assert snapshot(other) == found
        assert [each.call_id for each in recovered.unapplied] == [each.call_id for each in unapplied]
        assert len(unapplied) == 1 or not units or torn == after
        if unapplied:
            waited += 1
            assert "is not applied: " in str(recovered.unapplied[0])
        back()
        recovered, units, unapplied = recover(crashes.base / "root", journal)
        assert snapshot(crashes.base / "root") == (after if units else before), f"killed at {at}"
        assert (recovered.unapplied, unapplied) == ((), [])
    assert waited


def folder_with(path: Path, files: dict[str, str]) -> DirectoryFilesystem:
    fill(path, files)
    return DirectoryFilesystem(path)


def test_a_renamed_project_keeps_its_history(tmp_path: Path):
    """Changes that were committed before a project was renamed can be undone afterwards."""
    with folder_with(tmp_path / "root", {"a": "1"}) as files:
        fork = files.fork("call")
        fork.write("a", "2")
        fork.prepare()
        fork.apply()
    (tmp_path / "root").rename(tmp_path / "renamed")
    with DirectoryFilesystem(tmp_path / "renamed") as files:
        assert files.undo("call (0)") == ("a",)
    assert (tmp_path / "renamed" / "a").read_text() == "1"


@pytest.mark.parametrize("how", ["recreated", "copied"])
def test_a_folder_in_the_place_of_another_gets_a_staging_folder_of_its_own(tmp_path: Path, how: str):
    """A folder that replaces another one, even as a copy of it, gets neither the other's history nor its staging folder."""
    root = tmp_path / "root"
    with folder_with(root, {"a": "1"}) as files:
        files.write("a", "2")
        old = files.staging
    if how == "copied":
        shutil.copytree(root, tmp_path / "copy")
        shutil.rmtree(root)
        (tmp_path / "copy").rename(root)
    else:
        shutil.rmtree(root)
        fill(root, {"a": "2"})
    with (
        DirectoryFilesystem(root) as files,
        pytest.raises(UndoRefused, match=NO_COMMIT_KEPT),
    ):
        files.undo("direct (0)")
    for text in ("3", "4"):
        with DirectoryFilesystem(root) as files:
            files.write("a", text)
            assert files.staging != old
            assert (files.staging / "identity").is_file()
    assert len(list(tmp_path.glob(".*handrail"))) == 2


def test_a_given_staging_folder_of_a_different_folder_is_refused(tmp_path: Path):
    """A staging folder that belongs to one root is refused if it is passed for another."""
    with folder_with(tmp_path / "one", {"a": "0"}) as files:
        files.write("a", "1")
        staging = files.staging
    fill(tmp_path / "two", {"b": ""})
    files = DirectoryFilesystem(tmp_path / "two", staging=staging)
    with pytest.raises(FileError, match="holds the staged changes of a different folder"):
        files.write("a", "2")
    files.close()
    assert not (tmp_path / "two" / "a").exists()


def test_a_staging_folder_that_others_can_change_is_refused(tmp_path: Path):
    """Nothing is staged in a folder that other users can change."""
    fill(tmp_path / "root", {"a": "1"})
    (tmp_path / ".root.handrail").mkdir()
    (tmp_path / ".root.handrail").chmod(0o777)
    with DirectoryFilesystem(tmp_path / "root") as files:
        with pytest.raises(FileError, match="other users can change"):
            files.write("a", "2")
        assert files.read("a") == "1"
