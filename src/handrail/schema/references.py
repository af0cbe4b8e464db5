"""References inside a JSON Schema, such as `#/$defs/Name`, and the keywords whose values are schemas themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote

SCHEMAS = frozenset(
    [
        "items",
        "additionalProperties",
        "propertyNames",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
"""The keywords whose value is a schema."""
LISTS_OF_SCHEMAS = frozenset(["anyOf", "oneOf", "allOf", "prefixItems"])
SCHEMAS_BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])

_ANYTHING: Mapping[str, Any] = {}


def target_of(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference points to (RFC 6901).

    Returns a schema that matches anything if the reference leaves the document, or points to something that is not a schema.
    """
    start, *path = unquote(reference).split("/")
    target: Any = root if start == "#" else None
    steps = iter(path)
    for step in steps:
        word = _name_of(step)
        part: Any = cast("Mapping[str, Any]", target).get(word)
        if word in SCHEMAS_BY_NAME and isinstance(part, Mapping):
            target = cast("Mapping[str, Any]", part).get(_name_of(next(steps, "")))
        elif word in LISTS_OF_SCHEMAS and isinstance(part, list | tuple):
            numbered = enumerate(cast("list[Any]", part))
            index = next(steps, "")
            target = next((each for number, each in numbered if str(number) == index), None)
        else:
            target = part if word in SCHEMAS else None
        if not isinstance(target, Mapping):
            break
    is_whole = next(steps, None) is None
    return cast("Any", target) if isinstance(target, Mapping | bool) and is_whole else _ANYTHING


def _name_of(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")
