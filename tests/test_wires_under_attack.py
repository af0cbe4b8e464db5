"""What providers send that they should not, what is sent to them, and what of it is shown."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from handrail import Adapter, AnthropicModel, Budget, OpenAIModel, Prompt, PromptEvaluationError, tool
from handrail.adapter import Retry
from handrail.limits import BudgetTracker
from handrail.messages import Price
from raw_server import Raw, delta, raw_server, said, streamed, whole

ONCE = Retry(attempts=1)
PLAIN = Prompt("p", "Go.")


@tool
async def weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"It rains in {city}."


GUIDE = Prompt("guide", "Answer briefly.", tools=[weather])


def chat(raw: Raw, **options: Any) -> OpenAIModel:
    return OpenAIModel("m", **{"base_url": raw.url, "key_variable": None, **options})


# --- usage -------------------------------------------------------------------------------------


async def test_a_provider_that_counts_nothing_is_not_free() -> None:
    """Without usage the bound that was reserved counts as spent, so a budget still ends a run."""
    async with raw_server(said("ok")) as raw:
        adapter = Adapter(chat(raw, price=Price(Decimal(1), Decimal(1))), max_tokens=100)
        budget = BudgetTracker(Budget(tokens=500))
        for evaluated in range(10):
            try:
                response = await adapter.evaluate(PLAIN, "hi", budget=budget)
            except PromptEvaluationError as error:
                assert error.phase == "budget"
                break
        else:
            raise AssertionError("ten answers of up to 100 tokens passed a limit of 500")
        assert evaluated
        assert response.cost is None
        assert budget.spent()["tokens"] > 400


async def test_without_usage_the_next_request_is_bounded_by_all_that_is_sent() -> None:
    """What the provider has not counted is estimated again, also in the second turn."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    async with raw_server(said(None, tool_calls=[call]), said("ok")) as raw:
        budget = BudgetTracker(Budget(tokens=100_000))
        await Adapter(chat(raw), max_tokens=10).evaluate(GUIDE, "x" * 1000, budget=budget)
        assert budget.spent()["tokens"] > 2000


async def test_a_stream_that_breaks_off_is_not_free() -> None:
    """What a broken answer has used nobody knows: the bound counts."""
    async with raw_server(streamed(delta(content="One two"), end=b"")) as raw:
        budget = BudgetTracker(Budget(tokens=5000))
        adapter = Adapter(chat(raw), retry=Retry(attempts=2, first_wait=0), max_tokens=100)
        with pytest.raises(PromptEvaluationError):
            await adapter.stream(PLAIN, "hi", budget=budget).response
        assert budget.spent()["tokens"] > 200


async def test_a_refused_request_is_free() -> None:
    """An error status has used no tokens."""
    async with raw_server(whole({"error": {"message": "no"}}, 500)) as raw:
        budget = BudgetTracker(Budget(tokens=5000))
        with pytest.raises(PromptEvaluationError):
            await Adapter(chat(raw), retry=ONCE).evaluate(PLAIN, "hi", budget=budget)
        assert (budget.spent()["tokens"], budget.spent()["requests"]) == (0, 1)
