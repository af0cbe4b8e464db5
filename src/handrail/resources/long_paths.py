"""Paths of any length. A system call accepts fewer than 4096 bytes, but deeply nested files can have longer paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator

PART = 3800
"""Maximum bytes of a path that are passed to one system call. A name of 255 bytes can be added to it."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def reach(path: str | os.PathLike[str]) -> Generator[str]:
    """Provide a path that a system call accepts and that leads to the same file, while the block runs.

    A short path is provided unchanged. For a long one, the folders above the file are opened, but not the file. So the
    file need not exist, and `reach` does not follow it if it is a link.
    """
    given = os.fspath(path)
    if len(os.fsencode(given)) <= PART:
        yield given
        return
    folder, name = os.path.split(given)
    here = -1
    try:
        for part in parts_of(os.fsencode(folder)):
            inner = os.open(part, _FOLDER, dir_fd=None if here < 0 else here)
            if here >= 0:
                os.close(here)
            here = inner
        yield f"/proc/self/fd/{here}/{name}"
    finally:
        if here >= 0:
            os.close(here)


def parts_of(path: bytes) -> Iterator[bytes]:
    """Split a path into parts that a system call accepts. Each part is relative to the one before it."""
    start = 0
    while len(path) - start > PART:
        end = path.rindex(b"/", start + 1, start + PART)
        yield path[start:end]
        start = end + 1
    yield path[start:]
