"""`RawSchema`: a JSON Schema that is not made from a Python type, and a parser for what a model sends.

Arguments that match it stay plain JSON: a dict. `check_foreign` and `check_schema` check the schema itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import pydantic_core

from handrail.errors import DefinitionError, ToolValidationError
from handrail.schema import Schema, clear_json, infinities_in, to_json
from handrail.schema.comparison import NUMBERS, WORDS, Rules, as_list, matcher, quoted
from handrail.schema.immutability import read_only
from handrail.schema.problems import Problem, as_count, asks_for_secrets, cut
from handrail.schema.references import (
    LISTS_OF_SCHEMAS,
    SCHEMAS,
    SCHEMAS_BY_NAME,
    target_of,
    walk,
    without_anchors,
)
from handrail.schema.secrets import WITHHELD, masked, masks_in


class RawSchema(Schema[dict[str, Any]]):
    """The JSON Schema of an object, given as plain data.

    With `definite`, only definite mistakes in a value are found. The code that runs the tool, such as a server, checks the rest.
    """

    __slots__ = ("_plain", "_rules")

    def __init__(self, json_schema: Mapping[str, Any], *, definite: bool = True) -> None:
        self.annotation = dict
        # Providers require a type and properties at the top level.
        whole = {**json_schema, "type": "object", "properties": json_schema.get("properties", {})}
        self.json_schema = read_only(whole)
        self._plain = without_anchors(self.json_schema)
        self.secret = asks_for_secrets(self._plain, self._plain)
        self.quick = None
        self._rules = Rules(self._plain, definite=definite)

    def parse(self, data: str | bytes) -> dict[str, Any]:
        try:
            value: Any = pydantic_core.from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ToolValidationError(f"not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ToolValidationError("the arguments are not a JSON object. Send an object: {...}.")
        wrong = [f"{each.where} {each.what}" for each in infinities_in(data, self.json_schema)]
        if not wrong:
            found = self._rules.misfits(cast("object", value), secret=self.secret)
            wrong = [f"{each.where or 'the arguments'} {each.what}" for each in found]
        if wrong:
            raise ToolValidationError("; ".join(wrong), [Problem("", each) for each in wrong])
        return cast("dict[str, Any]", value)

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict) and not self._rules.misfits(cast("object", value))

    def clear(self, value: object) -> bytes:
        return clear_json(value)

    def dump(self, value: dict[str, Any]) -> bytes:
        return to_json(masked(value, self._plain) if self.secret else value)

    def mask(self, data: str | bytes) -> str:
        try:
            value: Any = pydantic_core.from_json(data)
        except ValueError:
            return WITHHELD
        wrong = {each.where for each in self._rules.misfits(value, secret=True)}
        return self.dump(value).decode() if wrong <= set(masks_in(value)) else WITHHELD


# --- schemas from outside --------------------------------------------------------------------------

MAX_PARTS = 10_000
"""Maximum number of values in a schema, counting the schema itself and everything in its objects and lists."""
MAX_DEPTH = 64
"""Maximum depth of a schema."""

_MAX_NAME = 80
"""Maximum number of characters of a name in a message."""

_REFERENCES = frozenset(["$ref", "$dynamicRef"])
_LISTS = frozenset(["enum", "required", "examples"])


def check_foreign(schema: object, owner: str) -> None:
    """Raise `DefinitionError` unless the value has the shape of a JSON Schema, within the limits. Messages name its `owner`.

    Code that later walks the schema relies on this: keywords that contain schemas, references or lists have the right shapes, no
    reference leaves the schema, and it is neither large nor deeply nested. It may still refer to itself, so code that
    follows references must count its steps.
    """
    _check_size(schema, owner)
    left: list[tuple[Any, _Place | None]] = [(schema, None)]
    while left:
        part, at = left.pop()
        if isinstance(part, bool) and at is not None:
            continue  # `true` matches anything, `false` matches nothing
        if not isinstance(part, dict):
            raise _misshapen(owner, at, "is not a JSON Schema")
        left.extend(_inner(cast("dict[str, Any]", part), at, owner))


class _Place(NamedTuple):
    """The place of a part in its schema, such as `/properties/name`."""

    outer: _Place | None
    name: str | int

    def __str__(self) -> str:
        names: list[str] = []
        at: _Place | None = self
        while at is not None:
            names.append(cut(str(at.name), _MAX_NAME))
            at = at.outer
        return "".join(f"/{name}" for name in reversed(names))


def _inner(schema: Mapping[str, Any], at: _Place | None, owner: str) -> Iterator[tuple[Any, _Place]]:
    for word, given in schema.items():
        place = _Place(at, word)
        if word in SCHEMAS:
            yield given, place
        elif word in LISTS_OF_SCHEMAS:
            if not isinstance(given, list):
                raise _misshapen(owner, place, "is not a list of schemas")
            yield from ((each, _Place(place, number)) for number, each in enumerate(cast("list[Any]", given)))
        elif word in SCHEMAS_BY_NAME:
            if not isinstance(given, dict):
                raise _misshapen(owner, place, "is not an object of schemas")
            yield from ((each, _Place(place, name)) for name, each in cast("dict[str, Any]", given).items())
        elif word in _REFERENCES and not (isinstance(given, str) and given.startswith("#")):
            raise _misshapen(owner, place, f"is {quoted(given)}, which is not in the schema")
        elif word in _LISTS and not isinstance(given, list):
            raise _misshapen(owner, place, "is not a list")
        elif word == "required" and not all(isinstance(name, str) for name in cast("list[Any]", given)):
            raise _misshapen(owner, place, "is not a list of names")


def _check_size(schema: object, owner: str) -> None:
    """Raise `DefinitionError` if a schema is too large or too deep. This does not recurse, so deep nesting is harmless."""
    parts = 0
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        parts += len(level)
        if parts > MAX_PARTS:
            raise DefinitionError(
                f"the schema of {owner} has more than {MAX_PARTS} parts. Describe fewer fields and choices."
            )
        level = [inner for part in level for inner in _values(part)]
        if not level:
            return
    raise DefinitionError(
        f"the schema of {owner} is nested more than {MAX_DEPTH} levels deep. Make it flatter."
    )


def _values(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(cast("dict[str, Any]", part).values())
    return cast("list[Any]", part) if isinstance(part, list) else []


def _misshapen(owner: str, at: _Place | None, problem: str) -> DefinitionError:
    return DefinitionError(f"the schema of {owner} can't be used: {at or 'it'} {problem}. Correct it.")


_INSTEAD = {
    "unevaluatedProperties": "Use `additionalProperties`",
    "unevaluatedItems": "Use `items`",
    "$dynamicRef": "Use `$ref`",
    "$recursiveRef": "Use `$ref`",
    "dependencies": "Use `dependentRequired` or `dependentSchemas`",
    "additionalItems": "Use `prefixItems` and `items`",
}
"""The keywords that are not supported, and what to use instead."""


_COUNTS = frozenset(
    f"{limit}{what}" for limit in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")
)


def check_schema(schema: Mapping[str, Any], owner: str) -> None:
    """Raise `DefinitionError` unless this is the JSON Schema of an object, and every rule in it can be checked."""
    check_foreign(schema, owner)
    if schema.get("type") != "object":
        raise DefinitionError(
            f'the schema of {owner} has no "type": "object". Add it, because arguments are always an object.'
        )
    schema = without_anchors(schema)
    for place, part in walk(schema):
        for word, given in part.items():
            problem, hint = _problem_of(word, given, schema)
            if problem:
                raise DefinitionError(
                    f"the schema of {owner} can't be used: {place}/{word} {problem}. {hint}."
                )


def _problem_of(word: str, given: Any, root: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is wrong with a keyword or its value, and what to do. Both are "" if nothing is wrong."""
    if word in _INSTEAD:
        return "is not supported", _INSTEAD[word]
    if word == "$ref" and (not isinstance(given, str) or target_of(given, root, None) is None):
        return f"is {quoted(given)}, which is not in the schema", "Refer to a part of it, as in #/$defs/name"
    if word == "type" and not all(kind in [*WORDS] for kind in as_list(given)):
        return f"is {quoted(given)}", f"Use one of {', '.join(WORDS)}, or a list of these"
    if word in _COUNTS and as_count(given) is None:
        return f"is {quoted(given)}", "Use a whole number of at least 0"
    if word in NUMBERS and not _is_number(given):
        return f"is {quoted(given)}", "Use a number"
    if word == "multipleOf" and cast("float", given) <= 0:
        return f"is {quoted(given)}", "Use a number above 0"
    if word == "dependentRequired" and not _is_lists_by_name(given):
        return f"is {quoted(given)}", "Use an object whose values are lists of names"
    patterns: Iterable[Any] = [given] if word == "pattern" else given if word == "patternProperties" else ()
    for pattern in patterns:
        try:
            matcher(pattern)
        except (pydantic_core.SchemaError, TypeError):
            return (
                f"has the pattern {quoted(pattern)}",
                "Use a valid pattern, without look-around and back-references",
            )
    return "", ""


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _is_lists_by_name(given: object) -> bool:
    return isinstance(given, dict) and all(
        isinstance(each, list) for each in cast("dict[str, Any]", given).values()
    )
