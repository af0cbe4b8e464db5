"""The ids of a run, as its calls see them: the trace, the span, and the process that executes it."""

from __future__ import annotations

from typing import Any

import pytest

from handrail import Adapter, MemoryJournal, Prompt, ScriptedModel, ToolCall, ToolContext, open_gate, tool
from handrail.context import RunContext
from handrail.errors import DefinitionError
from support.parked_runs import park_and_resume

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
STARTED = f"00-{TRACE}-00f067aa0ba902b7-01"


def calling(request: Any) -> Any:
    return ToolCall("look", {}) if len(request.messages) == 1 else "done"


def looking(seen: list[RunContext]) -> Any:
    @tool(effect="idempotent")
    async def look(context: ToolContext) -> str:
        """Record the ids, and ask a person if one is there."""
        seen.append(context.run_context)
        if context.wait_for is not None:
            await context.wait_for("go_on", {})
        return "looked"

    return look


@pytest.mark.parametrize("given", [{}, {"traceparent": STARTED}])
async def test_the_trace_survives_resume(given: Any) -> None:
    """A resumed run has the same trace id, whether it is derived from its id or given, and knows what started it. Each leg has its own span.

    The attempt increases by one, and `worker_id` is the owner of the journal's leases.
    """
    seen: list[RunContext] = []
    prompt = Prompt("p", "Look.", tools=[looking(seen)])
    journal = MemoryJournal()
    adapter = Adapter(ScriptedModel(calling), journal=journal)
    assert await park_and_resume(adapter, prompt, **given) == "done"
    before, after = seen
    assert (before.trace_id, before.traceparent) == (after.trace_id, after.traceparent)
    assert before.span_id != after.span_id
    assert len(before.trace_id) == 32
    assert len(before.span_id) == 16
    assert before.traceparent == given.get("traceparent", "")
    assert (before.trace_id == TRACE) is bool(given)
    assert before.worker_id == journal.owner
    assert (before.attempt, after.attempt) == (1, 2)


async def test_nested_runs_have_spans_of_their_own_in_one_trace() -> None:
    seen: list[RunContext] = []
    inner = Prompt("inner", "Look.", tools=[looking(seen)])

    @tool
    async def outer(context: ToolContext) -> str:
        """Evaluate the inner prompt twice."""
        seen.append(context.run_context)
        for _ in range(2):
            await context.adapter.evaluate(inner, "go")
        return "nested"

    gate = open_gate([outer], adapter=Adapter(ScriptedModel(calling)), run_id="r1", traceparent=STARTED)
    (await gate.invoke("outer")).unwrap()
    assert [ids.trace_id for ids in seen] == [TRACE] * 3
    assert len({ids.span_id for ids in seen}) == 3
    assert {ids.request_id for ids in seen} == {"r1"}


async def test_different_runs_have_different_traces() -> None:
    seen: list[RunContext] = []
    for _ in range(2):
        (await open_gate([looking(seen)]).invoke("look")).unwrap()
    assert len({ids.trace_id for ids in seen}) == 2


@pytest.mark.parametrize(
    "given",
    [
        *("", TRACE, STARTED.upper(), STARTED[1:], f"{STARTED}\n", f"01{STARTED[2:]}", 3),
        *(STARTED.replace(TRACE, "0" * 32), STARTED.replace("00f067aa0ba902b7", "0" * 16)),
    ],
)
def test_a_wrong_traceparent_is_refused(given: Any) -> None:
    with pytest.raises(DefinitionError, match="traceparent is"):
        open_gate([], traceparent=given)
