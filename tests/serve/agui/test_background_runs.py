"""Tests of where the activities for background runs stand among a thread's messages."""

from __future__ import annotations

from typing import Any

from handrail.context import RunContext
from handrail.events import BackgroundStarted
from handrail.serve.agui.background_runs import background_event, begun_in, started_json, with_begun


def begun(id: str, call_id: str) -> dict[str, Any]:
    return started_json(
        BackgroundStarted(id, "helper", "hello", call_id, RunContext("r", "r", "s", 1, "", "", ""))
    )


def turn(id: str, *calls: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "role": "assistant",
        "content": "",
        "toolCalls": [{"id": call} for call in calls],
        **more,
    }


def result(call: str) -> dict[str, Any]:
    return {"id": f"{call}/result", "role": "tool", "toolCallId": call, "content": ""}


def test_a_beginning_stands_after_the_results_of_the_turn_whose_call_or_inner_call_began_it():
    """It stands once, inside the nested run whose call began it; the beginning at an unknown call is left out."""
    messages = [
        turn("m1", "a", "b"),
        result("a"),
        result("b"),
        turn("m2", "n", subagentRunId="r.1"),
        turn("m3", "ab"),
    ]
    runs = [begun("1", "b"), begun("2", "a.1"), begun("3", "n"), begun("4", "gone"), begun("1", "b")]
    shown = with_begun(messages, runs)
    ids = ["m1", "a/result", "b/result", "2/begun", "1/begun", "m2", "3/begun", "m3"]
    assert [each["id"] for each in shown] == ids
    assert [each["id"] for each in shown if "subagentRunId" in each] == ["m2", "3/begun"]
    assert with_begun(messages, []) == messages


def test_the_beginnings_among_events_are_those_that_were_sent():
    sent = [begun("1", "a"), begun("2", "b")]
    events = [{"type": "CUSTOM", "name": "x"}, *(background_event(each).data for each in sent)]
    assert begun_in(events) == sent
