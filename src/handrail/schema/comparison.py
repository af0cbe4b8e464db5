"""Comparisons: the mistakes in a value, found with its JSON Schema alone (draft 2020-12).

A process that accepts an answer for another process has only the schema, and so has a process that checks calls to a client's
own tool. The schema may come from outside, so the work is bounded. Each part of the schema is compared with each part of the
value at most once; otherwise, unions that refer to themselves would double the work at each level. The number of steps and
the number of mistakes are limited. Messages quote only the beginning of a value. `format` and unknown keywords are
annotations, which are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple, cast

import pydantic_core
from pydantic_core import core_schema

from handrail.schema.problems import as_count, cut, location_of
from handrail.schema.references import target_of

MAX_STEPS = 100_000
"""Maximum number of steps in one check: comparisons, references, choices, patterns, required names and mistakes."""
_MAX_DEPTH = 100
"""Maximum depth of a comparison, through the value and through references and unions of the schema."""
_MAX_SHOWN = 50
"""Maximum number of choices or field names in one message."""
_MAX_FOUND = 100
"""Maximum number of mistakes reported at once."""
_MAX_QUOTED = 60
"""Maximum number of characters of a value, or of a name, in a message."""
_MAX_NESTED = 3
"""Maximum depth to which a value is quoted."""

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
WORDS = {
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
    """One mistake in a value."""

    where: str
    """The location of the mistake, such as `orders[2].price`; "" for the value itself."""
    what: str
    wanted: str
    """The same text as `what`, but without the given value."""

    def __str__(self) -> str:
        return f"{self.where or 'the answer'} {self.what}"


class Rules:
    """The rules of a JSON Schema, with which values are compared.

    If they are `definite`, a value's mistakes are wrong types, missing and unknown fields, and invalid choices. Others are left to the
    process that has the Python type or runs the tool. Otherwise every rule is checked, and the schema must have passed
    `check_schema`.
    """

    __slots__ = ("_definite", "known", "root")

    def __init__(self, schema: Mapping[str, Any], *, definite: bool = True) -> None:
        self.root = schema
        self._definite = definite
        self.known: dict[int, Any] = {}
        """The rules of each part of the schema that was compared, by the part's id. None is replaced, because others refer to its id."""

    def misfits(self, value: object, *, secret: bool = False) -> list[Misfit]:
        """Return the first mistakes in a value, up to `_MAX_FOUND`. With `secret`, no value is quoted, only keys.

        If checking takes too many steps or levels, the only mistake says so.
        """
        try:
            found = Comparison(self).run(value)
        except _TooCostlyError:
            found = [Misfit("", _TOO_COSTLY, _TOO_COSTLY)]
        return [Misfit(each.where, each.wanted, each.wanted) for each in found] if secret else found

    def of(self, schema: Any) -> Any:
        """Return the rules of a part of the schema, or of the part that its reference leads to.

        Cycles and unknown references match anything. Unless the rules are definite, a reference with other keywords
        beside it is a rule like them.
        """
        followed: set[int] = set()
        while isinstance(schema, dict) and id(cast("object", schema)) not in self.known:
            part = cast("dict[str, Any]", schema)
            reference = part.get("$ref")
            if not isinstance(reference, str) or not (self._definite or len(part) == 1):
                self.known.setdefault(id(part), _outline(part) if self._definite else part)
                break
            schema = _ANYTHING if id(part) in followed else target_of(reference, self.root)
            followed.add(id(part))
        rules = self.known[id(cast("object", schema))] if isinstance(schema, dict) else schema
        for each in followed:
            self.known.setdefault(each, rules)
        return rules


class _TooCostlyError(Exception):
    """Raised when a comparison takes more than `MAX_STEPS` steps or `_MAX_DEPTH` levels."""


class Spot:
    """The path of a part of the value. `inside` returns the same object for the same path, so that a spot can be a key."""

    __slots__ = ("_inner", "_outer", "_step")

    def __init__(self, outer: Spot | None = None, step: str | int = "") -> None:
        self._outer = outer
        self._step = step
        self._inner: dict[str | int, Spot] = {}

    def inside(self, step: str | int) -> Spot:
        """Return the spot of the field or item with this name or index."""
        spot = self._inner.get(step)
        if spot is None:
            spot = self._inner[step] = Spot(self, step)
        return spot

    def __str__(self) -> str:
        steps: list[str | int] = []
        spot = self
        while spot._outer is not None:
            steps.append(spot._step if isinstance(spot._step, int) else _shortened(spot._step))
            spot = spot._outer
        return location_of(tuple(reversed(steps)))


