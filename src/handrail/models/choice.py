"""Choices of models: `first_that_works(...)` and `by(...)`.

Both return models, which can be used wherever a model can. For each of its requests, a run asks the choice for the
models to try, and then sends the request to them itself, with its own events, retries, price and budget.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import msgspec

from handrail.errors import DefinitionError, ModelError
from handrail.messages import Model, ModelPart, ModelRequest, SentPart, StopPart, Takes, Traits, UsagePart
from handrail.models import ModelKeyMissing
from handrail.models.names import check_name, is_model, model_named
from handrail.schema.problems import describe_kind

_NOT_FOR_US = frozenset({401, 402, 403, 404})
"""HTTP statuses of a provider that refuses the key, demands payment, or lacks the model.

A different provider may succeed.
"""
_ANYTHING = frozenset({"*/*"})


class Candidate(msgspec.Struct, frozen=True):
    """One of the models to try for a request."""

    model: Model
    on_refusal: bool = False
    """Whether the next candidate is tried if this one refuses to answer. After the last one comes the first.

    A run that stays with a model begins with it, and tries the others in this order.
    """


@runtime_checkable
class ModelChoice(Protocol):
    """A model that chooses among other models for each request."""

    def candidates(self, request: ModelRequest, /) -> tuple[Candidate, ...]:
        """Return the models to try for this request, in order. There is at least one.

        Raises `DefinitionError` if a model can't be found or chosen.
        """
        ...


def first_that_works(*models: Model | str, on_refusal: bool = False) -> Model:
    """Return a model that stands for the first of these models that answers.

    The next model is tried if a model's key is missing or refused, if its provider demands payment, or if the
    provider does not have the model. It is also tried, after at most one quick retry, if a model can't be reached, fails or
    has reached its rate limit. With `on_refusal`, it is also tried if a model refuses to answer. A request that is
    wrong, such as one that is too long, fails at once. Once part of an answer has been streamed, no other model
    continues it.

    A run stays with the model that answered, and tries the others again if that one fails. Events and the record name
    the model that answered each request, and its price counts. A model's thinking is not sent to a different provider.

    Raises `DefinitionError` if there are no models, if a name is unknown, or if a value is neither a name nor a
    model.
    """
    return FirstThatWorks(models, on_refusal=on_refusal)


def by(choose: Callable[[ModelRequest], Model | str]) -> Model:
    """Return a model that stands for the one that `choose` returns. The function is called before each request.

    `by(lambda request: "openai:gpt-5" if len(request.messages) > 20 else "openai:gpt-5-mini")` uses a larger model once
    the conversation is long. The function may return a name, a model, or a choice such as `first_that_works(...)`.

    Raises `DefinitionError` if `choose` is not callable.
    """
    return Chosen(choose)


class FirstThatWorks:
    """The first of several models that answers. Create it with `first_that_works`."""

    def __init__(
        self, models: tuple[Model | str, ...], *, on_refusal: bool = False, folder: Path | None = None
    ) -> None:
        if not models:
            raise DefinitionError(
                "first_that_works has no models. Pass at least one, such as 'openai:gpt-5'."
            )
        for each in models:
            if isinstance(each, str):
                check_name(each, folder)
            elif not is_model(each):
                raise _not_a_model("first_that_works was given", each)
        self._models = models
        self._on_refusal = on_refusal
        self._folder = folder
        self.name = ", ".join(each if isinstance(each, str) else each.name for each in models)

    @property
    def traits(self) -> Traits:
        """The traits of the choice: native output if all models have it, and the attachments of the first model.

        A later model that does not take an attachment gets a description of it. The choice has no price and no provider tools.
        """
        models = self._found()
        native = all(each.traits.native_output for each in models)
        return Traits(native_output=native, takes=models[0].traits.takes)

    def candidates(self, request: ModelRequest, /) -> tuple[Candidate, ...]:
        found = [list(candidates_of(model, request)) for model in self._found()]
        for each in found:  # after the last one comes the first, unless a choice around this one decides
            each[-1] = Candidate(each[-1].model, self._on_refusal)
        return tuple(candidate for each in found for candidate in each)

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        return _stream(self.candidates(request), request)

    def _found(self) -> list[Model]:
        return [model_named(each, self._folder) if isinstance(each, str) else each for each in self._models]

    def __repr__(self) -> str:
        more = ", on_refusal=True" if self._on_refusal else ""
        return f"first_that_works({', '.join(map(repr, self._models))}{more})"


class Chosen:
    """The model that a function chooses for each request. Create it with `by`."""

    traits = Traits(takes=Takes(_ANYTHING, _ANYTHING))

    def __init__(self, choose: Callable[[ModelRequest], Model | str]) -> None:
        if not callable(choose):
            raise DefinitionError(
                f"`by` takes a function of the request, not {describe_kind(choose)}. "
                "Write by(lambda request: 'openai:gpt-5')."
            )
        self._choose = choose
        self.name = f"by {getattr(choose, '__name__', type(choose).__name__)}"

    def candidates(self, request: ModelRequest, /) -> tuple[Candidate, ...]:
        try:
            chosen: Any = self._choose(request)
        except Exception as error:  # the user's function can raise anything
            raise DefinitionError(
                f"model {self.name!r}: the function that chooses the model raised {type(error).__name__}: {error}. Correct it."
            ) from error
        if isinstance(chosen, str):
            chosen = model_named(chosen)
        elif not is_model(chosen):
            raise _not_a_model(f"model {self.name!r}: the function that chooses the model returned", chosen)
        return candidates_of(chosen, request)

    def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        return _stream(self.candidates(request), request)

    def __repr__(self) -> str:
        return f"by({self._choose!r})"


def candidates_of(model: Model, request: ModelRequest) -> tuple[Candidate, ...]:
    """Return the models to try for a request to this model: itself, or those that it stands for."""
    return cast("ModelChoice", model).candidates(request) if is_choice(model) else (Candidate(model),)


def is_choice(model: Model) -> bool:
    """Return whether a model stands for others. This is faster than `isinstance` with a protocol."""
    return hasattr(model, "candidates")


def falls_over(error: ModelError) -> bool:
    """Return whether a different model may succeed where a model failed with this error."""
    return error.transient or isinstance(error, ModelKeyMissing) or error.status in _NOT_FOR_US


async def _stream(candidates: tuple[Candidate, ...], request: ModelRequest) -> AsyncGenerator[ModelPart]:
    """Stream the answer of the first candidate that answers. Raises the `ModelError` of the last one that was tried.

    A refusal is passed over if the candidate has `on_refusal`, is not the last, and has streamed nothing yet. Runs do not use this function:
    they send requests to the candidates themselves.
    """
    for number, candidate in enumerate(candidates):
        is_last = number == len(candidates) - 1
        parts = candidate.model.stream(request)
        held: list[ModelPart] | None = []
        try:
            async for part in parts:
                refused = isinstance(part, StopPart) and part.reason == "refused" and candidate.on_refusal
                if held is not None and refused and not is_last:
                    break
                if held is not None and isinstance(part, SentPart | UsagePart):
                    held.append(part)
                    continue
                for each in held or ():
                    yield each
                held = None
                yield part
            else:
                return
        except ModelError as error:
            if is_last or held is None or not falls_over(error):
                raise
        finally:
            await parts.aclose()


def _not_a_model(where: str, given: object) -> DefinitionError:
    return DefinitionError(
        f"{where} {describe_kind(given)}. Use a name like 'openai:gpt-5', or a model, such as OpenAIModel('gpt-5')."
    )
