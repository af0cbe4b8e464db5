"""`RunOptions`: the options of a run, passed from the public call to the gate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.deadline import Deadline, is_span
from handrail.content import Attachment, AttachmentSource, attachments_of
from handrail.context.extras import NO_EXTRAS, Extras, ExtraValues
from handrail.errors import DefinitionError
from handrail.ids import TRACEPARENT, NewId, check_id, random_id
from handrail.journal.protocol import Journal
from handrail.journal.records import SpendCap
from handrail.messages import ModelSettings
from handrail.prompt.compact import Compact
from handrail.protocols import ApprovalBroker, Environment, EventBus, Filesystem, WorkerSource
from handrail.run.limits import Budget, BudgetTracker, Lease, Spend, caps_of
from handrail.schema.problems import describe_kind
from handrail.session import Session
from handrail.tools.definition import problem_with_limit

if TYPE_CHECKING:
    from handrail.guard.approval import ApprovalMode
    from handrail.guard.outer_policy import OuterPolicy
    from handrail.journal.local import LocalMessages
    from handrail.messages import Message
    from handrail.resources.bindings import Binding
    from handrail.tools import Tool

DEPTH_LIMIT = 5


@runtime_checkable
class RunFiles(Protocol):
    """Files opened when a run begins or is resumed and closed when it ends or is parked, such as a `Workspace`."""

    def opened(self, journal: Journal, run_id: str, /) -> AbstractAsyncContextManager[Filesystem]:
        """Open the files for a run until the block ends."""
        ...


@runtime_checkable
class Recoverable(Protocol):
    """Files whose commits can be finished from the journal after a crash."""

    def recover(self, journal: Journal, /) -> Awaitable[object]:
        """Apply the recorded commits whose process ended before it had applied them."""
        ...


class SharedArguments(TypedDict, total=False):
    """Arguments of every function that opens a gate. An argument that is None counts as not passed."""

    filesystem: Filesystem | RunFiles | None
    """The files that tools work on. A `Workspace` needs a run that is evaluated or resumed with a journal."""
    resources: Iterable[Binding[Any]]
    """The resources that tools find with `context.resources.get(...)`."""
    environment: Environment | None
    """The environment of the run, in which people can be asked. Without one, nobody is asked."""
    approvals: ApprovalMode | ApprovalBroker | None
    """The approval mode, or the broker that decides. Without either, a person in the environment is asked."""
    extras: ExtraValues
    """Values that tools find in `context.extras`, by their keys. To resume a run, pass its extras again."""


class _RootArguments(SharedArguments, total=False):
    """Arguments of every function that begins or resumes a run at the root."""

    bus: EventBus | None
    """A bus that receives every event of the run."""
    journal: Journal | None
    """The journal in which the run is recorded. Without one, it is not recorded and can't be resumed."""
    tools: Sequence[Tool[Any, Any]]
    """Tools that this run has in addition to the prompt's, under the prompt's policies."""
    spend: Spend | Iterable[Spend | SpendCap] | None
    """Caps on what is spent in a day, in addition to those of the adapter. They need a journal."""


class ResumeArguments(_RootArguments, total=False):
    """Arguments of `resume` and `resume_stream`. They take precedence over the adapter's own options."""

    session: Session | None
    """An empty session with the recorded id, if the run's session was created with its own slice rules."""


class RunArguments(_RootArguments, total=False):
    """Arguments of `evaluate`, `stream` and `run`. They take precedence over the adapter's own options."""

    session: Session | str | None
    """The session of the run, or the id of a session in the journal, whose conversation is continued, or begun if there is none.

    A conversation with a run that is parked or was interrupted is not continued by its id: the run raises `RunError`. Without it, a session is created.
    """
    history: Iterable[Message]
    """Earlier messages, placed before the new one."""
    attachments: Sequence[AttachmentSource]
    """Files that come with the message: attachments, paths on disk or http addresses."""
    opened: Sequence[str]
    """Paths of the sections that are shown in full from the start."""
    deadline: Deadline | None
    budget: Budget | BudgetTracker | None
    temperature: float | None
    max_tokens: int | None
    """Maximum number of tokens in each answer of the model."""
    model_settings: ModelSettings | None
    """How the model answers: reasoning effort, seed, stop texts and so on."""
    compact: Compact | None
    """When and how the conversation is compacted. By default, the prompt says it."""
    result_limit: int | None
    """Largest number of characters of a result that the model is shown whole. By default, the prompt or the run around it says it."""
    run_id: str | None
    traceparent: str | None
    """The span that starts the run, as W3C's `traceparent`. Without one, the run has a trace of its own, which follows from its id."""
    outer_policies: Sequence[OuterPolicy]
    """Policies of the run that began this one. What they deny stays denied."""
    app: str
    """Where a resumed run finds the prompt, as `module:name`."""


