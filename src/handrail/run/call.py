"""`Call`: the tool and the arguments that were requested; `Attempt`: one try at a call; `Passage`: what the tries at one call share.

The handler's context is a view of its attempt. The calls of one turn run concurrently, except those of tools that must run alone.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace

from handrail.concurrency.deadline import Deadline
from handrail.concurrency.operation import DONE, Done, Home, Operation, cancel_and_await
from handrail.concurrency.timers import WorkClock, taken_from, timers_of
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
from handrail.errors import CallFailed, ContextExpired, DefinitionError, NotSupported
from handrail.events import CallStatus, Emitted, Fact, Progress, ToolResumed, ToolStarted
from handrail.ids import tracing
from handrail.messages import CallAsked
from handrail.protocols import (
    BoundAdapter,
    Filesystem,
    Forkable,
    PromptView,
    RenderedPromptView,
)
from handrail.resources.bindings import CallResources
from handrail.run.approval import approval_verb
from handrail.run.call_log import CallLog
from handrail.run.effects import OnUnknown, once
from handrail.run.failures import Refused
from handrail.run.limits import BudgetTracker, CostTracker, Heartbeat
from handrail.run.place import Place, inner_call_id
from handrail.run.questions import wait_for
from handrail.run.run import Run
from handrail.run.tickets import GivenTicket, give_ticket
from handrail.run.transaction import Settled, Transaction, new_transaction
from handrail.run.views import CallApprovals, CallBus, CallSession, CallSignal
from handrail.schema.problems import describe_kind
from handrail.session.bus import check_event
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from handrail.concurrency.cancellation import CancelScope
    from handrail.concurrency.claims import Turns
    from handrail.fleet.background import Background
    from handrail.question import Quorum
    from handrail.run.gate import Gate
    from handrail.run.policies import PolicyCall


NO_TOOL: Tool[Any, Any] = Tool("unknown", "A placeholder for a tool that does not exist.")


class CallKind(msgspec.Struct, frozen=True):
    """The kind of a call, which determines which of the gate's steps it skips."""

    is_part: bool = False
    """Whether the call is a part of another call, such as an act of a handoff, or is auxiliary to one.

    Its tool is passed in, and the other call was already allowed and charged.
    """
    only_asks: bool = False
    """Whether the call is a part that only asks a question. If its answer is not recorded, a resumed run asks again."""
    undoes: bool = False
    """Whether the call undoes another call, finds out whether another call happened, or is inside such a call.

    Neither a cancellation nor the deadline of its run stops it, and it is never replayed.
    """
    is_auxiliary: bool = False
    """Whether the call is a compensation or a probe, which passes the gate alongside the call it belongs to.

    It has a transaction, events and, if the run has a journal, a record. No policy checks it, it uses no budget, and it
    has no number. Once it has succeeded, it is never compensated.
    """


CALL = CallKind()
PART = CallKind(is_part=True)
AUXILIARY = CallKind(is_part=True, undoes=True, is_auxiliary=True)
INSIDE_AUXILIARY = CallKind(undoes=True)


class Call(msgspec.Struct, frozen=True, eq=False):
    """One call as it was requested. Its attempts take one with another tool, or with a copy of the arguments, in its place."""

    gate: Gate
    name: str
    arguments: Any
    id: str
    path: tuple[str, ...]
    """The names of the outer calls, outermost first, followed by the call's own name."""
    loop: AbstractEventLoop
    number: int
    """1-based index in its run, or among the verbs of the outer attempt; 0 for a call that is not counted."""
    tool: Tool[Any, Any] = NO_TOOL
    message_id: str | None = None
    parent: Attempt | None = None
    """The attempt at the call around this one; None if there is no call around it."""
    depth: int = 0
    kind: CallKind = CALL
    has_secret: bool = False
    """Whether the call is a part that receives a secret from an earlier part. Secrets are not recorded."""
    at: Place | None = None
    """The call's place in the outermost run, if it was worked out when the call was created."""
    refused: str = ""
    """Why the gate refuses the call in step 1, before its tool is used; "" if it does not."""

    @property
    def whole(self) -> Call:
        """The innermost call that is not a part: this call, or one around it. If there is none, the outermost part."""
        whole = self
        while whole.kind.is_part and whole.parent is not None:
            whole = whole.parent.call
        return whole

    @property
    def tool_name(self) -> str:
        """The call's name up to the first dot. For an act, which is named `tool.act`, this is the tool that it belongs to."""
        return self.name.partition(".")[0]

    @property
    def run(self) -> Run:
        """The run that this call belongs to."""
        return self.gate.run

    @property
    def place(self) -> Place:
        """This call's place in the outermost run."""
        if self.at is not None:
            return self.at
        return _inside(self.run, self.parent).child(self.number)

    @property
    def key(self) -> str:
        """The key that identifies the call. It stays the same however often the call, or an outer one, is attempted."""
        return f"{self.run.run_context.request_id}{self.place.key}"


