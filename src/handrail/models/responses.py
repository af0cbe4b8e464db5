"""OpenAI's responses API, `POST /responses`. Requests tell the provider to store nothing, unless the model's `options` say otherwise.

A model that finds tools by itself is sent none of the searched tools. Its searches are `tool_search_call` items, which Handrail runs
as calls of the search tool, and their results have the definitions of the tools. The API puts each tool that was loaded like this into
a namespace of its name, and refuses a request with a call of it that lacks the namespace.
"""


# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import Any

from handrail.messages import (
    AssistantMessage,
    AttachmentPart,
    CallAnswered,
    CallAsked,
    CallPart,
    Kept,
    Message,
    ModelPart,
    ModelRequest,
    Offered,
    Sent,
    StopPart,
    StopReason,
    Takes,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Usage,
    UsagePart,
)
from handrail.models.blocks import decode, emptied, encode, is_search, with_calls, without
from handrail.models.grammar import (
    RESPONSES_ID,
    arguments_text,
    id_for_wire,
    name_for_wire,
    object_text,
    raw_object,
)
from handrail.models.http import (
    Endpoint,
    body_of,
    count,
    encoder,
    failure_in_answer,
    is_strict,
    names_in,
    text_json,
)
from handrail.models.media import (
    PLACE,
    RESPONSES_TAKES,
    attachment_of,
    kept_data,
    responses_parts,
    said_in_words,
)
from handrail.models.providers import Quirks
from handrail.models.request_settings import (
    RESPONSES,
    RESPONSES_TOOLS,
    joined_tools,
    limit_fields,
    merge_fields,
    settings_fields,
    write_tools,
)

WIRE = "responses"
_OF_CALLS = frozenset({"call_id", "name", "arguments"})
"""Fields of a call whose values the conversation already holds. They are null in the items that are kept."""

_FORMATS = {"svg": "image/svg+xml"}
"""The media types of the formats that can't be recognised from the first bytes."""
_PLAIN = frozenset({"type", "id", "role", "content", "status"})


def stream(
    endpoint: Endpoint, fields: Mapping[str, Any], request: ModelRequest, quirks: Quirks, wire: str
) -> AsyncGenerator[ModelPart]:
    """Send one request to the responses API, and yield the parts of its answer.

    Raises `ModelError` if the request fails.
    """
    searcher = request.searcher if quirks.finds_tools.match(fields["model"]) else ""
    body = _body(fields, request, wire, quirks.takes, searcher)
    if not request.stream:
        return endpoint.parts("/responses", body, whole=partial(_whole, endpoint, wire, searcher))
    return endpoint.parts("/responses", body, take=_Pieces(endpoint, wire, searcher).take)


def _body(
    fields: Mapping[str, Any],
    request: ModelRequest,
    wire: str,
    takes: Takes = RESPONSES_TAKES,
    searcher: str = "",
) -> bytes:
    """Return the body of a request. `searcher` is the name of the search tool, if the model finds tools by itself."""
    more: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"], **fields}
    name = f"{wire.partition(':')[2]}:{fields['model']}"
    merge_fields(more, settings_fields(name, request, RESPONSES))
    more |= limit_fields(request, "max_output_tokens")
    if request.stream:
        more["stream"] = True
    if request.must_call:
        more["tool_choice"] = "required"
    if request.output is not None:
        schema = request.output.json_schema
        wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": is_strict(schema)}
        merge_fields(more, {"text": {"format": wanted}})
    said = request.messages
    items = encoder(
        _items, takes, wire, searcher, _unplaced(said, wire, searcher) if searcher else frozenset()
    )
    written: dict[str, tuple[bytes | bytearray, ...]] = {"input": (b"[", said.encoded(items), b"]")}
    if request.system:
        written["instructions"] = (text_json(request.system),)
    own = write_tools(name, request, RESPONSES_TOOLS)
    if len(request.tools) or own:
        tools = request.tools
        offered = (
            tools.encoded(encoder(_unsearched, searcher), _between) if searcher else tools.encoded(_tool)
        )
        written["tools"] = joined_tools(own, offered)
    return body_of(more, **written)