class GuardArguments(SharedArguments, total=False):
    """The shared arguments, and those that set how long approvals may take, how deep calls may nest, and the clock."""

    approval_seconds: float | None
    """How long an approval may take, in seconds. By default there is no limit."""
    depth_limit: int
    clock: Clock


class HostArguments(GuardArguments, total=False):
    """Arguments of `Adapter`: defaults for all of its runs."""

    journal: Journal | None
    """The journal in which runs are recorded, so that they can be resumed. Without one, they are not recorded."""
    lease: Lease | None
    new_id: NewId
    spend: Spend | Iterable[Spend | SpendCap] | None
    """Caps on what is spent in a day, by the runs of all processes that share the journal."""


class GateArguments(HostArguments, total=False):
    """Arguments of `open_gate`."""

    session: Session | None
    deadline: Deadline | None
    budget: Budget | BudgetTracker | None
    run_id: str | None
    traceparent: str | None
    """The span that starts the calls, as W3C's `traceparent`. Without one, they have a trace of their own, which follows from the run's id."""


class NestedArguments(TypedDict, total=False):
    """Arguments of a run inside a call. Limits can only be tighter than the call's own."""

    deadline: Deadline | None
    budget: Budget | None
    temperature: float | None
    max_tokens: int | None
    model_settings: ModelSettings | None
    """How the model answers. Settings that are None are inherited from the call, unless another model is passed."""
    compact: Compact | None
    """When and how the conversation is compacted. By default, the prompt says it."""
    result_limit: int | None
    """Largest number of characters of a result that the model is shown whole. By default, the prompt or the run around it says it."""
    opened: Sequence[str]
    attachments: Sequence[AttachmentSource]
    """Files that come with the message: attachments, paths on disk or http addresses."""
    resources: Iterable[Binding[Any]]
    """Resources of this run. Each replaces the call's resource with the same protocol."""
    extras: ExtraValues
    """Extras of this run. Each replaces the call's extra with the same key."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The options of one run. They are frozen: methods such as `updated` return a changed copy."""

    session: Session | None = None
    continues: bool = False
    """Whether what the journal has of the session is restored into it before the run begins."""
    bus: EventBus | None = None
    environment: Environment | None = None
    approvals: ApprovalMode | ApprovalBroker | None = None
    approval_seconds: float | None = None
    filesystem: Filesystem | RunFiles | None = None
    resources: tuple[Binding[Any], ...] = ()
    workers: WorkerSource | None = None
    extras: Extras = NO_EXTRAS
    outer_policies: tuple[OuterPolicy, ...] = ()
    """The policies of the runs around this one. What they deny stays denied."""

    deadline: Deadline | None = None
    budget: Budget | BudgetTracker | None = None
    depth_limit: int = DEPTH_LIMIT
    spend: tuple[SpendCap, ...] = ()
    """What may be spent in a day. All of these caps apply."""

    journal: Journal | None = None
    lease: Lease | None = None
    clock: Clock = SYSTEM_CLOCK
    new_id: NewId = random_id

    # For this run only. `nested` does not pass these on.
    run_id: str | None = None
    traceparent: str | None = None
    app: str = ""
    params: object = None
    message: str | None = None
    attachments: tuple[Attachment, ...] = ()
    history: tuple[Message, ...] = ()
    opened: tuple[str, ...] = ()
    tools: tuple[Tool[Any, Any], ...] = ()
    temperature: float | None = None
    max_tokens: int | None = None
    model_settings: ModelSettings | None = None
    compact: Compact | None = None
    result_limit: int | None = None
    messages: LocalMessages | None = None
    """What is said to a run without a journal while it works; None if nobody can say anything to it."""

    def updated(self, verb: str, kind: type, arguments: Mapping[str, Any], **own: Any) -> RunOptions:
        """Return these options updated with the arguments of a call. An argument that is None is ignored.

        `kind` is the `TypedDict` of the arguments that `verb` takes. Any other argument raises a `TypeError`
        that names it, and an invalid value raises a `DefinitionError`. Resources and extras are added to the
        existing ones. `own` are options that were checked before.
        """
        if not arguments and not own:
            return self
        check_names(verb, kind, arguments, _POSITIONAL.get(verb, ()))
        given = own
        for name, value in arguments.items():
            if value is not None:
                if name == "session" and kind is RunArguments and isinstance(value, str):
                    given["continues"] = True
                    value = Session(id=value, new_id=self.new_id)
                check_value(name, value)
                given[name] = _frozen(name, value)
        if "resources" in given:
            given["resources"] = (*self.resources, *given["resources"])
        if "extras" in given:
            given["extras"] = self.extras.merged(given["extras"])
        if "spend" in given:
            given["spend"] = both(self.spend, given["spend"])
        return self.replace(**given)

    def replace(self, **changes: Any) -> RunOptions:
        """Return these options with some of them changed."""
        return msgspec.structs.replace(self, **changes)

    # Limits.

    def tightened(
        self, *, deadline: Deadline | None = None, budget: Budget | None = None, levels: int | None = None
    ) -> RunOptions:
        """Return these options with further limits. The tighter of two limits applies.

        `levels` limits how deep calls may nest below a run at the root.
        """
        return self.replace(
            deadline=_earlier(self.deadline, deadline),
            budget=_smaller(self.budget, budget),
            depth_limit=_shallower(self.depth_limit, 0, levels),
        )

    def nested(
        self,
        given: RunOptions,
        tracker: BudgetTracker,
        depth: int,
        levels: int | None = None,
        policies: Iterable[OuterPolicy] = (),
    ) -> RunOptions:
        """Return the options of a run that is nested in one of this run's calls.

        `given` holds the nested run's own options:

        - Its limits can only be tighter. The earlier deadline applies, its budget is a share of what this run may spend
          (`tracker`), and calls may nest at most `levels` below its own calls, which are at `depth`.
        - Its workers and environment, if it has any, replace this run's. So does each resource with the same protocol,
          and each extra with the same key. The nested run has this run's other resources and extras too.
        - Its caps on spending apply in addition to this run's.
        - Session, approvals, files, journal, lease, clock and `new_id` are always this run's.
        - `policies` are this run's, as they apply in the nested run: what they deny stays denied.

        Raises `DefinitionError` if its budget is a `BudgetTracker`.
        """
        budget = given.budget
        if isinstance(budget, BudgetTracker):
            raise DefinitionError("budget is a BudgetTracker. Pass a Budget to a run inside a call.")
        limited = budget is not None or self.budget is not None
        return given.replace(
            session=self.session,
            environment=given.environment or self.environment,
            approvals=self.approvals,
            approval_seconds=self.approval_seconds,
            filesystem=self.filesystem,
            extras=self.extras.merged(given.extras),
            outer_policies=tuple(policies),
            deadline=_earlier(self.deadline, given.deadline),
            budget=tracker.share(budget) if limited else None,
            depth_limit=_shallower(self.depth_limit, depth, levels),
            spend=both(self.spend, given.spend),
            journal=self.journal,
            lease=self.lease,
            clock=self.clock,
            new_id=self.new_id,
        )


