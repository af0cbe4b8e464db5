"""OpenAI's responses API: `POST /responses`, with nothing stored by the provider."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import Any

from handrail.errors import ModelError
from handrail.messages import (
    AssistantMessage,
    CallPart,
    Kept,
    Message,
    ModelPart,
    ModelRequest,
    Offered,
    StopPart,
    StopReason,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Usage,
    UsagePart,
)
from handrail.models import ModelRateLimited, ModelUnavailable
from handrail.models.grammar import RESPONSES_ID, arguments_text, id_for_wire, name_for_wire, object_text
from handrail.models.http import Endpoint, body_of, count, decode, encode, is_strict, text_json
from handrail.models.providers import Quirks

WIRE = "responses"


def stream(
    endpoint: Endpoint, fields: Mapping[str, Any], request: ModelRequest, quirks: Quirks
) -> AsyncGenerator[ModelPart]:
    """Send one request and yield the parts of its answer."""
    body = _body(fields, request)
    if not request.stream:
        return endpoint.parts("/responses", body, whole=partial(_whole, endpoint))
    return endpoint.parts("/responses", body, take=_Pieces(endpoint).take)


def _body(fields: Mapping[str, Any], request: ModelRequest) -> bytes:
    more: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"], **fields}
    if request.temperature is not None:
        more["temperature"] = request.temperature
    if request.max_tokens is not None:
        more["max_output_tokens"] = request.max_tokens
    if request.stream:
        more["stream"] = True
    if request.must_call:
        more["tool_choice"] = "required"
    if request.output is not None:
        schema = request.output.json_schema
        more["text"] = {
            "format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": is_strict(schema)}
        }
    written = {"input": b"[%s]" % request.messages.encoded(_items)}
    if request.system:
        written["instructions"] = text_json(request.system)
    if len(request.tools):
        written["tools"] = b"[%s]" % request.tools.encoded(_tool)
    return body_of(more, **written)


def _tool(offered: Offered) -> bytes:
    tool = offered.tool
    return encode(
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.json_schema,
            "strict": False,
        }
    )


def _items(message: Message) -> bytes:
    """Convert a message to at least one input item, as JSON separated by commas."""
    if isinstance(message, ToolMessage):
        items: list[Any] = [
            {
                "type": "function_call_output",
                "call_id": id_for_wire(each.id, RESPONSES_ID),
                "output": each.text,
            }
            for each in message.results
        ]
    elif isinstance(message, AssistantMessage):
        items = _said(message)
    else:
        items = [{"type": "message", "role": "user", "content": message.text}]
    return b",".join(map(encode, items))


def _said(message: AssistantMessage) -> list[Any]:
    calls = [
        {
            "type": "function_call",
            "call_id": id_for_wire(call.id, RESPONSES_ID),
            "name": name_for_wire(call.name),
            "arguments": object_text(call.arguments),
        }
        for call in message.calls
    ]
    if message.kept is not None and message.kept.wire == WIRE:
        back = _with_reasoning(decode(message.kept.data), calls)
        if back:
            return back
    text = {"type": "output_text", "text": message.text, "annotations": []}
    said = {"type": "message", "role": "assistant", "content": [text]}
    return [said, *calls] if message.text or not calls else calls


def _with_reasoning(items: list[Any], calls: list[Any]) -> list[Any]:
    """Return the items of an answer with its reasoning in place, and with Handrail's form of its calls.

    Reasoning at the end is dropped, because the API refuses reasoning without the item that it led to. Returns [] if the
    items do not have as many calls as the answer.
    """
    back: list[Any] = []
    asked = iter(calls)
    for item in items:
        match item["type"]:
            case "function_call":
                call = next(asked, None)
                if call is None:
                    return []
                back.append(call)
            case "message":
                content = [part for each in item.get("content") or () if (part := _content(each)) is not None]
                if content:
                    back.append({"type": "message", "role": "assistant", "content": content})
            case "reasoning":
                kept = {name: item[name] for name in ("id", "content", "encrypted_content") if item.get(name)}
                back.append({"type": "reasoning", "summary": item.get("summary") or [], **kept})
            case _:
                pass
    while back and back[-1]["type"] == "reasoning":
        back.pop()
    return [] if next(asked, None) is not None else back


def _content(part: Any) -> dict[str, Any] | None:
    """Return a part of an answer's message as it is sent back; None for one that has no text."""
    match part:
        case {"type": "output_text", "text": str(text)}:
            return {"type": "output_text", "text": text, "annotations": []}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "refusal", "refusal": text}
        case _:
            return None