def _inside(run: Run, parent: Attempt | None) -> Place:
    """Return the place whose children are the calls of this run, or the calls inside `parent` if that belongs to this run."""
    return run.place if parent is None or parent.run is not run else parent.place


def refuse_call(call: Call, reason: str) -> Call:
    """Return a call that takes the place of this one, and that the gate refuses. It has its events, record and result like any other."""
    return replace(call, tool=NO_TOOL, refused=reason)  # without its tool, so that the gate looks closer


def check_name(name: object) -> None:
    """Raise `DefinitionError` if `invoke` was given something other than a tool's name, such as the tool itself."""
    if not isinstance(name, str):
        named = getattr(name, "name", "...")
        raise DefinitionError(
            f"invoke takes the name of a tool, not {describe_kind(name)}. Write invoke({named!r}, ...)."
        )


def new_call(
    gate: Gate,
    name: str,
    arguments: Any,
    id: str | None = None,
    parent: Attempt | None = None,
    message_id: str | None = None,
    *,
    number: int | None = None,
) -> Call:
    """Create a call to the tool named `name`, inside `parent` or else inside the call that the run is nested in, if any.

    `number` is its number among the verbs of `parent`, if that numbers them itself.
    """
    run = gate.run
    outer = run.outer
    if parent is None and outer is None:
        number = next(run.counter)
        loop = get_running_loop()
        tool = run.open_tools.get(name, NO_TOOL)
        id = id or run.call_prefix + str(number)  # cheaper than an f-string
        if not run.log.is_kept:
            return Call(gate, name, arguments, id, (name,), loop, number, tool, message_id)
        place = run.place.child(number)
        return Call(gate, name, arguments, id, (name,), loop, number, tool, message_id, at=place)
    if parent is None or parent is outer:
        assert outer is not None
        parent, number = outer, next(run.counter)
        id = id or f"{run.call_prefix}{number}"
    else:
        number = parent.next_number() if number is None else number
        id = id or inner_call_id(parent.call.id, parent.number, number)
    around = parent.call
    kind = INSIDE_AUXILIARY if around.kind.undoes else CALL
    path = (*around.path, name)
    place = _inside(run, parent).child(number) if run.log.is_kept else None
    return Call(
        gate,
        name,
        arguments,
        id,
        path,
        around.loop,
        number,
        run.open_tools.get(name, NO_TOOL),
        message_id,
        parent,
        around.depth + 1,
        kind,
        at=place,
    )


def new_part(
    parent: Attempt, tool: Tool[Any, Any], *, only_asks: bool = False, has_secret: bool = False
) -> Call:
    """Create a call for one part of the call `parent`. Its tool is passed in, not looked up."""
    call, number = parent.call, parent.next_number()
    kind = CallKind(is_part=True, only_asks=only_asks, undoes=call.kind.undoes)
    return Call(
        call.gate,
        tool.name,
        call.arguments,
        inner_call_id(call.id, parent.number, number),
        (*call.path, tool.name),
        call.loop,
        number,
        tool,
        None,
        parent,
        call.depth,
        kind,
        has_secret,
        _inside(call.run, parent).child(number) if call.run.log.is_kept else None,
    )


UNFINISHED: Any = object()
"""Stands for the return value of a handler that has not returned."""


