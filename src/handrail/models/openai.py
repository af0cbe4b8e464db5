"""`OpenAIModel`: models behind OpenAI's two APIs, on any server that implements one of them.

The chat completions API, `POST /chat/completions`, is in this module; the responses API is in `responses`.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from handrail.errors import DefinitionError
from handrail.messages import (
    AssistantMessage,
    AttachmentPart,
    Between,
    CallPart,
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
from handrail.models import responses
from handrail.models.blocks import encode, is_block, joined, without
from handrail.models.grammar import arguments_text, id_for_wire, name_for_wire, object_text
from handrail.models.http import (
    Endpoint,
    body_of,
    count,
    encoder,
    failure_in_answer,
    is_strict,
    text_json,
)
from handrail.models.media import (
    CHAT_TAKES,
    PLACE,
    RESPONSES_TAKES,
    RETURNED,
    SOUNDS,
    attachment_at,
    attachment_of,
    chat_parts,
    data_url,
    kept_data,
    said_in_words,
    text_with,
)
from handrail.models.providers import FREE, Quirks, server_of
from handrail.models.request_settings import (
    CHAT,
    RESPONSES_TOOLS,
    limit_fields,
    merge_fields,
    settings_fields,
)
from handrail.text.spelling import checked_arguments

_OWN = frozenset({"role", "content", "refusal", "tool_calls", "function_call", "annotations", "audio"})
"""The fields of an answer that the API itself defines. A server that adds others may require them back."""
_OF_CALLS = frozenset({"id", "type", "index", "function"})
_STOPS: dict[str, StopReason] = {
    "stop": "done",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "refused",
}


def read_answer(endpoint: Endpoint, wire: str, sound: str | None, answer: Any) -> Iterator[ModelPart]:
    if answer.get("usage"):
        yield UsagePart(_usage(answer["usage"]))  # first, because a failed answer may be charged for
    error = answer.get("error")
    if error and not answer.get("choices"):
        raise failure_in_answer(endpoint, error)
    choice = answer["choices"][0]
    if choice.get("error"):
        raise failure_in_answer(endpoint, choice["error"])
    said = choice["message"]
    for thought in _thoughts(said):
        yield ThinkingPart(thought)
    audio = said.get("audio") or {}
    text = _text(said.get("content")) or said.get("refusal") or audio.get("transcript")
    if text:
        yield TextPart(text)
    yield from _pictures(endpoint, said)
    if audio.get("data"):
        yield AttachmentPart(attachment_of(endpoint.model, audio["data"], sound))
    calls = said.get("tool_calls") or ()
    for index, call in enumerate(calls):
        function = call["function"]
        yield CallPart(
            index,
            call.get("id") or "",
            function.get("name") or "",
            arguments_text(function.get("arguments")),
        )
    reason = _STOPS.get(choice.get("finish_reason") or "stop", "done")
    kept = {name: value for name, value in said.items() if value is not None and _is_extra(name, value)}
    more = [without(call, _OF_CALLS) for call in calls]
    yield StopPart("refused" if said.get("refusal") else reason, _kept(wire, kept, more, bool(audio)))


def _pictures(endpoint: Endpoint, said: Any) -> Iterator[ModelPart]:
    """Yield the pictures in a message or a piece of one. Servers put them in `images` or among the parts of the content."""
    content = said.get("content")
    for part in (*(content if isinstance(content, list) else ()), *(said.get("images") or ())):
        if isinstance(part, dict) and isinstance(part.get("image_url"), dict):
            yield AttachmentPart(attachment_at(endpoint.model, part["image_url"].get("url")))
            part["image_url"] = {**part["image_url"], "url": PLACE}


def _is_extra(name: str, value: Any) -> bool:
    """Return whether a field is not one of the API's own, or is content with parts that are not text."""
    if name == "content":
        return isinstance(value, list) and not all(_is_text(part) for part in value)
    return name not in _OWN


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type", "text") == "text")


