"""`ToolContext`: what the handler of one call may see and do.

It is a view of an attempt at the call (`handrail.run.call`), or of a fake from `handrail.testing`. The context itself only ensures
that the verbs that are never None raise once the attempt's `home` is closed. Two verbs may be None: `wait_for`, which asks a person,
and `prompt_model`, which asks a model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import msgspec

from handrail.content import Attachment
from handrail.context.extras import (
    PROVIDER_REQUEST_ID,
    RATE_LIMIT,
    RETRIES,
    TRACING_SPAN,
    ExtraKey,
    Extras,
    ExtraValues,
    PerCall,
    RateLimit,
)
from handrail.context.facts import (
    Approval,
    Invocation,
    MessageCallback,
    RegistryView,
    RequestView,
    ResponseAccumulator,
    RunContext,
    Ticket,
    WorkerFacts,
    WorkerMessage,
)
from handrail.errors import NotRendered

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import TypeAdapter
    from typing_extensions import TypeForm

    from handrail.agent import Agent
    from handrail.concurrency.deadline import Deadline
    from handrail.concurrency.operation import Done, Operation
    from handrail.content import AttachmentSource
    from handrail.fleet.background import Background
    from handrail.messages import Model
    from handrail.protocols import (
        ApprovalController,
        BoundAdapter,
        BudgetTrackerProtocol,
        CancelSignal,
        CostTrackerProtocol,
        EventBus,
        Filesystem,
        HeartbeatProtocol,
        PromptView,
        RenderedPromptView,
        Resources,
        SessionView,
    )
    from handrail.run.call import Attempt
    from handrail.run.limits import Budget
    from handrail.tools import Tool, ToolResult


T = TypeVar("T")


class WaitFor(Protocol):
    """Asks the person in the environment, and returns the answer, validated against `schema`.

        when = await context.wait_for("visit", {"street": "Main St"}, Visit, message="When shall we come?")

    - `kind` is the program's name for the question. An app's own page component is registered under this name.
    - `payload` is data to show with the question.
    - `schema` is any type that can be described in JSON, such as a dataclass or `Literal["a", "b"]`. If it is left
      out, the answer is text.
    - `message` is the sentence that the person reads, and `title` the heading above it. By default, they are made from
      `kind`.
    - `timeout` is the number of seconds to wait for the answer. By default, the question has no time limit.

    Raises `Declined`, `QuestionCancelled` or `QuestionTimedOut` if there is no answer.
    """

    @overload
    def __call__(
        self,
        kind: str,
        payload: object = None,
        schema: None = None,
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[str]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object,
        schema: TypeAdapter[T],
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object = None,
        *,
        schema: TypeAdapter[T],
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object,
        schema: TypeForm[T],
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object = None,
        *,
        schema: TypeForm[T],
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...


class PromptModel(Protocol):
    """Asks a model for a structured, validated answer. The model may correct an invalid answer in a limited number of turns.

    `attachments` are files that come with the prompt, each an `Attachment`, a path on disk or an http address. `on_text`
    is called with each chunk of text as the model writes it. It may be async. The `tools` run through the gate, within
    the call's limits. Raises `PromptEvaluationError` if the model gives no valid answer.
    """

    @overload
    def __call__(
        self,
        prompt: str,
        schema: TypeAdapter[T],
        *,
        system: str | None = None,
        model: Model | str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        attachments: Sequence[AttachmentSource] = (),
        on_text: Callable[[str], object] | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        prompt: str,
        schema: TypeForm[T],
        *,
        system: str | None = None,
        model: Model | str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        attachments: Sequence[AttachmentSource] = (),
        on_text: Callable[[str], object] | None = None,
    ) -> Operation[T]: ...


__all__ = [
    "PROVIDER_REQUEST_ID",
    "RATE_LIMIT",
    "RETRIES",
    "TRACING_SPAN",
    "AgentContext",
    "Approval",
    "ExtraKey",
    "ExtraValues",
    "Extras",
    "Invocation",
    "MessageCallback",
    "PerCall",
    "PromptModel",
    "RateLimit",
    "RegistryView",
    "RequestView",
    "ResponseAccumulator",
    "RunContext",
    "Ticket",
    "ToolContext",
    "UserContext",
    "WaitFor",
    "WorkerContext",
    "WorkerFacts",
    "WorkerMessage",
    "WorkerUserContext",
]


class ToolContext(msgspec.Struct, frozen=True, eq=False):
    """What one call may see and do. It is built for the call and expires with it.

    It is frozen and stores nothing itself: every member is read from the call behind it. Once the call is
    over, every verb raises `ContextExpired`, even in a thread that outlived the call. Contexts are created by the
    gate, and by `handrail.testing` for tests; they are not meant to be built by hand.
    """

    _source: Attempt

    def __repr__(self) -> str:
        state = ", ended" if self._source.home.closed else ""
        return f"<{type(self).__name__} {self.call_id} of {self.tool.name}{state}>"

    # The call.

    @property
    def call_id(self) -> str:
        """The id of this call. It stays the same after a resume."""
        return self._source.invocation.id

    @property
    def tool(self) -> Tool[Any, Any]:
        """The tool being called."""
        return self._source.tool

    @property
    def invocation(self) -> Invocation:
        """The call's id, start, attempt and idempotency key, and the path of calls that led to it."""
        return self._source.invocation

    # The run.

    @property
    def prompt(self) -> PromptView:
        """The prompt being run. `prompt.sections` is the unrendered tree. Raises `NotSupported` if the run has no prompt."""
        return self._source.prompt

    @property
    def rendered_prompt(self) -> RenderedPromptView | None:
        """The rendered prompt; None if it is not rendered yet, or if the run has no prompt."""
        return self._source.rendered_prompt

    def require_rendered(self) -> RenderedPromptView:
        """Return the rendered prompt.

        Raises `NotRendered` if it is not rendered yet, and `NotSupported` if the run has no prompt.
        """
        rendered = self._source.rendered_prompt
        if rendered is None:
            raise NotRendered(self._source.prompt.name)
        return rendered

    @property
    def adapter(self) -> BoundAdapter:
        """The run's adapter, bound to this call. Evaluations inherit the call's limits.

        Raises `NotSupported` if the run has no adapter.
        """
        return self._source.adapter

    @property
    def session(self) -> SessionView:
        """The session as this call sees it: reads and dispatches go to the call's fork."""
        return self._source.session

    @property
    def event_bus(self) -> EventBus:
        """The bus on which a tool publishes and receives events. `session.dispatcher` leads to the same bus."""
        return self._source.event_bus

    @property
    def run_context(self) -> RunContext:
        """The ids that tie this call's records together."""
        return self._source.run_context

    @property
    def depth(self) -> int:
        """The number of calls that this call is nested in, including calls to workers; 0 for an outermost call."""
        return self._source.depth

    # The provider.

    @property
    def request(self) -> RequestView | None:
        """The model request that led to this call, with secrets redacted; None if there was no such request."""
        return self._source.request

    @property
    def response_accumulator(self) -> ResponseAccumulator | None:
        """The model's answer that led to this call; None if there was none."""
        return self._source.response_accumulator

    @property
    def extras(self) -> Extras:
        """Values that the model, the adapter, the run or the gate adds, by key or name, as in `context.extras.get(RATE_LIMIT)`."""
        return self._source.extras

    # Limits.

    @property
    def deadline(self) -> Deadline | None:
        """The time by which the run must have ended; None if it has no deadline."""
        return self._source.deadline

    @property
    def signal(self) -> CancelSignal:
        """The signal that tells whether this call was cancelled or ran out of time.

        Get it before the handler first waits. Otherwise it may fire with a delay, and for a timeout of the handler's own while that ends.
        """
        return self._source.signal

    @property
    def heartbeat(self) -> HeartbeatProtocol:
        """The heartbeat of this call. It renews the lease on the job in which the call runs, if there is one."""
        return self._source.heartbeat

    @property
    def budget_tracker(self) -> BudgetTrackerProtocol:
        """The budget's tracker, which has no limits if there is no budget. It is the same object as `resources.get(BudgetTracker)`."""
        return self._source.budget_tracker

    @property
    def cost_tracker(self) -> CostTrackerProtocol:
        """Tracks the model usage and cost of this run and of the runs nested in it."""
        return self._source.cost_tracker

    # Resources.

    @property
    def resources(self) -> Resources:
        """The run's resources, by protocol."""
        return self._source.resources

    @property
    def filesystem(self) -> Filesystem:
        """The files as this call sees them: its fork, if they can be forked. It is the same object as `resources.get(Filesystem)`.

        Raises `ResourceError` if the run has no files.
        """
        return self._source.filesystem

    @property
    def approval_controller(self) -> ApprovalController:
        """The approval mode and the session's remembered decisions, read-only. A tool requests approval with `request_approval`."""
        return self._source.approval_controller

    # Verbs that are never None.

    def once(
        self,
        key: str,
        function: Callable[[], Awaitable[T]] | Callable[[], T],
        *,
        probe: Callable[[], Any] | None = None,
        on_unknown: Literal["ask", "fail"] = "ask",
    ) -> Operation[T]:
        """Run a function whose effect can't be rolled back, and settle it at most once.

        The function is identified by this call and `key`, never by the call's arguments. Until it is settled, it may run
        more than once. After that, it does not run again, and the recorded value is returned.

        In a run with a journal, the function may have begun without finishing, for example because of a crash. Then `probe`, if
        given, is asked whether its effect happened (None means unknown). If that is still unknown, a person is asked, if there is
        one and `on_unknown` is "ask". If the effect happened, None is returned, because the value is lost. If it did not, the
        function runs again. If nobody knows, `OutcomeUnknown` is raised.

        Raises `EffectRefused` if the tool's effect is `pure`, `read` or `staged`.
        """
        self._source.home.check()
        return self._source.once(key, function, probe, on_unknown)

    def beat(self) -> Done:
        """Renew the lease on the call's job, if there is one, and restart the tool's `heartbeat=` timer, if it has one.

        Until the handler's first beat, the lease is renewed for it. After that, only its own beats renew the lease.
        """
        self._source.home.check()
        return self._source.beat()

    def report_progress(self, message: str, *, done: float | None = None, total: float | None = None) -> Done:
        """Report progress to the people who are watching. It is shown immediately, even if the call fails later.

        `done` and `total` are amounts in any unit, such as 3 of 10 files.
        """
        self._source.home.check()
        return self._source.report_progress(message, done, total)

    def emit(self, event: object) -> Done:
        """Publish your own event immediately, under the tool's name.

        Raises `EventRefused` for a class, and for a value of a built-in type, which does not say what happened.
        """
        self._source.home.check()
        return self._source.emit(event)

    def request_approval(self, message: str) -> Operation[Approval]:
        """Ask for approval. A denial does not raise, so check the returned value."""
        self._source.home.check()
        return self._source.request_approval(message)

    def request_permission(self, kind: str) -> Operation[Approval]:
        """Ask for a permission by name. A denial does not raise, so check the returned value."""
        self._source.home.check()
        return self._source.request_permission(kind)

    def call(self, name: str, /, **arguments: Any) -> Operation[ToolResult[Any]]:
        """Call a tool or a worker by name, through the same gate as a model's call.

        If the call fails, its result has `success=False`. An error that ends the whole run is raised instead.
        """
        self._source.home.check()
        return self._source.call_tool(name, arguments)

    def call_worker(self, name: str, input: Any, *, attachments: Sequence[Any] = ()) -> Operation[Any]:
        """Run a worker inside this call and return its value.

        Each attachment is an `Attachment`, a path on disk (`Path`), or a text: the name of an attachment of this worker or in
        this conversation, or else the path of one of the run's files.

        Raises `CallFailed` if the worker fails or `name` is not a worker, and `NotSupported` if the run has no workers.
        """
        self._source.home.check()
        return self._source.call_worker(name, input, attachments)

    def ticket(self) -> str:
        """Return a signed ticket, as text, with which another process can run this call's tool.

        Raises `NotSupported` if the run has no journal, or if the caller is not a tool's handler.
        """
        self._source.home.check()
        return self._source.ticket()

    def spawn(
        self,
        agent: str | Agent[Any],
        message: str,
        *,
        budget: Budget | None = None,
        files: str | Path | None = None,
        wake: bool = False,
    ) -> Background:
        """Begin a run in the background, which outlives this call, once this call has committed. A call that is rolled back begins nothing.

        `agent` is the name of a worker, or `module:name`; without a journal, an agent's object too. With a journal, a worker process
        executes the run; without one, this process does. The run has a session of its own.

        The run's model is told the end of the background run once, before its next step. If this run is over by then, the session's next
        run begins with it, and with `wake=True`, such a run is submitted. `budget` is the background run's share of this run's budget. It
        is charged when this call commits, and what is left comes back with the end. `files` is the folder in which the background run
        works, or `workspace:NAME`. This run's policies decide about its calls too.

        Raises `SpawnRefused` if the agent can't be found again, if the share is not left, or if the files can't be used, and `EffectRefused` if
        the tool's effect is `pure`, `read` or `staged`.
        """
        self._source.home.check()
        return self._source.spawn(agent, message, budget, files, wake)

    # Verbs that may be None.

    @property
    def wait_for(self) -> WaitFor | None:
        """The verb that asks the person in the environment; None unless the tool may ask a person."""
        return self._source.wait_for

    @property
    def prompt_model(self) -> PromptModel | None:
        """The verb that asks a model in a person's place; None unless this call runs in the mode `agent`, with a model."""
        return self._source.prompt_model


