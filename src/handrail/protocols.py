"""The seams: protocols through which one layer uses another without knowing its implementation.

Models and journals have protocols of their own, `messages.Model` and `journal.protocol.Journal`. For tests there are public
fakes: `ScriptedModel`, `MemoryFilesystem`, `MemoryJournal`, and those in `handrail.testing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, Unpack, runtime_checkable

import msgspec

from handrail.context.facts import Approval
from handrail.question import Answer, Question, Quorum

if TYPE_CHECKING:
    from handrail.concurrency.operation import Operation
    from handrail.context import PromptModel, ToolContext
    from handrail.events import ApprovalRemembered, ApprovalRevoked
    from handrail.journal.records import CallKey
    from handrail.messages import Model
    from handrail.prompt import Prompt
    from handrail.run.options import NestedArguments
    from handrail.run.record.parking import Parking
    from handrail.run.response import PromptResponse
    from handrail.tools import Tool, ToolResult

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RunMode = Literal["user", "agent", "headless"]
"""Who answers a run's questions: a person, a model in a person's place, or nobody."""

# --- state -------------------------------------------------------------------------------------


class Slice(Protocol[T_co]):
    """The items of one type in a session, oldest first unless a reducer orders them otherwise.

    In a keyed slice, a new item takes the position of the item that it replaces.
    """

    def latest(self) -> T_co | None: ...
    def all(self) -> tuple[T_co, ...]: ...
    def where(self, predicate: Callable[[Any], bool], /) -> tuple[T_co, ...]: ...
    def get(self, key: Hashable, /) -> T_co | None:
        """Return the item with this key; None if there is none. Raises `DefinitionError` unless the slice is keyed."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class EventBus(Protocol):
    """The bus on which events are published. An error in a subscriber affects neither the other subscribers nor the run."""

    def publish(self, event: object, /) -> None: ...
    def subscribe(self, kind: type[T], listener: Callable[[T], None], /) -> Callable[[], None]:
        """Call `listener` with every event of this type or a subclass. Returns a function that unsubscribes it."""
        ...


class SessionView(Protocol):
    """The session as a tool may use it: read and dispatch, never restore or commit."""

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
        """Apply an event to the slices. If a reducer fails, nothing is changed, and `ReducerError` is raised."""
        ...


class Fork(Protocol):
    """One call's own version of a resource, until it is committed or dropped.

    A commit has two steps, so that several forks commit together or not at all. First every fork is prepared, which may
    fail. Then every fork is applied. Only a `DurableFork` may fail in this second step. Once prepared or dropped, a fork
    refuses reads and writes from every thread with `ContextExpired`.

    Subclass it. The members below `drop` have defaults, for a fork whose changes can't be described.

    Handlers and policies get the fork itself, and are trusted not to commit it. If it has a method `handler_view()`, they get
    what that returns instead.
    """

    __slots__ = ()

    is_durable: ClassVar[bool] = False
    """Whether this is a `DurableFork`."""

    def stale(self) -> Sequence[str]:
        """Return the names of everything that was changed elsewhere after this fork had read it."""
        ...

    def prepare(self) -> None:
        """Close the fork and check that it can be applied. Raises a `Conflict` that names what others have changed, if that prevents it."""
        ...

    def apply(self) -> None:
        """Apply the changes to the forked resource. This must neither fail nor wait."""
        ...

    def drop(self) -> None:
        """Discard the changes. Harmless if there are none, or if called twice."""
        ...

    def seal(self) -> None:
        """Refuse further changes, so that what is shown now is exactly what is applied later. The default refuses nothing."""

    def diff(self) -> str | None:
        """Return the changes as text for a person; None if they can't be shown."""
        return None

    def changed_paths(self) -> Sequence[str] | None:
        """Return the paths of changed files; None if something other than files may have changed."""
        return None

    def read_places(self) -> Sequence[str]:
        """Return the names of everything that was read, to be recorded."""
        return ()

    def written_places(self) -> Sequence[str]:
        """Return the names of everything that was changed, to be recorded."""
        return ()

    def file_changes(self) -> Sequence[Any]:
        """Return the files that were read or changed, as plain data, so that another process can redo the changes."""
        return ()


