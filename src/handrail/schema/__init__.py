"""`Schema`: a Python type, its JSON Schema for a model, and a parser for what the model sends.

Validation and JSON Schema are pydantic's. This module also refuses input that pydantic accepts (unknown keys,
infinities), and describes the problems in an input so that a model can act on them.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar, cast, get_origin

import pydantic_core
from pydantic import BaseModel, PydanticUserError, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import core_schema

from handrail.errors import DefinitionError, ToolValidationError
from handrail.schema.immutability import read_only
from handrail.schema.problems import (
    MAX_PROBLEMS,
    NOT_FINITE,
    Problem,
    bounded,
    describe,
    problems_of,
    schemas_at,
    shown_location,
    write_path,
)
from handrail.schema.references import schemas_in
from handrail.schema.secrets import MASK, WITHHELD, holds_secrets, in_clear, masked, masks_in
from handrail.schema.size import dicts_in, values_in
from handrail.text.raised_errors import in_short, words_of

T = TypeVar("T")

JsonSchema = dict[str, Any]
Validate = Callable[..., Any]

_MANY_ERRORS = 1_000
"""An input with more errors than this is validated again, up to the first error in each list: describing all takes long."""
_MASKED = "is masked: secrets are not stored, so the value is unknown. Send it again"


class Schema(Generic[T]):
    """A type into which inputs are parsed. Raises `DefinitionError` if no JSON Schema can describe the type.

    - Parsing is strict: `"1"` is not accepted for an int or a float, nor `1` for a bool.
    - Unknown keys are refused at every depth, and the JSON Schema says so.
    - NaN and the infinities are refused, however they are written.
    - The problems in an input are reported together. If there are many, the first ones are described and the rest counted.
    """

    __slots__ = (
        "_adapter",
        "_may_hold_floats",
        "_serializer",
        "_validate",
        "annotation",
        "json_schema",
        "quick",
        "secret",
    )

    def __init__(self, annotation: Any, namespace: Mapping[str, Any] | None = None) -> None:
        self.annotation = annotation
        self._adapter = _adapter_for(annotation, namespace)
        parts = [*dicts_in(self._adapter.core_schema)]
        self._validate = _validator_of(self._adapter, parts).validate_json
        self._serializer = _serializer_of(self._adapter, parts)
        self.json_schema: JsonSchema = read_only(_json_schema_of(self._adapter, annotation))
        self._may_hold_floats = any(map(_holds_floats, schemas_in(self.json_schema)))
        self.quick: Validate | None = None if self._may_hold_floats else self._validate
        """Validator that parses JSON in one step; None if further checks are needed, as for floats, which must be finite."""
        self.secret = holds_secrets(parts, self.json_schema)
        """Whether values of the type can contain a secret."""

    @property
    def core(self) -> Any:
        """Pydantic's core schema of the type."""
        return self._adapter.core_schema

    def parse(self, data: str | bytes) -> T:
        """Parse JSON text into the type. Raises a `ToolValidationError` with the problems if it is invalid."""
        problems: list[Problem] = []
        others = 0
        value: Any = None
        try:
            value = self._validate(data, strict=True, extra="forbid")
        except pydantic_core.ValidationError as error:
            errors, others = self._first_errors(error, data)
            problems = list(problems_of(errors, data, self.json_schema, self.secret))
        except Exception as error:
            # The user's validator or `__post_init__` raised an error that pydantic does not catch.
            why = "" if self.secret else in_short(error).removeprefix(type(error).__name__)
            problems.append(Problem("", f"refused by the type itself: {type(error).__name__}{why}"))
        if self._may_hold_floats and _SUSPECT[type(data)].search(data):
            places = {each.where for each in problems}
            problems += [each for each in infinities_in(data, self.json_schema) if each.where not in places]
        if problems:
            raise _refusal(bounded(problems, others))
        return cast(T, value)

    def restore(self, data: bytes) -> T:
        """Parse JSON text that was written from a value of the type, so that numbers may be NaN or infinite.

        Raises `ToolValidationError` if it does not match the type.
        """
        try:
            return cast(T, self._validate(data, strict=True, extra="forbid"))
        except Exception as error:  # the user's validator or `__post_init__` may raise any error
            raise ToolValidationError(f"it does not match the type: {type(error).__name__}") from None

    def _first_errors(self, error: pydantic_core.ValidationError, data: str | bytes) -> tuple[list[Any], int]:
        """Return the errors to describe, and how many others there are.

        Pydantic describes all errors or none. So if there are very many, the input is validated again up to the first
        error in each list.
        """
        count = error.error_count()
        if count > _MANY_ERRORS:
            schema: Any = _rewritten(self._adapter.core_schema, _failing_fast)
            try:
                pydantic_core.SchemaValidator(schema).validate_json(data, strict=True, extra="forbid")
            except pydantic_core.ValidationError as first:
                error = first
        found: list[Any] = [*error.errors(include_url=False)[:MAX_PROBLEMS]]
        return found, count - len(found)

    def parse_value(self, value: object) -> T:
        """Convert a Python value to JSON and parse it, as if a model had sent it.

        Raises `ToolValidationError` if the value can't be converted, or does not fit the type.
        """
        if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
            return self.parse(self.clear(value))
        return self.parse(clear_json(value))

    def accepts(self, value: object) -> bool:
        """Return whether a Python value is valid for the type as it is, without any conversion."""
        return _accepts(self._adapter.validator, value)

    def accepts_field(self, name: str, value: object) -> bool:
        """Return whether a Python value is certainly valid for a field of the dataclass, without any conversion.

        False if that is not certain, because the field's part of the core schema can't stand alone.
        """
        core: Any = self._adapter.core_schema
        fields = core["schema"].get("fields", ()) if core["type"] == "dataclass" else ()
        part = next((field["schema"] for field in fields if field["name"] == name), None)
        if part is None or part["type"] != "default":
            return False
        try:
            validator = pydantic_core.SchemaValidator(part["schema"])
        except pydantic_core.SchemaError:  # it refers to a definition elsewhere
            return False
        return _accepts(validator, value)

    def parse_given(self, value: object) -> T:
        """Parse a person's answer.

        Raises `ToolValidationError` if the answer is invalid, or if it contains a mask and the type can contain secrets.
        """
        if self.secret:
            refuse_masks(clear_json(value))
        return self.parse_value(value)

    def clear(self, value: object) -> bytes:
        """Return a value as JSON text with its secrets unmasked. Parse the text immediately, and never keep it.

        Raises `ToolValidationError` if the value can't be written as JSON.
        """
        if not is_instance(value, get_origin(self.annotation) or self.annotation):
            return clear_json(value)
        try:
            if self.secret:
                return in_clear(value, self._serializer)
            return self._serializer.to_json(value, by_alias=True, round_trip=True, warnings=False)
        except (pydantic_core.PydanticSerializationError, ValueError) as error:
            raise _unwritable(error) from None

    def dump(self, value: T) -> bytes:
        """Return a value of the type as JSON text with its secrets masked.

        Parsing the text gives the value again, unless a secret was masked, or the type is configured to be written
        differently from how it is parsed.
        """
        written = self._serializer.to_json(value, by_alias=True, round_trip=True)
        if not self.secret:
            return written
        return pydantic_core.to_json(masked(pydantic_core.from_json(written), self.json_schema))

    def mask(self, data: str | bytes) -> str:
        """Return JSON text with its secrets masked, so that it can be shown and recorded.

        Text that does not match the type is withheld entirely, since any part of it may be secret. Masks that
        the text already contains are kept, and match any type.
        """
        try:
            return self.dump(self._validate(data, strict=True, extra="forbid")).decode()
        except pydantic_core.ValidationError as error:
            given: Any = pydantic_core.from_json(data) if _is_json(data) else None
            if all(_stands_at(given, one["loc"]) == MASK for one in error.errors(include_url=False)):
                return pydantic_core.to_json(masked(given, self.json_schema)).decode()
            return WITHHELD
        except Exception:  # raised by the user's validator, serializer or `__post_init__`
            return WITHHELD

    def hide(self, value: object) -> Any:
        """Return a value as plain JSON with its secrets masked, or withheld entirely if it does not match the type.

        Raises `ToolValidationError` if the value can't be written as JSON.
        """
        return pydantic_core.from_json(self.mask(self.clear(value)))

    @property
    def has_bytes(self) -> bool:
        """Whether values of the type can contain bytes that are written as text. Most bytes are not text."""
        return _has_bytes(self._adapter.core_schema)

    def __repr__(self) -> str:
        return f"Schema({self.annotation!r})"


