"""Extras: values that a model, an adapter, a run or a gate adds to the contexts of its calls."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast, overload

from handrail.errors import ExtraKeyError, ToolValidationError
from handrail.schema import schema_of, to_json
from handrail.schema.immutability import is_immutable, read_only
from handrail.schema.problems import describe_kind

T = TypeVar("T")

_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*\Z")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _SNAKE.match(name):
        raise ExtraKeyError(name, "it is not a snake_case ASCII name", "Use a name like 'rate_limit'.")


def _check_json(name: str, value: Any) -> None:
    try:
        schema_of(Any).parse(to_json(value))
    except ToolValidationError as error:
        raise ExtraKeyError(
            name,
            f"its value {error}",
            "Pass a JSON value, or declare the key with `ExtraKey(..., opaque=True)`.",
        ) from None


def _is_json(value: Any) -> bool:
    """Return whether a value that can be written as JSON consists of JSON's own types, so that reading it back gives the same."""
    if isinstance(value, Mapping):
        return all(
            isinstance(name, str) and _is_json(each)
            for name, each in cast("Mapping[Any, Any]", value).items()
        )
    if isinstance(value, list | tuple):
        return all(map(_is_json, cast("list[Any]", value)))
    return value is None or isinstance(value, str | int | float)


class _Copied:
    """A value that can't be frozen. Whoever reads it gets a copy."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _copied(name: str, value: Any) -> _Copied:
    try:
        return _Copied(copy.deepcopy(value))
    except Exception as error:
        raise ExtraKeyError(
            name,
            f"its value can't be copied: {type(error).__name__}",
            "Pass a value that can be copied, or declare the key with `ExtraKey(..., opaque=True)`.",
        ) from error


def _check_type(key: ExtraKey[Any], value: Any) -> Any:
    """Return a value if it has its key's type. Raises `ExtraKeyError` otherwise."""
    if not isinstance(value, key.type):
        raise ExtraKeyError(
            key.name,
            f"its value is {describe_kind(value)}, and its key is declared for {key.type.__name__}",
            f"Pass a value of type {key.type.__name__}, or declare the key with a different type.",
        )
    return value


@dataclass(frozen=True)  # no slots: with them, ExtraKey[int](...) fails when typing sets `__orig_class__`
class ExtraKey(Generic[T]):
    """The name and type of a value in the extras.

    A value must be serializable as JSON unless the key is `opaque`. It is copied, and tools can't change the copy. An object
    under an opaque key is not copied: `about` must say how long it lives and from which threads it may be used.
    """

    name: str
    type: type[T]
    about: str = ""
    opaque: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not isinstance(self.type, type):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise ExtraKeyError(self.name, f"its type is {self.type!r}", "Pass a class, or `object` for any.")
        if self.opaque and not self.about:
            raise ExtraKeyError(
                self.name,
                "it is opaque and `about` is empty",
                "Say in `about` how long the object lives and from which threads it may be used.",
            )


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The provider's rate limit, as last reported."""

    requests_left: int | None = None
    tokens_left: int | None = None
    resets_at: datetime | None = None
    """When the limit is fully restored; None if the provider did not say."""


TRACING_SPAN: ExtraKey[Any] = ExtraKey(
    "tracing_span",
    object,
    "The OpenTelemetry span of this call. It ends with the call; it may be used from any thread.",
    opaque=True,
)
PROVIDER_REQUEST_ID = ExtraKey("provider_request_id", str, "The provider's id for the request.")
RATE_LIMIT = ExtraKey("rate_limit", RateLimit, "The provider's rate limit, as last reported.")

RETRIES = ExtraKey("retries", int, "How many earlier requests were made for the same answer.")

_BUILT_IN: dict[str, ExtraKey[Any]] = {
    key.name: key for key in (TRACING_SPAN, PROVIDER_REQUEST_ID, RATE_LIMIT, RETRIES)
}


@dataclass(frozen=True, slots=True)
class PerCall:
    """A value that is different for each call, as in `{TRACING_SPAN: PerCall(spans.get)}`.

    `find` takes the id of a call and returns the call's value, or None if it has none. It runs each time the call's
    extras are read, on the thread that reads them.
    """

    find: Callable[[str], Any]