class DurableFork(Fork, Protocol):
    """A fork of something that outlives the process, such as a folder on disk.

    Other processes can't be locked out: after `prepare` has checked everything, one of them may still change
    a file, and a disk may be full. Durable forks are therefore applied before those in memory, and applying one may
    still fail. Their changes are stored first, so that the next process can finish them after a crash.
    """

    __slots__ = ()

    is_durable: ClassVar[bool] = True

    def stage(self, key: CallKey, /, *, synced: bool = False) -> Mapping[str, Any] | None:
        """Store everything that `apply` needs, after `prepare`. Returns the manifest, or None if there is nothing to apply.

        The manifest is recorded in the key's journal, among the `files` of the call's `CommitUnit`. With `synced`, everything that is
        stored survives a power cut.
        """
        ...

    def apply(self, *, synced: bool = False) -> None:
        """Apply the changes. If this raises, they were reverted, unless the error says otherwise. With `synced`, they survive a power cut."""
        ...

    def revert(self) -> None:
        """Undo the applied changes, because another part of the commit failed."""
        ...

    def applied(self) -> None:
        """Finish the commit once all its parts are applied. After that it can no longer be reverted."""
        ...


@runtime_checkable
class Forkable(Protocol):
    """A resource that takes part in a call's transaction: the call works on a fork of it."""

    def fork(self, owner: str, /, *, writable: bool = True) -> Any:
        """Return a fork for the call named `owner`. The cost of forking does not depend on the resource's size.

        The fork satisfies the resource's own protocol and `Fork`, and can be forked again. It refuses changes unless
        `writable` is true.
        """
        ...


class Resources(Protocol):
    """A run's resources. Tools request a resource by its protocol."""

    def get(self, protocol: type[T], /) -> T: ...
    def open(self, protocol: type[T], /) -> Operation[T]:
        """Return the resource, as `get` does. Unlike `get`, this also works if the binding's provider is async."""
        ...


class FileInfo(msgspec.Struct, frozen=True):
    """A file or folder, as `stat` and `list` describe it. A special file is a pipe, a socket or a device, and can't be read."""

    path: str
    is_directory: bool
    size: int
    modified: float
    is_special: bool = False


class Match(msgspec.Struct, frozen=True):
    """One line that `grep` found."""

    path: str
    line: int
    text: str


@runtime_checkable
class Filesystem(Protocol):
    """Files under one root. Paths are relative, use `/`, and can't leave the root."""

    def read(self, path: str, /) -> str: ...
    def read_bytes(self, path: str, /) -> bytes: ...
    def write(self, path: str, content: str | bytes, /) -> None: ...
    def append(self, path: str, content: str | bytes, /) -> None: ...
    def edit(self, path: str, old: str, new: str, /, *, all: bool = False) -> int:
        """Replace the only occurrence of `old`, or with `all` every occurrence. Returns how many were replaced.

        Raises `EditRefused` if `old` is empty, equals `new`, or is not in the file, or if it is not unique and `all` is false.
        """
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
    """Tells a tool whether its call must stop, because it was cancelled or has run out of time."""

    @property
    def cancelled(self) -> bool: ...
    def wait(self) -> Operation[None]:
        """Wait until the call must stop."""
        ...


class HeartbeatProtocol(Protocol):
    """Records that a call is alive, and renews the lease on its job if there is one."""

    def beat(self) -> None: ...
    @property
    def last_beat(self) -> float | None: ...


class BudgetTrackerProtocol(Protocol):
    """Tracks what this run may still spend, within the budgets of all runs above it."""

    def remaining(self) -> Mapping[str, float]:
        """Return what remains of each limited unit. Units without a limit are left out."""
        ...


