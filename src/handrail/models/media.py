"""Pictures and sounds in a model's answer: from the provider's form to attachments, and back.

What must be sent back to a provider is in `AssistantMessage.kept`, but without the bytes, which only the attachments have. A
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
from handrail.models.parts import encoded, in_words

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
