"""Attachments in requests and answers, in the forms of the providers' APIs.

In a request, a text file is included as text. Any other attachment becomes a part of the message if the model takes it. Otherwise
it is described in words, so that the model knows what it was not shown.

Pictures and sounds in an answer become attachments. What must be sent back to a provider is in `AssistantMessage.kept`, but without the bytes, which only the attachments have. A
place in it says where the bytes of the next attachment belong.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is validated.

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from handrail.content import MAX_BYTES, Attachment, recognise_type
from handrail.errors import DefinitionError
from handrail.messages import AssistantMessage, Takes
from handrail.models import ModelAnswerBroken
from handrail.models.blocks import decode

IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
PDF = "application/pdf"
_OFFICE = "application/vnd.openxmlformats-officedocument"
DOCUMENTS = frozenset(
    {PDF, "application/msword", "application/rtf", "application/vnd.oasis.opendocument.text"}
    | {f"{_OFFICE}.{name}" for name in ("wordprocessingml.document", "presentationml.presentation")}
    | {f"{_OFFICE}.spreadsheetml.sheet", "application/vnd.ms-excel", "application/vnd.ms-powerpoint"}
)
_FORMATS = {"audio/wav": "wav", "audio/mpeg": "mp3"}
AUDIO = frozenset(_FORMATS)
SOUNDS = {
    **{name: media_type for media_type, name in _FORMATS.items()},
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}
"""The media type of each format in which the chat completions API gives sounds."""

CHAT_TAKES = Takes(IMAGES | {PDF} | AUDIO, IMAGES)
RESPONSES_TAKES = Takes(IMAGES | DOCUMENTS, IMAGES | DOCUMENTS)
GEMINI_TAKES = Takes((IMAGES - {"image/gif"}) | {PDF, "audio/ogg", "audio/flac", "audio/aac"} | AUDIO)
ANTHROPIC_TAKES = Takes(IMAGES | {PDF}, IMAGES | {PDF})

ONLY_TEXT = Takes()
ONLY_IMAGES = Takes(IMAGES, IMAGES)
ONLY_AUDIO = Takes(AUDIO)

EMPTY = "(nothing)"
"""Text that is sent instead of empty text, for APIs that refuse it."""
RETURNED = "This is from the result of {} above, not from a person:"
"""Text before an attachment that a tool returned, for APIs that take only text in a tool's result."""


def encoded(attachment: Attachment) -> str:
    """Return the attachment's bytes in base64."""
    return base64.b64encode(attachment.content).decode()


def data_url(attachment: Attachment) -> str:
    """Return the attachment's address, or, if it has none, its bytes as a data URL."""
    return attachment.address or f"data:{attachment.media_type};base64,{encoded(attachment)}"


def in_words(attachment: Attachment, takes: Takes) -> str:
    """Return the text that replaces an attachment: its own text, or a line that says why it is not shown."""
    if attachment.is_text:
        return with_fence(attachment)
    why = takes.problem(attachment) or "this API shows it only in a person's message"
    return f"{attachment.render()} (It is not shown to you: {why}.)"


def with_fence(attachment: Attachment) -> str:
    """Return the attachment's description, followed by its text in a code fence that does not occur in the text."""
    text, fence = attachment.text(), "```"
    while fence in text:
        fence += "`"
    return f"{attachment.render()}\n{fence}\n{text.rstrip()}\n{fence}"


def text_with(text: str, attachments: Sequence[Attachment], takes: Takes) -> str:
    """Return the text of a message, followed by the text or a description of each attachment that is not sent as a part."""
    left = [in_words(each, takes) for each in attachments if not takes.sends(each)]
    return "\n\n".join(filter(None, (text, *left)))


def only_in_words(text: str, attachments: Sequence[Attachment]) -> str:
    """Return the text of a message for a model that takes nothing but text."""
    return text_with(text, attachments, ONLY_TEXT) if attachments else text


# --- the forms of each API ---


def chat_parts(text: str, attachments: Sequence[Attachment], takes: Takes) -> list[dict[str, Any]]:
    """Return the content of a user message for the chat completions API."""
    said = text_with(text, attachments, takes)
    parts: list[dict[str, Any]] = [{"type": "text", "text": said}] if said else []
    return parts + [_chat_part(each) for each in attachments if takes.sends(each)]


