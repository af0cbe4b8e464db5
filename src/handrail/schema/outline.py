"""Whether plain data has the outline that a JSON Schema draws, where the type it was made from is not at hand.

It finds what is plainly wrong (kinds, missing and unknown fields, choices) and leaves the rest to whoever has the
type: an answer is checked here when it is given in another process, and again, fully, when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from handrail.schema.wording import location_of

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
    "string": "a text",
    "boolean": "true or false",
    "null": "null",
    "integer": "a whole number",
    "number": "a number",
}
_DEPTH = 40


class Misfit(NamedTuple):
    """Something that is plainly wrong with a value."""

    where: str
    """`orders[2].price`; "" for the value itself."""
    what: str
    wanted: str
    """The same without what was given."""

    def __str__(self) -> str:
        return f"{self.where or 'the answer'} {self.what}"


def misfits(schema: Mapping[str, Any], value: object, *, secret: bool = False) -> list[Misfit]:
    """What is plainly wrong with a value, each with its place; empty where nothing is.

    Where there may be a secret in it, nothing of it is said back.
    """
    found = _misfits(schema, value, "", schema.get("$defs", {}), 0)
    return [Misfit(each.where, each.wanted, each.wanted) for each in found] if secret else list(found)


def _misfits(
    schema: Mapping[str, Any], value: Any, at: str, defs: Mapping[str, Any], depth: int
) -> Iterator[Misfit]:
    if depth > _DEPTH:
        return
    named = schema.get("$ref")
    if isinstance(named, str):
        schema = defs.get(named.rpartition("/")[2], {})
    forms: Any = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        tried = [list(_misfits(form, value, at, defs, depth + 1)) for form in forms]
        if all(tried):
            yield from min(tried, key=lambda wrong: (wrong[0].where == at, len(wrong)))
        return
    if "enum" in schema and value not in schema["enum"]:
        yield _unwanted(at, value, f"one of {', '.join(map(_shown, schema['enum']))}")
    elif "const" in schema and value != schema["const"]:
        yield _unwanted(at, value, _shown(schema["const"]))
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        return
    if isinstance(kind, str) and not _is(kind, value):
        yield _unwanted(at, value, _WORDS.get(kind, kind))
    elif isinstance(value, dict):
        yield from _of_object(schema, cast("dict[str, Any]", value), at, defs, depth)
    elif isinstance(value, list | tuple) and isinstance(schema.get("items"), dict):
        for number, item in enumerate(cast("list[Any]", value)):
            yield from _misfits(schema["items"], item, f"{at}[{number}]", defs, depth + 1)


def _of_object(
    schema: Mapping[str, Any], value: Mapping[str, Any], at: str, defs: Mapping[str, Any], depth: int
) -> Iterator[Misfit]:
    fields: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield Misfit(_field(at, name), "is missing", "is missing")
    for name, part in value.items():
        if name in fields:
            yield from _misfits(fields[name], part, _field(at, name), defs, depth + 1)
        elif schema.get("additionalProperties") is False:
            unknown = f"is unknown; known are {', '.join(fields) or 'none'}"
            yield Misfit(_field(at, name), unknown, unknown)


def _unwanted(at: str, value: object, wanted: str) -> Misfit:
    return Misfit(at, f"is {_shown(value)}; {wanted} is wanted", f"is something else; {wanted} is wanted")


def _is(kind: str, value: object) -> bool:
    kinds = _KINDS.get(kind)
    if kinds is None:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, kinds)


def _field(at: str, name: str) -> str:
    part = location_of((name,))
    return f"{at}{part}" if part.startswith("[") else f"{at}.{part}" if at else part


def _shown(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
