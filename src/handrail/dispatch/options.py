"""`RunOptions`: everything one run is given, from the public call to the gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.deadline import Deadline, is_span
from handrail.errors import DefinitionError
from handrail.ids import NewId, random_id
from handrail.journals import Journal
from handrail.limits import Budget, BudgetTracker, Lease
from handrail.protocols import ApprovalBroker, Environment, EventBus, Filesystem, WorkerSource
from handrail.session import Session

if TYPE_CHECKING:
    from handrail.guard.approval import ApprovalMode
    from handrail.messages import Message
    from handrail.resources.bindings import Binding
    from handrail.tools import Tool

DEPTH_LIMIT = 5


class SharedArguments(TypedDict, total=False):
    """Arguments of everything that opens a gate."""

    filesystem: Filesystem | None
    """The files its tools work on."""
    resources: Iterable[Binding[Any]]
    """What its tools find with `context.resources.get(...)`."""
    environment: Environment | None
    """Who is on the other side; None: nobody."""
    approvals: ApprovalMode | ApprovalBroker | None
    """Who decides about approvals; None for the person who is there, if any."""


class ResumeArguments(SharedArguments, total=False):
    """Arguments of `resume` and `resume_stream`. They replace what the adapter has."""

    session: Session | None
    """An empty session under the old id, for slices with rules of their own."""
    bus: EventBus | None
    """Hears every event of the run."""
    journal: Journal | None
    """Where the run is recorded."""
    tools: Sequence[Tool[Any, Any]]
    """Added to the prompt's tools for this run alone, under its policies."""


class RunArguments(ResumeArguments, total=False):
    """Arguments of `evaluate`, `stream` and `run`. They replace what the adapter has."""

    history: Iterable[Message]
    """What was said before; it goes in front of the message."""
    opened: Sequence[str]
    """Paths of sections that are shown in full from the start."""
    deadline: Deadline | None
    budget: Budget | BudgetTracker | None
    temperature: float | None
    max_tokens: int | None
    """Limit of each answer of the model."""
    run_id: str | None
    app: str
    """Where a resumed run finds its prompt: `module:name`."""


class GuardArguments(SharedArguments, total=False):
    """Arguments of everything that decides how long its tools may wait and how deep they may nest."""

    approval_seconds: float | None
    """How long an approval may take; None: for ever."""
    depth_limit: int
    clock: Clock


class HostArguments(GuardArguments, total=False):
    """Arguments of `Adapter`: what all of its runs have unless they are given something else."""

    journal: Journal | None
    """Where runs are recorded, so that they can be resumed."""
    lease: Lease | None
    new_id: NewId


