"""Attachments over HTTP: receiving them with a message, describing them to clients, and serving them.

Pictures, sounds and PDFs of the types in `SHOWN`, recognised by their first bytes, are served inline and sandboxed.
Everything else is a download, because it may contain code that a browser would run.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.responses import Response

from handrail.content import Attachment, guess_type
from handrail.errors import DefinitionError
from handrail.serve.refusals import RequestRefused

SHOWN = frozenset(
    {
        "image/png",
        "image/jpeg",
        "image/gif",
        "image/webp",
        "audio/wav",
        "audio/mpeg",
        "audio/ogg",
        "application/pdf",
    }
)
"""Media types that a browser may show. SVG is not among them, because it can contain scripts."""
_SANDBOX = "default-src 'none'; sandbox"


def facts_of(attachments: Iterable[Attachment]) -> list[dict[str, Any]]:
    """Return the fields that clients get for each attachment.

    `url` is the attachment's own address on the web, or else a path relative to the thread's address.
    """
    return [
        {
            "name": each.name,
            "kind": each.kind,
            "media_type": each.media_type,
            "size": each.size,
            "url": each.address or f"attachments/{each.digest}",
        }
        for each in attachments
    ]


def parts_of(text: str, attachments: Sequence[Attachment]) -> str | list[dict[str, Any]]:
    """Return a user's message as AG-UI content: text, or parts if it has attachments."""
    if not attachments:
        return text
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for each, facts in zip(attachments, facts_of(attachments), strict=True):
        source = {"type": "url", "value": facts["url"], "mimeType": each.media_type}
        kind = each.kind if each.kind in ("image", "audio") else "document"
        parts.append({"type": kind, "source": source, "metadata": {"name": each.name, "size": each.size}})
    return parts


def received(place: str, data: str | bytes, name: str, media_type: str | None = None) -> Attachment:
    """Return the attachment for a file that a client sent, as bytes or in base64.

    Raises `RequestRefused` if the file is invalid.
    """
    try:
        content = data if isinstance(data, bytes) else base64.b64decode(data, validate=True)
        return Attachment(content, name, media_type=media_type or None)
    except (binascii.Error, ValueError) as error:
        problem = str(error) if isinstance(error, DefinitionError) else "the data is not base64"
        raise RequestRefused(
            422, "AttachmentUnfit", f"At {place}: {problem}", fields=[(place, problem)]
        ) from None


def check_number(number: int, limit: int) -> None:
    """Raise `RequestRefused` if one message has more attachments than the server allows."""
    if number > limit:
        raise RequestRefused(
            413,
            "TooManyAttachments",
            f"the message has {number} attachments, and at most {limit} are allowed. Attach fewer.",
        )


def check_total(attachments: Iterable[Attachment], limit: int) -> None:
    """Raise `RequestRefused` if the attachments of one message are together larger than the server allows."""
    total = sum(each.size for each in attachments)
    if total > limit:
        raise RequestRefused(
            413,
            "AttachmentsTooLarge",
            f"the attachments total {total} bytes, and at most {limit} are allowed. Attach fewer or smaller files.",
        )


def response_with(content: bytes, digest: str) -> Response:
    """Return a response with an attachment's bytes. Their type is recognised from the bytes, not taken from a client.

    Like everything that the guard lets only some people see, they are not cached: a cache would outlive the session.
    """
    found = guess_type(content)
    shown = found in SHOWN
    suffix = found.rpartition("/")[2] if shown else "bin"
    headers = {
        "content-disposition": f'{"inline" if shown else "attachment"}; filename="{digest[:12]}.{suffix}"',
        "content-security-policy": _SANDBOX,
    }
    return Response(content, headers=headers, media_type=found if shown else "application/octet-stream")
