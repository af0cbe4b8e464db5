"""Tests for results that are too large to show. Such a result does not end a stream, and the whole result stays available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Adapter, Prompt, ScriptedModel, ToolCall, tool
from handrail.messages import ModelRequest, ToolMessage
from handrail.serve.agui.message_writer import MOST_CHARACTERS, shorten
from handrail.serve.sources import PromptSource
from support.serving import serving


@tool(effect="read")
async def dump(characters: int) -> str:
    """Return this many characters."""
    return "é" * characters


def told(asked: list[int], limit: int | None = None) -> PromptSource:
    """Return an app whose model calls `dump` for each of these numbers, and then answers with the results' sizes."""

    def play(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return " ".join(str(len(result.text)) for result in last.results)
        return [ToolCall("dump", {"characters": characters}) for characters in asked]

    return PromptSource(
        Prompt("desk", "Help.", tools=[dump], result_limit=limit), Adapter(ScriptedModel(play))
    )


def agent(text: str) -> dict[str, Any]:
    messages = [{"id": "1", "role": "user", "content": text}]
    return {"threadId": "a", "runId": "leg", "messages": messages, "tools": [], "context": [], "state": {},
            "forwardedProps": {}}  # fmt: skip


# Without the limit, the one result of the first case, or the results of the second together, would overflow the feed.
@pytest.mark.parametrize("asked", [[3_000_000], [250_000] * 20])
async def test_a_large_result_is_shortened_and_ends_no_stream(tmp_path: Path, asked: list[int]):
    async with serving(tmp_path, told(asked)) as client:
        async with client.stream("POST", "/agent", agent("dump")) as stream:
            events = await stream.all()
        assert events[-1]["type"] == "RUN_FINISHED"
        shown = [each["content"] for each in events if each["type"] == "TOOL_CALL_RESULT"]
        run_id = events[0]["metadata"]["handrail"]["run_id"]
        for content, characters in zip(shown, asked, strict=True):
            left_out = characters - MOST_CHARACTERS
            assert content.startswith("é" * MOST_CHARACTERS + "\n\n[")
            assert f"[{left_out:,} of {characters:,} characters are not shown" in content
            assert f"/runs/{run_id}]" in content
        seen = await client.idle("a")
        assert [each["content"] for each in seen["messages"] if each["role"] == "tool"] == shown
        assert [each["content"] for each in seen["messages"] if each["role"] == "assistant"][-1] == " ".join(
            str(characters) for characters in asked
        ), "the model did not receive the complete results"
        tree = (await client.ask("GET", f"/threads/a/runs/{run_id}")).json
        calls = tree["turns"][0]["calls"]
        assert [call["message"] for call in calls] == ["é" * characters for characters in asked]


async def test_people_see_the_excerpt_that_the_model_saw(tmp_path: Path):
    """A result over the limit of its run is shown as the model saw it: in the stream, in a snapshot and in the record."""
    async with serving(tmp_path, told([3_000], limit=1_000)) as client:
        async with client.stream("POST", "/agent", agent("dump")) as stream:
            events = await stream.all()
        assert events[-1]["type"] == "RUN_FINISHED"
        [shown] = [each["content"] for each in events if each["type"] == "TOOL_CALL_RESULT"]
        assert "2,000 of 3,000 characters are left out here" in shown
        run_id = events[0]["metadata"]["handrail"]["run_id"]
        seen = await client.idle("a")
        said = {each["role"]: each["content"] for each in seen["messages"]}
        assert (said["tool"], said["assistant"]) == (shown, str(len(shown)))
        tree = (await client.ask("GET", f"/threads/a/runs/{run_id}")).json
        assert [call["message"] for call in tree["turns"][0]["calls"]] == [shown]


@given(st.text(max_size=20), st.integers(-5, 5))
def test_what_fits_is_as_it_is_and_the_rest_is_counted(head: str, over: int):
    text = head + "x" * (MOST_CHARACTERS + over - len(head))
    found = shorten(text, "run.1~1/1")
    if over <= 0:
        assert found == text
    else:
        assert found.startswith(text[:MOST_CHARACTERS])
        assert f"[{over} of {len(text):,} characters" in found
        assert found.endswith("/runs/run]")