def _whole(endpoint: Endpoint, answer: Any) -> Iterator[ModelPart]:
    index = 0
    for item in answer["output"]:
        match item["type"]:
            case "message":
                for content in item["content"]:
                    yield TextPart(content.get("text") or content.get("refusal") or "")
            case "function_call":
                yield _call(index, item)
                index += 1
            case "reasoning":
                for summary in item.get("summary") or ():
                    yield ThinkingPart(summary.get("text", ""))
            case _:
                pass
    yield from _end(endpoint, answer)


def _end(endpoint: Endpoint, answer: Any) -> Iterator[ModelPart]:
    """Yield the usage and the stop reason of a complete response. Raises `ModelError` for a failed one."""
    if answer.get("status") == "failed":
        raise _failure(endpoint, answer.get("error") or {})
    usage = answer.get("usage")
    if usage:
        details = usage.get("input_tokens_details") or {}
        yield UsagePart(
            Usage(
                count(usage.get("input_tokens")),
                count(usage.get("output_tokens")),
                count(details.get("cached_tokens")),
                0,
                1,
            )
        )
    items = answer.get("output") or []
    yield StopPart(_reason(answer, items), _kept(items))


def _reason(answer: Any, items: list[Any]) -> StopReason:
    if answer.get("status") == "incomplete":
        why = (answer.get("incomplete_details") or {}).get("reason")
        return "refused" if why == "content_filter" else "length"
    if any(item["type"] == "function_call" for item in items):
        return "calls"
    said = [content for item in items if item["type"] == "message" for content in item["content"]]
    return "refused" if any(content.get("type") == "refusal" for content in said) else "done"


def _kept(items: list[Any]) -> Kept | None:
    """Return the items of a response to be sent back, or None if it has no encrypted reasoning."""
    back = [
        {
            name: value
            for name, value in item.items()
            if name != "status" and (name != "id" or item["type"] == "reasoning")
        }
        for item in items
        if item["type"] in ("message", "function_call") or item.get("encrypted_content")
    ]
    return Kept(WIRE, encode(back)) if any(item["type"] == "reasoning" for item in back) else None


class _Pieces:
    """Converts the events of one streamed response to parts."""

    __slots__ = ("_calls", "_endpoint", "_written")

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._calls: dict[str, int] = {}
        self._written: set[str] = set()

    def take(self, event: Any) -> Iterator[ModelPart]:
        kind = event.get("type", "")
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                yield TextPart(event["delta"])
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                yield ThinkingPart(event["delta"])
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                item = event["item"]
                yield _call(self._index(event), item)
                if item.get("arguments"):
                    self._written.add(_id(event))
            case "response.function_call_arguments.delta":
                self._written.add(_id(event))
                yield CallPart(self._index(event), arguments=event["delta"])
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                item = event["item"]
                if _id(event) not in self._calls:
                    yield _call(self._index(event), item)
                elif _id(event) not in self._written:
                    yield CallPart(self._index(event), arguments=arguments_text(item.get("arguments")))
            case "response.completed" | "response.incomplete" | "response.failed":
                yield from _end(self._endpoint, event["response"])
            case "error":
                raise _failure(self._endpoint, event.get("error") or event)
            case _:
                pass

    def _index(self, event: Any) -> int:
        return self._calls.setdefault(_id(event), len(self._calls))


def _call(index: int, item: Any) -> CallPart:
    arguments = arguments_text(item.get("arguments"))
    return CallPart(index, item.get("call_id") or "", item.get("name") or "", arguments)


def _id(event: Any) -> str:
    """Return the key that identifies an item. Servers differ in which fields they send."""
    return str(event.get("item_id") or event.get("item", {}).get("id") or event.get("output_index"))


def _failure(endpoint: Endpoint, error: Any) -> ModelError:
    said = f"it failed in the middle of its answer: {endpoint.quoted(error.get('message') or error)}"
    if error.get("code") == "rate_limit_exceeded":
        return ModelRateLimited(endpoint.model, said)
    return ModelUnavailable(endpoint.model, said)