def _accepts(validator: Any, value: object) -> bool:
    try:
        validator.validate_python(value, strict=True)
    except pydantic_core.ValidationError:
        return False
    return True


def is_plain(value: object) -> bool:
    """Return whether a value is None, a bool, an int or ASCII text. JSON can express each of these as it is."""
    return value is None or type(value) in (bool, int) or (type(value) is str and value.isascii())


def is_instance(value: object, annotation: Any) -> bool:
    """Return whether the annotation is a class and the value an instance of it. False for `Any` and for a TypedDict."""
    try:
        return isinstance(annotation, type) and isinstance(value, annotation)
    except TypeError:
        return False


@lru_cache(maxsize=512)
def schema_of(annotation: type[T]) -> Schema[T]:
    """Return the schema of a type. Recently used schemas are cached. Raises `DefinitionError` if the type has none."""
    return Schema(annotation)


def to_json(value: object, *, round_trip: bool = False) -> bytes:
    """Return a Python value as JSON text. With `round_trip`, computed fields, which can't be parsed, are left out.

    Supports dataclasses, models, enums, dates and paths. Secrets are masked. Raises `ToolValidationError` if the value
    can't be written as JSON.
    """
    try:
        return pydantic_core.to_json(
            value, inf_nan_mode="constants", round_trip=round_trip, fallback=write_path
        )
    except (pydantic_core.PydanticSerializationError, ValueError, RecursionError) as error:
        raise _unwritable(error) from None


