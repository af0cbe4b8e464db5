"""The seams: what one layer asks of another without knowing who answers.

Everything that reaches the outside world (time, a model, a person, a disk, a record) goes through
one of these, and each has a public fake: `ScriptedModel`, `MemoryFilesystem`, `MemoryJournal`, and
those of `handrail.testing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    runtime_checkable,
)

import msgspec

from handrail.context.facts import Approval
from handrail.question import Answer, Question

if TYPE_CHECKING:
    from handrail.adapter import PromptResponse
    from handrail.context import ToolContext
    from handrail.context.verbs import PromptModel
    from handrail.deadline import Deadline
    from handrail.dispatch.parking import Parking
    from handrail.events import ApprovalRemembered, ApprovalRevoked
    from handrail.limits import Budget
    from handrail.messages import Model
    from handrail.operation import Operation
    from handrail.prompt import Prompt
    from handrail.tools import Tool, ToolResult

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RunMode = Literal["user", "agent", "headless"]
"""Who is on the other side: a person, a model in a person's place, or nobody."""

# --- state -------------------------------------------------------------------------------------


class Slice(Protocol[T_co]):
    """The items of one type in a session, oldest first."""

    def latest(self) -> T_co | None: ...
    def all(self) -> tuple[T_co, ...]: ...
    def where(self, predicate: Callable[[Any], bool], /) -> tuple[T_co, ...]: ...
    def get(self, key: Hashable, /) -> T_co | None:
        """The item with this key, in a slice that is kept by key."""
        ...

    def __len__(self) -> int: ...


class EventBus(Protocol):
    """Where facts are published. Subscribers are isolated from each other and from the run."""

    def publish(self, event: object, /) -> None: ...
    def subscribe(self, kind: type[T], listener: Callable[[T], None], /) -> Callable[[], None]:
        """Call `listener` with every event of that type; what is returned ends the subscription."""
        ...


