"""`PathArg` declares which arguments of a tool are paths. `PathFinder` finds them in a call."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import PurePath
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from pydantic import BaseModel

from handrail.errors import DefinitionError
from handrail.schema.problems import describe
from handrail.text.spelling import checked_arguments

Access = Literal["read", "write"]


@checked_arguments
@dataclasses.dataclass(frozen=True, slots=True)
class PathArg:
    """Marks an argument as a path: `Annotated[str, PathArg("write")]`.

    Policies, scopes and the approval memory rely on this mark, not on the argument's name.
    """

    access: Access

    def __post_init__(self) -> None:
        if self.access not in ("read", "write"):
            raise DefinitionError(
                f"PathArg({self.access!r}): the access must be 'read' or 'write'. "
                'Write `Annotated[str, PathArg("read")]`.'
            )


class NamedPath(msgspec.Struct, frozen=True):
    """A path in a call's arguments, and the kind of access it is declared for."""

    path: str
    access: Access


class PathFinder:
    """Finds the declared paths in params of one type, at any depth."""

    __slots__ = ("_annotation", "_fields", "_namespace", "declared")

    def __init__(self, annotation: Any, namespace: Mapping[str, Any] | None = None) -> None:
        self._annotation = annotation
        self._namespace = dict(namespace or {})
        self._fields: dict[Any, dict[str, Any]] = {}
        self.declared = frozenset(self._accesses(annotation, set()))
        """The kinds of access declared anywhere in the type; empty for most tools."""

    def find(self, params: Any) -> tuple[NamedPath, ...]:
        """Return the paths in these params, in the order of the type's fields."""
        return tuple(self._found(self._annotation, params)) if self.declared else ()

    def _fields_of(self, annotation: Any) -> dict[str, Any]:
        """Return the fields of a class with their annotations, in which type variables are replaced."""
        origin = get_origin(annotation) or annotation
        if not isinstance(origin, type):
            return {}
        if origin not in self._fields:
            self._fields[origin] = self._hints_of(origin)
        fields = self._fields[origin]
        if origin is annotation or not fields:
            return fields
        variables = dict(zip(cast(Any, origin).__parameters__, get_args(annotation), strict=True))
        return {name: _filled(hint, variables) for name, hint in fields.items()}

    def _hints_of(self, origin: type[Any]) -> dict[str, Any]:
        if issubclass(origin, BaseModel) and origin.__pydantic_complete__:
            fields = origin.__pydantic_fields__
            return {name: _annotated(field.annotation, field.metadata) for name, field in fields.items()}
        if not _has_fields(origin):
            return {}
        hints = get_type_hints(cast(Any, origin), localns=self._namespace, include_extras=True)
        variables = _variables_of_bases(origin)
        return {name: _filled(hint, variables) for name, hint in hints.items() if not name.startswith("__")}

    def _accesses(self, annotation: Any, seen: set[str]) -> Iterator[Access]:
        if get_origin(annotation) is Literal or _is_builtin(annotation):
            return  # most annotations are values, or classes such as str, which have no fields
        annotation = _unaliased(annotation)
        for marker in _markers(annotation):
            inner = _unaliased(get_args(annotation)[0])
            if not all(one in (str, type(None)) or _is_path_type(one) for one in _alternatives(inner)):
                raise DefinitionError(
                    f"PathArg({marker.access!r}) marks {describe(inner)}, but only text and paths can be marked. "
                    "To mark several paths, mark the items: `list[Annotated[str, PathArg(...)]]`."
                )
            yield marker.access
        if get_origin(annotation) is Annotated:
            yield from self._accesses(get_args(annotation)[0], seen)
            return
        if repr(annotation) in seen:
            return
        seen.add(repr(annotation))
        for inner in (*self._fields_of(annotation).values(), *get_args(annotation)):
            yield from self._accesses(inner, seen)

    def _found(self, annotation: Any, value: Any) -> Iterator[NamedPath]:
        if value is None:
            return
        annotation = _unaliased(annotation)
        if get_origin(annotation) is Annotated:
            for marker in _markers(annotation):
                yield NamedPath(str(cast("str | PathLike[str]", value)), marker.access)
            yield from self._found(get_args(annotation)[0], value)
            return
        fields = self._fields_of(annotation)
        for name, hint in fields.items():
            if isinstance(value, Mapping):  # a TypedDict
                yield from self._found(hint, cast("Mapping[str, Any]", value).get(name))
            elif hasattr(value, name):
                yield from self._found(hint, getattr(value, name))
        arguments = get_args(annotation)
        if fields:
            return
        if get_origin(annotation) in (Required, NotRequired):
            yield from self._found(arguments[0], value)
        elif get_origin(annotation) in (Union, types.UnionType):
            for alternative in arguments:
                if _could_be(alternative, value):
                    yield from self._found(alternative, value)
        elif isinstance(value, Mapping) and len(arguments) == 2:
            for key, inner in cast("Mapping[Any, Any]", value).items():
                yield from self._found(arguments[0], key)
                yield from self._found(arguments[1], inner)
        elif isinstance(value, list | tuple | set | frozenset) and arguments:
            items = list(cast("list[Any]", value))
            fixed = get_origin(annotation) is tuple and arguments[-1] is not Ellipsis
            hints = arguments if fixed else (arguments[0],) * len(items)
            for hint, inner in zip(hints, items, strict=False):
                yield from self._found(hint, inner)


