"""Strategies for answers whose blocks must be sent back, and functions that return the blocks of a request.

    BLOCKS["messages"]                     strategy: the blocks of an answer that requests calls
    whole("messages", blocks)              the answer as one JSON value
    streamed("messages", blocks, draw)     the same answer as events, its texts in drawn pieces
    sent_back("messages", body)            the blocks of the first answer in a request, each as its bytes

On the chat wire, the only block is the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_SAID = _TEXT.filter(str.strip)
_SEALED = st.text("abcXYZ019+/=", min_size=1, max_size=12)
_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)
_OBJECT = st.dictionaries(_TEXT, _JSON, max_size=2)
_KIND = st.sampled_from(["x_new", "x_audit"])


def compact(value: Any) -> bytes:
    """Return the JSON of a value as providers write it: without spaces, and with non-ASCII characters unescaped."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _fields(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(fields)


def _just(**fields: Any) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.just(value) for name, value in fields.items()}


_ORDER = [
    "type",
    "id",
    "role",
    "name",
    "thinking",
    "text",
    "signature",
    "citations",
    "call_id",
    "arguments",
    "status",
    "content",
    "x_text",
]


def _place(name: str) -> tuple[int, str]:
    """Return a sort key that puts fields in their usual order. Strategies draw the fields of an object in any order."""
    return _ORDER.index(name) if name in _ORDER else len(_ORDER), name


