"""Names of models: `provider:name`, or `module:name` for your own model.

Several names, separated by commas, mean the first of these models that works. The same names can be used in code, in a
worker's file and on the command line. The name of a known provider is never looked up as a module.

Where a module is looked up depends on who names it. Everybody can name an installed module, or one that is already imported. A
worker's file can also name a module in its own folder. The command line, and an app while it is imported, can also name
a module beside the app or in the current folder: what a model, a worker's file or a record names is never looked up there.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from handrail.errors import DefinitionError
from handrail.messages import Model
from handrail.models.providers import BRIDGED, PROVIDERS, WIRES
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
        _check_one(each, folder)


def _check_one(name: str, folder: Path | None) -> None:
    provider, _ = split_name(name)
    if provider not in PROVIDERS and provider not in BRIDGED and not _is_module(provider, folder):
        raise _unknown(name, provider)


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


def is_model(value: Any) -> bool:
    """Return whether a value has the attributes of a model and is not a class."""
    return not isinstance(value, type) and all(hasattr(value, each) for each in ("name", "traits", "stream"))


def _first_of(names: str, folder: Path | None) -> Model:
    from handrail.models.choice import FirstThatWorks

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
    from handrail.neighbours import import_app, load_file  # needed only for a model in a module

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
    from handrail.neighbours import find_app, find_module

    if module in sys.modules:
        return True
    return (find_app(module) if _is_given(module) else find_module(module)) is not None


def _is_given(module: str) -> bool:
    """Return whether a module may be looked up where apps are."""
    from handrail.neighbours import is_importing

    if is_importing():
        _given.add(module)
    return module in _given


def _is_installed(module: str) -> bool:
    from handrail.neighbours import is_neighbour

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
