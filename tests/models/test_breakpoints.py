"""Tests for the cache breakpoints of Anthropic's messages API."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    Kept,
    Message,
    ModelRequest,
    ModelSettings,
    Offered,
    Sent,
    ToolMessage,
    UserMessage,
)
from handrail.models.anthropic import AnthropicModel
from support.provider_streams import look

MODEL = AnthropicModel("m")
LOOKBACK = 20


def prefixes(body: bytes) -> list[str]:
    """Return the prefix that each breakpoint caches: the tools, the system text and the blocks up to the marked one.

    The marks are left out, because the provider does not count them.
    """
    sent = json.loads(body)
    blocks: list[Any] = [["tool", each] for each in sent.get("tools", ()) if not each.get("defer_loading")]
    blocks += [["system", each] for each in sent.get("system", ())]
    blocks += [[said["role"], each] for said in sent["messages"] for each in said["content"]]
    found: list[str] = []
    for index, (_, block) in enumerate(blocks):
        if block.pop("cache_control", None) is not None:
            found.append(json.dumps(blocks[: index + 1]))
    if "cache_control" in sent:
        found.append(json.dumps(blocks))
    return found


def blocks_in(prefix: str) -> int:
    return len(json.loads(prefix))


def turn(number: int, calls: int, kept: bool) -> list[Message]:
    """Return a model's answer with this many calls, and the message with their results."""
    ids = [f"c{number}_{each}" for each in range(calls)]
    asked = tuple(CallAsked(each, "look", "{}") for each in ids)
    plain: list[dict[str, Any]] = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]
    plain += [{"type": "tool_use", "id": None, "name": None, "input": None} for _ in ids]
    data = json.dumps(plain).encode()
    answer = AssistantMessage("Hm.", asked, Kept("anthropic:anthropic", data) if kept else None)
    return [answer, ToolMessage(tuple(CallAnswered(each, "look", "seen") for each in ids))]


@given(
    turns=st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=6),
    system=st.sampled_from(["", "Be brief."]),
    tools=st.integers(0, 2),
    ttl=st.sampled_from([None, "1h"]),
)
def test_each_request_finds_what_the_one_before_cached(
    turns: list[tuple[int, bool]], system: str, tools: int, ttl: Any
) -> None:
    """Each request has a breakpoint at the previous request's end, or near enough after it to find the cached prefix.

    The prefix of tools and system text stays the same, and no request has more than four breakpoints.
    """
    messages: Sent[Message] = Sent([UserMessage("Go.")])
    offered = Sent(Offered(look, deferred=each == 1) for each in range(tools))
    settings = ModelSettings(cache_ttl=ttl)
    before: list[str] = []
    for number, (calls, kept) in enumerate([*turns, (1, False)]):
        request = ModelRequest(system, messages, offered, settings=settings)
        body = MODEL._body(request)
        assert body.count(b'"cache_control"') <= 4
        found = prefixes(body)
        if before:
            end = before[-1]
            assert any(
                each.startswith(end[:-1]) and blocks_in(each) - blocks_in(end) <= LOOKBACK for each in found
            )
            # The tools and the system text form the same prefix in every request.
            assert found[: bool(system or tools)] == before[: bool(system or tools)]
        before = found
        for message in turn(number, calls, kept):
            messages.append(message)


def test_a_short_turn_changes_no_message() -> None:
    """If few blocks were added since the previous request, its messages are sent again with the same bytes."""
    messages: Sent[Message] = Sent([UserMessage("Go.")])
    first = MODEL._body(ModelRequest("s", messages, Sent([Offered(look)])))
    for message in turn(1, 3, kept=False):
        messages.append(message)
    second = MODEL._body(ModelRequest("s", messages, Sent([Offered(look)])))
    said = first[first.index(b'"messages":[') : first.index(b'"text":"Go."') + 12]
    assert said in second


def test_tools_end_the_prefix_if_there_is_no_system_text() -> None:
    """Without system text, the last tool that is offered from the start has a breakpoint. A tool that is added later has none."""
    tools = Sent([Offered(look), Offered(look, deferred=True)])
    sent = json.loads(MODEL._body(ModelRequest("", Sent([UserMessage("Go.")]), tools)))
    assert ["cache_control" in each for each in sent["tools"]] == [True, False]
    deferred = Sent([Offered(look, deferred=True)])
    sent = json.loads(MODEL._body(ModelRequest("", Sent([UserMessage("Go.")]), deferred)))
    assert ["cache_control" in each for each in sent["tools"]] == [False]


def test_no_marks_without_a_cache() -> None:
    messages: Sent[Message] = Sent([UserMessage("Go."), *turn(1, 30, kept=False)])
    request = ModelRequest("", messages, Sent([Offered(look)]))
    assert b"cache_control" not in AnthropicModel("m", cache=False)._body(request)