def _chat_part(attachment: Attachment) -> dict[str, Any]:
    if attachment.kind == "image":
        return {"type": "image_url", "image_url": {"url": data_url(attachment)}}
    if attachment.kind == "audio":
        sound = {"data": encoded(attachment), "format": _FORMATS[attachment.media_type]}
        return {"type": "input_audio", "input_audio": sound}
    return {"type": "file", "file": {"filename": attachment.filename, "file_data": data_url(attachment)}}


def responses_parts(text: str, attachments: Sequence[Attachment], takes: Takes) -> list[dict[str, Any]]:
    """Return the content of a message, or the output of a call, for the responses API."""
    said = text_with(text, attachments, takes)
    parts: list[dict[str, Any]] = [{"type": "input_text", "text": said}] if said else []
    return parts + [_responses_part(each) for each in attachments if takes.sends(each)]


def _responses_part(attachment: Attachment) -> dict[str, Any]:
    if attachment.kind == "image":
        return {"type": "input_image", "detail": "auto", "image_url": data_url(attachment)}
    if attachment.address:
        return {"type": "input_file", "file_url": attachment.address}
    return {"type": "input_file", "filename": attachment.filename, "file_data": data_url(attachment)}


def anthropic_blocks(text: str, attachments: Sequence[Attachment], takes: Takes) -> list[dict[str, Any]]:
    """Return the content of a user message, or of a tool result, for the messages API."""
    said = text_with(text, attachments, takes)
    blocks = [_anthropic_block(each) for each in attachments if takes.sends(each)]
    return [*blocks, {"type": "text", "text": said}] if said.strip() else blocks


def _anthropic_block(attachment: Attachment) -> dict[str, Any]:
    source = (
        {"type": "url", "url": attachment.address}
        if attachment.address
        else {"type": "base64", "media_type": attachment.media_type, "data": encoded(attachment)}
    )
    if attachment.kind == "image":
        return {"type": "image", "source": source}
    return {"type": "document", "source": source, "title": attachment.filename}


def gemini_parts(text: str, attachments: Sequence[Attachment], takes: Takes) -> list[dict[str, Any]]:
    """Return the parts of a user's content for the Gemini API, or [] if there is neither text nor an attachment."""
    said = text_with(text, attachments, takes)
    parts: list[dict[str, Any]] = [{"text": said}] if said.strip() else []
    return parts + [
        {"inlineData": {"mimeType": each.media_type, "data": encoded(each)}}
        for each in attachments
        if takes.sends(each)
    ]


# --- answers ---

PLACE = "handrail:attachment"
"""The place of an attachment's bytes in what is kept of an answer. It is not base64, so it can't be data of a provider."""
_PLACE_OF_SAMPLES = "handrail:attachment;samples"
"""The place of a sound's bytes without the header that was added to them."""
_FIELDS = ("data", "result", "url")
"""The fields that can hold a place."""

_MOST_WORDS = 256
"""Upper bound for the bytes that a description adds to the line about an attachment."""

_SAMPLES = re.compile(r"audio/(?:l16|pcm)\b", re.IGNORECASE)
"""Matches the media type of bare samples, each of which is a signed integer of two bytes, the lower one first."""
_RATE = re.compile(r"rate=(\d{1,6})")
_USUAL_RATE = 24000
_HEADER = struct.Struct("<4sI8sIHHIIHH4sI")
_PADDED = re.compile(r"[^=]+={0,2}")


