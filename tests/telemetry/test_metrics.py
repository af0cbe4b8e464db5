"""Metrics of runs: what facts become, with both kinds of `Metrics`, and that labels name nobody and are bounded."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from handrail import (
    Adapter,
    CapabilityPolicy,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    UserContext,
    tool,
)
from handrail.errors import PromptEvaluationError, RunParked
from handrail.events import ModelFailed, ModelRequested, PromptParked, PromptRendered
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import Price, Traits, Usage
from handrail.models import ModelUnavailable
from handrail.models.scripted import Reply
from handrail.run.adapter import Retry
from handrail.serve.metrics import MemoryMetrics, Metrics
from handrail.serve.sdk_metrics import SdkMetrics
from handrail.session import Dispatcher
from handrail.telemetry import metrics as run_metrics
from handrail.telemetry.metrics import INSTRUMENTS, UNKNOWN
from handrail.testing import Person, VirtualClock
from support import ROOT
from support.parked_runs import answer_to

both = pytest.mark.parametrize("make", [MemoryMetrics, lambda: SdkMetrics({})], ids=["memory", "sdk"])
Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


@contextmanager
def observed(metrics: Metrics) -> Generator[Metrics]:
    stop = metrics.observe_runs()
    try:
        yield metrics
    finally:
        stop()


def samples(metrics: Metrics) -> Samples:
    """Return the values of each sample's name by its labels, without the buckets of histograms."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def only(values: Samples, name: str, **labels: str) -> float:
    """Return the only value of a sample with at least these labels."""
    [value] = [value for key, value in values[name].items() if labels.items() <= dict(key).items()]
    return value


@tool(effect="pure")
async def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}."


@tool(capabilities=["money"])
async def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


clerk = Prompt("clerk", "Greet.", tools=[greet])


@tool
async def delegate(context: ToolContext) -> str:
    """Let a clerk greet."""
    return (await context.adapter.evaluate(clerk, "Greet Ada.")).text


def play(request: Any) -> Any:
    tools = {each.tool.name for each in request.tools}
    if len(request.messages) > 1:
        return Reply("done", usage=Usage(10, 3, requests=1))
    call = ToolCall("greet", {"name": "Ada"}) if "greet" in tools else ToolCall("delegate")
    return Reply("", [call], usage=Usage(100, 20, cached=40, cache_writes=8, requests=1))


@both
async def test_a_run_with_another_inside(make: Callable[[], Metrics]):
    """Tokens, caches, requests, calls and agents are counted by model, tool and agent."""
    model = ScriptedModel(play, name="mistral:small")
    with observed(make()) as metrics:
        await Adapter(model).evaluate(
            Prompt("boss", "Delegate.", tools=[delegate]),
            "Go.",
            run_id="run-of-ann",
            session=Session(id="thread-of-ann", principal="ann"),
        )
    found = samples(metrics)
    about = {"gen_ai_provider_name": "mistral_ai", "gen_ai_request_model": "small"}
    chat = {**about, "gen_ai_operation_name": "chat"}
    assert only(found, "gen_ai_client_operation_duration_seconds_count", **chat) == 4
    assert only(found, "gen_ai_client_token_usage_sum", **chat, gen_ai_token_type="input") == 220
    assert only(found, "gen_ai_client_token_usage_sum", **chat, gen_ai_token_type="output") == 46
    assert only(found, "handrail_cache_tokens_total", **about, handrail_cache_use="read") == 80
    assert only(found, "handrail_cache_tokens_total", **about, handrail_cache_use="write") == 16
    for name in ("greet", "delegate"):
        assert only(found, "gen_ai_execute_tool_duration_seconds_count", gen_ai_tool_name=name) == 1
    for name in ("boss", "clerk"):
        assert only(found, "gen_ai_invoke_agent_duration_seconds_count", gen_ai_agent_name=name) == 1
    assert found["gen_ai_invoke_workflow_duration_seconds_count"] == {
        frozenset({("gen_ai_workflow_name", "boss")}): 1
    }
    assert found["handrail_legs_total"] == {frozenset({("handrail_run_outcome", "done")}): 1}
    assert "ann" not in metrics.text()


