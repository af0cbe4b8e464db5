"""The verbs of an environment: ask the person, or ask a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from handrail.operation import Operation
    from handrail.tools import Tool

T = TypeVar("T")


class WaitFor(Protocol):
    """Ask the person on the other side. The answer is validated against `schema`.

    No answer raises `Declined`, `QuestionCancelled` or `QuestionTimedOut`. A type that is not a
    class, such as `Literal["a", "b"]`, is given as `TypeAdapter(...)`.
    """

    @overload
    def __call__(
        self, kind: str, payload: object, schema: type[T], *, timeout: float | None = None
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self, kind: str, payload: object, schema: TypeAdapter[T], *, timeout: float | None = None
    ) -> Operation[T]: ...


class PromptModel(Protocol):
    """One structured call of a model, validated, with a bounded number of repair turns.

    Text arrives at `on_text` as it is written. Tools run through the gate, within the call's limits.
    """

    @overload
    def __call__(
        self,
        prompt: str,
        schema: type[T],
        *,
        system: str | None = None,
        model: str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        prompt: str,
        schema: TypeAdapter[T],
        *,
        system: str | None = None,
        model: str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Operation[T]: ...
