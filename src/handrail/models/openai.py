"""`OpenAIModel`: OpenAI's two APIs, and every server that implements one of them.

The chat completions API, `POST /chat/completions`, is here; the responses API is in `responses`.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Literal

from handrail.errors import DefinitionError, ModelError
from handrail.messages import (
    AssistantMessage,
    CallPart,
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
)
from handrail.models import ModelUnavailable, responses
from handrail.models.grammar import CHAT_ID, arguments_text, id_for_wire, name_for_wire, object_text
from handrail.models.http import (
    Provider,
    body_of,
    count,
    encode,
    is_strict,
    refuse_key,
    text_json,
)

_OPENAI = "https://api.openai.com/v1"
_MOST_CALLS = 128
"""Maximum number of calls that the API accepts in one message."""


class OpenAIModel:
    """An OpenAI model, or a model on any server that implements one of OpenAI's APIs.

    `OpenAIModel("gpt-5")` uses OpenAI itself, with the key in `OPENAI_API_KEY`. For any other server (vLLM,
    Ollama, llama.cpp, Azure) pass its `base_url`. `key_variable` names the environment variable with the
    server's key, if it needs one, and `key_header="api-key"` sends the key as Azure expects it. `options` are
    further fields of the request, such as `{"reasoning_effort": "low"}`.
    """

    def __init__(
        self,
        name: str,
        *,
        api: Literal["chat", "responses"] = "chat",
        base_url: str = _OPENAI,
        key_variable: str | None = "OPENAI_API_KEY",
        key_header: str = "authorization",
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        native_output: bool = True,
        price: Price | None = None,
        silence: float = 300.0,
        api_key: None = None,
    ) -> None:
        refuse_key(api_key, key_variable)
        if api not in ("chat", "responses"):
            raise DefinitionError(f"OpenAIModel has no API {api!r}. Pass 'chat' or 'responses'.")
        self.name = f"openai:{name}"
        self.traits = Traits(price, native_output)
        self._stream = stream if api == "chat" else responses.stream
        own = base_url == _OPENAI
        self._provider = Provider(
            self.name,
            base_url,
            key_variable=key_variable,
            key_header=key_header.lower(),
            key_prefix="Bearer " if key_header.lower() == "authorization" else "",
            key_needed=own,
            headers=headers,
            silence=silence,
        )
        self._fields = {"model": name, **(options or {})}
        self._most = "max_completion_tokens" if own else "max_tokens"

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        return self._stream(self._provider, self._fields, request, self._most)

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
    provider: Provider, fields: Mapping[str, Any], request: ModelRequest, most: str
) -> AsyncGenerator[ModelPart]:
    """Send one request and yield the parts of its answer."""
    body = _body(fields, request, most)
    if not request.stream:
        return provider.parts("/chat/completions", body, whole=_whole)
    return provider.parts("/chat/completions", body, take=_Pieces(provider).take)


def _body(fields: Mapping[str, Any], request: ModelRequest, most: str) -> bytes:
    said = request.messages.encoded(_message)
    if request.system:
        said = b'{"role":"system","content":%s},%s' % (text_json(request.system), said)
    more: dict[str, Any] = dict(fields)
    if request.temperature is not None:
        more["temperature"] = request.temperature
    if request.max_tokens is not None:
        more[most] = request.max_tokens
    if request.stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
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


def _message(message: Message) -> bytes:
    if isinstance(message, ToolMessage):
        return b",".join(map(encode, _results(message)))
    if isinstance(message, AssistantMessage):
        said: dict[str, Any] = {"role": "assistant", "content": message.text or None}
        if message.calls:
            said["tool_calls"] = [
                {
                    "id": id_for_wire(call.id, CHAT_ID),
                    "type": "function",
                    "function": {
                        "name": name_for_wire(call.name),
                        "arguments": object_text(call.arguments),
                    },
                }
                for call in message.calls[:_MOST_CALLS]
            ]
        elif not message.text:
            said["content"] = ""
        return encode(said)
    return encode({"role": "user", "content": message.text})


def _results(message: ToolMessage) -> list[dict[str, Any]]:
    """Convert the results of a turn. Those of calls beyond the API's limit follow in a user message."""
    said: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": id_for_wire(each.id, CHAT_ID), "content": each.text}
        for each in message.results[:_MOST_CALLS]
    ]
    more = message.results[_MOST_CALLS:]
    if more:
        texts = "\n\n".join(f"{each.name}: {each.text}" for each in more)
        said.append(
            {"role": "user", "content": f"Results of the {len(more)} further calls of this turn:\n\n{texts}"}
        )
    return said


def _whole(answer: Any) -> Iterator[ModelPart]:
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
    yield StopPart("refused" if said.get("refusal") else reason)


class _Pieces:
    """Converts the chunks of one streamed answer to parts."""

    __slots__ = ("_at", "_calls", "_provider", "_refused")

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._calls: list[tuple[str, str]] = []
        """The id and name of each call so far."""
        self._at: dict[Any, int] = {}
        """Position in `_calls` of the call that arrives under each of the server's indexes."""
        self._refused = False

    def take(self, chunk: Any) -> Iterator[ModelPart]:
        error = chunk.get("error")
        if error:
            raise _failure(self._provider, error)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thoughts = delta.get("reasoning_content") or delta.get("reasoning")
            if isinstance(thoughts, str) and thoughts:
                yield ThinkingPart(thoughts)
            self._refused = self._refused or bool(delta.get("refusal"))
            text = _text(delta.get("content")) or delta.get("refusal")
            if text:
                yield TextPart(text)
            for call in delta.get("tool_calls") or ():
                yield self._call(call)
            if choice.get("finish_reason"):
                reason = _STOPS.get(choice["finish_reason"], "done")
                yield StopPart("refused" if self._refused else reason)
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


def _text(content: Any) -> str:
    """Return the text of a message's content, which some servers send as a list of parts."""
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content or ""


def _failure(provider: Provider, error: Any) -> ModelError:
    said = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    return ModelUnavailable(provider.model, f"it failed in the middle of its answer: {provider.quoted(said)}")


def _usage(usage: Any) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        count(usage.get("prompt_tokens")),
        count(usage.get("completion_tokens")),
        count(details.get("cached_tokens")),
        0,
        1,
    )
