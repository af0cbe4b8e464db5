"""`OpenAIModel`: models behind OpenAI's two APIs, on any server that implements one of them.

The chat completions API, `POST /chat/completions`, is in this module; the responses API is in `responses`.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import lru_cache, partial
from typing import Any, Literal

import msgspec

from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    Between,
    Encode,
    Message,
    ModelPart,
    ModelRequest,
    Offered,
    Price,
    Sent,
    Takes,
    ToolMessage,
    Traits,
    UserMessage,
)
from handrail.models import provider_tools, responses
from handrail.models.chat_answers import ChatChunks, read_answer
from handrail.models.grammar import id_for_wire, name_for_wire, object_text
from handrail.models.http import (
    Endpoint,
    body_of,
    encode,
    is_strict,
    text_json,
)
from handrail.models.media import kept_data, said_in_words
from handrail.models.parts import (
    CHAT_TAKES,
    RESPONSES_TAKES,
    RETURNED,
    SOUNDS,
    chat_parts,
    data_url,
    text_with,
)
from handrail.models.providers import FREE, Quirks, address_of, keys_of, refuse_key, row_of
from handrail.models.request_settings import CHAT, merge_fields, settings_fields
from handrail.spelling import checked_arguments

WIRE = "chat"
_MOST_CALLS = 128
"""Maximum number of calls that the API accepts in one message."""
_WITH_PICTURES = frozenset({"images", "content"})
"""The fields of an answer that can contain pictures. If the server does not take them back, the pictures are described."""
_OK = {"role": "assistant", "content": "OK"}
"""The message between a result and a user's message, for servers that require one."""


@checked_arguments
class OpenAIModel:
    """An OpenAI model, or a model on any server that implements one of OpenAI's APIs.

    `OpenAIModel("gpt-5")` uses OpenAI itself, with the key in `OPENAI_API_KEY`; `OPENAI_BASE_URL` names a different
    server. `provider` is the name of a different provider with this API, such as "ollama", "groq" or
    "azure". For any other server pass its `base_url`. `key_variable` names the environment variable with the server's
    key; None sends no key. `options` are further fields of the request, such as `{"reasoning_effort": "low"}`.
    `api` is the API to use: chat completions or responses. `takes` says which attachments the model takes, if that
    is not known from its name. After `silence` seconds without data, a request fails. Raises `DefinitionError` if `api` or
    the provider is unknown, if the address is missing, if it or a header is invalid, or if a key is passed as `api_key`.
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
        takes: Takes | None = None,
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
        wire_takes = CHAT_TAKES if api == "chat" else RESPONSES_TAKES
        taken = row.takes_at(address, name, wire_takes) if takes is None else wire_takes.within(takes)
        self._quirks = quirks = msgspec.structs.replace(row.quirks_at(address), takes=taken)
        if price is None and row.is_own:
            price = FREE
        self.traits = Traits(
            price,
            quirks.native_output if native_output is None else native_output,
            taken,
            frozenset() if api == "chat" else frozenset(provider_tools.RESPONSES),
        )
        self._stream = stream if api == "chat" else responses.stream
        self._wire = f"{WIRE if api == 'chat' else responses.WIRE}:{provider}"
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
        return self._stream(self._endpoint, self._fields, request, self._quirks, self._wire)

    def __repr__(self) -> str:
        return f"OpenAIModel({self.name!r})"


def stream(
    endpoint: Endpoint, fields: Mapping[str, Any], request: ModelRequest, quirks: Quirks, wire: str
) -> AsyncGenerator[ModelPart]:
    """Send one request to the chat completions API, and yield the parts of its answer.

    Raises `ModelError` if the request fails.
    """
    body = _body(fields, request, quirks, wire)
    sound = SOUNDS.get((fields.get("audio") or {}).get("format", ""))
    if not request.stream:
        return endpoint.parts("/chat/completions", body, whole=partial(read_answer, endpoint, wire, sound))
    pieces = ChatChunks(endpoint, wire, sound)
    return endpoint.parts("/chat/completions", body, take=pieces.take, done=pieces.done)


def _body(fields: Mapping[str, Any], request: ModelRequest, quirks: Quirks, wire: str) -> bytes:
    name = f"{wire.partition(':')[2]}:{fields['model']}"
    system = b'{"role":"system","content":%s},' % text_json(request.system) if request.system else b""
    said = (b"[", system, _conversation(request.messages, quirks, wire), b"]")
    more: dict[str, Any] = dict(fields)
    merge_fields(more, settings_fields(name, request, CHAT, quirks.lacks))
    if quirks.seed != "seed" and "seed" in more:
        more[quirks.seed] = more.pop("seed")
    if request.temperature is not None:
        more["temperature"] = request.temperature
    if request.max_tokens is not None:
        more[quirks.limit] = request.max_tokens
    if request.stream:
        more["stream"] = True
        if quirks.stream_options:
            more["stream_options"] = {"include_usage": True}
    if request.must_call and quirks.forced.match(str(fields["model"])):
        more["tool_choice"] = "required"
    if request.output is not None:
        schema = request.output.json_schema
        wanted = {"name": "answer", "schema": schema, "strict": is_strict(schema)}
        more["response_format"] = {"type": "json_schema", "json_schema": wanted}
    if len(request.tools):
        return body_of(more, messages=said, tools=(b"[", request.tools.encoded(_tool), b"]"))
    return body_of(more, messages=said)


def _tool(offered: Offered) -> bytes:
    tool = offered.tool
    function = {"name": tool.name, "description": tool.description, "parameters": tool.json_schema}
    return encode({"type": "function", "function": function})


def _conversation(messages: Sent[Message], quirks: Quirks, wire: str) -> bytearray:
    """Encode a conversation as messages of the API, separated by commas."""
    encode_message = _encoder(quirks, wire)
    return messages.encoded(encode_message, None if quirks.user_after_tool else _between(quirks))


def _encode(quirks: Quirks, wire: str, message: Message) -> bytes:
    said = _dicts(message, quirks, wire)
    if not quirks.user_after_tool and isinstance(message, ToolMessage) and _shows_more(message, quirks):
        said.insert(min(len(message.results), _MOST_CALLS), _OK)
    return b",".join(map(encode, said))


@lru_cache(maxsize=64)
def _encoder(quirks: Quirks, wire: str) -> Encode:
    """Return the function that encodes messages for servers with these quirks.

    Equal arguments give the same function, because encoded messages are cached under it.
    """
    return partial(_encode, quirks, wire)


def _between(quirks: Quirks) -> Between:
    """Return the function that separates messages on a server where no user's message may follow a result directly."""

    def between(before: Message, after: Message) -> bytes:
        ends = isinstance(before, ToolMessage) and not _shows_more(before, quirks)
        return b",%s," % encode(_OK) if ends and isinstance(after, UserMessage) else b","

    return between


