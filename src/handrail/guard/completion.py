"""Completion checkers: they hold a run that stops too early and say what is missing, up to a cap."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from handrail.errors import DefinitionError
from handrail.guard.feedback import CAP, RunState

if TYPE_CHECKING:
    from handrail.resources.shell import Shell


class CompletionChecker(Protocol):
    """Decides whether a run may end. An exception in it is reported, and the run continues."""

    @property
    def name(self) -> str: ...
    @property
    def cap(self) -> int:
        """How often it may hold one run. After that the run ends as it is."""
        ...

    def missing(self, state: RunState, /) -> str | Awaitable[str | None] | None:
        """What is still to be done, for the model; None if the run is complete."""
        ...


@dataclass(frozen=True, slots=True)
class FilesThere:
    """Complete once these files exist and are not empty."""

    paths: tuple[str, ...]
    cap: int = CAP
    name: str = "files"

    def __init__(self, *paths: str, cap: int = CAP, name: str = "files") -> None:
        if not paths:
            raise DefinitionError("FilesThere() names no file. Give at least one.")
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "cap", cap)
        object.__setattr__(self, "name", name)

    def missing(self, state: RunState, /) -> str | None:
        files = state.filesystem
        if files is None:
            raise DefinitionError("FilesThere needs files. Give the run a filesystem.")
        absent = [path for path in self.paths if not files.exists(path)]
        empty = [path for path in self.paths if path not in absent and files.stat(path).size == 0]
        said = [f"not there: {', '.join(absent)}"] if absent else []
        said += [f"empty: {', '.join(empty)}"] if empty else []
        return f"Files are still to be written ({'; '.join(said)})." if said else None


@dataclass(frozen=True, slots=True)
class OutputFilled:
    """Complete once these fields of the structured output are filled."""

    fields: tuple[str, ...]
    cap: int = CAP
    name: str = "output"

    def __init__(self, *fields: str, cap: int = CAP, name: str = "output") -> None:
        if not fields:
            raise DefinitionError("OutputFilled() names no field. Give at least one.")
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "cap", cap)
        object.__setattr__(self, "name", name)

    def missing(self, state: RunState, /) -> str | None:
        empty = [field for field in self.fields if _field(state.output, field) in (None, "", (), [], {})]
        return f"These fields of the answer are empty: {', '.join(empty)}. Fill them." if empty else None


def _field(output: Any, field: str) -> Any:
    if not hasattr(output, field):
        raise DefinitionError(
            f"OutputFilled: a {type(output).__name__} has no field {field!r}. Name fields of the prompt's output."
        )
    return getattr(output, field)


class CommandPassing:
    """Complete once this command exits with 0. It runs on a fork of the files and changes none of them.

    A command that can't run at all has not passed: the model is told so, and the run does not end as done.
    """

    def __init__(self, shell: Shell, *argv: str, cap: int = CAP, name: str = "command") -> None:
        if not argv:
            raise DefinitionError(
                "CommandPassing(shell) runs nothing. Give the command: CommandPassing(shell, 'make')."
            )
        shell.rules.check(argv)
        self._shell = shell
        self._argv = argv
        self.cap = cap
        self.name = name

    async def missing(self, state: RunState, /) -> str | None:
        files: Any = state.filesystem
        if files is None:
            raise DefinitionError("CommandPassing needs files. Give the run a filesystem.")
        from handrail.resources.shell.shell_errors import ShellError

        fork = files.fork(self.name)
        try:
            finished = await self._shell.run_on(fork, self._argv, keep=False)
        except ShellError as error:
            return f"This must pass, but it could not run: {error}"
        finally:
            fork.drop()
        return None if finished.ok else f"This must pass: {finished.render()}"


class _Composed:
    """Several checkers as one."""

    def __init__(self, checkers: tuple[CompletionChecker, ...], cap: int, how: str) -> None:
        if not checkers:
            raise DefinitionError(f"{how}_of() has nothing to check. Give at least one checker.")
        self.checkers = checkers
        self.cap = cap
        self.name = f"{how} of ({', '.join(checker.name for checker in checkers)})"

    async def _each(self, state: RunState) -> list[str | None]:
        return [await answer_of(checker.missing(state)) for checker in self.checkers]


class _AllOf(_Composed):
    async def missing(self, state: RunState, /) -> str | None:
        return " ".join(said for said in await self._each(state) if said) or None


class _AnyOf(_Composed):
    async def missing(self, state: RunState, /) -> str | None:
        missing = await self._each(state)
        return None if not all(missing) else "One of these must hold. " + " Or: ".join(filter(None, missing))


def all_of(*checkers: CompletionChecker, cap: int = CAP) -> CompletionChecker:
    """Complete once every one of them is."""
    return _AllOf(checkers, cap, "all")


def any_of(*checkers: CompletionChecker, cap: int = CAP) -> CompletionChecker:
    """Complete once one of them is."""
    return _AnyOf(checkers, cap, "any")


async def answer_of(answer: Any) -> str | None:
    """The answer of a provider or checker, awaited if need be."""
    return await answer if inspect.isawaitable(answer) else answer
