"""Misfits: the definite mistakes in a value, found with its JSON Schema alone.

A process that accepts an answer for another process does not have the Python type, and a client's tool has none. The
schema may come from outside, so the work is bounded: each part of the schema is compared with each part of the value
at most once, and the number of comparisons is limited. Otherwise, unions that refer to themselves would double the work
at each level.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

from handrail.schema.problems import location_of

MAX_STEPS = 100_000
"""Maximum number of comparisons of a part of a value with a part of its schema."""
_MAX_DEPTH = 100
"""Maximum depth of a comparison, through the value and through references and unions of the schema."""
_MAX_SHOWN = 50
"""Maximum number of choices or field names in one message."""
_MAX_FOUND = 100
"""Maximum number of mistakes reported at once."""

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
_WORDS = {
    "object": "an object",
    "array": "a list",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "integer": "a whole number",
    "number": "a number",
}
_ANYTHING: Mapping[str, Any] = {}
_TOO_COSTLY = (
    f"can't be checked: comparing it with its schema takes more than {MAX_STEPS} steps or {_MAX_DEPTH} levels. "
    "Send less, or use a schema with fewer alternatives"
)


class Misfit(NamedTuple):
    """One definite mistake in a value."""

    where: str
    """The location of the mistake, such as `orders[2].price`; "" for the value itself."""
    what: str
    wanted: str
    """The same text as `what`, but without the given value."""

    def __str__(self) -> str:
        return f"{self.where or 'the answer'} {self.what}"


def misfits(schema: Mapping[str, Any], value: object, *, secret: bool = False) -> list[Misfit]:
    """Return the definite mistakes in a value: wrong types, missing and unknown fields, invalid choices.

    Everything else is checked by the process that has the Python type. With `secret`, no part of the value is
    repeated. If checking takes too many steps or levels, the only mistake says so.
    """
    comparison = Comparison(schema)
    try:
        found = comparison.run(value)
    except _TooCostlyError:
        found = [Misfit("", _TOO_COSTLY, _TOO_COSTLY)]
    return [Misfit(each.where, each.wanted, each.wanted) for each in found] if secret else found


class _TooCostlyError(Exception):
    """Raised when a comparison takes more than `MAX_STEPS` steps or `_MAX_DEPTH` levels."""


class Comparison:
    """Compares one value with a schema. `steps` counts the comparisons of their parts."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._defs: Mapping[str, Any] = schema.get("$defs", {})
        self._known: dict[tuple[int, str], list[Misfit]] = {}
        """The mistakes found for each part of the schema at each place; empty while they are being compared."""
        self._targets: dict[int, Any] = {}
        """The target of each reference, by the id of the schema that contains the reference."""
        self._depth = 0
        self.steps = 0

    def run(self, value: object) -> list[Misfit]:
        return self._compare(self._schema, value, "")[:_MAX_FOUND]

    def _compare(self, schema: Any, value: Any, at: str) -> list[Misfit]:
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping):  # `true` matches anything, `false` matches nothing
            return [Misfit(at, "is not allowed", "is not allowed")] if schema is False else []
        which = (id(cast("object", schema)), at)
        known = self._known.get(which)
        if known is not None:
            return known
        self._count(1)
        self._known[which] = []  # a schema that refers to itself here finds no further mistakes
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _TooCostlyError
        found = list(islice(self._found(cast("Mapping[str, Any]", schema), value, at), _MAX_FOUND))
        self._depth -= 1
        self._known[which] = found
        return found

    def _resolved(self, schema: Any) -> Any:
        """Return the schema that a schema's references lead to. A cycle of references matches anything."""
        followed: list[int] = []
        target = schema
        while isinstance(target, dict):
            part = cast("dict[str, Any]", target)
            named = part.get("$ref")
            if not isinstance(named, str):
                break
            if id(part) in self._targets:
                target = self._targets[id(part)]
                break
            self._count(1)
            self._targets[id(part)] = _ANYTHING
            followed.append(id(part))
            target = self._defs.get(named.rpartition("/")[2], _ANYTHING)
        for each in followed:
            self._targets[each] = target
        return cast("Any", target)

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise _TooCostlyError

    def _found(self, schema: Mapping[str, Any], value: Any, at: str) -> Iterable[Misfit]:
        forms: Any = schema.get("anyOf") or schema.get("oneOf")
        if forms:
            return self._nearest(forms, value, at)
        if "enum" in schema:
            choices: list[Any] = schema["enum"]
            self._count(len(choices))
            return (
                [] if value in choices else [_unwanted(at, value, f"one of {_listed(map(_quoted, choices))}")]
            )
        if "const" in schema:
            return [] if value == schema["const"] else [_unwanted(at, value, _quoted(schema["const"]))]
        kind = schema.get("type")
        if isinstance(kind, str) and not _is_kind(kind, value):
            return [_unwanted(at, value, _WORDS.get(kind, kind))]
        if isinstance(value, dict):
            return self._in_object(schema, cast("dict[str, Any]", value), at)
        if isinstance(value, list | tuple) and "items" in schema:
            return self._in_list(schema["items"], cast("list[Any]", value), at)
        return []

    def _nearest(self, forms: list[Any], value: Any, at: str) -> list[Misfit]:
        """Return no mistakes if one member of a union matches, else those of the member that matches best."""
        tried: list[list[Misfit]] = []
        for form in forms:
            wrong = self._compare(form, value, at)
            if not wrong:
                return []
            tried.append(wrong)
        return min(tried, key=lambda wrong: (wrong[0].where == at, len(wrong)))

    def _in_object(self, schema: Mapping[str, Any], value: Mapping[str, Any], at: str) -> Iterator[Misfit]:
        fields: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", ())
        self._count(len(required))
        for name in required:
            if name not in value:
                yield Misfit(_field_at(at, name), "is missing", "is missing")
        for name, part in value.items():
            if name in fields:
                yield from self._compare(fields[name], part, _field_at(at, name))
            elif schema.get("additionalProperties") is False:
                unknown = f"is unknown; the known fields are {_listed(fields) or 'none'}"
                yield Misfit(_field_at(at, name), unknown, unknown)

    def _in_list(self, schema: Any, value: list[Any], at: str) -> Iterator[Misfit]:
        for number, item in enumerate(value):
            yield from self._compare(schema, item, f"{at}[{number}]")


def _listed(words: Iterable[str]) -> str:
    shown = list(words)
    more = f", and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return ", ".join(shown[:_MAX_SHOWN]) + more


def _unwanted(at: str, value: object, wanted: str) -> Misfit:
    return Misfit(at, f"must be {wanted}, got {_quoted(value)}", f"must be {wanted}")


def _is_kind(kind: str, value: object) -> bool:
    kinds = _KINDS.get(kind)
    if kinds is None:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, kinds)


def _field_at(at: str, name: str) -> str:
    part = location_of((name,))
    return f"{at}{part}" if part.startswith("[") else f"{at}.{part}" if at else part


def _quoted(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
