"""`Frame`: what all the calls of one run share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from handrail.cancellation import Cancellation
from handrail.context import Extras, RequestView, ResponseAccumulator, RunContext
from handrail.context.extras import NO_EXTRAS
from handrail.context.facts import WorkerFacts
from handrail.context.source import PromptModel
from handrail.dispatch.options import RunOptions
from handrail.errors import DefinitionError
from handrail.guard.approval import Broker
from handrail.journal.digest import new_key
from handrail.journal.local import LocalQuestions, LocalSteps
from handrail.journal.runlog import NO_LOG, RunLog
from handrail.limits import Budget, BudgetTracker, Spending
from handrail.place import RUN, Place
from handrail.protocols import (
    ApprovalBroker,
    BoundAdapter,
    Filesystem,
    Forkable,
    PromptView,
    RenderedPromptView,
    ToolPolicy,
    Workers,
)
from handrail.protocols import BudgetTracker as BudgetTrackerProtocol
from handrail.resources.bindings import RunResources, given
from handrail.session import Dispatcher, Session, check_serialisable
from handrail.tools import RunMode, Tool

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt
    from handrail.dispatch.parking import Parking


class ProviderSide(Protocol):
    """What an adapter adds to the contexts of a turn. Each is made when a tool asks for it."""

    @property
    def request(self) -> RequestView | None: ...
    @property
    def accumulator(self) -> ResponseAccumulator | None: ...
    @property
    def extras(self) -> Extras: ...


class NoProvider:
    """The provider's side of a call that no model asked for."""

    __slots__ = ()
    request = None
    accumulator = None
    extras = NO_EXTRAS


NO_PROVIDER = NoProvider()


