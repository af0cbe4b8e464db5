"""`AnthropicModel`: models behind Anthropic's messages API, on any server that implements it."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from handrail.messages import (
    DEFAULT_SETTINGS,
    AssistantMessage,
    CallAnswered,
    CallPart,
    Encode,
    Kept,
    Message,
    ModelPart,
    ModelRequest,
    Offered,
    Price,
    Sent,
    StopPart,
    StopReason,
    Takes,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models.blocks import decode, emptied, encode, joined, parsed_input, with_calls
from handrail.models.grammar import ANTHROPIC_ID, id_for_wire, name_for_wire, raw_object, value_text
from handrail.models.http import Endpoint, body_of, count, encoder, failure_in_answer, names_in, text_json
from handrail.models.media import ANTHROPIC_TAKES, EMPTY, anthropic_blocks, kept_data, said_in_words
from handrail.models.providers import server_of
from handrail.models.request_settings import (
    ANTHROPIC,
    ANTHROPIC_TOOLS,
    anthropic_choice,
    joined_tools,
    merge_fields,
    settings_fields,
    write_tools,
)
from handrail.text.spelling import checked_arguments

_LOOKBACK = 20
"""Number of blocks before a breakpoint in which the provider looks for an earlier request's cache entry."""
_END = b"}]}"
"""How every encoded message ends: this closes its last block, the list of its blocks, and the message itself."""


def marked(encoded: bytes, mark: dict[str, Any]) -> bytes:
    """Add a mark to an encoded block."""
    return encoded[:-1] + b',"cache_control":' + encode(mark) + b"}"


def marked_tools(request: ModelRequest, tool: Encode, mark: dict[str, Any]) -> bytes | bytearray:
    """Encode the tools with a mark on the last one that is not deferred, if any. Deferred tools are not cached."""
    tools = list(request.tools)
    first = [index for index, offered in enumerate(tools) if not offered.deferred]
    if not first:
        return request.tools.encoded(tool)
    last = first[-1]
    parts = [tool(each) for each in tools]
    parts[last] = marked(parts[last], mark)
    return b",".join(parts)


def marked_messages(
    messages: Sent[Message], said: bytearray, message: Encode, mark: dict[str, Any]
) -> bytes | bytearray:
    """Return the encoded messages, with a mark at the end of the previous request if that is too far back to be found.

    With the mark, the provider reads everything up to it from the cache. Handrail sets at most three of the four marks that are allowed:
    at the end of the tools and the system text, at the end of the previous request, and at the end of this one. The last is a
    mark on the request itself, so that no message changes when it moves.
    """
    newest = _since_last_request(messages)
    if sum(map(_count_blocks, newest)) < _LOOKBACK or len(newest) == len(messages):
        return said
    after = b"," + b",".join(map(message, newest))
    before = said[: len(said) - len(after)]
    if not said.endswith(after) or not before.endswith(_END):
        return said
    return b'%s,"cache_control":%s%s%s' % (before[: -len(_END)], encode(mark), _END, after)


def _since_last_request(messages: Sent[Message]) -> list[Message]:
    """Return the model's newest answer and the messages after it, or all messages if there is no answer."""
    newest: list[Message] = []
    for index in range(len(messages) - 1, -1, -1):
        newest.append(messages[index])
        if isinstance(newest[-1], AssistantMessage):
            break
    return newest[::-1]


def _count_blocks(message: Message) -> int:
    """Return an upper bound for the number of blocks of a message. The bound need not be exact: an extra mark costs nothing."""
    if isinstance(message, ToolMessage):
        return len(message.results) + sum(1 + len(each.attachments) for each in message.results if each.shows)
    if isinstance(message, AssistantMessage):
        return 1 + len(message.calls) if message.kept is None else 1 + message.kept.data.count(b'"type"')
    return 1 + len(message.attachments)


WIRE = "anthropic"
_CACHE = {"cache_control": {"type": "ephemeral"}}
_THINKING = frozenset({"thinking", "redacted_thinking"})
_SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
"""Types of the blocks that call the provider's own tools. The result of a call is a separate block with the call's id."""
_OF_CALLS = frozenset({"id", "name", "input"})
"""The fields of a call that the conversation already holds. They are not kept with the blocks."""
_STOPS: dict[str, StopReason] = {
    "end_turn": "done",
    "stop_sequence": "done",
    "tool_use": "calls",
    "pause_turn": "paused",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refused",
}


