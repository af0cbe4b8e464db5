"""Assertions: check a value against every rule in a JSON Schema, draft 2020-12.

This is for values that no other code checks, such as the arguments of a tool whose `params` are a JSON Schema.
`check_schema` refuses the few keywords that can't be checked. `format` and unknown keywords are annotations, which are
not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, cast

import pydantic_core
from pydantic_core import core_schema

from handrail.errors import DefinitionError
from handrail.schema.misfits import (
    WORDS,
    Comparison,
    Misfit,
    Mistake,
    Spot,
    found_by,
    is_kind,
    one_of,
    quoted,
    unknown,
)
from handrail.schema.problems import as_count
from handrail.schema.raw import check_foreign
from handrail.schema.references import target_of, walk, without_anchors

_INSTEAD = {
    "unevaluatedProperties": "Use `additionalProperties`",
    "unevaluatedItems": "Use `items`",
    "$dynamicRef": "Use `$ref`",
    "$recursiveRef": "Use `$ref`",
    "dependencies": "Use `dependentRequired` or `dependentSchemas`",
    "additionalItems": "Use `prefixItems` and `items`",
}
"""The keywords that are not supported, and what to use instead."""
_ANYTHING: Mapping[str, Any] = {}


def find_mistakes(schema: Mapping[str, Any], value: object, *, secret: bool = False) -> list[Misfit]:
    """Return the first mistakes in a value, up to a limit. With `secret`, no value is quoted, only keys.

    The schema must have passed `check_schema`. If checking takes too many steps or levels, the only mistake says so.
    """
    return found_by(_Assertions(schema), value, secret=secret)


# --- definitions -----------------------------------------------------------------------------------


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
    if word == "type" and not all(kind in [*WORDS] for kind in _listed(given)):
        return f"is {quoted(given)}", f"Use one of {', '.join(WORDS)}, or a list of these"
    if word in _COUNTS and as_count(given) is None:
        return f"is {quoted(given)}", "Use a whole number of at least 0"
    if word in _NUMBERS and not _is_number(given):
        return f"is {quoted(given)}", "Use a number"
    if word == "multipleOf" and cast("float", given) <= 0:
        return f"is {quoted(given)}", "Use a number above 0"
    if word == "dependentRequired" and not _is_lists_by_name(given):
        return f"is {quoted(given)}", "Use an object whose values are lists of names"
    patterns: Iterable[Any] = [given] if word == "pattern" else given if word == "patternProperties" else ()
    for pattern in patterns:
        try:
            _pattern(pattern)
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


def _listed(given: Any) -> list[Any]:
    return cast("list[Any]", given) if isinstance(given, list) else [given]


@lru_cache(maxsize=1_000)
def _pattern(pattern: str) -> pydantic_core.SchemaValidator:
    """Return a matcher for a pattern. Matching takes linear time, so no value can make it slow."""
    return pydantic_core.SchemaValidator(core_schema.str_schema(pattern=pattern))


def _matches(pattern: str, text: str) -> bool:
    return _pattern(pattern).isinstance_python(text)


# --- values ----------------------------------------------------------------------------------------

_Found = Iterable[Mistake]


class _Assertions(Comparison):
    """Compares one value with all keywords of a schema, including those beside a reference or a union."""

    def resolve(self, schema: Any) -> Any:
        return schema  # a reference is one of the keywords, and those beside it apply too

    def find(self, schema: Mapping[str, Any], value: Any, at: Spot) -> Iterator[Mistake]:
        kinds = schema.get("type")
        if kinds is not None and not any(is_kind(kind, value) for kind in _listed(kinds)):
            wanted = " or ".join(WORDS[kind] for kind in _listed(kinds))
            yield Mistake(at, lambda: f"must be {wanted}", (value,))
            return
        yield from self._in_place(schema, value, at)
        if isinstance(value, str):
            yield from _in_text(schema, value, at)
        elif isinstance(value, dict):
            yield from self._in_object(schema, cast("dict[str, Any]", value), at)
        elif isinstance(value, list):
            yield from self._in_list(schema, cast("list[Any]", value), at)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield from _in_number(schema, value, at)

    def _fits(self, schema: Any, value: Any, at: Spot) -> bool:
        return not self.compare(schema, value, at)

    def _in_place(self, schema: Mapping[str, Any], value: Any, at: Spot) -> Iterator[Mistake]:
        """Yield the mistakes found by keywords for the whole value: choices, and schemas that it must or must not match."""
        if "enum" in schema:
            self.count(len(schema["enum"]))
            if _key(value) not in map(_key, schema["enum"]):
                yield Mistake(at, partial(one_of, schema["enum"]), (value,))
        if "const" in schema and _key(value) != _key(schema["const"]):
            yield Mistake(at, lambda: f"must be {quoted(schema['const'])}", (value,))
        if "$ref" in schema:
            yield from self.compare(target_of(schema["$ref"], self.root), value, at)
        for each in schema.get("allOf", ()):
            yield from self.compare(each, value, at)
        if "anyOf" in schema:
            yield from self.nearest(schema["anyOf"], value, at)
        if "oneOf" in schema:
            fitting = sum(self._fits(each, value, at) for each in schema["oneOf"])
            if fitting > 1:
                yield Mistake(
                    at, lambda: f"matches {fitting} of the alternatives, and must match exactly one"
                )
            elif not fitting:
                yield from self.nearest(schema["oneOf"], value, at)
        if "not" in schema and self._fits(schema["not"], value, at):
            yield Mistake(at, lambda: "is not allowed", (value,))
        if "if" in schema:
            branch = "then" if self._fits(schema["if"], value, at) else "else"
            yield from self.compare(schema.get(branch, _ANYTHING), value, at)

    def _in_object(self, schema: Mapping[str, Any], value: Mapping[str, Any], at: Spot) -> Iterator[Mistake]:
        yield from _count(schema, "Properties", len(value), "field", at)
        required = [*schema.get("required", ())]
        for name, more in schema.get("dependentRequired", _ANYTHING).items():
            required += more if name in value else ()
        self.count(len(required))
        for name in dict.fromkeys(required):
            if name not in value:
                yield Mistake(at.inside(name), lambda: "is missing")
        for name, inner in schema.get("dependentSchemas", _ANYTHING).items():
            if name in value:
                yield from self.compare(inner, value, at)
        for name, part in value.items():
            if "propertyNames" in schema:
                yield from self.compare(schema["propertyNames"], name, Spot(at, name))
            yield from self._in_field(schema, name, part, at.inside(name))

    def _in_field(self, schema: Mapping[str, Any], name: str, part: Any, at: Spot) -> Iterator[Mistake]:
        fields: Mapping[str, Any] = schema.get("properties", _ANYTHING)
        patterns: Mapping[str, Any] = schema.get("patternProperties", _ANYTHING)
        self.count(len(patterns))
        matching = [inner for pattern, inner in patterns.items() if _matches(pattern, name)]
        if name in fields:
            matching.append(fields[name])
        if not matching:
            others = schema.get("additionalProperties", _ANYTHING)
            if others is False:
                yield Mistake(at, partial(unknown, fields))
            else:
                matching.append(others)
        for inner in matching:
            yield from self.compare(inner, part, at)

    def _in_list(self, schema: Mapping[str, Any], value: list[Any], at: Spot) -> Iterator[Mistake]:
        yield from _count(schema, "Items", len(value), "item", at)
        if schema.get("uniqueItems") is True and len({_key(each) for each in value}) < len(value):
            yield Mistake(at, lambda: "must not contain the same item twice")
        if "contains" in schema:
            fitting = sum(
                self._fits(schema["contains"], each, at.inside(number)) for number, each in enumerate(value)
            )
            limits = {"minContains": 1, **schema}
            yield from _count(limits, "Contains", fitting, "item of the kind that `contains` names", at)
        yield from super()._in_list(schema, value, at)


def _in_text(schema: Mapping[str, Any], value: str, at: Spot) -> _Found:
    yield from _count(schema, "Length", len(value), "character", at)
    pattern = schema.get("pattern")
    if pattern is not None and not _matches(pattern, value):
        yield Mistake(at, lambda: f"must match the pattern {quoted(pattern)}", (value,))


_COUNTS = frozenset(
    f"{limit}{what}" for limit in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")
)


def _count(schema: Mapping[str, Any], what: str, count: int, noun: str, at: Spot) -> _Found:
    least, most = (as_count(schema.get(f"{end}{what}", limit)) for end, limit in (("min", 0), ("max", count)))
    assert least is not None  # `check_schema` refuses others
    assert most is not None
    if not least <= count <= most:
        limit, words = (least, "at least") if count < least else (most, "at most")
        first, _, rest = noun.partition(" ")
        said = " ".join([first if limit == 1 else f"{first}s", rest]).strip()
        yield Mistake(at, lambda: f"must have {words} {limit} {said}, and has {count}")


_NUMBERS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, limit: value >= limit, "must be at least"),
    "maximum": (lambda value, limit: value <= limit, "must be at most"),
    "exclusiveMinimum": (lambda value, limit: value > limit, "must be more than"),
    "exclusiveMaximum": (lambda value, limit: value < limit, "must be less than"),
    "multipleOf": (lambda value, limit: _exact(value) % _exact(limit) == 0, "must be a multiple of"),
}


def _exact(number: float) -> Fraction:
    """Return a number as the fraction that its decimal digits spell, so that 0.3 is a multiple of 0.1."""
    return Fraction(number) if isinstance(number, int) else Fraction(str(number))


def _in_number(schema: Mapping[str, Any], value: float, at: Spot) -> _Found:
    for word, (is_met, words) in _NUMBERS.items():
        limit = schema.get(word)
        if limit is not None and not is_met(value, limit):
            yield Mistake(at, partial("{} {}".format, words, limit), (value,))


def _key(value: Any) -> Any:
    """Return a key that is equal for two values if they are the same JSON: 1 equals 1.0, but not true."""
    if isinstance(value, dict):
        return frozenset((name, _key(each)) for name, each in cast("dict[str, Any]", value).items())
    if isinstance(value, list):
        return tuple(map(_key, cast("list[Any]", value)))
    return (type(value), value) if isinstance(value, bool) else value
