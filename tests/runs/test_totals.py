"""Usage is summed up from what runs recorded: by day, person, app, model and tool, without a second bookkeeping."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from handrail import Adapter, Agent, MemoryJournal, ScriptedModel, Session, ToolCall, ToolContext, tool
from handrail.errors import DefinitionError, PromptEvaluationError
from handrail.messages import Price, Traits, Usage
from handrail.models import ModelRequestRefused, ModelUnavailable
from handrail.models.scripted import Reply
from handrail.run.adapter import Retry
from handrail.runs import usage

CENTS = Traits(price=Price(Decimal(10_000), Decimal(10_000)))
"""A cent a token."""


class Clock:
    def __init__(self) -> None:
        self.at = datetime(2026, 3, 28, 22, tzinfo=UTC)

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()


def reply(tokens: int, *calls: ToolCall) -> Reply:
    return Reply("done", calls, usage=Usage(tokens, 1, requests=1))


class Office:
    def __init__(self) -> None:
        self.clock = Clock()
        self.journal = MemoryJournal(self.clock)

    async def run(self, person: str, model: str, *script: Any, tools: Any = (), traits: Any = CENTS) -> Any:
        scripted = ScriptedModel(list(script), name=model, traits=traits)
        adapter = Adapter(
            scripted, journal=self.journal, clock=self.clock, retry=Retry(first_wait=0, longest_wait=0)
        )
        return await Agent(adapter, "Help.", name="desk", tools=tools).run(
            "go", session=Session(principal=person)
        )

    async def lines(self, *by: Any, **options: Any) -> list[dict[str, Any]]:
        found = await usage(self.journal, by=by, **options)
        return [{key: value for key, value in each.items() if value} for each in found.data(by)]


@tool(effect="pure")
async def look(context: ToolContext) -> str:
    """Look."""
    return "seen"


@tool(effect="pure")
async def fail() -> str:
    """Fail."""
    raise ValueError("no")


async def test_usage_is_divided_by_whatever_is_asked_for() -> None:
    office = Office()

    @tool(effect="pure")
    async def research(context: ToolContext) -> str:
        """Ask another model."""
        inner = Agent(
            ScriptedModel([reply(50, ToolCall("look", {})), reply(60)], name="b", traits=CENTS),
            "Look.",
            tools=[look],
        )
        return (await inner.run("go")).text

    calls = (ToolCall("research", {}), ToolCall("fail", {}))
    await office.run("ann", "a", reply(10, *calls), reply(20), tools=[research, fail])
    office.clock.at += timedelta(hours=3)
    await office.run("bea", "a", reply(5))
    assert await office.lines("day") == [
        {
            "day": "2026-03-28",
            "requests": 4,
            "input": 140,
            "output": 4,
            "calls": 3,
            "failed": 1,
            "cost": "1.44",
        },
        {"day": "2026-03-29", "requests": 1, "input": 5, "output": 1, "cost": "0.06"},
    ]
    assert [each["day"] for each in await office.lines("day", zone="Asia/Tokyo")] == ["2026-03-29"]
    assert {each["model"]: each["cost"] for each in await office.lines("model") if "model" in each} == {
        "a": "0.38",
        "b": "1.12",
    }
    by_tool = {each.get("tool", ""): (each.get("calls"), each["cost"]) for each in await office.lines("tool")}
    assert by_tool == {"": (None, "0.38"), "research": (1, "1.12"), "fail": (1, "0"), "look": (1, "0")}
    assert [each["person"] for each in await office.lines("person", "app")] == ["ann", "bea"]
    assert [each["requests"] for each in await office.lines("app", principal="bea")] == [1]
    since = office.clock.at.timestamp() - 60
    assert [each["requests"] for each in await office.lines("app", since=since)] == [1]
    with pytest.raises(DefinitionError, match="team"):
        await office.lines("team")


async def test_requests_that_failed_count_and_unknown_costs_are_no_zero() -> None:
    office = Office()
    broken = Reply("half", error=ModelUnavailable("a", "gone"), usage=Usage(1, 1, requests=1))
    await office.run("ann", "a", broken, reply(10))
    with pytest.raises(PromptEvaluationError):
        await office.run("ann", "a", Reply("half", error=ModelRequestRefused("a", "no")))
    await office.run("ann", "c", reply(7), traits=Traits())
    [a, c] = await office.lines("model")
    assert (a["requests"], a["unpriced"], a["cost"]) == (3, 2, "0.11")
    assert (c["requests"], c["unpriced"], c["cost"]) == (1, 1, "0")


async def test_csv_has_the_same_and_no_formulas() -> None:
    office = Office()
    await office.run("=cmd", "a", reply(10))
    found = await usage(office.journal, by=("person", "model"))
    assert found.csv(("person", "model")).splitlines() == [
        "person,model,requests,input,output,calls,failed,cost,unpriced",
        "'=cmd,a,1,10,1,0,0,0.11,0",
    ]
