"""Filesystems of either kind, for what both must do: in memory, and on a real folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from handrail.resources.directory import DirectoryFilesystem, DirectoryFork
from handrail.resources.memory import MemoryFilesystem, MemoryFork

Root = MemoryFilesystem | DirectoryFilesystem
AFork = MemoryFork | DirectoryFork
Files = Root | AFork


class NewFiles(Protocol):
    """Makes a filesystem with these files in it."""

    def __call__(self, files: Mapping[str, str | bytes] = {}, /, **options: Any) -> Any: ...


def fill(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a real folder, past everything of ours."""
    for path, content in files.items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(content.encode() if isinstance(content, str) else content)


class Folders:
    """Makes real folders with filesystems on them, and closes those."""

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
    """Makes real folders with filesystems on them."""
    made = Folders(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["memory", "directory"])
def new_files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NewFiles]:
    """Makes filesystems of either kind."""
    if request.param == "memory":
        yield lambda files={}, /, **options: MemoryFilesystem(files, **options)
    else:
        made = Folders(tmp_path)
        yield made
        made.close()
