"""What the wires share: JSON encoded once, schemas as providers want them, arguments as they came."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# Provider data is untyped until it is checked.

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

encode = msgspec.json.encode


_SMALL = 1 << 15
"""Maximum length of cached texts: many runs share them, and together they take little memory."""


def text_json(text: str) -> bytes:
    """Encode a text as JSON. Text that is sent with every request is encoded once, unless it is large."""
    return _kept_json(text) if len(text) <= _SMALL else encode(text)


_kept_json = lru_cache(maxsize=64)(encode)


def object_text(arguments: str) -> str:
    """Return a call's arguments as a provider takes them back: an object, whatever the model sent."""
    if not arguments:
        return "{}"
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError):
        found = None
    return arguments if isinstance(found, dict) else encode({"unreadable": arguments}).decode()


def raw_object(arguments: str) -> msgspec.Raw:
    """Return a call's arguments for a wire that wants an object instead of text."""
    return msgspec.Raw(object_text(arguments).encode())


def count(value: Any) -> int:
    """Return a token count; 0 if a server sends something else."""
    return max(int(value), 0) if type(value) in (int, float) else 0


def body_of(fields: Mapping[str, Any], **written: bytes) -> bytes:
    """Build a request body from plain fields and fields that are already JSON."""
    plain = encode(fields)
    parts = [b'"%s":%s' % (name.encode(), raw) for name, raw in written.items()]
    return b"{" + b",".join([plain[1:-1], *parts] if fields else parts) + b"}"


_NOT_STRICT = frozenset(
    {"allOf", "contains", "default", "dependentRequired", "if", "not", "oneOf", "patternProperties"}
    | {"prefixItems", "propertyNames", "unevaluatedProperties", "uniqueItems"}
)
"""Keywords that a strict mode refuses, together with the whole request."""


def is_strict(schema: Any) -> bool:
    """Whether a provider's strict mode can enforce this schema. It requires every property."""
    if isinstance(schema, list):
        return all(is_strict(each) for each in schema)
    if not isinstance(schema, Mapping):
        return True
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and set(properties) != set(schema.get("required", ())):
        return False
    if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
        return False
    if not _NOT_STRICT.isdisjoint(schema) or ("$ref" in schema and len(schema) > 1):
        return False
    return all(is_strict(each) for each in schema.values())
