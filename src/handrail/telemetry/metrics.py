"""`RunMetrics`: turns the facts of runs into metrics, by OpenTelemetry's conventions for GenAI. No label names a person, a thread or a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from handrail import events
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.session.bus import subscribe_everywhere
from handrail.telemetry import names

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter


class Instrument(NamedTuple):
    """A counter or, with `bounds`, a histogram."""

    description: str
    unit: str = ""
    bounds: tuple[float, ...] = ()


_REQUEST_SECONDS = tuple(0.01 * 2**power for power in range(14))
_AGENT_SECONDS = tuple(0.1 * 2**power for power in range(13))
_WAIT_SECONDS = (1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 86400.0)
_QUEUE_SECONDS = (0.1, 0.5, *_WAIT_SECONDS)
_TOKENS = tuple(4.0**power for power in range(14))

INSTRUMENTS: Mapping[str, Instrument] = {
    names.CLIENT_TOKEN_USAGE: Instrument("Input and output tokens of model requests.", "{token}", _TOKENS),
    names.CLIENT_OPERATION_DURATION: Instrument("Duration of model requests.", "s", _REQUEST_SECONDS),
    names.CACHE_TOKENS: Instrument(
        "Input tokens read from and written to the caches of providers.", "{token}"
    ),
    names.COST: Instrument("Cost of model requests in US dollars, where the price is known.", "{USD}"),
    names.EXECUTE_TOOL_DURATION: Instrument("Duration of tool calls.", "s", _REQUEST_SECONDS),
    names.INVOKE_AGENT_DURATION: Instrument("Duration of the legs of runs.", "s", _AGENT_SECONDS),
    names.INVOKE_WORKFLOW_DURATION: Instrument(
        "Duration of the legs of runs in which other agents run.", "s", _WAIT_SECONDS[:-1]
    ),
    names.LEGS: Instrument("Legs of runs that have ended, by outcome.", "{leg}"),
    names.QUEUE_WAIT: Instrument(
        "Time for which submitted runs were due before a worker began them.", "s", _QUEUE_SECONDS
    ),
    names.QUESTION_WAIT: Instrument(
        "Time from questions to their answers, also while runs are parked.", "s", _WAIT_SECONDS
    ),
    names.APPROVAL_WAIT: Instrument(
        "Time from requests for approval to people's decisions, also while runs are parked.",
        "s",
        _WAIT_SECONDS,
    ),
}
UNKNOWN = "unknown"
"""The label of all tools that a model has invented, and of tools and agents beyond `MOST_NAMES`."""
MOST_NAMES = 500
"""Maximum number of tools, and of agents, with labels of their own."""


class Recorder(Protocol):
    """Where metrics are kept. Each set of labels is kept separately."""

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Increase the counter `name` by `amount`."""
        ...

    def record(self, name: str, value: float, /, **labels: str) -> None:
        """Record a value in the histogram `name`."""
        ...


class MeterRecorder:
    """Records to the instruments of one of OpenTelemetry's meters."""

    def __init__(self, meter: Meter, instruments: Mapping[str, Instrument] = INSTRUMENTS) -> None:
        self._counters = {
            name: meter.create_counter(name, each.unit, each.description)
            for name, each in instruments.items()
            if not each.bounds
        }
        self._histograms = {
            name: meter.create_histogram(
                name, each.unit, each.description, explicit_bucket_boundaries_advisory=each.bounds
            )
            for name, each in instruments.items()
            if each.bounds
        }

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        self._counters[name].add(amount, labels)

    def record(self, name: str, value: float, /, **labels: str) -> None:
        self._histograms[name].record(value, labels)


