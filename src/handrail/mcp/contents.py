"""Content blocks of MCP as text and attachments for a model.

Text is passed on, and so is the text of a file. Images, sounds and binary files become attachments, and the text
describes them. A link is only described, because addresses that a server names are not fetched.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence

from mcp_types import AudioContent, ContentBlock, EmbeddedResource, ImageContent, ResourceLink, TextContent
from mcp_types import TextResourceContents as TextResource

from handrail.content import Attachment
from handrail.errors import DefinitionError
from handrail.text.secrets import Secrets

MAX_TEXT = 200_000
"""Maximum number of characters in one result. A longer one is cut, and a note says so."""


def text_of(blocks: Sequence[ContentBlock]) -> str:
    """Return content blocks as one text. After `MAX_TEXT` characters it is cut, and a note is added."""
    text = "\n".join(map(describe_block, blocks))
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n[cut: the result has {len(text):,} characters, and {MAX_TEXT:,} are shown]"


def attachments_in(blocks: Sequence[ContentBlock], secrets: Secrets) -> tuple[Attachment, ...]:
    """Return the images, sounds and binary files among content blocks as attachments, with the secrets in them hidden.

    Those that are not valid, or too large, are left out.
    """
    found: list[Attachment] = []
    for name, media_type, data in _files(blocks):
        try:
            content = secrets.hide_in_bytes(base64.b64decode(data, validate=True))
            found.append(Attachment(content, secrets.hide(name), media_type=media_type))
        except (binascii.Error, DefinitionError):
            continue  # the text still describes the file
    return tuple(found)


def _files(blocks: Sequence[ContentBlock]) -> Iterator[tuple[str, str | None, str]]:
    """Yield the name, the media type, if known, and the base64 text of each image, sound and binary file."""
    for block in blocks:
        match block:
            case ImageContent() | AudioContent():
                yield "", block.mime_type, block.data
            case EmbeddedResource() if not isinstance(block.resource, TextResource):
                inner = block.resource
                yield str(inner.uri).rstrip("/").rpartition("/")[2], inner.mime_type, inner.blob
            case _:
                pass


def describe_block(block: ContentBlock) -> str:
    """Return one block as text: its own text, or words that say what it is."""
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.mime_type}, {_size(block.data)}]"
        case ResourceLink():
            return f"[link to {block.name}: {block.uri}]"
        case EmbeddedResource():
            inner = block.resource
            if isinstance(inner, TextResource):
                return f"[{inner.uri}]\n{inner.text}"
            return f"[{inner.mime_type or 'file'} {inner.uri}, {_size(inner.blob)}]"


def _size(base64: str) -> str:
    size = len(base64) * 3 // 4
    return f"{size} bytes" if size < 1000 else f"{size // 1000} kB"