class SessionView(Protocol):
    """What a tool may do with the session: read and dispatch, never restore or commit."""

    @property
    def id(self) -> str: ...
    @property
    def principal(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def dispatcher(self) -> EventBus: ...
    def __getitem__(self, kind: type[T], /) -> Slice[T]: ...
    def dispatch(self, event: object, /) -> None:
        """Reduce an event into the slices. A reducer that raises undoes it, and raises here."""
        ...


class Fork(Protocol):
    """One call's own version of something, until it is committed or dropped.

    Committing is in two steps, so that several forks commit together or not at all: every one is
    prepared, which may refuse, and only then is every one applied, which may not. Once prepared or
    dropped a fork takes no more reads or writes: they raise `ContextExpired`, from every thread.

    Subclass it. The members below `drop` have defaults, for a fork whose changes can't be described.
    """

    __slots__ = ()

    is_durable: ClassVar[bool] = False
    """Whether it is a `DurableFork`."""

    def stale(self) -> Sequence[str]:
        """What this fork read that somebody else has changed since; empty when nothing was."""
        ...

    def prepare(self) -> None:
        """Close the fork and check that it can be applied; `Conflict` names what stands against it."""
        ...

    def apply(self) -> None:
        """Make the changes part of what was forked. It can't fail and does not wait."""
        ...

    def drop(self) -> None:
        """Forget the changes. Harmless when there are none, or when called twice."""
        ...

    def seal(self) -> None:
        """Take no more changes: what is shown now is what is applied."""

    def diff(self) -> str | None:
        """Return the changes as a person reads them; None if they can't be shown."""
        return None

    def changed_paths(self) -> Sequence[str] | None:
        """Return the paths of changed files; None if something else may have changed."""
        return None

    def read_places(self) -> Sequence[str]:
        """Return what was read, by name, for the record."""
        return ()

    def written_places(self) -> Sequence[str]:
        """Return what was changed, by name, for the record."""
        return ()

    def file_changes(self) -> Sequence[Any]:
        """Return the reads and changes of files as plain data, for `redo` in another process."""
        return ()


class DurableFork(Fork, Protocol):
    """A fork of something that outlives the process, as a folder on a disk does.

    Nobody can lock the world out: after `prepare` has checked everything somebody may still change
    a file, and a disk may be full. So such forks are applied before those in memory, and may still
    refuse; and what they are about to do is written down first, so that a process that starts after a
    crash can finish it.
    """

    __slots__ = ()

    is_durable: ClassVar[bool] = True

    def stage(self, call_id: str, /, *, journal: str = "", synced: bool = False) -> Mapping[str, Any] | None:
        """After `prepare`: write down all that `apply` needs. None where there is nothing to apply.

        What is returned goes into the journal whose id is given, as one of the unit's `files`.
        """
        ...

    def apply(self, *, synced: bool = False) -> None:
        """Make the changes. If it raises, everything is as it was."""
        ...

    def revert(self) -> None:
        """Take back what was applied, because something that belongs to it failed."""
        ...

    def applied(self) -> None:
        """All that belongs to it was applied: it stands."""
        ...


@runtime_checkable
class Forkable(Protocol):
    """A resource that joins a call's transaction: the call works on a fork of it."""

    def fork(self, owner: str, /, *, writable: bool = True) -> Any:
        """A fork for the call called `owner`, at the same cost however much there is.

        What is returned satisfies the resource's own protocol and `Fork`, and can be forked again.
        """
        ...


class Resources(Protocol):
    """Things a tool can ask for by the protocol they satisfy."""

    def get(self, protocol: type[T], /) -> T: ...
    def open(self, protocol: type[T], /) -> Operation[T]:
        """The same for a binding that has to be awaited."""
        ...


class FileInfo(msgspec.Struct, frozen=True):
    """What `stat` and `list` say of a path."""

    path: str
    is_directory: bool
    size: int
    modified: float


class Match(msgspec.Struct, frozen=True):
    """One line that `grep` found."""

    path: str
    line: int
    text: str


@runtime_checkable
class Filesystem(Protocol):
    """Files under one root. Paths are relative, with `/`; nothing leads out of the root."""

    def read(self, path: str, /) -> str: ...
    def read_bytes(self, path: str, /) -> bytes: ...
    def write(self, path: str, content: str | bytes, /) -> None: ...
    def append(self, path: str, content: str | bytes, /) -> None: ...
    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        """Replace the one occurrence of `old`, or every one with `all`; says how many there were."""
        ...

    def list(self, path: str = ".", /) -> Sequence[FileInfo]: ...
    def glob(self, pattern: str, /) -> Sequence[str]: ...
    def grep(self, pattern: str, /, *, glob: str = "**") -> Iterable[Match]: ...
    def stat(self, path: str, /) -> FileInfo: ...
    def exists(self, path: str, /) -> bool: ...
    def delete(self, path: str, /, *, recursive: bool = False) -> None: ...
    def mkdir(self, path: str, /) -> None: ...
    def move(self, source: str, target: str, /) -> None: ...


# --- limits ------------------------------------------------------------------------------------


class CancelSignal(Protocol):
    """Whether the call has been cancelled."""

    @property
    def cancelled(self) -> bool: ...
    def wait(self) -> Operation[None]:
        """Ends once the call is cancelled."""
        ...


class Heartbeat(Protocol):
    """The lease of the job this call runs in."""

    def beat(self) -> None: ...
    @property
    def last_beat(self) -> float | None: ...


class BudgetTracker(Protocol):
    """What may still be spent: here and, through it, in every run above."""

    def remaining(self) -> Mapping[str, float]:
        """What is left of each limited unit; a unit without a limit is not in it."""
        ...


class CostTracker(Protocol):
    """What has been spent by this run and everything below it."""

    def spent(self) -> Mapping[str, Decimal]: ...


# --- whether a call may run ----------------------------------------------------------------------


class PolicyDecision(msgspec.Struct, frozen=True):
    """Allow, deny with a reason, or ask whoever may approve."""

    kind: Literal["allow", "deny", "ask"]
    reason: str = ""

    @staticmethod
    def allow() -> PolicyDecision:
        return _ALLOW

    @staticmethod
    def deny(reason: str) -> PolicyDecision:
        """Refuse the call. The reason is for the model: say what to do instead."""
        return PolicyDecision("deny", reason)

    @staticmethod
    def ask(reason: str = "") -> PolicyDecision:
        """Let the call run if somebody approves it; the reason is shown to them."""
        return PolicyDecision("ask", reason)


_ALLOW = PolicyDecision("allow")


class ToolPolicy(Protocol):
    """A rule about which calls may run. All policies must allow; one that raises denies."""

    @property
    def name(self) -> str: ...
    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision | Awaitable[PolicyDecision]: ...
    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        """After a success, before its commit. Raising fails the call and undoes it."""
        ...


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody is asked to approve. The digest covers all of it."""

    question: Question
    tool: str
    arguments: Any
    diff: str = ""
    scopes: tuple[str, ...] = ()
    """What it can be decided for beside this one call, in words, the narrowest first."""
    recall: ApprovalRecall | None = None
    """What the session remembers about it."""
    through: Callable[[Environment], Asker] | None = None
    """How the call that needs it asks an environment; None to ask it directly."""


class ApprovalRecall(Protocol):
    """What a session remembers about one request. A broker asks it before it asks anybody."""

    used: ApprovalRemembered | None
    """Set by the broker to what decided the request, where something remembered did."""

    def find(self) -> ApprovalRemembered | None:
        """The decision that covers the request. A denial goes before every approval."""
        ...

    def keep(self, approved: bool, reason: str, by: str, scope: str | None = None) -> None:
        """Remember an answer for one of the scopes that were offered, or for exactly this request."""
        ...

    def when_covered(self, wake: Callable[[], object], /) -> Callable[[], None]:
        """Call `wake` once something is remembered that covers the request; returns how to stop."""
        ...


class DecisionBook(Protocol):
    """The decisions of one session, where they outlive its process."""

    def write(self, decision: ApprovalRemembered | ApprovalRevoked, /) -> None:
        """Record one, before it counts. From any thread."""
        ...

    async def read(self) -> None:
        """Let the session know what was recorded since, by whichever process."""
        ...


class ApprovalController(Protocol):
    """What a tool may see of the approvals of its run. It can look; only people decide."""

    @property
    def mode(self) -> str | None:
        """`interactive`, `approve_all`, `strict`; None where no mode was chosen."""
        ...

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """What was decided for more than one call of this session, and not revoked."""
        ...


class ApprovalBroker(Protocol):
    """The one place at the root of a run where approvals are decided.

    One with `shows_previews` true is asked about a staged call after it ran in its fork, with a diff.
    """

    async def decide(self, request: ApprovalRequest, /) -> Approval: ...


# --- people, models, records ---------------------------------------------------------------------


class Asker(Protocol):
    """Puts a question to whoever is there, and returns what they say."""

    async def ask(self, question: Question, /) -> Answer: ...


class Environment(ABC):
    """Who is on the other side: browser, terminal, MCP client, model, nobody.

    Subclass it, and say whose place it takes (`run_mode`) and how it asks (`ask`). The other members say
    what else it can do.
    """

    run_mode: RunMode = "headless"
    parks: bool = False
    """Whether it leaves questions open: a run in which everything waits may then be parked."""
    keeps_secrets: bool = False
    """Whether a call that was given a secret may wait for it too. Such a run stays in memory."""
    prompt_model: Callable[[Any], PromptModel] | None = None
    """Makes the verb `prompt_model` of a call; None for the model of the run."""
    adapter: Callable[[Any], BoundAdapter] | None = None
    """Makes the adapter of a call, in a run that has none."""

    @abstractmethod
    async def ask(self, question: Question, /) -> Answer | None:
        """Put a question to whoever is there, and return what they say.

        None leaves the question open: its answer comes through the journal, and the run may be parked
        meanwhile.
        """

    def begins(self, parking: Parking) -> None:  # noqa: B027  # by default there is nothing to do
        """A run that may be parked begins here. Called on the run's loop."""

    def rests(self, parking: Parking) -> None:
        """Everything in the run waits for an answer: park it, or leave it in memory.

        Called on the run's loop, again after each question that was asked or is over. By default the run
        is parked as soon as it may be.
        """
        parking.park()


class NestedArguments(TypedDict, total=False):
    """Arguments of a run inside a call. Limits can only be tighter than the call's own."""

    deadline: Deadline | None
    budget: Budget | None
    temperature: float | None
    opened: Sequence[str]


class BoundAdapter(Protocol):
    """The adapter of this run as a call sees it.

    What it evaluates is part of the call: it has the call's session, bus, resources, broker, journal
    and place in the tree; `deadline` and `budget` can only be tighter than the call's own.
    """

    def evaluate(
        self,
        prompt: Prompt[T],
        params: object = None,
        /,
        *,
        message: str | None = None,
        model: Model | str | None = None,
        **arguments: Unpack[NestedArguments],
    ) -> Operation[PromptResponse[T]]: ...


class Workers(Protocol):
    """The workers that the calls of one run may reach, beside the tools it offers to its model."""

    def find(self, name: str, call: Any, /) -> Tool[Any, Any] | None:
        """The worker of this name as a tool, or None where the run may not call one."""
        ...

    def why_not(self, name: str, /) -> str:
        """What to say to whoever asked for a worker that is not there, or not theirs to call."""
        ...

    def arguments(self, input: Any, attachments: Sequence[Any], /) -> Mapping[str, Any]:
        """The arguments with which a worker is called as a tool."""
        ...


class WorkerSource(Protocol):
    """Where a run's workers come from: a registry, or one worker of it."""

    def enter(self, frame: Any, /) -> AbstractContextManager[None]:
        """Give the run of this frame its workers, for as long as it lasts."""
        ...


class PromptView(Protocol):
    """The prompt being run."""

    @property
    def name(self) -> str: ...
    @property
    def sections(self) -> Sequence[Any]:
        """The unrendered tree."""
        ...


class RenderedPromptView(Protocol):
    """A prompt as it was rendered."""

    @property
    def text(self) -> str: ...
    @property
    def tools(self) -> Sequence[Tool[Any, Any]]: ...