def _tool(offered: Offered) -> bytes:
    tool = offered.tool
    return encode(_function(tool.name, tool.description, tool.json_schema))


def _function(name: str, description: str, parameters: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": False,
    }


def _unsearched(searcher: str, offered: Offered) -> bytes:
    """Encode a tool for a model that finds tools by itself. Those that it finds are left out."""
    tool = offered.tool
    if tool.name != searcher:
        return b"" if offered.searched else _tool(offered)
    fields = {"type": "tool_search", "execution": "client"}
    return encode({**fields, "description": tool.description, "parameters": tool.json_schema})


def _between(before: Offered, after: Offered) -> bytes:
    return b"" if after.searched else b","  # the search tool comes before all that it finds


def _unplaced(messages: Sent[Message], wire: str, searcher: str) -> frozenset[str]:
    """Return the names of loaded tools that some calls name without a namespace.

    The calls are another provider's, or were made when the tool was listed. There are usually none.
    """
    return names_in(messages, _loaded) & names_in(messages, encoder(_called, wire, searcher))


def _loaded(message: Message) -> bytes:
    """Return the names of the tools that a message loads, separated by commas."""
    results = message.results if isinstance(message, ToolMessage) else ()
    return ",".join(name for each in results if each.definitions for name in each.shows).encode()


def _called(wire: str, searcher: str, message: Message) -> bytes:
    """Return the names that a message calls without a namespace, separated by commas."""
    if not isinstance(message, AssistantMessage) or not message.calls:
        return b""
    said = _said(message, Takes(), wire, searcher, frozenset())
    return ",".join(item["name"] for item in said if "name" in item and "namespace" not in item).encode()


def _items(takes: Takes, wire: str, searcher: str, unplaced: frozenset[str], message: Message) -> bytes:
    """Convert a message to at least one input item, as JSON separated by commas."""
    if isinstance(message, ToolMessage):
        items: list[Any] = [_result(each, takes, searcher) for each in message.results]
        items += [  # the result of a search can't say why it has no tools
            {"type": "message", "role": "user", "content": each.text}
            for each in message.results
            if each.name == searcher and not each.definitions
        ]
    elif isinstance(message, AssistantMessage):
        items = _said(message, takes, wire, searcher, unplaced)
    else:
        attached = message.attachments
        content = responses_parts(message.text, attached, takes) if attached else message.text
        items = [{"type": "message", "role": "user", "content": content}]
    return b",".join(map(encode, items))


def _result(result: CallAnswered, takes: Takes, searcher: str) -> dict[str, Any]:
    id = id_for_wire(result.id, RESPONSES_ID)
    if searcher and result.name == searcher:
        found = [{**_function(**each), "defer_loading": True} for each in decode(result.definitions or "[]")]
        fields = {"type": "tool_search_output", "call_id": id, "execution": "client", "status": "completed"}
        return {**fields, "tools": found}
    attached = result.attachments
    output = responses_parts(result.text, attached, takes) if attached else result.text
    return {"type": "function_call_output", "call_id": id, "output": output}


def _call_item(call: CallAsked, searcher: str, unplaced: frozenset[str]) -> dict[str, Any]:
    id, name = id_for_wire(call.id, RESPONSES_ID), name_for_wire(call.name)
    if searcher and call.name == searcher:
        fields = {"type": "tool_search_call", "call_id": id, "execution": "client", "status": "completed"}
        return {**fields, "arguments": raw_object(call.arguments)}
    fields = {"type": "function_call", "call_id": id, "name": name, "arguments": object_text(call.arguments)}
    return {**fields, "namespace": name} if name in unplaced else fields


