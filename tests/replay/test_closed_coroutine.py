"""A run whose coroutine is closed can't await anything any more. Its pending compensations run when it is resumed."""

from __future__ import annotations

import asyncio
from typing import Any

from handrail import Adapter, MemoryJournal, Prompt, ScriptedModel, ToolCall, ToolContext, tool
from handrail.events import ToolInvoked
from handrail.session import Session


async def test_a_call_that_was_closed_is_compensated_when_its_run_is_resumed() -> None:
    """The compensation of a call whose coroutine was closed runs when the run is resumed, and then the run continues."""
    undone: list[Any] = []

    async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(params)

    @tool(effect="compensable", compensate=unbook)
    async def book(context: ToolContext) -> None:
        """Book, and wait."""
        waiting.set()
        await asyncio.Event().wait()

    waiting = asyncio.Event()
    journal, session = MemoryJournal(), Session()
    model = ScriptedModel([ToolCall("book"), "It was undone."])
    adapter, prompt = Adapter(model, journal=journal), Prompt("p", "Book.", tools=[book])
    running = adapter.evaluate(prompt, "go", run_id="run", session=session)
    steps = running.__await__()
    while not waiting.is_set():  # drives the run by hand, so that it can be closed
        pause = next(steps)
        if pause is None:
            await asyncio.sleep(0)
        else:
            pause._asyncio_future_blocking = False
            if not waiting.is_set():
                await asyncio.wait({pause})
    steps.close()
    (ended,) = session[ToolInvoked].all()
    assert ended.status == "cancelled"
    assert not undone
    response = await adapter.resume("run", prompt)
    assert response.text == "It was undone."
    assert len(undone) == 1
