"""`Run`: the state that all calls of one run share."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import msgspec
from msgspec.structs import replace

from handrail.clock import Clock
from handrail.concurrency.cancellation import Cancellation, CancelScope
from handrail.concurrency.timers import LostTime, timers_of
from handrail.context import PromptModel, RunContext
from handrail.context.facts import WorkerFacts
from handrail.errors import DefinitionError, DepthExceededError
from handrail.guard.approval import ApprovalMode, Broker, PreviewBroker
from handrail.guard.outer_policy import outer_policies, with_outer
from handrail.guard.policy import check_verdicts
from handrail.ids import span_of, started_from, trace_of
from handrail.journal.digest import new_key
from handrail.journal.local import LocalQuestions, LocalSteps
from handrail.journal.protocol import Steps
from handrail.protocols import (
    ApprovalBroker,
    BoundAdapter,
    BudgetTrackerProtocol,
    Environment,
    Filesystem,
    Forkable,
    PromptView,
    RenderedPromptView,
    ToolPolicy,
    Workers,
)
from handrail.resources.bindings import RunResources, given
from handrail.run.limits import Budget, BudgetTracker, CostTracker
from handrail.run.options import RunFiles, RunOptions, check_kinds
from handrail.run.place import RUN, Place
from handrail.run.questions import HeardQuestions
from handrail.run.record.log import NO_LOG, RunLog
from handrail.session import Dispatcher, Session, check_serialisable
from handrail.tools import RunMode, Tool
from handrail.tools.toolbox import NO_TOOLS, Toolbox, check_named_tools

if TYPE_CHECKING:
    from handrail.question import Answer
    from handrail.run.adapter import Settings
    from handrail.run.answer import ModelAnswer
    from handrail.run.call import Attempt
    from handrail.run.evaluation import Evaluation
    from handrail.run.large_results import LargeResults
    from handrail.run.mailbox import Mailbox
    from handrail.run.record.parking import Parking
    from handrail.run.response import Outcome


_first_use = threading.RLock()
"""Held while what a run may never need is made, because several threads may need it first."""


class Deciders:
    """Who decides a run's approvals and answers its questions. They are made when they are first needed, and shared by nested runs."""

    __slots__ = ("_approvals", "_broker", "_clock", "_environment", "_journal", "_key", "_questions")

    def __init__(self, options: RunOptions) -> None:
        self._approvals = options.approvals
        self._environment = options.environment
        self._journal, self._clock = options.journal, options.clock
        self._key: bytes | None = None
        self._questions: HeardQuestions | None = None
        self._broker: ApprovalBroker | None = None
        if self._approvals is not None:
            _ = self.broker  # raises if there is no such mode

    @property
    def broker(self) -> ApprovalBroker:
        with _first_use:
            broker = self._broker
            if broker is None:
                approvals = self._approvals
                if approvals is None or isinstance(approvals, str):
                    mode = cast("ApprovalMode | None", approvals)
                    broker = Broker(self.questions, self._environment, mode)
                else:
                    broker = approvals
                self._broker = broker
            return broker

    @property
    def questions(self) -> HeardQuestions:
        with _first_use:
            if self._questions is None:
                journal = self._journal
                questions = (
                    LocalQuestions(self._clock, key=self.key) if journal is None else journal.questions
                )
                self._questions = HeardQuestions(questions)
            return self._questions

    @property
    def key(self) -> bytes:
        with _first_use:
            if self._key is None:
                self._key = new_key() if self._journal is None else self._journal.key
            return self._key

    @property
    def remarks(self) -> dict[str, Answer]:
        """The answers whose remarks the model has not been told, by question id, in the order in which they arrived."""
        return {} if self._questions is None else self._questions.remarks


