"""Secrets in values: find them by type, mask them, and recognise masks.

A secret is recognised by pydantic's serializer for secret types and by `writeOnly` in the JSON Schema. Either
is enough, so that neither a custom serializer nor a custom JSON Schema exposes a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

import pydantic_core
from pydantic import Secret, SecretStr, TypeAdapter
from pydantic_core import core_schema

from handrail.schema.problems import Location, forms_of, inside, location_of, write_path
from handrail.schema.size import dicts_in

MASK = str(SecretStr("any"))
"""The text that replaces a secret in everything that is shown or recorded."""
WITHHELD = pydantic_core.to_json({MASK: "not shown: it may contain a secret"}).decode()
"""The JSON text that replaces a value that does not match its type, because any part of it may be secret."""


@lru_cache(maxsize=1)
def _maskers() -> tuple[Any, ...]:
    """Return the functions with which pydantic masks secrets."""
    kinds: tuple[Any, ...] = (SecretStr, Secret[str])
    return tuple(
        part["function"]
        for kind in kinds
        for part in dicts_in(TypeAdapter(kind).core_schema)
        if part.get("type") == "function-plain"
    )


def holds_secrets(parts: list[dict[str, Any]], json_schema: Any) -> bool:
    """Return whether values of a type can hold a secret. `parts` are all dicts in its core schema."""
    if any(part.get("writeOnly") is True for part in dicts_in(json_schema)):
        return True
    return any(part.get("type") == "function-plain" and part["function"] in _maskers() for part in parts)


# --- masking -----------------------------------------------------------------------------------


def masked(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """Return plain JSON with a mask in place of each value that the JSON Schema marks `writeOnly`.

    A key is masked if `propertyNames` is `writeOnly`. None, empty text, and a value that is not text where the schema requires
    text are not masked. `root` is the complete schema, if `schema` is a part of one.
    """
    root = schema if root is None else root
    return _masked(value, forms_of(schema, root), root)


def _masked(value: Any, forms: list[Mapping[str, Any]], root: Mapping[str, Any]) -> Any:
    if any(form.get("writeOnly") is True and _is_meant(value, form) for form in forms):
        return MASK
    if isinstance(value, dict):
        return {
            _key(key, forms, root): _masked(one, inside(forms, key, root), root)
            for key, one in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        items = enumerate(cast("list[Any]", value))
        return [_masked(one, inside(forms, at, root), root) for at, one in items]
    return value


def _is_meant(value: Any, form: Mapping[str, Any]) -> bool:
    """Return whether a value can be the secret that a schema describes.

    A secret is neither None nor empty text, and is text if the schema requires text.
    """
    if value is None or value == "":
        return False
    return isinstance(value, str) or form.get("type") != "string"


def _key(key: str, forms: list[Mapping[str, Any]], root: Mapping[str, Any]) -> str:
    named = any(key in form.get("properties", ()) for form in forms)
    names = [form["propertyNames"] for form in forms if isinstance(form.get("propertyNames"), dict)]
    secret = not named and any(one.get("writeOnly") is True for each in names for one in forms_of(each, root))
    return MASK if secret else key


def is_masked(value: Any) -> bool:
    """Return whether plain JSON contains a mask."""
    return any(True for _ in masks_in(value))


def masks_in(value: Any, location: Location = ()) -> Iterator[str]:
    """Yield the location of each mask in plain JSON. For a masked key, it is that of the object; for the value itself, ""."""
    if isinstance(value, str):
        if value == MASK:
            yield location_of(location)
    elif isinstance(value, dict):
        for key, one in cast("dict[str, Any]", value).items():
            if key == MASK:
                yield location_of(location)
            else:
                yield from masks_in(one, (*location, key))
    elif isinstance(value, list):
        for at, one in enumerate(cast("list[Any]", value)):
            yield from masks_in(one, (*location, at))


# --- unmasked --------------------------------------------------------------------------------------

_ANYTHING = pydantic_core.SchemaSerializer(core_schema.any_schema())


def in_clear(value: object, serializer: pydantic_core.SchemaSerializer = _ANYTHING) -> bytes:
    """Return a Python value as JSON text with its secrets unmasked. Parse the text immediately, and never keep it."""
    plain = serializer.to_python(value, by_alias=True, round_trip=True, warnings=False)
    return pydantic_core.to_json(_revealed(plain), inf_nan_mode="constants", fallback=write_path)


def _revealed(value: Any) -> Any:
    reveal = getattr(value, "get_secret_value", None)
    if reveal is not None:
        return _revealed(reveal())
    if isinstance(value, Mapping):
        return {_revealed(key): _revealed(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_revealed(one) for one in cast("list[Any]", value)]
    return value
