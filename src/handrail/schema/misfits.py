"""Misfits: the definite mistakes in a value, found with its JSON Schema alone.

A process that accepts an answer for another process has only the schema, and so has a process that checks calls to a client's
own tool. The schema may come from outside, so the work is bounded. Each part of the schema is compared with each part of the
value at most once; otherwise, unions that refer to themselves would double the work at each level. The number of steps and
the number of mistakes are limited. Messages quote only the beginning of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

from handrail.schema.problems import cut, location_of
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


def misfits(schema: Mapping[str, Any], value: object, *, secret: bool = False) -> list[Misfit]:
    """Return the definite mistakes in a value: wrong types, missing and unknown fields, invalid choices.

    Other mistakes are left to the process that has the Python type or runs the tool. At most `_MAX_FOUND` mistakes are returned.
    With `secret`, no value is quoted, only keys. If checking takes too many steps or levels, the only mistake says so.
    """
    return found_by(Comparison(schema), value, secret=secret)


def found_by(comparison: Comparison, value: object, *, secret: bool) -> list[Misfit]:
    """Return the mistakes that a comparison finds in a value, as `misfits` does."""
    try:
        found = comparison.run(value)
    except _TooCostlyError:
        found = [Misfit("", _TOO_COSTLY, _TOO_COSTLY)]
    return [Misfit(each.where, each.wanted, each.wanted) for each in found] if secret else found


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

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = schema
        self._known: dict[tuple[int, Spot], list[Mistake]] = {}
        """The mistakes found for each part of the schema at each spot; empty while the two are being compared."""
        self._targets: dict[int, Any] = {}
        """The target of each reference, by the id of the schema that contains the reference."""
        self._depth = 0
        self.steps = 0

    def run(self, value: object) -> list[Misfit]:
        return [each.told() for each in self.compare(self.root, value, Spot())[:_MAX_FOUND]]

    def compare(self, schema: Any, value: Any, at: Spot) -> list[Mistake]:
        schema = self.resolve(schema)
        if not isinstance(schema, Mapping):  # `true` matches anything, `false` matches nothing
            return [Mistake(at, lambda: "is not allowed")] if schema is False else []
        which = (id(cast("object", schema)), at)
        known = self._known.get(which)
        if known is not None:
            return known
        self.count(1)
        self._known[which] = []  # a schema that refers to itself at the same spot finds no further mistakes
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _TooCostlyError
        found = list(islice(self.find(cast("Mapping[str, Any]", schema), value, at), _MAX_FOUND))
        self.count(len(found))
        self._depth -= 1
        self._known[which] = found
        return found

    def resolve(self, schema: Any) -> Any:
        """Return the schema that a schema's references lead to. Cycles and unknown references match anything."""
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
            self.count(1)
            self._targets[id(part)] = _ANYTHING
            followed.append(id(part))
            target = target_of(named, self.root)
        for each in followed:
            self._targets[each] = target
        return cast("Any", target)

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise _TooCostlyError

    def find(self, schema: Mapping[str, Any], value: Any, at: Spot) -> Iterable[Mistake]:
        forms: Any = schema.get("anyOf") or schema.get("oneOf")
        if forms:
            return self.nearest(forms, value, at)
        if "enum" in schema:
            choices: list[Any] = schema["enum"]
            self.count(len(choices))
            return [] if value in choices else [Mistake(at, partial(one_of, choices), (value,))]
        if "const" in schema:
            only = schema["const"]
            return [] if value == only else [Mistake(at, lambda: f"must be {quoted(only)}", (value,))]
        kind = schema.get("type")
        if isinstance(kind, str) and not is_kind(kind, value):
            return [Mistake(at, lambda: f"must be {WORDS.get(kind, kind)}", (value,))]
        if isinstance(value, dict):
            return self._in_object(schema, cast("dict[str, Any]", value), at)
        if isinstance(value, list | tuple):
            return self._in_list(schema, cast("list[Any]", value), at)
        return []

    def nearest(self, forms: list[Any], value: Any, at: Spot) -> list[Mistake]:
        """Return no mistakes if a member of a union matches. Otherwise, return those of the member that matches best."""
        tried: list[list[Mistake]] = []
        for form in forms:
            wrong = self.compare(form, value, at)
            if not wrong:
                return []
            tried.append(wrong)
        return min(tried, key=lambda wrong: (wrong[0].spot is at, len(wrong)))

    def _in_object(self, schema: Mapping[str, Any], value: Mapping[str, Any], at: Spot) -> Iterator[Mistake]:
        fields: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", ())
        self.count(len(required))
        for name in required:
            if name not in value:
                yield Mistake(at.inside(name), lambda: "is missing")
        for name, part in value.items():
            if name in fields:
                yield from self.compare(fields[name], part, at.inside(name))
            elif schema.get("additionalProperties") is False and not schema.get("patternProperties"):
                yield Mistake(at.inside(name), partial(unknown, fields))

    def _in_list(self, schema: Mapping[str, Any], value: list[Any], at: Spot) -> Iterator[Mistake]:
        """Yield the mistakes in a list. `items` applies to the items after those that `prefixItems` lists."""
        first: list[Any] = schema.get("prefixItems", [])
        rest = schema.get("items", _ANYTHING)
        if not first and rest is _ANYTHING:
            return
        for number, item in enumerate(value):
            part = first[number] if number < len(first) else rest
            yield from self.compare(part, item, at.inside(number))


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