# --- checks, for callers without a type checker -------------------------------------------------------


_POSITIONAL = {
    "evaluate": ("prompt", "params"),
    "stream": ("prompt", "params"),
    "resume": ("run_id", "prompt"),
    "resume_stream": ("run_id", "prompt"),
}
"""The arguments that an adapter's methods take by position only."""


def check_names(verb: str, kind: type, arguments: Iterable[str], positional: Sequence[str] = ()) -> None:
    """Raise `TypeError` for the first argument that is not in `kind`, the `TypedDict` of the arguments that `verb` takes.

    `positional` are the arguments that it takes by position only.
    """
    known = kind.__annotations__
    if not all(name in known for name in arguments):
        from handrail.text.spelling import check_arguments  # only errors need it

        check_arguments(verb, known, arguments, positional)


_WANTED: Mapping[str, tuple[Any, str]] = {
    "approvals": ((str, ApprovalBroker), "'interactive', 'approve_all' or 'strict', or an ApprovalBroker"),
    "app": (str, "a string such as 'module:name'"),
    "budget": ((Budget, BudgetTracker), "a Budget, for example Budget(tool_calls=100)"),
    "attachments": (Iterable, "a list of attachments: [Path('plot.png')]"),
    "bus": (EventBus, "an EventBus, with `publish` and `subscribe`"),
    "compact": (Compact, "a Compact, for example Compact(by='summary')"),
    "clock": (Clock, "a Clock, with `now` and `monotonic`"),
    "deadline": (Deadline, "a Deadline, for example Deadline.after(60)"),
    "environment": (
        Environment,
        "an instance of Environment or of a subclass; in tests, Person(approve=True)",
    ),
    "extras": (Mapping, "a mapping from keys to values: {TENANT: 'acme'}"),
    "filesystem": (
        (Filesystem, RunFiles),
        "a Filesystem: DirectoryFilesystem('folder'), Workspace('name') or MemoryFilesystem()",
    ),
    "history": (Iterable, "a list of messages"),
    "journal": (Journal, "a Journal: SqliteJournal('runs.db') or MemoryJournal()"),
    "lease": (Lease, "a Lease, with `interval` and `extend`"),
    "message": (str, "the user's message as a string; values for templates go into `params=`"),
    "model_settings": (ModelSettings, "a ModelSettings, for example ModelSettings(effort='low')"),
    "new_id": (Callable, "a function that returns a new id"),
    "outer_policies": (Iterable, "a list of policies of the run that began it"),
    "opened": ((str, Iterable), "a list of paths of sections"),
    "resources": (Iterable, "a list of bindings: [Binding(Database, connect)]"),
    "run_id": (str, "a string"),
    "session": (Session, "a Session; `run` and `stream` also take the id of one in the journal"),
    "tools": (Iterable, "a list of tools: [weather]"),
}
"""The type that each of these arguments must have, and its description for error messages."""


