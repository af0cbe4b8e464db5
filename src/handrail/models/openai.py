"""`OpenAIModel`: OpenAI's two APIs, and every server that implements one of them.

The chat completions API, `POST /chat/completions`, is here; the responses API is in `responses`.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Literal

from handrail.errors import DefinitionError, ModelError
from handrail.messages import (
    AssistantMessage,
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
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
)
from handrail.models import ModelUnavailable, responses
from handrail.models.grammar import arguments_text, id_for_wire, name_for_wire, object_text
from handrail.models.http import (
    Endpoint,
    body_of,
    count,
    decode,
    encode,
    is_strict,
    text_json,
)
from handrail.models.providers import FREE, Quirks, address_of, keys_of, refuse_key, row_of

WIRE = "chat"
_MOST_CALLS = 128
"""Maximum number of calls that the API accepts in one message."""
_BETWEEN = "OK"
"""Text of the message between a result and a user's message, for servers that require one."""
_GROWING = frozenset({"text", "summary", "data", "signature"})
"""Fields of reasoning details whose pieces are joined."""


class OpenAIModel:
    """An OpenAI model, or a model on any server that implements one of OpenAI's APIs.

    `OpenAIModel("gpt-5")` uses OpenAI itself, with the key in `OPENAI_API_KEY`; `OPENAI_BASE_URL` names a different
    server. `provider` is one of the providers in the table that speak this wire, such as "ollama", "groq" or
    "azure". For any other server pass its `base_url`. `key_variable` names the environment variable with the server's
    key; None sends no key. `options` are further fields of the request, such as `{"reasoning_effort": "low"}`.
    """

    def __init__(
        self,
        name: str,
        *,
        api: Literal["chat", "responses"] = "chat",
        provider: str = "openai",
        base_url: str | None = None,
        key_variable: str | None = "",
        key_header: str = "",
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        native_output: bool | None = None,
        price: Price | None = None,
        silence: float = 300.0,
        api_key: None = None,
    ) -> None:
        row = row_of(provider, "chat")
        keys = keys_of(row, key_variable, key_header)
        refuse_key(api_key, keys)
        if api not in ("chat", "responses"):
            raise DefinitionError(f"OpenAIModel has no API {api!r}. Pass 'chat' or 'responses'.")
        self.name = f"{provider}:{name}"
        address = address_of(self.name, row, base_url)
        self._quirks = quirks = row.quirks_at(address)
        if price is None and row.is_own:
            price = FREE
        self.traits = Traits(price, quirks.native_output if native_output is None else native_output)
        self._stream = stream if api == "chat" else responses.stream
        self._endpoint = Endpoint(
            self.name,
            address,
            keys=keys,
            key_needed=row.needs_key(address),
            headers={**row.find_headers(), **(headers or {})},
            silence=silence,
        )
        self._fields = {"model": name, **(options or {})}

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        return self._stream(self._endpoint, self._fields, request, self._quirks)

    def __repr__(self) -> str:
        return f"OpenAIModel({self.name!r})"


_STOPS: dict[str, StopReason] = {
    "stop": "done",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "refused",
}


def stream(
    endpoint: Endpoint, fields: Mapping[str, Any], request: ModelRequest, quirks: Quirks
) -> AsyncGenerator[ModelPart]:
    """Send one request and yield the parts of its answer."""
    body = _body(fields, request, quirks)
    if not request.stream:
        return endpoint.parts("/chat/completions", body, whole=partial(_whole, quirks.sent_back))
    return endpoint.parts("/chat/completions", body, take=_Pieces(endpoint, quirks.sent_back).take)


