"""The world outside a process, where effects are permanent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple


class Happening(NamedTuple):
    """An event outside, and which process of the simulation caused it."""

    what: str
    process: int
    """0 for the first process, which crashes; one more for each restart."""
    details: dict[str, Any]


class World:
    """What happened, in order, in a file that outlives every process.

    Each line is written with one system call, so a crash leaves it whole or not there at all.
    """

    def __init__(self, path: Path, process: int = 0) -> None:
        self.path = path
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def happened(self, what: str, /, **details: Any) -> None:
        """Record something that no rollback undoes: a payment, a mail, something shown to a person."""
        os.write(self._file, json.dumps([what, self.process, details], default=str).encode() + b"\n")

    def all(self, what: str | None = None, /, **details: Any) -> list[Happening]:
        """Return the events of this kind with these details, oldest first."""
        lines = self.path.read_bytes().splitlines()
        found = [Happening(*json.loads(line)) for line in lines]
        return [
            each
            for each in found
            if (what is None or each.what == what) and details.items() <= each.details.items()
        ]

    def count(self, what: str, /, **details: Any) -> int:
        """Return how often it happened."""
        return len(self.all(what, **details))

    def close(self) -> None:
        os.close(self._file)