class RunPeople(msgspec.Struct, frozen=True, eq=False):
    """Whom a run can ask, who decides its approvals, and the key that signs its questions and tickets."""

    environment: Environment | None
    """The environment in which questions are asked; None if the run has none."""
    deciders: Deciders

    @property
    def broker(self) -> ApprovalBroker:
        return self.deciders.broker

    @property
    def mode(self) -> ApprovalMode | None:
        """The approval mode of a `Broker`; None if it has none, or if the broker is not a `Broker`."""
        broker = self.broker
        return broker.mode if isinstance(broker, Broker) else None

    @property
    def shows_previews(self) -> bool:
        """Whether the broker shows previews, so that staged calls can run in their forks before they are approved."""
        broker = self.broker
        # Checking a protocol takes many microseconds, so the usual class is checked first.
        return isinstance(broker, (Broker, PreviewBroker)) and broker.shows_previews

    @property
    def questions(self) -> HeardQuestions:
        return self.deciders.questions

    @property
    def key(self) -> bytes:
        """The key that signs questions and tickets."""
        return self.deciders.key


class World:
    """The resources, files and steps of a run. A nested run that binds no resources shares the world of the run around it."""

    __slots__ = ("_outer", "_steps", "filesystem", "resources")

    def __init__(
        self,
        resources: RunResources,
        filesystem: Forkable | None,
        *,
        steps: Steps | None = None,
        outer: World | None = None,
    ) -> None:
        self.resources = resources
        self.filesystem = filesystem
        """The filesystem, if it takes part in transactions; otherwise None."""
        self._steps = steps
        self._outer = outer

    @property
    def steps(self) -> Steps:
        """The outcomes that `once` has settled. Nested runs share them."""
        if self._outer is not None:
            return self._outer.steps
        with _first_use:
            if self._steps is None:
                self._steps = LocalSteps()
            return self._steps


class ModelSide(msgspec.Struct, eq=False):
    """The model and the prompt behind a run's calls, as the calls see them."""

    prompt: PromptView | None = None
    rendered: RenderedPromptView | None = None
    answer: ModelAnswer | None = None
    """The answer that asked for the current calls; None if no model made them."""
    settings: Settings | None = None
    """How the run asks its model; None if no model makes its calls."""
    is_asked: bool = False
    """Whether an answer is being awaited that can be stopped."""
    adapter: Callable[[Any], BoundAdapter] | None = None
    prompt_model: Callable[[Any], PromptModel] | None = None
    evaluation: Evaluation | None = None
    """The loop of a run at the root, while it asks the model."""
    unanswered: Any = None
    """The requests for the answer that the run ended without, as an `Unanswered`; None if it ended otherwise."""


class Costs:
    """The costs of a run so far, and the budget tracker that its calls see."""

    __slots__ = ("_charged", "_tracker", "models")

    def __init__(self, budget: BudgetTracker | None, outer: Costs | None, charged: int) -> None:
        """Start counting. `charged` is the number of calls that were charged before the run was resumed.

        They are all counted before any call continues, so that a new call can't use their part of the budget.
        """
        self.models = CostTracker(None if outer is None else outer.models)
        """Usage and cost of the models."""
        self._tracker = budget
        self._charged = charged
        if budget is not None and charged:
            budget.recall(tool_calls=charged)

    @property
    def tracker(self) -> BudgetTracker:
        """The tracker of the budget, or a tracker without limits if there is no budget."""
        if self._tracker is None:
            self._tracker = BudgetTracker()
            if self._charged:
                self._tracker.recall(tool_calls=self._charged)
        return self._tracker

    def given(self, protocol: object) -> BudgetTracker | None:
        """Return the tracker if calls look it up, which they can do without a binding; None for any other resource."""
        return self.tracker if protocol is BudgetTracker or protocol is BudgetTrackerProtocol else None


_UNKNOWN_LOST = LostTime(-1.0)
"""Stands for the lost time of a run whose loop is not known yet."""


