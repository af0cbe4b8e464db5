"""Tests for a provider's answers with broken bytes, or with nonsensical headers, token counts or arguments of calls."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from handrail import (
    Adapter,
    AnthropicModel,
    Budget,
    GeminiModel,
    MemoryJournal,
    OpenAIModel,
    Prompt,
    Session,
    tool,
)
from handrail.clock import SystemClock
from handrail.context import RATE_LIMIT, ToolContext
from handrail.events import ModelFailed, ToolInvoked
from handrail.messages import Model
from handrail.models import ModelRateLimited
from handrail.run.adapter import Retry
from handrail.run.limits import BudgetTracker
from support.raw_server import raw_server, streamed, whole
from support.wire_grammar import strict_json

QUICK = Retry(attempts=2, first_wait=0.0)
PLAIN = Prompt("p", "Go.")
WIRES = ("chat", "responses", "messages", "gemini")
DEEP = "[" * 20_000 + "]" * 20_000


def model_at(wire: Any, url: str) -> Model:
    if wire == "messages":
        return AnthropicModel("m", base_url=url, key_variable=None)
    if wire == "gemini":
        return GeminiModel("m", base_url=url, key_variable=None)
    return OpenAIModel("m", api=wire, base_url=url, key_variable=None)


def said(wire: str, stream: bool, text: str = "fine") -> list[Any]:
    """Return an answer as one JSON value, or as the events of a stream."""
    match wire, stream:
        case "chat", False:
            return [{"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}]
        case "chat", True:
            return [
                {"choices": [{"delta": {"content": text}, "finish_reason": None}]},
                {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            ]
        case "responses", False:
            content = [{"type": "output_text", "text": text}]
            return [{"status": "completed", "output": [{"type": "message", "content": content}]}]
        case "responses", True:
            done = {"type": "response.completed", "response": said("responses", False, text)[0]}
            return [{"type": "response.output_text.delta", "delta": text}, done]
        case "messages", False:
            return [{"content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}]
        case "gemini", False:
            content = {"role": "model", "parts": [{"text": text}]}
            return [{"candidates": [{"content": content, "finishReason": "STOP"}]}]
        case "gemini", True:
            content = {"role": "model", "parts": [{"text": text}]}
            return [{"candidates": [{"content": content}]}, {"candidates": [{"finishReason": "STOP"}]}]
        case _:
            return [
                {"type": "message_start", "message": {}},
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
                {"type": "message_stop"},
            ]


def served(stream: bool, events: list[Any]) -> bytes:
    return streamed(*events) if stream else whole(events[0])


def placed(wire: str, stream: bool, raw: bytes) -> bytes:
    """Return a good answer with these bytes in place of its text."""
    events = [json.dumps(each).encode().replace(b'"fine"', raw) for each in said(wire, stream)]
    return served(stream, events)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "raw",
    [b'"\xff"', b'"\xe2\x82"', b'"\\ud800"', DEEP.encode(), b"NaN", b"1e999", b"7", b"null,", b'"x'],
    ids=["wrong UTF-8", "cut UTF-8", "surrogate", "deep", "nan", "inf", "a number", "malformed", "unclosed"],
)
async def test_broken_bytes_are_a_failed_attempt(wire: str, stream: bool, raw: bytes) -> None:
    """If an answer can't be read, the request is retried, and the next answer is used."""
    session = Session()
    async with raw_server(placed(wire, stream, raw), served(stream, said(wire, stream))) as server:
        adapter = Adapter(model_at(wire, server.url), retry=QUICK)
        if stream:
            response = await adapter.stream(PLAIN, "hi", session=session).response
        else:
            response = await adapter.evaluate(PLAIN, "hi", session=session)
    assert response.text == "fine"
    assert [failed.retry_in for failed in session[ModelFailed].all()] == [0.0]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("at", range(1, 4))