@checked_arguments
class AnthropicModel:
    """An Anthropic model, or a model on any server with the same API.

    The key is read from `ANTHROPIC_API_KEY` or `ANTHROPIC_AUTH_TOKEN`, and `ANTHROPIC_BASE_URL` names a different
    server. `base_url` and `key_variable` take precedence; `key_variable=None` sends no key.

    The stable part of each request (tools, system prompt, conversation so far) is marked for the
    provider's cache; `cache=False` leaves the marks out, for a server that refuses them. Thinking blocks
    are kept and sent back as the API requires. `options` are further fields of the request, such as
    `{"thinking": {"type": "enabled", "budget_tokens": 2048}}`. `takes` says which attachments the model takes, if
    that is not known from its name. After `silence` seconds without data, a request fails. Raises `DefinitionError` if
    the provider is unknown or has a different API, if the address or a header is invalid, or if a key is passed as `api_key`.
    """

    def __init__(
        self,
        name: str,
        *,
        provider: str = "anthropic",
        base_url: str | None = None,
        key_variable: str | None = "",
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        max_tokens: int = 8192,
        cache: bool = True,
        native_output: bool = True,
        price: Price | None = None,
        takes: Takes | None = None,
        silence: float = 300.0,
        api_key: None = None,
    ) -> None:
        server = server_of(
            "anthropic", ANTHROPIC_TAKES, provider, name, base_url, key_variable, takes, api_key
        )
        self.name = server.model
        self.traits = Traits(
            price, native_output, server.takes, frozenset(ANTHROPIC_TOOLS), loads_deferred=True
        )
        self._endpoint = Endpoint.of(server, {"anthropic-version": "2023-06-01", **(headers or {})}, silence)
        self._fields = {"model": name, **(options or {})}
        self._max_tokens = max_tokens
        self._cache = cache
        self._wire = f"{WIRE}:{provider}"
        self._between = partial(_between, self._wire)

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        endpoint, body, wire = self._endpoint, self._body(request), self._wire
        if not request.stream:
            return endpoint.parts("/v1/messages", body, whole=partial(_whole, wire))
        return endpoint.parts("/v1/messages", body, take=_Pieces(endpoint, wire).take)

    def _body(self, request: ModelRequest) -> bytes:
        more: dict[str, Any] = {"max_tokens": request.max_tokens or self._max_tokens, **self._fields}
        if request.temperature is not None:
            more["temperature"] = request.temperature
        if request.stream:
            more["stream"] = True
        if self._cache:
            # a mark on the request covers all messages, and leaves the bytes of each unchanged
            more |= _CACHE
        if request.settings is not DEFAULT_SETTINGS:
            merge_fields(
                more, settings_fields(self.name, request, ANTHROPIC, () if self._cache else ("cache_ttl",))
            )
        if request.must_call or "tool_choice" in more:
            anthropic_choice(more, request.must_call)
        if request.output is not None:
            wanted = {"type": "json_schema", "schema": _held(request.output.json_schema)}
            merge_fields(more, {"output_config": {"format": wanted}})
        encode_message = encoder(_message, self.traits.takes, self._wire, _gone(request))
        said: bytes | bytearray = request.messages.encoded(encode_message, self._between)
        mark = more["cache_control"] if self._cache else None
        if mark is not None:
            said = marked_messages(request.messages, said, encode_message, mark)
        written: dict[str, tuple[bytes | bytearray, ...]] = {"messages": (b"[", said, b"]")}
        if len(request.messages) and not isinstance(request.messages[0], UserMessage):
            first = encode_message(UserMessage(""))  # the API requires a user's message first
            written["messages"] = (b"[", first, b",", said, b"]")
        has_system = bool(request.system.strip())
        if has_system:
            system = b'{"type":"text","text":%s}' % text_json(request.system)
            written["system"] = (b"[", system if mark is None else marked(system, mark), b"]")
        own = write_tools(self.name, request, ANTHROPIC_TOOLS)
        if len(request.tools) or own:
            tools = (
                request.tools.encoded(_tool)
                if has_system or mark is None
                else marked_tools(request, _tool, mark)
            )
            written["tools"] = joined_tools(own, tools)
        return body_of(more, **written)

    def __repr__(self) -> str:
        return f"AnthropicModel({self.name!r})"