def _kept(
    wire: str, fields: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], has_sound: bool = False
) -> Kept | None:
    """Return what is sent back besides the text and the calls; None if there is nothing.

    A sound itself is not sent back. Its transcript is, because the provider forgets a sound after an hour.
    """
    if not fields and not any(calls) and not has_sound:
        return None
    return Kept(wire, encode({"message": fields, "calls": calls}), has_arguments=False)


class ChatChunks:
    """Converts the chunks of one streamed answer to parts."""

    __slots__ = (
        "_at",
        "_began",
        "_calls",
        "_content",
        "_endpoint",
        "_has_sound",
        "_kept",
        "_more",
        "_refused",
        "_sound",
        "_sound_data",
        "_wire",
    )

    def __init__(self, endpoint: Endpoint, wire: str, sound: str | None = None) -> None:
        self._endpoint = endpoint
        self._wire = wire
        self._sound = sound
        """The media type of the sounds that the request asks for; None if it names none."""
        self._has_sound = False
        self._sound_data: list[str] = []
        """The pieces of the sound that have arrived, in base64."""
        self._kept: dict[str, Any] = {}
        """The fields so far that are not the API's own. Providers require some of them back."""
        self._more: dict[int, dict[str, Any]] = {}
        """The fields of each call that are not the API's own, by the position of the call."""
        self._content: list[Any] = []
        """The content so far: pieces of text, or parts if any of it came as a list of parts."""
        self._calls: list[tuple[str, str]] = []
        """The id and name of each call so far."""
        self._at: dict[Any, int] = {}
        """Position in `_calls` of the call that arrives under each of the server's indexes."""
        self._refused = False
        self._began = False

    def take(self, chunk: Any) -> Iterator[ModelPart]:
        if chunk.get("usage"):
            yield UsagePart(_usage(chunk["usage"]))
        error = chunk.get("error")
        if error:
            raise failure_in_answer(self._endpoint, error)
        for choice in chunk.get("choices") or ():
            self._began = True
            delta = choice.get("delta") or {}
            for thought in _thoughts(delta):
                yield ThinkingPart(thought)
            pictures = list(_pictures(self._endpoint, delta))
            for name, piece in delta.items():
                if name not in _OWN and piece is not None:
                    self._kept[name] = joined(self._kept.get(name), piece)
            self._refused = self._refused or bool(delta.get("refusal"))
            content = delta.get("content")
            audio = delta.get("audio") or {}
            text = _text(content) or delta.get("refusal") or audio.get("transcript")
            if audio:
                self._has_sound = True
                self._sound_data.append(audio.get("data") or "")
            if content:
                self._add(content)
            if text:
                yield TextPart(text)
            yield from pictures
            for call in delta.get("tool_calls") or ():
                yield self._call(call)
            if choice.get("error"):
                raise failure_in_answer(self._endpoint, choice["error"])
            if choice.get("finish_reason"):
                yield from self._end_sound()
                yield self._stop(_STOPS.get(choice["finish_reason"], "done"))

    def done(self) -> Iterator[ModelPart]:
        """Yield the end of an answer whose stream ended without a stop reason. Yields nothing if nothing came before."""
        if self._began:
            yield from self._end_sound()
            yield self._stop("calls" if self._calls else "done")

    def _end_sound(self) -> Iterator[ModelPart]:
        """Yield the sound of the answer, if it has one that has not been yielded."""
        data = "".join(self._sound_data)
        self._sound_data.clear()
        if data:
            yield AttachmentPart(attachment_of(self._endpoint.model, data, self._sound))

    def _stop(self, reason: StopReason) -> StopPart:
        kept = self._kept
        if _is_extra("content", self._content):
            kept = {"content": self._content, **kept}
        more = [self._more.get(number, {}) for number in range(len(self._calls))]
        return StopPart(
            "refused" if self._refused else reason, _kept(self._wire, kept, more, self._has_sound)
        )

    def _add(self, content: Any) -> None:
        """Add a piece of the content. The pieces of text before the first list of parts become one part."""
        is_text = not self._content or isinstance(self._content[-1], str)
        if is_text and isinstance(content, str):
            self._content.append(content)
            return
        before = _with_content([], "".join(self._content)) if is_text and self._content else self._content
        self._content = _with_content(before, content)

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
        more = without(call, _OF_CALLS)
        if more:
            self._more[number or 0] = joined(self._more.get(number or 0), more)
        return CallPart(number or 0, id, name, arguments_text(function.get("arguments")))


