"""Feedback for the model during a run.

Feedback providers give advice after calls, on a trigger. Completion checkers keep a run from ending too early, and
say what is missing. Both have a cap on how often they may speak.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from handrail.concurrency.cancellation import finish, open_scope
from handrail.concurrency.deadline import Deadline, is_span
from handrail.concurrency.threads import run_in_thread
from handrail.concurrency.user_code import isolated
from handrail.errors import DefinitionError
from handrail.protocols import Filesystem, SessionView
from handrail.resources.staging import fork_behind
from handrail.schema.problems import describe_kind

if TYPE_CHECKING:
    from handrail.resources.shell import Shell

log = logging.getLogger("handrail.guard")

CAP = 3
"""The default cap of a completion checker."""


class RunState(msgspec.Struct, frozen=True):
    """The state of a run, as feedback providers and completion checkers see it."""

    session: SessionView
    calls: int
    """The number of calls that the run's model has made so far."""
    seconds: float
    """Seconds since the run began or was last resumed."""
    given: int
    """The number of times that this provider or checker has spoken in this run."""
    deadline: Deadline | None = None
    left: Mapping[str, float] = {}
    """The amount that remains of each limited unit of the budget."""
    spent: Mapping[str, float] = {}
    filesystem: Filesystem | None = None
    text: str = ""
    """For a completion checker, the text of the model's answer; otherwise ""."""
    output: Any = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """The conditions for advice: every `calls` calls, every `seconds` seconds, or after an event of the type `event`.

    They are checked after each turn of calls. Any one of them is enough.
    """

    calls: int | None = None
    seconds: float | None = None
    event: type | None = None

    def __post_init__(self) -> None:
        if self.calls is None and self.seconds is None and self.event is None:
            raise DefinitionError("a trigger without a condition never fires. Pass calls, seconds, or event.")
        if self.calls is not None and self.calls < 1:
            raise DefinitionError(
                f"a trigger can't fire every {self.calls!r} calls. Pass a whole number of at least 1."
            )
        if self.seconds is not None and not is_span(self.seconds):
            raise DefinitionError(
                f"a trigger can't fire every {self.seconds!r} seconds. Pass a positive number."
            )


