"""`Attempt`: one try at a call. The handler's context is a view of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.concurrency.operation import DONE, Done, Home, Operation
from handrail.concurrency.timers import Deadline, WorkClock, taken_from, timers_of
from handrail.context import (
    Approval,
    Extras,
    Invocation,
    PromptModel,
    RequestView,
    ResponseAccumulator,
    RunContext,
    ToolContext,
    WaitFor,
    WorkerFacts,
    call_behind,
)
from handrail.context.extras import NO_EXTRAS
from handrail.errors import CallFailed, ContextExpired, NotSupported
from handrail.events import Emitted, Progress
from handrail.protocols import (
    BoundAdapter,
    Filesystem,
    Forkable,
    PromptView,
    RenderedPromptView,
    ToolPolicy,
)
from handrail.resources.bindings import CallResources
from handrail.run.approval import approval_verb
from handrail.run.call import Call, CallKind, new_call
from handrail.run.call_log import CallLog
from handrail.run.effects import OnUnknown, once
from handrail.run.limits import BudgetTracker, CostTracker, Heartbeat
from handrail.run.place import Place
from handrail.run.questions import wait_for
from handrail.run.run import Run
from handrail.run.tickets import GivenTicket, give_ticket
from handrail.run.transaction import Settled, Transaction, new_transaction
from handrail.run.views import CallApprovals, CallBus, CallSession, CallSignal
from handrail.session.bus import check_event
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from handrail.question import Quorum
    from handrail.run.gate import Gate


UNFINISHED: Any = object()
"""Stands for the return value of a handler that has not returned."""


class Attempt(msgspec.Struct, eq=False, weakref=True):
    """One try at a call, which its handler and its policies see through their contexts.

    Parts that only some handlers need are created on first use. Once the handler has ended, its verbs raise
    `ContextExpired`.
    """

    call: Call
    run: Run
    number: int = 1
    """1-based index among the call's attempts."""
    retries: int = 0
    """How many times the call has been retried after a transient failure."""
    has_secret: bool = False
    """Whether a person gave a secret to the call, or to an earlier part of the same call. Secrets are not recorded."""
    started: float = 0.0
    """Seconds from when the run began or was last resumed until the call reached the gate."""
    lost: float = 0.0
    """The seconds that the loop had lost to listeners when the call began."""
    clock: WorkClock | None = None
    """The clock that the call's timeouts run on. None until a timeout, or an event from a thread, needs it."""
    params: Any = None
    checked: list[tuple[ToolPolicy, Any]] = []
    """The policies that have checked the call, each with its own copy of the params."""
    transaction: Transaction | None = None
    """The transaction that the handler and the policies work in; None until it is needed."""
    token: object = None
    """The token that the gate issues in step 7. A handler does not start without it."""
    finished: Any = UNFINISHED
    """The handler's result, or one that says that the call happened before a crash; `UNFINISHED` until there is one."""
    decision: str = ""
    """The policies' decision: `allow`, `deny`, or `ask: ` and the reason; "" if they have not decided, or there are none."""
    quorums: tuple[Quorum, ...] = ()
    """The approvals that the policies require from people other than the principal."""
    has_asked: bool = False
    """Whether approval of the call has already been requested. If so, no further quorums can be added."""
    charged: bool = False
    """Whether the budget has been charged for the call, by this process or an earlier one."""
    preview: str | None = None
    """Why the call needs approval, if it runs first and its changes are approved afterwards; otherwise None."""
    stale: tuple[str, ...] = ()
    approvals: int = 0
    """How many approvals the gate has requested for this attempt."""
    inner: int = 0
    """How many counted verbs the attempt has used: calls, questions, requests for approval, nested runs and tickets."""
    tickets: list[GivenTicket] | None = None
    """Tickets that this attempt has issued and not yet closed; None if there are none."""
    asking: int = 0
    """How many of the attempt's questions are open."""
    waiting: int = 0
    """How many of the open questions were left to be answered later, possibly by another process."""
    logged: CallLog | None = None
    """What the attempts at the call have logged; None if nothing, or if there is no journal."""
    grace: asyncio.TimerHandle | None = None
    """A timer that gives the handler time to act on an answer before its run may be parked; None if it is not running."""
    ended: bool = False
    is_undone: bool = False
    stopped: bool = False
    policy_context: ToolContext | None = None
    policy_home: Home | None = None
    """The owner of the policies' operations; None until they use one."""
    policies_made_resources: bool = False
    bound: BoundAdapter | None = None
    made_resources: CallResources | None = None
    """The attempt's view of the resources; None until it is used."""
    _home: Home | None = None
    _invocation: Invocation | None = None
    _heartbeat: Heartbeat | None = None
    _cancel_watch: list[Callable[[], None]] | None = None

    # The call.

    @property
    def gate(self) -> Gate:
        return self.call.gate

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def id(self) -> str:
        return self.call.id

    @property
    def tool(self) -> Tool[Any, Any]:
        return self.call.tool

    @property
    def kind(self) -> CallKind:
        return self.call.kind

    @property
    def parent(self) -> Attempt | None:
        return self.call.parent

    @property
    def path(self) -> tuple[str, ...]:
        return self.call.path

    @property
    def depth(self) -> int:
        return self.call.depth

    @property
    def arguments(self) -> Any:
        return self.call.arguments

    @property
    def place(self) -> Place:
        """This attempt's place in the outermost run."""
        return self.call.place.attempt(self.number)

    @property
    def elapsed(self) -> float:
        """Seconds since the call reached the gate."""
        run = self.run
        return run.monotonic() - run.began - self.started

    # Lifecycle.

    @property
    def home(self) -> Home:
        """The owner of this attempt's operations. It is closed when the handler has ended."""
        home = self._home
        if home is None:
            with self.run.session.lock:  # two threads may ask at once and must get the same home
                home = self._home
                if home is None:
                    home = self._home = Home(self.call.loop, self.call.id)
                    home.closed = self.ended
        return home

    @property
    def let_through(self) -> bool:
        """Whether the gate has let the handler start."""
        return self.token is not None

    def check(self) -> None:
        """Raise `ContextExpired` if the handler has ended."""
        if self.ended:
            raise ContextExpired(self.call.id)

    def close(self) -> None:
        """Close the handler's context, so that its verbs raise `ContextExpired`."""
        self.ended = True
        if self._home is not None:
            self._home.close()

    def on_stop(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` when the call is cancelled or times out. Returns a function that unsubscribes it."""
        watchers = self._cancel_watch
        if watchers is None:
            watchers = self._cancel_watch = []
        watchers.append(watcher)
        return lambda: watchers.remove(watcher) if watcher in watchers else None

    def stop(self) -> None:
        """Tell everyone who watches the call's signal that the call was cancelled or has timed out."""
        if not self.stopped:
            self.stopped = True
            for watcher in tuple(self._cancel_watch or ()):
                watcher()

    def next(self) -> Attempt:
        """Return the next attempt at the same call. It replaces this attempt, whose context has expired."""
        has_secret = self.call.kind.is_part and self.has_secret
        again = Attempt(self.call, self.run, self.number + 1, self.retries, has_secret, self.started)
        again.lost, again.clock, again.logged = self.lost, self.clock, self.logged
        again.quorums, again.has_asked, again.charged = self.quorums, self.has_asked, self.charged
        return again

    # Numbers and ids. They follow from the order in which a handler uses its verbs, and are never random.

    def next_number(self) -> int:
        """Count the next verb, and return its number."""
        self.inner += 1
        return self.inner

    def next_verb(self, verb: str) -> int:
        """Count the verb that is about to begin, and return its number.

        Raises `Diverged` if the record has a different verb at that place.
        """
        number = self.next_number()
        log = self.run.log
        if log.resumed:
            log.check_verb(self.place.child(number), verb)
        return number

    def question_id(self, which: int | str) -> str:
        """Return the id of a question, derived from the number of the verb that asks it or from the question's name."""
        return self.place.question(which).id(self.run_context.request_id)

    def next_approval_id(self) -> str:
        """Return the id of the next approval that the gate requests."""
        self.approvals += 1
        return self.place.approval(self.approvals).id(self.run_context.request_id)

    def own_effect(self, result: Any) -> Settled | None:
        """Return this call's external effect; None if a rollback does not need to compensate or report one."""
        tool = self.tool
        if result is UNFINISHED or tool.delegates or self.kind.is_auxiliary:
            return None
        value: Any = None
        if isinstance(result, ToolResult):  # if it is anything else, the handler has still run
            if not result.success:
                return None
            value = result.value  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # whatever it holds
        if tool.effect == "compensable":
            return Settled(self.name, self.id, tool, self.params, value, self.call.place)
        return Settled(self.name, self.id) if tool.effect == "irreversible" else None

    def settle_effect(self, transaction: Transaction) -> None:
        """Note the external effect of a finished call, if it has one, in a transaction whose rollback must compensate or report it."""
        if (done := self.own_effect(self.finished)) is not None:
            transaction.settle(done)

    # Facts.

    @property
    def invocation(self) -> Invocation:
        if self._invocation is None:
            call = self.call
            started_at = self.run.began_at + timedelta(seconds=self.started)
            self._invocation = Invocation(
                call.id, started_at, self.retries + 1, f"{call.key}#{call.name}", call.message_id, call.path
            )
        return self._invocation

    @property
    def run_context(self) -> RunContext:
        return self.run.run_context

    @property
    def prompt(self) -> PromptView:
        hint = "Evaluate a `Prompt` that has this tool, or pass `prompt=...` to `open_gate`."
        return self._there("prompt", self.run.model.prompt, hint)

    @property
    def rendered_prompt(self) -> RenderedPromptView | None:
        return self.run.model.rendered

    @property
    def request(self) -> RequestView | None:
        answer = self.run.model.answer
        return None if answer is None else answer.request

    @property
    def response_accumulator(self) -> ResponseAccumulator | None:
        answer = self.run.model.answer
        return None if answer is None else answer.accumulator

    @property
    def extras(self) -> Extras:
        run, answer = self.run, self.run.model.answer
        return run.options.extras.for_call(self.call.id, NO_EXTRAS if answer is None else answer.extras)

    # Resources and state.

    @property
    def adapter(self) -> BoundAdapter:
        bound = self.bound
        if bound is None:
            hint = "Evaluate a prompt that has this tool with an `Adapter`, or pass `adapter=...` to `open_gate`."
            bound = self.bound = self._there("adapter", self.run.model.adapter, hint)(self)
        return bound

    @property
    def session(self) -> CallSession:
        return CallSession(self)

    @property
    def event_bus(self) -> CallBus:
        return CallBus(self)

    @property
    def deadline(self) -> Deadline | None:
        return self.run.deadline

    @property
    def signal(self) -> CallSignal:
        return CallSignal(self)

    @property
    def heartbeat(self) -> Heartbeat:
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(self.run.lease, self.run.clock)
        return self._heartbeat

    @property
    def budget_tracker(self) -> BudgetTracker:
        return self.run.costs.tracker

    @property
    def cost_tracker(self) -> CostTracker:
        return self.run.costs.models

    @property
    def approval_controller(self) -> CallApprovals:
        return CallApprovals(self)

    @property
    def worker(self) -> WorkerFacts | None:
        return self.run.worker

    @property
    def resources(self) -> CallResources:
        if self.made_resources is None:
            self.made_resources = CallResources(self.run.world.resources, self, self.run.costs.given)
        return self.made_resources

    @property
    def filesystem(self) -> Filesystem:
        files = self.run.world.filesystem
        if files is None:
            return self.resources.get(Filesystem)
        self.check()
        return self.open_transaction.view_of(files)

    def view(self, resource: Forkable) -> Any:
        """Return what the call sees of its own fork of a resource."""
        return self.open_transaction.view_of(resource)

    @property
    def open_transaction(self) -> Transaction:
        """The attempt's transaction, created on first use. Raises `ContextExpired` if the attempt was undone."""
        if self.transaction is None:
            with self.run.session.lock:  # two threads may ask at once and must get the same transaction
                self.transaction = self.transaction or new_transaction(self, self.call.tool)
        return self.transaction

    # Verbs.

    def once(
        self,
        key: str,
        function: Callable[[], Any],
        probe: Callable[[], Any] | None,
        on_unknown: OnUnknown,
    ) -> Operation[Any]:
        return once(self, key, function, probe, on_unknown)

    def beat(self) -> Done:
        self.heartbeat.beat()
        if self.call.kind.is_part and self.call.parent is not None:
            self.call.parent.beat()  # an act beats for its handoff
        return DONE

    def report_progress(self, message: str, done: float | None, total: float | None) -> Done:
        about = self.call.whole
        self._publish(Progress(about.id, about.tool_name, message, done, total, self.run_context))
        return DONE

    def emit(self, event: object) -> Done:
        check_event(event)
        about = self.call.whole
        self._publish(Emitted(about.id, about.tool_name, event, self.run_context))
        return DONE

    def _publish(self, fact: Progress | Emitted) -> None:
        publish = self.run.session.dispatcher.publish
        if asyncio._get_running_loop() is not None:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
            publish(fact)
            return
        with taken_from([each.work_clock for each in self.with_outer()]):
            publish(fact)

    def with_outer(self) -> Iterator[Attempt]:
        """Iterate over this attempt and the attempts around it, innermost first."""
        each: Attempt | None = self
        while each is not None:
            yield each
            each = each.parent

    @property
    def work_clock(self) -> WorkClock:
        """The loop's clock, without the time that listeners take from the call."""
        if self.clock is None:
            with self.run.session.lock:  # two threads may ask at once and must get the same clock
                self.clock = self.clock or WorkClock(timers_of(self.call.loop))
        return self.clock

    def excused(self) -> float:
        """Return the seconds since the call began that are not charged to it, because listeners took them."""
        lost, clock = self.run.lost, self.clock
        seconds = lost.seconds - self.lost
        return seconds if clock is None or not clock.is_on(lost) else seconds + clock.lost_on_threads()

    def request_approval(self, message: str) -> Operation[Approval]:
        return approval_verb(self, "message", f"request_approval({message!r})", message, message)

    def request_permission(self, kind: str) -> Operation[Approval]:
        reason = f"{self.call.tool_name} asks for the permission {kind!r}"
        return approval_verb(self, "permission", f"request_permission({kind!r})", kind, reason)

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Operation[ToolResult[Any]]:
        inner = new_call(self.gate, name, arguments, parent=self)
        return Operation(lambda: self.gate.pass_through(inner), f"call({name!r})", self.home)

    def call_worker(self, name: str, input: Any, attachments: Sequence[Any]) -> Operation[Any]:
        workers = self.run.workers
        if workers is None:
            raise NotSupported(
                "call_worker",
                "Give the run its workers with `Adapter(model, workers=WorkerRegistry(folder))`, or use the tool in a worker.",
            )
        arguments = workers.arguments(input, attachments)
        inner = new_call(self.gate, name, arguments, parent=self)
        return Operation(lambda: self._call_worker(inner), f"call_worker({name!r})", self.home)

    async def _call_worker(self, inner: Call) -> Any:
        tool = self.run.tools.get(inner.name)
        if tool is not None and not tool.delegates:
            said = f"{inner.name} is a tool here, not a worker. Use `context.call({inner.name!r}, ...)`."
            raise CallFailed(inner.name, ToolResult.error(said))
        result = await self.gate.pass_through(inner)
        if not result.success:
            raise CallFailed(inner.name, result)
        return result.value

    def ticket(self) -> str:
        return give_ticket(self)

    # Verbs that may be None.

    @property
    def wait_for(self) -> WaitFor | None:
        return wait_for(self) if self.run.can_ask(self.tool) else None

    @property
    def prompt_model(self) -> PromptModel | None:
        make = self.run.model.prompt_model
        return make(self) if make is not None and self.run.can_prompt(self.tool) else None

    def _there(self, member: str, value: Any, hint: str) -> Any:
        if value is None:
            raise NotSupported(member, hint)
        return value


def attempt_of(context: ToolContext) -> Attempt | None:
    """Return the attempt behind a handler's context; None if no gate made the context, as in a test."""
    behind: Any = call_behind(context)
    return behind if isinstance(behind, Attempt) else None
