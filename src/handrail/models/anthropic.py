"""`AnthropicModel`: Anthropic's messages API, and every server that implements it."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

from handrail.errors import ModelError
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallPart,
    Kept,
    Message,
    ModelPart,
    ModelRequest,
    Offered,
    Price,
    StopPart,
    StopReason,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelRateLimited, ModelRequestRefused, ModelUnavailable
from handrail.models.grammar import ANTHROPIC_ID, id_for_wire, name_for_wire, raw_object
from handrail.models.http import Endpoint, body_of, count, decode, encode, text_json
from handrail.models.providers import address_of, keys_of, refuse_key, row_of

WIRE = "anthropic"
_CACHE = {"cache_control": {"type": "ephemeral"}}
_EMPTY = "(nothing)"
"""Text that is sent instead of empty text, which the API refuses."""
_SERVER_BLOCKS = frozenset({"server_tool_use", "mcp_tool_use", "container_upload", "compaction"})
"""Blocks of the provider's own tools, which are sent back as they are, like their results."""
_STOPS: dict[str, StopReason] = {
    "end_turn": "done",
    "stop_sequence": "done",
    "tool_use": "calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refused",
}


class AnthropicModel:
    """An Anthropic model, or a model on any server with the same API.

    The key is read from `ANTHROPIC_API_KEY` or `ANTHROPIC_AUTH_TOKEN`, and `ANTHROPIC_BASE_URL` names a different
    server. `base_url` and `key_variable` take precedence; `key_variable=None` sends no key.

    The stable part of each request (tools, system prompt, conversation so far) is marked for the
    provider's cache; `cache=False` leaves the marks out, for a server that refuses them. Thinking blocks
    are kept and sent back as the API requires. `options` are further fields of the request, such as
    `{"thinking": {"type": "enabled", "budget_tokens": 2048}}`.
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
        silence: float = 300.0,
        api_key: None = None,
    ) -> None:
        row = row_of(provider, "anthropic")
        keys = keys_of(row, key_variable)
        refuse_key(api_key, keys)
        self.name = f"{provider}:{name}"
        address = address_of(self.name, row, base_url)
        self.traits = Traits(price, native_output)
        self._endpoint = Endpoint(
            self.name,
            address,
            keys=keys,
            key_needed=row.needs_key(address),
            headers={"anthropic-version": "2023-06-01", **row.find_headers(), **(headers or {})},
            silence=silence,
        )
        self._fields = {"model": name, **(options or {})}
        self._max_tokens = max_tokens
        self._cache = cache

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        endpoint, body = self._endpoint, self._body(request)
        if not request.stream:
            return endpoint.parts("/v1/messages", body, whole=_whole)
        return endpoint.parts("/v1/messages", body, take=_Pieces(endpoint).take)

    def _body(self, request: ModelRequest) -> bytes:
        more: dict[str, Any] = {"max_tokens": request.max_tokens or self._max_tokens, **self._fields}
        if request.temperature is not None:
            more["temperature"] = request.temperature
        if request.stream:
            more["stream"] = True
        if request.must_call:
            more["tool_choice"] = {"type": "any"}
        if request.output is not None:
            more["output_config"] = {
                "format": {"type": "json_schema", "schema": _held(request.output.json_schema)}
            }
        if self._cache:
            more |= (
                _CACHE  # a mark on the request caches up to the newest message, whose own bytes do not change
            )
        said = request.messages.encoded(_message)
        if len(request.messages) and not isinstance(request.messages[0], UserMessage):
            said = b"%s,%s" % (_message(UserMessage("")), said)  # the API wants a user's message first
        written = {"messages": b"[%s]" % said}
        if request.system.strip():
            marked = b"," + encode(_CACHE)[1:-1] if self._cache else b""
            written["system"] = b'[{"type":"text","text":%s%s}]' % (text_json(request.system), marked)
        if len(request.tools):
            written["tools"] = b"[%s]" % request.tools.encoded(_tool)
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


def _message(message: Message) -> bytes:
    if isinstance(message, ToolMessage):
        results = [_result(each) for each in message.results]
        opened = [_text_block(each.text) for each in message.results if each.shows]
        return encode({"role": "user", "content": [*results, *opened]})
    if isinstance(message, AssistantMessage):
        return encode({"role": "assistant", "content": _blocks(message)})
    return encode({"role": "user", "content": [_text_block(message.text)]})


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text if text.strip() else _EMPTY}


def _result(result: CallAnswered) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": id_for_wire(result.id, ANTHROPIC_ID)}
    if result.text.strip():
        block["content"] = result.text
    elif result.failed:
        block["content"] = _EMPTY  # the API refuses an error without content
    if result.shows:
        # A tool reference makes a deferred tool visible. The result's text follows in its own block.
        block["content"] = [{"type": "tool_reference", "tool_name": name} for name in result.shows]
    if result.failed:
        block["is_error"] = True
    return block


def _blocks(message: AssistantMessage) -> list[Any]:
    calls = [
        {
            "type": "tool_use",
            "id": id_for_wire(call.id, ANTHROPIC_ID),
            "name": name_for_wire(call.name),
            "input": raw_object(call.arguments),
        }
        for call in message.calls
    ]
    if message.kept is not None and message.kept.wire == WIRE:
        back = _with_thinking(decode(message.kept.data), calls)
        if back:
            return back
    return [_text_block(message.text), *calls] if message.text.strip() or not calls else calls


def _with_thinking(blocks: list[Any], calls: list[Any]) -> list[Any]:
    """Return the blocks of an answer, with Handrail's form of its calls.

    Signed thinking is sent back unchanged, and in the same order relative to the calls. Thinking without a
    signature was cut off, and the API refuses it. Returns [] if the blocks do not have as many calls as the answer.
    """
    back: list[Any] = []
    asked = iter(calls)
    for block in blocks:
        match block:
            case {"type": "tool_use"}:
                call = next(asked, None)
                if call is None:
                    return []
                back.append(call)
            case {"type": "text", "text": str(text)} if text.strip():
                back.append({"type": "text", "text": text})
            case {"type": "thinking", "thinking": str(text), "signature": str(signature)} if signature:
                back.append({"type": "thinking", "thinking": text, "signature": signature})
            case {"type": "redacted_thinking", "data": str(data)}:
                back.append({"type": "redacted_thinking", "data": data})
            case {"type": str(kind)} if kind in _SERVER_BLOCKS or kind.endswith("_tool_result"):
                back.append(block)
            case _:
                pass
    if next(asked, None) is not None:
        return []
    if back and back[-1]["type"].endswith("thinking"):
        back.append(_text_block(""))  # the API refuses thinking as the last block
    return back


def _whole(answer: Any) -> Iterator[ModelPart]:
    blocks = answer["content"]
    index = 0
    for block in blocks:
        match block["type"]:
            case "text":
                yield TextPart(block["text"])
            case "thinking":
                yield ThinkingPart(block.get("thinking") or "")
            case "tool_use":
                given = _input_text(block.get("input"))
                yield CallPart(index, block.get("id") or "", block.get("name") or "", given)
                index += 1
            case _:
                pass
    if answer.get("usage"):
        yield UsagePart(_usage(answer["usage"]))
    yield StopPart(_STOPS.get(answer.get("stop_reason") or "end_turn", "done"), _kept(blocks))


def _input_text(given: Any) -> str:
    """Return a call's input as JSON text, which is how it is streamed. The gate checks whether it is an object."""
    return "" if given is None else encode(given).decode()


