"""Pattern 4: model calls run in sequence. A second call builds on the first.

python examples/handoff/sequential.py
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
)


@dataclass(frozen=True)
class Topic:
    topic: str


@dataclass(frozen=True)
class Research:
    findings: list[str]
    needs_more: bool = False


research = Handoff("research", "Research a topic, deeper if needed.", params=Topic, effect="read")


@research.before
async def begin(params: Topic, *, context: ToolContext) -> Parked[None, Topic]:
    return Parked(None, params)


@research.client
async def look(topic: Topic, *, context: AgentContext) -> list[str]:
    initial = await context.prompt_model(f"Research: {topic.topic}", Research)
    if not initial.needs_more:
        return initial.findings
    deeper = await context.prompt_model(f"Expand on: {', '.join(initial.findings)}", Research)
    return [*initial.findings, *deeper.findings]


@research.after
async def report(nothing: None, findings: list[str], *, context: ToolContext) -> ToolResult[list[str]]:
    return ToolResult.ok(findings)


def model() -> ScriptedModel:
    """Return a model whose first answer says that more is needed, and whose second does not."""
    return ScriptedModel(
        [
            '{"findings": ["rain"], "needs_more": true}',
            '{"findings": ["clouds", "wind"], "needs_more": false}',
        ]
    )


def main() -> None:
    """Run two model calls, one after the other."""
    asked = model()
    gate = open_gate([research], environment=AgentEnvironment(asked))
    print(gate.invoke("research", {"topic": "weather"}).wait().value)
    print(len(asked.requests), "model calls")


if __name__ == "__main__":
    main()
