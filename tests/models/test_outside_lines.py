"""Tests for the lines that tell people which tools the provider ran itself."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from handrail import Adapter, Prompt, Session, SqliteJournal
from handrail.events import ThoughtDelta
from handrail.messages import (
    AssistantMessage,
    Kept,
    ModelPart,
    ModelRequest,
    StopPart,
    TextPart,
    ThinkingPart,
    Traits,
)
from handrail.models.blocks import outside_lines
from handrail.runs.tree import said

SEARCH: dict[str, Any] = {
    "type": "server_tool_use",
    "id": "s1",
    "name": "web_search",
    "input": {"query": "rust\n1.9"},
}
LINE = "web_search, run by the provider: rust 1.9"


def kept(*blocks: Any, wire: str = "anthropic:anthropic") -> Kept:
    return Kept(wire, json.dumps(blocks, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("block", "line"),
    [
        (SEARCH, LINE),
        ({**SEARCH, "input": {"query": 5}}, "web_search, run by the provider: 5"),
        ({**SEARCH, "input": {"query": {"a": 1}}}, "web_search, run by the provider: {'a': 1}"),
        ({**SEARCH, "input": {"query": [1, "b"]}}, "web_search, run by the provider: 1, b"),
        ({**SEARCH, "input": 5}, "web_search, run by the provider"),
        ({**SEARCH, "name": "a\nb"}, "a b, run by the provider: rust 1.9"),
        ({"type": "mcp_tool_use", "name": "read", "input": {}}, "read, run by the provider"),
        (
            {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "rust"}},
            "web_search, run by the provider: rust",
        ),
        (
            {"type": "file_search_call", "queries": ["a", "b"]},
            "file_search, run by the provider: a, b",
        ),
        (
            {"type": "code_interpreter_call", "code": "1+1"},
            "code_interpreter, run by the provider: 1+1",
        ),
        ({"executableCode": {"code": "1+1"}}, "code_execution, run by the provider: 1+1"),
        (
            {"toolCall": {"toolType": "GOOGLE_SEARCH_WEB", "args": {"queries": ["rust"]}}},
            "GOOGLE_SEARCH_WEB, run by the provider: rust",
        ),
        ({"type": "server_tool_use", "name": "x", "input": "odd"}, "x, run by the provider"),
    ],
)
def test_a_line_for_each_call(block: dict[str, Any], line: str) -> None:
    """Each call to a provider's own tool becomes one line, whichever API it came from."""
    assert outside_lines(kept({"type": "text", "text": "So."}, block, block)) == [line, line]


@pytest.mark.parametrize(
    "other",
    [
        None,
        kept({"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", "name": "look"}),
        kept({"type": "function_call", "name": "look"}),
        Kept("chat:openai", b'{"message":{"tool_use":"_call"},"calls":[]}'),
        Kept("bridge", b'not JSON "_call"'),
        kept(1, "_call"),
    ],
)
def test_other_answers_have_no_lines(other: Kept | None) -> None:
    assert outside_lines(other) == []


def test_a_long_call_is_cut() -> None:
    (line,) = outside_lines(kept({**SEARCH, "input": {"query": "x" * 5000}}))
    assert len(line) < 250
    assert line.endswith("…")


class Searching:
    """A model whose provider searches the web before it answers."""

    name = "test:searching"
    traits = Traits()

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        yield ThinkingPart("I search.")
        yield TextPart("Rust 1.9.")
        yield StopPart("done", kept(SEARCH))


@pytest.mark.parametrize("streaming", [True, False])
async def test_people_see_what_the_provider_ran(streaming: bool, tmp_path: Path) -> None:
    """The line about a provider's search appears once in the recorded thought and, in a streamed run, once in the stream."""
    journal, session, prompt = SqliteJournal(tmp_path / "runs.db"), Session(), Prompt("p", "Search.")
    heard: list[str] = []
    session.dispatcher.subscribe(ThoughtDelta, lambda event: heard.append(event.text))
    adapter = Adapter(Searching(), journal=journal)
    if streaming:
        response = await adapter.stream(prompt, "go", session=session, run_id="run").response
    else:
        response = await adapter.evaluate(prompt, "go", session=session, run_id="run")
    assert response.text == "Rust 1.9."
    assert "".join(heard) == (f"I search.\n\n{LINE}\n" if streaming else "")
    recorded = [each for each in await said(journal, "run") if isinstance(each, AssistantMessage)]
    assert [each.thought for each in recorded] == [f"I search.\n\n{LINE}\n"]