def check_value(name: str, value: Any) -> None:
    """Raise `DefinitionError` if this value is invalid for the argument of this name."""
    if name in _WANTED:
        kind, wanted = _WANTED[name]
        if isinstance(value, type) and kind is not Callable:
            raise DefinitionError(f"{name} is the class {value.__name__}, not an instance. Pass {wanted}.")
        if not _is_of_kind(value, kind):
            if name == "journal" and isinstance(value, str | Path):
                wanted = f"a journal in that file: SqliteJournal({str(value)!r})"
            raise _wrong_kind(name, value, wanted)
        if name == "run_id":
            check_id("run id", value)
    elif name == "traceparent" and not (isinstance(value, str) and TRACEPARENT.fullmatch(value)):
        raise DefinitionError(
            f"traceparent is {value!r}. Pass one as W3C defines it: 00-, 32 and 16 lowercase hexadecimal digits, and two for flags."
        )
    elif name == "result_limit" and (problem := problem_with_limit(value)):
        raise DefinitionError(f"{problem[0]}. {problem[1]}")
    elif name == "depth_limit" and (type(value) is not int or value < 0):
        raise DefinitionError(f"the depth limit {value!r} is invalid. Pass a whole number of at least 0.")
    elif name == "approval_seconds" and not is_span(value):
        raise DefinitionError(
            f"approval_seconds is {value!r}. "
            "Pass a positive number of seconds after which a request for approval expires, or None for no limit."
        )


def check_kinds(**given: tuple[object, Any, str]) -> None:
    """Raise `DefinitionError` for the first value of the wrong type. None is always allowed."""
    for name, (value, kind, wanted) in given.items():
        if not _is_of_kind(value, kind):
            raise _wrong_kind(name, value, wanted)


def _is_of_kind(value: object, kind: Any) -> bool:
    is_letters = kind is Iterable and isinstance(value, str | bytes)
    return value is None or (not is_letters and isinstance(value, kind))


def _wrong_kind(name: str, value: object, wanted: str) -> DefinitionError:
    return DefinitionError(f"{name} is {describe_kind(value)}. Pass {wanted}.")


def _frozen(name: str, value: Any) -> Any:
    """Return an argument in the form in which the options hold it. Iterables become tuples."""
    if name == "opened" and isinstance(value, str):
        return (value,)
    if name == "extras":
        return value if isinstance(value, Extras) else Extras(value)
    if name == "attachments":
        return attachments_of(value)
    if name == "spend":
        return caps_of(value)
    return tuple(value) if name in ("resources", "history", "opened", "tools", "outer_policies") else value


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


def both(one: Iterable[SpendCap], other: Iterable[SpendCap]) -> tuple[SpendCap, ...]:
    """Return the caps of both, each once."""
    found = [*one]
    found += [each for each in other if each not in found]
    return tuple(found)


def named(caps: Iterable[SpendCap], app: str) -> tuple[SpendCap, ...]:
    """Return the caps with this name where they are an app's and have no name of their own."""
    return tuple(
        msgspec.structs.replace(each, app=app) if each.by == "app" and not each.app else each for each in caps
    )


def newest(given: Sequence[SpendCap], recorded: Iterable[SpendCap]) -> tuple[SpendCap, ...]:
    """Return the caps that were given to a resumed run, and of those that it began with the ones that none of them replaces."""
    replaced = {each.scope for each in given}
    return (*given, *(each for each in recorded if each.scope not in replaced))
