"""Custom resources that take part in transactions: keys with texts, in memory or in a folder."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from handrail.errors import Conflict, ContextExpired
from handrail.protocols import Fork


class Shelf(Protocol):
    """Texts by key. A key that nobody has written has the text ""."""

    def read(self, key: str, /) -> str: ...
    def write(self, key: str, text: str, /) -> None: ...


class MemoryShelf:
    """A shelf in memory. It says nothing about claims, so it is shared within one process only."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[int, str]] = {}

    def fork(self, owner: str, /, *, writable: bool = True) -> ShelfFork:
        return ShelfFork(self, owner)

    def look(self, key: str) -> tuple[int, str]:
        """Return a key's version and text."""
        return self._texts.get(key, (0, ""))

    def put(self, key: str, text: str) -> None:
        self._texts[key] = (self.look(key)[0] + 1, text)

    def read(self, key: str) -> str:
        return self.look(key)[1]


class FolderShelf(MemoryShelf):
    """A shelf in a folder, which processes share: `claim` takes a lock of the folder from the check to the change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    @contextlib.asynccontextmanager
    async def claim(self, reads: Sequence[str], writes: Sequence[str], /) -> AsyncGenerator[None]:
        lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX if writes else fcntl.LOCK_SH)
            yield
        finally:
            os.close(lock)

    def look(self, key: str) -> tuple[int, str]:
        try:
            version, _, text = (self._folder / key).read_text().partition("\n")
        except FileNotFoundError:
            return 0, ""
        return int(version), text

    def put(self, key: str, text: str) -> None:
        new = self._folder / f".{key}.{os.getpid()}.{threading.get_ident()}"
        new.write_text(f"{self.look(key)[0] + 1}\n{text}")
        new.replace(self._folder / key)


class ShelfFork(Fork):
    """One call's own version of a shelf."""

    __slots__ = ("_is_open", "_outer", "_owner", "_texts", "_versions")

    def __init__(self, outer: MemoryShelf | ShelfFork, owner: str) -> None:
        self._outer, self._owner, self._is_open = outer, owner, True
        self._versions: dict[str, tuple[int, str]] = {}
        self._texts: dict[str, str] = {}

    def fork(self, owner: str, /, *, writable: bool = True) -> ShelfFork:
        return ShelfFork(self, owner)

    def look(self, key: str) -> tuple[int, str]:
        self._check()
        if key in self._texts:
            return -1, self._texts[key]
        return self._versions.setdefault(key, self._outer.look(key))

    def put(self, key: str, text: str) -> None:
        self._texts[key] = text

    def read(self, key: str) -> str:
        return self.look(key)[1]

    def write(self, key: str, text: str) -> None:
        self._check()
        self._texts[key] = text

    def _check(self) -> None:
        if not self._is_open:
            raise ContextExpired(self._owner)

    def stale(self) -> Sequence[str]:
        return [key for key, version in self._versions.items() if self._outer.look(key) != version]

    def prepare(self) -> None:
        self._is_open = False
        if stale := self.stale():
            raise Conflict(stale)

    def apply(self) -> None:
        for key, text in self._texts.items():
            self._outer.put(key, text)

    def drop(self) -> None:
        self._is_open = False

    def read_places(self) -> Sequence[str]:
        return list(self._versions)

    def written_places(self) -> Sequence[str]:
        return list(self._texts)
