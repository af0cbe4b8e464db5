"""Providers' answers as bytes, and models that receive them without a network.

    await answered("chat", [body, …], stream=True)    run a prompt against these response bodies
    EVENTS["chat"], WHOLE["chat"]                     strategies: the events of a stream, and complete answers

The strategies draw what the providers' documentation describes, with any text as names, ids and arguments, any JSON
in place of some values, and the events in any order.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import strategies as st

from handrail import (
    Adapter,
    AnthropicModel,
    GeminiModel,
    OpenAIModel,
    Prompt,
    PromptEvaluationError,
    PromptResponse,
    Session,
    tool,
)
from handrail.errors import ModelError
from handrail.messages import ModelRequest, Sent
from handrail.run.adapter import Retry
from handrail.run.conversation import check_well_formed, root_conversation
from support.strict_wires import check_everywhere, note

WIRES = ("chat", "responses", "messages", "gemini")
_PATHS = {
    "chat": "/chat/completions",
    "responses": "/responses",
    "messages": "/v1/messages",
    "gemini": ":generateContent",
}
ONCE = Retry(attempts=1)


@tool(effect="pure")
async def look(where: str = "here") -> str:
    """Look somewhere."""
    return where


PROMPT = Prompt("streams", "Answer.", tools=[look])


class _Content:
    """The body of a response, in chunks."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = list(chunks)

    async def iter_any(self) -> AsyncIterator[bytes]:
        while self._chunks:
            yield self._chunks.pop(0)

    async def read(self) -> bytes:
        rest = b"".join(self._chunks)
        self._chunks.clear()
        return rest


class _Response:
    """The parts of an aiohttp response that `handrail.models.http` uses."""

    status = 200

    def __init__(self, chunks: Sequence[bytes], stream: bool) -> None:
        self.headers = {"content-type": "text/event-stream" if stream else "application/json"}
        self.content = _Content(chunks)

    async def read(self) -> bytes:
        return await self.content.read()


def model_for(wire: Any, bodies: Sequence[Sequence[bytes]], stream: bool) -> Any:
    """Return a model that receives these bodies in order, one for each request, in chunks. The last one is repeated."""
    model: Any = (
        AnthropicModel("m", key_variable=None, base_url="http://test")
        if wire == "messages"
        else GeminiModel("m", key_variable=None, base_url="http://test")
        if wire == "gemini"
        else OpenAIModel("m", api=wire, key_variable=None, base_url="http://test")
    )
    left = list(bodies)

    @asynccontextmanager
    async def post(path: str, body: bytes) -> AsyncGenerator[_Response]:
        note(_PATHS[wire], body)
        yield _Response(left.pop(0) if len(left) > 1 else left[0], stream)

    model._endpoint._post = post
    return model


async def answered(
    wire: str, bodies: Sequence[Sequence[bytes]], stream: bool
) -> PromptResponse[Any] | ModelError:
    """Run a prompt against these bodies, then send a second message. Returns the response to the first message, or its `ModelError`.

    Any other error is raised. Asserts that every wire would accept the conversation.
    """
    done = _body([DONE[wire][stream]], stream)
    adapter, session = Adapter(model_for(wire, [*bodies, done], stream), retry=ONCE), Session()
    outcome: PromptResponse[Any] | ModelError | None = None
    for message in ("go", "go on"):
        try:
            if stream:
                response = await adapter.stream(PROMPT, message, session=session).response
            else:
                response = await adapter.evaluate(PROMPT, message, session=session)
            outcome = outcome or response
        except PromptEvaluationError as error:
            if not isinstance(error.__cause__, ModelError):
                raise
            outcome = outcome or error.__cause__
    messages = list(root_conversation(session).messages)
    check_well_formed(messages)
    found = check_everywhere(ModelRequest("", Sent(messages), Sent()))
    assert found == [], found
    assert outcome is not None
    return outcome


def _body(events: Sequence[Any], stream: bool) -> list[bytes]:
    if not stream:
        return [json.dumps(events[0]).encode()]
    flat = [each for event in events for each in (event if isinstance(event, list) else [event])]
    return [b"data: " + json.dumps(each).encode() + b"\n\n" for each in flat]


def body_of(events: Sequence[Any], stream: bool) -> bytes:
    """Return the bytes of a response: one JSON value, or events."""
    return b"".join(_body(events, stream))


# --- what a provider can send ------------------------------------------------------------------

