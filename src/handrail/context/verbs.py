"""The types of two verbs of a context: `wait_for`, which asks a person, and `prompt_model`, which asks a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from typing_extensions import TypeForm

    from handrail.content import AttachmentSource
    from handrail.messages import Model
    from handrail.operation import Operation
    from handrail.tools import Tool

T = TypeVar("T")


class WaitFor(Protocol):
    """Asks the person in the environment, and returns the answer, validated against `schema`.

        when = await context.wait_for("visit", {"street": "Main St"}, Visit, message="When shall we come?")

    - `kind` is the program's name for the question. An app's own page component is registered under this name.
    - `payload` is data to show with the question.
    - `schema` is any type that can be described in JSON, such as a dataclass or `Literal["a", "b"]`. If it is left
      out, the answer is text.
    - `message` is the sentence that the person reads, and `title` the heading above it. By default, they are made from
      `kind`.
    - `timeout` is the number of seconds to wait for the answer. By default, the question has no time limit.

    Raises `Declined`, `QuestionCancelled` or `QuestionTimedOut` if there is no answer.
    """

    @overload
    def __call__(
        self,
        kind: str,
        payload: object = None,
        schema: None = None,
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[str]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object,
        schema: TypeAdapter[T],
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object = None,
        *,
        schema: TypeAdapter[T],
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object,
        schema: TypeForm[T],
        *,
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        kind: str,
        payload: object = None,
        *,
        schema: TypeForm[T],
        message: str | None = None,
        title: str | None = None,
        timeout: float | None = None,
    ) -> Operation[T]: ...


class PromptModel(Protocol):
    """Asks a model for a structured, validated answer. The model may correct an invalid answer in a limited number of turns.

    `attachments` are files that come with the prompt, each an `Attachment`, a path on disk or an http address. `on_text`
    is called with each chunk of text as the model writes it. It may be async. The `tools` run through the gate, within
    the call's limits. Raises `PromptEvaluationError` if the model gives no valid answer.
    """

    @overload
    def __call__(
        self,
        prompt: str,
        schema: TypeAdapter[T],
        *,
        system: str | None = None,
        model: Model | str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        attachments: Sequence[AttachmentSource] = (),
        on_text: Callable[[str], object] | None = None,
    ) -> Operation[T]: ...
    @overload
    def __call__(
        self,
        prompt: str,
        schema: TypeForm[T],
        *,
        system: str | None = None,
        model: Model | str | None = None,
        temperature: float | None = None,
        tools: Sequence[Tool[Any, Any]] = (),
        attachments: Sequence[AttachmentSource] = (),
        on_text: Callable[[str], object] | None = None,
    ) -> Operation[T]: ...