class Mistake(NamedTuple):
    """A mistake whose message is not written yet."""

    spot: Spot
    wanted: Callable[[], str]
    given: tuple[object, ...] = ()
    """The value in a tuple, if the message quotes it; otherwise empty."""

    def told(self) -> Misfit:
        wanted = self.wanted()
        what = f"{wanted}, got {quoted(self.given[0])}" if self.given else wanted
        return Misfit(str(self.spot), what, wanted)


class Comparison:
    """Compares one value with a schema. `steps` counts the work, which `MAX_STEPS` limits."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known_rules = rules.known
        self._known: dict[tuple[int, Spot], list[Mistake]] = {}
        """The mistakes found by each part of the rules at each spot; empty while the two are being compared."""
        self._depth = 0
        self.steps = 0

    def run(self, value: object) -> list[Misfit]:
        return [each.told() for each in self._compare(self._rules.root, value, Spot())[:_MAX_FOUND]]

    def _compare(self, schema: Any, value: Any, at: Spot) -> list[Mistake]:
        rules = self._known_rules.get(id(schema))
        if rules is None:
            rules = self._rules.of(schema)
        if not isinstance(rules, dict):  # `true` matches anything, `false` matches nothing
            return [Mistake(at, lambda: "is not allowed")] if rules is False else []
        which = (id(cast("object", rules)), at)
        known = self._known.get(which)
        if known is not None:
            return known
        self._count(1)
        self._known[which] = []  # a schema that refers to itself at the same spot finds no further mistakes
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _TooCostlyError
        mistakes = list(islice(self._find(cast("dict[str, Any]", rules), value, at), _MAX_FOUND))
        self._count(len(mistakes))
        self._depth -= 1
        self._known[which] = mistakes
        return mistakes

    def _count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise _TooCostlyError

    def _fits(self, schema: Any, value: Any, at: Spot) -> bool:
        return not self._compare(schema, value, at)

    def _find(self, schema: Mapping[str, Any], value: Any, at: Spot) -> Iterable[Mistake]:
        """Return the mistakes in a value by all keywords of a schema, including those beside a reference or a union."""
        kind: Any = schema.get("type")
        if kind is not None:
            if not (
                is_kind(kind, value) if isinstance(kind, str) else any(is_kind(each, value) for each in kind)
            ):
                wanted = " or ".join(WORDS.get(each, str(each)) for each in as_list(kind))
                return [Mistake(at, lambda: f"must be {wanted}", (value,))]
            if len(schema) == 1:
                return ()
        inside: Iterable[Mistake] = ()
        if isinstance(value, str):
            inside = _in_text(schema, value, at)
        elif isinstance(value, dict):
            inside = self._in_object(schema, cast("dict[str, Any]", value), at)
        elif isinstance(value, list | tuple):
            inside = self._in_list(schema, cast("list[Any]", value), at)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            inside = _in_number(schema, value, at)
        return inside if _IN_PLACE.isdisjoint(schema) else chain(self._in_place(schema, value, at), inside)

    def _in_place(self, schema: Mapping[str, Any], value: Any, at: Spot) -> Iterator[Mistake]:
        """Yield the mistakes found by keywords for the whole value: choices, and schemas that it must or must not match."""
        if "enum" in schema:
            self._count(len(schema["enum"]))
            if not any(_is_same(value, choice) for choice in schema["enum"]):
                yield Mistake(at, partial(one_of, schema["enum"]), (value,))
        if "const" in schema and not _is_same(value, schema["const"]):
            yield Mistake(at, lambda: f"must be {quoted(schema['const'])}", (value,))
        if "$ref" in schema:
            yield from self._compare(target_of(schema["$ref"], self._rules.root), value, at)
        for each in schema.get("allOf", ()):
            yield from self._compare(each, value, at)
        if "anyOf" in schema:
            yield from self._nearest(schema["anyOf"], value, at)
        if "oneOf" in schema:
            fitting = sum(self._fits(each, value, at) for each in schema["oneOf"])
            if fitting > 1:
                yield Mistake(
                    at, lambda: f"matches {fitting} of the alternatives, and must match exactly one"
                )
            elif not fitting:
                yield from self._nearest(schema["oneOf"], value, at)
        if "not" in schema and self._fits(schema["not"], value, at):
            yield Mistake(at, lambda: "is not allowed", (value,))
        if "if" in schema:
            branch = "then" if self._fits(schema["if"], value, at) else "else"
            yield from self._compare(schema.get(branch, _ANYTHING), value, at)

    def _in_object(self, schema: Mapping[str, Any], value: Mapping[str, Any], at: Spot) -> Iterator[Mistake]:
        yield from _counted(schema, "Properties", len(value), "field", at)
        required: list[str] = schema.get("required", [])
        if "dependentRequired" in schema:
            dependent = schema["dependentRequired"].items()
            required = [*required, *(each for name, more in dependent if name in value for each in more)]
        patterns: Mapping[str, Any] = schema.get("patternProperties", _ANYTHING)
        self._count(len(required) + len(patterns) * len(value))
        for name in dict.fromkeys(required):
            if name not in value:
                yield Mistake(at.inside(name), lambda: "is missing")
        for name, inner in schema.get("dependentSchemas", _ANYTHING).items():
            if name in value:
                yield from self._compare(inner, value, at)
        fields: Mapping[str, Any] = schema.get("properties", _ANYTHING)
        others = schema.get("additionalProperties", _ANYTHING)
        for name, part in value.items():
            if "propertyNames" in schema:
                yield from self._compare(schema["propertyNames"], name, Spot(at, name))
            is_matched = False
            for pattern, inner in patterns.items():
                if matcher(pattern).isinstance_python(name):
                    is_matched = True
                    yield from self._compare(inner, part, at.inside(name))
            if name in fields:
                yield from self._compare(fields[name], part, at.inside(name))
            elif others is False and not is_matched:
                yield Mistake(at.inside(name), partial(unknown, fields))
            elif others is not _ANYTHING and not is_matched:
                yield from self._compare(others, part, at.inside(name))

    def _nearest(self, forms: list[Any], value: Any, at: Spot) -> list[Mistake]:
        """Return no mistakes if a member of a union matches. Otherwise, return those of the member that matches best."""
        tried: list[list[Mistake]] = []
        for form in forms:
            wrong = self._compare(form, value, at)
            if not wrong:
                return []
            tried.append(wrong)
        return min(tried, key=lambda wrong: (wrong[0].spot is at, len(wrong)))

    def _in_list(self, schema: Mapping[str, Any], value: list[Any], at: Spot) -> Iterator[Mistake]:
        yield from _counted(schema, "Items", len(value), "item", at)
        if schema.get("uniqueItems") is True and len({_key(each) for each in value}) < len(value):
            yield Mistake(at, lambda: "must not contain the same item twice")
        if "contains" in schema:
            fitting = sum(
                self._fits(schema["contains"], each, at.inside(number)) for number, each in enumerate(value)
            )
            limits = {"minContains": 1, **schema}
            yield from _counted(limits, "Contains", fitting, "item of the kind that `contains` names", at)
        first: list[Any] = schema.get("prefixItems", [])
        rest = schema.get("items", _ANYTHING)  # applies to the items after those that `prefixItems` lists
        if not first and rest is _ANYTHING:
            return
        for number, item in enumerate(value):
            part = first[number] if number < len(first) else rest
            yield from self._compare(part, item, at.inside(number))


_IN_PLACE = frozenset(["enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if"])
_STRUCTURE = ("type", "required", "properties", "prefixItems", "items")
"""The keywords whose mistakes are definite, besides unions, choices and `additionalProperties: false`."""


def _outline(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rules of a schema whose mistakes are definite. A union, an enum or a constant stands for the whole schema."""
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return {"anyOf": forms}
    for word in ("enum", "const"):
        if word in schema:
            return {word: schema[word]}
    outline = {word: schema[word] for word in _STRUCTURE if word in schema}
    if not isinstance(outline.get("type"), str):
        outline.pop("type", None)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        outline["additionalProperties"] = False
    return outline


