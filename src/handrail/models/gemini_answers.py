"""Answers of the Gemini API, complete or streamed, as the parts of an answer."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from handrail.errors import ModelError
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
from handrail.models import ModelAnswerBroken
from handrail.models.blocks import outside_line
from handrail.models.failures import failure_in_answer
from handrail.models.grammar import is_object
from handrail.models.http import Endpoint, count, encode
from handrail.models.media import are_samples, attachment_of, place_for
from handrail.models.partial_calls import PartialCall

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
            given = "" if call.get("args") is None else encode(call["args"]).decode()
            yield CallPart(self._calls, call.get("id") or "", self._renamed.get(name, name), given)
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
        if all("thoughtSignature" not in part and (_is_call(part) or _is_text(part)) for part in self._parts):
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


def _is_text(part: Mapping[str, Any]) -> bool:
    return set(part) == {"text"}


def _is_call(part: Mapping[str, Any]) -> bool:
    return set(part) == {"functionCall"}


def _thinks(part: Mapping[str, Any]) -> bool:
    return bool(part.get("thought"))


def _usage(usage: Mapping[str, Any], searches: int) -> Usage:
    """Return the token usage of a request, with the number of searches that are charged for.

    Thoughts count as output, and the results of the provider's own tools count as input.
    """
    sent = count(usage.get("promptTokenCount")) + count(usage.get("toolUsePromptTokenCount"))
    said = count(usage.get("candidatesTokenCount")) + count(usage.get("thoughtsTokenCount"))
    return Usage(sent, said, count(usage.get("cachedContentTokenCount")), 0, 1, searches)
