"""Tests for the blocks of an answer, which are sent back to its provider, and for streams that pause, end early or report errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import Adapter, PromptResponse, Session, SqliteJournal
from handrail.messages import AssistantMessage
from handrail.models import (
    ModelAnswerBroken,
    ModelRateLimited,
    ModelRequestRefused,
    ModelRequestTooLong,
    ModelUnavailable,
)
from handrail.run.conversation import root_conversation
from handrail.runs.copies import fork
from models.provider_blocks import BLOCKS, asked_back, sent_back, streamed, whole
from support.provider_streams import DONE, ONCE, PROMPT, answered, body_of, model_for


def requests_of(wire: str, bodies: Sequence[Sequence[bytes]], stream: bool) -> tuple[Any, list[bytes]]:
    """Return a model that gets these response bodies and then a final answer, and the list of the request bodies that it sends."""
    model = model_for(wire, [*bodies, [body_of([DONE[wire][stream]], stream)]], stream)
    sent: list[bytes] = []
    post = model._endpoint._post

    @asynccontextmanager
    async def noted(path: str, body: bytes) -> AsyncGenerator[Any]:
        sent.append(body)
        async with post(path, body) as response:
            yield response

    model._endpoint._post = noted
    return model, sent


async def evaluate(adapter: Adapter, stream: bool, **options: Any) -> None:
    if stream:
        await adapter.stream(PROMPT, "go", **options).response
    else:
        await adapter.evaluate(PROMPT, "go", **options)


@st.composite
def answers(draw: st.DrawFn, wire: str) -> tuple[list[dict[str, Any]], list[bytes], bool]:
    """Draw the blocks of an answer, its bytes in chunks, and whether it is streamed."""
    blocks, stream = draw(BLOCKS[wire]), draw(st.booleans())
    body = streamed(wire, blocks, draw) if stream else whole(wire, blocks)
    cut = draw(st.integers(0, len(body)))
    return blocks, [body[:cut], body[cut:]], stream


@pytest.mark.parametrize("wire", BLOCKS)
@given(data=st.data())
def test_every_block_is_sent_back(wire: str, data: st.DataObject) -> None:
    """The next request has every block of the answer, in order, however the answer arrived.

    Each block has the same bytes, with two exceptions: the fields of calls and of chat messages may be in another order, and
    on the responses wire, an answer of only plain text and calls is sent without `id` and `status`.
    """
    blocks, chunks, stream = data.draw(answers(wire))
    model, sent = requests_of(wire, [chunks], stream)
    asyncio.run(evaluate(Adapter(model, retry=ONCE), stream))
    assert sent_back(wire, sent[1]) == asked_back(wire, blocks)


@pytest.mark.parametrize("wire", BLOCKS)
@settings(max_examples=5)
@given(data=st.data())
async def test_every_block_is_sent_back_after_a_fork(
    wire: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run that is forked and then resumed, as by another process, sends back every block of the recorded answer."""
    blocks, chunks, stream = data.draw(answers(wire))
    path = tmp_path_factory.mktemp("blocks") / "runs.db"

    model, _ = requests_of(wire, [chunks], stream)
    await evaluate(Adapter(model, retry=ONCE, journal=SqliteJournal(path)), stream, run_id="run")
    journal = SqliteJournal(path)  # the journal treats this as a different process
    await fork(journal, "run", 1, "forked")
    model, sent = requests_of(wire, [], stream=False)
    await Adapter(model, retry=ONCE, journal=journal).resume("forked", PROMPT)
    [request] = sent
    assert sent_back(wire, request) == asked_back(wire, blocks)


# --- streams of providers' own tools ---

SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [{"type": "web_search_result", "url": "https://a.example", "encrypted_content": "Eq=="}],
}


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[Any]:
    """Return the events of one block of a stream."""
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def stopped(reason: str) -> list[Any]:
    return [{"type": "message_delta", "delta": {"stop_reason": reason}}, {"type": "message_stop"}]


def searched(*more: Any) -> bytes:
    """Return a stream in which the provider searches the web, followed by `more`."""
    asked = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", '{"que', 'ry":"x"}')]
    return body_of([block(0, SEARCH, *asked), block(1, FOUND), *more], stream=True)


async def test_a_stream_with_a_providers_own_tools() -> None:
    """The provider's own calls are not taken for calls of the run, and the text after them is the answer."""
    text = block(2, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Found."})
    outcome = await answered("messages", [[searched(text, stopped("end_turn"))]], stream=True)
    assert isinstance(outcome, PromptResponse)
    assert (outcome.text, outcome.stop_reason) == ("Found.", "done")


async def test_a_paused_answer_is_continued() -> None:
    """An answer that the provider paused is sent back as it is, and the next answer continues it."""
    begun = block(2, {"type": "text", "text": ""}, {"type": "text_delta", "text": "First, "})
    rest = body_of([block(0, {"type": "text", "text": "then."}), stopped("end_turn")], stream=True)
    bodies = [[searched(begun, stopped("pause_turn"))], [rest]]
    model, sent = requests_of("messages", bodies, stream=True)
    response = await Adapter(model, retry=ONCE).stream(PROMPT, "go").response
    assert response.text == "First, then."
    last = json.loads(sent[1])["messages"][-1]
    assert last["role"] == "assistant"
    assert last["content"] == [
        {**SEARCH, "input": {"query": "x"}},
        FOUND,
        {"type": "text", "text": "First, "},
    ]


async def test_a_pause_without_end_is_given_up() -> None:
    """If a provider pauses every answer, the run ends after 17 requests with the stop reason `length`."""
    model, sent = requests_of("messages", [[searched(stopped("pause_turn"))]] * 40, stream=True)
    response = await Adapter(model, retry=ONCE).stream(PROMPT, "go").response
    assert response.stop_reason == "length"
    assert len(sent) == 17


async def test_a_call_of_the_provider_that_was_cut_off_is_not_sent_back() -> None:
    """A call to a provider's own tool that was cut off is not sent back. It has no result, so the API would refuse it."""
    text = block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "So"})
    cut = body_of([text, block(1, SEARCH), stopped("max_tokens")], stream=True)
    outcome = await answered(
        "messages", [[cut]], stream=True
    )  # asserts that the API accepts the conversation
    assert isinstance(outcome, PromptResponse)
    assert outcome.stop_reason == "length"


