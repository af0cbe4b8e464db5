"""Models by name, `provider:name`, or `module:name` for your own model, and choices among models.

Several names, separated by commas, mean the first of these models that works. The same names can be used in code, in a
worker's file and on the command line. The name of a known provider is never looked up as a module.

Where a module is looked up depends on who names it. Everybody can name an installed module, or one that is already imported. A
worker's file can also name a module in its own folder. The command line, and an app while it is imported, can also name
a module beside the app or in the current folder: what a model, a worker's file or a record names is never looked up there.

Choices are models too, and can be used wherever a model can. For each of its requests, a run asks the choice for the
models to try, and then sends the request to them itself, with its own events, retries, price and budget.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast, runtime_checkable

import msgspec

from handrail.errors import DefinitionError, ModelError
from handrail.messages import (
    Model,
    ModelPart,
    ModelRequest,
    SentPart,
    StopPart,
    Takes,
    Traits,
    Usage,
    UsagePart,
    is_choice,
    is_model,
)
from handrail.models import ModelKeyMissing
from handrail.models.prices import tariff_of
from handrail.models.providers import BRIDGED, PROVIDERS, WIRES
from handrail.schema.problems import describe_kind
from handrail.text.raised_errors import with_place
from handrail.text.spelling import nearest

_MODULE = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*")

_made: dict[tuple[str, str], Model] = {}
"""Models by name, and by their server's address or their worker's folder. Users of a model share its connections."""
_modules: dict[Path, ModuleType] = {}
"""The modules that were loaded from the folder of a worker, by file."""
_given: set[str] = set()
"""The modules that the command line, or an app while it was imported, has named. They are also looked up where apps are."""


def model_named(name: str, folder: Path | None = None) -> Model:
    """Return the model with this name. Raises `DefinitionError` if there is no such model, or if it can't be created.

    A module is looked up among the installed ones, and then in `folder`, the folder of the worker that names the model.
    The name after the colon is that of a model, an adapter or an agent in the module. Several names, separated by commas, stand for the first of these models that works.
    """
    if "," in name:
        return _first_of(name, folder)
    provider, model = split_name(name)
    row = PROVIDERS.get(provider)
    if row is None and provider not in BRIDGED:
        made = _own_model(name, provider, model, folder)
        _made[name, str(folder or "")] = made
        return made
    place = (name, row.find_address() if row is not None else "")
    made = _made.get(place)
    if made is None:
        made = _made[place] = _provider_model(provider, model)
    return made


def give(names: str) -> None:
    """Note that the user has given this name, or several. Their modules may be beside the app or in the current folder."""
    _given.update(each.partition(":")[0] for each in split_names(names))


def check_name(name: str, folder: Path | None = None) -> None:
    """Raise `DefinitionError` if a name, or one of several, is malformed or names no provider or module.

    The model itself is not created, and no module is imported.
    """
    for each in split_names(name):
        provider, _ = split_name(each)
        if provider not in PROVIDERS and provider not in BRIDGED and not _is_module(provider, folder):
            raise _unknown(each, provider)


def is_of_providers(names: str) -> bool:
    """Return whether a name, or each of several, is that of a provider's model, for which no module of the user's is imported."""
    providers = [each.partition(":")[0] for each in split_names(names)]
    return all(each in PROVIDERS or each in BRIDGED for each in providers)


def split_names(names: str) -> list[str]:
    """Split names of models at the commas between them."""
    return [each.strip() for each in names.split(",")]


def split_name(name: str) -> tuple[str, str]:
    """Split a model's name into its provider or module, and the rest. Raises `DefinitionError` if a half is missing."""
    provider, colon, model = name.partition(":")
    if not colon or not provider or not model:
        raise DefinitionError(
            f"{name!r} is not the name of a model. Write provider:name, for example openai:gpt-5, "
            "anthropic:claude-sonnet-5 or local:smollm2-135m, or module:name for a model of your own."
        )
    return provider, model


def reference_to(model: Model | str) -> str:
    """Return the name by which a model can be found again: the name that it was looked up by, or else its own."""
    if isinstance(model, str):
        return model
    return next((name for (name, _), made in _made.items() if made is model), model.name)


def _first_of(names: str, folder: Path | None) -> Model:
    made = FirstThatWorks(tuple(split_names(names)), folder=folder)
    _made[made.name, str(folder or "")] = made
    return made