_UNHELD = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"}
    | {"minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "pattern"}
)
"""Schema keywords that the API refuses. Handrail still enforces them when it validates the answer."""


def _held(schema: Any) -> Any:
    """Return the schema without the keywords that the API refuses."""
    if isinstance(schema, list):
        return [_held(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        word: {name: _held(each) for name, each in inner.items()}
        if word in ("properties", "$defs")
        else _held(inner)
        for word, inner in schema.items()
        if word not in _UNHELD
    }


def _tool(offered: Offered) -> bytes:
    tool = offered.tool
    fields = {"name": tool.name, "description": tool.description, "input_schema": tool.json_schema}
    return encode({**fields, "defer_loading": True} if offered.deferred else fields)


def _gone(request: ModelRequest) -> frozenset[str]:
    """Return the names of tools that a message shows and the request does not offer. The API refuses references to them."""
    shown = names_in(request.messages, _shown)
    return shown and shown - {offered.tool.name for offered in request.tools}


def _shown(message: Message) -> bytes:
    """Return the names of the tools that a message shows, separated by commas."""
    results = message.results if isinstance(message, ToolMessage) else ()
    return ",".join(name for each in results for name in each.shows).encode()


def _message(takes: Takes, wire: str, gone: frozenset[str], message: Message) -> bytes:
    if isinstance(message, ToolMessage):
        answered = message.results
        if gone:
            answered = [
                replace(each, shows=tuple(name for name in each.shows if name not in gone))
                for each in answered
            ]
        results = [_result(each, takes) for each in answered]
        opened = [block for each in answered if each.shows for block in _content(each, takes)]
        return encode({"role": "user", "content": [*results, *opened]})
    if isinstance(message, AssistantMessage):
        return encode({"role": "assistant", "content": _blocks(message, takes, wire)})
    return encode({"role": "user", "content": _content(message, takes)})


def _content(said: UserMessage | CallAnswered, takes: Takes) -> list[dict[str, Any]]:
    """Return the blocks of a message or of a result."""
    blocks = anthropic_blocks(said.text, said.attachments, takes) if said.attachments else []
    return blocks or [_text_block(said.text)]


def _between(wire: str, before: Message, after: Message) -> bytes:
    """Return the separator between two messages.

    If the provider interrupted its answer after a call of its own tool, the result of the call is in the next answer. If
    `after` is not a `ToolMessage` and does not have the result, an error is sent as the result, because the API refuses a
    call without one.
    """
    if isinstance(after, ToolMessage) or not isinstance(before, AssistantMessage):
        return b","
    calls = [block for block in _kept_blocks(before, wire) if block["type"] in _SERVER_CALLS]
    if not calls:
        return b","
    answers = [*_kept_blocks(before, wire), *_kept_blocks(after, wire)]
    answered = {block.get("tool_use_id") for block in answers}
    errors = [_interrupted(call) for call in calls if call.get("id") not in answered]
    return b",%s," % encode({"role": "assistant", "content": errors}) if errors else b","


def _kept_blocks(message: Message, wire: str) -> list[Any]:
    """Return the kept blocks of a message; [] unless it is an answer over this wire with calls or results of the provider's own tools."""
    kept = message.kept if isinstance(message, AssistantMessage) else None
    return decode(kept.data) if kept is not None and kept.wire == wire and b"_tool_" in kept.data else []


def _interrupted(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the error that is sent as the result of an interrupted call."""
    if call["type"] == "mcp_tool_use":
        said = {"type": "text", "text": "The call was interrupted."}
        return {"type": "mcp_tool_result", "tool_use_id": call["id"], "is_error": True, "content": [said]}
    name = str(call.get("name"))
    kind = "tool_search_tool_result" if name.startswith("tool_search_tool") else f"{name}_tool_result"
    error = {"type": f"{kind}_error", "error_code": "unavailable"}
    return {"type": kind, "tool_use_id": call["id"], "content": error}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text if text.strip() else EMPTY}


def _result(result: CallAnswered, takes: Takes) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": id_for_wire(result.id, ANTHROPIC_ID)}
    if result.attachments:
        block["content"] = _content(result, takes)
    elif result.text.strip():
        block["content"] = result.text
    elif result.failed:
        block["content"] = EMPTY  # the API refuses an error without content
    if result.shows:
        # A tool reference makes a deferred tool visible. The result's text follows in its own block.
        block["content"] = [{"type": "tool_reference", "tool_name": name} for name in result.shows]
    if result.failed:
        block["is_error"] = True
    return block


def _blocks(message: AssistantMessage, takes: Takes, wire: str) -> list[Any]:
    calls = [
        {
            "type": "tool_use",
            "id": id_for_wire(call.id, ANTHROPIC_ID),
            "name": name_for_wire(call.name),
            "input": raw_object(call.arguments),
        }
        for call in message.calls
    ]
    kept = kept_data(message, wire)
    if kept is not None:
        back = [
            block
            for block in with_calls(kept, calls, lambda block: block["type"] == "tool_use")
            if _is_accepted(block)
        ]
        if back and back[-1]["type"] in _THINKING:
            back.append(_text_block(""))  # the API refuses thinking as the last block
        if back:
            return back
    text = said_in_words(message, takes)
    return [_text_block(text), *calls] if text.strip() or not calls else calls


def _is_accepted(block: dict[str, Any]) -> bool:
    """Return whether the API accepts this block back.

    It refuses blank text, unsigned thinking, and redacted thinking without data.
    """
    match block["type"]:
        case "text":
            text = block.get("text")
            return isinstance(text, str) and bool(text.strip())
        case "thinking":
            signature = block.get("signature")
            return isinstance(block.get("thinking"), str) and isinstance(signature, str) and bool(signature)
        case "redacted_thinking":
            return isinstance(block.get("data"), str)
        case _:
            return True


def _whole(wire: str, answer: Any) -> Iterator[ModelPart]:
    blocks = answer["content"]
    index = 0
    for block in blocks:
        match block["type"]:
            case "text":
                yield TextPart(block["text"])
            case "thinking":
                yield ThinkingPart(block.get("thinking") or "")
            case "tool_use":
                given = value_text(block.get("input"))
                yield CallPart(index, block.get("id") or "", block.get("name") or "", given)
                index += 1
            case _:
                pass
    if answer.get("usage"):
        yield UsagePart(_usage(answer["usage"]))
    reason = _STOPS.get(answer.get("stop_reason") or "end_turn", "done")
    yield StopPart(reason, _kept(wire, blocks, reason))


def _usage(usage: Mapping[str, Any]) -> Usage:
    read, written = (
        count(usage.get("cache_read_input_tokens")),
        count(usage.get("cache_creation_input_tokens")),
    )
    sent = count(usage.get("input_tokens")) + read + written
    ran = usage.get("server_tool_use")
    searches = count(ran.get("web_search_requests")) if isinstance(ran, dict) else 0
    return Usage(sent, count(usage.get("output_tokens")), read, written, 1, searches)


def _kept(wire: str, blocks: list[Any], reason: StopReason) -> Kept | None:
    """Return the blocks of an answer to be sent back; None if they are at most one text followed by calls, without further fields."""
    if all(map(_is_plain, blocks)) and [block["type"] for block in blocks[1:]].count("text") == 0:
        return None
    cut = reason in ("length", "refused")
    answered = {block.get("tool_use_id") for block in blocks if isinstance(block.get("tool_use_id"), str)}
    kept = [
        emptied(block, _OF_CALLS) if block["type"] == "tool_use" else block
        for block in blocks
        # A provider's own call that was cut off never gets a result, and the API refuses it without one.
        if not (cut and block["type"] in _SERVER_CALLS and block.get("id") not in answered)
    ]
    return Kept(wire, encode(kept), has_arguments=False)


def _is_plain(block: dict[str, Any]) -> bool:
    """Return whether the conversation contains everything in a block, so that it need not be kept."""
    match block["type"]:
        case "text":
            return len(block) == 2 or (len(block) == 3 and not block.get("citations", True))
        case "tool_use":
            return len(block) == 1 + sum(name in block for name in _OF_CALLS)
        case _:
            return False


class _Pieces:
    """Converts the events of one streamed answer to parts."""

    __slots__ = ("_blocks", "_calls", "_endpoint", "_given", "_inputs", "_stop", "_usage", "_wire")

    def __init__(self, endpoint: Endpoint, wire: str) -> None:
        self._endpoint = endpoint
        self._wire = wire
        self._inputs: dict[int, list[str]] = {}
        """The pieces that have arrived of the inputs to the provider's own tools, by block."""
        self._blocks: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, int] = {}
        self._given: dict[int, Any] = {}
        """The inputs that arrived with the start of a call. Such an input is used only if no pieces of the input follow."""
        self._usage: dict[str, Any] = {}
        self._stop = "end_turn"

    def take(self, event: Any) -> Iterator[ModelPart]:
        match event.get("type"):
            case "message_start":
                self._usage = dict(event["message"].get("usage") or {})
                if self._usage:  # the only usage if the stream is cut off
                    yield UsagePart(_usage(self._usage))
            case "content_block_start":
                yield from self._begin(event["index"], dict(event["content_block"]))
            case "content_block_delta":
                yield from self._more(event["index"], event["delta"])
            case "content_block_stop":
                yield from self._end(event["index"])
            case "message_delta":
                self._stop = event["delta"].get("stop_reason") or self._stop
                self._usage |= {
                    name: value for name, value in (event.get("usage") or {}).items() if value is not None
                }
                if self._usage:
                    yield UsagePart(_usage(self._usage))
            case "message_stop":
                for index in sorted({*self._given, *self._inputs}):
                    yield from self._end(index)
                blocks = [self._blocks[index] for index in sorted(self._blocks)]
                reason = _STOPS.get(self._stop, "done")
                yield StopPart(reason, _kept(self._wire, blocks, reason))
            case "error":
                raise failure_in_answer(self._endpoint, event.get("error") or {})
            case _:
                pass

    def _begin(self, index: int, block: dict[str, Any]) -> Iterator[ModelPart]:
        self._blocks[index] = block
        if block["type"] == "tool_use":
            number = self._calls[index] = len(self._calls)
            given, block["input"] = block.get("input"), None
            if given is not None and given != {}:
                self._given[index] = given
            yield CallPart(number, block.get("id") or "", block.get("name") or "")
        elif block["type"] == "text" and block.get("text"):
            yield TextPart(block["text"])
        elif block["type"] == "thinking" and block.get("thinking"):
            yield ThinkingPart(block["thinking"])

    def _end(self, index: int) -> Iterator[ModelPart]:
        if index in self._given:
            yield CallPart(self._calls[index], arguments=value_text(self._given.pop(index)))
        if index in self._inputs:
            self._blocks[index]["input"] = parsed_input("".join(self._inputs.pop(index)))

    def _more(self, index: int, delta: Any) -> Iterator[ModelPart]:
        block = self._blocks[index]
        match delta["type"]:
            case "text_delta":
                block["text"] = block.get("text", "") + delta["text"]
                yield TextPart(delta["text"])
            case "input_json_delta" if index in self._calls:
                if delta["partial_json"]:
                    self._given.pop(index, None)
                yield CallPart(self._calls[index], arguments=delta["partial_json"])
            case "input_json_delta":
                if delta["partial_json"]:
                    self._inputs.setdefault(index, []).append(delta["partial_json"])
            case "thinking_delta":
                block["thinking"] = block.get("thinking", "") + delta["thinking"]
                yield ThinkingPart(delta["thinking"])
            case "citations_delta":
                block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
            case _:
                for name, piece in delta.items():  # a signature, or a field of a kind that is not known yet
                    if name != "type":
                        block[name] = joined(block.get(name), piece)