def _thoughts(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield the thoughts in a message or a piece of one. Servers put them in different fields."""
    thought = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(thought, str) and thought:
        yield thought
    elif isinstance(details := said.get("reasoning_details"), list):
        for each in details:
            text = each.get("text") or each.get("summary") if isinstance(each, dict) else None
            if isinstance(text, str) and text:
                yield text
    if isinstance(content := said.get("content"), list):
        for part in content:
            if isinstance(part, dict) and part.get("type") == "thinking":
                yield _text(part.get("thinking"))


def _with_content(parts: list[Any], content: Any) -> list[Any]:
    """Add a piece of the content to its parts. A piece of the same type as the last part continues it."""
    for piece in content if isinstance(content, list) else [content]:
        part = {"type": "text", "text": piece} if isinstance(piece, str) else piece
        last = parts[-1] if parts else None
        if is_block(part) and is_block(last) and last["type"] == part["type"]:
            merged = _with_content(last["thinking"], part["thinking"]) if _is_thinking(last, part) else None
            parts = [*parts[:-1], joined(last, part) if merged is None else {**last, "thinking": merged}]
        else:
            parts = [*parts, part]
    return parts


def _is_thinking(*parts: Mapping[str, Any]) -> bool:
    return all(part["type"] == "thinking" and isinstance(part.get("thinking"), list) for part in parts)


def _text(content: Any) -> str:
    """Return the text of a message's content. Some servers send it as a list of parts."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content or ""


def _usage(usage: Any) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        count(usage.get("prompt_tokens")),
        count(usage.get("completion_tokens")),
        count(details.get("cached_tokens")),
        0,
        1,
    )


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
        if api not in ("chat", "responses"):
            raise DefinitionError(f"OpenAIModel has no API {api!r}. Pass 'chat' or 'responses'.")
        sends = CHAT_TAKES if api == "chat" else RESPONSES_TAKES
        server = server_of("chat", sends, provider, name, base_url, key_variable, takes, api_key, key_header)
        self.name = server.model
        row = server.row
        self._quirks = quirks = msgspec.structs.replace(row.quirks_at(server.address), takes=server.takes)
        self.traits = Traits(
            FREE if price is None and row.is_own else price,
            quirks.native_output if native_output is None else native_output,
            server.takes,
            frozenset() if api == "chat" else frozenset(RESPONSES_TOOLS),
            loads_deferred=api == "responses" and quirks.finds_tools.match(name) is not None,
        )
        self._stream = stream if api == "chat" else responses.stream
        self._wire = f"{WIRE if api == 'chat' else responses.WIRE}:{provider}"
        self._endpoint = Endpoint.of(server, headers or {}, silence)
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
    more |= limit_fields(request, quirks.limit)
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
    encode_message = encoder(_encode, quirks, wire)
    return messages.encoded(encode_message, None if quirks.user_after_tool else _between(quirks))


def _encode(quirks: Quirks, wire: str, message: Message) -> bytes:
    said = _dicts(message, quirks, wire)
    if not quirks.user_after_tool and isinstance(message, ToolMessage) and _shows_more(message, quirks):
        said.insert(min(len(message.results), _MOST_CALLS), _OK)
    return b",".join(map(encode, said))


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
