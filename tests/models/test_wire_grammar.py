"""Tests that the wire grammar accepts valid requests, and refuses requests that break one of its rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from support.strict_wires import note, take_refused
from support.wire_grammar import WireRefused, check, problems, wire_of

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
GOOD: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": ""},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": id, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                    for id in ("functions.add:0", "b")
                ],
            },
            {"role": "tool", "tool_call_id": "b", "content": ""},
            {"role": "tool", "tool_call_id": "functions.add:0", "content": "x"},
            {"role": "assistant", "content": ""},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": SCHEMA}}],
    },
    "responses": {
        "model": "m",
        "input": [
            {"type": "message", "role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "e"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": ""},
            {"type": "function_call_output", "call_id": "b", "output": "x"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "annotations": []}],
            },
            {
                "type": "tool_search_call",
                "call_id": "s",
                "execution": "client",
                "status": "completed",
                "arguments": {"query": "g"},
            },
            {
                "type": "tool_search_output",
                "call_id": "s",
                "execution": "client",
                "status": "completed",
                "tools": [
                    {
                        "type": "function",
                        "name": "g",
                        "description": "G.",
                        "parameters": SCHEMA,
                        "defer_loading": True,
                    }
                ],
            },
            {"type": "function_call", "call_id": "g", "name": "g", "namespace": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "g", "output": ""},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
            {"type": "web_search", "filters": {"allowed_domains": ["a.com"]}},
            {"type": "file_search", "vector_store_ids": ["vs"]},
            {"type": "tool_search", "execution": "client", "description": "Find.", "parameters": SCHEMA},
        ],
    },
    "messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}},
                    {"type": "tool_use", "id": "b", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a"},
                    {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
                    {"type": "text", "text": "more"},
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "and"}]},
        ],
        "tools": [{"name": "f", "description": "F.", "input_schema": SCHEMA}],
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"functionCall": {"id": "a", "name": "f", "args": {"a": 1}}, "thoughtSignature": "s"},
                    {"functionCall": {"id": "b", "name": "f", "args": {}}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "a", "name": "f", "response": {"output": ""}}},
                    {"functionResponse": {"id": "b", "name": "f", "response": {"error": "no"}}},
                    {"text": "more"},
                ],
            },
            {"role": "model", "parts": [{"text": "x"}, {"text": "", "thoughtSignature": "s"}]},
            {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "AA=="}}]},
        ],
        "tools": [
            {"functionDeclarations": [{"name": "f", "description": "F.", "parametersJsonSchema": SCHEMA}]},
            {"googleSearch": {}},
        ],
        "toolConfig": {"includeServerSideToolInvocations": True},
    },
}


def put(*path: Any) -> Callable[[Any], None]:
    """Return a function that sets a value in a request. The arguments are the path, and then the value."""
    *way, last, value = path

    def change(request: Any) -> None:
        for each in way:
            request = request[each]
        request[last] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    """Return a function that deletes the item at a path in a request."""
    *way, last = path

    def change(request: Any) -> None:
        for each in way:
            request = request[each]
        del request[last]

    return change


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def hosted(tool: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that adds one of the provider's own tools to a request."""
    return lambda request: request["tools"].insert(0, tool)


CALL = ("messages", 2, "tool_calls", 0)
USE = ("messages", 1, "content", 1)
FUNCTION = ("contents", 1, "parts", 1, "functionCall")


def deferred(request: Any) -> None:
    request["tools"][0]["defer_loading"] = True
    del request["tools"][3], request["input"][7:]