class CostTrackerProtocol(Protocol):
    """Tracks what this run and everything below it have spent."""

    def spent(self) -> Mapping[str, Decimal]: ...


# --- whether a call may run ----------------------------------------------------------------------


class PolicyDecision(msgspec.Struct, frozen=True):
    """A policy's decision: allow the call, deny it with a reason, or ask the run's principal or the given `quorums`."""

    kind: Literal["allow", "deny", "ask"]
    reason: str = ""
    quorums: tuple[Quorum, ...] = ()

    @staticmethod
    def allow() -> PolicyDecision:
        return ALLOWED

    @staticmethod
    def deny(reason: str) -> PolicyDecision:
        """Return the decision to refuse the call. The model sees the reason, which should say what to do instead."""
        return PolicyDecision("deny", reason)

    @staticmethod
    def ask(reason: str = "", *others: Quorum) -> PolicyDecision:
        """Return the decision to ask the run's principal, or these quorums instead. They are shown the reason."""
        return PolicyDecision("ask", reason, others)


ALLOWED = PolicyDecision("allow")
"""The decision to allow a call, which all policies share."""


class ToolPolicy(Protocol):
    """A rule about which calls may run. A call runs only if no policy denies it. A policy that raises denies the call."""

    @property
    def name(self) -> str: ...
    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision | Awaitable[PolicyDecision]: ...
    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        """Handle a successful result, before it is committed. An awaitable that is returned is awaited.

        If this raises, the call fails and is rolled back.
        """
        ...


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval. The question's digest covers the tool, the arguments, the diff and the scopes."""

    question: Question
    tool: str
    arguments: Any
    diff: str = ""
    startup_files: tuple[str, ...] = ()
    """Changed files that programs run automatically, such as git hooks. Only a person can approve them, never a mode or a remembered decision."""
    scopes: tuple[str, ...] = ()
    """Descriptions of the wider scopes to which the decision can apply, narrowest first."""
    recall: ApprovalRecall | None = None
    """The session's memory of this request; None if its decision can't be remembered."""
    through: Callable[[Environment], Asker] | None = None
    """A function that returns the asker for an environment; None to ask the environment directly."""


class ApprovalRecall(Protocol):
    """A session's memory of the decisions on one request. A broker looks there before it asks a person."""

    used: ApprovalRemembered | None
    """Set by the broker to the remembered decision that decided the request; None if none did."""

    def find(self) -> ApprovalRemembered | None:
        """Return the remembered decision that covers the request; None if there is none. Denials take precedence over approvals."""
        ...

    def keep(self, approved: bool, reason: str, by: str, scope: str | None = None) -> None:
        """Remember an answer for an offered scope. Without a scope, an approval covers the request with this diff only, a denial with any diff."""
        ...

    def when_covered(self, wake: Callable[[], object], /) -> Callable[[], None]:
        """Call `wake` once a remembered decision covers the request. Returns a function that removes the callback."""
        ...


class DecisionBook(Protocol):
    """The recorded decisions of one session, which outlive its process."""

    def write(self, decision: ApprovalRemembered | ApprovalRevoked, /) -> None:
        """Record a decision before it takes effect. May be called from any thread."""

    async def read(self) -> None:
        """Add to the session the decisions that any process has recorded since the last read."""


class ApprovalController(Protocol):
    """The run's approvals as its tools see them. Tools can read them, but can't decide or revoke anything."""

    @property
    def mode(self) -> str | None:
        """The approval mode, `interactive`, `approve_all` or `strict`; None if no mode was chosen."""
        ...

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """Return the remembered decisions of this session that were not revoked."""
        ...


@runtime_checkable
class ApprovalBroker(Protocol):
    """Decides the approval requests of a run and of the runs nested in it.

    A broker whose `shows_previews` is true decides on a staged call after the call has run in its fork, and gets the
    call's diff.
    """

    async def decide(self, request: ApprovalRequest, /) -> Approval: ...