def refuse_masks(data: str | bytes) -> None:
    """Raise `ToolValidationError` if JSON text contains a mask, because a mask must never be used as a secret."""
    if (MASK if isinstance(data, str) else MASK.encode()) not in data or not _is_json(data):  # pyright: ignore[reportOperatorIssue]  # both are text, or both are bytes
        return
    masks = dict.fromkeys(masks_in(pydantic_core.from_json(data)))
    if masks:
        raise _refusal(bounded([Problem(where, _MASKED) for where in masks], 0))


def list_problems(error: ToolValidationError) -> str:
    """Return the problems in an input as lines for a model. Their total size is limited."""
    problems = error.problems or (Problem("", words_of(error)),)
    if (
        len(problems) > MAX_PROBLEMS + 1
        or sum(len(str(each).encode(errors="replace")) for each in problems) > 3_800
    ):
        problems = bounded(problems, 0)
    return "\n".join(f"- {problem}" for problem in problems)


def clear_json(value: object) -> bytes:
    """Return a Python value as JSON text with its secrets unmasked.

    Parse the text immediately, and never show or keep it. Raises `ToolValidationError` if the value can't be written
    as JSON.
    """
    written = to_json(value)
    return in_clear(value) if MASK.encode() in written else written


def _is_json(data: str | bytes) -> bool:
    try:
        pydantic_core.from_json(data)
    except ValueError:
        return False
    return True


def _stands_at(value: Any, location: tuple[str | int, ...]) -> Any:
    """Return the part of an input at a location, or None if a list on the way has no such item.

    A step that names no key or item is skipped. Pydantic adds such steps as labels for union members.
    """
    here = value
    for part in location:
        if isinstance(here, dict) and part in here:
            here = cast("dict[Any, Any]", here)[part]
        elif isinstance(here, list) and isinstance(part, int):
            items = cast("list[Any]", here)
            here = items[part] if part < len(items) else None
    return cast(Any, here)


def _unwritable(error: Exception) -> ToolValidationError:
    # Pydantic repeats its own name around the error of a fallback.
    why = str(error).rpartition("PydanticSerializationError: ")[2]
    return _refusal([Problem("", f"can't be written as JSON: {why}")])


def _refusal(problems: list[Problem]) -> ToolValidationError:
    return ToolValidationError("; ".join(map(str, problems)), problems)


# --- making an adapter -------------------------------------------------------------------------


def _adapter_for(annotation: Any, namespace: Mapping[str, Any] | None) -> TypeAdapter[Any]:
    if isinstance(annotation, TypeAdapter):
        return cast("TypeAdapter[Any]", annotation)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        if not adapter.pydantic_complete:
            adapter.rebuild(force=True, raise_errors=True, _types_namespace=dict(namespace or {}))
        return adapter
    except PydanticUndefinedAnnotation as error:
        raise DefinitionError(
            f"the name {error.name!r} in the annotations of {describe(annotation)} can't be found. "
            "Import it at the top of the module, outside `if TYPE_CHECKING:`."
        ) from None
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError, RecursionError) as error:
        raise _indescribable(annotation, error) from error


