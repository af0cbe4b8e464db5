"""A run whose coroutine is closed can't await anything any more. Its pending compensations run when it is resumed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from handrail import (
    Adapter,
    LaterEnvironment,
    MemoryJournal,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import RunParked
from handrail.events import ToolInvoked
from handrail.session import Session
from support.operations import close_when
from support.parked_runs import answer_to
from support.texts import WAS_UNDONE


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
    await close_when(waiting, adapter.evaluate(prompt, "go", run_id="run", session=session))
    (ended,) = session[ToolInvoked].all()
    assert ended.status == "cancelled"
    assert not undone
    response = await adapter.resume("run", prompt)
    assert response.text == "It was undone."
    assert len(undone) == 1


async def test_what_a_closed_call_had_done_inside_is_compensated_with_it() -> None:
    """When the run is resumed, a closed compensable call and its finished inner calls are each undone once, the last first.

    A compensation that fails is reported, and the others still run.
    """
    undone: list[Any] = []

    async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(value)
        if value == "c" and undone.count("c") == 1:
            raise ValueError("the hotel is closed")

    @tool(effect="compensable", compensate=take_back)
    async def book(what: str) -> str:
        """Book."""
        return what

    @tool(effect="compensable", compensate=take_back)
    async def both(context: ToolContext) -> str:
        """Book twice."""
        await context.call("book", what="a")
        await context.call("book", what="b")
        return "both"

    @tool(effect="compensable", compensate=take_back)
    async def trip(context: ToolContext) -> None:
        """Book three times, and wait."""
        await context.call("both")
        await context.call("book", what="c")
        waiting.set()
        await asyncio.Event().wait()

    waiting = asyncio.Event()
    journal, model = MemoryJournal(), ScriptedModel([ToolCall("trip"), "It was undone."])
    adapter, prompt = Adapter(model, journal=journal), Prompt("p", "Book.", tools=[book, both, trip])
    await close_when(waiting, adapter.evaluate(prompt, "go", run_id="run"))
    assert not undone
    response = await adapter.resume("run", prompt)
    assert undone == [None, "c", "both", "b", "a"]
    (ended,) = [each for each in response.session[ToolInvoked].all() if each.tool == "trip"]
    assert WAS_UNDONE in ended.result.message
    assert ended.result.message.endswith(
        "It had done: book (compensating it failed: ValueError: the hotel is closed)."
    )


async def test_the_inner_calls_of_a_closed_irreversible_call_are_compensated_once() -> None:
    """The outcome of an irreversible call that was closed is unknown, but its compensable inner calls are undone, once."""
    undone: list[Any] = []

    async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(value)

    @tool(effect="compensable", compensate=take_back)
    async def book(what: str) -> str:
        """Book."""
        return what

    @tool
    async def pay(what: str) -> str:
        """Pay, which can't be undone."""
        return what

    @tool
    async def trip(context: ToolContext) -> None:
        """Book twice and pay, and wait."""
        await context.call("book", what="a")
        await context.call("pay", what="a")
        await context.call("book", what="b")
        waiting.set()
        await asyncio.Event().wait()

    waiting = asyncio.Event()
    journal, model = MemoryJournal(), ScriptedModel([ToolCall("trip"), "It is unknown."])
    adapter, prompt = Adapter(model, journal=journal), Prompt("p", "Book.", tools=[book, pay, trip])
    await close_when(waiting, adapter.evaluate(prompt, "go", run_id="run"))
    assert not undone
    response = await adapter.resume("run", prompt)
    assert undone == ["b", "a"]
    (ended,) = [each for each in response.session[ToolInvoked].all() if each.tool == "trip"]
    assert "The outcome of trip is unknown" in ended.result.message
    assert ended.result.message.endswith("These inner calls were undone: book. It had done: pay.")
    await adapter.resume("run", prompt)
    assert undone == ["b", "a"]


@pytest.mark.parametrize("parks", [False, True])
async def test_an_inner_call_that_has_happened_is_undone_if_its_outer_call_fails(parks: bool) -> None:
    """If an outer call fails, an interrupted inner call that its probe confirms is compensated, and so are the calls inside it."""
    undone: list[Any] = []

    async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append(context.tool.name)

    async def has_happened(params: Any, *, context: ToolContext) -> bool:
        return True

    @tool(effect="compensable", compensate=take_back)
    async def seat() -> str:
        """Take a seat."""
        return "1"

    @tool(effect="compensable", compensate=take_back, probe=has_happened)
    async def book(context: ToolContext) -> None:
        """Book, and wait."""
        await context.call("seat")
        waiting.set()
        await asyncio.Event().wait()

    @tool(effect="idempotent")
    async def trip(context: ToolContext) -> None:
        """Book, and fail."""
        assert "was done before" in (await context.call("book")).message
        if parks:
            await context.request_approval("Go on?")
        raise ValueError("no train")

    waiting = asyncio.Event()
    journal, model = MemoryJournal(), ScriptedModel([ToolCall("trip"), "It failed."])
    adapter, prompt = Adapter(model, journal=journal), Prompt("p", "Book.", tools=[seat, book, trip])
    await close_when(waiting, adapter.evaluate(prompt, "go", run_id="run"))
    if parks:
        with pytest.raises(RunParked) as parked:
            await adapter.resume("run", prompt, environment=LaterEnvironment())
        journal.questions.answer(answer_to(parked.value.questions[0], {"approved": True}))
    assert not undone
    assert (await adapter.resume("run", prompt, environment=LaterEnvironment())).text == "It failed."
    assert undone == ["book.undo", "seat.undo"]
