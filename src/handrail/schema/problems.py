"""Problems in an input, described for a model: where each is, what was expected, and what was sent instead.

This module describes problems that pydantic found with the Python type. If only the type's JSON Schema is available,
`handrail.schema.comparison` finds the definite mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath
from typing import Any, cast, get_args

import msgspec
import pydantic_core

from handrail.schema.references import LISTS_OF_SCHEMAS, SCHEMAS, target_of
from handrail.text.rendering import counted
from handrail.text.spelling import nearest

_TAKES_AN = re.compile(r"_*(?!eu|one|uni|use|uu|ur[il]|ut)[aeiou]", re.IGNORECASE)
"""Matches a type's name that begins with a vowel sound. `UserContext` and `URL` do not."""


class Problem(msgspec.Struct, frozen=True):
    """One problem in an input: where it is, and what is wrong."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


def describe_kind(value: object) -> str:
    """Return the name of a value's type with its indefinite article, such as `an int` or `a str`."""
    name = type(value).__name__
    return f"{'an' if _TAKES_AN.match(name) else 'a'} {name}"


def as_count(value: object) -> int | None:
    """Return the value of a keyword such as `maxLength` as a count, or None if it is not one. 2.0 is 2, as in JSON Schema."""
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return int(cast("float", value)) if is_whole and cast("float", value) >= 0 else None


def write_path(value: object) -> str:
    """Write a path as text, as pydantic's `fallback`: it knows only `Path`, and not `PurePath`. Refuses other values."""
    if isinstance(value, PurePath):
        return str(value)
    raise pydantic_core.PydanticSerializationError(f"Unable to serialize unknown type: {type(value)}")


def to_plain(value: object) -> Any:
    """Return a value as plain data. Raises `PydanticSerializationError` if that is not possible."""
    return pydantic_core.to_jsonable_python(value, fallback=write_path)


Location = tuple[str | int, ...]

MAX_PROBLEMS = 20
"""Maximum number of problems described for one input. The others are counted."""
_MAX_BYTES = 3_500
"""Maximum size of the descriptions of one input's problems, in bytes of UTF-8. It keeps a refusal below 4 kB."""
_MAX_WHERE, _MAX_WHAT = 200, 600
"""Maximum length of the location and of the description of one problem, in characters."""
NOT_FINITE = "must be a finite number; NaN and infinities are not allowed"

_MODULES = re.compile(r"\b\w+(\.\w+|\.<locals>)*\.(?=\w)")
_PLAIN_KEY = re.compile(r"[\w-]+\Z")
_PLAIN_FORM = re.compile(r"[\w., |\[\]]+\Z")
"""Matches names of union members that mean something to a reader, unlike `function-after[check(), int]`."""


def describe(annotation: Any) -> str:
    """Format a type for a message, without the names of modules."""
    if isinstance(annotation, str):
        return repr(annotation)
    name = None if get_args(annotation) else getattr(annotation, "__qualname__", None)
    return _MODULES.sub("", name or str(annotation))


def location_of(location: Location) -> str:
    """Format `("orders", 2, "price")` as `orders[2].price`, and unusual keys as `orders["a b"]`."""
    text = ""
    for part in location:
        if isinstance(part, int) or not _PLAIN_KEY.match(part):
            import json

            text += f"[{json.dumps(part, ensure_ascii=False)}]"
        else:
            text += f".{part}" if text else part
    return text