class Run:
    """The state that all calls of one run share, including which of them are running."""

    # The slots are not grouped into smaller values, because a call reads about twenty of them, and each would take two lookups.
    __slots__ = (
        "__weakref__",
        "began",
        "began_at",
        "budget",
        "call_prefix",
        "cancellation",
        "costs",
        "counter",
        "deadline",
        "end",
        "journal",
        "large",
        "lease",
        "limited",
        "live",
        "log",
        "lost",
        "mailbox",
        "model",
        "monotonic",
        "open_tools",
        "options",
        "outer",
        "parking",
        "people",
        "place",
        "policies",
        "publish",
        "record",
        "run_context",
        "secretive",
        "session",
        "subscriptions",
        "task",
        "told",
        "tools",
        "worker",
        "workers",
        "world",
    )

    # Position.
    outer: Attempt | None
    """The call this run is nested in; None for a run at the root."""
    place: Place
    """This run's place in the outermost run."""
    run_context: RunContext

    # Options and collaborators.
    options: RunOptions
    people: RunPeople
    world: World
    model: ModelSide
    workers: Workers | None
    """The workers that the run's calls may call; None if there are none."""
    worker: WorkerFacts | None
    """Facts about the worker this run belongs to; None outside a worker."""
    log: RunLog
    parking: Parking | None
    mailbox: Mailbox | None
    """What was said to the run while it works; None if nothing was."""
    end: Callable[[Outcome], Awaitable[bool]] | None
    """Records that the run is done, unless its model has to be told something. Returns whether it has ended. None without a record."""

    # What the model may call.
    tools: Mapping[str, Tool[Any, Any]]
    open_tools: Mapping[str, Tool[Any, Any]]
    """The tools that have a handler and require no person, model or worker. For these, the gate skips `look_up`."""
    policies: tuple[ToolPolicy, ...]
    secretive: bool
    """Whether any tool, shown or not yet shown, takes secrets, or the run's answer may contain some.

    If so, secrets are masked in the model's calls wherever the calls are recorded or shown.
    """

    def __init__(
        self,
        options: RunOptions,
        *,
        prompt: PromptView | None = None,
        log: RunLog = NO_LOG,
    ) -> None:
        """Open a run at the root, with defaults for the options that are not set."""
        self.outer = None
        self.place = RUN
        journal, new_id, environment = options.journal, options.new_id, options.environment
        session = options.session or Session(new_id=new_id)
        if journal is not None:
            session.check_each(check_serialisable)  # harmless if the session has been checked before
        self.world = _world_of(options)
        self.people = RunPeople(environment, Deciders(options))
        self.log = log
        self.workers = self.worker = self.parking = None
        self.cancellation = Cancellation(_work_of(self))
        run_id = options.run_id or new_id()
        worker_id = "local" if journal is None else journal.owner
        leg = self.log.attempt
        started = options.traceparent or ("" if self.log.resumed else started_from())
        self.run_context = RunContext(
            run_id,
            run_id,
            session.id,
            leg,
            worker_id,
            trace_of(run_id, started),
            span_of(run_id, leg),
            started,
        )
        self.model = ModelSide(prompt)
        if environment is not None:
            self.model.adapter, self.model.prompt_model = environment.adapter, environment.prompt_model
        if session is not options.session:
            options = options.replace(session=session)
        self._begin(options, session, None)

    @classmethod
    def nested(
        cls,
        call: Attempt,
        number: int,
        given: RunOptions,
        prompt: PromptView | None = None,
        levels: int | None = None,
    ) -> Run:
        """Open a run inside a call, as the call's verb `number`, which determines the run's place and thus its id.

        `RunOptions.nested` says what it inherits. `levels` limits how deep calls may nest in it. Raises `DepthExceededError` if
        it would be nested too deeply, even if it makes no calls. Raises `DefinitionError` if the budget in `given` is a
        `BudgetTracker`, or if `given` binds a `Filesystem` although the run around it has one.
        """
        outer, ids, depth = call.run, call.run.run_context, call.depth + 1
        limit = outer.options.depth_limit
        if depth > limit:
            raise DepthExceededError(call.path, limit, depth)
        policies = outer_policies(outer.policies, call.tool if call.open_transaction.commits_each else None)
        options = outer.options.nested(given, outer.costs.tracker, depth, levels, policies)
        run = cls.__new__(cls)
        run.outer = call
        run.place = place = call.place.nested_run(number)
        run.people, run.world, run.log = outer.people, outer.world, outer.log
        if options.environment is not outer.people.environment:
            run.people = RunPeople(options.environment, outer.people.deciders)
        if options.resources:
            run.world = _nested_world(outer.world, options)
        run.workers, run.worker, run.parking = outer.workers, outer.worker, outer.parking
        run.cancellation = Cancellation(_work_of(run), outer.cancellation)
        run_id = place.id(ids.request_id)
        run.run_context = replace(ids, run_id=run_id, span_id=span_of(run_id, ids.attempt))
        model = outer.model
        run.model = ModelSide(prompt, adapter=model.adapter, prompt_model=model.prompt_model)
        run._begin(options, outer.session, outer.costs)
        if run.parking is not None:
            run.parking.add(run)
        return run

    def _begin(self, options: RunOptions, session: Session, outer: Costs | None) -> None:
        self.options = options
        self.secretive = False
        self.large: LargeResults | None = None
        """Shortens results that are longer than a limit; None in a run without limits."""
        self.show(NO_TOOLS, ())
        self.session = session
        self.mailbox = self.end = None
        self.record = session.record
        self.publish = session.dispatcher.publish
        plain = type(session.dispatcher).publish is Dispatcher.publish
        self.told: Mapping[type, Any] = session.dispatcher.matching if plain else {}
        self.journal = options.journal
        self.deadline = options.deadline
        budget = options.budget
        self.budget = BudgetTracker(budget) if isinstance(budget, Budget) else budget
        charged = self.log.charged_in(self.place) if self.log.is_kept else 0
        self.costs = Costs(self.budget, outer, charged)
        self.lease = options.lease
        self.limited = options.deadline is not None or budget is not None
        self.task: asyncio.Task[Any] | None = None
        """The task that runs the model loop (`handrail.run.loop`), or None while it is not running.

        If the run is cancelled while no call is running, this task is cancelled.
        """
        clock = options.clock
        self.began_at = clock.now()
        self.live: dict[Attempt, CancelScope] = {}
        """The attempts that are running, each with the scope around it."""
        self.subscriptions: dict[Attempt, set[Callable[[], None]]] = {}
        """The subscriptions that calls made through their contexts, as functions that end them."""
        self.monotonic, self.began = clock.monotonic, clock.monotonic()
        self.lost = _UNKNOWN_LOST
        """The time that the run's loop has lost to listeners. It is known once `note_lost` has been called."""
        self.call_prefix = f"{self.run_context.run_id}."
        self.counter = itertools.count(1)
        """Numbers the calls, so that they get the same ids in a resumed run."""

    def note_lost(self, loop: asyncio.AbstractEventLoop) -> float:
        """Return the seconds that the loop has lost to listeners so far; 0 if the run's clock is not the loop's."""
        if self.lost is _UNKNOWN_LOST:
            same_clock = abs(self.monotonic() - loop.time()) < 1.0
            self.lost = timers_of(loop).lost if same_clock else LostTime()
        return self.lost.seconds

    @property
    def clock(self) -> Clock:
        return self.options.clock

    def show(self, toolbox: Toolbox, policies: Iterable[ToolPolicy]) -> None:
        """Set the tools that can be called from now on, and their policies.

        The policies of outer runs apply as well.
        """
        environment = self.people.environment
        if environment is not None and environment.stand_in is not None:
            toolbox = NO_TOOLS.plus(map(environment.stand_in, toolbox.tools.values()))
        self.tools, self.open_tools = toolbox.tools, toolbox.open
        outer = self.options.outer_policies
        self.policies = with_outer(tuple(policies), outer) if outer else tuple(policies)
        self.secretive = self.secretive or toolbox.secretive

    # Who takes part.

    def mode_of(self, tool: Tool[Any, Any]) -> RunMode:
        """Return a tool's run mode: its own, else the session's, else the environment's, or `headless` without an environment."""
        environment = self.people.environment
        default: RunMode = "headless" if environment is None else environment.run_mode
        return tool.run_mode or self.session.run_mode or default

    def can_ask(self, tool: Tool[Any, Any]) -> bool:
        """Return whether this tool may ask a person."""
        environment = self.people.environment
        return environment is not None and environment.run_mode == "user" and self.mode_of(tool) == "user"

    def can_prompt(self, tool: Tool[Any, Any]) -> bool:
        """Return whether this tool may prompt a model."""
        return self.model.prompt_model is not None and self.mode_of(tool) == "agent"

    def offers(self, tool: Tool[Any, Any]) -> bool:
        """Return whether everything that the tool requires is available, so that the model can be offered the tool."""
        needs = tool.needs
        if "worker" in needs and self.worker is None:
            return False
        return ("user" not in needs or self.can_ask(tool)) and ("model" not in needs or self.can_prompt(tool))

    @property
    def at_work(self) -> Collection[CancelScope | asyncio.Task[Any]]:
        """What has to be stopped if the run is cancelled."""
        if self.live or self.task is None:
            return [scope for attempt, scope in self.live.items() if not attempt.kind.undoes]
        return (self.task,)

    @property
    def left_to_the_record(self) -> bool:
        """Whether this process no longer records the run, for example because it is parked or was taken over."""
        return self.log.closed

    @property
    def parked(self) -> bool:
        """Whether the run has been parked. If so, nothing new begins, and a call's end is published only if it is recorded."""
        return self.parking is not None and self.parking.parked


