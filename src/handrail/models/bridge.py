"""`BridgedModel`: models of other providers, through pydantic-ai.

Only pydantic-ai's model layer is used: one request, one answer. The loop, tools, retries and validation are
Handrail's. docs/design.md says why this library was chosen. The library is imported when the first `BridgedModel` is
created.

Messages are converted to pydantic-ai's, and pydantic-ai's answers to parts. Its errors become `ModelError`s without the keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from handrail.content import Attachment
from handrail.errors import DefinitionError, ModelError
from handrail.messages import (
    AssistantMessage,
    AttachmentPart,
    CallPart,
    Kept,
    Message,
    ModelPart,
    ModelRequest,
    Price,
    StopPart,
    StopReason,
    Takes,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
)
from handrail.models import (
    ModelAnswerBroken,
    ModelRateLimited,
    ModelRequestRefused,
    ModelUnavailable,
)
from handrail.models.blocks import decode, encode
from handrail.models.grammar import ANTHROPIC_ID, CHAT_ID, id_for_wire, name_for_wire, object_text
from handrail.models.http import count
from handrail.models.media import (
    AUDIO,
    IMAGES,
    PDF,
    attachment_with,
    kept_data,
    place_for,
    said_in_words,
    text_with,
)
from handrail.models.request_settings import BRIDGE, limit_fields, settings_fields
from handrail.schema import Schema
from handrail.text.secrets import replace_secret
from handrail.tools import Tool

_STOPS: dict[str | None, StopReason] = {
    "stop": "done",
    "tool_call": "calls",
    "length": "length",
    "content_filter": "refused",
}
_STRICT_IDS = ("anthropic:", "bedrock:", "bedrock-mantle:", "google-vertex:anthropic")
"""Prefixes of the names of models whose APIs accept only letters, digits, `_` and `-` in ids."""
_NEEDED = "models of other providers need pydantic-ai, which is not installed. Run `pip install 'handrail[bridge]'`."


class BridgedModel:
    """A model of any provider that pydantic-ai supports, as in `BridgedModel("cohere:command-a")`.

    Each provider needs its own packages (`pip install 'pydantic-ai-slim[cohere]'`) and its key in an environment
    variable, which pydantic-ai's documentation names. A configured pydantic-ai model is accepted too;
    one that has its own client works on one event loop only. `options` are further settings of the request,
    such as `{"thinking": "low"}`.

    `context.request` shows the conversation before it is converted to pydantic-ai's messages. Raises
    `DefinitionError` if pydantic-ai or the provider's package is not installed, if there is no such provider, or if `model`
    is neither a name nor a pydantic-ai model.
    """

    def __init__(
        self,
        model: Any,
        *,
        options: Mapping[str, Any] | None = None,
        native_output: bool | None = None,
        price: Price | None = None,
        silence: float = 300.0,
    ) -> None:
        library = _library("pydantic_ai.models")
        if isinstance(model, str):
            self.name = model
            profile = _checked_profile(library, model)
            self._make: Callable[[], Any] = lambda: library.infer_model(model)
        elif isinstance(model, library.Model):
            self.name = f"{model.system}:{model.model_name}"
            profile = model.profile
            self._make = lambda: model
        else:
            raise DefinitionError(
                f"{model!r} can't be bridged. Pass a name like 'cohere:command-a', or a pydantic-ai model."
            )
        if native_output is None:
            native_output = bool(profile.get("supports_json_schema_output"))
        self.traits = Traits(price, native_output, BRIDGE_TAKES)
        self._options = dict(options or {})
        self._silence = silence
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        direct = _library("pydantic_ai.direct")
        try:
            model = await self._model()
            sent: dict[str, Any] = {
                "messages": messages_of(self.name, request),
                "model_settings": self._settings(model, request),
                "model_request_parameters": _parameters(request),
                "instrument": False,
            }
            if not request.stream:
                for part in self._whole(await direct.model_request(model, **sent)):
                    yield part
                return
            async with direct.model_request_stream(model, **sent) as answer:
                try:
                    pieces = _Pieces(self.name)
                    async for event in answer:
                        for part in pieces.take(event):
                            yield part
                except BaseException:
                    # models without connections can't be cancelled
                    with contextlib.suppress(NotImplementedError):
                        await answer.cancel()
                    raise
            response = answer.get()
            if _cut(model, response):
                raise ModelAnswerBroken(self.name, "the answer ended before it was complete")
            for part in (*pieces.late(response), *self._end(response)):
                yield part
        except (ModelError, DefinitionError):
            raise
        except Exception as error:
            # `from None` hides the client's error, which holds the request and with it the key.
            raise failure_of(self.name, error, self._silence) from None

    def _settings(self, model: Any, request: ModelRequest) -> dict[str, Any]:
        settings: dict[str, Any] = {"timeout": self._silence, "max_retries": 0}
        ignored = getattr(model, "unsupported_settings", ())
        settings = {name: value for name, value in settings.items() if name not in ignored}
        settings |= limit_fields(request, "max_tokens") | settings_fields(self.name, request, BRIDGE)
        if request.must_call:
            settings["tool_choice"] = "required"
        return settings | self._options

    def _whole(self, response: Any) -> Iterator[ModelPart]:
        for index, part in enumerate(response.parts):
            yield from _begun(self.name, index, part, whole=True)
        yield from self._end(response)

    def _end(self, response: Any) -> Iterator[ModelPart]:
        used = response.usage
        yield UsagePart(
            Usage(
                count(used.input_tokens),
                count(used.output_tokens),
                count(used.cache_read_tokens),
                count(used.cache_write_tokens),
                1,
            )
        )
        if response.finish_reason == "error":
            raise ModelAnswerBroken(self.name, "the provider reported a failure in the middle of its answer")
        called = any(part.part_kind == "tool-call" for part in response.parts)
        stop = _STOPS.get(response.finish_reason, "calls" if called else "done")
        yield StopPart("calls" if called and stop == "done" else stop, kept_of(self.name, response))

    async def _model(self) -> Any:
        """Return the pydantic-ai model of the running event loop. It is closed with the loop's async generators."""
        loop = asyncio.get_running_loop()
        model = self._of_loop.get(loop)
        if model is None:
            keeper = _keep(self._make)
            _keepers.setdefault(loop, []).append(keeper)
            model = self._of_loop[loop] = await anext(keeper)
        return model

    def __repr__(self) -> str:
        return f"BridgedModel({self.name!r})"


