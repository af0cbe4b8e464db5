"""Attachments in requests: which of them each provider's API takes, and in which form.

A text file is included as text. Any other attachment becomes a part of the message if the model takes it. Otherwise it is
described in words, so that the model knows what it was not shown.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from handrail.content import Attachment
from handrail.messages import Takes

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
