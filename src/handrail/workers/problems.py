"""`WorkerProblem`: what is wrong with a folder of workers, by file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from handrail.errors import WorkerError

Refuse = Callable[[str, str, str], None]
"""Called with a place in the front matter, what is wrong there, and a hint."""


class WorkerProblem(msgspec.Struct, frozen=True):
    """One thing wrong in one file."""

    file: str
    line: int
    problem: str
    hint: str
    column: int | None = None

    def __str__(self) -> str:
        stop = "" if self.problem.endswith("?") else "."
        return f"{self.file}:{self.line}: {self.problem}{stop} {self.hint}"


class Finder:
    """Collects the problems of one file."""

    def __init__(self, file: Path | str) -> None:
        self.file = str(file)
        self.problems: list[WorkerProblem] = []

    def add(self, line: int, problem: str, hint: str, column: int | None = None) -> None:
        self.problems.append(WorkerProblem(self.file, line, problem.rstrip("."), hint, column))


def refuse(problems: Iterable[WorkerProblem]) -> WorkerError:
    """All problems as one error."""
    found = sorted(problems, key=lambda each: (each.file, each.line))
    return WorkerError("\n".join(map(str, found)), found)


def needed(module: str) -> Any:
    """Import a module of the extra `workers`. Raises `WorkerError` where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != missing:
            raise
        raise WorkerError(
            f"workers need {missing}, which is not installed. Run `pip install 'handrail[workers]'`."
        ) from None
