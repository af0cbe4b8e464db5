"""`Source`: what is served. A prompt with its adapter, or a worker of a folder."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from handrail.adapter import Adapter
from handrail.agent import Agent
from handrail.errors import DefinitionError, HandrailError
from handrail.prompt import Prompt

if TYPE_CHECKING:
    from handrail.adapter.stream import RunStream
    from handrail.messages import Message, Model
    from handrail.protocols import Environment
    from handrail.records import Journal, RunRecord
    from handrail.session import Session
    from handrail.tools import Tool


class Source(Protocol):
    """What threads talk with."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def model(self) -> str:
        """The name of the model that answers."""
        ...

    @property
    def files(self) -> Any:
        """The files its runs change; None where there are none."""
        ...

    @property
    def shown(self) -> Sequence[type[Any]]:
        """The slices that clients see as their state."""
        ...

    def owns(self, record: RunRecord) -> bool:
        """Is this a run that it began, and can go on with? A journal may have those of other apps too."""
        ...

    def begin(
        self,
        message: str,
        *,
        run_id: str,
        session: Session,
        environment: Environment,
        journal: Journal,
        history: Iterable[Message] = (),
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> RunStream[Any]:
        """Begin a run with what somebody said."""
        ...

    def resume(
        self,
        run_id: str,
        *,
        session: Session,
        environment: Environment,
        journal: Journal,
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> RunStream[Any]:
        """Go on with a recorded run."""
        ...


class PromptSource:
    """A prompt and the adapter that runs it. What is said in a thread is the run's message."""

    def __init__(
        self,
        prompt: Prompt[Any],
        adapter: Adapter,
        *,
        shown: Sequence[type[Any]] = (),
        approvals: Any = None,
        files: Any = None,
        app: str = "",
        description: str = "",
    ) -> None:
        if prompt.params_type is not None:
            raise DefinitionError(
                f"the prompt {prompt.name!r} wants params of type {prompt.params_type.__name__}, and a thread "
                "gives messages only. Serve a prompt whose sections take no params."
            )
        self._prompt = prompt
        self._adapter = adapter
        self._approvals = approvals
        self.app = app
        self.name = prompt.name
        self.description = description
        self.model = adapter.model.name
        self.files: Any = files or adapter.filesystem
        self.shown = tuple(shown)

    def owns(self, record: RunRecord) -> bool:
        return record.prompt == self.name and record.app == self.app

    def begin(
        self,
        message: str,
        *,
        run_id: str,
        session: Session,
        environment: Environment,
        journal: Journal,
        history: Iterable[Message] = (),
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> RunStream[Any]:
        return self._adapter.stream(
            self._prompt,
            message,
            journal=journal,
            run_id=run_id,
            session=session,
            environment=environment,
            filesystem=self.files,
            history=history,
            approvals=self._approvals,
            app=self.app,
            tools=tools,
        )

    def resume(
        self,
        run_id: str,
        *,
        session: Session,
        environment: Environment,
        journal: Journal,
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> RunStream[Any]:
        return self._adapter.resume_stream(
            run_id,
            self._prompt,
            journal=journal,
            session=session,
            environment=environment,
            filesystem=self.files,
            approvals=self._approvals,
            tools=tools,
        )


class WorkersSource:
    """A worker of a folder, with those it may call."""

    shown: Sequence[type[Any]] = ()

    def __init__(
        self,
        registry: Any,
        name: str,
        *,
        model: Model | None = None,
        files: Any = None,
        approvals: Any = None,
    ) -> None:
        worker = registry[name]
        self._registry = registry
        self._given = model
        self._approvals = approvals
        self.name = name
        self.description: str = worker.description or ""
        chosen: Any = model or worker.model or ""
        self.model = str(getattr(chosen, "name", chosen))
        self.files = files
        self._prompt: str = worker.prompt.name
        self.app = str(worker.path.resolve())

    def owns(self, record: RunRecord) -> bool:
        return record.prompt == self._prompt and record.app == self.app

    def begin(
        self,
        message: str,
        *,
        run_id: str,
        session: Session,
        environment: Environment,
        journal: Journal,
        history: Iterable[Message] = (),
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> RunStream[Any]:
        return self._registry.stream(
            self.name,
            message,
            models=self._registry.all_on(self._given),
            run_id=run_id,
            session=session,
            environment=environment,
            journal=journal,
            history=history,
            approvals=self._approvals,
            filesystem=self.files,
            tools=tools,
        )

    def resume(
        self,
        run_id: str,
        *,
        session: Session,
        environment: Environment,
        journal: Journal,
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> RunStream[Any]:
        return self._registry.resume_stream(
            self.name,
            run_id,
            models=self._registry.all_on(self._given),
            session=session,
            environment=environment,
            journal=journal,
            approvals=self._approvals,
            filesystem=self.files,
            tools=tools,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """An app, and what it gives beside its source."""

    source: Source
    authenticate: Callable[..., Any] | None = None
    """Who a request is by."""
    renderers: Path | None = None
    """A script with renderers of its own, for the page."""


def load(app: str, *, model: Model | None = None, approvals: Any = None, files: Any = None) -> Loaded:
    """The app of a module (`pkg.mod`, `pkg.mod:prompt`, `file.py`), a worker's file, or a folder of workers.

    A module gives its `prompt` and its `adapter`, or an `agent`, and may give `state`, the types of the slices that
    clients see, `authenticate`, and `renderers`, the path of a script beside it.
    """
    path = Path(app)
    if path.is_dir() or path.suffix == ".md":
        return Loaded(_worker_of(path, model, approvals, files))
    named, _, attribute = app.partition(":")
    try:
        module = load_module(named)
    except HandrailError:
        raise
    except Exception as error:  # whatever the user's own module does when it is imported
        raise DefinitionError(f"{named} can't be loaded: {_said_of(error)}. Correct it there.") from error
    attribute = attribute or ("prompt" if hasattr(module, "prompt") else "agent")
    found: Any = getattr(module, attribute, None)
    adapter: Any = getattr(module, "adapter", None)
    prompt: object = found
    description = ""
    if isinstance(found, Agent):
        agent = cast("Agent[Any]", found)
        prompt, adapter, description = agent.prompt, agent.adapter, agent.description
    if not isinstance(prompt, Prompt):
        raise DefinitionError(
            f"{named} has no Agent or Prompt called {attribute!r}. Name the one to serve: {named}:NAME."
        )
    if model is not None:
        adapter = Adapter(model) if adapter is None else copy.copy(adapter)
        adapter.model = model
    if not isinstance(adapter, Adapter):
        raise DefinitionError(
            f"nothing says which model runs {app}. Give the module an `adapter = Adapter(...)`, or name a "
            "model: --model provider:name."
        )
    source = PromptSource(
        cast("Prompt[Any]", prompt),
        adapter,
        shown=getattr(module, "state", ()),
        approvals=approvals,
        files=files,
        app=f"{module.__name__}:{attribute}",
        description=description or (module.__doc__ or "").strip().partition("\n")[0],
    )
    return Loaded(source, getattr(module, "authenticate", None), _renderers_of(module))


def _said_of(error: Exception) -> str:
    """An error of the user's own code, and the line it came from. A SyntaxError says that itself."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if not frame.filename.startswith("<frozen ")][-1]
    return f"{said} ({place.filename}, line {place.lineno})"


def load_module(named: str) -> ModuleType:
    """A module by its name or its file."""
    if named.endswith(".py"):
        return _load_file(Path(named).resolve(), named)
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(named)
    except ModuleNotFoundError as error:
        if error.name != named and not named.startswith(f"{error.name}."):
            raise
        raise DefinitionError(f"there is no module {named!r}. Name a file, or a module as pkg.mod.") from None


def _load_file(path: Path, named: str) -> ModuleType:
    """The module of a file, under the name it would be imported by from its own folder.

    So its types and its runs are called the same however it is loaded. Where that is another module's name (a
    `json.py`) it gets one of its own, and its folder comes last: everybody else gets what they always got.
    """
    is_taken = _is_taken(path)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"handrail_app_{path.stem}_{digest}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise DefinitionError(f"there is no module in {named!r}. Name a file, or a module as pkg.mod.")
    module = importlib.util.module_from_spec(spec)
    before, places = sys.modules.get(name), list(sys.path)
    sys.modules[name] = module  # annotations are resolved by the module's name
    sys.path.insert(len(sys.path) if is_taken else 0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path[:] = places
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _is_taken(path: Path) -> bool:
    """Is the name of this file that of another module, here or installed?"""
    if path.stem in sys.modules:
        where = getattr(sys.modules[path.stem], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(path.stem)
        except (ImportError, ValueError):  # no name of a module at all
            return False
        if spec is None:
            return False
        where = spec.origin
    return where is None or Path(where).resolve() != path


def _renderers_of(module: ModuleType) -> Path | None:
    given: Any = getattr(module, "renderers", None)
    if given is None:
        return None
    path = Path(module.__file__ or "").parent / given
    if not path.is_file():
        raise DefinitionError(f"{module.__name__}.renderers names {str(given)!r}, and there is no such file.")
    return path


def _worker_of(path: Path, model: Model | None, approvals: Any, files: Any) -> WorkersSource:
    from handrail.workers import WorkerRegistry

    worker = WorkerRegistry.worker_at(path)
    if model is None and worker.model is None:
        raise worker.without_model()  # said now, and not to whoever writes the first message
    return WorkersSource(worker.registry, worker.name, model=model, files=files, approvals=approvals)