@both
async def test_what_failed_has_an_error_type(make: Callable[[], Metrics]):
    """A request that fails, a call that raises and a run that fails are told from others by `error.type`."""

    @tool(effect="pure")
    async def crash() -> str:
        """Crash."""
        raise ValueError("a message that only the record has")

    script = [ModelUnavailable("x", "down"), ToolCall("crash"), ModelUnavailable("x", "down")]
    retry = Retry(attempts=2, first_wait=0.0)
    with observed(make()) as metrics, pytest.raises(PromptEvaluationError):
        await Adapter(ScriptedModel([*script, *script[2:]]), retry=retry).evaluate(
            Prompt("p", "x", tools=[crash]), "Go."
        )
    found = samples(metrics)
    duration = "gen_ai_client_operation_duration_seconds_count"
    assert only(found, duration, error_type="_OTHER") == 3
    assert only(found, "gen_ai_execute_tool_duration_seconds_count", error_type="error") == 1
    assert only(found, "gen_ai_invoke_agent_duration_seconds_count", error_type="failed") == 1
    assert only(found, "handrail_legs_total", handrail_run_outcome="failed") == 1
    assert "a message" not in metrics.text()


@pytest.mark.virtual_time
async def test_a_failed_request_says_how_long_it_took():
    """Time before it, such as that of an earlier attempt, is not counted."""
    facts: list[ModelFailed] = []
    dispatcher = Dispatcher()
    dispatcher.subscribe(ModelFailed, facts.append)
    down = ModelUnavailable("x", "down")
    model = ScriptedModel([Reply(delay=2.0, error=down), Reply(delay=3.0, error=down)])
    adapter = Adapter(model, retry=Retry(attempts=2, first_wait=10.0), clock=VirtualClock())
    with pytest.raises(PromptEvaluationError):
        await adapter.evaluate(Prompt("p", "x"), "Go.", session=Session(dispatcher=dispatcher))
    assert [fact.seconds for fact in facts] == pytest.approx([2.0, 3.0])


async def test_cost_is_counted_where_the_price_is_known():
    model = ScriptedModel(
        [Reply("done", usage=Usage(1_000_000, 0, requests=1))],
        name="x",
        traits=Traits(Price(Decimal(3), Decimal(5))),
    )
    with observed(MemoryMetrics()) as metrics:
        await Adapter(model).evaluate(Prompt("p", "x"), "Go.")
        await Adapter(ScriptedModel(["unknown"], name="y")).evaluate(Prompt("p", "x"), "Go.")
    assert [dict(key)["gen_ai_request_model"] for key in samples(metrics)["handrail_cost_total"]] == ["x"]
    assert only(samples(metrics), "handrail_cost_total") == 3


async def test_tools_that_a_model_invents_share_one_label():
    """A known tool keeps its label even if its arguments are invalid."""
    calls = [ToolCall(f"invented{number}", {}) for number in range(5)]
    script = [[*calls, ToolCall("greet", {"nobody": 1})], "done"]
    with observed(MemoryMetrics()) as metrics:
        await Adapter(ScriptedModel(script)).evaluate(clerk, "Go.")
    duration = samples(metrics)["gen_ai_execute_tool_duration_seconds_count"]
    labels = {dict(key)["gen_ai_tool_name"]: value for key, value in duration.items()}
    assert labels == {UNKNOWN: 5, "greet": 1}


async def test_the_number_of_tools_and_agents_with_labels_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_metrics, "MOST_NAMES", 1)
    script = [[ToolCall("greet", {"name": "Ada"}), ToolCall("pay", {"amount": 1})], "done"]
    with observed(MemoryMetrics()) as metrics:
        for agent in ("p", "q"):
            await Adapter(ScriptedModel([*script])).evaluate(Prompt(agent, "x", tools=[greet, pay]), "Go.")
    found = samples(metrics)
    for metric, label, own in (("execute_tool", "tool", "greet"), ("invoke_agent", "agent", "p")):
        values = {
            dict(key)[f"gen_ai_{label}_name"] for key in found[f"gen_ai_{metric}_duration_seconds_count"]
        }
        assert values == {own, UNKNOWN}


@tool(effect="staged")
async def pick(context: UserContext) -> str:
    """Ask for a number."""
    return f"got {await context.wait_for('pick', {}, int)}"


