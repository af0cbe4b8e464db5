"""Extras: values that an adapter adds to a context under declared keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, overload

from handrail.errors import ExtraKeyError, ToolValidationError
from handrail.schema import schema_of, to_json

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


@dataclass(frozen=True)  # no slots, because a subscripted call, ExtraKey[...](...), sets an attribute
class ExtraKey(Generic[T]):
    """The name and type of a value in the extras.

    Values are JSON unless the key is `opaque`. For an opaque key, `about` must say how long the object lives and
    from which threads it may be used.
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
    """When the limit is fully restored."""


TRACING_SPAN: ExtraKey[Any] = ExtraKey(
    "tracing_span",
    object,
    "The OpenTelemetry span of this call. It ends with the call; it may be used from any thread.",
    opaque=True,
)
PROVIDER_REQUEST_ID = ExtraKey("provider_request_id", str, "The provider's id for the request.")
RATE_LIMIT = ExtraKey("rate_limit", RateLimit, "The provider's rate limit, as last reported.")

RETRIES = ExtraKey("retries", int, "How many times the request was retried.")


class Extras(Mapping[str, Any]):
    """A read-only mapping, indexed by name or by key. `extras[RATE_LIMIT]` has the key's type."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | None = None, keys: tuple[ExtraKey[Any], ...] = ()) -> None:
        opaque = {key.name for key in (*keys, TRACING_SPAN) if key.opaque}
        self._values = dict(values or {})
        for name, value in self._values.items():
            _check_name(name)
            if name not in opaque:
                _check_json(name, value)

    @overload
    def __getitem__(self, key: ExtraKey[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: str | ExtraKey[Any]) -> Any:
        return self._values[key if isinstance(key, str) else key.name]

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
        return self._values.get(key if isinstance(key, str) else key.name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Extras({', '.join(self._values)})"


NO_EXTRAS = Extras()
