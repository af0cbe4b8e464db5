"""Content blocks and descriptions of tools: MCP's as text and attachments for a model, and our own as MCP types.

Of a server's answer, text is passed on, and so is the text of a file. Images, sounds and binary files become attachments, and the text
describes them. A link is only described, because addresses that a server names are not fetched.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

import mcp_types as wire
import msgspec
from mcp_types import AudioContent, ContentBlock, EmbeddedResource, ImageContent, ResourceLink, TextContent
from mcp_types import TextResourceContents as TextResource

from handrail.content import Attachment
from handrail.errors import DefinitionError
from handrail.text.secrets import Secrets
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.result import json_of, shown_text

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
    """Yield the name, the media type, if known, and the base64 text of each image, sound and binary file.

    A link is left out, because addresses that a server names are not fetched.
    """
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


# --- our own tools and results ---


def describe(tool: Tool[Any, Any]) -> wire.Tool:
    """Return the MCP description of a tool. The annotations in it follow from the tool's effect.

    The description has an output schema only if the tool's result is an object.
    """
    rules = EFFECTS[tool.effect]
    result = tool.result_schema
    output = None if result is None else dict(result.json_schema)
    is_object = output is not None and output.get("type") == "object"
    return wire.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=plain_schema(tool.json_schema),
        output_schema=plain_schema(output) if is_object else None,
        annotations=wire.ToolAnnotations(
            read_only_hint=not rules.writes,
            destructive_hint=tool.effect in ("irreversible", "compensable"),
            idempotent_hint=tool.effect in ("pure", "read", "idempotent"),
        ),
    )


def content_of(result: ToolResult[Any]) -> wire.CallToolResult:
    """Return a result as MCP content: its text, its attachments, and its value.

    The value is included only if the call succeeded, and the value is an object that JSON can express and that is not
    excluded from the context. The text is left out if there are only attachments.
    """
    text = shown_text(result)
    is_bare = result.attachments and result.value is None and not result.message
    content: list[Any] = [
        *([] if is_bare else [wire.TextContent(text=text)]),
        *map(block_of, result.attachments),
    ]
    if not result.success:
        return wire.CallToolResult(content=content, is_error=True)
    value = None if result.exclude_value_from_context else _object_of(result)
    return wire.CallToolResult(content=content, structured_content=value)


def _object_of(result: ToolResult[Any]) -> dict[str, Any] | None:
    """Return a result's value; None if it is not an object, or has a number that JSON does not have, such as NaN."""
    try:
        value: Any = msgspec.json.decode(json_of(result))
    except msgspec.DecodeError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def block_of(attachment: Attachment) -> Any:
    """Return an attachment as a content block: an image, a sound, an embedded file, a link, or a note that the bytes are missing."""
    kind, name = attachment.media_type, attachment.name
    if attachment.address:
        return wire.ResourceLink(name=name, uri=attachment.address, mime_type=kind)
    if not attachment.is_here:
        return wire.TextContent(text=f"[{kind} {name}: its bytes are no longer available]")
    data = base64.b64encode(attachment.content).decode()
    if attachment.kind == "image":
        return wire.ImageContent(data=data, mime_type=kind)
    if attachment.kind == "audio":
        return wire.AudioContent(data=data, mime_type=kind)
    uri = f"attachment:///{quote(name)}"
    try:
        text = None if attachment.kind == "document" else attachment.content.decode()
    except UnicodeDecodeError:
        text = None
    if text is None:
        return wire.EmbeddedResource(resource=wire.BlobResourceContents(uri=uri, mime_type=kind, blob=data))
    return wire.EmbeddedResource(resource=wire.TextResourceContents(uri=uri, mime_type=kind, text=text))


def plain_schema(value: Any) -> Any:
    """Return a read-only schema as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {name: plain_schema(each) for name, each in cast("Mapping[str, Any]", value).items()}
    return (
        [plain_schema(each) for each in cast("list[Any]", value)]
        if isinstance(value, list | tuple)
        else value
    )
