"""Problems in a folder of workers, each with its file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from handrail.errors import WorkerError
from handrail.text.spelling import nearest

Refuse = Callable[[str, str, str], None]
"""A function that reports a problem, given its place in the front matter, what is wrong there, and a hint."""


class WorkerProblem(msgspec.Struct, frozen=True):
    """One problem in a worker's file, or in `tools.py`."""

    file: str
    line: int
    problem: str
    hint: str
    column: int | None = None

    def __str__(self) -> str:
        stop = "" if self.problem.endswith("?") else "."
        return f"{self.file}:{self.line}: {self.problem}{stop} {self.hint}"


class Finder:
    """Collects the problems in one file."""

    def __init__(self, file: Path | str) -> None:
        self.file = str(file)
        self.problems: list[WorkerProblem] = []

    def add(self, line: int, problem: str, hint: str, column: int | None = None) -> None:
        self.problems.append(WorkerProblem(self.file, line, problem.rstrip("."), hint, column))


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the name that was probably meant, or all known names."""
    near = nearest(name, known)
    return f"Did you mean {near!r}?" if near else f"There are: {', '.join(known) or 'none'}."


def refuse(problems: Iterable[WorkerProblem]) -> WorkerError:
    """Create one error from all problems, sorted by file and line."""
    found = sorted(problems, key=lambda each: (each.file, each.line))
    return WorkerError("\n".join(map(str, found)), found)