def _work_of(run: Run) -> Callable[[], Collection[CancelScope | asyncio.Task[Any]]]:
    """Return a function that returns what is at work in a run. It does not keep the run alive, so a run that ended is freed at once."""
    weak = ref(run)

    def at_work() -> Collection[CancelScope | asyncio.Task[Any]]:
        run = weak()
        return () if run is None else run.at_work

    return at_work


def _world_of(options: RunOptions) -> World:
    bindings, files, journal = options.resources, options.filesystem, options.journal
    forkable = None
    if files is not None:
        if isinstance(files, RunFiles):
            raise DefinitionError(
                "a workspace is opened only by a run that is evaluated or resumed with a journal. Pass both: "
                "evaluate(..., journal=SqliteJournal('runs.db'), filesystem=Workspace('name'))."
            )
        bindings = (*bindings, given(Filesystem, files))  # pyright: ignore[reportArgumentType]  # a protocol as a key
        forkable = files if isinstance(files, Forkable) else None
    return World(RunResources(bindings), forkable, steps=None if journal is None else journal.steps)


def _nested_world(outer: World, options: RunOptions) -> World:
    """Return the world of a nested run that binds resources itself. It shares everything else with the run around it.

    Raises `DefinitionError` if it binds a `Filesystem` although the run around it has one.
    """
    if any(each.protocol is Filesystem for each in options.resources) and outer.resources.binds(Filesystem):
        raise DefinitionError(
            "a run inside a call works on the files of that call, and this one binds a Filesystem itself. "
            "Leave out the binding, or bind the files under a protocol of your own."
        )
    return World(outer.resources.nested(options.resources), outer.filesystem, outer=outer)


