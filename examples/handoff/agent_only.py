"""Pattern 2: only a model takes part. `client` takes an `AgentContext`, and `run_as_agent` runs just that act.

python examples/handoff/agent_only.py
"""

from dataclasses import dataclass

from handrail import (
    AgentContext,
    AgentEnvironment,
    Handoff,
    Parked,
    ScriptedModel,
    ToolContext,
    ToolResult,
    open_gate,
    run_as_agent,
)
from handrail.testing import Person


@dataclass(frozen=True)
class Topic:
    topic: str


@dataclass(frozen=True)
class Started:
    ticket: int


@dataclass(frozen=True)
class Findings:
    findings: list[str]


deep_analysis = Handoff(
    "deep_analysis", "Analyse a topic in depth.", params=Topic, answer=Findings, effect="read"
)


@deep_analysis.before
async def open_ticket(params: Topic, *, context: ToolContext) -> Parked[Started, Topic]:
    return Parked(Started(ticket=7), params)


@deep_analysis.client
async def analyse(topic: Topic, *, context: AgentContext) -> Findings:
    return await context.prompt_model(f"Analyse: {topic.topic}", Findings)


@deep_analysis.after
async def close_ticket(started: Started, found: Findings, *, context: ToolContext) -> ToolResult[list[str]]:
    return ToolResult.ok(found.findings, f"Ticket {started.ticket}: {len(found.findings)} findings.")


def model() -> ScriptedModel:
    """Return a model that always finds the same things."""
    return ScriptedModel(lambda request: '{"findings": ["it rains", "it pours"]}')


def main() -> None:
    """Call the handoff with a model, then with only a person, which fails, and then run the client act alone."""
    for environment in (AgentEnvironment(model()), Person()):
        gate = open_gate([deep_analysis], environment=environment)
        print(gate.invoke("deep_analysis", {"topic": "weather"}).wait().render())
    print(run_as_agent(deep_analysis, Topic("weather"), model=model()).wait())


if __name__ == "__main__":
    main()