class FeedbackProvider(Protocol):
    """A provider of advice after a turn of calls. If it raises, the error is reported and the run continues."""

    @property
    def name(self) -> str: ...
    @property
    def trigger(self) -> Trigger: ...
    @property
    def cap(self) -> int:
        """Maximum number of times that the provider may speak in one run."""
        ...

    def advise(self, state: RunState, /) -> str | Awaitable[str | None] | None:
        """Return the advice for the model, or None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class DeadlineFeedback:
    """A provider that tells the model how much time is left, once for each threshold in `at` (seconds left)."""

    at: Sequence[float] = (300.0, 60.0, 15.0)
    name: str = "deadline"
    trigger: Trigger = field(default=Trigger(calls=1))

    @property
    def cap(self) -> int:
        return len(self.at)

    def advise(self, state: RunState, /) -> str | None:
        if state.deadline is None:
            return None
        left = state.deadline.remaining()
        if sum(left <= mark for mark in self.at) <= state.given:
            return None
        return f"About {max(left, 0):.0f} seconds are left. Do what matters most, then finish."


@dataclass(frozen=True, slots=True)
class BudgetFeedback:
    """A provider that tells the model how much of its budget is left, once for each threshold in `at` (fraction spent)."""

    at: Sequence[float] = (0.5, 0.8, 0.95)
    name: str = "budget"
    trigger: Trigger = field(default=Trigger(calls=1))

    @property
    def cap(self) -> int:
        return len(self.at)

    def advise(self, state: RunState, /) -> str | None:
        used = {unit: _fraction(state, unit) for unit in state.left}
        if not used or sum(max(used.values()) >= mark for mark in self.at) <= state.given:
            return None
        left = ", ".join(f"{unit.replace('_', ' ')}: {state.left[unit]:g}" for unit in used)
        return f"Remaining budget: {left}. Do what matters most, then finish."


def _fraction(state: RunState, unit: str) -> float:
    spent, left = state.spent.get(unit, 0.0), max(state.left[unit], 0.0)
    return spent / (spent + left) if spent + left else 1.0


class CompletionChecker(Protocol):
    """Checks whether a run may end.

    A checker that raises also keeps the run from ending, because something may be missing. The model sees the error.
    """

    @property
    def name(self) -> str: ...
    @property
    def cap(self) -> int:
        """Maximum number of times that the checker may keep one run from ending. After that, the run may end although something is missing."""
        ...

    def missing(self, state: RunState, /) -> str | Awaitable[str | None] | None:
        """Return what is still missing, as text for the model; None if the run is complete."""
        ...


class FilesThere:
    """A checker that lets a run end once these files exist and are not empty."""

    def __init__(self, *paths: str, cap: int = CAP, name: str = "files") -> None:
        if not paths:
            raise DefinitionError("FilesThere() names no file. Pass at least one.")
        self.paths, self.cap, self.name = paths, cap, name

    def missing(self, state: RunState, /) -> str | None:
        files = state.filesystem
        if files is None:
            raise _no_files("FilesThere")
        absent = [path for path in self.paths if not files.exists(path)]
        empty = [path for path in self.paths if path not in absent and files.stat(path).size == 0]
        said = [f"not there: {', '.join(absent)}"] if absent else []
        said += [f"empty: {', '.join(empty)}"] if empty else []
        return f"Files are still to be written ({'; '.join(said)})." if said else None


def _no_files(checker: str) -> DefinitionError:
    return DefinitionError(
        f"{checker} needs files. Give the run a filesystem: pass filesystem=..., or bind one with the scope 'run'."
    )


class OutputFilled:
    """A checker that lets a run end once none of these fields of the structured output is empty."""

    def __init__(self, *fields: str, cap: int = CAP, name: str = "output") -> None:
        if not fields:
            raise DefinitionError("OutputFilled() names no field. Pass at least one.")
        self.fields, self.cap, self.name = fields, cap, name

    def missing(self, state: RunState, /) -> str | None:
        empty = [field for field in self.fields if _field(state.output, field) in (None, "", (), [], {})]
        return f"These fields of the answer are empty: {', '.join(empty)}. Fill them." if empty else None


def _field(output: Any, field: str) -> Any:
    if not hasattr(output, field):
        raise DefinitionError(
            f"OutputFilled: {describe_kind(output)} has no field {field!r}. Name fields of the prompt's output."
        )
    return getattr(output, field)


class CommandPassing:
    """A checker that lets a run end once this command exits with 0.

    The command runs on a fork of the run's files, which is dropped afterwards. A command that can't run at all
    has not passed, and the model is told why.
    """

    def __init__(self, shell: Shell, *argv: str, cap: int = CAP, name: str = "command") -> None:
        if not argv:
            raise DefinitionError(
                "CommandPassing(shell) runs nothing. Pass the command: CommandPassing(shell, 'make')."
            )
        shell.rules.check(argv)
        self._shell = shell
        self._argv = argv
        self.cap = cap
        self.name = name

    async def missing(self, state: RunState, /) -> str | None:
        files: Any = state.filesystem
        if files is None:
            raise _no_files("CommandPassing")
        from handrail.resources.shell.shell_errors import ShellError

        fork = fork_behind(files).fork(self.name)
        try:
            finished = await self._shell.run_on(fork, self._argv, keep=False)
        except ShellError as error:
            return f"This must pass, but it could not run: {error}"
        finally:
            await finish(run_in_thread(fork.drop))  # the command may have made any number of files
        return None if finished.ok else f"This must pass: {finished.render()}"


class _Composed:
    """A checker that combines other checkers."""

    def __init__(self, checkers: tuple[CompletionChecker, ...], cap: int, how: str) -> None:
        if not checkers:
            raise DefinitionError(f"{how}_of() has nothing to check. Pass at least one checker.")
        self.checkers = checkers
        self.cap = cap
        self.name = f"{how} of ({', '.join(checker.name for checker in checkers)})"

    async def _each(self, state: RunState) -> list[str | None]:
        """Return what each checker says is missing; None or "" if nothing is. All are asked, even if one raises."""
        found: list[str | None] = []
        for checker in self.checkers:
            said = await ask(checker.name, partial(checker.missing, state))
            found.append(could_not_check(checker.name, said.problem) if said.problem else said.text)
        return found


class _AllOf(_Composed):
    async def missing(self, state: RunState, /) -> str | None:
        return " ".join(said for said in await self._each(state) if said) or None


class _AnyOf(_Composed):
    async def missing(self, state: RunState, /) -> str | None:
        missing = await self._each(state)
        return None if not all(missing) else "One of these must hold. " + " Or: ".join(filter(None, missing))


def all_of(*checkers: CompletionChecker, cap: int = CAP) -> CompletionChecker:
    """Return a checker that lets a run end once all of these checkers do."""
    return _AllOf(checkers, cap, "all")


def any_of(*checkers: CompletionChecker, cap: int = CAP) -> CompletionChecker:
    """Return a checker that lets a run end once one of these checkers does."""
    return _AnyOf(checkers, cap, "any")


class Reply(msgspec.Struct, frozen=True):
    """The reply from a feedback provider or a completion checker."""

    text: str | None = None
    """The advice, or what is missing; None or "" for nothing."""
    problem: str = ""
    """Why the provider or checker gave no answer; "" if it gave one."""


async def ask(name: str, asked: Callable[[], Any]) -> Reply:
    """Ask a provider or checker. If it raises, or returns neither text nor None, the reply's `problem` says so.

    Only a cancellation of the current task and exceptions such as `SystemExit` are raised here.
    """
    scope = open_scope()
    try:
        said = await isolated(_said(asked))
    except asyncio.CancelledError:
        if scope.interrupted:
            raise
        return Reply(problem="it awaited something that was cancelled")
    except Exception as error:
        from handrail.text.raised_errors import in_short

        log.exception("the feedback provider or completion checker %r raised an error", name)
        return Reply(problem=in_short(error))
    if said is None or isinstance(said, str):
        return Reply(said)
    return Reply(problem=f"it returned {describe_kind(said)} instead of a text or None")


async def _said(asked: Callable[[], Any]) -> Any:
    said = asked()
    return await said if inspect.isawaitable(said) else said


def could_not_check(name: str, why: str) -> str:
    """Return a sentence that tells the model why a checker gave no answer."""
    return f"The check {name!r} failed: {why.rstrip('.')}."