# --- ends of streams ---


def chat_stream(*deltas: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    return body_of([{"choices": [{"delta": delta}]} for delta in deltas], stream=True) + end


async def test_a_stream_of_chat_that_ends_without_a_reason() -> None:
    """A stream with text or calls that ends with [DONE] is complete even if it gave no stop reason.

    The reason is inferred from what arrived.
    """
    outcome = await answered("chat", [[chat_stream({"content": "Yes."})]], stream=True)
    assert isinstance(outcome, PromptResponse)
    assert (outcome.text, outcome.stop_reason) == ("Yes.", "done")
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    outcome = await answered("chat", [[chat_stream({"tool_calls": [call]})]], stream=True)
    assert isinstance(outcome, PromptResponse)
    assert outcome.text == "done"  # the model was asked again with the result


@pytest.mark.parametrize("body", [chat_stream(), chat_stream({"content": "Ye"}, end=b"")])
async def test_a_stream_of_chat_that_was_cut_off(body: bytes) -> None:
    """A stream without [DONE] and without a stop reason counts as cut off, and so does one in which nothing arrived."""
    assert isinstance(await answered("chat", [[body]], stream=True), ModelAnswerBroken)


ERRORS: list[tuple[Any, type[Exception]]] = [
    ({"message": "slow down", "type": "tokens", "code": "rate_limit_exceeded"}, ModelRateLimited),
    ({"message": "Rate limit exceeded", "code": 429}, ModelRateLimited),
    (
        {"message": "Provider returned error", "code": 502, "metadata": {"provider_name": "x"}},
        ModelUnavailable,
    ),
    ({"message": "over capacity", "type": "server_error", "status_code": 503}, ModelUnavailable),
    ({"message": "failed", "type": "invalid_request_error", "code": "tool_use_failed"}, ModelAnswerBroken),
    (
        {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"},
        ModelRequestTooLong,
    ),
    ({"message": "no credits", "code": 402}, ModelRequestRefused),
    ({"message": "flagged", "code": "403"}, ModelRequestRefused),
    ({"message": "quota", "type": "insufficient_quota", "code": 429}, ModelRequestRefused),
    ({"message": "who knows"}, ModelUnavailable),
    ("overloaded", ModelUnavailable),
]


@pytest.mark.parametrize(("error", "kind"), ERRORS)
async def test_an_error_in_the_middle_of_an_answer(error: Any, kind: type[Exception]) -> None:
    """An error object in a stream, or in a complete answer of the chat API, raises the matching model error."""
    body = chat_stream({"content": "Ye"}, end=b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    assert type(await answered("chat", [[body]], stream=True)) is kind
    failed = {"type": "error", "error": error}
    for wire in ("messages", "responses"):
        body = body_of([failed], stream=True)
        assert type(await answered(wire, [[body]], stream=True)) is kind
    whole = json.dumps({"error": error, "choices": []}).encode()
    assert type(await answered("chat", [[whole]], stream=False)) is kind


# --- content that is not text ---


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_in_the_content_of_chat(stream: bool) -> None:
    """Thinking that arrives as parts of the content, as Mistral sends it, becomes the answer's thought and is sent back as parts."""
    think = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm, so."}], "closed": True}
    call = {"id": "call_1", "function": {"name": "look", "arguments": "{}"}}
    text = {"type": "text", "text": "I look."}
    if stream:
        half = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm, "}], "closed": True}
        rest = {"type": "thinking", "thinking": [{"type": "text", "text": "so."}]}
        deltas = [{"content": [half]}, {"content": [rest]}, {"content": "I "}, {"content": "look."}]
        body = chat_stream(*deltas, {"tool_calls": [call]})
    else:
        said = {"content": [think, text], "tool_calls": [call]}
        body = json.dumps({"choices": [{"message": said, "finish_reason": "tool_calls"}]}).encode()
    model, sent = requests_of("chat", [[body]], stream)
    session = Session()
    await evaluate(Adapter(model, retry=ONCE), stream, session=session)
    assert json.loads(sent[1])["messages"][2]["content"] == [think, text]
    said = root_conversation(session).messages
    answer = next(each for each in said if isinstance(each, AssistantMessage))
    assert (answer.text, answer.thought) == ("I look.", "Hm, so.")


async def test_text_before_the_parts_of_chat_is_sent_back() -> None:
    """If the content begins as text and continues as a list of parts, the text is sent back as the first part."""
    think = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    call = {"id": "call_1", "function": {"name": "look", "arguments": "{}"}}
    deltas = [{"content": "I "}, {"content": "look"}, {"content": [think]}, {"content": "."}]
    model, sent = requests_of("chat", [[chat_stream(*deltas, {"tool_calls": [call]})]], stream=True)
    session = Session()
    await evaluate(Adapter(model, retry=ONCE), True, session=session)
    begun, end = ({"type": "text", "text": text} for text in ("I look", "."))
    assert json.loads(sent[1])["messages"][2]["content"] == [begun, think, end]
    said = root_conversation(session).messages
    assert next(each.text for each in said if isinstance(each, AssistantMessage)) == "I look."
