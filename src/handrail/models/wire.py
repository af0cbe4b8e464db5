"""What the wires have in common: JSON made once, schemas as providers want them, arguments as they came."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# What a provider sends has no types until it was looked at.

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

encode = msgspec.json.encode


_SMALL = 1 << 15
"""Texts up to this length are kept: many runs share them, and all of them together take little room."""


def text_json(text: str) -> bytes:
    """A text as JSON. What is sent with every request, as a prompt is, is written once unless it is large."""
    return _kept_json(text) if len(text) <= _SMALL else encode(text)


_kept_json = lru_cache(maxsize=64)(encode)


def object_text(arguments: str) -> str:
    """A call's arguments as a provider takes them back: an object, whatever the model had sent."""
    if not arguments:
        return "{}"
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError):
        found = None
    return arguments if isinstance(found, dict) else encode({"unreadable": arguments}).decode()


def raw_object(arguments: str) -> msgspec.Raw:
    """The same for a wire that wants an object and not its text."""
    return msgspec.Raw(object_text(arguments).encode())


def count(value: Any) -> int:
    """A number of tokens; nothing where a server sends something else."""
    return max(int(value), 0) if type(value) in (int, float) else 0


def body_of(fields: Mapping[str, Any], **written: bytes) -> bytes:
    """A request's body: plain fields, and some whose JSON is there already."""
    plain = encode(fields)
    parts = [b'"%s":%s' % (name.encode(), raw) for name, raw in written.items()]
    return b"{" + b",".join([plain[1:-1], *parts] if fields else parts) + b"}"


_NOT_STRICT = frozenset(
    {"allOf", "contains", "default", "dependentRequired", "if", "not", "oneOf", "patternProperties"}
    | {"prefixItems", "propertyNames", "unevaluatedProperties", "uniqueItems"}
)
"""Words that a strict mode refuses, and the whole request with them."""


def is_strict(schema: Any) -> bool:
    """Can a provider's strict mode hold a model to this schema? It wants every property to be required."""
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
