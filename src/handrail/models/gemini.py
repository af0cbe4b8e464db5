"""`GeminiModel`: Google's Gemini API, `POST /models/NAME:generateContent` and `:streamGenerateContent`."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from handrail.errors import ModelError
from handrail.messages import (
    DEFAULT_SETTINGS,
    AssistantMessage,
    AttachmentPart,
    CallAnswered,
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
    Takes,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelAnswerBroken, ModelRequestRefused
from handrail.models.blocks import encode, outside_line
from handrail.models.grammar import GEMINI_ID, id_for_wire, is_object, name_for_wire, raw_object, value_text
from handrail.models.http import Endpoint, body_of, count, encoder, failure_in_answer, text_json
from handrail.models.media import (
    EMPTY,
    GEMINI_TAKES,
    RETURNED,
    are_samples,
    attachment_of,
    gemini_parts,
    kept_data,
    place_for,
    said_in_words,
    text_with,
)
from handrail.models.providers import server_of
from handrail.models.request_settings import (
    GEMINI_TOOLS,
    gemini_writes,
    joined_tools,
    limit_fields,
    merge_fields,
    settings_fields,
    write_tools,
)
from handrail.text.spelling import checked_arguments

_STEP = re.compile(r"""\.([^.\[\]]+)|\[(\d{1,9})\]|\['((?:[^'\\]|\\.)*)'\]|\["((?:[^"\\]|\\.)*)"\]""")
_ESCAPED = re.compile(r"\\(.)")
_VALUES = ("stringValue", "numberValue", "boolValue", "nullValue")


class PartialCall:
    """One call whose arguments arrive in pieces, as with `streamFunctionCallArguments`.

    The first piece has the name. A piece may have values of arguments, each with a JSON path that says where the value belongs.
    Every piece but the last has `willContinue`.
    """

    def __init__(self) -> None:
        self._part: dict[str, Any] = {}
        self._call: dict[str, Any] = {}
        self._arguments: dict[str, Any] = {}

    def take(self, part: Mapping[str, Any]) -> bool:
        """Add one piece, and return whether it was the last. Raises `ValueError` or `LookupError` for an invalid path."""
        call = part["functionCall"]
        self._part |= part
        self._call |= {name: call[name] for name in ("id", "name") if call.get(name)}
        for piece in call.get("partialArgs") or ():
            self._put(piece)
        self._arguments |= call.get("args") or {}
        return call.get("willContinue") is not True

    def part(self) -> dict[str, Any]:
        """Return the call as if it had arrived in one piece."""
        return {**self._part, "functionCall": {**self._call, "args": self._arguments}}

    def _put(self, piece: Mapping[str, Any]) -> None:
        *before, last = _steps(piece["jsonPath"])
        into: Any = self._arguments
        for step, after in zip(before, [*before, last][1:], strict=True):
            into = _entered(into, step, [] if isinstance(after, int) else {})
        value = next((piece[name] for name in _VALUES if name in piece), "")
        value = None if "nullValue" in piece else value
        found = _entered(into, last, value)
        if found is not value and isinstance(found, str) and isinstance(value, str):
            into[last] = found + value


def _entered(into: Any, step: str | int, new: Any) -> Any:
    """Return the member of a list or object at this step. If there is none yet, `new` is added and returned.

    Raises `ValueError` if a name does not lead into an object, or an index into a list, and `IndexError` if an
    index is beyond the end of a list.
    """
    if isinstance(step, str):
        return _of(into, dict).setdefault(step, new)
    if step == len(_of(into, list)):
        into.append(new)
    return into[step]


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the path leads into a {type(value).__name__}")
    return value


def _steps(path: str) -> list[str | int]:
    """Split a path such as `$.foo.bar[0]["a b"]` into names and indexes. Raises `ValueError` if it is invalid."""
    steps: list[str | int] = []
    at = 1
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            break
        name, index, *quoted = found.groups()
        text = next((each for each in quoted if each is not None), None)
        steps.append(int(index) if index else name if text is None else _ESCAPED.sub(r"\1", text))
        at = found.end()
    if not path.startswith("$") or at < len(path) or not steps:
        raise ValueError(f"{path[:80]!r} is not the path of an argument")
    return steps


WIRE = "gemini"
_STOPS: dict[str, StopReason] = {
    "STOP": "done",
    "MAX_TOKENS": "length",
    **dict.fromkeys(("SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII"), "refused"),
    **dict.fromkeys(("MODEL_ARMOR", "IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION"), "refused"),
}  # fmt: skip
_FAILED = frozenset(
    {"MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MALFORMED_RESPONSE"}
    | {"MISSING_THOUGHT_SIGNATURE", "OTHER", "IMAGE_OTHER", "NO_IMAGE"}
)
"""Finish reasons that mean that the answer can't be used, but that another attempt may succeed."""