@lru_cache(maxsize=1_000)
def matcher(pattern: str) -> pydantic_core.SchemaValidator:
    """Return a matcher for a pattern. Matching takes linear time, so no value can make it slow."""
    return pydantic_core.SchemaValidator(core_schema.str_schema(pattern=pattern))


def _in_text(schema: Mapping[str, Any], value: str, at: Spot) -> Iterator[Mistake]:
    yield from _counted(schema, "Length", len(value), "character", at)
    pattern = schema.get("pattern")
    if pattern is not None and not matcher(pattern).isinstance_python(value):
        yield Mistake(at, lambda: f"must match the pattern {quoted(pattern)}", (value,))


def _counted(schema: Mapping[str, Any], what: str, count: int, noun: str, at: Spot) -> Iterable[Mistake]:
    if f"min{what}" not in schema and f"max{what}" not in schema:
        return ()
    least, most = (as_count(schema.get(f"{end}{what}", limit)) for end, limit in (("min", 0), ("max", count)))
    assert least is not None  # `check_schema` refuses others
    assert most is not None
    if least <= count <= most:
        return ()
    limit, words = (least, "at least") if count < least else (most, "at most")
    first, _, rest = noun.partition(" ")
    nouns = " ".join([first if limit == 1 else f"{first}s", rest]).strip()
    return [Mistake(at, lambda: f"must have {words} {limit} {nouns}, and has {count}")]


