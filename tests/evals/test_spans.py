"""The evaluators of pydantic-evals that read spans, over the spans of `handrail.telemetry`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic_evals import Case, Dataset
from pydantic_evals.evaluators import (
    ArgumentCorrectness,
    MaxModelRequests,
    MaxToolCalls,
    ToolCorrectness,
    TrajectoryMatch,
)

import handrail.telemetry
from handrail import Agent, CapabilityPolicy, ScriptedModel, ToolCall, tool
from handrail.evals import AgentTask, check_report
from handrail.messages import ModelRequest, Usage
from handrail.models.scripted import Reply


@tool(effect="pure")
async def fare(to: str) -> int:
    """Look up a fare."""
    if to == "nowhere":
        raise ValueError("there is no train")
    return 40


@tool(effect="pure", capabilities={"net"})
async def browse(url: str) -> str:
    """Open a page."""
    return url


CALLS = [
    ToolCall("browse", {"url": "http://fares"}),
    ToolCall("fare", {"to": "nowhere"}),
    ToolCall("fare", {"to": "Rome"}),
]
SCRIPT = [*(Reply(calls=[call], usage=Usage(100, 10, requests=1)) for call in CALLS), Reply("40.")]


def answer(request: ModelRequest) -> Reply:
    return SCRIPT[len(request.messages) // 2]


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Telemetry with a tracer provider of this test."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with handrail.telemetry.start(content=True, tracer_provider=provider):
        yield
    provider.shutdown()


@pytest.mark.usefixtures("tracing")
def test_the_evaluators_of_spans_judge_the_calls_of_an_agent():
    """Calls that failed are told apart, denied ones count, and concurrent repeats have their own spans."""
    agent = Agent(
        ScriptedModel(answer),
        "Look up fares.",
        tools=[fare, browse],
        policies=[CapabilityPolicy({"net": "deny"}, effects={"pure": "allow"})],
    )
    task = AgentTask(agent)
    evaluators = [
        ToolCorrectness(["browse", "fare"]),
        ToolCorrectness(["browse", "fare", "fare"], include_failed=True, evaluation_name="attempts"),
        TrajectoryMatch(["browse", "fare"], order="exact"),
        ArgumentCorrectness("fare", {"to": "Rome"}),
        MaxToolCalls(3),
        MaxModelRequests(4),
    ]
    dataset = Dataset(name="fares", cases=[Case(name="rome", inputs="Rome?")], evaluators=evaluators)
    report = asyncio.run(dataset.evaluate(task, lifecycle=task.lifecycle, repeat=3, progress=False))
    check_report(report, scores={"TrajectoryMatch": 1.0})
    assert [case.metrics["input_tokens"] for case in report.cases] == [300, 300, 300]
    tight = Dataset(
        name="fares", cases=dataset.cases, evaluators=[MaxToolCalls(2), ToolCorrectness(["fare"])]
    )
    [case] = asyncio.run(tight.evaluate(task, lifecycle=task.lifecycle, progress=False)).cases
    assert [each.value for each in case.assertions.values()] == [False, False]
