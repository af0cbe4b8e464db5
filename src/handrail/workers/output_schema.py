"""A worker's `output:`, which is a JSON Schema, converted to the type of its answers.

The schema can describe objects, lists, strings, numbers, booleans, null, enums and unions. A keyword that is not supported
is reported as a problem, because it would not be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, cast

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, create_model, model_validator
from pydantic_core import SchemaError

from handrail.errors import DefinitionError
from handrail.run.response import PlainAnswer
from handrail.schema import Schema
from handrail.schema.problems import as_count
from handrail.workers.front_matter import Refuse

_BOUNDS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "multipleOf": "multiple_of",
    "minLength": "min_length",
    "maxLength": "max_length",
    "pattern": "pattern",
    "minItems": "min_length",
    "maxItems": "max_length",
}
_COUNTS = frozenset(["minLength", "maxLength", "minItems", "maxItems"])
_NUMERIC = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_FOR = {
    "number": _NUMERIC,
    "integer": _NUMERIC,
    "string": frozenset(["minLength", "maxLength", "pattern"]),
    "array": frozenset(["items", "minItems", "maxItems"]),
    "object": frozenset(["properties", "required", "additionalProperties"]),
}
"""The keywords that are checked for each type. Other types have none."""
_NOTES = frozenset(["title", "description", "default", "examples"])
"""Keywords that restrict nothing."""
_CHOICES = ("const", "enum", "anyOf", "oneOf")
"""Keywords that define a schema by themselves. The first of them that a schema has is used."""
_WORDS = frozenset(["type", *_NOTES, *_CHOICES]).union(*_FOR.values())
_PLAIN: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}


class _Answer(BaseModel, PlainAnswer):
    """Base class of answer types. Validation returns plain data, not an instance."""

    model_config = ConfigDict(frozen=True, populate_by_name=False)

    @model_validator(mode="wrap")
    @classmethod
    def _plain(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        made: BaseModel = handler(value)
        plain = made.model_dump(by_alias=True, exclude_unset=True)
        return plain[cls.within] if cls.within else plain


class _Wrapped(_Answer):
    """Base class for answers that are not objects with fields. They are sent in a field, because providers require an object."""

    within = "value"


def output_type(schema: Mapping[str, Any], refuse: Refuse) -> type[BaseModel] | None:
    """Create the type of the answers that match a schema. If the schema can't be used, reports why and returns None."""
    builder = _Builder(refuse)
    try:
        if schema.get("type") == "object" and schema.get("properties"):
            is_checked = builder.has_only_checked_words(schema, "output")
            made: Any = builder.model(schema, "output", _Answer) if is_checked else None
        else:
            made = create_model("Answer", __base__=_Wrapped, value=(builder.type_of(schema, "output"), ...))
        if builder.refused:
            return None
        Schema(made)
    except DefinitionError as error:
        refuse("output", error.parts[0], "Correct the schema.")
        return None
    except SchemaError:
        refuse("output", "a bound or a pattern in it is malformed", "Correct it.")
        return None
    return made


