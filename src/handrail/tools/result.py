"""`ToolResult`: what the model is told about a call, and the typed value behind it."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import msgspec

from handrail.errors import CallFailed
from handrail.schema import to_json

R = TypeVar("R")
V = TypeVar("V")


@runtime_checkable
class Renders(Protocol):
    """A value that knows how it should be shown to a model."""

    def render(self) -> str: ...


class ToolResult(msgspec.Struct, Generic[R], frozen=True):
    """The outcome of one call. A result with `success=False` undoes the call like an exception.

    The model sees the message and the rendered value. With `exclude_value_from_context` it sees the
    message only; that keeps a large value out of the conversation, and is no security boundary.
    """

    message: str
    value: R
    success: bool = True
    exclude_value_from_context: bool = False

    @staticmethod
    def ok(value: V, message: str = "", *, exclude_value_from_context: bool = False) -> ToolResult[V]:
        """The call did what it was asked to."""
        return ToolResult(message, value, True, exclude_value_from_context)

    @staticmethod
    def error(message: str, value: Any = None) -> ToolResult[Any]:
        """The call failed; what it did is undone. Write the message for the model to act on."""
        return ToolResult(message, value, False)

    def unwrap(self) -> R:
        """The value of a call that succeeded; of one that failed, `CallFailed` with what it said."""
        if not self.success:
            raise CallFailed("the call", self)
        return self.value

    def render(self) -> str:
        """What the model is shown: never empty, since providers refuse empty results."""
        shown = "" if self.exclude_value_from_context else _rendered(self.value)
        if self.message and shown:
            return f"{self.message}\n{shown}"
        return self.message or shown or ("done" if self.success else "failed")


def _rendered(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if callable(getattr(value, "render", None)):  # a `Renders`: asking its protocol takes 25 times as long
        return cast(Renders, value).render()
    return to_json(value).decode()
