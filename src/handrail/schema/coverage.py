"""Checks that a value's JSON shows everything that the value contains.

People are shown the JSON of a call's arguments. Pydantic can be configured to write something other than what it
parsed: a field can be excluded, written under another field's name, or changed by a serializer, and different keys of
a dict can be written alike. A person would then approve less than the tool gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from typing import Any, cast

import msgspec
import pydantic_core
from pydantic import BaseModel, RootModel, SecretBytes, SecretStr

from handrail.schema.problems import write_path
from handrail.schema.secrets import MASK

_MISSING = object()


def first_hidden(value: object, shown: object, where: str = "", *, masked: bool = False) -> str | None:
    """Return the location of the first part of a value that its JSON does not show as it is; None if it shows everything.

    The location of the value itself is "". A pydantic secret counts as shown, because it is masked on purpose. With `masked`,
    any mask in the JSON counts as showing the value.
    """
    if masked and shown == MASK:
        return None
    for place, part, written in _parts(value, shown, where, masked):
        hidden = place if written is _MISSING else first_hidden(part, written, place, masked=masked)
        if hidden is not None:
            return hidden
    return None


def in_order(value: Any, shown: Any) -> Any:
    """Return the JSON of a value with the items of its sets sorted, because their order differs between processes."""
    if isinstance(value, RootModel):
        value = cast("RootModel[Any]", value).root
    if isinstance(value, Set) and isinstance(shown, list):
        items = cast("list[Any]", shown)
        return sorted(items, key=lambda item: msgspec.json.encode(item, order="sorted"))
    fields = _fields(cast(object, value))
    if isinstance(shown, dict):
        known = cast("dict[str, Any]", shown)
        if fields is not None:
            parts = {key: part for _, key, part in fields}
            return {key: in_order(parts.get(key), written) for key, written in known.items()}
        if isinstance(value, Mapping) and len(cast("Mapping[Any, Any]", value)) == len(known):
            whole = cast("Mapping[Any, Any]", value).values()
            return {key: in_order(part, known[key]) for key, part in zip(known, whole, strict=True)}
    elif isinstance(shown, list) and isinstance(value, list | tuple) and len(value) == len(shown):  # pyright: ignore[reportUnknownArgumentType]
        pairs = zip(cast("Sequence[Any]", value), cast("list[Any]", shown), strict=True)
        return [in_order(part, written) for part, written in pairs]
    return cast(object, shown)


def _parts(value: Any, shown: Any, where: str, masked: bool) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts of a value, each with its location and its JSON, which is `_MISSING` if the part is not shown."""
    if isinstance(value, SecretStr | SecretBytes):
        return  # masked on purpose
    if isinstance(value, RootModel):
        value = cast("RootModel[Any]", value).root
    fields = _fields(value)
    if fields is not None:
        known = cast("dict[str, Any]", shown) if isinstance(shown, dict) else {}
        written = [key for _, key, _ in fields]
        for name, key, part in fields:
            alone = written.count(key) == 1
            yield _inside(where, name), part, known.get(key, _MISSING) if alone else _MISSING
    elif isinstance(value, Mapping):
        items = list(cast("Mapping[Any, Any]", value).items())
        known = list(cast("dict[str, Any]", shown).items()) if isinstance(shown, dict) else []
        if len(items) != len(known):
            yield where, value, _MISSING
            return
        for (key, part), (name, written) in zip(items, known, strict=True):
            same = not isinstance(key, str) or key == name or (masked and name == MASK)
            yield _inside(where, name), part, written if same else _MISSING
    elif isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray):
        listed = list(cast("Sequence[Any]", value))
        known = cast("list[Any]", shown) if isinstance(shown, list) else []
        if len(listed) != len(known):
            yield where, cast(object, value), _MISSING
            return
        for number, (part, written) in enumerate(zip(listed, known, strict=True)):
            yield _inside(where, str(number)), part, written
    elif not _is_shown(value, shown):
        yield where, value, _MISSING


def _fields(value: object) -> list[tuple[str, str, Any]] | None:
    """Return the fields of a model or dataclass, each as name, name in the JSON, and value; None for other values."""
    if isinstance(value, BaseModel):
        kinds = type(value).model_fields
        found = [
            (name, kind.serialization_alias or kind.alias or name, getattr(value, name))
            for name, kind in kinds.items()
        ]
        return found + [(name, name, part) for name, part in (value.model_extra or {}).items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kinds = getattr(type(value), "__pydantic_fields__", {})
        return [
            (each.name, _alias(kinds.get(each.name), each.name), getattr(value, each.name))
            for each in dataclasses.fields(value)
            if each.init  # the class itself sets the others, so arguments can't
        ]
    return None


def _alias(field: Any, name: str) -> str:
    return name if field is None else field.serialization_alias or field.alias or name


def _is_shown(value: Any, shown: Any) -> bool:
    """Return whether a single value is shown as its usual JSON. A value that has no usual JSON passes."""
    if isinstance(value, Enum):
        value = value.value
    try:
        usual = pydantic_core.to_jsonable_python(value, inf_nan_mode="constants", fallback=write_path)
    except (pydantic_core.PydanticSerializationError, ValueError):
        return True
    return type(usual) is type(shown) and (usual == shown or usual != usual)


def _inside(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