_keepers: WeakKeyDictionary[asyncio.AbstractEventLoop, list[AsyncGenerator[Any]]] = WeakKeyDictionary()
"""Generators that keep models open, by event loop. This dict keeps them from being garbage-collected."""


async def _keep(make: Callable[[], Any]) -> AsyncGenerator[Any]:
    async with make() as model:
        yield model


def _cut(model: Any, response: Any) -> bool:
    """Return whether a stream ended before its answer was complete.

    If a chat completion ends without a finish reason, pydantic-ai treats it as complete and invents a reason. The
    provider's own reason is then missing from the response's details.
    """
    if response.state != "complete":
        return True
    if not response.provider_url or response.finish_reason == "content_filter":
        return False
    openai: Any = sys.modules.get("pydantic_ai.models.openai")
    if openai is not None and isinstance(model, openai.OpenAIChatModel):
        return "finish_reason" not in (response.provider_details or {})
    return response.finish_reason is None


def _library(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise DefinitionError(_NEEDED) from error


def _checked_profile(library: Any, name: str) -> Mapping[str, Any]:
    """Return the profile of the named model.

    Raises `DefinitionError` if there is no name after the colon, or if the provider is unknown or not installed.
    """
    provider, _, model = name.partition(":")
    try:
        if not model:
            raise ValueError
        library.infer_provider_class(provider)
        return library.infer_model_profile(name)
    except ImportError as error:
        raise DefinitionError(f"model {name!r} needs its provider's package: {error}") from error
    except ValueError:
        raise DefinitionError(
            f"{name!r} is not a model of a known provider. Write provider:name, with a provider that pydantic-ai supports, "
            "such as cohere:command-a."
        ) from None


def _parameters(request: ModelRequest) -> Any:
    kind = _library("pydantic_ai.models").ModelRequestParameters
    tools = [tool_of(offered.tool) for offered in request.tools]
    if request.output is None:
        return kind(function_tools=tools, allow_text_output=not request.must_call)
    return kind(function_tools=tools, output_mode="native", output_object=output_of(request.output))


# --- parts of an answer -----------------------------------------------------------------------


def _begun(model: str, index: int, part: Any, whole: bool = False) -> Iterator[ModelPart]:
    kind = part.part_kind
    if kind == "text" and part.content:
        yield TextPart(part.content)
    elif kind == "thinking" and part.content:
        yield ThinkingPart(part.content)
    elif kind == "file":
        yield AttachmentPart(attachment_with(model, part.content.data, part.content.media_type))
    elif kind == "tool-call":
        arguments = arguments_of(part.args, whole)
        yield CallPart(index, part.tool_call_id, part.tool_name, arguments or "")


class _Pieces:
    """Converts a streamed answer to parts, chunk by chunk."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._late: set[int] = set()
        """Indexes of the calls whose arguments arrive as objects. Such arguments are complete only at the end of the answer."""

    def take(self, event: Any) -> Iterator[ModelPart]:
        if event.event_kind == "part_start":
            part = event.part
            if part.part_kind == "tool-call" and isinstance(part.args, dict):
                self._late.add(event.index)
            yield from _begun(self._model, event.index, part)
        elif event.event_kind == "part_delta":
            yield from self._more(event.index, event.delta)

    def _more(self, index: int, delta: Any) -> Iterator[ModelPart]:
        kind = delta.part_delta_kind
        if kind == "text" and delta.content_delta:
            yield TextPart(delta.content_delta)
        elif kind == "thinking" and delta.content_delta:
            yield ThinkingPart(delta.content_delta)
        elif kind == "tool_call":
            if isinstance(delta.args_delta, dict):
                self._late.add(index)
            elif delta.args_delta or delta.tool_name_delta:
                yield CallPart(index, "", delta.tool_name_delta or "", delta.args_delta or "")

    def late(self, response: Any) -> Iterator[ModelPart]:
        """Yield the arguments that are complete only at the end of the answer."""
        for index in sorted(self._late):
            yield CallPart(index, arguments=arguments_of(response.parts[index].args, whole=True))


_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 6
_MOST_SAID = 500


def failure_of(model: str, error: Exception, silence: float) -> ModelError:
    """Convert an exception from pydantic-ai to a `ModelError`. An unexpected exception becomes `ModelAnswerBroken`.

    `silence` is the number of seconds without data after which a request times out.
    """
    known: Any = import_module("pydantic_ai.exceptions")
    said = _without_secrets(_said(error))[:_MOST_SAID]
    status: int | None = getattr(error, "status_code", None)
    wait: float | None = getattr(error, "retry_after", None)
    if isinstance(error, known.ModelRequestRejectedError | known.ModelQuotaExceededError | known.UserError):
        return ModelRequestRefused(model, said, status=status)
    if isinstance(error, known.ModelRateLimitError) or status == 429:
        return ModelRateLimited(model, said, status=status, retry_after=wait)
    if isinstance(error, known.ModelTimeoutError):
        return ModelUnavailable(model, f"no data arrived for {silence:g} seconds")
    if isinstance(error, known.ModelAPIError):
        if status is not None and 400 <= status < 500 and status not in (408, 409, 425):
            return ModelRequestRefused(model, said, status=status)
        return ModelUnavailable(model, said, status=status, retry_after=wait)
    return ModelAnswerBroken(model, said)


def _said(error: Exception) -> str:
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        inner: Any = body.get("error", body)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(inner, dict) and inner.get("message"):  # pyright: ignore[reportUnknownMemberType]
            return str(inner["message"])  # pyright: ignore[reportUnknownArgumentType]
    return str(error) or type(error).__name__


def _without_secrets(text: str) -> str:
    """Return a message without secrets, because some providers echo the key.

    The key's variable differs by provider, so every variable whose name suggests a secret is considered. Short values are
    only considered to be keys if the variable is named like one, because other settings are common words too.
    """
    for name, value in os.environ.items():
        if value and (name.upper().endswith("API_KEY") or (len(value) >= _SHORTEST and _SECRET.search(name))):
            text = replace_secret(text, value, "[the key]")
    return text


def tool_of(tool: Tool[Any, Any]) -> Any:
    """Convert a tool to a pydantic-ai tool definition."""
    tools: Any = import_module("pydantic_ai.tools")
    return tools.ToolDefinition(
        name=tool.name, description=tool.description, parameters_json_schema=tool.json_schema
    )


def output_of(schema: Schema[Any]) -> Any:
    """Convert the schema of the required output to a pydantic-ai output definition."""
    output: Any = import_module("pydantic_ai.output")
    return output.OutputObjectDefinition(json_schema=schema.json_schema, name="answer")


BRIDGE_TAKES = Takes(IMAGES | {PDF} | AUDIO)
"""Media types that pydantic-ai sends as bytes. Each of its models refuses the types that its provider does not take."""


def messages_of(model: str, request: ModelRequest) -> list[Any]:
    """Convert the request's conversation to pydantic-ai's messages, with the system prompt first."""
    said: Any = import_module("pydantic_ai.messages")
    found = [_message(said, model, message) for message in request.messages]
    if request.system:
        found.insert(0, said.ModelRequest([said.SystemPromptPart(request.system)]))
    return found


def _message(said: Any, model: str, message: Message) -> Any:
    ids = ANTHROPIC_ID if model.startswith(_STRICT_IDS) else CHAT_ID
    if isinstance(message, ToolMessage):
        attached = [found for each in message.results for found in each.attachments]
        return said.ModelRequest(
            [
                said.ToolReturnPart(
                    name_for_wire(each.name),
                    text_with(each.text, each.attachments, BRIDGE_TAKES),
                    id_for_wire(each.id, ids),
                    outcome="failed" if each.failed else "success",
                )
                for each in message.results
            ]
            + [
                said.UserPromptPart([found.render(), _binary(said, found)])
                for found in attached
                if BRIDGE_TAKES.sends(found)
            ]
        )
    if isinstance(message, AssistantMessage):
        calls = [
            said.ToolCallPart(
                name_for_wire(call.name), object_text(call.arguments), id_for_wire(call.id, ids)
            )
            for call in message.calls
        ]
        kept = kept_data(message, _wire(model))
        if kept is not None:
            response = _as_it_was(said, calls, kept)
            if response is not None:
                return response
        text = said_in_words(message, BRIDGE_TAKES)
        return said.ModelResponse([said.TextPart(text), *calls] if text else calls)
    attached = [_binary(said, each) for each in message.attachments if BRIDGE_TAKES.sends(each)]
    text = text_with(message.text, message.attachments, BRIDGE_TAKES)
    return said.ModelRequest([said.UserPromptPart([*filter(None, [text]), *attached] if attached else text)])


def _binary(said: Any, attachment: Attachment) -> Any:
    return said.BinaryContent(attachment.content, media_type=attachment.media_type)


def _as_it_was(said: Any, calls: list[Any], kept: Any) -> Any:
    """Return a kept answer with its thinking and signatures, and with its calls replaced by `calls`.

    Returns None if the kept answer does not have as many calls as `calls`.
    """
    [response] = said.ModelMessagesTypeAdapter.validate_json(encode(kept))
    if sum(part.part_kind == "tool-call" for part in response.parts) != len(calls):
        return None
    rest = iter(calls)
    parts: list[Any] = []
    for part in response.parts:
        if part.part_kind == "tool-call":
            call = next(rest)
            part = dataclasses.replace(
                part, tool_name=call.tool_name, args=call.args, tool_call_id=call.tool_call_id
            )
        parts.append(part)
    return dataclasses.replace(response, parts=parts)


def kept_of(model: str, response: Any) -> Kept | None:
    """Return the answer as the provider needs it back, or None if its text and calls are enough."""
    if not any(
        part.part_kind not in ("text", "tool-call") or part.id or part.provider_details
        for part in response.parts
    ):
        return None
    said: Any = import_module("pydantic_ai.messages")
    data = said.ModelMessagesTypeAdapter.dump_json([response])
    if any(part.part_kind == "file" for part in response.parts):
        data = encode([_without_bytes(each) for each in decode(data)])
    return Kept(_wire(model), data)


def _without_bytes(response: dict[str, Any]) -> dict[str, Any]:
    parts = [
        {**part, "content": {**part["content"], "data": place_for(part["content"]["media_type"])}}
        if part["part_kind"] == "file"
        else part
        for part in response["parts"]
    ]
    return {**response, "parts": parts}


def _wire(model: str) -> str:
    return f"bridge:{model}"


def arguments_of(arguments: Any, whole: bool) -> str:
    """Return a call's arguments as JSON text; "" if they are not text and the answer is not `whole`."""
    if isinstance(arguments, str):
        return arguments
    if not whole:
        return ""
    return encode(arguments or {}).decode()