def open_run(
    options: RunOptions,
    tools: Iterable[Tool[Any, Any]] = (),
    policies: Iterable[ToolPolicy] = (),
    *,
    prompt: PromptView | None = None,
    log: RunLog = NO_LOG,
) -> Run:
    """Open a run at the root. Its options have already been checked."""
    run = Run(options, prompt=prompt, log=log)
    if tools != () or policies != ():
        show_tools(run, tools, policies)
    return run


def show_tools(run: Run, tools: Iterable[Tool[Any, Any]], policies: Iterable[ToolPolicy]) -> None:
    """Set a run's tools and policies. Raises `DefinitionError` if one is invalid, or if they do not fit together."""
    check_kinds(policies=(policies, Iterable, "a list of policies: [CapabilityPolicy()]"))
    run.show(NO_TOOLS.plus(tools), distinct_policies(policies))
    check_verdicts(run.policies, run.tools.values())
    check_named_tools(run.policies, run.tools)


def distinct_policies(policies: Iterable[ToolPolicy]) -> tuple[ToolPolicy, ...]:
    """Return the policies as a tuple. Raises `DefinitionError` if one is incomplete, or if two have the same name."""
    found = tuple(policies)
    for policy in found:
        if not all(hasattr(policy, member) for member in ("name", "check", "on_result")):
            raise DefinitionError(
                f"{policy!r} is not a policy. A policy has a `name`, `check` and `on_result`; see ToolPolicy."
            )
    names = [policy.name for policy in found]
    for name in names:
        if names.count(name) > 1:
            raise DefinitionError(
                f"two policies are named {name!r} and would share their state. Give one of them a different `name`."
            )
    return found
