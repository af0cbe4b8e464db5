"""`LiveCall`: one call as the gate keeps it, and what its context's members and verbs do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.cancellation import CancelScope
from handrail.context import (
    Approval,
    Extras,
    Invocation,
    RequestView,
    ResponseAccumulator,
    RunContext,
    ToolContext,
    WorkerFacts,
)
from handrail.context.verbs import PromptModel, WaitFor
from handrail.deadline import Deadline
from handrail.dispatch.asking import approval_verb, wait_for
from handrail.dispatch.frame import Frame
from handrail.dispatch.once import OnUnknown, once
from handrail.dispatch.sharing import GivenTicket, give_ticket
from handrail.dispatch.transaction import Settled, Transaction
from handrail.dispatch.views import CallApprovals, CallBus, CallSession, CallSignal
from handrail.errors import CallFailed, ContextExpired, NotSupported
from handrail.events import CallStatus, Emitted, Progress
from handrail.limits import BudgetTracker, Heartbeat, Reservation, Spending
from handrail.operation import DONE, Done, Home, Operation
from handrail.place import Place, inner_call_id
from handrail.protocols import (
    BoundAdapter,
    Filesystem,
    Forkable,
    PromptView,
    RenderedPromptView,
)
from handrail.resources.registry import CallResources
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.gate import Gate

NO_TOOL: Tool[Any, Any] = Tool("unknown", "Stands for a tool that was asked for and does not exist.")


class LiveCall(msgspec.Struct, eq=False):
    """One call. Everything that not every call needs is made when it is first asked for."""

    gate: Gate
    frame: Frame
    name: str
    id: str
    path: tuple[str, ...]
    loop: asyncio.AbstractEventLoop
    started: float
    """Seconds into the run, once it goes through the gate."""
    ordinal: int
    """The how-manieth call of its run, or of the call around it, this is."""
    parent: LiveCall | None = None
    depth: int = 0
    message_id: str | None = None
    tool: Tool[Any, Any] = NO_TOOL
    act: bool = False
    """Is this a part of the call around it? Then its tool is given, and that call was allowed and counted."""
    asks_only: bool = False
    """Is it there to ask somebody? Then it is asked again, where the answer was not kept."""
    given_secret: bool = False
    """Was it given a secret in an answer? That is kept nowhere, so nobody could give it again."""
    params: Any = None
    seen: Any = None
    """The params as policies see them."""
    attempt: int = 1
    reruns: int = 0
    status: CallStatus = "ok"
    result: ToolResult[Any] | None = None
    finished: Any = None
    """What the handler gave back, whatever becomes of it."""
    error: BaseException | None = None
    stale: tuple[str, ...] = ()
    decision: str = ""
    """What policies said of it, where there are any."""
    approved: Approval | None = None
    preview: str | None = None
    """Why it has to be approved, where that is done by what it did: then it runs first."""
    spending: Reservation | None = None
    transaction: Transaction | None = None
    token: object = None
    scope: CancelScope | None = None
    stopped: bool = False
    undoing: bool = False
    """Does this undo something? Then neither a cancelled run nor its deadline stops it."""
    asked: int = 0
    """How often this attempt had to be approved."""
    asking: int = 0
    """How many of its questions are not over."""
    grace: asyncio.TimerHandle | None = None
    """Runs while its handler may do something with an answer it was given."""
    waiting: int = 0
    """How many of its questions were put to somebody who will answer later."""
    recorded: bool = False
    """Is its end in the journal?"""
    ended: bool = False
    policy_context: ToolContext | None = None
    policies_made_resources: bool = False
    bound: BoundAdapter | None = None
    inner: int = 0
    """How many verbs this attempt has used that leave something to go on from: calls, questions, runs."""
    tickets: list[GivenTicket] | None = None
    """What this attempt gave out to other processes and has not taken back."""
    left: tuple[str, ...] = ()
    """What earlier tries did to the world that could not be undone."""
    arguments: Any = None
    """The arguments as they came."""
    tries: int = 1
    """How often the handler was started, for whatever reason."""
    _place: Place | None = None
    """Made when it is first asked for; given for what undoes a call, which is not counted."""
    first: LiveCall | None = None
    """The first try at this call, where this is another."""
    _home: Home | None = None
    _invocation: Invocation | None = None
    _heartbeat: Heartbeat | None = None
    made_resources: CallResources | None = None
    """The call's view of its resources, once it asked for any."""
    _cancel_watch: list[Callable[[], None]] | None = None

    @property
    def home(self) -> Home:
        """Where this attempt's operations run; closed with it."""
        home = self._home
        if home is None:
            with self.frame.session.lock:  # two threads may ask at once, and there is one home
                home = self._home
                if home is None:
                    home = self._home = Home(self.loop, self.id)
                    home.closed = self.ended
        return home

    @property
    def let_through(self) -> bool:
        """Has the gate let the handler start? Until then only policies have looked."""
        return self.token is not None

    def check(self) -> None:
        """Raise `ContextExpired` if the handler is over."""
        if self.ended:
            raise ContextExpired(self.id)

    def close(self) -> None:
        """The handler is over: from now on its context refuses."""
        self.ended = True
        if self._home is not None:
            self._home.close()

    def next_approval_id(self) -> str:
        """By the call's place in its run and the order of asking, whatever ids a caller gives."""
        self.asked += 1
        return self.attempt_place.approval(self.asked).id(self.run_context.request_id)

    def next_verb(self, verb: str) -> int:
        """The number of a verb, by the order in which handlers make them. `Diverged` if it was another."""
        self.inner += 1
        log = self.frame.log
        if log is not None and log.resumed:
            log.check_verb(self.attempt_place.child(self.inner), verb)
        return self.inner

    def question_id(self, which: int | str) -> str:
        """The id of the question asked by a verb, by the verb's number or the question's name."""
        return self.attempt_place.question(which).id(self.run_context.request_id)

    def again(self, left: tuple[str, ...] = ()) -> LiveCall:
        """Another try at the same call. What is left of this one keeps a context that is over."""
        return LiveCall(
            self.gate,
            self.frame,
            self.name,
            self.id,
            self.path,
            self.loop,
            self.started,
            self.ordinal,
            self.parent,
            self.depth,
            self.message_id,
            self.tool,
            self.act,
            self.asks_only,
            self.act and self.given_secret,
            attempt=self.attempt,
            reruns=self.reruns,
            approved=self.approved if self.preview is None else None,
            spending=self.spending,
            tries=self.tries + 1,
            left=(*self.left, *left),
            _place=self._place,
            first=self.first or self,
            scope=self.scope,
        )

    def next_inner_id(self) -> str:
        """By order, never by chance; those of another try are told apart."""
        self.inner += 1
        return inner_call_id(self.id, self.tries, self.inner)

    @property
    def key(self) -> str:
        """Identifies the call: the same however often it, or what is around it, is tried."""
        return f"{self.run_context.request_id}{self.place.key}"

    @property
    def place(self) -> Place:
        """Where this call is in its run."""
        place = self._place
        if place is None:
            parent = self.parent
            if parent is None or parent.frame is not self.frame:
                place = self.frame.place.child(self.ordinal)
            else:
                place = parent.attempt_place.child(self.ordinal)
            self._place = place
        return place

    @property
    def attempt_place(self) -> Place:
        """Where this try at the call is in its run."""
        return self.place.attempt(self.tries)

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        frame = self.frame
        return frame.monotonic() - frame.began - self.started

    def own_effect(self, result: ToolResult[Any]) -> Settled | None:
        """What this call itself has done to the world, where a rollback has to know of it."""
        tool = self.tool
        if not result.success or tool.delegates or tool.effect not in ("compensable", "irreversible"):
            return None
        if tool.effect == "compensable":
            return Settled(self.name, self.id, tool, self.params, result.value, self.place)
        return Settled(self.name, self.id)

    # Facts.

    @property
    def invocation(self) -> Invocation:
        if self._invocation is None or self._invocation.attempt != self.attempt:
            started_at = self.frame.began_at + timedelta(seconds=self.started)
            self._invocation = Invocation(
                self.id, started_at, self.attempt, f"{self.key}#{self.name}", self.message_id, self.path
            )
        return self._invocation

    @property
    def run_context(self) -> RunContext:
        return self.frame.run_context

    @property
    def prompt(self) -> PromptView:
        return self._there("prompt", self.frame.prompt, "Run the tool from a prompt.")

    @property
    def rendered_prompt(self) -> RenderedPromptView | None:
        return self.frame.rendered_prompt

    @property
    def request(self) -> RequestView | None:
        return self.frame.provider.request

    @property
    def response_accumulator(self) -> ResponseAccumulator | None:
        return self.frame.provider.accumulator

    @property
    def extras(self) -> Extras:
        return self.frame.provider.extras

    # Things.

    @property
    def adapter(self) -> BoundAdapter:
        bound = self.bound
        if bound is None:
            make = self._there("adapter", self.frame.adapter, "Run the tool from an adapter.")
            bound = self.bound = make(self)
        return bound

    @property
    def session(self) -> CallSession:
        return CallSession(self)

    @property
    def event_bus(self) -> CallBus:
        return CallBus(self)

    @property
    def deadline(self) -> Deadline | None:
        return self.frame.deadline

    @property
    def signal(self) -> CallSignal:
        return CallSignal(self)

    @property
    def heartbeat(self) -> Heartbeat:
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(self.frame.lease, self.frame.clock)
        return self._heartbeat

    @property
    def budget_tracker(self) -> BudgetTracker:
        return self.frame.tracker

    @property
    def cost_tracker(self) -> Spending:
        return self.frame.spending

    @property
    def approval_controller(self) -> CallApprovals:
        return CallApprovals(self)

    @property
    def worker(self) -> WorkerFacts | None:
        return self.frame.worker

    @property
    def resources(self) -> CallResources:
        if self.made_resources is None:
            self.made_resources = CallResources(self.frame.resources, self, self.frame.given)
        return self.made_resources

    @property
    def filesystem(self) -> Filesystem:
        files = self.frame.filesystem
        if files is None:
            return self.resources.get(Filesystem)
        self.check()
        return self.open_transaction.fork_of(files)

    def fork(self, protocol: type, resource: Forkable) -> Any:
        """The call's own version of a resource."""
        return self.open_transaction.fork_of(resource)

    @property
    def open_transaction(self) -> Transaction:
        """The call's transaction, which is there from step 7 on."""
        transaction = self.transaction
        if transaction is None:
            raise NotSupported("session", "The call's transaction opens when its handler runs.")
        return transaction

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
        return DONE

    def report_progress(self, message: str, done: float | None, total: float | None) -> Done:
        self._publish(Progress(self.id, self.name, message, done, total, self.run_context))
        return DONE

    def emit(self, event: object) -> Done:
        self._publish(Emitted(self.id, self.name, event, self.run_context))
        return DONE

    def _publish(self, fact: Progress | Emitted) -> None:
        self.frame.session.dispatcher.publish(fact)

    def request_approval(self, message: str) -> Operation[Approval]:
        return approval_verb(self, "message", f"request_approval({message!r})", message, message)

    def request_permission(self, kind: str) -> Operation[Approval]:
        return approval_verb(
            self,
            "permission",
            f"request_permission({kind!r})",
            kind,
            f"{self.name} asks for the permission {kind!r}",
        )

    def call(self, name: str, arguments: Mapping[str, Any]) -> Operation[ToolResult[Any]]:
        inner = new_call(self.gate, name, parent=self)
        return Operation(lambda: self.gate.pass_through(inner, arguments), f"call({name!r})", self.home)

    def call_worker(self, name: str, input: Any, attachments: Sequence[Any]) -> Operation[Any]:
        workers = self.frame.workers
        if workers is None:
            raise NotSupported(
                "call_worker",
                "Run the tool from a worker, or give the run some: Adapter(model, workers=WorkerRegistry(folder)).",
            )
        arguments = workers.arguments(input, attachments)
        inner = new_call(self.gate, name, parent=self)
        return Operation(lambda: self._call_worker(inner, arguments), f"call_worker({name!r})", self.home)

    async def _call_worker(self, inner: LiveCall, arguments: Mapping[str, Any]) -> Any:
        tool = self.frame.tools.get(inner.name)
        if tool is not None and not tool.delegates:
            said = f"{inner.name} is a tool here, not a worker. Use `context.call({inner.name!r}, ...)`."
            raise CallFailed(inner.name, ToolResult.error(said))
        result = await self.gate.pass_through(inner, arguments)
        if not result.success:
            raise CallFailed(inner.name, result)
        return result.value

    def ticket(self) -> str:
        return give_ticket(self)

    # Verbs of an environment.

    @property
    def wait_for(self) -> WaitFor | None:
        return wait_for(self) if self.frame.can_ask(self.tool) else None

    @property
    def prompt_model(self) -> PromptModel | None:
        make = self.frame.prompt_model
        return make(self) if make is not None and self.frame.can_prompt(self.tool) else None

    # What the gate does with it.

    def on_stop(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` when the call is stopped from outside; what is returned takes it back."""
        watchers = self._cancel_watch
        if watchers is None:
            watchers = self._cancel_watch = []
        watchers.append(watcher)
        return lambda: watchers.remove(watcher) if watcher in watchers else None

    def stop(self) -> None:
        """The call was cancelled or timed out: tell whoever looks at its signal."""
        if not self.stopped:
            self.stopped = True
            for watcher in tuple(self._cancel_watch or ()):
                watcher()

    def _there(self, member: str, value: Any, mend: str) -> Any:
        if value is None:
            raise NotSupported(member, mend)
        return value


def new_call(
    gate: Gate,
    name: str,
    id: str | None = None,
    parent: LiveCall | None = None,
    message_id: str | None = None,
) -> LiveCall:
    """A call of the tool called `name`, inside `parent` or the call this whole run is nested in."""
    frame = gate.frame
    outer = frame.outer
    if parent is None and outer is None:
        number = next(frame.counter)
        loop = asyncio.get_running_loop()
        made = LiveCall(gate, frame, name, id or f"{frame.call_prefix}{number}", (name,), loop, 0.0, number)
    elif parent is None or parent is outer:
        assert outer is not None
        number = next(frame.counter)
        made = LiveCall(
            gate,
            frame,
            name,
            id or f"{frame.call_prefix}{number}",
            (*outer.path, name),
            outer.loop,
            0.0,
            number,
            outer,
            outer.depth + 1,
        )
        made.undoing = outer.undoing
    else:
        inside = parent.next_inner_id()
        if id is not None:
            inside = id
        path = (*parent.path, name)
        made = LiveCall(
            gate, frame, name, inside, path, parent.loop, 0.0, parent.inner, parent, parent.depth + 1
        )
        made.undoing = parent.undoing
    if message_id is not None:
        made.message_id = message_id
    return made
