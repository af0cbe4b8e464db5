"""Extras: values that a model, an adapter, a run or a gate adds to the contexts of its calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, overload

from handrail.errors import ExtraKeyError, ToolValidationError
from handrail.schema import schema_of, to_json
from handrail.schema.kinds import describe_kind

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

    A value must be serializable as JSON unless the key is `opaque`. For an opaque key, `about` must say how long the
    object lives and from which threads it may be used.
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

    `extras[RATE_LIMIT]` has the key's type. If the value under the key's name has a different type, reading it with the key
    raises `ExtraKeyError`.
    """

    __slots__ = ("_opaque", "_values")

    def __init__(self, values: ExtraValues | None = None, keys: tuple[ExtraKey[Any], ...] = ()) -> None:
        self._opaque = {key.name for key in (*keys, TRACING_SPAN) if key.opaque}
        self._values: dict[str, Any] = {}
        for key, value in (values or {}).items():
            name = key.name if isinstance(key, ExtraKey) else key
            _check_name(name)
            if isinstance(key, ExtraKey):
                if key.opaque:
                    self._opaque.add(name)
                if not isinstance(value, PerCall):
                    _check_type(key, value)
            self._check_value(name, value)
            self._values[name] = value

    def merged(self, others: Extras) -> Extras:
        """Return these extras merged with `others`, whose values win."""
        if not self._values or not others._values:
            return others if others._values else self
        return Extras._of({**self._values, **others._values}, self._opaque | others._opaque)

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
                self._check_value(name, value)
            values[name] = value
        return Extras._of({**values, **provider._values}, self._opaque)

    @classmethod
    def _of(cls, values: dict[str, Any], opaque: set[str]) -> Extras:
        """Return extras with values that have already been checked."""
        made = cls()
        made._values, made._opaque = values, opaque
        return made

    def _check_value(self, name: str, value: Any) -> None:
        if name not in self._opaque and not isinstance(value, PerCall):
            _check_json(name, value)

    @overload
    def __getitem__(self, key: ExtraKey[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: str | ExtraKey[Any]) -> Any:
        if isinstance(key, str):
            return self._values[key]
        return _check_type(key, self._values[key.name])

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
