"""If a run exceeds its budget and its end can't be recorded, the resumed run fails because of its budget."""

from typing import Any

import pytest

from handrail import Adapter, Budget, Prompt, ScriptedModel, ToolCall, ToolContext, tool
from handrail.errors import JournalError, PromptEvaluationError
from handrail.journal.sqlite import MemoryJournal


@tool(effect="idempotent")
async def pay() -> str:
    """Pay."""
    return "paid"


@tool(effect="idempotent")
async def order(context: ToolContext) -> str:
    """Pay twice, in two inner calls."""
    return " and ".join([(await context.call("pay")).render() for _ in range(2)])


CASES = {
    "its own call": ([pay, order], [ToolCall("pay"), ToolCall("pay"), ToolCall("pay"), "all is paid"]),
    "an inner call": ([pay, order], [ToolCall("pay"), ToolCall("order"), "all is paid"]),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_resumed_run_ends_in_the_same_way(case: str, monkeypatch: pytest.MonkeyPatch):
    tools, script = CASES[case]
    journal, prompt = MemoryJournal(), Prompt("shop", "You run a shop.", tools=tools)
    adapter = Adapter(ScriptedModel(script), journal=journal)

    async def fail(*_: Any, **__: Any) -> None:
        raise JournalError("runs", "the connection is lost", "Try again.", is_lost=True)

    with monkeypatch.context() as lost:
        lost.setattr(journal.runs, "leave", fail)
        with pytest.raises((PromptEvaluationError, JournalError)):
            await adapter.evaluate(prompt, "Go.", run_id="r", budget=Budget(tool_calls=2))
    assert (await journal.runs.get("r")).status == "running"
    with pytest.raises(PromptEvaluationError, match="budget for tool_calls is too low") as ended:
        await adapter.resume("r", prompt)
    assert ended.value.phase == "budget"
    assert (await journal.runs.get("r")).status == "failed"
