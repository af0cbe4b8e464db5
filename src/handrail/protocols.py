"""The seams: protocols through which one layer uses another without knowing its implementation.

Everything that reaches the outside world (a model, a person, a disk, a record) goes through one of these, and
each has a public fake: `ScriptedModel`, `MemoryFilesystem`, `MemoryJournal`, and those of `handrail.testing`.
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
    from handrail.context import PromptModel, ToolContext
    from handrail.deadline import Deadline
    from handrail.events import ApprovalRemembered, ApprovalRevoked
    from handrail.limits import Budget
    from handrail.messages import Model
    from handrail.operation import Operation
    from handrail.prompt import Prompt
    from handrail.replay.parked_run import Parking
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
        """Reduce an event into the slices. If a reducer raises, the event is undone and the error raised here."""
        ...


class Fork(Protocol):
    """One call's own version of a resource, until it is committed or dropped.

    Committing is in two steps, so that several forks commit together or not at all: every one is
    prepared, which may refuse, and only then is every one applied, which may not. Once prepared or
    dropped a fork takes no more reads or writes: they raise `ContextExpired`, from every thread.

    Subclass it. The members below `drop` have defaults, for a fork whose changes can't be described.
    """

    __slots__ = ()

    is_durable: ClassVar[bool] = False
    """Whether it is a `DurableFork`."""

    def stale(self) -> Sequence[str]:
        """What this fork read and somebody else has changed since."""
        ...

    def prepare(self) -> None:
        """Close the fork and check that it can be applied; `Conflict` names what prevents it."""
        ...

    def apply(self) -> None:
        """Apply the changes to what was forked. It can't fail and does not wait."""
        ...

    def drop(self) -> None:
        """Discard the changes. Harmless if there are none, or if called twice."""
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
    """A fork of something that outlives the process, such as a folder on disk.

    Nobody can lock the world out: after `prepare` has checked everything somebody may still change
    a file, and a disk may be full. So such forks are applied before those in memory, and may still
    refuse; and what they are about to do is written down first, so that a process that starts after a
    crash can finish it.
    """

    __slots__ = ()

    is_durable: ClassVar[bool] = True

    def stage(self, call_id: str, /, *, journal: str = "", synced: bool = False) -> Mapping[str, Any] | None:
        """After `prepare`: write down everything that `apply` needs. None if there is nothing to apply.

        What is returned goes into the journal whose id is given, as one of the unit's `files`.
        """
        ...

    def apply(self, *, synced: bool = False) -> None:
        """Apply the changes. If it raises, nothing has changed."""
        ...

    def revert(self) -> None:
        """Undo what was applied, because another part of the commit failed."""
        ...

    def applied(self) -> None:
        """Called once all parts of the commit are applied: it is final."""
        ...


@runtime_checkable
class Forkable(Protocol):
    """A resource that joins a call's transaction: the call works on a fork of it."""

    def fork(self, owner: str, /, *, writable: bool = True) -> Any:
        """A fork for the call named `owner`. Its cost does not depend on the size of the resource.

        What is returned satisfies the resource's own protocol and `Fork`, and can be forked again.
        """
        ...


class Resources(Protocol):
    """Resources that a tool gets by the protocol they satisfy."""

    def get(self, protocol: type[T], /) -> T: ...
    def open(self, protocol: type[T], /) -> Operation[T]:
        """The same for a binding whose provider is async."""
        ...


class FileInfo(msgspec.Struct, frozen=True):
    """A file or folder, as `stat` and `list` describe it."""

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
        """Replace the one occurrence of `old`, or all of them; returns how many were replaced."""
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
    """What may still be spent by this run, within the budgets of all runs above it."""

    def remaining(self) -> Mapping[str, float]:
        """What is left of each limited unit. Units without a limit are left out."""
        ...


class CostTracker(Protocol):
    """What has been spent by this run and everything below it."""

    def spent(self) -> Mapping[str, Decimal]: ...


