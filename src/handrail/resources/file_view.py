"""`FileView`: a call's files as its handler and its policies see them, without the steps of a commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from handrail.protocols import FileInfo, Filesystem, Match


class FileView:
    """The verbs of a call's fork of the files, and nothing else.

    Only the gate commits or drops the fork. `fork_behind` returns it to the parts of Handrail that need more than the verbs.
    """

    __slots__ = ("_fork",)

    def __init__(self, fork: Filesystem) -> None:
        self._fork: Any = fork

    def read(self, path: str, /) -> str:
        return self._fork.read(path)

    def read_bytes(self, path: str, /) -> bytes:
        return self._fork.read_bytes(path)

    def write(self, path: str, content: str | bytes, /) -> None:
        self._fork.write(path, content)

    def append(self, path: str, content: str | bytes, /) -> None:
        self._fork.append(path, content)

    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        return self._fork.edit(path, old, new, all=all)

    def list(self, path: str = ".", /) -> Sequence[FileInfo]:
        return self._fork.list(path)

    def glob(self, pattern: str, /) -> Sequence[str]:
        return self._fork.glob(pattern)

    def grep(self, pattern: str, /, *, glob: str = "**") -> Iterable[Match]:
        return self._fork.grep(pattern, glob=glob)

    def stat(self, path: str, /) -> FileInfo:
        return self._fork.stat(path)

    def exists(self, path: str, /) -> bool:
        return self._fork.exists(path)

    def delete(self, path: str, /, *, recursive: bool = False) -> None:
        self._fork.delete(path, recursive=recursive)

    def mkdir(self, path: str, /) -> None:
        self._fork.mkdir(path)

    def move(self, source: str, target: str, /) -> None:
        self._fork.move(source, target)


class LinkedFileView(FileView):
    """A view of files that may contain links."""

    __slots__ = ()

    def resolved(self, path: str, /) -> str:
        """Return where a path leads: normalized, with every link resolved."""
        return self._fork.resolved(path)


def fork_behind(files: Any) -> Any:
    """Return the fork behind a view of files. Anything else is returned as it is."""
    return files._fork if isinstance(files, FileView) else files  # pyright: ignore[reportPrivateUsage]  # the seam to it