DONE: dict[str, dict[bool, Any]] = {
    "chat": {
        False: {"choices": [{"message": {"content": "done"}, "finish_reason": "stop"}]},
        True: [{"choices": [{"delta": {"content": "done"}, "finish_reason": "stop"}]}],
    },
    "responses": {
        False: {"status": "completed", "output": []},
        True: [{"type": "response.completed", "response": {"status": "completed", "output": []}}],
    },
    "messages": {
        False: {"content": [], "stop_reason": "end_turn"},
        True: [{"type": "message_stop"}],
    },
    "gemini": {
        False: {"candidates": [{"content": {"parts": [{"text": "done"}]}, "finishReason": "STOP"}]},
        True: [{"candidates": [{"content": {"parts": [{"text": "done"}]}, "finishReason": "STOP"}]}],
    },
}

_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def _mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy that mostly draws from `usual`, and sometimes draws any JSON value."""
    return st.integers(0, 19).flatmap(lambda chance: _ANY if chance == 19 else usual)


_TEXT = _mostly(st.sampled_from(["", " ", "One", "\n", "\ud83d", "\ude00"]) | st.text(max_size=6))
_ID = _mostly(st.sampled_from(["", "a", "functions.add:0", "i" * 70, "\ud800"]) | st.text(max_size=8))
_NAME = _mostly(
    st.sampled_from(["look", "look", "multi_tool_use.parallel", "", "n" * 70]) | st.text(max_size=8)
)
_ARGUMENTS = _mostly(
    st.sampled_from(["", "{}", '{"where":', '"there"}', "[", "[" * 1200, "]", "null", '{"where": "\\ud800"}'])
    | st.text(max_size=8)
)
_INPUT = _mostly(st.just({}) | st.fixed_dictionaries({"where": _TEXT}) | st.just([]))
_TOKENS = _mostly(st.integers(-1, 9) | st.sampled_from([10**30, 1e300, 2.5]))
_INDEX = _mostly(st.integers(0, 3))


def _fields(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for objects in which any field may be missing."""
    return st.fixed_dictionaries({}, optional=fields) | st.fixed_dictionaries(fields)


_CHAT_USAGE = _fields(
    prompt_tokens=_TOKENS, completion_tokens=_TOKENS, prompt_tokens_details=_fields(cached_tokens=_TOKENS)
)
_CHAT_CALL = _fields(index=_INDEX, id=_ID, function=_fields(name=_NAME, arguments=_ARGUMENTS))
_CHAT_SAID = _fields(
    content=_TEXT,
    refusal=_mostly(st.none()),
    reasoning_content=_TEXT,
    tool_calls=st.lists(_CHAT_CALL, max_size=3),
)
_FINISH = _mostly(st.sampled_from(["stop", "tool_calls", "length", "content_filter"]))

_CONTENT = _fields(type=_mostly(st.sampled_from(["output_text", "refusal"])), text=_TEXT, refusal=_TEXT)
_ITEM = (
    st.fixed_dictionaries({"type": st.just("message"), "content": _mostly(st.lists(_CONTENT, max_size=2))})
    | st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": _ID, "name": _NAME, "arguments": _ARGUMENTS},
        optional={"id": _ID, "status": _TEXT},
    )
    | st.fixed_dictionaries(
        {
            "type": st.just("reasoning"),
            "encrypted_content": _mostly(st.just("e")),
            "summary": _mostly(st.just([])),
        },
        optional={"id": st.just("rs_1"), "status": st.just("completed")},
    )
    | _ANY
)
_RESPONSE = _fields(
    status=_mostly(st.sampled_from(["completed", "incomplete"])),
    output=_mostly(st.lists(_ITEM, max_size=4)),
    usage=_mostly(_fields(input_tokens=_TOKENS, output_tokens=_TOKENS)),
    incomplete_details=_mostly(_fields(reason=st.sampled_from(["max_output_tokens", "content_filter"]))),
)

_BLOCK = (
    st.fixed_dictionaries({"type": st.just("text"), "text": _TEXT})
    | st.fixed_dictionaries({"type": st.just("tool_use"), "id": _ID, "name": _NAME, "input": _INPUT})
    | st.fixed_dictionaries(
        {"type": st.just("thinking"), "thinking": _TEXT}, optional={"signature": _mostly(st.just("s"))}
    )
    | st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": _mostly(st.just("z"))})
    | _ANY
)
_MESSAGE_USAGE = _fields(input_tokens=_TOKENS, output_tokens=_TOKENS, cache_read_input_tokens=_TOKENS)
_STOP = _mostly(st.sampled_from(["end_turn", "tool_use", "max_tokens", "refusal"]))
_DELTA = (
    st.fixed_dictionaries({"type": st.just("text_delta"), "text": _TEXT})
    | st.fixed_dictionaries({"type": st.just("input_json_delta"), "partial_json": _ARGUMENTS})
    | st.fixed_dictionaries({"type": st.just("thinking_delta"), "thinking": _TEXT})
    | st.fixed_dictionaries({"type": st.just("signature_delta"), "signature": _mostly(st.just("s"))})
    | _ANY
)