class Frame:
    """What the calls of one run share, and which of them are running."""

    # Slots: every call reads about thirty of these, and a class attribute or a large dict is slow to read.
    __slots__ = (
        "__weakref__",
        "_given",
        "_unbounded",
        "adapter",
        "began",
        "began_at",
        "broker",
        "budget",
        "call_prefix",
        "cancellation",
        "clock",
        "counter",
        "deadline",
        "depth_limit",
        "ending",
        "environment",
        "filesystem",
        "journal",
        "key",
        "lease",
        "limited",
        "live",
        "log",
        "monotonic",
        "open_tools",
        "options",
        "outer",
        "parking",
        "place",
        "policies",
        "prompt",
        "prompt_model",
        "provider",
        "publish",
        "questions",
        "record",
        "rendered_prompt",
        "resources",
        "run_context",
        "secretive",
        "session",
        "spending",
        "steps",
        "task",
        "told",
        "tools",
        "worker",
        "workers",
    )

    outer: Attempt | None
    """The call this run is nested in; None for a run of its own."""
    place: Place
    """Where in the outermost run this run is."""
    options: RunOptions
    filesystem: Forkable | None
    """The files, if they take part in transactions."""
    broker: ApprovalBroker
    log: RunLog
    adapter: Callable[[Any], BoundAdapter] | None
    prompt_model: Callable[[Any], PromptModel] | None
    workers: Workers | None
    """The workers its calls may reach, if any."""
    worker: WorkerFacts | None
    """Facts about the worker this run belongs to; None if it belongs to none."""
    tools: Mapping[str, Tool[Any, Any]]
    open_tools: Mapping[str, Tool[Any, Any]]
    """The tools that can be called without further checks: most of them."""
    policies: tuple[ToolPolicy, ...]
    parking: Parking | None
    secretive: bool
    """Whether a tool, shown or not yet shown, takes secrets. Then what the model writes is masked."""
    _unbounded: BudgetTracker | None
    _given: Mapping[type, Callable[[], Any]] | None

    def __init__(
        self,
        options: RunOptions,
        *,
        prompt: PromptView | None = None,
        log: RunLog | None = None,
        adapter: Callable[[Any], BoundAdapter] | None = None,
        prompt_model: Callable[[Any], PromptModel] | None = None,
    ) -> None:
        """Open a run of its own: check `options` and fill in what they leave out."""
        self.outer = None
        self.place = RUN
        journal, clock, new_id = options.journal, options.clock, options.new_id
        session = options.session or Session(new_id=new_id)
        if journal is not None:
            session.check_each(check_serialisable)  # does nothing if it does already
        bindings, files = options.resources, options.filesystem
        if files is not None:
            bindings = (*bindings, given(Filesystem, files))  # pyright: ignore[reportArgumentType]  # a protocol as a key
        self.resources = RunResources(bindings)
        self.filesystem = files if isinstance(files, Forkable) else None
        self.steps = LocalSteps() if journal is None else journal.steps
        self.questions = LocalQuestions(clock) if journal is None else journal.questions
        approvals, environment = options.approvals, options.environment
        if approvals is None or isinstance(approvals, str):
            approvals = Broker(self.questions, environment, approvals)
        self.broker = approvals
        self.key = new_key() if journal is None else journal.key
        self.log = log or NO_LOG
        self.adapter = adapter or (None if environment is None else environment.adapter)
        self.prompt_model = prompt_model or (None if environment is None else environment.prompt_model)
        self.workers = self.worker = self.parking = None
        self.cancellation = Cancellation(self._at_work, None)
        self.spending = Spending(None)
        run_id = options.run_id or new_id()
        self.run_context = RunContext(run_id, run_id, session.id, 1, "local", new_id(), new_id()[:16])
        self._begin(options.replace(session=session), session, prompt)

    @classmethod
    def nested(
        cls, call: Attempt, number: int, options: RunOptions, prompt: PromptView | None = None
    ) -> Frame:
        """Open a run inside a call, which shares everything the call has. `options` are those of `nested`.

        `number` is the index of the verb; the run's id derives from it and the call's id.
        """
        outer, ids = call.frame, call.frame.run_context
        frame = cls.__new__(cls)
        frame.outer = call
        frame.place = place = call.place.nested_run(number)
        frame.resources, frame.filesystem = outer.resources, outer.filesystem
        frame.steps, frame.questions, frame.broker = outer.steps, outer.questions, outer.broker
        frame.key, frame.log = outer.key, outer.log
        frame.adapter, frame.prompt_model = outer.adapter, outer.prompt_model
        frame.workers, frame.worker, frame.parking = outer.workers, outer.worker, outer.parking
        frame.cancellation = Cancellation(frame._at_work, outer.cancellation)
        frame.spending = Spending(outer.spending)
        run_id = place.id(ids.request_id)
        frame.run_context = RunContext(
            run_id, ids.request_id, ids.session_id, ids.attempt, ids.worker_id, ids.trace_id, ids.span_id
        )
        frame._begin(options, outer.session, prompt)
        if frame.parking is not None:
            frame.parking.add(frame)
        return frame

    def _begin(self, options: RunOptions, session: Session, prompt: PromptView | None) -> None:
        self.options = options
        self._unbounded = self._given = None
        self.secretive = False
        self.show((), ())
        self.session = session
        self.record = session.record
        self.publish = session.dispatcher.publish
        plain = type(session.dispatcher).publish is Dispatcher.publish
        self.told: Mapping[type, Any] = session.dispatcher.matching if plain else {}
        self.environment = options.environment
        self.journal = options.journal
        self.deadline = options.deadline
        budget = options.budget
        self.budget = BudgetTracker(budget) if isinstance(budget, Budget) else budget
        self.lease = options.lease
        self.depth_limit = options.depth_limit
        self.limited = options.deadline is not None or budget is not None
        self.task: asyncio.Task[Any] | None = None
        """The task that runs the loop, if any: a cancellation between calls stops it."""
        self.prompt = prompt
        self.rendered_prompt: RenderedPromptView | None = None
        self.provider: ProviderSide = NO_PROVIDER
        """The request and the response that led to the current calls."""
        self.clock = clock = options.clock
        self.began_at = clock.now()
        self.live: dict[Attempt, asyncio.Task[Any]] = {}
        """The attempts that are running, and the task of each."""
        self.ending: set[Attempt] = set()
        """The attempts that are over and whose end has not been published."""
        self.monotonic, self.began = clock.monotonic, clock.monotonic()
        self.call_prefix = f"{self.run_context.run_id}."
        self.counter = itertools.count(1)
        """Numbers the calls, so that a resumed run gives them the same ids."""

    def show(self, tools: Iterable[Tool[Any, Any]], policies: Iterable[ToolPolicy]) -> None:
        """Let these tools be called from now on, under these policies."""
        self.tools = _by_name(tools)
        self.open_tools = {
            name: tool for name, tool in self.tools.items() if tool.handler is not None and not tool.needs
        }
        self.policies = tuple(policies)
        self.secretive = self.secretive or any(tool.secret for tool in self.tools.values())

    def ends(self, call: Attempt) -> None:
        """Mark an attempt as finished; its end has not been published yet."""
        del self.live[call]
        if self.parking is not None:
            self.ending.add(call)

    # Who takes part.

    def mode_of(self, tool: Tool[Any, Any]) -> RunMode:
        """The run mode of a tool: its own, else the session's, else the environment's."""
        environment = self.environment
        default: RunMode = "headless" if environment is None else environment.run_mode
        return tool.run_mode or self.session.run_mode or default

    def can_ask(self, tool: Tool[Any, Any]) -> bool:
        """Whether this tool may ask somebody."""
        environment = self.environment
        return environment is not None and environment.run_mode == "user" and self.mode_of(tool) == "user"

    def can_prompt(self, tool: Tool[Any, Any]) -> bool:
        """Whether a model stands in for a person."""
        return self.prompt_model is not None and self.mode_of(tool) == "agent"

    def offers(self, tool: Tool[Any, Any]) -> bool:
        """Whether what this tool requires is there, so that the model may be offered it."""
        needs = tool.needs
        if "worker" in needs and self.worker is None:
            return False
        return ("user" not in needs or self.can_ask(tool)) and ("model" not in needs or self.can_prompt(tool))

    def _at_work(self) -> Collection[asyncio.Task[Any]]:
        if self.live or self.task is None:
            return self.live.values()
        return (self.task,)

    @property
    def left_to_the_record(self) -> bool:
        """Whether the run goes on elsewhere, because it is parked or another process has it."""
        return self.log.closed

    @property
    def parked(self) -> bool:
        """Whether it is being parked. Then nothing new begins, and no end is published."""
        return self.parking is not None and self.parking.parked

    @property
    def tracker(self) -> BudgetTracker:
        """The spending so far; without a budget, a tracker without limits."""
        if self.budget is not None:
            return self.budget
        if self._unbounded is None:
            self._unbounded = BudgetTracker()
        return self._unbounded

    @property
    def given(self) -> Mapping[type, Callable[[], Any]]:
        """Resources that its calls find without a binding."""
        if self._given is None:
            self._given = {kind: lambda: self.tracker for kind in (BudgetTracker, BudgetTrackerProtocol)}
        return self._given


def check_tool(given: object) -> None:
    """Raise `DefinitionError` for anything but a tool, such as a plain function."""
    if not isinstance(given, Tool):
        name = getattr(given, "__name__", repr(given))
        raise DefinitionError(f"{name} is not a tool. Put `@tool` on the function, or make a `Tool` of it.")


def _by_name(tools: Iterable[Tool[Any, Any]]) -> Mapping[str, Tool[Any, Any]]:
    found: dict[str, Tool[Any, Any]] = {}
    for tool in tools:
        check_tool(tool)
        tool.check_complete()
        if tool.name in found and found[tool.name] is not tool:
            raise DefinitionError(f"two tools are called {tool.name!r}. Rename one of them.")
        found[tool.name] = tool
    return found