class GeminiAnswer:
    """Converts one answer, complete or streamed, to parts."""

    __slots__ = (
        "_calls",
        "_endpoint",
        "_older",
        "_open",
        "_parts",
        "_renamed",
        "_samples",
        "_searched",
        "_stop",
        "_told",
    )

    def __init__(self, endpoint: Endpoint, renamed: Mapping[str, str], older: bool = False) -> None:
        self._endpoint = endpoint
        self._renamed = renamed
        self._older = older
        """Whether the model is older than Gemini 3. All its searches in one request are charged as one."""
        self._searched: dict[str, None] = {}
        """The provider's web search queries, in order."""
        self._told = 0
        """Number of queries in `_searched` that have been reported."""
        self._parts: list[dict[str, Any]] = []
        """The parts of the answer so far, as they must be sent back."""
        self._calls = 0
        self._open: PartialCall | None = None
        """The call whose pieces are arriving; None if there is none."""
        self._samples: list[str] = []
        """The pieces of a sound that have arrived, in base64. It is the last of `_parts`, and may continue."""
        self._stop: StopReason | None = None

    def take_whole(self, answer: Any) -> Iterator[ModelPart]:
        """Convert a complete answer. Raises `ModelError` if it failed, and `LookupError` if it has no finish reason."""
        yield from self.take(answer)
        if self._stop is None:
            raise LookupError("finishReason")

    def take(self, chunk: Any) -> Iterator[ModelPart]:
        """Convert one event of a stream, or a complete answer.

        Raises `ModelError` if the answer failed, and a builtin error if it is malformed.
        """
        if chunk.get("error"):
            raise failure_in_answer(self._endpoint, chunk["error"])
        failure: ModelError | None = None
        for candidate in (chunk.get("candidates") or ())[:1]:
            for part in (candidate.get("content") or {}).get("parts") or ():
                yield from self._part(part)
            queries = (candidate.get("groundingMetadata") or {}).get("webSearchQueries") or ()
            self._searched.update((query, None) for query in queries if isinstance(query, str))
            failure = self._end(candidate)
        if (chunk.get("promptFeedback") or {}).get("blockReason"):
            self._stop = "refused"
        if chunk.get("usageMetadata"):
            searches = min(len(self._searched), 1) if self._older else len(self._searched)
            yield UsagePart(_usage(chunk["usageMetadata"], searches))
        if failure is not None:
            raise failure  # after the usage, because an answer that failed is charged for
        if self._stop is not None:
            yield from self._end_sound()
            yield from self._close()
            yield from self._tell_searches()
            reason = "calls" if self._stop == "done" and self._calls else self._stop
            yield StopPart(reason, self._kept())

    def _end(self, candidate: Mapping[str, Any]) -> ModelError | None:
        """Record the stop reason if the answer has ended. Returns an error if the answer can't be used, and otherwise None."""
        reason = candidate.get("finishReason")
        if reason in _FAILED:
            said = candidate.get("finishMessage") or "no reason was given"
            problem = f"it stopped with {reason}: {self._endpoint.quoted(said)}"
            return ModelAnswerBroken(self._endpoint.model, problem)
        if reason:
            self._stop = _STOPS.get(reason, "done")
        return None

    def _tell_searches(self) -> Iterator[ModelPart]:
        """Yield a line with the queries that were not reported yet, unless parts of the answer show the searches."""
        untold = list(self._searched)[self._told :]
        self._told = len(self._searched)
        if untold and not any("toolCall" in part for part in self._parts):
            yield ThinkingPart(f"{outside_line('google_search', ', '.join(untold))}\n")

    def _close(self) -> Iterator[ModelPart]:
        """Yield the call whose last piece did not arrive, if any, with the pieces that did.

        Raises `ModelAnswerBroken` if the answer ended normally, because then the last piece was lost.
        """
        if self._open is None:
            return
        if self._stop == "done":
            raise ModelAnswerBroken(self._endpoint.model, "it stopped in the middle of a call")
        part, self._open = self._open.part(), None
        yield from self._part(part)

    def _part(self, part: Any) -> Iterator[ModelPart]:
        if not _is_wellformed(part):
            raise TypeError
        call, text, blob = part.get("functionCall"), part.get("text"), part.get("inlineData")
        if not part or (text == "" and not part.get("thoughtSignature")):
            return  # an empty part, as at the end of a stream
        if self._samples:
            if blob is not None and part == {
                "inlineData": {**self._parts[-1]["inlineData"], "data": blob.get("data")}
            }:
                self._samples.append(blob["data"])
                return
            yield from self._end_sound()
        if call is not None and (self._open is not None or "willContinue" in call or "partialArgs" in call):
            self._open = self._open or PartialCall()
            if not self._open.take(part):
                return
            part, self._open = self._open.part(), None
            call = part["functionCall"]
        if call is not None:
            name = call.get("name") or ""
            arguments = value_text(call.get("args"))
            yield CallPart(self._calls, call.get("id") or "", self._renamed.get(name, name), arguments)
            self._calls += 1
        elif text:
            yield ThinkingPart(text) if part.get("thought") else TextPart(text)
        elif blob is not None and not part.get("thoughtSignature") and part.get("thought"):
            return  # a draft, which belongs to the thoughts and need not be sent back
        elif blob is not None and not part.get("thought"):
            kind = blob.get("mimeType")
            if are_samples(kind) and part.keys() == {"inlineData"}:
                self._samples.append(blob["data"])
            else:
                yield AttachmentPart(attachment_of(self._endpoint.model, blob.get("data"), kind))
            part = {**part, "inlineData": {**blob, "data": place_for(kind)}}
        last = self._parts[-1] if self._parts else None
        if last is not None and _is_plain(last) and _is_plain(part) and _thinks(last) == _thinks(part):
            self._parts[-1] = {**last, "text": last["text"] + text}
        else:
            self._parts.append(dict(part))

    def _end_sound(self) -> Iterator[ModelPart]:
        """Yield the sound whose pieces have arrived, if there is one. Streams have a part for each fraction of a second."""
        if self._samples:
            data, kind = "".join(self._samples), self._parts[-1]["inlineData"]["mimeType"]
            self._samples.clear()
            yield AttachmentPart(attachment_of(self._endpoint.model, data, kind))

    def _kept(self) -> Kept | None:
        """Return the parts to be sent back, or None if they are only texts and calls without signatures.

        The calls themselves are left out: they are in the message, and their arguments may be secret. The bytes of pictures and
        sounds are left out, too: they are in the message's attachments.
        """
        if all(set(part) in ({"text"}, {"functionCall"}) for part in self._parts):
            return None
        kept = [{**part, "functionCall": {}} if "functionCall" in part else part for part in self._parts]
        return Kept(WIRE, encode(kept), has_arguments=False)