_GEMINI_PART = (
    st.fixed_dictionaries(
        {"text": _TEXT},
        optional={"thought": _mostly(st.booleans()), "thoughtSignature": _mostly(st.just("s"))},
    )
    | st.fixed_dictionaries(
        {"functionCall": _fields(id=_ID, name=_NAME, args=_INPUT)},
        optional={"thoughtSignature": _mostly(st.just("s"))},
    )
    | st.fixed_dictionaries({"executableCode": _mostly(st.just({"code": "1"}))})
    | _ANY
)
_GEMINI_USAGE = _fields(promptTokenCount=_TOKENS, candidatesTokenCount=_TOKENS, thoughtsTokenCount=_TOKENS)
_GEMINI_FINISH = _mostly(
    st.sampled_from(["STOP", "STOP", "MAX_TOKENS", "SAFETY", "MALFORMED_FUNCTION_CALL", "NOVEL"])
)
_CANDIDATE = _fields(content=_mostly(_fields(parts=_mostly(st.lists(_GEMINI_PART, max_size=4)))))


def _event(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


WHOLE: dict[str, st.SearchStrategy[Any]] = {
    "chat": _fields(
        choices=_mostly(
            st.lists(
                st.fixed_dictionaries({"message": _CHAT_SAID, "finish_reason": _FINISH}),
                min_size=1,
                max_size=1,
            )
        ),
        usage=_mostly(_CHAT_USAGE),
    ),
    "responses": _RESPONSE,
    "messages": _fields(
        content=_mostly(st.lists(_BLOCK, max_size=4)), stop_reason=_STOP, usage=_mostly(_MESSAGE_USAGE)
    ),
    "gemini": _fields(
        candidates=_mostly(
            st.lists(
                st.tuples(_CANDIDATE, _GEMINI_FINISH).map(lambda two: {**two[0], "finishReason": two[1]}),
                min_size=1,
                max_size=1,
            )
        ),
        usageMetadata=_mostly(_GEMINI_USAGE),
        promptFeedback=_mostly(_fields(blockReason=_mostly(st.just("SAFETY")))),
    ),
}
"""Strategies for complete answers, by wire."""

_CHAT_CHUNK = st.fixed_dictionaries(
    {"choices": st.lists(_fields(delta=_CHAT_SAID, finish_reason=_mostly(st.none())), max_size=2)}
)
_CHAT_END = st.fixed_dictionaries(
    {"choices": st.just([{"delta": {}, "finish_reason": "tool_calls"}]), "usage": _mostly(_CHAT_USAGE)}
) | _FINISH.map(lambda why: {"choices": [{"delta": {}, "finish_reason": why}]})
_OUTPUT_EVENT = st.one_of(
    _event("response.output_text.delta", delta=_TEXT),
    _event("response.reasoning_summary_text.delta", delta=_TEXT),
    _event("response.output_item.added", output_index=_INDEX, item=_ITEM),
    _event("response.function_call_arguments.delta", output_index=_INDEX, delta=_ARGUMENTS),
    _event("response.output_item.done", output_index=_INDEX, item=_ITEM),
    _ANY,
)
_BLOCK_EVENT = st.one_of(
    _event("message_start", message=_fields(usage=_mostly(_MESSAGE_USAGE))),
    _event("content_block_start", index=_INDEX, content_block=_BLOCK),
    _event("content_block_start", index=st.integers(0, 2), content_block=_BLOCK),
    _event("content_block_delta", index=_INDEX, delta=_DELTA),
    _event("content_block_stop", index=_INDEX),
    _event("message_delta", delta=_fields(stop_reason=_STOP), usage=_mostly(_MESSAGE_USAGE)),
    _ANY,
)


def _ending(
    events: st.SearchStrategy[Any], end: st.SearchStrategy[Any], most: int = 7
) -> st.SearchStrategy[list[Any]]:
    """Return a strategy for streams, most of which end as they should."""
    whole = st.tuples(st.lists(events, max_size=most), end).map(lambda each: [*each[0], each[1]])
    return whole | whole | whole | st.lists(events | end, max_size=most)


EVENTS: dict[str, st.SearchStrategy[list[Any]]] = {
    "chat": _ending(_CHAT_CHUNK, _CHAT_END),
    "responses": _ending(
        _OUTPUT_EVENT,
        st.one_of(
            _event("response.completed", response=_RESPONSE),
            _event("response.incomplete", response=_RESPONSE),
        ),
    ),
    "messages": _ending(_BLOCK_EVENT, st.just({"type": "message_stop"})),
    "gemini": _ending(
        st.fixed_dictionaries({"candidates": _mostly(st.lists(_CANDIDATE, max_size=1))}) | _ANY,
        _GEMINI_FINISH.map(lambda why: {"candidates": [{"finishReason": why}]}),
    ),
}
"""Strategies for the events of a stream, by wire."""