def call_behind(context: ToolContext) -> Attempt:
    """Return what a context is a view of, for the parts of Handrail that need more than a tool may see.

    Behind a policy's context is a view that has every member of the attempt. Behind a context for tests is a fake.
    """
    return context._source  # pyright: ignore[reportPrivateUsage]  # this is how other modules get it


class UserContext(ToolContext, frozen=True, eq=False):
    """A context with a person to ask. A tool whose handler takes it is offered only if the tool may ask a person."""

    @property
    def wait_for(self) -> WaitFor:
        """The verb that asks the person in the environment."""
        verb = self._source.wait_for
        assert verb is not None, "the gate makes this context only where somebody can be asked"
        return verb


class AgentContext(ToolContext, frozen=True, eq=False):
    """A context with a model to ask. A tool whose handler takes it is offered only if the tool may ask a model."""

    @property
    def prompt_model(self) -> PromptModel:
        """The verb that asks a model in a person's place."""
        verb = self._source.prompt_model
        assert verb is not None, "the gate makes this context only where there is a model"
        return verb


class WorkerContext(ToolContext, frozen=True, eq=False):
    """A context inside a worker. A tool whose handler takes it is offered only in a worker."""

    @property
    def registry(self) -> RegistryView:
        """The workers that this worker may call, by name, with their descriptions."""
        return self._facts.registry

    @property
    def creation_defaults(self) -> Mapping[str, Any]:
        """Defaults for workers that this worker creates."""
        return self._facts.creation_defaults

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The files that this worker was given."""
        return self._facts.attachments

    @property
    def message_callback(self) -> MessageCallback | None:
        """A function that is called with every message of this worker and of the workers it calls; None if there is none."""
        return self._facts.message_callback

    @property
    def _facts(self) -> WorkerFacts:
        facts = self._source.worker
        assert facts is not None, "the gate makes this context only in a worker"
        return facts


class WorkerUserContext(WorkerContext, UserContext, frozen=True, eq=False):
    """A context inside a worker, with a person to ask. A tool whose handler takes it is offered only in a worker, if it may ask a person."""
