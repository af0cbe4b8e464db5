"""Pattern 5: two model calls run in parallel. If one fails, the other is cancelled.

python examples/handoff/parallel.py
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
    gather,
    open_gate,
)
from handrail.messages import ModelRequest, UserMessage


@dataclass(frozen=True)
class Topic:
    topic: str


@dataclass(frozen=True)
class Analysis:
    analysis: str


@dataclass(frozen=True)
class Both:
    technical: str
    business: str


assess = Handoff("assess", "Assess a topic from two sides.", params=Topic, effect="read")


@assess.before
async def begin(params: Topic, *, context: ToolContext) -> Parked[None, Topic]:
    return Parked(None, params)


@assess.client
async def look_from_both_sides(topic: Topic, *, context: AgentContext) -> Both:
    technical, business = await gather(
        context.prompt_model(f"Technical analysis of: {topic.topic}", Analysis),
        context.prompt_model(f"Business analysis of: {topic.topic}", Analysis),
    )
    return Both(technical.analysis, business.analysis)


@assess.after
async def report(nothing: None, both: Both, *, context: ToolContext) -> ToolResult[Both]:
    return ToolResult.ok(both)


def model() -> ScriptedModel:
    """Return a model whose answer depends on the question."""

    def answer(request: ModelRequest) -> str:
        asked = request.messages[-1]
        technical = isinstance(asked, UserMessage) and asked.text.startswith("Technical")
        return '{"analysis": "it works"}' if technical else '{"analysis": "it pays"}'

    return ScriptedModel(answer)


def main() -> None:
    """Run both analyses, and print them in one answer."""
    gate = open_gate([assess], environment=AgentEnvironment(model()))
    print(gate.invoke("assess", {"topic": "umbrellas"}).wait().value)


if __name__ == "__main__":
    main()
