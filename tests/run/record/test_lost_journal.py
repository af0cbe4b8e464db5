"""A call that can't be recorded, because the connection to the journal is lost, has not failed. It is made again when the run is resumed."""

from typing import Any

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolCall, tool
from handrail.errors import JournalError
from handrail.journal.sqlite import MemoryJournal


@tool(effect="idempotent")
async def pay() -> str:
    """Pay."""
    return "paid"


async def test_a_call_whose_record_was_lost_is_made_again(monkeypatch: pytest.MonkeyPatch):
    journal, prompt = MemoryJournal(), Prompt("shop", "You run a shop.", tools=[pay])
    adapter = Adapter(ScriptedModel([ToolCall("pay"), "done"]), journal=journal)

    commit = journal.calls.commit

    async def fail(*_: Any) -> None:
        lost.setattr(journal.calls, "commit", commit)  # later commits work again
        raise JournalError("runs", "the connection is lost", "Try again.", is_lost=True)

    with monkeypatch.context() as lost:
        lost.setattr(journal.calls, "commit", fail)
        lost.setattr(journal.calls, "commit_now", lambda unit: False)
        with pytest.raises(JournalError, match="connection is lost"):
            await adapter.evaluate(prompt, "Go.", run_id="r")
    assert await journal.calls.load("r") == ()
    assert (await adapter.resume("r", prompt)).text == "done"
    assert [unit.status for unit in await journal.calls.load("r")] == ["ok"]
