"""`GeminiModel`: Google's Gemini API, `POST /models/NAME:generateContent` and `:streamGenerateContent`."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

from handrail.messages import (
    DEFAULT_SETTINGS,
    AssistantMessage,
    CallAnswered,
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
from handrail.models import ModelRequestRefused, provider_tools
from handrail.models.gemini_answers import WIRE, GeminiAnswer
from handrail.models.grammar import GEMINI_ID, id_for_wire, name_for_wire, raw_object
from handrail.models.http import Endpoint, body_of, encode, text_json
from handrail.models.media import kept_data, said_in_words
from handrail.models.parts import GEMINI_TAKES, RETURNED, gemini_parts, text_with
from handrail.models.providers import address_of, keys_of, refuse_key, row_of
from handrail.models.request_settings import gemini_writes, merge_fields, settings_fields
from handrail.spelling import checked_arguments

_EMPTY = "(nothing)"
"""Text that is sent instead of empty text, which the API refuses."""
_BEGINNING = b'{"role":"user","parts":[{"text":"(nothing)"}]}'
"""Sent before a conversation that does not begin with a user's message, because the API requires that it does."""
_FOREIGN = "skip_thought_signature_validator"
"""The signature that Google documents for calls of other providers' models and older Gemini models, which have none."""
_OLDER = re.compile(r"(?:models/)?gemini-(?:1|2)\b")
"""Matches the names of the models before Gemini 3. These refuse a JSON Schema for the answer while they have tools."""


@checked_arguments
class GeminiModel:
    """A Google Gemini model, or a model on any server with the same API.

    The key is read from `GOOGLE_API_KEY` or `GEMINI_API_KEY`, and `GOOGLE_GEMINI_BASE_URL` names a different server, as
    in Google's own client. `base_url` and `key_variable` take precedence; `base_url` includes the version, as in
    `https://host/v1beta`, and `key_variable=None` sends no key.

    Thoughts and their signatures are kept and sent back in their original places, as the API requires. `options` are further
    fields of the request, such as `{"safetySettings": [...]}`, and `{"generationConfig": {...}}` adds to the one that Handrail
    sends. `takes` says which attachments the model takes, if that is not known from its name. After `silence` seconds
    without data, a request fails. Raises `DefinitionError` if the provider, the address or a header is invalid, or `api_key` is given.
    """

    def __init__(
        self,
        name: str,
        *,
        provider: str = "google",
        base_url: str | None = None,
        key_variable: str | None = "",
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        native_output: bool | None = None,
        price: Price | None = None,
        takes: Takes | None = None,
        silence: float = 300.0,
        api_key: None = None,
    ) -> None:
        row = row_of(provider, "gemini")
        keys = keys_of(row, key_variable)
        refuse_key(api_key, keys)
        self.name = f"{provider}:{name}"
        address = address_of(self.name, row, base_url)
        can_constrain = not _OLDER.match(name) if native_output is None else native_output
        wire = GEMINI_TAKES
        taken = row.takes_at(address, name, wire) if takes is None else wire.within(takes)
        self.traits = Traits(price, can_constrain, taken, frozenset(provider_tools.GEMINI))
        self._encode = _encoder(taken)
        self._endpoint = Endpoint(
            self.name,
            address,
            keys=keys,
            key_needed=row.needs_key(address),
            headers={**row.find_headers(), **(headers or {})},
            silence=silence,
        )
        self._name = name
        self._path = f"/{quote(name if '/' in name else f'models/{name}')}"
        self._options = dict(options or {})
        self._writes = gemini_writes(name, _name)

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        endpoint, body = self._endpoint, self._body(request)
        pieces = GeminiAnswer(endpoint, _renamed(request.tools), bool(_OLDER.match(self._name)))
        if not request.stream:
            return endpoint.parts(f"{self._path}:generateContent", body, whole=pieces.take_whole)
        return endpoint.parts(f"{self._path}:streamGenerateContent?alt=sse", body, take=pieces.take)

    def _body(self, request: ModelRequest) -> bytes:
        more = dict(self._options)
        if request.settings is not DEFAULT_SETTINGS:
            chosen = settings_fields(self.name, request, self._writes)
            if not len(request.tools):
                chosen.pop("toolConfig", None)  # the API refuses a choice of functions if there are none
            merge_fields(more, chosen)
        config: dict[str, Any] = dict(more.pop("generationConfig", {}))
        if request.temperature is not None:
            config["temperature"] = request.temperature
        if request.max_tokens is not None:
            config["maxOutputTokens"] = request.max_tokens
        if request.output is not None:
            config["responseMimeType"] = "application/json"
            config["responseJsonSchema"] = _schema(request.output.json_schema)
        if config:
            more["generationConfig"] = config
        if request.provider_tools:
            self._combine(more, len(request.tools))
        if request.must_call:
            more["toolConfig"] = {**more.get("toolConfig", {}), "functionCallingConfig": {"mode": "ANY"}}
        written: dict[str, tuple[bytes | bytearray, ...]] = {
            "contents": (b"[", *_conversation(request.messages, self._encode), b"]")
        }
        if request.system.strip():
            written["systemInstruction"] = (b'{"parts":[{"text":%s}]}' % text_json(request.system),)
        own = provider_tools.written(self.name, request, provider_tools.GEMINI)
        if len(request.tools):
            functions = (b'{"functionDeclarations":[', request.tools.encoded(_tool), b"]}")
            written["tools"] = provider_tools.joined_tools(own, *functions)
        elif own:
            written["tools"] = provider_tools.joined_tools(own)
        return body_of(more, **written)

    def _combine(self, fields: dict[str, Any], functions: int) -> None:
        """Make a Gemini 3 model return the calls of the provider's own tools as parts. The API requires this if there are functions too.

        Raises `ModelRequestRefused` for an older model if there are functions, because such a model can't have both.
        """
        if not _OLDER.match(self._name):
            fields["toolConfig"] = {**fields.get("toolConfig", {}), "includeServerSideToolInvocations": True}
        elif functions:
            raise ModelRequestRefused(
                self.name,
                "it can't have the provider's own tools together with others. Use a Gemini 3 model, or give the "
                "ProviderTool to an agent of its own and pass that with agent.as_tool()",
            )

    def __repr__(self) -> str:
        return f"GeminiModel({self.name!r})"


