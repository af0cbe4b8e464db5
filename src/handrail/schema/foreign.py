"""Foreign schemas: a check of JSON Schemas that come from outside, such as those of a client's own tools.

Code that later walks the schema relies on this check: keywords that contain schemas, references or lists have the right
shapes, no reference leaves the schema, and the schema is neither large nor deeply nested. The schema may still refer to
itself, so code that follows references must count its steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from handrail.errors import DefinitionError
from handrail.schema.misfits import quoted
from handrail.schema.problems import cut
from handrail.schema.references import LISTS_OF_SCHEMAS, SCHEMAS, SCHEMAS_BY_NAME

MAX_PARTS = 10_000
"""Maximum number of values in a schema, counting the schema itself and everything in its objects and lists."""
MAX_DEPTH = 64
"""Maximum depth of a schema."""

_MAX_NAME = 80
"""Maximum number of characters of a name in a message."""

_REFERENCES = frozenset(["$ref", "$dynamicRef"])
_LISTS = frozenset(["enum", "required", "examples"])


def check_foreign(schema: object, owner: str) -> None:
    """Raise `DefinitionError` unless the value has the shape of a JSON Schema, within the limits. Messages name its `owner`."""
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
