"""Form fields: reading a field's JSON Schema, and parsing what is typed into the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any, cast

from handrail.environment.text import compact
from handrail.schema.problems import as_count
from handrail.text.patterns import compile_pattern
from handrail.text.rendering import escape_line

JsonSchema = dict[str, Any]

_MAX_REFERENCES = 100
"""A chain of this many references counts as a cycle."""


def resolve(schema: JsonSchema, root: JsonSchema) -> JsonSchema:
    """Return a schema with its `$ref`, or an `allOf` that has one item, resolved.

    Keywords beside a reference take precedence over those of the schema that it refers to. Nested schemas are not
    resolved. A cycle of references gives an empty schema.
    """
    for _ in range(_MAX_REFERENCES):
        parts = schema.get("allOf")
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**_lookup(str(schema["$ref"]), root), **rest}
        elif isinstance(parts, list) and len(cast(list[Any], parts)) == 1:
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            schema = {**cast(JsonSchema, parts[0]), **rest}
        else:
            return schema
    return {}


def _lookup(reference: str, root: JsonSchema) -> JsonSchema:
    found: Any = root
    if not reference.startswith("#"):
        return {}
    for step in reference.lstrip("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return {}
        found = cast(JsonSchema, found)[name]
    return cast(JsonSchema, found) if isinstance(found, dict) else {}


def alternatives(schema: JsonSchema, root: JsonSchema) -> tuple[list[JsonSchema], bool]:
    """Return the alternatives of a union, except null, and whether null is one of them.

    A schema that is not a union is its own only alternative, and null has none.
    """
    of = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(of, list):
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "discriminator")}
        each = [resolve(kind, root) for kind in cast(list[JsonSchema], of)]
        kinds = [{**rest, **kind} for kind in each if kind.get("type") != "null"]
        return kinds, len(kinds) < len(each)
    names = schema.get("type")
    if isinstance(names, list):
        several = cast(list[str], names)
        kinds = [{**schema, "type": name} for name in several if name != "null"]
        return kinds, "null" in several
    return ([], True) if names == "null" else ([schema], False)


def list_options(schema: JsonSchema) -> list[Any] | None:
    """Return the options of an `enum` or `const`, or None for a schema that has neither."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return list(cast(list[Any], listed)) if isinstance(listed, list) else None


def labels(values: list[Any]) -> list[str]:
    """Return a label for each option: `1`, `2` and so on, or `a` to `z`, then `z1`, `z2` and so on.

    Letters are used if an option is a number or a boolean, or is text that is an integer.
    """
    if any(isinstance(value, int | float) or re.fullmatch(r"\s*-?\d+\s*", str(value)) for value in values):
        return [chr(ord("a") + at) if at < 26 else f"z{at - 25}" for at in range(len(values))]
    return [str(at + 1) for at in range(len(values))]


def choose(values: list[Any], typed: str) -> Any:
    """Return the option with this label or text. If there is none, the text is compared without regard to case.

    Raises `ValueError` if no option matches, or if several options match when case is ignored.
    """
    marks = labels(values)
    words = typed.strip()
    if words in marks:
        return values[marks.index(words)]
    for value in values:
        if words in (str(value), compact(value)):
            return value
    alike = [value for value in values if str(value).casefold() == words.casefold()]
    if len(alike) == 1:
        return alike[0]
    if not marks:
        raise ValueError("nothing, since there are no options; Ctrl-D declines")
    raise ValueError(f"one of {marks[0]} to {marks[-1]}" if len(marks) > 1 else marks[0])


def parse(schema: JsonSchema, typed: str) -> Any:
    """Parse a typed line into a value. If the line is invalid, raises a `ValueError` that says what is expected.

    Keywords that forms do not know, such as `uniqueItems`, are not checked.
    """
    listed = list_options(schema)
    if listed is not None:
        return choose(listed, typed)
    return _PARSERS.get(str(schema.get("type", "")), _parse_any)(schema, typed)


def _parse_string(schema: JsonSchema, typed: str) -> str:
    text = "" if typed == '""' else typed
    least, most = as_count(schema.get("minLength")), as_count(schema.get("maxLength"))
    if least is not None and len(text) < least:
        raise ValueError(f"at least {_count(least, 'character')}, not {len(text)}")
    if most is not None and len(text) > most:
        raise ValueError(f"at most {_count(most, 'character')}, not {len(text)}")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _matches(pattern, text):
        raise ValueError(f"text that matches {escape_line(pattern)}")
    check = _FORMATS.get(str(schema.get("format", "")))
    if check is not None:
        check(text)
    return text