def _validator_of(adapter: TypeAdapter[Any], parts: list[dict[str, Any]]) -> Any:
    """Return a validator that refuses infinite keys. They are text in JSON, so they can't be found among its numbers."""
    if not any(map(_has_float_keys, parts)):
        return adapter.validator
    return pydantic_core.SchemaValidator(_rewritten(adapter.core_schema, _with_finite_keys))


def _serializer_of(adapter: TypeAdapter[Any], parts: list[dict[str, Any]]) -> pydantic_core.SchemaSerializer:
    """Return a serializer that omits fields with `init=False`, because they can't be parsed again."""
    if not any(map(_is_unsendable, parts)):
        return adapter.serializer
    return pydantic_core.SchemaSerializer(_rewritten(adapter.core_schema, _without_unsendable))


def _rewritten(part: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a core schema with each of its dicts changed, from the inside out."""
    if type(part) is list:
        return [_rewritten(inner, change) for inner in cast("list[Any]", part)]
    if type(part) is tuple:
        return tuple(_rewritten(inner, change) for inner in cast("tuple[Any, ...]", part))
    if type(part) is not dict:
        return part
    return change({key: _rewritten(inner, change) for key, inner in cast("dict[str, Any]", part).items()})


def _failing_fast(part: dict[str, Any]) -> dict[str, Any]:
    """Let lists, tuples and sets be validated up to the first item that does not fit."""
    return {**part, "fail_fast": True} if part.get("type") in _FAIL_FAST else part


def _has_float_keys(part: Mapping[str, Any]) -> bool:
    keys = part.get("keys_schema") if part.get("type") == "dict" else None
    return keys is not None and any(inner.get("type") == "float" for inner in dicts_in(keys))


def _with_finite_keys(part: dict[str, Any]) -> dict[str, Any]:
    return (
        {**part, "keys_schema": _rewritten(part["keys_schema"], _finite)} if _has_float_keys(part) else part
    )


def _finite(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "allow_inf_nan": False} if part.get("type") == "float" else part


_FAIL_FAST = frozenset(["list", "tuple", "set", "frozenset"])


def _is_unsendable(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "dataclass-field" and part.get("init") is False


def _without_unsendable(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "serialization_exclude": True} if _is_unsendable(part) else part


def _indescribable(annotation: Any, error: Exception) -> DefinitionError:
    reason = str(error).split("\n", 1)[0].split(". ", 1)[0].rstrip(".")
    return DefinitionError(
        f"{describe(annotation)} can't be described to a model: {reason}. "
        "Use dataclasses, pydantic models, enums, lists, dicts and plain JSON values."
    )


def _has_bytes(part: Any) -> bool:
    if isinstance(part, dict):
        known = cast("dict[str, Any]", part)
        if "serialization" in known or known.get("config", {}).get("ser_json_bytes", "utf8") != "utf8":
            return False
        return known.get("type") == "bytes" or any(map(_has_bytes, known.values()))
    return isinstance(part, list | tuple) and any(map(_has_bytes, cast("list[Any]", part)))


# --- JSON Schema -------------------------------------------------------------------------------


_NO_KEYS = frozenset(["tuple", "frozenset", "dataclass", "model"])
"""Core schemas of types that JSON can't have as keys."""


class _Closed(GenerateJsonSchema):
    """Generates JSON Schema in which objects with known fields allow no others. Titles of classes and generated titles are omitted."""

    ignored_warning_kinds: ClassVar[set[JsonSchemaWarningKind]] = {  # pyright: ignore[reportIncompatibleVariableOverride]  # pydantic leaves ClassVar out
        "skipped-choice",
        "non-serializable-default",
    }

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return _close(super().dataclass_schema(schema))

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return _close(super().model_schema(schema))

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        return _close(super().typed_dict_schema(schema))

    def dataclass_args_schema(self, schema: core_schema.DataclassArgsSchema) -> JsonSchemaValue:
        # A field with init=False can't be sent, so it is omitted.
        fields = [field for field in schema["fields"] if field.get("init", True)]
        return super().dataclass_args_schema({**schema, "fields": fields})

    def generator_schema(self, schema: core_schema.GeneratorSchema) -> JsonSchemaValue:
        raise PydanticUserError("the items of an Iterable are validated only when they are read", code=None)

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        if not all(isinstance(each.value, str | int | float | None) for each in schema["members"]):
            raise PydanticUserError("a value of the enum is neither text nor a number", code=None)
        return super().enum_schema(schema)

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        if schema.get("keys_schema", {}).get("type") in _NO_KEYS:
            raise PydanticUserError("a key of a mapping is text in JSON", code=None)
        return super().dict_schema(schema)

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        raise PydanticUserError("a class can't be sent as JSON", code=None)

    def build_schema_type_to_method(self) -> dict[Any, Callable[[Any], JsonSchemaValue]]:
        # Pydantic looks up the names of all methods again for each schema.
        return {kind: getattr(self, name) for kind, name in _method_names().items()}

    def encode_default(self, dft: Any) -> Any:
        # Defaults that JSON can't express, and secrets, are not shown.
        if is_plain(dft) and dft != MASK and not self._config.config_dict.get("json_encoders"):
            return dft  # pydantic would create a type adapter, and get the same
        encoded = super().encode_default(dft)
        if any(_unfit_to_show(part) for part in values_in(encoded)):
            raise pydantic_core.PydanticSerializationError("not to be shown")
        return encoded

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@lru_cache(maxsize=1)
def _method_names() -> dict[Any, str]:
    """Return the name of the method that generates the JSON Schema of each kind of core schema."""
    methods = GenerateJsonSchema().build_schema_type_to_method()
    return {kind: method.__name__ for kind, method in methods.items()}


def _close(schema: JsonSchemaValue) -> JsonSchemaValue:
    schema.pop("title", None)
    if schema.get("type") == "object":
        schema["additionalProperties"] = False
        schema.setdefault("properties", {})
    return schema


def _unfit_to_show(value: Any) -> bool:
    return value == MASK or (isinstance(value, float) and not math.isfinite(value))


def _json_schema_of(adapter: TypeAdapter[Any], annotation: Any) -> JsonSchema:
    try:
        schema = adapter.json_schema(schema_generator=_Closed)
    except PydanticUserError as error:
        raise _indescribable(annotation, error) from error
    for part in dicts_in(schema):
        if "enum" in part and isinstance(part.get("title"), str):
            del part["title"]
    reference = schema.get("$ref", "")
    if reference.startswith("#/$defs/"):
        # Providers require an object at the top level, not a reference to one.
        top = schema["$defs"][reference.removeprefix("#/$defs/")]
        schema = {**top, "$defs": schema["$defs"]}
    return schema


def _holds_floats(part: Mapping[str, Any]) -> bool:
    anything = not {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & set(part)
    return part.get("type") == "number" or anything or part.get("additionalProperties") is True


# --- infinities --------------------------------------------------------------------------------

_SUSPECT_TEXT = r"NaN|Infinity|\d[eE]\+?\d{3}|\d{200}"
_SUSPECT: dict[type, re.Pattern[Any]] = {
    str: re.compile(_SUSPECT_TEXT),
    bytes: re.compile(_SUSPECT_TEXT.encode()),
}


def infinities_in(data: str | bytes, schema: JsonSchema) -> Iterator[Problem]:
    """Yield a problem for each number that is not finite, or too large for a float where only a float is accepted."""
    if not _SUSPECT[type(data)].search(data):
        return
    try:
        value = pydantic_core.from_json(data)
    except (ValueError, TypeError):
        return  # text that is not JSON is reported by the validation
    for location, number in _numbers(value, ()):
        if isinstance(number, float) and not math.isfinite(number):
            yield Problem(shown_location(location, schema), NOT_FINITE)
        elif abs(number) > sys.float_info.max and _takes_floats_only(schemas_at(schema, location)):
            yield Problem(shown_location(location, schema), "is too large for a float")


def _takes_floats_only(forms: list[Mapping[str, Any]]) -> bool:
    kinds = {form.get("type") for form in forms}
    return "number" in kinds and "integer" not in kinds


def _numbers(value: Any, location: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], float]]:
    if isinstance(value, int | float):
        yield location, value
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _numbers(inner, (*location, key))
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[Any]", value)):
            yield from _numbers(inner, (*location, index))