def _numbered(blocks: list[list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """Return the blocks of all groups in one list, with the fields of each in their usual order.

    The group's number is appended to the values of the fields that `name` lists, so that ids are unique.
    """
    made: list[dict[str, Any]] = []
    for number, group in enumerate(blocks):
        for block in group:
            block = {key: block[key] for key in sorted(block, key=_place)}
            made.append(
                {key: f"{value}{number}" if key in name.split() else value for key, value in block.items()}
            )
    return made


# --- messages ---

_CITATION = _fields(**_just(type="web_search_result_location"), url=_TEXT, encrypted_index=_SEALED)
_TOOL_USE = st.fixed_dictionaries(
    {**_just(type="tool_use", id="toolu_", name="look"), "input": _fields(where=_TEXT)},
    optional={"caller": _fields(**_just(type="direct")), "x_more": _JSON},
)


def _pair(kind: str, result: str, name: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    call = _fields(**_just(type=kind, id="srvtoolu_", name=name), input=_OBJECT)
    return st.tuples(call, _fields(**_just(type=result, tool_use_id="srvtoolu_"), content=_JSON)).map(list)


_MESSAGES = st.one_of(
    _fields(**_just(type="text"), text=_SAID).map(lambda block: [block]),
    _fields(**_just(type="text"), text=_SAID, citations=st.lists(_CITATION, min_size=1, max_size=2)).map(
        lambda block: [block]
    ),
    _fields(**_just(type="thinking"), thinking=_TEXT, signature=_SEALED).map(lambda block: [block]),
    _fields(**_just(type="redacted_thinking"), data=_SEALED).map(lambda block: [block]),
    _pair("server_tool_use", "web_search_tool_result", "web_search"),
    _pair("server_tool_use", "bash_code_execution_tool_result", "bash_code_execution"),
    _pair("mcp_tool_use", "mcp_tool_result", "remote"),
    _fields(type=_KIND, x_value=_JSON, x_text=_TEXT).map(lambda block: [block]),
    _TOOL_USE.map(lambda block: [block]),
)

# --- responses ---

_CALL = st.fixed_dictionaries(
    {
        **_just(id="fc_", type="function_call", status="completed"),
        "arguments": _fields(where=_TEXT).map(lambda given: compact(given).decode()),
        **_just(call_id="call_", name="look"),
    },
    optional={"x_more": _JSON},
)
_PART = _fields(
    **_just(type="output_text"),
    annotations=st.lists(_fields(**_just(type="url_citation"), url=_TEXT, start_index=st.integers(0, 9))),
    text=_TEXT,
).map(lambda part: {name: part[name] for name in ("type", "text", "annotations")})
_ITEM = st.one_of(
    _fields(
        **_just(id="rs_", type="reasoning"),
        summary=st.lists(_fields(**_just(type="summary_text"), text=_TEXT), max_size=2),
        encrypted_content=_SEALED,
    ),
    _fields(
        **_just(id="msg_", type="message", status="completed", role="assistant"),
        content=st.lists(_PART, min_size=1, max_size=2),
    ),
    _fields(**_just(id="ws_", type="web_search_call", status="completed"), action=_OBJECT),
    _fields(
        **_just(id="ci_", type="code_interpreter_call"), code=_TEXT, outputs=st.none() | st.lists(_OBJECT)
    ),
    _fields(**_just(id="x_"), type=_KIND, x_value=_JSON),
    _CALL,
)

# --- chat ---

_DETAILS = st.lists(
    _fields(**_just(type="reasoning.text"), text=_SAID, format=_TEXT, signature=_SEALED)
    | _fields(**_just(type="reasoning.encrypted"), data=_SEALED, format=_TEXT),
    min_size=1,
    max_size=3,
).map(lambda items: [{**item, "index": index} for index, item in enumerate(items)])
_CHAT_CALL = st.fixed_dictionaries(
    {
        **_just(id="call_", type="function"),
        "function": _fields(
            **_just(name="look"), arguments=_fields(where=_TEXT).map(lambda given: compact(given).decode())
        ),
    },
    optional={
        "extra_content": _fields(google=_fields(thought_signature=_SEALED)),
        "x_more": _JSON.filter(lambda value: value is not None),
    },
)
_MESSAGE = st.fixed_dictionaries(
    {
        **_just(role="assistant"),
        "content": st.none() | _SAID,
        "tool_calls": st.lists(_CHAT_CALL, min_size=1, max_size=3).map(
            lambda calls: _numbered([[call] for call in calls], "id")
        ),
    },
    optional={
        "reasoning_content": _TEXT,
        "reasoning": _SAID,
        "reasoning_details": _DETAILS,
        "x_new": _JSON.filter(lambda value: value is not None),
    },
)

BLOCKS: dict[str, st.SearchStrategy[list[dict[str, Any]]]] = {
    "messages": st.tuples(st.lists(_MESSAGES, max_size=5), _TOOL_USE).map(
        lambda drawn: _numbered([*drawn[0], [drawn[1]]], "id tool_use_id")
    ),
    "responses": st.tuples(st.lists(_ITEM, max_size=5), _CALL).map(
        lambda drawn: _numbered([[item] for item in (*drawn[0], drawn[1])], "id call_id")
    ),
    "chat": _MESSAGE.map(lambda message: [message]),
}
"""A strategy for the blocks of an answer, by wire. The last block is a call or, on the chat wire, a message with calls."""

# --- answers ---


def whole(wire: str, blocks: list[dict[str, Any]]) -> bytes:
    """Return the answer with these blocks as one JSON value."""
    return compact(
        {
            "messages": {"content": blocks, "stop_reason": "tool_use"},
            "responses": {"status": "completed", "output": blocks},
            "chat": {"choices": [{"message": blocks[0], "finish_reason": "tool_calls"}]},
        }[wire]
    )


def streamed(wire: str, blocks: list[dict[str, Any]], draw: Draw) -> bytes:
    """Return the answer with these blocks as a stream of events."""
    events = {"messages": _messages_events, "responses": _responses_events, "chat": _chat_events}[wire]
    said = b"".join(b"data: %s\n\n" % compact(event) for event in events(blocks, draw))
    return said + b"data: [DONE]\n\n" if wire == "chat" else said


def _pieces(text: str, draw: Draw) -> list[str]:
    cut = draw(st.integers(0, len(text)))
    return [piece for piece in (text[:cut], text[cut:]) if piece]


def _messages_events(blocks: list[dict[str, Any]], draw: Draw) -> Iterator[Any]:
    yield {"type": "message_start", "message": {"usage": {"input_tokens": 3}}}
    for index, block in enumerate(blocks):
        start, deltas = dict(block), list[dict[str, Any]]()
        match block["type"]:
            case "text":
                start = {"type": "text", "text": ""}
                deltas += [{"type": "text_delta", "text": each} for each in _pieces(block["text"], draw)]
                deltas += [
                    {"type": "citations_delta", "citation": each} for each in block.get("citations", ())
                ]
            case "thinking":
                start = {"type": "thinking", "thinking": "", "signature": ""}
                deltas += [
                    {"type": "thinking_delta", "thinking": each} for each in _pieces(block["thinking"], draw)
                ]
                deltas += [
                    {"type": "signature_delta", "signature": each}
                    for each in _pieces(block["signature"], draw)
                ]
            case "tool_use" | "server_tool_use" | "mcp_tool_use":
                start["input"] = {}
                given = _pieces(compact(block["input"]).decode(), draw)
                deltas += [{"type": "input_json_delta", "partial_json": each} for each in ("", *given)]
            case kind if kind.startswith("x_"):
                start["x_text"] = ""
                deltas += [{"type": "x_delta", "x_text": each} for each in _pieces(block["x_text"], draw)]
            case _:
                pass
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}}
    yield {"type": "message_stop"}


def _responses_events(items: list[dict[str, Any]], draw: Draw) -> Iterator[Any]:
    for index, item in enumerate(items):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            yield {"type": "response.output_item.added", **at, "item": {**item, "arguments": ""}}
            for piece in _pieces(item["arguments"], draw):
                yield {"type": "response.function_call_arguments.delta", **at, "delta": piece}
        elif item["type"] == "message":
            for part in item["content"]:
                yield {"type": "response.output_text.delta", **at, "delta": part["text"]}
        yield {"type": "response.output_item.done", **at, "item": item}
    output = draw(st.sampled_from([items, []]))  # some servers leave the items out of the last event
    yield {"type": "response.completed", "response": {"status": "completed", "output": output}}


def _chat_events(blocks: list[dict[str, Any]], draw: Draw) -> Iterator[Any]:
    [message] = blocks
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None}]
    for name, value in message.items():
        if name == "tool_calls":
            for index, call in enumerate(value):
                function = call["function"]
                begun = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
                deltas.append({"tool_calls": [begun]})
                for piece in _pieces(function["arguments"], draw):
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        elif name == "reasoning_details":
            deltas += [{name: [piece]} for item in value for piece in _detail_pieces(item, draw)]
        elif name != "role" and isinstance(value, str):
            deltas += [{name: piece} for piece in _pieces(value, draw) or [""]]
        elif name != "role":
            deltas.append({name: value})
    for delta in deltas:
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    if draw(st.booleans()):  # some servers end a stream without a finish reason
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}