@pytest.mark.virtual_time
async def test_a_question_s_time_includes_the_time_while_its_run_was_parked():
    """The run is parked, somebody answers after an hour, and the run goes on another hour later."""
    clock = VirtualClock()
    journal = MemoryJournal(clock)
    prompt = Prompt("p", "x", tools=[pick, pay], policies=[CapabilityPolicy({"money": "ask"})])
    script = [[ToolCall("pick"), ToolCall("pay", {"amount": 1})], "done"]
    adapter = Adapter(ScriptedModel(script), journal=journal, environment=LaterEnvironment(), clock=clock)
    with observed(MemoryMetrics()) as metrics:
        with pytest.raises(RunParked) as parked:
            await adapter.evaluate(prompt, "Go.", run_id="r1")
        await asyncio.sleep(3600)
        for question in parked.value.questions:
            value: Any = {"approved": True} if question.kind == "approval" else 7
            journal.questions.answer(answer_to(question, value))
        await asyncio.sleep(3600)
        await adapter.resume("r1", prompt)
    found = samples(metrics)
    assert only(found, "handrail_question_wait_seconds_sum", handrail_question_outcome="answered") == (
        pytest.approx(3600, abs=5)
    )
    assert only(found, "handrail_approval_wait_seconds_sum", handrail_approval_outcome="approved") == (
        pytest.approx(3600, abs=5)
    )
    legs = {dict(key)["handrail_run_outcome"]: value for key, value in found["handrail_legs_total"].items()}
    assert legs == {"parked": 1, "done": 1}


async def test_an_approval_that_nobody_was_asked_for_has_no_waiting_time():
    script = [ToolCall("pay", {"amount": 1}), "done"]
    prompt = Prompt("p", "x", tools=[pay], policies=[CapabilityPolicy({"money": "ask"})])
    with observed(MemoryMetrics()) as metrics:
        await Adapter(ScriptedModel(script), approvals="approve_all").evaluate(prompt, "Go.")
        await Adapter(ScriptedModel(script), environment=Person(approve=True)).evaluate(prompt, "Go.")
    assert only(samples(metrics), "handrail_approval_wait_seconds_count") == 1


def test_nothing_is_computed_unless_runs_are_observed():
    """Facts that only telemetry needs are made while somebody observes runs, and requests are never copied for metrics."""
    needed = (PromptRendered, PromptParked)
    dispatcher = Dispatcher()
    assert not any(map(dispatcher.listens_for, needed))
    with observed(MemoryMetrics()):
        assert all(map(dispatcher.listens_for, needed))
        assert not dispatcher.listens_for(ModelRequested)
    assert not any(map(dispatcher.listens_for, needed))


@pytest.mark.once
def test_the_process_s_meter_provider_gets_the_same_once():
    """With telemetry started, a server's metrics and those of runs go to the process's provider too, each counted once."""
    code = """
import asyncio, json
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import NoOpTracerProvider
from handrail import Adapter, Prompt, ScriptedModel, telemetry
from handrail.serve.metrics import REQUESTS, SERVER, new_metrics

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
with telemetry.start(tracer_provider=NoOpTracerProvider(), meter_provider=metrics.get_meter_provider()):
    served = new_metrics()
    stop = served.observe_runs()
    served.add(REQUESTS, route="/", method="GET", status="200")
    served.observe("handrail.viewers", "Open streams.", lambda: 3)
    asyncio.run(Adapter(ScriptedModel(["done"])).evaluate(Prompt("p", "x"), "Go."))
    found = {
        metric.name: [getattr(point, "count", None) or point.value for point in metric.data.data_points]
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.data.data_points
    }
print(json.dumps([found, served.text()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found, text = json.loads(done.stdout)
    assert found["handrail.requests"] == [1]
    assert found["handrail.viewers"] == [3]
    assert found["gen_ai.client.operation.duration"] == [1]
    assert found["gen_ai.invoke_agent.duration"] == [1]
    assert 'gen_ai_invoke_agent_duration_seconds_count{gen_ai_agent_name="p"} 1.0' in text


def test_the_conventions_names_and_buckets():
    """Instruments that the conventions define have their names, units and buckets."""
    from opentelemetry.util.genai import _instruments as conventions  # pyright: ignore[reportMissingTypeStubs]

    defined: dict[str, tuple[str, tuple[float, ...]]] = {}

    class Recording:
        def create_histogram(self, name: str, description: str, unit: str, **options: Any) -> None:
            defined[name] = unit, tuple(options["explicit_bucket_boundaries_advisory"])

    conventions._Instruments(Recording())  # pyright: ignore[reportArgumentType]
    ours = {name: (each.unit, each.bounds) for name, each in INSTRUMENTS.items() if name in defined}
    assert len(ours) == 5
    assert ours == {
        name: (unit, pytest.approx(bounds)) for name, (unit, bounds) in defined.items() if name in ours
    }


def test_the_page_lists_every_metric():
    """The table in docs/observability.md has a row for each metric, with its own labels."""
    page = (ROOT / "docs" / "observability.md").read_text().partition("## Traces")[0]
    assert set(INSTRUMENTS) == set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