# --- requests -------------------------------------------------------------------------------------


def _name(name: str) -> str:
    """Return the name of a tool or a call as the API accepts it: it begins with a letter or an underscore."""
    name = name_for_wire(name)
    return name if name[0].isalpha() or name[0] == "_" else f"_{name}"[:64]


def _renamed(tools: Sent[Offered]) -> dict[str, str]:
    """Return the original name of each tool that was renamed for the API, by its new name."""
    names = [offered.tool.name for offered in tools]
    return {_name(name): name for name in names if not name[0].isalpha() and name[0] != "_"}


def _tool(offered: Offered) -> bytes:
    tool = offered.tool
    return encode(
        {
            "name": _name(tool.name),
            "description": tool.description,
            "parametersJsonSchema": _schema(tool.json_schema),
        }
    )


def _schema(schema: Any) -> Any:
    """Return the schema with only `$` keywords beside a `$ref`, because the API refuses others there."""
    if isinstance(schema, list):
        return [_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(schema.get("$ref"), str):
        schema = {word: each for word, each in schema.items() if word.startswith("$")}
    return {
        word: {name: _schema(each) for name, each in inner.items()}
        if word in ("properties", "$defs") and isinstance(inner, Mapping)
        else inner
        if word in ("enum", "const", "default", "examples")
        else _schema(inner)
        for word, inner in schema.items()
    }


def _conversation(messages: Sent[Message], encode_message: Encode) -> tuple[bytes | bytearray, ...]:
    """Encode a conversation, in pieces. It begins with the user, and user and model alternate."""
    if not len(messages):
        return (_BEGINNING,)
    said = (_opening(messages[0]), messages.encoded(encode_message, _between), b"]}")
    return said if _role(messages[0]) == "user" else (_BEGINNING, b",", *said)


def _between(before: Message, after: Message) -> bytes:
    """Return the separator between two messages. Messages of the same role become one content."""
    return b"," if _role(before) == _role(after) else b"]},%s" % _opening(after)


def _opening(message: Message) -> bytes:
    return b'{"role":"%s","parts":[' % _role(message).encode()


def _role(message: Message) -> str:
    return "model" if isinstance(message, AssistantMessage) else "user"


@lru_cache(maxsize=64)
def _encoder(takes: Takes) -> Encode:
    """Return the function that encodes the parts of messages for a model that takes these attachments.

    Equal arguments give the same function, because encoded messages are cached under it.
    """
    return partial(_encode_parts, takes)


def _encode_parts(takes: Takes, message: Message) -> bytes:
    return b",".join(map(encode, _parts(message, takes)))


def _parts(message: Message, takes: Takes) -> list[Any]:
    """Return the parts of a message. There is at least one."""
    if isinstance(message, UserMessage):
        return gemini_parts(message.text, message.attachments, takes) or [_text(message.text)]
    if isinstance(message, ToolMessage):
        results: list[Any] = [_result(each, takes) for each in message.results]
        for each in message.results:
            sent = [found for found in each.attachments if takes.sends(found)]
            results += gemini_parts(RETURNED.format(each.name), sent, takes) if sent else []
        return results
    kept = kept_data(message, WIRE)
    if kept is not None and (back := _with_thought(kept, message)):
        return back
    calls: list[Any] = [_call(message, number) for number in range(len(message.calls))]
    if calls:
        calls[0]["thoughtSignature"] = _FOREIGN
    text = said_in_words(message, takes)
    return [_text(text), *calls] if text.strip() or not calls else calls


def _text(text: str) -> dict[str, Any]:
    return {"text": text if text.strip() else _EMPTY}


def _call(message: AssistantMessage, number: int) -> dict[str, Any]:
    call = message.calls[number]
    said = {
        "id": id_for_wire(call.id, GEMINI_ID),
        "name": _name(call.name),
        "args": raw_object(call.arguments),
    }
    return {"functionCall": said}


def _result(result: CallAnswered, takes: Takes) -> dict[str, Any]:
    said = {
        "id": id_for_wire(result.id, GEMINI_ID),
        "name": _name(result.name),
        "response": {
            "error" if result.failed else "output": text_with(result.text, result.attachments, takes)
        },
    }
    return {"functionResponse": said}


def _with_thought(parts: list[Any], message: AssistantMessage) -> list[Any]:
    """Return the kept parts of an answer, with the message's calls put back into them.

    If the first call has no signature, because a model before Gemini 3 made it, it gets the documented one. Returns [] if
    the parts do not have as many calls as the message.
    """
    back: list[Any] = []
    made = 0
    for part in parts:
        if "functionCall" in part:
            if made == len(message.calls):
                return []
            signed = {} if made or "thoughtSignature" in part else {"thoughtSignature": _FOREIGN}
            back.append({**part, **_call(message, made), **signed})
            made += 1
        else:
            back.append(part)
    return back if made == len(message.calls) else []