# --- people, models, records ---------------------------------------------------------------------


class Asker(Protocol):
    """Asks a question and returns the answer."""

    async def ask(self, question: Question, /) -> Answer: ...


class Environment(ABC):
    """Where a run's questions are answered: in a browser, a terminal or an MCP client, by a model, or by nobody.

    Subclass it, and define who answers (`run_mode`) and how to ask (`ask`). The other members declare what
    else the environment can do.
    """

    run_mode: RunMode = "headless"
    parks: bool = False
    """Whether the environment leaves questions open. If so, a run in which everything waits may be parked."""
    keeps_secrets: bool = False
    """Whether even a call that was given a secret may wait for an open question. Its run then stays in memory."""
    prompt_model: Callable[[Any], PromptModel] | None = None
    """A function that creates a call's `prompt_model` verb; None to use the run's own model, if there is one."""
    adapter: Callable[[Any], BoundAdapter] | None = None
    """A function that creates the adapter of a call whose run has none; None to give such a call no adapter."""
    stand_in: Callable[[Tool[Any, Any]], Tool[Any, Any]] | None = None
    """A function that returns the tool to run in place of another one, which is offered and guarded; None to run the tools themselves."""

    @abstractmethod
    async def ask(self, question: Question, /) -> Answer | None:
        """Ask a question and return the answer, or None to leave it open until its answer comes through the journal."""

    def voters(self, quorum: Quorum, principal: str, /) -> Mapping[str, float]:
        """Return the people who could vote in this quorum on this principal's run. The default is nobody.

        With each name comes the time that the person's account was added, which is `since` in the votes that count; 0
        if there are no accounts.
        """
        return {}

    def run_started(self, parking: Parking) -> None:  # noqa: B027  # by default there is nothing to do
        """Handle the start or the resumption of a run that may be parked. Called on the run's loop."""

    def run_waiting(self, parking: Parking) -> None:
        """Handle a run in which everything waits for answers. The default parks it.

        If an override does not call `parking.park`, the run stays in memory. This is called on the run's loop, and again
        after a question was asked or closed, as soon as everything waits again.
        """
        parking.park()


class BoundAdapter(Protocol):
    """The run's adapter as a call sees it, or the environment's if the run has none.

    Its evaluations are part of the call and use the call's session, bus, files, broker, journal and place in the tree.
    `deadline` and `budget` can only be tighter than the call's own.
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
    """The workers that calls of one run may call, in addition to the tools that are offered to its model."""

    def find(self, name: str, call: Any, /) -> Tool[Any, Any] | None:
        """Return the worker with this name as a tool; None if it does not exist or the run may not call it."""
        ...

    def why_not(self, name: str, /) -> str:
        """Return why the run may not call a worker. For an unknown worker, returns a hint at a similar name, or "" if there is none."""
        ...

    def arguments(self, input: Any, attachments: Sequence[Any], /) -> Mapping[str, Any]:
        """Return the arguments of the tool call that calls a worker."""
        ...


class WorkerSource(Protocol):
    """A source of a run's workers: a registry, or a run of one of its workers."""

    def open(self, run: Any, /) -> None:
        """Make the workers available to the run's calls, for as long as the run lasts."""
        ...

    def enter(self, run: Any, /) -> AbstractAsyncContextManager[None]:
        """Make the workers available, as `open` does. During the block, the source's message callback, if it has one, gets the run's messages."""
        ...


class PromptView(Protocol):
    """The prompt being run."""

    @property
    def name(self) -> str: ...
    @property
    def sections(self) -> Sequence[Any]:
        """The unrendered tree of sections."""
        ...


class RenderedPromptView(Protocol):
    """A prompt as it was rendered."""

    @property
    def text(self) -> str: ...
    @property
    def tools(self) -> Sequence[Tool[Any, Any]]: ...