def _said(
    message: AssistantMessage, takes: Takes, wire: str, searcher: str, unplaced: frozenset[str]
) -> list[Any]:
    calls = [_call_item(call, searcher, unplaced) for call in message.calls]
    kept = kept_data(message, wire)
    if kept is not None:
        back = with_calls(kept, calls, _is_call)
        if not searcher:  # without tool search, there are no such namespaces
            back = [without(item, ("namespace",)) if _is_found(item) else item for item in back]
        while back and back[-1]["type"] == "reasoning":
            back.pop()  # the API refuses reasoning without the item that it led to
        if back:
            return back
    words = said_in_words(message, takes)
    text = {"type": "output_text", "text": words, "annotations": []}
    said = {"type": "message", "role": "assistant", "content": [text]}
    return [said, *calls] if words or not calls else calls


def _is_call(item: Mapping[str, Any]) -> bool:
    return item["type"] == "function_call" or is_search(item)


def _is_found(item: Mapping[str, Any]) -> bool:
    """Return whether an item is a call of a tool that a search has loaded."""
    return item["type"] == "function_call" and item.get("namespace") == item["name"]


def _whole(endpoint: Endpoint, wire: str, searcher: str, answer: Any) -> Iterator[ModelPart]:
    index = 0
    for item in answer["output"]:
        match item["type"]:
            case "message":
                for content in item["content"]:
                    yield TextPart(content.get("text") or content.get("refusal") or "")
            case _ if _is_call(item):
                yield _call(index, item, searcher)
                index += 1
            case "reasoning":
                for thought in item.get("summary") or item.get("content") or ():
                    yield ThinkingPart(thought.get("text", ""))
            case "image_generation_call" if item.get("result"):
                yield _picture(endpoint, item)
            case _:
                pass
    yield from _end(endpoint, wire, answer, answer["output"])


def _end(endpoint: Endpoint, wire: str, answer: Any, items: list[Any]) -> Iterator[ModelPart]:
    """Yield the usage and the stop reason of a response that has ended. Raises `ModelError`, after the usage, if it failed."""
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
                sum(map(_is_search, items)),
            )
        )
    if answer.get("status") == "failed":
        raise failure_in_answer(endpoint, answer.get("error") or {})
    yield StopPart(_reason(answer, items), _kept(wire, items))


def _is_search(item: Any) -> bool:
    """Return whether an item is a web search that is charged for. Opening a page and searching in it are free."""
    action = item.get("action")
    return item["type"] == "web_search_call" and (
        not isinstance(action, dict) or action.get("type") == "search"
    )


def _reason(answer: Any, items: list[Any]) -> StopReason:
    if answer.get("status") == "incomplete":
        why = (answer.get("incomplete_details") or {}).get("reason")
        return "refused" if why == "content_filter" else "length"
    if any(map(_is_call, items)):
        return "calls"
    said = [content for item in items if item["type"] == "message" for content in item["content"]]
    return "refused" if any(content.get("type") == "refusal" for content in said) else "done"


def _kept(wire: str, items: list[Any]) -> Kept | None:
    """Return the items of a response that later requests send back; None if they are at most one text followed by calls, without further fields.

    Reasoning is sent back only if it is encrypted, because by default the provider stores nothing. If some reasoning can't be
    sent back, the other items are sent without their ids.
    """
    if all(map(_is_plain, items)) and all(item["type"] != "message" for item in items[1:]):
        return None
    lost = any(item["type"] == "reasoning" and not _is_readable(item) for item in items)
    back = [_without_contents(item) for item in items if _is_readable(item)]
    if lost:
        back = [without(item, ("id",)) for item in back]
    return Kept(wire, encode(back), has_arguments=False)


def _without_contents(item: Any) -> Any:
    """Return an item without what the conversation holds elsewhere: the fields of a call, or the bytes of a picture."""
    match item:
        case _ if _is_call(item):
            return emptied(item, _OF_CALLS)
        case {"type": "image_generation_call", "result": str()}:
            return {**item, "result": PLACE}
        case _:
            return item