def problems_of(
    errors: Iterable[Mapping[str, Any]], data: str | bytes, schema: Mapping[str, Any], secret: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each of the first `MAX_PROBLEMS` errors, without duplicates.

    With `secret`, descriptions repeat nothing that was sent, because a model may put a secret into the wrong argument, and
    locations leave out keys that are secrets.
    """
    try:
        sent: Any = pydantic_core.from_json(data)
    except (ValueError, TypeError):
        sent = None
    seen: set[Problem] = set()
    for error in islice(errors, MAX_PROBLEMS):
        location, form = _real_location(error, sent)
        where = shown_location(location, schema) if secret else location_of(location)
        if _PLAIN_FORM.match(form):
            where = f"{where} (as {form})".lstrip()
        problem = Problem(where, _what(error, location, form, schema, secret))
        if problem not in seen:
            seen.add(problem)
            yield problem


def bounded(problems: Sequence[Problem], others: int) -> list[Problem]:
    """Return the first problems, up to `MAX_PROBLEMS` and `_MAX_BYTES`, followed by how many are left out, if any.

    Long locations and descriptions are cut. `others` is the number of problems besides those given.
    """
    shown: list[Problem] = []
    room = _MAX_BYTES
    for each in problems[:MAX_PROBLEMS]:
        problem = Problem(cut(each.where, _MAX_WHERE), cut(each.what, _MAX_WHAT))
        room -= len(f"{problem.where}: {problem.what}".encode(errors="replace")) + 3
        if room < 0:
            break
        shown.append(problem)
    left = len(problems) - len(shown) + others
    if left:
        shown.append(Problem("", f"and {left:,} more problem{'s' if left > 1 else ''}"))
    return shown


def cut(text: str, length: int) -> str:
    """Return the text, or, if it has more than `length` characters, its beginning and an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _real_location(error: Mapping[str, Any], sent: Any) -> tuple[Location, str]:
    """Return where in the input an error is, and pydantic's label for the union member that it is about; "" if there is none."""
    location: list[str | int] = []
    form = ""
    raw = cast(Location, error["loc"])
    value = sent
    for position, part in enumerate(raw):
        names_a_gap = position == len(raw) - 1 and error["type"] == "missing"
        if isinstance(value, dict) and (part in value or names_a_gap):
            value = cast("dict[Any, Any]", value).get(part)
        elif isinstance(value, list) and isinstance(part, int):
            items = cast("list[Any]", value)
            value = items[part] if part < len(items) else None
        else:
            if part != _KEY:
                form = str(part)
            continue
        location.append(part)
    return tuple(location), form


def shown_location(location: Location, schema: Mapping[str, Any]) -> str:
    """Format a location as `location_of` does, with `_SECRET_KEY` for each key of a dictionary whose keys are secrets."""
    shown: list[str | int] = []
    for at, part in enumerate(location):
        parts = [one for one in schemas_at(schema, location[:at]) if part not in one.get("properties", {})]
        names = [one["propertyNames"] for one in parts if "propertyNames" in one]
        is_secret = isinstance(part, str) and any(asks_for_secrets(one, schema) for one in names)
        shown.append(_SECRET_KEY if is_secret else part)
    return location_of(tuple(shown))


_SECRET_KEY = "…"
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_KEY = "[key]"
"""The label that pydantic adds to the location of an invalid key."""

_WITHHELD = "not accepted. The reason is withheld, since it could repeat a secret"

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "decimal_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
    "none_required": "null",
    "bytes_type": "text",
    "decimal_parsing": "a number",
    "date_type": "a date such as 2026-01-31",
    "date_parsing": "a date such as 2026-01-31",
    "date_from_datetime_parsing": "a date such as 2026-01-31",
    "datetime_type": "a time such as 2026-01-31T12:00:00Z",
    "datetime_parsing": "a time such as 2026-01-31T12:00:00Z",
    "datetime_from_date_parsing": "a time such as 2026-01-31T12:00:00Z",
    "time_type": "a time of day such as 12:00:00",
    "time_parsing": "a time of day such as 12:00:00",
    "time_delta_type": "a duration such as PT30S",
    "time_delta_parsing": "a duration such as PT30S",
    "uuid_type": "a UUID",
    "uuid_parsing": "a UUID",
}

_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}

_LENGTHS = {
    "string_too_short": ("at least", "min_length"),
    "string_too_long": ("at most", "max_length"),
    "too_short": ("at least", "min_length"),
    "too_long": ("at most", "max_length"),
}


def _what(
    error: Mapping[str, Any], location: Location, form: str, schema: Mapping[str, Any], secret: bool
) -> str:
    kind = cast(str, error["type"])
    context = cast("dict[str, Any]", error.get("ctx") or {})
    got = "" if secret else f", got {_shown(error['input'])}"
    if kind == "missing":
        return "required, and missing"
    if kind in _UNKNOWN:
        return _unknown(location, form, schema)
    if kind in ("json_invalid", "string_unicode"):
        return _not_json(location, context)
    if kind in _EXPECTED:
        subject = "this key must be" if error["loc"][-1:] == (_KEY,) else "must be"
        return f"{subject} {_EXPECTED[kind]}{got}"
    if kind == "finite_number":
        return NOT_FINITE
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {context[key]}{got}"
    if kind in _LENGTHS:
        words, key = _LENGTHS[kind]
        sent = error["input"]
        got = f", got {len(cast('list[Any]', sent))}" if isinstance(sent, list | dict) else got
        noun = "character" if isinstance(sent, str) else "item"
        return f"must have {words} {counted(context[key], noun)}{got}"
    if kind == "string_pattern_mismatch":
        return f"must match the pattern {context['pattern']}{got}"
    if kind in ("literal_error", "enum"):
        return f"must be one of {context['expected']}{got}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _tag(location, context, schema, secret)
    if secret:  # the messages of validators and of pydantic may repeat what was sent
        return _WITHHELD
    if kind in ("value_error", "assertion_error"):
        return f"{context['error']}" + ("" if isinstance(error["input"], Mapping) else got)
    return f"{cast(str, error['msg'])[:1].lower()}{cast(str, error['msg'])[1:]}{got}"


def _not_json(location: Location, context: Mapping[str, Any]) -> str:
    subject = "must be JSON" if location else "not valid JSON"
    return f"{subject}: {context.get('error', 'it contains a lone surrogate')}"


def _tag(location: Location, context: Mapping[str, Any], schema: Mapping[str, Any], secret: bool) -> str:
    """Describe a missing or unknown discriminator of a union."""
    known = context.get("expected_tags")
    if known is None:
        tags = {tag: None for part in schemas_at(schema, location) for tag in _tags(part)}
        known = ", ".join(map(repr, tags))
    name = cast(str, context["discriminator"])
    if name.endswith("()"):  # a function determines the tag, so there is no field to name
        return f"must be one of the forms {known}" if known else "must be one of the known forms"
    if "tag" in context:
        return f"its {name} must be one of {known}" + ("" if secret else f", got {context['tag']!r}")
    return f"its {name} is required, and must be one of {known}"