class _Builder:
    """Builds types from schemas, and reports the parts that it does not support."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self.refused = False

    def refuse(self, where: str, problem: str, hint: str) -> Any:
        self.refused = True
        self._refuse(where, problem, hint)
        return Any

    def type_of(self, given: Any, where: str) -> Any:
        if not isinstance(given, Mapping):
            return self.refuse(where, "it is not a schema", "Write `type: string`, or another schema.")
        schema = cast("Mapping[str, Any]", given)
        if not self.has_only_checked_words(schema, where):
            return Any
        if "const" in schema or "enum" in schema:
            return self._choice(schema, where)
        several = schema.get("anyOf", schema.get("oneOf"))
        if several is not None:
            if not isinstance(several, list) or not several:
                return self.refuse(
                    where, "`anyOf` or `oneOf` is not a list of schemas", "Write `anyOf: [...]`."
                )
            forms = enumerate(cast("list[Any]", several))
            return _union(self.type_of(form, f"{where}.anyOf[{index}]") for index, form in forms)
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return _union(self._of_kind(each, schema, where) for each in cast("list[Any]", kind))
        if kind is None:
            return self.refuse(where, "it has no type", "Write `type: string`, for example.")
        return self._of_kind(kind, schema, where)

    def has_only_checked_words(self, schema: Mapping[str, Any], where: str) -> bool:
        """Return whether every keyword of a schema is checked or restricts nothing. If one is not, reports it."""
        choice = next((word for word in _CHOICES if word in schema), None)
        kind: Any = schema.get("type")
        kinds = cast("list[Any]", kind) if isinstance(kind, list) else [kind]
        if choice is None:
            checked = _NOTES.union(["type"], *(_FOR.get(each, ()) for each in kinds if isinstance(each, str)))
        else:
            checked = _NOTES | {choice} | ({"type"} if choice in ("const", "enum") else set[str]())
        word = next((word for word in schema if word not in checked), None)
        if word is None:
            return True
        if word not in _WORDS:
            problem = f"`{word}` is not supported here and would not be checked"
            hint = f"Leave it out. Supported are {', '.join(sorted(_WORDS))}."
        else:
            beside = f"beside `{choice}`" if choice else "with this type" if kind else "without a type"
            problem, hint = f"`{word}` would not be checked {beside}", "Leave it out, or change the schema."
        self.refuse(f"{where}.{word}", problem, hint)
        return False

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], where: str) -> Any:
        if kind == "object":
            return self._object(schema, where)
        if kind == "array":
            made: Any = list[self.type_of(schema.get("items", {}), f"{where}.items")]
        elif isinstance(kind, str) and kind in _PLAIN:
            made = _PLAIN[kind]
        else:
            near = ", ".join([*_PLAIN, "object", "array"])
            return self.refuse(f"{where}.type", f"there is no type {kind!r}", f"The types are {near}.")
        bounds: dict[str, Any] = {}
        for word in _FOR.get(kind, ()):
            if word in schema and word in _BOUNDS:
                bounds[_BOUNDS[word]] = bound = as_count(schema[word]) if word in _COUNTS else schema[word]
                if bound is None:
                    self.refuse(
                        f"{where}.{word}", f"{schema[word]!r} is not a count", "Write a whole number."
                    )
        return Annotated[made, Field(**bounds)] if bounds else made

    def _choice(self, schema: Mapping[str, Any], where: str) -> Any:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            return self.refuse(f"{where}.enum", "`enum` is not a list of values", "Write `enum: [a, b]`.")
        plain = cast("list[Any]", values)
        if not all(each is None or isinstance(each, str | int | bool) for each in plain):
            return self.refuse(
                f"{where}.enum", "a value is not a string, integer, boolean or null", "Change it."
            )
        return Literal[tuple(plain)]

    def _object(self, schema: Mapping[str, Any], where: str) -> Any:
        more = schema.get("additionalProperties")
        if schema.get("properties"):
            return self.model(schema, where, BaseModel)
        if schema.get("required") or more is False:
            return self.refuse(where, "its fields are not named", "Write them as `properties`.")
        if isinstance(more, Mapping):
            return dict[str, self.type_of(more, f"{where}.additionalProperties")]
        return dict[str, Any]

    def model(self, schema: Mapping[str, Any], where: str, base: type[BaseModel]) -> Any:
        properties, required = schema.get("properties"), schema.get("required", [])
        if schema.get("additionalProperties") not in (None, False):
            return self.refuse(
                f"{where}.additionalProperties",
                "an object with named fields can't have other fields",
                "Remove it, or leave out `properties`.",
            )
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return self.refuse(
                where, "`properties` is not a mapping, or `required` not a list", "Correct it."
            )
        named = cast("Mapping[str, Any]", properties)
        for name in cast("list[Any]", required):
            if name not in named:
                self.refuse(
                    f"{where}.required",
                    f"{name!r} is required, but not a property",
                    "Add it to `properties`.",
                )
        fields: dict[str, Any] = {}
        for number, (name, each) in enumerate(named.items()):
            kind = self.type_of(each, f"{where}.properties.{name}")
            said = cast("Mapping[str, Any]", each).get("description") if isinstance(each, Mapping) else None
            # An optional field needs a default. A `default_factory` is not shown in the schema that models see.
            default: Any = {} if name in required else {"default_factory": lambda: None}
            fields[f"field_{number}"] = (kind, Field(alias=name, description=said, **default))
        made: Any = create_model("Answer", __base__=base, **fields)
        made.__doc__ = None
        return made


def _union(kinds: Any) -> Any:
    return Union[tuple(kinds)]  # noqa: UP007  # the types are known only at run time
