"""One field of a form: what its JSON Schema says of it, and what a typed line means for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime, time
from typing import Any, cast

from handrail.environment.visible import compact, on_one_line

JsonSchema = dict[str, Any]

_MOST_STEPS = 100
"""How many references lead from one schema to the next before it is taken for a circle."""


def resolved(schema: JsonSchema, root: JsonSchema) -> JsonSchema:
    """The schema with its own reference followed; what is said beside the reference goes before."""
    for _ in range(_MOST_STEPS):
        parts = schema.get("allOf")
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**_pointed_at(str(schema["$ref"]), root), **rest}
        elif isinstance(parts, list) and len(cast(list[Any], parts)) == 1:
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            schema = {**cast(JsonSchema, parts[0]), **rest}
        else:
            return schema
    return {}


def _pointed_at(reference: str, root: JsonSchema) -> JsonSchema:
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
    """The kinds a value may be of, resolved, null apart: whether it may be null is said second."""
    of = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(of, list):
        rest = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "discriminator")}
        each = [resolved(kind, root) for kind in cast(list[JsonSchema], of)]
        kinds = [{**rest, **kind} for kind in each if kind.get("type") != "null"]
        return kinds, len(kinds) < len(each)
    names = schema.get("type")
    if isinstance(names, list):
        several = cast(list[str], names)
        kinds = [{**schema, "type": name} for name in several if name != "null"]
        return kinds, "null" in several
    return [schema], False


def options(schema: JsonSchema) -> list[Any] | None:
    """What there is to choose from, where the schema lists it."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return list(cast(list[Any], listed)) if isinstance(listed, list) else None


def labels(values: list[Any]) -> list[str]:
    """How each option is chosen: by number, or by letter where the options look like numbers."""
    if any(isinstance(value, int | float) or re.fullmatch(r"\s*-?\d+\s*", str(value)) for value in values):
        return [chr(ord("a") + at) if at < 26 else f"z{at - 25}" for at in range(len(values))]
    return [str(at + 1) for at in range(len(values))]


def chosen(values: list[Any], typed: str) -> Any:
    """The option somebody meant by its number or letter, or by its own words."""
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
        raise ValueError("nothing can be chosen here; Ctrl-D declines")
    raise ValueError(f"choose one of {marks[0]} to {marks[-1]}" if len(marks) > 1 else f"type {marks[0]}")


def parsed(schema: JsonSchema, typed: str) -> Any:
    """The value a typed line stands for, or `ValueError` that says in words what it should be."""
    listed = options(schema)
    if listed is not None:
        return chosen(listed, typed)
    return _READERS.get(str(schema.get("type", "")), _anything)(schema, typed)


def _string(schema: JsonSchema, typed: str) -> str:
    text = "" if typed == '""' else typed
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) and len(text) < least:
        raise ValueError(f"at least {_counted(least, 'character')}, this has {len(text)}")
    if isinstance(most, int) and len(text) > most:
        raise ValueError(f"at most {_counted(most, 'character')}, this has {len(text)}")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _matches(pattern, text):
        raise ValueError(f"it has to match {on_one_line(pattern)}")
    check = _FORMATS.get(str(schema.get("format", "")))
    if check is not None:
        check(text)
    return text


def _matches(pattern: str, text: str) -> bool:
    """True too where the pattern is not one Python knows: whoever asked checks it again."""
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return True


def _integer(schema: JsonSchema, typed: str) -> int:
    try:
        number = int(typed.strip())
    except ValueError:
        raise ValueError("a whole number, such as 3") from None
    _check_bounds(schema, number)
    return number


def _number(schema: JsonSchema, typed: str) -> float | int:
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


def _boolean(schema: JsonSchema, typed: str) -> bool:
    words = typed.strip().casefold()
    if words in _YES or words in _NO:
        return words in _YES
    raise ValueError("y or n")


def _null(schema: JsonSchema, typed: str) -> None:
    raise ValueError("nothing: press Enter")


def _anything(schema: JsonSchema, typed: str) -> Any:
    """JSON where it is some, else the text itself."""
    try:
        return json.loads(typed, parse_constant=_refuse_constant)
    except ValueError:
        return typed


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


_READERS: dict[str, Callable[[JsonSchema, str], Any]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
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


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def hint(schema: JsonSchema) -> str:
    """What is wanted, in a word or two."""
    kind = str(schema.get("type", ""))
    words = {
        "string": on_one_line(str(schema.get("format", "")), 40).replace("date-time", "date and time")
        or "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "y or n",
        "array": "list",
        "object": "several fields",
        "null": "nothing",
    }
    bounds = [on_one_line(str(schema[key]), 40) for key in ("minimum", "maximum") if key in schema]
    between = f", {bounds[0]} to {bounds[1]}" if len(bounds) == 2 else ""
    return words.get(kind, "text or JSON") + between