def _usage(usage: Mapping[str, Any]) -> Usage:
    read, written = (
        count(usage.get("cache_read_input_tokens")),
        count(usage.get("cache_creation_input_tokens")),
    )
    sent = count(usage.get("input_tokens")) + read + written
    return Usage(sent, count(usage.get("output_tokens")), read, written, 1)


def _kept(blocks: list[Any]) -> Kept | None:
    """Return the blocks of an answer that must be sent back; None if it has no thinking blocks."""
    if not any(block["type"] in ("thinking", "redacted_thinking") for block in blocks):
        return None
    return Kept(WIRE, encode(blocks))


class _Pieces:
    """Converts the events of one streamed answer to parts."""

    __slots__ = ("_blocks", "_calls", "_endpoint", "_given", "_stop", "_usage")

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._blocks: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, int] = {}
        self._given: dict[int, Any] = {}
        """The inputs that calls began with, which count if no pieces of the input follow."""
        self._usage: dict[str, Any] = {}
        self._stop = "end_turn"

    def take(self, event: Any) -> Iterator[ModelPart]:
        match event.get("type"):
            case "message_start":
                self._usage = dict(event["message"].get("usage") or {})
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
            case "message_stop":
                for index in sorted(self._given):
                    yield from self._end(index)
                if self._usage:
                    yield UsagePart(_usage(self._usage))
                blocks = [self._blocks[index] for index in sorted(self._blocks)]
                yield StopPart(_STOPS.get(self._stop, "done"), _kept(blocks))
            case "error":
                raise _failure(self._endpoint, event.get("error") or {})
            case _:
                pass

    def _begin(self, index: int, block: dict[str, Any]) -> Iterator[ModelPart]:
        self._blocks[index] = block
        if block["type"] == "tool_use":
            number = self._calls[index] = len(self._calls)
            given = block.pop("input", None)
            if given is not None and given != {}:
                self._given[index] = given
            yield CallPart(number, block.get("id") or "", block.get("name") or "")
        elif block["type"] == "text" and block.get("text"):
            yield TextPart(block["text"])

    def _end(self, index: int) -> Iterator[ModelPart]:
        if index in self._given:
            yield CallPart(self._calls[index], arguments=_input_text(self._given.pop(index)))

    def _more(self, index: int, delta: Any) -> Iterator[ModelPart]:
        block = self._blocks[index]
        match delta["type"]:
            case "text_delta":
                block["text"] = block.get("text", "") + delta["text"]
                yield TextPart(delta["text"])
            case "input_json_delta":
                if delta["partial_json"]:
                    self._given.pop(index, None)
                yield CallPart(self._calls[index], arguments=delta["partial_json"])
            case "thinking_delta":
                block["thinking"] = block.get("thinking", "") + delta["thinking"]
                yield ThinkingPart(delta["thinking"])
            case "signature_delta":
                block["signature"] = block.get("signature", "") + delta["signature"]
            case _:
                pass


def _failure(endpoint: Endpoint, error: Mapping[str, Any]) -> ModelError:
    said = f"it failed in the middle of its answer: {endpoint.quoted(error.get('message') or dict(error))}"
    match error.get("type"):
        case "rate_limit_error":
            return ModelRateLimited(endpoint.model, said)
        case "invalid_request_error" | "authentication_error" | "permission_error" | "not_found_error":
            return ModelRequestRefused(endpoint.model, said)
        case _:
            return ModelUnavailable(endpoint.model, said)
