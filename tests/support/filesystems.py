"""Filesystems in memory and on a real folder, for tests that both kinds have to pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from handrail.errors import (
    FileError,
)
from handrail.resources.directory import DirectoryFilesystem, DirectoryFork
from handrail.resources.memory import MemoryFilesystem
from handrail.resources.staging import FileFork

Root = MemoryFilesystem | DirectoryFilesystem
AFork = FileFork | DirectoryFork
Files = Root | AFork


class NewFiles(Protocol):
    """Makes a filesystem that contains the given files."""

    def __call__(self, files: Mapping[str, str | bytes] = {}, /, **options: Any) -> Any: ...


def fill(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a real folder directly, without Handrail."""
    for path, content in files.items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(content.encode() if isinstance(content, str) else content)


class Folders:
    """Makes real folders with filesystems on them, and closes the filesystems afterwards."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._made: list[DirectoryFilesystem] = []

    def __call__(self, files: Mapping[str, str | bytes] = {}, /, **options: Any) -> DirectoryFilesystem:
        folder = self._base / f"root{len(self._made)}"
        folder.mkdir()
        fill(folder, files)
        self._made.append(DirectoryFilesystem(folder, **options))
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    """Fixture: makes real folders with filesystems on them."""
    made = Folders(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["memory", "directory"])
def new_files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewFiles]:
    """Fixture: makes filesystems of one kind. A test that uses it runs once for each kind."""
    if request.param == "memory":
        yield lambda files={}, /, **options: MemoryFilesystem(files, **options)
    else:
        made = Folders(tmp_path)
        yield made
        made.close()


def tree(files: Files) -> dict[str, str | None]:
    """Return every path with the text of its file, or None for a folder."""
    folders = {path[:-1]: None for path in files.glob("**/")}
    return {**folders, **{path: files.read(path) for path in files.glob("**")}}


def commit(fork: AFork) -> None:
    """Commit a fork without checking whether its reads are stale."""
    fork.prepare()
    fork.apply()


def outcome(do: Callable[[], object]) -> object:
    """Return the function's result, or the type of the `FileError` that it raised."""
    try:
        return do()
    except FileError as error:
        return type(error)


Marks = dict[str, tuple[int, int]]


def marks(folder: Path) -> Marks:
    """Return the inode of every path under a folder, and the modification time of every file."""
    found: Marks = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_ino, 0 if path.is_dir() else status.st_mtime_ns)
    return found


def aside(files: DirectoryFilesystem) -> list[str]:
    """Return the paths in each process's folder in `at-work`, inside the staging folder."""
    return [str(path) for path in files.staging.glob("at-work/*/*")]