def _provider_model(provider: str, model: str) -> Model:
    row = PROVIDERS.get(provider)
    if row is None:
        from handrail.models.bridge import BridgedModel

        return BridgedModel(f"{provider}:{model}")
    module, kind = WIRES[row.wire]
    make: Any = getattr(importlib.import_module(module), kind)
    return make(model, provider=provider) if row.wire in ("chat", "anthropic", "gemini") else make(model)


# --- modules ---


def _own_model(name: str, module: str, attribute: str, folder: Path | None) -> Model:
    if not _MODULE.fullmatch(module) or "__main__" in module.split("."):  # a program, not a module
        raise _unknown(name, module)
    try:
        found: Any = getattr(_import(module, folder), attribute, None)
    except (Exception, SystemExit) as error:  # importing the user's module can raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise _unknown(name, module) from None
        raise DefinitionError(
            f"model {name!r}: can't import {module!r}: {with_place(error)}. Fix that module first."
        ) from error
    if not is_model(found):
        found = getattr(getattr(found, "adapter", found), "model", None)  # of an agent or an adapter
    if not is_model(found):
        raise DefinitionError(
            f"model {name!r}: the module {module!r} has no model called {attribute!r}. Define one there, such as "
            f"{attribute if attribute.isidentifier() else 'model'} = OpenAIModel('name', base_url=...)."
        )
    return found


def _import(module: str, folder: Path | None) -> ModuleType:
    from handrail.imports import import_app, load_file  # needed only for a model in a module

    file = _file_of(module, folder)
    if file is None or _is_installed(module):
        return import_app(module) if _is_given(module) else importlib.import_module(module)
    if file not in _modules:
        digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
        _modules[file] = load_file(file, f"handrail_worker_models_{module}_{digest}")
    return _modules[file]


def _is_module(module: str, folder: Path | None) -> bool:
    if not _MODULE.fullmatch(module):
        return False
    if _file_of(module, folder) is not None:
        return True
    from handrail.imports import find_app, find_module

    if module in sys.modules:
        return True
    return (find_app(module) if _is_given(module) else find_module(module)) is not None


def _is_given(module: str) -> bool:
    """Return whether a module may be looked up where apps are."""
    from handrail.imports import is_importing

    if is_importing():
        _given.add(module)
    return module in _given


def _is_installed(module: str) -> bool:
    from handrail.imports import is_neighbour

    top = module.partition(".")[0]
    try:
        return not is_neighbour(top) and importlib.util.find_spec(top) is not None
    except ValueError:  # the module was created without a spec
        return True


def _file_of(module: str, folder: Path | None) -> Path | None:
    file = None if folder is None else (folder / f"{module}.py").resolve()
    return file if file is not None and file.is_file() else None


def _unknown(name: str, provider: str) -> DefinitionError:
    near = nearest(provider, [*PROVIDERS, *sorted(BRIDGED)], 0.85)
    if provider == "scripted":
        hint = "Create a ScriptedModel in code, and pass it instead of a name, or name it as module:name."
    elif provider == "gemini":
        hint = f"Did you mean google:{name.partition(':')[2]}?"
    elif near:
        hint = f"Did you mean {near}:{name.partition(':')[2]}?"
    else:
        hint = (
            "`handrail models` lists the providers. Your own module:name must be installed or, in a worker's file, beside it; "
            "--model also finds it in the current folder."
        )
    return DefinitionError(f"model {name!r}: there is no module or provider of that name. {hint}")


# --- choices ---

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
        """The traits of the choice: native output and deferred tools if all models have them, and the attachments of the first model.

        A later model that does not take an attachment gets a description of it. The choice has no price and no provider tools.
        """
        models = self._found()
        native = all(each.traits.native_output for each in models)
        loads = all(each.traits.loads_deferred for each in models)
        return Traits(native_output=native, takes=models[0].traits.takes, loads_deferred=loads)

    @property
    def unpriced(self) -> str:
        """The name of one of the models whose price is not known; "" if there is none."""
        for each in self._found():
            is_known = is_choice(each) or tariff_of(each.name, each.traits)(Usage(1, 1)) is not None
            if name := getattr(each, "unpriced", "") if is_known else each.name:
                return name
        return ""

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