class Passage(msgspec.Struct, eq=False):
    """One call on its way through the gate: what its attempts share, and its outcome."""

    has_secret: bool = False
    """Whether a person gave a secret to the call, or to an earlier part of the same call. Secrets are not recorded."""
    retries: int = 0
    """How many times the call has been retried after a transient failure."""
    started: float = 0.0
    """Seconds from when the run began or was last resumed until the call reached the gate."""
    lost: float = 0.0
    """The seconds that the loop had lost to listeners when the call began."""
    clock: WorkClock | None = None
    """The clock that the call's timeouts run on. None until a timeout, or an event from a thread, needs it."""
    has_waited: bool = False
    """Whether the call has waited for anything in the gate."""
    held: CancelScope | None = None
    """The call's scope while it holds timers until the call first waits; None if it holds none."""
    charged: bool = False
    """Whether the budget has been charged for the call, by this process or an earlier one."""
    logged: CallLog | None = None
    """What the attempts at the call have logged; None if nothing, or if there is no journal."""
    decision: str = ""
    """The policies' decision on the newest attempt: `allow`, `deny`, or `ask: ` and the reason; "" if they have not decided, or there
    are none.
    """
    policy: str = ""
    """The name of the policy that denied the newest attempt, or that was the first to ask for its approval; "" if none did."""
    policy_home: Home | None = None
    """The owner of the policies' operations on the newest attempt; None until they use one."""
    quorums: tuple[Quorum, ...] = ()
    """The approvals that the policies require from people other than the principal."""
    has_asked: bool = False
    """Whether approval of the call has already been requested. If so, no further quorums can be added."""
    approved: Approval | None = None
    conflicts: int = 0
    """How many times the call was run again because of other calls."""
    foreign: int = 0
    """How many times the call was run again because of somebody other than a call."""
    conflicted_at: float = 0.0
    turns: Turns | None = None
    """Where the call takes turns with others that it conflicted with; None if it does not."""
    left: tuple[str, ...] = ()
    """Effects of earlier attempts that could not be undone."""
    start: type[ToolStarted] | type[ToolResumed] = ToolStarted
    """The event with which the call begins in this leg of its run."""
    status: CallStatus = "ok"
    result: ToolResult[Any] | None = None
    error: BaseException | None = None
    stale: tuple[str, ...] = ()
    """What the call had read and others had changed when it was committed nevertheless."""
    recorded: bool = False
    """Whether the end of the call is in the journal."""

    def hold_timers(self, scope: CancelScope) -> None:
        """Let the scope hold the timers that it is about to start, unless the call has waited already."""
        if not self.has_waited and self.held is None:
            scope.hold_timers()
            self.held = scope

    def note_wait(self) -> None:
        """Note that the call waits for the first time, and arm the timers that were held until then."""
        self.has_waited = True
        if self.held is not None:
            self.held.arm_timers()
            self.held = None


class Inquiries(msgspec.Struct, eq=False):
    """The questions of one attempt."""

    approvals: int = 0
    """How many approvals the gate has requested for this attempt."""
    open: int = 0
    """How many of the attempt's questions are open."""
    left: int = 0
    """How many of the open questions were left to be answered later, possibly by another process."""
    grace: asyncio.TimerHandle | None = None
    """A timer that gives the handler time to act on an answer before its run may be parked; None if it is not running."""


class Stop(msgspec.Struct, eq=False):
    """Whether an attempt was told to stop, and who wants to know."""

    is_set: bool = False
    watchers: list[Callable[[], None]] = []