def _body(fields: Mapping[str, Any], request: ModelRequest, quirks: Quirks) -> bytes:
    said = _conversation(request.messages, quirks)
    if request.system:
        said = b'{"role":"system","content":%s},%s' % (text_json(request.system), said)
    more: dict[str, Any] = dict(fields)
    if request.temperature is not None:
        more["temperature"] = request.temperature
    if request.max_tokens is not None:
        more[quirks.limit] = request.max_tokens
    if request.stream:
        more["stream"] = True
        if quirks.stream_options:
            more["stream_options"] = {"include_usage": True}
    if request.must_call:
        more["tool_choice"] = "required"
    if request.output is not None:
        schema = request.output.json_schema
        wanted = {"name": "answer", "schema": schema, "strict": is_strict(schema)}
        more["response_format"] = {"type": "json_schema", "json_schema": wanted}
    if len(request.tools):
        return body_of(more, messages=b"[%s]" % said, tools=b"[%s]" % request.tools.encoded(_tool))
    return body_of(more, messages=b"[%s]" % said)


def _tool(offered: Offered) -> bytes:
    tool = offered.tool
    function = {"name": tool.name, "description": tool.description, "parameters": tool.json_schema}
    return encode({"type": "function", "function": function})


def _conversation(messages: Sent[Message], quirks: Quirks) -> bytes:
    """Encode a conversation, separated by commas. It is encoded once, unless the server restricts who may follow whom."""
    if quirks.user_after_tool:
        return messages.encoded(_encoder(quirks))
    said: list[dict[str, Any]] = []
    for each in (each for message in messages for each in _dicts(message, quirks)):
        if said and said[-1]["role"] == "tool" and each["role"] == "user":
            said.append({"role": "assistant", "content": _BETWEEN})
        said.append(each)
    return b",".join(map(encode, said))


def _encode(quirks: Quirks, message: Message) -> bytes:
    return b",".join(map(encode, _dicts(message, quirks)))


@lru_cache(maxsize=64)
def _encoder(quirks: Quirks) -> Encode:
    """Return the function that encodes messages for servers with these quirks. It is always the same one."""
    return partial(_encode, quirks)


_message = _encoder(Quirks())


def _dicts(message: Message, quirks: Quirks) -> list[dict[str, Any]]:
    """Convert a message to at least one message of the API."""
    if isinstance(message, ToolMessage):
        return _results(message, quirks)
    if isinstance(message, AssistantMessage):
        said: dict[str, Any] = {"role": "assistant", "content": message.text or None}
        if message.calls:
            said["tool_calls"] = [
                {
                    "id": id_for_wire(call.id, quirks.ids),
                    "type": "function",
                    "function": {
                        "name": name_for_wire(call.name),
                        "arguments": object_text(call.arguments),
                    },
                }
                for call in message.calls[:_MOST_CALLS]
            ]
            said |= _kept_fields(message.kept, quirks.sent_back)
        elif not message.text:
            said["content"] = ""
        return [said]
    return [{"role": "user", "content": message.text}]


def _kept_fields(kept: Kept | None, wanted: tuple[str, ...]) -> dict[str, Any]:
    if kept is None or kept.wire != WIRE or not wanted:
        return {}
    return {name: value for name, value in decode(kept.data).items() if name in wanted}


def _results(message: ToolMessage, quirks: Quirks) -> list[dict[str, Any]]:
    """Convert the results of a turn. Those of calls beyond the API's limit follow in a user message."""
    said: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": id_for_wire(each.id, quirks.ids), "content": each.text}
        for each in message.results[:_MOST_CALLS]
    ]
    more = message.results[_MOST_CALLS:]
    if more:
        texts = "\n\n".join(f"{each.name}: {each.text}" for each in more)
        said.append(
            {"role": "user", "content": f"Results of the {len(more)} further calls of this turn:\n\n{texts}"}
        )
    return said


def _whole(sent_back: tuple[str, ...], answer: Any) -> Iterator[ModelPart]:
    choice = answer["choices"][0]
    said = choice["message"]
    thoughts = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(thoughts, str) and thoughts:
        yield ThinkingPart(thoughts)
    text = _text(said.get("content")) or said.get("refusal")
    if text:
        yield TextPart(text)
    for index, call in enumerate(said.get("tool_calls") or ()):
        function = call["function"]
        yield CallPart(
            index,
            call.get("id") or "",
            function.get("name") or "",
            arguments_text(function.get("arguments")),
        )
    if answer.get("usage"):
        yield UsagePart(_usage(answer["usage"]))
    reason = _STOPS.get(choice.get("finish_reason") or "stop", "done")
    kept = {name: said[name] for name in sent_back if said.get(name)}
    yield StopPart("refused" if said.get("refusal") else reason, _kept(kept))