async def test_a_character_may_be_split_between_chunks(wire: str, at: int) -> None:
    """A character whose bytes arrive in two chunks of a stream is decoded correctly."""
    events = [json.dumps(each, ensure_ascii=False).encode() for each in said(wire, True, "😀")]
    body = b"".join(b"data: " + each + b"\n\n" for each in events) + b"data: [DONE]\n\n"
    cut = body.index("😀".encode()) + at
    chunks = b"".join(b"%x\r\n%s\r\n<pause>" % (len(each), each) for each in (body[:cut], body[cut:]))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    async with raw_server(head + chunks + b"0\r\n\r\n") as server:
        assert (await Adapter(model_at(wire, server.url)).stream(PLAIN, "hi").response).text == "😀"


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe",
        DEEP.encode(),
        b'{"error": %s}' % DEEP[19_400:20_600].encode(),
        b'{"error": {"message": 1e999}}',
    ],
)
async def test_an_error_that_can_not_be_read_is_still_an_error(body: bytes) -> None:
    """A request that gets an error response is retried even if the response's body can't be read."""
    async with raw_server(whole(body, 503), served(False, said("chat", False))) as server:
        response = await Adapter(model_at("chat", server.url), retry=QUICK).evaluate(PLAIN, "hi")
    assert response.text == "fine"


# --- headers -----------------------------------------------------------------------------------


class Standing(SystemClock):
    """A clock that always shows 1 January 2026."""

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)