class Attempt(msgspec.Struct, eq=False, weakref=True):
    """One try at a call, which its handler and its policies see through their contexts.

    Parts that only some handlers need are created on first use. Once the handler has ended, its verbs raise
    `ContextExpired`.
    """

    call: Call
    run: Run
    passage: Passage
    number: int = 1
    """1-based index among the call's attempts."""
    inner: int = 0
    """How many counted verbs the attempt has used: calls, questions, requests for approval, nested runs and tickets."""
    params: Any = None
    policy_context: ToolContext | None = None
    """The context that the policies get; None before they check the call, and once it is over."""
    preview: str | None = None
    """Why the call needs approval, if it runs first and its changes are approved afterwards; otherwise None."""
    transaction: Transaction | None = None
    """The transaction that the handler and the policies work in; None until it is needed."""
    token: object = None
    """The token that the gate issues in step 7. A handler does not start without it."""
    finished: Any = UNFINISHED
    """The handler's result, or one that says that the call happened before a crash; `UNFINISHED` until there is one."""
    ended: bool = False
    is_undone: bool = False
    following: Attempt | None = None
    """The next attempt at the call; None if there is none."""
    stopping: Stop | None = None
    inquiries: Inquiries | None = None
    tickets: list[GivenTicket] | None = None
    """Tickets that this attempt has issued and not yet closed; None if there are none."""
    suspend: Callable[[], Awaitable[None]] | None = None
    """Keeps what the handler needs in order to go on in another process. Called before the call waits for a later answer."""
    bound: BoundAdapter | None = None
    made_resources: CallResources | None = None
    """The attempt's view of the resources; None until it is used."""
    _home: Home | None = None
    _heartbeat: Heartbeat | None = None

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
    def policing(self) -> PolicyCall | None:
        """The policies' view of the call; None before they check it, and once the call is over."""
        behind: Any = None if self.policy_context is None else call_behind(self.policy_context)
        return behind

    @property
    def newest(self) -> Attempt:
        """The newest attempt at the call: this one, or one that followed it."""
        newest = self
        while newest.following is not None:
            newest = newest.following
        return newest

    @property
    def elapsed(self) -> float:
        """Seconds since the call reached the gate."""
        run = self.run
        return run.monotonic() - run.began - self.passage.started

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

    @property
    def stopped(self) -> bool:
        """Whether the attempt was told that its call was cancelled or has timed out."""
        return self.stopping is not None and self.stopping.is_set

    def on_stop(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` when the call is cancelled or times out. Returns a function that unsubscribes it."""
        stopping = self.stopping = self.stopping or Stop()
        watchers = stopping.watchers
        watchers.append(watcher)
        return lambda: watchers.remove(watcher) if watcher in watchers else None

    def stop(self) -> None:
        """Tell everyone who watches the call's signal that the call was cancelled or has timed out."""
        stopping = self.stopping = self.stopping or Stop()
        if not stopping.is_set:
            stopping.is_set = True
            for watcher in tuple(stopping.watchers):
                watcher()

    def resolve(self, tool: Tool[Any, Any]) -> None:
        """Set the tool that the call's name refers to. Raises `Refused` if the call is refused."""
        self.call = replace(self.call, tool=tool)
        if self.call.refused:
            raise Refused("invalid", self.call.refused)

    def inquire(self) -> Inquiries:
        """Return the attempt's questions, after making a place for them on first use."""
        if self.inquiries is None:
            self.inquiries = Inquiries()
        return self.inquiries

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
        inquiries = self.inquire()
        inquiries.approvals += 1
        return self.place.approval(inquiries.approvals).id(self.run_context.request_id)

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
        call, passage = self.call, self.passage
        started_at = self.run.began_at + timedelta(seconds=passage.started)
        return Invocation(
            call.id, started_at, passage.retries + 1, f"{call.key}#{call.name}", call.message_id, call.path
        )

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
        given = run.options.extras if tracing.extras is None else tracing.extras.merged(run.options.extras)
        return given.for_call(self.call.id, NO_EXTRAS if answer is None else answer.extras)

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
        passage = self.passage
        if passage.clock is None:
            with self.run.session.lock:  # two threads may ask at once and must get the same clock
                passage.clock = passage.clock or WorkClock(timers_of(self.call.loop))
        return passage.clock

    def excused(self) -> float:
        """Return the seconds since the call began that are not charged to it, because listeners took them."""
        lost, clock = self.run.lost, self.passage.clock
        seconds = lost.seconds - self.passage.lost
        if clock is None or clock.lost is None or not clock.is_on(lost):
            return seconds
        return seconds + clock.lost_on_threads()

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

    def auxiliary(self, id: str, tool: Tool[Any, Any], place: Place) -> Call:
        """Create the call for a compensation or a probe, alongside this call and in the same outer transaction."""
        call = self.call
        return Call(
            call.gate,
            tool.name,
            None,
            id,
            (*call.path, tool.name),
            call.loop,
            0,
            tool,
            None,
            call.parent,
            call.depth,
            kind=AUXILIARY,
            at=place,
        )

    def stand_in(self, number: int) -> Attempt:
        """Return the attempt of an inner call that stands for the work done elsewhere under a ticket, the verb with this number."""
        call = self.call
        inner = Call(
            call.gate,
            call.name,
            call.arguments,
            inner_call_id(call.id, self.number, number),
            call.path,
            call.loop,
            number,
            call.tool,
            None,
            self,
            call.depth,
        )
        return call.gate.open(inner)

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

    def spawn(self, *asked: Any) -> Background:
        background: Any = import_module(
            "handrail.fleet.background"
        )  # it loads agents, which are above the gate
        return background.spawn(self, *asked)

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


def announce(context: ToolContext, kind: Callable[..., Fact], *values: object) -> None:
    """Publish a fact about a handler's call that is only for telemetry, if anybody listens. `values` stand between the id and the run."""
    attempt = attempt_of(context)
    if attempt is not None and attempt.run.told.get(cast("type[Fact]", kind), True):
        attempt.run.publish(kind(attempt.id, *values, attempt.run_context))


# --- turns -------------------------------------------------------------------------------------------


class ToolCall(msgspec.Struct, frozen=True):
    """One call that a model asked for."""

    name: str
    arguments: Any = "{}"
    id: str | None = None


class Turn(msgspec.Struct, frozen=True):
    """The outcome of a turn: a result for every call, and the error that ends the run, if any."""

    results: tuple[ToolResult[Any], ...]
    ending: BaseException | None


class OpenTurn:
    """The calls of one turn. Each gets exactly one result, no matter how `run()` ends."""

    __slots__ = ("_calls", "_gate")

    def __init__(
        self,
        gate: Gate,
        calls: Sequence[ToolCall | CallAsked],
        message_id: str | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Open a turn. `refused` maps the ids of calls that may not run to the reasons that the model is told."""
        self._gate = gate
        self._calls: list[Attempt] = []
        for asked in calls:
            call = new_call(gate, asked.name, asked.arguments, asked.id, None, message_id)
            if refused and call.id in refused:
                call = refuse_call(call, refused[call.id])
            self._calls.append(gate.open(call))

    def run(self) -> Coroutine[Any, Any, BaseException | None]:
        """Run the calls, until one of them ends the run. Returns the error that ends the run, or None if no call ended it.

        Raises `CancelledError` if this is cancelled, or if a call that runs by itself is. If calls that run together are
        cancelled, this returns a `CancelledError`, or the error of one of them that failed.
        """
        if len(self._calls) == 1:
            return _run_one(self._gate, self._calls[0])
        return self._run_groups()

    async def _run_groups(self) -> BaseException | None:
        for group in _groups(self._gate, self._calls):
            ending = await _run_group(self._gate, group)
            if ending is not None:
                return ending
        return None

    def is_recorded(self) -> bool:
        """Return whether the record of a resumed run has the results of all calls."""
        log = self._gate.run.log
        return all(log.is_over(each.call.place) for each in self._calls)

    def results(self) -> tuple[ToolResult[Any], ...]:
        """Return a result for every call, in the order in which they were asked for."""
        return tuple([_result_of(each) for each in self._calls])


async def run_turn(gate: Gate, calls: Sequence[ToolCall], message_id: str | None = None) -> Turn:
    """Run the calls of one turn, and return a result for each of them.

    A call that ends the run stops the other calls of the turn, which still get results. Raises `CancelledError` if this is
    cancelled, or if a call that runs by itself is.
    """
    turn = OpenTurn(gate, calls, message_id)
    ending = await turn.run()
    return Turn(turn.results(), ending)


def _groups(gate: Gate, calls: list[Attempt]) -> Iterator[list[Attempt]]:
    """Yield groups of consecutive calls that run together. A call that must run alone forms its own group."""
    group: list[Attempt] = []
    for each in calls:
        tool = gate.run.tools.get(each.call.name)
        if tool is not None and tool.alone:
            if group:
                yield group
                group = []
            yield [each]
        else:
            group.append(each)
    if group:
        yield group


async def _run_one(gate: Gate, attempt: Attempt) -> BaseException | None:
    try:
        await gate.pass_through(attempt.call, attempt)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


async def _run_group(gate: Gate, group: list[Attempt]) -> BaseException | None:
    if len(group) == 1:
        return await _run_one(gate, group[0])
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(gate.pass_through(each.call, each)) for each in group]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in done if task.cancelled() or task.exception() is not None]
            if failed:
                await cancel_and_await(tuple(waiting))
                return next(
                    (task.exception() for task in failed if not task.cancelled()), asyncio.CancelledError()
                )
    except asyncio.CancelledError:
        await cancel_and_await(tuple(waiting))
        raise
    return None


def _result_of(each: Attempt) -> ToolResult[Any]:
    result = each.passage.result
    return (
        ToolResult.error(f"{each.name} did not run: the turn was stopped first.")
        if result is None
        else result
    )
