"""What is wrong with a folder of workers: where, what, and the mend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from handrail.errors import WorkerError

Refuse = Callable[[str, str, str], None]
"""Called with a place in the front matter, what is wrong there, and the mend."""


class WorkerProblem(msgspec.Struct, frozen=True):
    """One thing wrong in one file."""

    file: str
    line: int
    problem: str
    mend: str
    column: int | None = None

    def __str__(self) -> str:
        stop = "" if self.problem.endswith("?") else "."
        return f"{self.file}:{self.line}: {self.problem}{stop} {self.mend}"


class Finder:
    """Collects what is wrong with one file."""

    def __init__(self, file: Path | str) -> None:
        self.file = str(file)
        self.problems: list[WorkerProblem] = []

    def add(self, line: int, problem: str, mend: str, column: int | None = None) -> None:
        self.problems.append(WorkerProblem(self.file, line, problem.rstrip("."), mend, column))


def refuse(problems: Iterable[WorkerProblem]) -> WorkerError:
    """All of it as one error."""
    found = sorted(problems, key=lambda each: (each.file, each.line))
    return WorkerError("\n".join(map(str, found)), found)