class RunMetrics:
    """Observes the runs of this process."""

    def __init__(self, recorder: Recorder, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._to = recorder
        self._monotonic = clock.monotonic
        self._began: dict[str, float] = {}
        """When the open leg of each run began."""
        self._workflows: set[str] = set()
        """The outermost runs in whose open leg another run began."""
        self._tools: set[str] = set()
        """The tools with labels of their own."""
        self._agents: set[str] = set()
        """The agents with labels of their own."""

    def begin(self) -> Callable[[], None]:
        """Observe from now on. Returns a function that stops it."""
        hears: dict[type[events.Fact], Callable[[Any], None]] = {
            events.PromptRendered: self._leg_began,
            events.PromptParked: self._leg_parked,
            events.PromptExecuted: self._run_ended,
            events.ModelResponded: self._responded,
            events.ModelFailed: self._request_failed,
            events.ToolInvoked: self._call_ended,
            events.RunClaimed: self._claimed,
            events.QuestionAnswered: self._question_closed,
            events.ApprovalDecided: self._approval_decided,
        }
        stops = [subscribe_everywhere(kind, listener) for kind, listener in hears.items()]

        def stop() -> None:
            for each in stops:
                each()

        return stop

    # Runs.

    def _leg_began(self, fact: events.PromptRendered) -> None:
        run = fact.run_context
        self._began[run.run_id] = self._monotonic()
        if run.run_id != run.request_id:
            self._workflows.add(run.request_id)
        for tool in fact.tools:
            _label(self._tools, tool)

    def _leg_parked(self, fact: events.PromptParked) -> None:
        self._leg_ended(fact, "parked", {})

    def _run_ended(self, fact: events.PromptExecuted) -> None:
        outcome = fact.stop_reason.partition(": ")[0]
        self._leg_ended(fact, outcome, {names.ERROR_TYPE: outcome} if outcome == "failed" else {})

    def _leg_ended(
        self, fact: events.PromptParked | events.PromptExecuted, outcome: str, error: Mapping[str, str]
    ) -> None:
        run = fact.run_context
        began = self._began.pop(run.run_id, None)
        if began is None:
            return  # the run ended while its record was replayed
        seconds = self._monotonic() - began
        agent = _label(self._agents, fact.prompt)
        self._to.record(names.INVOKE_AGENT_DURATION, seconds, **{names.AGENT_NAME: agent}, **error)
        if run.run_id != run.request_id:
            return
        self._to.add(names.LEGS, **{names.RUN_OUTCOME: outcome})
        if run.run_id in self._workflows:
            self._workflows.discard(run.run_id)
            about = {names.WORKFLOW_NAME: agent}
            self._to.record(names.INVOKE_WORKFLOW_DURATION, seconds, **about, **error)

    def _claimed(self, fact: events.RunClaimed) -> None:
        self._to.record(names.QUEUE_WAIT, fact.seconds)

    # Requests to models.

    def _responded(self, fact: events.ModelResponded) -> None:
        about, usage = _request(fact.model), fact.usage
        self._to.record(names.CLIENT_OPERATION_DURATION, fact.seconds, **about)
        for kind, tokens in (("input", usage.input), ("output", usage.output)):
            if usage.tokens:  # otherwise the provider reports none
                self._to.record(names.CLIENT_TOKEN_USAGE, tokens, **about, **{names.TOKEN_TYPE: kind})
        for use, tokens in (("read", usage.cached), ("write", usage.cache_writes)):
            if tokens:
                self._to.add(names.CACHE_TOKENS, tokens, **about, **{names.CACHE_USE: use})
        if fact.cost is not None:
            self._to.add(names.COST, float(fact.cost), **about)

    def _request_failed(self, fact: events.ModelFailed) -> None:
        about = {**_request(fact.model), names.ERROR_TYPE: names.OTHER}
        self._to.record(names.CLIENT_OPERATION_DURATION, fact.seconds, **about)

    # Calls.

    def _call_ended(self, fact: events.ToolInvoked) -> None:
        tool = fact.tool if fact.tool in self._tools or fact.status != "invalid" else UNKNOWN
        about = {names.TOOL_NAME: _label(self._tools, tool)}
        if fact.status != "ok":
            about[names.ERROR_TYPE] = fact.status.replace(" ", "_")
        self._to.record(names.EXECUTE_TOOL_DURATION, fact.seconds, **about)

    # People.

    def _question_closed(self, fact: events.QuestionAnswered) -> None:
        self._to.record(names.QUESTION_WAIT, fact.seconds, **{names.QUESTION_OUTCOME: fact.outcome})

    def _approval_decided(self, fact: events.ApprovalDecided) -> None:
        if fact.how == "asked":
            about = {names.APPROVAL_OUTCOME: fact.approval.outcome}
            self._to.record(names.APPROVAL_WAIT, fact.seconds, **about)


def _label(known: set[str], name: str) -> str:
    """Return the label of a tool or an agent, and give it one of its own while there is room among those `known`."""
    if len(known) < MOST_NAMES and name != UNKNOWN:
        known.add(name)
    return name if name in known else UNKNOWN


def _request(model: str) -> dict[str, str]:
    provider, name = names.split_model(model)
    return {
        names.OPERATION_NAME: names.CHAT,
        names.PROVIDER_NAME: provider or names.OTHER,
        names.REQUEST_MODEL: name,
    }