def _is_plain(item: Any) -> bool:
    """Return whether the conversation contains everything in an item, so the item need not be kept."""
    match item["type"]:
        case "message":
            said = item["content"]
            plain = len(said) == 1 and said[0].get("text") and not said[0].get("annotations")
            return item.keys() <= _PLAIN and bool(plain)
        case "function_call":
            return item.keys() <= _PLAIN | _OF_CALLS
        case _:
            return False


def _is_readable(item: Any) -> bool:
    """Return whether an item can be sent back: reasoning must be encrypted, and a message must have valid content."""
    match item["type"]:
        case "reasoning":
            sealed, summary = item.get("encrypted_content"), item.get("summary")
            return isinstance(sealed, str) and bool(sealed) and isinstance(summary, list)
        case "message":
            return bool(item["content"]) and all(_is_said(part) for part in item["content"])
        case _:
            return True


def _is_said(part: Any) -> bool:
    match part:
        case {"type": "output_text", "text": str()} | {"type": "refusal", "refusal": str()}:
            return True
        case _:
            return False


class _Pieces:
    """Converts the events of one streamed response to parts."""

    __slots__ = ("_calls", "_endpoint", "_items", "_pictures", "_searcher", "_wire", "_written")

    def __init__(self, endpoint: Endpoint, wire: str, searcher: str) -> None:
        self._endpoint = endpoint
        self._wire = wire
        self._searcher = searcher
        self._items: list[Any] = []
        """The complete items so far. They are used if the last event does not repeat them."""
        self._calls: dict[str, int] = {}
        self._written: set[str] = set()
        self._pictures = 0

    def take(self, event: Any) -> Iterator[ModelPart]:
        kind = event.get("type", "")
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                yield TextPart(event["delta"])
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                yield ThinkingPart(event["delta"])
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                item = event["item"]
                yield _call(self._index(event), item, self._searcher)
                if item.get("arguments"):
                    self._written.add(_id(event))
            case "response.function_call_arguments.delta":
                self._written.add(_id(event))
                yield CallPart(self._index(event), arguments=event["delta"])
            case "response.output_item.done" if not _is_call(event["item"]):
                self._items.append(event["item"])
                yield from self._new_pictures(self._items)
            case "response.output_item.done":
                item = event["item"]
                self._items.append(item)
                if _id(event) not in self._calls:
                    yield _call(self._index(event), item, self._searcher)
                elif _id(event) not in self._written:
                    yield CallPart(self._index(event), arguments=arguments_text(item.get("arguments")))
            case "response.completed" | "response.incomplete" | "response.failed":
                response = event["response"]
                items = response.get("output") or self._items
                yield from self._new_pictures(items)
                yield from _end(self._endpoint, self._wire, response, items)
            case "error":
                raise failure_in_answer(self._endpoint, event.get("error") or event)
            case _:
                pass

    def _new_pictures(self, items: list[Any]) -> Iterator[ModelPart]:
        """Yield the pictures among the items that have not been yielded yet."""
        pictures = [item for item in items if item["type"] == "image_generation_call" and item.get("result")]
        for item in pictures[self._pictures :]:
            self._pictures += 1
            yield _picture(self._endpoint, item)

    def _index(self, event: Any) -> int:
        return self._calls.setdefault(_id(event), len(self._calls))


def _call(index: int, item: Any, searcher: str) -> CallPart:
    arguments, name = arguments_text(item.get("arguments")), searcher if is_search(item) else item.get("name")
    return CallPart(index, item.get("call_id") or "", name or "", arguments)


def _picture(endpoint: Endpoint, item: Any) -> AttachmentPart:
    kind = item.get("output_format")
    return AttachmentPart(attachment_of(endpoint.model, item["result"], _FORMATS.get(kind)))


def _id(event: Any) -> str:
    """Return an identifier of an event's item. Servers differ in the fields that they send."""
    return str(event.get("item_id") or event.get("item", {}).get("id") or event.get("output_index"))