def _kept(fields: Mapping[str, Any]) -> Kept | None:
    return Kept(WIRE, encode(fields)) if fields else None


class _Pieces:
    """Converts the chunks of one streamed answer to parts."""

    __slots__ = ("_at", "_calls", "_endpoint", "_kept", "_refused", "_sent_back")

    def __init__(self, endpoint: Endpoint, sent_back: tuple[str, ...] = ()) -> None:
        self._endpoint = endpoint
        self._sent_back = sent_back
        self._kept: dict[str, Any] = {}
        """The fields of the answer so far that must be sent back with it."""
        self._calls: list[tuple[str, str]] = []
        """The id and name of each call so far."""
        self._at: dict[Any, int] = {}
        """Position in `_calls` of the call that arrives under each of the server's indexes."""
        self._refused = False

    def take(self, chunk: Any) -> Iterator[ModelPart]:
        error = chunk.get("error")
        if error:
            raise _failure(self._endpoint, error)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thoughts = delta.get("reasoning_content") or delta.get("reasoning")
            if isinstance(thoughts, str) and thoughts:
                yield ThinkingPart(thoughts)
            for name in self._sent_back:
                if delta.get(name):
                    self._kept[name] = _joined(self._kept.get(name), delta[name])
            self._refused = self._refused or bool(delta.get("refusal"))
            text = _text(delta.get("content")) or delta.get("refusal")
            if text:
                yield TextPart(text)
            for call in delta.get("tool_calls") or ():
                yield self._call(call)
            if choice.get("finish_reason"):
                reason = _STOPS.get(choice["finish_reason"], "done")
                yield StopPart("refused" if self._refused else reason, _kept(self._kept))
        if chunk.get("usage"):
            yield UsagePart(_usage(chunk["usage"]))

    def _call(self, call: Any) -> CallPart:
        """Convert a fragment of a call. Some servers omit the index, or use the same one for all calls."""
        function = call.get("function") or {}
        index, id, name = call.get("index"), call.get("id") or "", function.get("name") or ""
        number = self._at.get(index)
        begins = number is None or (name and (index is None or (id and id != self._calls[number][0])))
        if begins:
            number = self._at[index] = len(self._calls)
            self._calls.append((id, name))
        elif self._calls[number or 0] == (id, name):
            name = ""  # the server repeats the name with every fragment
        return CallPart(number or 0, id, name, arguments_text(function.get("arguments")))


def _joined(before: Any, piece: Any) -> Any:
    """Join the pieces of a field: texts one after the other, and lists item by item, by the items' `index` and `type`."""
    if before is None or type(before) is not type(piece):
        return piece
    if isinstance(piece, str):
        return before + piece
    if not isinstance(piece, list):
        return piece
    items = list(before)
    for item in piece:
        last = items[-1] if items else None
        if isinstance(item, dict) and isinstance(last, dict) and _same_item(last, item):
            items[-1] = {
                **last,
                **{
                    name: _joined(last.get(name), new) if name in _GROWING else new
                    for name, new in item.items()
                },
            }
        else:
            items.append(item)
    return items


def _same_item(last: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    return "index" in item and (last.get("index"), last.get("type")) == (item["index"], item.get("type"))


def _text(content: Any) -> str:
    """Return the text of a message's content, which some servers send as a list of parts."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content or ""


def _failure(endpoint: Endpoint, error: Any) -> ModelError:
    said = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    return ModelUnavailable(endpoint.model, f"it failed in the middle of its answer: {endpoint.quoted(said)}")


def _usage(usage: Any) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        count(usage.get("prompt_tokens")),
        count(usage.get("completion_tokens")),
        count(details.get("cached_tokens")),
        0,
        1,
    )
