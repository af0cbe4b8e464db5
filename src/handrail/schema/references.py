"""References inside a JSON Schema, such as `#/$defs/Name`, and the keywords whose values are schemas themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote, unquote

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


def target_of(reference: str, root: Mapping[str, Any], missing: Any = _ANYTHING) -> Any:
    """Return the schema that a reference points to (RFC 6901).

    Returns `missing`, by default a schema that matches anything, if the reference leaves the document, or points to nothing
    or to something that is not a schema.
    """
    start, *path = unquote(reference).split("/")
    if start != "#":
        return missing
    target: Any = root
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
    return cast("Any", target) if isinstance(target, Mapping | bool) and is_whole else missing


def _name_of(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def walk(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a schema and all schemas inside it except `true` and `false`, each with its reference, such as `#/properties/name`."""
    left: list[tuple[str, Mapping[str, Any]]] = [("#", schema)]
    while left:
        place, part = left.pop()
        yield place, part
        for word, name, inner in _inner(part):
            step = "" if name is None else f"/{_step_of(str(name))}"
            left.append((f"{place}/{word}{step}", inner))


def schemas_in(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas inside it except `true` and `false`."""
    left = [schema]
    while left:
        part = left.pop()
        yield part
        left.extend(inner for _, _, inner in _inner(part))


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Mapping[str, Any]]]:
    """Yield the schemas directly inside a schema, each with its keyword and, if the keyword has several, its name or index."""
    for word, given in schema.items():
        named: Any = ()
        if word in SCHEMAS:
            named = ((None, given),)
        elif word in LISTS_OF_SCHEMAS and isinstance(given, list):
            named = enumerate(cast("list[Any]", given))
        elif word in SCHEMAS_BY_NAME and isinstance(given, Mapping):
            named = cast("Mapping[str, Any]", given).items()
        for name, inner in named:
            if isinstance(inner, Mapping):
                yield word, name, cast("Mapping[str, Any]", inner)


def without_anchors(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with each reference to an `$anchor` replaced by one that gives the path, such as `#/$defs/Name`."""
    anchors = {f"#{part['$anchor']}": place for place, part in walk(schema) if "$anchor" in part}
    return cast("Mapping[str, Any]", _renamed(schema, anchors)) if anchors else schema


def _renamed(part: Any, anchors: Mapping[str, str]) -> Any:
    if isinstance(part, Mapping):
        named = cast("Mapping[str, Any]", part)
        made = {word: _renamed(each, anchors) for word, each in named.items()}
        reference = named.get("$ref")
        return (
            {**made, "$ref": anchors[reference]}
            if isinstance(reference, str) and reference in anchors
            else made
        )
    return [_renamed(each, anchors) for each in cast("list[Any]", part)] if isinstance(part, list) else part


def _step_of(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")