# --- whether a call may run ----------------------------------------------------------------------


class PolicyDecision(msgspec.Struct, frozen=True):
    """Allow, deny with a reason, or ask for approval."""

    kind: Literal["allow", "deny", "ask"]
    reason: str = ""

    @staticmethod
    def allow() -> PolicyDecision:
        return _ALLOW

    @staticmethod
    def deny(reason: str) -> PolicyDecision:
        """Refuse the call. The model is told the reason: say what to do instead."""
        return PolicyDecision("deny", reason)

    @staticmethod
    def ask(reason: str = "") -> PolicyDecision:
        """Let the call run if a person approves it. They are shown the reason."""
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
        """Called after a success, before the commit. Raising fails the call and undoes it."""
        ...


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a person is asked to approve. The digest covers all of it."""

    question: Question
    tool: str
    arguments: Any
    diff: str = ""
    scopes: tuple[str, ...] = ()
    """Scopes beyond this one call that the decision can be made for, in words, the narrowest first."""
    recall: ApprovalRecall | None = None
    """What the session remembers about this request."""
    through: Callable[[Environment], Asker] | None = None
    """How the call that needs it asks an environment; None to ask it directly."""


class ApprovalRecall(Protocol):
    """What a session remembers about one request. A broker looks here before it asks a person."""

    used: ApprovalRemembered | None
    """Set by the broker to the remembered decision that decided the request, if one did."""

    def find(self) -> ApprovalRemembered | None:
        """The decision that covers the request. Denials come before approvals."""
        ...

    def keep(self, approved: bool, reason: str, by: str, scope: str | None = None) -> None:
        """Remember an answer for one of the offered scopes, or for exactly this request."""
        ...

    def when_covered(self, wake: Callable[[], object], /) -> Callable[[], None]:
        """Call `wake` once a remembered decision covers the request; returns a function that stops this."""
        ...


class DecisionBook(Protocol):
    """The recorded decisions of one session, which outlive its process."""

    def write(self, decision: ApprovalRemembered | ApprovalRevoked, /) -> None:
        """Record a decision before it takes effect. May be called from any thread."""
        ...

    async def read(self) -> None:
        """Tell the session of decisions that were recorded since, by any process."""
        ...


class ApprovalController(Protocol):
    """The approvals of a run as its tools see them: read-only. Only people decide."""

    @property
    def mode(self) -> str | None:
        """`interactive`, `approve_all` or `strict`; None if no mode was chosen."""
        ...

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """The remembered decisions of this session that were not revoked."""
        ...


class ApprovalBroker(Protocol):
    """Decides, at the root of a run, what policies ask about.

    One with `shows_previews` true is asked about a staged call after it ran in its fork, with a diff.
    """

    async def decide(self, request: ApprovalRequest, /) -> Approval: ...


# --- people, models, records ---------------------------------------------------------------------


class Asker(Protocol):
    """Asks a question and returns the answer."""

    async def ask(self, question: Question, /) -> Answer: ...


class Environment(ABC):
    """Who is on the other side: browser, terminal, MCP client, model, nobody.

    Subclass it, and define whose place it takes (`run_mode`) and how it asks (`ask`). The other members
    declare what else it can do.
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
        """Ask a question and return the answer.

        None leaves the question open: its answer comes through the journal, and the run may be parked
        meanwhile.
        """

    def run_started(self, parking: Parking) -> None:  # noqa: B027  # by default there is nothing to do
        """A run that may be parked begins here. Called on the run's loop."""

    def run_waiting(self, parking: Parking) -> None:
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
    """The workers that calls of one run may call, beside the tools offered to its model."""

    def find(self, name: str, call: Any, /) -> Tool[Any, Any] | None:
        """The worker of this name as a tool; None if the run may not call it."""
        ...

    def why_not(self, name: str, /) -> str:
        """Why a worker can't be called: it does not exist, or the run may not call it."""
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
