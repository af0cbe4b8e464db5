"""OpenAI's responses API for the embedded model's server: converts requests to chat completions, and formats answers.

Nothing is stored, so a request must contain its whole conversation. Reasoning items are ignored.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

from handrail.clock import SYSTEM_CLOCK
from handrail.errors import ModelError
from handrail.ids import random_id
from handrail.messages import CallPart, Model, ModelRequest, StopPart, TextPart, Usage, UsagePart


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Convert the body of a responses API request to the body of a chat completions request.

    Raises `LookupError`, `TypeError` or `AttributeError` if the body is malformed.
    """
    given: Any = body.get("input")
    said: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for item in said:
        _add(item, messages)
    chat: dict[str, Any] = {"model": body.get("model"), "messages": messages, "stream": body.get("stream")}
    if body.get("temperature") is not None:
        chat["temperature"] = body["temperature"]
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    if body.get("tools"):
        chat["tools"] = [{"type": tool.get("type"), "function": tool} for tool in body["tools"]]
    choice: Any = body.get("tool_choice")
    if isinstance(choice, dict):
        named = cast("dict[str, Any]", choice)
        chat["tool_choice"] = {"type": named.get("type"), "function": named}
    elif choice is not None:
        chat["tool_choice"] = choice
    text: Any = body.get("text")
    wanted: Any = (text and text.get("format")) or {"type": "text"}
    chat["response_format"] = {"type": wanted["type"], "json_schema": wanted}
    return chat


def _add(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add an item of the input to the messages of a chat. Raises `LookupError` for an unknown type or a missing field."""
    match item.get("type", "message"):
        case "message":
            content: Any = item["content"]
            if not isinstance(content, str):
                content = [_part(part) for part in content]
            messages.append({"role": item["role"], "content": content})
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output: Any = item["output"]
            content = output if isinstance(output, str) else [_part(part) for part in output]
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":
            pass
        case kind:
            raise LookupError(f"items of the type {kind!r} are not supported")


def _part(part: dict[str, Any]) -> dict[str, Any]:
    is_text = part["type"] in ("input_text", "output_text", "refusal")
    text = part.get("text") or part.get("refusal") or ""
    return {"type": "text", "text": text} if is_text else {"type": part["type"]}


class ResponsesAnswer:
    """One answer from the model, in the format of the responses API."""

    def __init__(self, name: str, model: Model, request: ModelRequest, body: dict[str, Any]) -> None:
        self.request = request
        self._model = model
        self._head: dict[str, Any] = {
            "id": f"resp_{random_id()}",
            "object": "response",
            "created_at": int(SYSTEM_CLOCK.now().timestamp()),
            "model": name,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "temperature": body.get("temperature") or 0,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": 1,
            "truncation": "disabled",
            "usage": None,
        }
        self._items: list[dict[str, Any]] = []
        self._calls: dict[int, int] = {}
        self._usage = Usage()
        self._stop = "done"
        self._number = 0
        """The `sequence_number` of the next event."""

    async def whole(self) -> dict[str, Any]:
        async for _ in self._changes():
            pass
        return self._response()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream. If the model fails, the last event says so."""
        begun: dict[str, Any] = {**self._head, "status": "in_progress", "output": []}
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)
        try:
            async for number, piece, is_new in self._changes():
                item = self._items[number]
                where = {"item_id": item["id"], "output_index": number}
                if item["type"] == "message":
                    if is_new:
                        yield self._event(
                            "output_item.added", output_index=number, item={**item, "content": []}
                        )
                        part = _text("")
                        yield self._event("content_part.added", **where, content_index=0, part=part)
                    yield self._event("output_text.delta", **where, content_index=0, delta=piece, logprobs=[])
                else:
                    if is_new:
                        yield self._event(
                            "output_item.added", output_index=number, item={**item, "arguments": ""}
                        )
                    if piece:
                        yield self._event("function_call_arguments.delta", **where, delta=piece)
        except ModelError as error:
            problem = {"code": "server_error", "message": error.problem}
            yield self._event("failed", response={**begun, "status": "failed", "error": problem})
            return
        answer = self._response()
        for number, item in enumerate(self._items):
            where = {"item_id": item["id"], "output_index": number}
            if item["type"] == "message":
                [part] = item["content"]
                yield self._event(
                    "output_text.done", **where, content_index=0, text=part["text"], logprobs=[]
                )
                yield self._event("content_part.done", **where, content_index=0, part=part)
            else:
                arguments = {"name": item["name"], "arguments": item["arguments"]}
                yield self._event("function_call_arguments.done", **where, **arguments)
            yield self._event("output_item.done", output_index=number, item=item)
        yield self._event(answer["status"], response=answer)

    async def _changes(self) -> AsyncGenerator[tuple[int, str, bool]]:
        """Yield the index of each item that grew, the text that was added, and whether the item is new."""
        parts = self._model.stream(self.request)
        try:
            async for part in parts:
                match part:
                    case TextPart(piece):
                        is_new = not self._items or self._items[-1]["type"] != "message"
                        if is_new:
                            self._open("message", role="assistant", content=[_text("")])
                        cast("Any", self._items[-1])["content"][0]["text"] += piece
                        yield len(self._items) - 1, piece, is_new
                    case CallPart():
                        is_new = part.index not in self._calls
                        if is_new:
                            self._calls[part.index] = len(self._items)
                            id = part.id or f"call_{random_id()}"
                            self._open("function_call", call_id=id, name=part.name, arguments="")
                        number = self._calls[part.index]
                        self._items[number]["arguments"] += part.arguments
                        yield number, part.arguments, is_new
                    case UsagePart(usage):
                        self._usage = usage
                    case StopPart(reason):
                        self._stop = reason
                    case _:
                        pass
        finally:
            await parts.aclose()

    def _open(self, kind: str, **fields: Any) -> None:
        self._items.append({"id": f"item_{random_id()}", "type": kind, "status": "in_progress", **fields})

    def _response(self) -> dict[str, Any]:
        """Return the whole response, and mark its items as ended."""
        usage, is_cut = self._usage, self._stop in ("length", "refused")
        why = "max_output_tokens" if self._stop == "length" else "content_filter"
        for item in self._items:
            item["status"] = "completed"
        if is_cut and self._items:
            self._items[-1]["status"] = "incomplete"
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": why} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.input,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.tokens,
            },
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%s\ndata: %s\n\n" % (kind.encode(), json.dumps(data).encode())


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
