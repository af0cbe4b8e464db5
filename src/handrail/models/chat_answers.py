"""Answers of the chat completions API, complete or streamed, as the parts of an answer."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from handrail.messages import (
    AttachmentPart,
    CallPart,
    Kept,
    ModelPart,
    StopPart,
    StopReason,
    TextPart,
    ThinkingPart,
    Usage,
    UsagePart,
)
from handrail.models.blocks import is_block, joined, without
from handrail.models.failures import failure_in_answer
from handrail.models.grammar import arguments_text
from handrail.models.http import Endpoint, count, encode
from handrail.models.media import PLACE, attachment_at, attachment_of

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