def _matches(pattern: str, text: str) -> bool:
    """Return whether a text matches a pattern. Any text matches an unsupported pattern, because the tool checks it again."""
    try:
        return compile_pattern(pattern).found_in(text)
    except ValueError:
        return True


def _parse_integer(schema: JsonSchema, typed: str) -> int:
    try:
        number = int(typed.strip())
    except ValueError:
        raise ValueError("a whole number, such as 3") from None
    _check_bounds(schema, number)
    return number


def _parse_number(schema: JsonSchema, typed: str) -> float | int:
    words = typed.strip()
    try:
        number = int(words) if re.fullmatch(r"[+-]?\d+", words) else float(words)
    except ValueError:
        raise ValueError("a number, such as 2.5") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("a number, such as 2.5")
    _check_bounds(schema, number)
    return number


def _check_bounds(schema: JsonSchema, number: float | int) -> None:
    bounds: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
        ("minimum", "at least", lambda bound: number >= bound),
        ("maximum", "at most", lambda bound: number <= bound),
        ("exclusiveMinimum", "more than", lambda bound: number > bound),
        ("exclusiveMaximum", "less than", lambda bound: number < bound),
    )
    for key, words, fits in bounds:
        bound = schema.get(key)
        if isinstance(bound, int | float) and not fits(bound):
            raise ValueError(f"{words} {bound}")
    step = schema.get("multipleOf")
    if isinstance(step, int) and step and isinstance(number, int) and number % step:
        raise ValueError(f"a multiple of {step}")


_YES, _NO = ("y", "yes", "true", "on", "1"), ("n", "no", "false", "off", "0")


def _parse_boolean(schema: JsonSchema, typed: str) -> bool:
    words = typed.strip().casefold()
    if words in _YES or words in _NO:
        return words in _YES
    raise ValueError("y or n")


def _parse_null(schema: JsonSchema, typed: str) -> None:
    raise ValueError("nothing; press Enter")


def _parse_any(schema: JsonSchema, typed: str) -> Any:
    """Parse a line as JSON, or return it as text if it is not JSON."""
    try:
        return json.loads(typed, parse_constant=_refuse_constant)
    except ValueError:
        return typed


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


_PARSERS: dict[str, Callable[[JsonSchema, str], Any]] = {
    "string": _parse_string,
    "integer": _parse_integer,
    "number": _parse_number,
    "boolean": _parse_boolean,
    "null": _parse_null,
}


def _format(read: Callable[[str], object], words: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        try:
            read(text)
        except ValueError:
            raise ValueError(words) from None

    return check


def _pattern(pattern: str, words: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not re.fullmatch(pattern, text):
            raise ValueError(words)

    return check


_FORMATS: dict[str, Callable[[str], None]] = {
    "date": _format(date.fromisoformat, "a date, such as 2026-05-31"),
    "time": _format(time.fromisoformat, "a time, such as 14:30"),
    "date-time": _format(datetime.fromisoformat, "a date and time, such as 2026-05-31T14:30:00"),
    "email": _pattern(r"[^@\s]+@[^@\s]+\.[^@\s]+", "an e-mail address, such as ada@example.org"),
    "uri": _pattern(r"[A-Za-z][A-Za-z0-9+.-]*:\S+", "an address, such as https://example.org"),
    "uuid": _pattern(
        r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}",
        "a UUID, such as 123e4567-e89b-12d3-a456-426614174000",
    ),
}


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def hint(schema: JsonSchema) -> str:
    """Describe what a field expects, in a few words."""
    kind = str(schema.get("type", ""))
    words = {
        "string": escape_line(str(schema.get("format", "")), 40).replace("date-time", "date and time")
        or "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "y or n",
        "array": "list",
        "object": "several fields",
        "null": "nothing",
    }
    bounds = [escape_line(str(schema[key]), 40) for key in ("minimum", "maximum") if key in schema]
    between = f", {bounds[0]} to {bounds[1]}" if len(bounds) == 2 else ""
    return words.get(kind, "text or JSON") + between
