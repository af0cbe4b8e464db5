"""A finished run is freed at once, without the garbage collector, because nothing in it refers back to it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import pytest

from handrail import Adapter, Budget, Prompt, ScriptedModel, ToolCall, ToolContext, tool
from handrail.protocols import BudgetTrackerProtocol
from handrail.resources.bindings import given
from handrail.run.call import attempt_of
from handrail.run.run import Run
from handrail.session import Session


class Ledger:
    """A resource of one run."""


class Work:
    """What the tools of one run note."""

    def __init__(self) -> None:
        self.runs: list[ref[Run]] = []


@tool
async def look(place: int, context: ToolContext) -> dict[str, int]:
    """Use what a call most often uses, and note the run."""
    context.resources.get(Ledger)
    context.resources.get(BudgetTrackerProtocol).remaining()
    attempt = attempt_of(context)
    assert attempt is not None
    context.resources.get(Work).runs.append(ref(attempt.run))
    return {"place": place}


def looks(request: Any) -> Any:
    """Call `look` three times, then answer."""
    turns = len(request.messages) // 2
    return ToolCall("look", {"place": turns}) if turns < 3 else "Done."


@contextmanager
def no_collector() -> Generator[None]:
    """Collect everything there is, and then nothing until the block ends."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def evaluated(adapter: Adapter, prompt: Prompt[Any], **arguments: Any) -> list[ref[Run]]:
    work = Work()
    bound = [given(Ledger, Ledger()), given(Work, work)]
    response = await adapter.evaluate(prompt, "Go.", resources=bound, **arguments)
    assert response.text == "Done."
    return work.runs


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "with a session": lambda: {"session": Session()},
    "with a budget": lambda: {"budget": Budget(tool_calls=10)},
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_finished_run_leaves_nothing_for_the_collector(way: str) -> None:
    """Once a run has ended, the collector finds no object of it."""
    adapter, prompt = Adapter(ScriptedModel(looks)), Prompt("guide", "Look.", tools=[look])
    for _ in range(3):
        await evaluated(adapter, prompt, **WAYS[way]())
    with no_collector():
        runs = await evaluated(adapter, prompt, **WAYS[way]())
        assert [each() for each in runs] == [None, None, None]
        assert gc.collect() == 0