def attachment_of(model: str, data: Any, media_type: str | None = None) -> Attachment:
    """Return the attachment for a picture or a sound that a model made, from its base64.

    The base64 may be several pieces, each with its own padding. Bare samples get the header of a WAV file, so that they can be
    played. Raises `ModelAnswerBroken` if the data is not base64, or is empty or too large.
    """
    try:
        text = "".join(data.split()).replace("-", "+").replace("_", "/")
        _check_size(model, (len(text) - text.count("=")) * 3 // 4)
        pieces = [piece + "=" * (-len(piece) % 4) for piece in _PADDED.findall(text)]
        content = b"".join([base64.b64decode(piece, validate=True) for piece in pieces])
    except ModelAnswerBroken:
        raise
    except (AttributeError, ValueError, binascii.Error):
        raise ModelAnswerBroken(model, "a picture or a sound in its answer is not valid base64") from None
    return attachment_with(model, content, media_type)


def _check_size(model: str, size: int) -> None:
    if size > MAX_BYTES:
        raise ModelAnswerBroken(
            model, f"a picture or a sound in its answer has {size} bytes, and at most {MAX_BYTES} are allowed"
        )


def attachment_with(model: str, content: bytes, media_type: str | None) -> Attachment:
    """Return the attachment with these bytes. Raises `ModelAnswerBroken` if there are none, or too many.

    What the first bytes show comes before the media type that the provider gives, because other providers compare the two.
    """
    if not content:
        raise ModelAnswerBroken(model, "a picture or a sound in its answer is empty")
    _check_size(model, len(content))
    if media_type and are_samples(media_type):
        return Attachment(_with_header(content, media_type), media_type="audio/wav")
    recognised = None if media_type and media_type.startswith("text/") else recognise_type(content)
    with contextlib.suppress(DefinitionError):  # raised if the provider's media type is invalid
        return Attachment(content, media_type=recognised or media_type)
    return Attachment(content)


def attachment_at(model: str, url: Any) -> Attachment:
    """Return the attachment for a data URL, or for an address on the web. Raises `ModelAnswerBroken` for anything else."""
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if head[:5].lower() == "data:":
        kind, *parameters = head[5:].split(";")
        if any(each.strip().lower() == "base64" for each in parameters):
            return attachment_of(model, unquote(data), kind or None)
        return attachment_with(model, unquote_to_bytes(data), kind or "text/plain")
    try:
        if not str(url).startswith(("https://", "http://")):
            raise DefinitionError("it is neither data nor an address on the web.")
        return Attachment(url)
    except DefinitionError as error:
        problem = str(error).rstrip(".")
        raise ModelAnswerBroken(
            model, f"a picture or a sound in its answer can't be used: {problem}"
        ) from None


def are_samples(media_type: Any) -> bool:
    """Return whether a sound with this media type is bare samples, without the header of a file."""
    return isinstance(media_type, str) and _SAMPLES.match(media_type) is not None


def _with_header(samples: bytes, media_type: str) -> bytes:
    """Return samples of one channel as a WAV file."""
    found = _RATE.search(media_type)
    rate, size = int(found[1]) if found else _USUAL_RATE, len(samples)
    header = _HEADER.pack(b"RIFF", size + 36, b"WAVEfmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", size)
    return header + samples


# --- back to the provider ---


def place_for(media_type: Any = None) -> str:
    """Return the place that is kept instead of the bytes of this media type."""
    return _PLACE_OF_SAMPLES if are_samples(media_type) else PLACE


def kept_data(message: AssistantMessage, wire: str, write: Callable[[Attachment], str] = encoded) -> Any:
    """Return what a provider requires back of an answer, with the bytes of its attachments, as `write` writes them.

    Returns None if there is nothing, if another wire gave the answer, or if the bytes are no longer available.
    """
    kept = message.kept
    if kept is None or kept.wire != wire:
        return None
    data = decode(kept.data)
    if PLACE.encode() not in kept.data:
        return data
    try:
        return _filled(data, iter(message.attachments), write)
    except LookupError:
        return None


def _filled(value: Any, attachments: Iterator[Attachment], write: Callable[[Attachment], str]) -> Any:
    """Return a value with its places filled. Raises `LookupError` if the bytes for one are missing."""
    if isinstance(value, list):
        return [_filled(each, attachments, write) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _bytes_for(each, attachments, write)
        if name in _FIELDS and each in (PLACE, _PLACE_OF_SAMPLES)
        else _filled(each, attachments, write)
        for name, each in value.items()
    }


def _bytes_for(place: str, attachments: Iterator[Attachment], write: Callable[[Attachment], str]) -> str:
    attachment = next(attachments, None)
    if attachment is None or not (attachment.is_here or attachment.address):
        raise LookupError
    if place == PLACE:
        return write(attachment)
    return base64.b64encode(attachment.content[_HEADER.size :]).decode()


def token_bound_of(message: AssistantMessage) -> int:
    """Return an upper estimate of the tokens for what a model made, in the form in which the next request sends it back."""
    kept = message.kept
    if kept is not None and PLACE.encode() in kept.data:
        return sum(each.token_bound for each in message.attachments)
    return sum(
        (each.size if each.is_text else 0) + len(each.render().encode()) + _MOST_WORDS
        for each in message.attachments
    )


def said_in_words(message: AssistantMessage, takes: Takes) -> str:
    """Return an answer's text for an API that takes only text from a model. Attachments are described in their places."""
    if not message.attachments:
        return message.text
    parts: Sequence[str | Attachment] = message.parts
    return "\n\n".join(part if isinstance(part, str) else in_words(part, takes) for part in parts)