ExtraValues = Mapping[str, Any] | Mapping[ExtraKey[Any], Any] | Mapping[str | ExtraKey[Any], Any]
"""Values for extras, by key or by name."""


class Extras(Mapping[str, Any]):
    """A read-only mapping of extra values, indexed by name or by key.

    The values are frozen copies of those that were given: JSON, unless a key declares another type. A value whose type
    can't be frozen is copied each time it is read. `extras[RATE_LIMIT]` has the key's type. If the value under the key's name has a different type, reading it with the key
    raises `ExtraKeyError`.
    """

    __slots__ = ("_keys", "_values")

    def __init__(self, values: ExtraValues | None = None, keys: tuple[ExtraKey[Any], ...] = ()) -> None:
        self._keys = _BUILT_IN
        """The declared keys, by name."""
        self._values: dict[str, Any] = {}
        if not values and not keys:
            return
        self._keys = {**_BUILT_IN, **{key.name: key for key in keys}}
        for key, value in (values or {}).items():
            name = key.name if isinstance(key, ExtraKey) else key
            _check_name(name)
            if isinstance(key, ExtraKey):
                self._keys[name] = key
                if not isinstance(value, PerCall):
                    _check_type(key, value)
            self._values[name] = value if isinstance(value, PerCall) else self._frozen(name, value)

    def merged(self, others: Extras) -> Extras:
        """Return these extras merged with `others`, whose values win."""
        if not self._values or not others._values:
            return others if others._values else self
        return Extras._of({**self._values, **others._values}, {**self._keys, **others._keys})

    def for_call(self, call_id: str, provider: Extras) -> Extras:
        """Return the extras of one call: these merged with the provider's, whose values win.

        Each `PerCall` is replaced by its value for the call, or left out if that is None.
        """
        if not self._values:
            return provider
        values: dict[str, Any] = {}
        for name, value in self._values.items():
            if isinstance(value, PerCall):
                value = value.find(call_id)
                if value is None:
                    continue
                value = self._frozen(name, value)
            values[name] = value
        return Extras._of({**values, **provider._values}, self._keys)

    @classmethod
    def _of(cls, values: dict[str, Any], keys: dict[str, ExtraKey[Any]]) -> Extras:
        """Return extras with values that have already been checked and frozen."""
        made = cls()
        made._values, made._keys = values, keys
        return made

    def _frozen(self, name: str, value: Any) -> Any:
        """Return the value to keep: the object itself under an opaque key, otherwise a copy that can't be changed.

        Raises `ExtraKeyError` if the value is not JSON, unless its key declares so.
        """
        key = self._keys.get(name)
        if key is not None and key.opaque:
            return value
        _check_json(name, value)
        if _is_json(value):
            return read_only(value)
        if key is None:
            kind = type(value).__name__
            raise ExtraKeyError(
                name,
                f"its value is {describe_kind(value)}, or holds an object that is not JSON",
                f"Pass a JSON value, or declare its type with `ExtraKey({name!r}, {kind})`.",
            )
        return value if is_immutable(type(value)) else _copied(name, value)

    def _read(self, name: str) -> Any:
        value = self._values[name]
        return copy.deepcopy(value.value) if type(value) is _Copied else value

    @overload
    def __getitem__(self, key: ExtraKey[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: str | ExtraKey[Any]) -> Any:
        if isinstance(key, str):
            return self._read(key)
        return _check_type(key, self._read(key.name))

    @overload
    def get(self, key: ExtraKey[T], default: None = None, /) -> T | None: ...
    @overload
    def get(self, key: ExtraKey[T], default: T, /) -> T: ...
    @overload
    def get(self, key: str, default: None = None, /) -> Any: ...
    @overload
    def get(self, key: str, default: Any, /) -> Any: ...
    def get(  # pyright: ignore[reportIncompatibleMethodOverride]  # it takes an ExtraKey as well
        self, key: str | ExtraKey[Any], default: Any = None, /
    ) -> Any:
        if key not in self:
            return default
        return self[key]

    def __contains__(self, key: object) -> bool:
        return (key.name if isinstance(key, ExtraKey) else key) in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Extras({', '.join(self._values)})"


NO_EXTRAS = Extras()