def with_header(answer: bytes, name: str, value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return answer.replace(b"content-type", name.encode() + b": " + raw + b"\r\ncontent-type", 1)


@pytest.mark.parametrize("name", ["retry-after", "retry-after-ms"])
@pytest.mark.parametrize(
    "value",
    ["nan", "inf", "-inf", "1e999", "-5", "9" * 400, "soon", "²", "", b"\xff"]
    + [f"Fri, 31 Dec {year} 23:59:59 GMT" for year in (10**9, 10**20, "x", "0000")]
    + ["Fri, 31 Dec 2026 23:59:59 +9999999999"],
)
async def test_a_retry_time_that_makes_no_sense_is_not_one(name: str, value: str | bytes) -> None:
    """An invalid retry time is ignored, and the request is retried after the usual wait."""
    limited = with_header(whole({"error": {"message": "slow down"}}, 429), name, value)
    session = Session()
    async with raw_server(limited, served(False, said("chat", False))) as server:
        model: Any = model_at("chat", server.url)
        model._endpoint._clock = Standing()
        adapter = Adapter(model, retry=Retry(attempts=2, first_wait=0.0, longest_wait=1e12))
        assert (await adapter.evaluate(PLAIN, "hi", session=session)).text == "fine"
    assert [failed.retry_in for failed in session[ModelFailed].all()] == [0.0]


@pytest.mark.parametrize("wait", [float("nan"), -1.0, float("inf")])
def test_a_model_may_say_nonsense_about_its_next_try(wait: float) -> None:
    """A retry time that is negative or not finite is ignored, whichever model reports it."""
    error = ModelRateLimited("m", "slow down", retry_after=wait)
    assert Retry(first_wait=2.0, chance=lambda: 1.0).wait_after(1, error) == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-request-id", b"r\xff"),
        ("x-ratelimit-remaining-requests", b"9" * 5000),
        ("x-ratelimit-remaining-tokens", "٣".encode()),
        ("x-ratelimit-remaining-tokens", b"9" * 30),
        ("x-ratelimit-reset-requests", b"9" * 5000 + b"s"),
        ("anthropic-ratelimit-requests-reset", b"0001-01-01T00:00:00+14:00"),
        ("anthropic-ratelimit-requests-reset", b"9999-12-31T23:59:59-14:00"),
    ],
)
async def test_headers_that_make_no_sense_end_no_run(name: str, value: bytes) -> None:
    """An answer with nonsensical headers is used, and its run can be recorded."""
    call = {"id": "c", "function": {"name": "peek", "arguments": "{}"}}
    asks = whole({"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]})

    @tool(effect="pure")
    async def peek(context: ToolContext) -> str:
        """Look at something."""
        return str(context.extras.get(RATE_LIMIT))

    async with raw_server(with_header(asks, name, value), served(False, said("chat", False))) as server:
        adapter = Adapter(model_at("chat", server.url), retry=Retry(attempts=1), journal=MemoryJournal())
        response = await adapter.evaluate(Prompt("p", "Go.", tools=[peek]), "hi")
    assert response.text == "fine"
    assert response.session[ToolInvoked].all()[0].status == "ok"


# --- usage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("tokens", ["-5", '"10"', "1e300", "1" + "0" * 400, "2.5", "true", "[]", "null"])
async def test_usage_of_any_kind_can_be_counted_and_recorded(wire: str, stream: bool, tokens: str) -> None:
    """Token counts that make no sense don't end the run, and each of its counts is between 0 and 2**53."""
    names = {
        "chat": ("prompt_tokens", "completion_tokens"),
        "gemini": ("promptTokenCount", "candidatesTokenCount"),
    }.get(wire, ("input_tokens", "output_tokens"))
    usage = dict.fromkeys(names, "TOKENS")
    events = said(wire, stream)
    if wire == "messages" and stream:
        events[0]["message"]["usage"] = usage
    elif wire == "responses" and stream:
        events[-1]["response"]["usage"] = usage
    else:
        events[-1]["usageMetadata" if wire == "gemini" else "usage"] = usage
    raw = [json.dumps(each).replace('"TOKENS"', tokens).encode() for each in events]
    async with raw_server(served(stream, raw)) as server:
        adapter = Adapter(model_at(wire, server.url), retry=Retry(attempts=1), journal=MemoryJournal())
        budget = BudgetTracker(Budget(tokens=10_000))
        run = adapter.stream if stream else adapter.evaluate
        made: Any = run(PLAIN, "hi", budget=budget, max_tokens=9)
        response = await (made.response if stream else made)
    assert response.text == "fine"
    assert 0 <= response.usage.input <= 2**53
    assert 0 <= response.usage.output <= 2**53


# --- the input of a call -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["[]", "0", "false", '""', '"x"', "[1]", "null", "{}", '{"where": "there"}']
)
async def test_an_input_means_the_same_streamed_and_whole(given: str) -> None:
    """A call's input on Anthropic's wire means the same whether it arrives whole, in streamed pieces, or at the start of a block."""
    seen: list[tuple[str, str]] = []

    @tool(effect="pure")
    async def look(where: str = "here") -> str:
        """Look somewhere."""
        return where

    block = {"type": "tool_use", "id": "a", "name": "look"}
    call = json.dumps({"content": [{**block, "input": "GIVEN"}], "stop_reason": "tool_use"})
    start = {"type": "content_block_start", "index": 0}
    pieces = {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "input_json_delta", "partial_json": given},
    }
    end = [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ]
    begun = (
        json.dumps({**start, "content_block": {**block, "input": "GIVEN"}}).replace('"GIVEN"', given).encode()
    )
    answers = [
        (False, whole(call.replace('"GIVEN"', given).encode())),
        (True, streamed({**start, "content_block": {**block, "input": {}}}, pieces, *end)),
        (True, streamed({**start, "content_block": {**block, "input": []}}, pieces, *end)),
        (True, streamed(begun, *end)),
        (True, streamed(begun, *end[1:])),
    ]
    for stream, answer in answers:
        async with raw_server(answer, served(stream, said("messages", stream))) as server:
            adapter = Adapter(model_at("messages", server.url), retry=Retry(attempts=1))
            prompt = Prompt("p", "Go.", tools=[look])
            response = await (
                adapter.stream(prompt, "hi").response if stream else adapter.evaluate(prompt, "hi")
            )
        (invoked,) = response.session[ToolInvoked].all()
        seen.append((invoked.status, str(invoked.result.value)))
    assert len(set(seen)) == 1, seen
    assert seen[0][0] == ("ok" if given in ("null", "{}", '{"where": "there"}') else "invalid")


def test_the_strict_parser_reads_what_these_tests_send() -> None:
    """The strict parser of the tests accepts the valid answers of this module."""
    for wire in WIRES:
        for stream in (False, True):
            assert [strict_json(json.dumps(each)) for each in said(wire, stream)] == said(wire, stream)