OUTPUT = {"type": "function_call_output", "output": ""}
DECLARED = ("tools", 0, "functionDeclarations", 0)
BAD: list[tuple[str, str, Callable[[Any], object]]] = [
    ("chat", "does not match", put(*CALL, "function", "name", "multi_tool_use.parallel")),
    ("chat", "does not match", put(*CALL, "function", "name", "")),
    ("chat", "does not match", put(*CALL, "id", "i" * 41)),
    ("chat", "does not match", put(*CALL, "id", "")),
    ("chat", "occurs twice", put(*CALL, "id", "b")),
    ("chat", "not the text of an object", put(*CALL, "function", "arguments", "[]")),
    ("chat", "invalid JSON", put(*CALL, "function", "arguments", "{")),
    ("chat", "too deep", put(*CALL, "function", "arguments", "[" * 100_000)),
    ("chat", "more than 64 levels", put(*CALL, "function", "arguments", json.dumps(deep(70)))),
    ("chat", "out of range", put(*CALL, "function", "arguments", '{"a": 1e999}')),
    ("chat", "out of range", put(*CALL, "function", "arguments", f'{{"a": {"1" * 400}}}')),
    ("chat", "lone surrogate", put(*CALL, "function", "arguments", '{"a": "\\ud800"}')),
    ("chat", "the key 'b' is repeated", put(*CALL, "function", "arguments", '{"a": {"b": 1, "b": 2}}')),
    ("chat", "is not a text", put(*CALL, "function", "arguments", {})),
    ("chat", "type is missing", drop(*CALL, "type")),
    ("chat", "1 to 128 calls", put("messages", 2, "tool_calls", [])),
    ("chat", "neither content nor tool_calls", put("messages", 5, "content", None)),
    ("chat", "before the results of", drop("messages", 3)),
    ("chat", "has no call before it", drop("messages", 2)),
    ("chat", "role is 'robot'", put("messages", 1, "role", "robot")),
    ("chat", "novelty is unknown", put("messages", 1, "novelty", 1)),
    ("chat", "tool_choice without tools", lambda r: (r.pop("tools"), r.update(tool_choice="required"))),
    ("chat", "two tools have one name", lambda r: r["tools"].append(r["tools"][0])),
    ("chat", "there are 129 tools", lambda r: r.update(tools=r["tools"] * 129)),
    ("chat", "no schema of an object", put("tools", 0, "function", "parameters", {})),
    ("chat", "at least one message", put("messages", [])),
    ("responses", "does not match", put("input", 2, "call_id", "i" * 65)),
    ("responses", "does not match", put("input", 2, "name", "a.b")),
    ("responses", "not the text of an object", put("input", 2, "arguments", "null")),
    ("responses", "the key 'a' is repeated", put("input", 2, "arguments", '{"a": 1, "a": 2}')),
    ("responses", "without the item that follows", lambda r: r["input"].append(r["input"][1])),
    ("responses", "before the results of", drop("input", 4)),
    ("responses", "has no call before it", drop("input", 2)),
    ("responses", "type is 'novelty'", put("input", 6, "type", "novelty")),
    (
        "responses",
        "has a part 'input_text'",
        put("input", 6, "content", [{"type": "input_text", "text": "x"}]),
    ),
    ("responses", "at least one part", put("input", 6, "content", [])),
    ("messages", "does not match", put(*USE, "id", "functions.add:0")),
    ("messages", "does not match", put(*USE, "name", "a.b")),
    ("messages", "input is not an object", put(*USE, "input", [])),
    ("messages", "more than 64 levels", put(*USE, "input", deep(70))),
    (
        "messages",
        "last block is thinking",
        put("messages", 1, "content", [GOOD["messages"]["messages"][1]["content"][0]]),
    ),
    ("messages", "is not signed", put("messages", 1, "content", 0, "signature", "")),
    ("messages", "must be non-empty", put("messages", 3, "content", 0, "text", " ")),
    ("messages", "must be non-empty", put("system", 0, "text", "")),
    ("messages", "content is empty", put("messages", 3, "content", [])),
    ("messages", "cannot be empty if is_error", drop("messages", 2, "content", 1, "content")),
    ("messages", "is blank", put("messages", 2, "content", 0, "content", "\n")),
    ("messages", "comes before the results of", drop("messages", 2, "content", 0)),
    ("messages", "comes after something else", lambda r: r["messages"][2]["content"].reverse()),
    ("messages", "the first message is not the user's", drop("messages", 0)),
    ("messages", "max_tokens is missing", drop("max_tokens")),
    ("messages", "type is 'novelty'", put(*USE, "type", "novelty")),
    ("gemini", "does not match", put(*FUNCTION, "name", "a.b")),
    ("gemini", "does not begin with a letter", put(*FUNCTION, "name", "3d")),
    ("gemini", "does not match", put(*FUNCTION, "id", "")),
    ("gemini", "two calls have one id", put(*FUNCTION, "id", "b")),
    ("gemini", "args is not an object", put(*FUNCTION, "args", [])),
    ("gemini", "more than 64 levels", put(*FUNCTION, "args", deep(70))),
    ("gemini", "missing a thought_signature", drop("contents", 1, "parts", 1, "thoughtSignature")),
    ("gemini", "are not those of the calls", drop("contents", 2, "parts", 1)),
    ("gemini", "are not those of the calls", put("contents", 2, "parts", 1, "functionResponse", "name", "g")),
    ("gemini", "comes before the responses of", lambda r: r["contents"].__delitem__(slice(2, None))),
    ("gemini", "comes after something else", lambda r: r["contents"][2]["parts"].reverse()),
    ("gemini", "role is 'user' after 'user'", drop("contents", 3)),
    ("gemini", "role is 'model' after 'model'", drop("contents", 0)),
    ("gemini", "role is 'tool'", put("contents", 2, "role", "tool")),
    ("gemini", "a user has no calls", put("contents", 1, "role", "user")),
    ("gemini", "a model has no responses", put("contents", 2, "role", "model")),
    ("gemini", "must not be empty", put("contents", 0, "parts", 0, "text", " ")),
    ("gemini", "must not be empty", put("systemInstruction", "parts", 0, "text", "")),
    ("gemini", "parts is empty", put("contents", 0, "parts", [])),
    ("gemini", "has a part with", put("contents", 0, "parts", 0, "inlineData", {})),
    ("gemini", "has a part with", put("contents", 0, "parts", 0, {})),
    ("gemini", "has the wrong type", put("contents", 1, "parts", 0, "thought", "yes")),
    ("gemini", "data is missing", drop("contents", 4, "parts", 0, "inlineData", "data")),
    ("gemini", "at least one content", put("contents", [])),
    ("gemini", "novelty is unknown", put("novelty", 1)),
    ("gemini", "toolConfig without tools", drop("tools")),
    ("gemini", "two tools have one name", lambda r: r["tools"].append(r["tools"][0])),
    ("gemini", "no schema of an object", put(*DECLARED, "parametersJsonSchema", {})),
    ("gemini", "more than $ref", put(*DECLARED, "parametersJsonSchema", "x", {"$ref": "#", "default": 1})),
    ("gemini", "no function declarations", put("tools", [])),
    ("gemini", "need includeServerSideToolInvocations", drop("toolConfig")),
    ("gemini", "a tool has the fields ['bing']", put("tools", 1, {"bing": {}})),
    ("gemini", "fileSearchStoreNames is missing", put("tools", 1, {"fileSearch": {}})),
    ("responses", "max_uses is unknown", put("tools", 1, "max_uses", 3)),
    ("responses", "vector_store_ids is missing", drop("tools", 2, "vector_store_ids")),
    ("responses", "two of the provider's tools", lambda r: r["tools"].append(r["tools"][1])),
    ("responses", "tool_search.description is not a text", drop("tools", 3, "description")),
    ("responses", "tool_search has no schema", drop("tools", 3, "parameters")),
    ("responses", "a search without tool_search", drop("tools", 3)),
    ("responses", "deferred tools require tool_search", deferred),
    ("responses", "arguments is not an object", put("input", 7, "arguments", "{}")),
    ("responses", "comes before the results of ['s']", drop("input", 8)),
    ("responses", "is the output of no search", put("input", 8, "call_id", "a")),
    ("responses", "is no output of a search", put("input", 8, {**OUTPUT, "call_id": "s"})),
    ("responses", "tools is not a list", put("input", 8, "tools", None)),
    ("responses", "no deferred function", drop("input", 8, "tools", 0, "defer_loading")),
    ("responses", "tools has no schema of an object", put("input", 8, "tools", 0, "parameters", {})),
    ("responses", "missing namespace for function_call 'g'", drop("input", 9, "namespace")),
    (
        "messages",
        "the reference to 'g' has no corresponding tool definition",
        put("messages", 2, "content", 0, "content", [{"type": "tool_reference", "tool_name": "g"}]),
    ),
    ("messages", "is named 'search'", hosted({"type": "web_search_20250305", "name": "search"})),
    ("messages", "name is missing", hosted({"type": "code_execution_20250825"})),
    (
        "messages",
        "max_uses is 0",
        hosted({"type": "web_fetch_20250910", "name": "web_fetch", "max_uses": 0}),
    ),
    (
        "messages",
        "has both allowed_domains",
        hosted(
            {
                "type": "web_search_20250305",
                "name": "web_search",
                "allowed_domains": [],
                "blocked_domains": [],
            }
        ),
    ),
]