class GateArguments(HostArguments, total=False):
    """Arguments of `open_gate`."""

    session: Session | None
    deadline: Deadline | None
    budget: Budget | BudgetTracker | None


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One run's options. Frozen: `updated`, `tightened` and `nested` give new ones."""

    session: Session | None = None
    bus: EventBus | None = None
    environment: Environment | None = None
    approvals: ApprovalMode | ApprovalBroker | None = None
    approval_seconds: float | None = None
    filesystem: Filesystem | None = None
    resources: tuple[Binding[Any], ...] = ()
    workers: WorkerSource | None = None

    deadline: Deadline | None = None
    budget: Budget | BudgetTracker | None = None
    depth_limit: int = DEPTH_LIMIT

    journal: Journal | None = None
    lease: Lease | None = None
    clock: Clock = SYSTEM_CLOCK
    new_id: NewId = random_id

    # The run's own: nothing nested in it inherits these.
    run_id: str | None = None
    app: str = ""
    params: object = None
    message: str | None = None
    history: tuple[Message, ...] = ()
    opened: tuple[str, ...] = ()
    tools: tuple[Tool[Any, Any], ...] = ()
    temperature: float | None = None
    max_tokens: int | None = None

    def updated(self, verb: str, kind: type, arguments: Mapping[str, Any]) -> RunOptions:
        """These options with the arguments of a call; None and left out mean the same.

        `kind` is the `TypedDict` that says which arguments `verb` takes. Any other is a `TypeError`
        that names it. Resources are added to those there are.
        """
        if not arguments:
            return self
        known: Mapping[str, Any] = kind.__annotations__
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(sorted(known))}."
                raise TypeError(f"{verb} takes no argument {name!r}.{hint}")
            if name == "journal" and isinstance(value, str | Path):
                raise DefinitionError(
                    f"journal is a {type(value).__name__}. Open it: journal=SqliteJournal({str(value)!r})."
                )
            if value is not None:
                given[name] = _frozen(name, value)
        if "resources" in given:
            given["resources"] = (*self.resources, *given["resources"])
        return self.replace(**given)

    def replace(self, **changes: Any) -> RunOptions:
        """These options with some of them changed."""
        return msgspec.structs.replace(self, **changes)

    # Limits.

    def tightened(
        self, *, deadline: Deadline | None = None, budget: Budget | None = None, levels: int | None = None
    ) -> RunOptions:
        """These options with further limits. Of two limits the tighter one holds.

        `levels` is how deep calls may nest below a run at the root.
        """
        return self.replace(
            deadline=_earlier(self.deadline, deadline),
            budget=_smaller(self.budget, budget),
            depth_limit=_shallower(self.depth_limit, 0, levels),
        )

    def nested(
        self, given: RunOptions, tracker: BudgetTracker, depth: int, levels: int | None = None
    ) -> RunOptions:
        """The options of a run inside a call of this one.

        It inherits session, people, files, resources, journal, lease and clock. Its limits can only be
        tighter: the earlier deadline, a share of what this run may spend (`tracker`), and at most
        `levels` below `depth`, the depth of its calls. `given` says what it is about, and its workers.
        """
        budget = given.budget
        if isinstance(budget, BudgetTracker):
            raise DefinitionError("budget is a BudgetTracker. Give a run inside a call a Budget of its own.")
        limited = budget is not None or self.budget is not None
        return given.replace(
            session=self.session,
            environment=self.environment,
            approvals=self.approvals,
            approval_seconds=self.approval_seconds,
            filesystem=self.filesystem,
            resources=self.resources,
            deadline=_earlier(self.deadline, given.deadline),
            budget=tracker.share(budget) if limited else None,
            depth_limit=_shallower(self.depth_limit, depth, levels),
            journal=self.journal,
            lease=self.lease,
            clock=self.clock,
            new_id=self.new_id,
        )

    # Checks, for callers who are not typed.

    def check(self) -> None:
        """Raise `DefinitionError` for the option that can't be used."""
        check_kinds(
            session=(self.session, Session, "a Session"),
            filesystem=(self.filesystem, Filesystem, _A_FILESYSTEM),
            deadline=(self.deadline, Deadline, "a Deadline, for example Deadline.after(60)"),
            budget=(self.budget, (Budget, BudgetTracker), "a Budget, for example Budget(tool_calls=100)"),
        )
        _check_environment(self.environment)
        if type(self.depth_limit) is not int or self.depth_limit < 0:
            raise DefinitionError(
                f"a depth limit of {self.depth_limit!r} is not possible. Give a whole number of at least 0."
            )
        if self.approval_seconds is not None and not is_span(self.approval_seconds):
            raise DefinitionError(
                f"approval_seconds is {self.approval_seconds!r}. "
                "Give a positive number of seconds after which nobody may approve any more, or None to wait."
            )


_A_FILESYSTEM = "a Filesystem: DirectoryFilesystem('folder') or MemoryFilesystem()"


def check_kinds(**given: tuple[object, Any, str]) -> None:
    """Raise `DefinitionError` for the first value of the wrong kind. None is always allowed."""
    for name, (value, kind, wanted) in given.items():
        if value is not None and (isinstance(value, str | bytes) or not isinstance(value, kind)):
            raise DefinitionError(f"{name} is a {type(value).__name__}. Give {wanted}.")


def _check_environment(environment: Any) -> None:
    if isinstance(environment, type):
        raise DefinitionError(
            f"environment is the class {environment.__name__}. Make one: {environment.__name__}()."
        )
    if environment is not None and not isinstance(environment, Environment):
        raise DefinitionError(
            f"environment is a {type(environment).__name__}, and nobody can be asked through it. "
            "Give an Environment, a class of your own derived from it; in tests, Person(approve=True)."
        )


def _frozen(name: str, value: Any) -> Any:
    """Return an argument as the options hold it: iterables become tuples."""
    if name == "opened" and isinstance(value, str):
        return (value,)
    return tuple(value) if name in ("resources", "history", "opened", "tools") else value


def _earlier(outer: Deadline | None, own: Deadline | None) -> Deadline | None:
    return own if outer is None or (own is not None and own.at < outer.at) else outer


def _smaller(outer: Budget | BudgetTracker | None, own: Budget | None) -> Budget | BudgetTracker | None:
    if own is None or outer is None:
        return own or outer
    if isinstance(outer, BudgetTracker):
        return outer.share(own)
    both = [outer.limits(), own.limits()]
    least: dict[str, Any] = {
        unit: min(limits[unit] for limits in both if unit in limits) for unit in {*both[0], *both[1]}
    }
    return Budget(**least)


def _shallower(limit: int, depth: int, levels: int | None) -> int:
    return limit if levels is None else min(limit, depth + levels)