def _detail_pieces(item: dict[str, Any], draw: Draw) -> Iterator[dict[str, Any]]:
    """Yield the pieces in which a detail is streamed. Joined, they have the fields of the detail in the same order."""
    if "text" not in item:
        yield item
        return
    first, *rest = _pieces(item["text"], draw)
    yield {**item, "text": first, "signature": ""}
    for piece in rest:
        yield {"type": item["type"], "text": piece, "index": item["index"]}
    yield {"type": item["type"], "signature": item["signature"], "index": item["index"]}


# --- requests ---


class _Content(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"[]")


def sent_back(wire: str, body: bytes) -> list[bytes]:
    """Return the blocks of the first answer in a request, each as the bytes that were sent.

    The fields of calls, and of messages on the chat wire, are sorted.
    """
    request = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    said = _raw_list(request["input" if wire == "responses" else "messages"])
    if wire == "responses":
        ends = next(at for at, item in enumerate(said) if b'"function_call_output"' in bytes(item))
        return [_sorted_call(bytes(item)) for item in said[1:ends]]
    first = next(each for each in said if msgspec.json.decode(each, type=_Content).role == "assistant")
    if wire == "chat":
        return [_sorted(bytes(first))]
    return [
        _sorted_call(bytes(block)) for block in _raw_list(msgspec.json.decode(first, type=_Content).content)
    ]


def asked_back(wire: str, blocks: list[dict[str, Any]]) -> list[bytes]:
    """Return the blocks as `sent_back` returns them if they were sent back correctly."""
    if wire == "responses" and _is_plain(blocks):
        blocks = [{name: block[name] for name in block if name not in ("id", "status")} for block in blocks]
    return [_sorted(compact(block)) if wire == "chat" else _sorted_call(compact(block)) for block in blocks]


def _is_plain(items: list[dict[str, Any]]) -> bool:
    """Return whether the items are ordinary calls, possibly after one plain text. Such items are sent back without `id` and `status`."""
    first, *calls = items
    if first["type"] == "message":
        said = first["content"]
        if len(said) != 1 or not said[0]["text"] or said[0]["annotations"]:
            return False
    else:
        calls = items
    return all(call["type"] == "function_call" and "x_more" not in call for call in calls)


def _raw_list(raw: msgspec.Raw) -> list[msgspec.Raw]:
    return msgspec.json.decode(raw, type=list[msgspec.Raw])


def _sorted_call(block: bytes) -> bytes:
    kind = msgspec.json.decode(block).get("type")
    return _sorted(block) if kind in ("tool_use", "function_call") else block


def _sorted(block: bytes) -> bytes:
    """Return an object with its fields and those of its calls sorted, and every other value as it was written."""
    fields = msgspec.json.decode(block, type=dict[str, msgspec.Raw])
    for name in fields.keys() & {"function"}:
        fields[name] = msgspec.Raw(_sorted(bytes(fields[name])))
    for name in fields.keys() & {"tool_calls"}:
        fields[name] = msgspec.Raw(
            msgspec.json.encode([msgspec.Raw(_sorted(bytes(each))) for each in _raw_list(fields[name])])
        )
    return msgspec.json.encode(dict(sorted(fields.items())))