def _shows_more(message: ToolMessage, quirks: Quirks) -> bool:
    """Return whether further results or attachments follow these results in a user message."""
    shown = (quirks.takes.sends(found) for each in message.results for found in each.attachments)
    return len(message.results) > _MOST_CALLS or any(shown)


def _dicts(message: Message, quirks: Quirks, wire: str) -> list[dict[str, Any]]:
    """Convert a message to messages of the API. There is at least one."""
    if isinstance(message, ToolMessage):
        return _results(message, quirks)
    if isinstance(message, AssistantMessage):
        return [_said(message, quirks, wire)]
    if message.attachments:
        return [{"role": "user", "content": chat_parts(message.text, message.attachments, quirks.takes)}]
    return [{"role": "user", "content": message.text}]


def _said(message: AssistantMessage, quirks: Quirks, wire: str) -> dict[str, Any]:
    kept = kept_data(message, wire, data_url)
    back: dict[str, Any] = {} if kept is None else kept["message"]
    wanted = back.keys() if quirks.sent_back is None else quirks.sent_back
    is_shown = kept is not None and back.keys() & _WITH_PICTURES <= set(wanted)
    text = message.text if is_shown else said_in_words(message, quirks.takes)
    said: dict[str, Any] = {"role": "assistant", "content": text or None}
    if message.calls:
        said["tool_calls"] = [
            {
                "id": id_for_wire(call.id, quirks.ids),
                "type": "function",
                "function": {"name": name_for_wire(call.name), "arguments": object_text(call.arguments)},
            }
            for call in message.calls[:_MOST_CALLS]
        ]
    elif not text:
        said["content"] = ""
    if kept is not None:
        said |= {name: value for name, value in back.items() if name in wanted}
        for call, more in zip(said.get("tool_calls", ()), kept["calls"], strict=False):
            call |= more
    if message.calls and quirks.thought_with_calls:
        # the server requires the field even if its own models have written no thinking to send back
        said.setdefault(quirks.thought_with_calls, " ")
    return said


def _results(message: ToolMessage, quirks: Quirks) -> list[dict[str, Any]]:
    """Convert the results of a turn.

    The results of calls beyond the API's limit follow in one user message. Each attachment that the model takes
    follows in a user message of its own.
    """
    said: list[dict[str, Any]] = [
        {
            "role": "tool",
            "tool_call_id": id_for_wire(each.id, quirks.ids),
            "content": text_with(each.text, each.attachments, quirks.takes)
            if each.attachments
            else each.text,
        }
        for each in message.results[:_MOST_CALLS]
    ]
    more = message.results[_MOST_CALLS:]
    if more:
        texts = "\n\n".join(f"{each.name}: {each.text}" for each in more)
        said.append(
            {"role": "user", "content": f"Results of the {len(more)} further calls of this turn:\n\n{texts}"}
        )
    said += [
        {"role": "user", "content": chat_parts(RETURNED.format(each.name), [found], quirks.takes)}
        for each in message.results
        for found in each.attachments
        if quirks.takes.sends(found)
    ]
    return said
