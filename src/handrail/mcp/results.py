"""Tools and their results as MCP types."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote

import mcp_types as wire
import msgspec

from handrail.content import Attachment
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.result import json_of, shown_text


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
        input_schema=_plain(tool.json_schema),
        output_schema=_plain(output) if is_object else None,
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


def _plain(value: Any) -> Any:
    """Return a read-only schema as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in cast("Mapping[str, Any]", value).items()}
    return [_plain(each) for each in cast("list[Any]", value)] if isinstance(value, list | tuple) else value