@pytest.mark.parametrize("wire", GOOD)
def test_a_good_request_is_accepted(wire: str) -> None:
    """A valid request with messages, calls, results and tools is accepted."""
    assert problems(wire, json.dumps(GOOD[wire]).encode()) == []


@pytest.mark.parametrize(("wire", "words", "change"), BAD, ids=[f"{wire}: {words}" for wire, words, _ in BAD])
def test_each_rule_refuses_something(wire: str, words: str, change: Callable[[Any], object]) -> None:
    """A request with one mistake is refused, and a problem names the rule that it breaks."""
    request = copy.deepcopy(GOOD[wire])
    change(request)
    assert any(words in problem for problem in problems(wire, json.dumps(request).encode()))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff", "invalid JSON"),
        (b"[]", "the body is not an object"),
        (b'{"model": "m", "model": "m"}', "the key 'model' is repeated"),
        (b'{"messages": [{"role": "user", "role": "user"}]}', "the key 'role' is repeated"),
        (b'{"a": NaN}', "NaN is not JSON"),
    ],
)
def test_a_body_is_one_object_of_json(body: bytes, words: str) -> None:
    """A body that is not a strict JSON object is refused."""
    assert words in problems("chat", body)[0]


def test_a_refused_request_fails_the_test_that_sent_it() -> None:
    """`check` raises for a refused request, `note` keeps its problems, and requests to other paths are not checked."""
    with pytest.raises(WireRefused, match="messages is not a list"):
        check("/v1/chat/completions", b'{"model": "m"}')
    note("/anthropic/v1/messages?beta=true", b"{}")
    assert len(take_refused()) == 1
    assert wire_of("/v1/embeddings") is None
    check("/v1/embeddings", b"{}")