NUMBERS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda value, limit: value >= limit, "must be at least"),
    "maximum": (lambda value, limit: value <= limit, "must be at most"),
    "exclusiveMinimum": (lambda value, limit: value > limit, "must be more than"),
    "exclusiveMaximum": (lambda value, limit: value < limit, "must be less than"),
    "multipleOf": (lambda value, limit: _exact(value) % _exact(limit) == 0, "must be a multiple of"),
}


def _exact(number: float) -> Fraction:
    """Return a number as the fraction that its decimal digits spell, so that 0.3 is a multiple of 0.1."""
    return Fraction(number) if isinstance(number, int) else Fraction(str(number))


def _in_number(schema: Mapping[str, Any], value: float, at: Spot) -> Iterator[Mistake]:
    for word, (is_met, words) in NUMBERS.items():
        limit = schema.get(word)
        if limit is not None and not is_met(value, limit):
            yield Mistake(at, partial("{} {}".format, words, limit), (value,))


def _is_same(value: Any, other: Any) -> bool:
    return value == other and _key(value) == _key(other)


def _key(value: Any) -> Any:
    """Return a key that is equal for two values if they are the same JSON: 1 equals 1.0, but not true."""
    if isinstance(value, dict):
        return frozenset((name, _key(each)) for name, each in cast("dict[str, Any]", value).items())
    if isinstance(value, list | tuple):
        return tuple(map(_key, cast("list[Any]", value)))
    return (type(value), value) if isinstance(value, bool) else value


def as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list | tuple) else [value]


# --- messages --------------------------------------------------------------------------------------


def unknown(fields: Mapping[str, Any]) -> str:
    return f"is unknown; the known fields are {_listed(fields, _shortened) or 'none'}"


def one_of(choices: list[Any]) -> str:
    return f"must be one of {_listed(choices, quoted)}"


def _listed(words: Collection[Any], show: Callable[[Any], str]) -> str:
    more = f", and {len(words) - _MAX_SHOWN} more" if len(words) > _MAX_SHOWN else ""
    return ", ".join(map(show, islice(words, _MAX_SHOWN))) + more


def is_kind(kind: str, value: object) -> bool:
    kinds = _KINDS.get(kind)
    if kinds is None:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, kinds) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _shortened(text: str) -> str:
    return cut(text, _MAX_QUOTED)


def quoted(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return _shortened(repr(_beginning(value)))


def _beginning(value: Any, depth: int = 0) -> object:
    """Return enough of a value to quote the beginning of its text."""
    if isinstance(value, str):
        return value[:_MAX_QUOTED]
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_QUOTED:
        return _LARGE
    if isinstance(value, dict | list | tuple) and depth == _MAX_NESTED:
        return _MORE
    if isinstance(value, dict):
        part = cast("dict[Any, Any]", value)
        return {
            _beginning(name): _beginning(part[name], depth + 1) for name in islice(part, _MAX_QUOTED // 2)
        }
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return [_beginning(item, depth + 1) for item in items[: _MAX_QUOTED // 2]]
    return value


class _Word:
    """Text whose repr has no quotation marks."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_LARGE, _MORE = _Word("a very large number"), _Word("…")