def _tags(part: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the references to the members of a discriminated union, by tag. Empty for any other schema."""
    return part.get("discriminator", {}).get("mapping", {})


def _unknown(location: Location, form: str, schema: Mapping[str, Any]) -> str:
    key = location[-1] if location else form
    parts = schemas_at(schema, location[:-1])
    named = [tags[form] for part in parts if form in (tags := _tags(part))] or [f"#/$defs/{form}"]
    form_parts = [part for name in named for part in forms_of({"$ref": name}, schema)]
    # `form` names a member of a union at this location or further up. A member further up does not describe the key's object.
    here = [part for part in form_parts if part in parts] or parts or form_parts
    properties = [part["properties"] for part in here if "properties" in part]
    known = sorted({name for names in properties if key not in names for name in names})
    near = nearest(str(key), known)
    if near is not None:
        return f"unknown; did you mean {near}?"
    if known:
        return f"unknown; remove it. Known here: {', '.join(known)}"
    return "unknown; remove it"


def _shown(value: Any) -> str:
    """Describe a value in JSON terms. Long text is cut."""
    import json  # only errors need it

    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return f"the text {text if len(text) <= 60 else text[:57] + '…' + chr(34)}"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return "a list"
    return describe_kind(cast(object, value))


# --- lookups in a JSON Schema --------------------------------------------------------------------

_ITEMS = ("items", "contains", "unevaluatedItems")
"""The keywords whose schemas may describe those items of a list that come after the ones in `prefixItems`."""
_OTHER_FIELDS = ("additionalProperties", "unevaluatedProperties")
"""The keywords whose schemas may describe those fields of an object that `properties` does not name."""
_INNER = (
    SCHEMAS | LISTS_OF_SCHEMAS | {"properties", "patternProperties", "dependentSchemas", "writeOnly"}
) - {"not"}
"""The keywords that say what a value contains, or that it is secret."""


def asks_for_secrets(part: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return whether this part of a JSON Schema describes a secret, or a value that contains one."""
    seen: set[int] = set()
    return any(_asks_for_secrets(form, root, seen) for form in forms_of(part, root))


def _asks_for_secrets(part: Mapping[str, Any], root: Mapping[str, Any], seen: set[int]) -> bool:
    if id(part) in seen:
        return False
    seen.add(id(part))
    if part.get("writeOnly") is True:
        return True
    inner = [*part.get("properties", {}).values(), *part.get("patternProperties", {}).values()]
    inner += [*part.get("prefixItems", ()), part.get("propertyNames")]
    inner += [part.get(word) for word in (*_ITEMS, *_OTHER_FIELDS)]
    return any(
        _asks_for_secrets(form, root, seen)
        for one in inner
        if isinstance(one, dict)
        for form in forms_of(cast("dict[str, Any]", one), root)
    )


def schemas_at(schema: Mapping[str, Any], location: Location) -> list[Mapping[str, Any]]:
    """Return the schemas that may describe the value at a location. There may be several, as for a union, or none."""
    here = forms_of(schema, schema)
    for part in location:
        here = inside(here, part, schema)
    return here


def inside(
    forms: Iterable[Mapping[str, Any]], part: str | int, root: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return the schemas that may describe the value under this key or index."""
    inner: list[Any] = []
    for form in forms:
        if isinstance(part, int):
            prefix = form.get("prefixItems", [])
            inner += [prefix[part]] if part < len(prefix) else [form.get(word) for word in _ITEMS]
        else:
            fields = form.get("properties", {})
            inner += [fields[part]] if part in fields else [form.get(word) for word in _OTHER_FIELDS]
            inner += form.get("patternProperties", {}).values()  # each pattern may match, and none is run
    return _forms(inner, root)


def forms_of(part: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that may apply where this one does: those in its references, unions and conditions, and itself.

    A schema that is only a reference is not returned itself.
    """
    return _forms([part], root)


def _forms(parts: Sequence[Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that may apply where one of `parts` does, as `forms_of` does. Each is visited once, so cycles end."""
    seen: set[int] = set()
    forms: list[Mapping[str, Any]] = []
    left = list(reversed(parts))
    while left:
        part: Any = left.pop()
        if not isinstance(part, dict) or id(cast("object", part)) in seen:
            continue
        schema = cast("dict[str, Any]", part)
        seen.add(id(schema))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            left.append(target_of(reference, root))
            if not _INNER & schema.keys():  # the keywords beside a reference apply too
                continue
        forms.append(schema)
        unions = [one for word in ("anyOf", "oneOf", "allOf") for one in schema.get(word, ())]
        unions += [schema.get(word) for word in ("if", "then", "else")]
        unions += schema.get("dependentSchemas", {}).values()
        left.extend(reversed(unions))
    return forms