def _is_builtin(annotation: Any) -> bool:
    return type(annotation) is type and annotation.__module__ == "builtins"


def _annotated(annotation: Any, metadata: list[Any]) -> Any:
    return Annotated[annotation, *metadata] if metadata else annotation


def _filled(hint: Any, variables: Mapping[Any, Any]) -> Any:
    """Return a field's annotation with the type variables of its generic class replaced."""
    if isinstance(hint, TypeVar):
        return variables.get(hint, hint)
    free = getattr(hint, "__parameters__", ())
    if not free or isinstance(hint, type):
        return hint
    return hint[tuple(variables.get(one, one) for one in free)]


def _variables_of_bases(origin: type[Any]) -> dict[Any, Any]:
    """Return the type variables that the bases of a class fill in, with their types, as in `class Notes(Box[str])`."""
    variables: dict[Any, Any] = {}
    for one in origin.__mro__:
        for base in one.__dict__.get("__orig_bases__", ()):
            free = getattr(get_origin(base), "__parameters__", ())
            for variable, argument in zip(free, get_args(base), strict=False):
                variables.setdefault(variable, _filled(argument, variables))
    return variables


def _unaliased(annotation: Any) -> Any:
    """Return the type behind an alias made with the `type` statement. Any other annotation is returned unchanged."""
    while True:
        alias = get_origin(annotation) or annotation
        if isinstance(alias, type) or not hasattr(alias, "__value__"):
            return annotation
        variables = dict(zip(alias.__type_params__, get_args(annotation), strict=False))
        annotation = _filled(alias.__value__, variables)


def _has_fields(origin: Any) -> bool:
    """Return whether the annotations of this class define its fields."""
    if dataclasses.is_dataclass(origin) or issubclass(origin, BaseModel) or _is_typed_dict(origin):
        return True
    return issubclass(origin, tuple) and hasattr(cast(Any, origin), "_fields")


def _is_typed_dict(origin: Any) -> bool:
    return hasattr(
        origin, "__required_keys__"
    )  # true for a TypedDict from `typing` or from `typing_extensions`


def _markers(annotation: Any) -> list[PathArg]:
    if get_origin(annotation) is not Annotated:
        return []
    return [marker for marker in annotation.__metadata__ if isinstance(marker, PathArg)]


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_path_type(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, PurePath)


def _could_be(annotation: Any, value: Any) -> bool:
    """Return whether the value can be an instance of this member of a union."""
    annotation = _unaliased(annotation)
    if get_origin(annotation) is Annotated:
        return _could_be(get_args(annotation)[0], value)
    origin = get_origin(annotation) or annotation
    if _is_typed_dict(origin):
        return isinstance(value, Mapping)
    return not isinstance(origin, type) or isinstance(value, origin)