_ABOUT = frozenset({"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"})
"""Fields of a part that describe its content."""


def _is_wellformed(part: Any) -> bool:
    """Return whether a part of an answer has fields of the right types and at most one content, so that it can be sent back."""
    return (
        isinstance(part.get("thought", False), bool)
        and isinstance(part.get("thoughtSignature", ""), str)
        and isinstance(part.get("text", ""), str)
        and isinstance(part.get("functionCall", {}), dict)
        and isinstance(part.get("inlineData", {}), dict)
        and len(part.keys() - _ABOUT) <= 1
        and "functionResponse" not in part
        and ("text" in part or "functionCall" in part or is_object(encode(part).decode()))
    )


def _is_plain(part: Mapping[str, Any]) -> bool:
    """Return whether a part is text, or thought, without a signature. Two such parts may be joined."""
    return part.keys() <= {"text", "thought"} and isinstance(part.get("text"), str)


def _thinks(part: Mapping[str, Any]) -> bool:
    return bool(part.get("thought"))


def _usage(usage: Mapping[str, Any], searches: int) -> Usage:
    """Return the token usage of a request, with the number of searches that are charged for.

    Thoughts count as output, and the results of the provider's own tools count as input.
    """
    sent = count(usage.get("promptTokenCount")) + count(usage.get("toolUsePromptTokenCount"))
    said = count(usage.get("candidatesTokenCount")) + count(usage.get("thoughtsTokenCount"))
    return Usage(sent, said, count(usage.get("cachedContentTokenCount")), 0, 1, searches)


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
        server = server_of("gemini", GEMINI_TAKES, provider, name, base_url, key_variable, takes, api_key)
        self.name = server.model
        can_constrain = not _OLDER.match(name) if native_output is None else native_output
        self.traits = Traits(price, can_constrain, server.takes, frozenset(GEMINI_TOOLS))
        self._encode = encoder(_encode_parts, server.takes)
        self._endpoint = Endpoint.of(server, headers or {}, silence)
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
        config: dict[str, Any] = {
            **more.pop("generationConfig", {}),
            **limit_fields(request, "maxOutputTokens"),
        }
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
        own = write_tools(self.name, request, GEMINI_TOOLS)
        if len(request.tools):
            functions = (b'{"functionDeclarations":[', request.tools.encoded(_tool), b"]}")
            written["tools"] = joined_tools(own, *functions)
        elif own:
            written["tools"] = joined_tools(own)
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
    return {"text": text if text.strip() else EMPTY}


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
