"""`ContextSource`: what a context is a view of.

`WaitFor` and `PromptModel` are the verbs of an environment: ask a person, ask a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from handrail.context.extras import Extras
from handrail.context.facts import (
    Approval,
    Invocation,
    RequestView,
    ResponseAccumulator,
    RunContext,
    WorkerFacts,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from handrail.deadline import Deadline
    from handrail.operation import Done, Home, Operation
    from handrail.protocols import (
        ApprovalController,
        BoundAdapter,
        BudgetTracker,
        CancelSignal,
        CostTracker,
        EventBus,
        Filesystem,
        Heartbeat,
        PromptView,
        RenderedPromptView,
        Resources,
        SessionView,
    )
    from handrail.tools import Tool, ToolResult


T = TypeVar("T")


class WaitFor(Protocol):
    """Ask the person on the other side. The answer is validated against `schema`.

    No answer raises `Declined`, `QuestionCancelled` or `QuestionTimedOut`. A type that is not a
    class, such as `Literal["a", "b"]`, is given as `TypeAdapter(...)`.
    """

    @overload
    def __call__(
        self, kind: str, payload: object, schema: type[T], *, timeout: float | None = None
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self, kind: str, payload: object, schema: TypeAdapter[T], *, timeout: float | None = None
    ) -> Operation[T]: ...


class PromptModel(Protocol):
    """One structured call of a model, validated, with a bounded number of repair turns.

    Text arrives at `on_text` as it is written. Tools run through the gate, within the call's limits.
    """

    @overload
    def __call__(
        self,
        prompt: str,
        schema: type[T],
        *,
        system: str | None = None,
        model: str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        prompt: str,
        schema: TypeAdapter[T],
        *,
        system: str | None = None,
        model: str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Operation[T]: ...


class ContextSource(Protocol):
    """The members and verbs of a context, made when they are first used.

    The gate's attempts and the fakes of `handrail.testing` satisfy this. A context only adds that its verbs
    refuse once `home` is closed.
    """

    @property
    def home(self) -> Home: ...
    @property
    def tool(self) -> Tool[Any, Any]: ...
    @property
    def invocation(self) -> Invocation: ...
    @property
    def prompt(self) -> PromptView: ...
    @property
    def rendered_prompt(self) -> RenderedPromptView | None: ...
    @property
    def adapter(self) -> BoundAdapter: ...
    @property
    def session(self) -> SessionView: ...
    @property
    def event_bus(self) -> EventBus: ...
    @property
    def run_context(self) -> RunContext: ...
    @property
    def depth(self) -> int: ...
    @property
    def request(self) -> RequestView | None: ...
    @property
    def response_accumulator(self) -> ResponseAccumulator | None: ...
    @property
    def extras(self) -> Extras: ...
    @property
    def deadline(self) -> Deadline | None: ...
    @property
    def signal(self) -> CancelSignal: ...
    @property
    def heartbeat(self) -> Heartbeat: ...
    @property
    def budget_tracker(self) -> BudgetTracker: ...
    @property
    def cost_tracker(self) -> CostTracker: ...
    @property
    def resources(self) -> Resources: ...
    @property
    def filesystem(self) -> Filesystem: ...
    @property
    def approval_controller(self) -> ApprovalController: ...
    @property
    def worker(self) -> WorkerFacts | None: ...
    @property
    def wait_for(self) -> WaitFor | None: ...
    @property
    def prompt_model(self) -> PromptModel | None: ...

    def once(
        self,
        key: str,
        function: Callable[[], Any],
        probe: Callable[[], Any] | None,
        on_unknown: Literal["ask", "fail"],
    ) -> Operation[Any]: ...
    def beat(self) -> Done: ...
    def report_progress(self, message: str, done: float | None, total: float | None) -> Done: ...
    def emit(self, event: object) -> Done: ...
    def request_approval(self, message: str) -> Operation[Approval]: ...
    def request_permission(self, kind: str) -> Operation[Approval]: ...
    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Operation[ToolResult[Any]]: ...
    def call_worker(self, name: str, input: Any, attachments: Sequence[Any]) -> Operation[Any]: ...
    def ticket(self) -> str: ...
