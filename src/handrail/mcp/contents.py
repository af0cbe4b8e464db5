"""Content blocks of MCP as text for a model.

Text is passed on. Everything else is described in words, because a tool's result is text. `describe` is the one place
to change once results can carry images and files.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcp_types import AudioContent, ContentBlock, EmbeddedResource, ImageContent, ResourceLink, TextContent
from mcp_types import TextResourceContents as TextResource

MAX_TEXT = 200_000
"""Maximum number of characters in one result. A longer one is cut, and a note says so."""


def text_of(blocks: Sequence[ContentBlock]) -> str:
    """Return content blocks as one text. After `MAX_TEXT` characters it is cut, and a note is added."""
    text = "\n".join(map(describe, blocks))
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n[cut: the result has {len(text):,} characters, and {MAX_TEXT:,} are shown]"


def describe(block: ContentBlock) -> str:
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
