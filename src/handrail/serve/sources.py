"""`Source`: what a server serves, either a prompt with its adapter or a worker from a folder."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from handrail.agent import Agent
from handrail.errors import DefinitionError, HandrailError
from handrail.neighbours import import_app, load_file, search
from handrail.prompt import Prompt
from handrail.run.adapter import Adapter
from handrail.serve.principal_files import PrincipalFiles
from handrail.session import Session
from handrail.text.raised_errors import with_place

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from handrail.journal.records import RunRecord
    from handrail.messages import Model
    from handrail.run.options import ResumeArguments, RunArguments
    from handrail.run.response import RunStream
    from handrail.workers import WorkerRegistry


class Source(Protocol):
    """A prompt or a worker that a server's threads talk to."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def model(self) -> str:
        """The name of the model, or "" if the source names none."""
        ...

    @property
    def app(self) -> str:
        """The reference by which the source is found again: `module:name`, or a worker's file; "" if there is none."""
        ...

    @property
    def prompt_name(self) -> str:
        """The name of the prompt that the source's runs use."""
        ...

    @property
    def files(self) -> Any:
        """The files that the source's runs change, a filesystem or a `PrincipalFiles`; None if the runs have no files."""
        ...

    def files_of(self, principal: str) -> Any:
        """Return the filesystem that this principal's runs change, or None if the runs have no files."""
        ...

    @property
    def shown(self) -> Sequence[type[Any]]:
        """The types of the slices that clients see as the thread's state."""
        ...

    def with_files(self, files: Any) -> Source:
        """Return a copy of this source whose runs change the given files."""
        ...

    def owns(self, record: RunRecord) -> bool:
        """Return whether a recorded run belongs to this source. A journal may also contain other apps' runs."""
        ...

    def begin(self, message: str, **options: Unpack[RunArguments]) -> RunStream[Any]:
        """Return the stream of a new run with this message. The run starts when the stream is used."""
        ...

    def resume(self, run_id: str, **options: Unpack[ResumeArguments]) -> RunStream[Any]:
        """Return the stream of a recorded run. The run is resumed when the stream is used."""
        ...


def serves(source: Source, record: RunRecord) -> bool:
    """Return whether the thread whose newest run is `record` is one of the source's threads.

    The thread belongs to the source if the run has the same app, even if the app's prompt had a different name then. It
    also belongs to the source if the run's worker was moved: the recorded file no longer exists, and the source is a
    worker whose prompt has the same name. If neither the run nor the source has an app, the names of the prompts must be
    the same.
    """
    if record.app == source.app:
        return bool(record.app) or record.prompt == source.prompt_name
    has_moved = record.app.endswith(".md") and source.app.endswith(".md") and not Path(record.app).exists()
    return has_moved and record.prompt == source.prompt_name


def app_name(record: RunRecord) -> str:
    """Return a readable name for a run's app: `module:name`, or the path of a worker's file; "" if the run has no app.

    The path is relative to the current folder. For a file outside that folder, only the file's name is returned.
    """
    path = Path(record.app)
    if not path.is_absolute():
        return record.app
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name)


class PromptSource:
    """Serves a prompt with an adapter.

    Each message in a thread starts a run. Raises `DefinitionError` if the prompt takes params.
    """

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
                f"the prompt {prompt.name!r} takes params of type {prompt.params_type.__name__}, but a thread "
                "only has messages. Serve a prompt whose sections take no params."
            )
        self._prompt = prompt
        self._adapter = adapter
        self._approvals = approvals
        self.app = app
        self.name = self.prompt_name = prompt.name
        self.description = description
        self.model = adapter.model.name
        self.files: Any = files or adapter.filesystem
        self.shown = tuple(shown)

    def owns(self, record: RunRecord) -> bool:
        return record.prompt == self.name and record.app == self.app

    def files_of(self, principal: str) -> Any:
        return _files_of(self.files, principal)

    def with_files(self, files: Any) -> Self:
        changed = copy.copy(self)
        changed.files = files
        return changed

    def begin(self, message: str, **options: Unpack[RunArguments]) -> RunStream[Any]:
        given: RunArguments = {
            **options, "filesystem": _files_for(self.files, options), "approvals": self._approvals, "app": self.app
        }  # fmt: skip
        return self._adapter.stream(self._prompt, message, **given)

    def resume(self, run_id: str, **options: Unpack[ResumeArguments]) -> RunStream[Any]:
        given: ResumeArguments = {
            **options,
            "filesystem": _files_for(self.files, options),
            "approvals": self._approvals,
        }
        return self._adapter.resume_stream(run_id, self._prompt, **given)


class WorkersSource:
    """Serves a worker from a folder, together with the workers that it may call."""

    shown: Sequence[type[Any]] = ()

    def __init__(
        self,
        registry: WorkerRegistry,
        name: str,
        *,
        model: Model | None = None,
        files: Any = None,
        approvals: Any = None,
    ) -> None:
        worker = registry[name]
        self._registry = registry
        self._models = registry.all_on(model)
        self._approvals = approvals
        self.name = name
        self.description: str = worker.description or ""
        chosen: Any = model or worker.model or ""
        self.model = str(getattr(chosen, "name", chosen))
        self.files = files
        self.prompt_name: str = worker.prompt.name
        self.app = str(worker.path.resolve())

    def owns(self, record: RunRecord) -> bool:
        return record.prompt == self.prompt_name and record.app == self.app

    def files_of(self, principal: str) -> Any:
        return _files_of(self.files, principal)

    def with_files(self, files: Any) -> Self:
        changed = copy.copy(self)
        changed.files = files
        return changed

    def begin(self, message: str, **options: Unpack[RunArguments]) -> RunStream[Any]:
        given: RunArguments = {
            **options,
            "filesystem": _files_for(self.files, options),
            "approvals": self._approvals,
        }
        return self._registry.stream(self.name, message, models=self._models, **given)

    def resume(self, run_id: str, **options: Unpack[ResumeArguments]) -> RunStream[Any]:
        given: ResumeArguments = {
            **options,
            "filesystem": _files_for(self.files, options),
            "approvals": self._approvals,
        }
        return self._registry.resume_stream(self.name, run_id, models=self._models, **given)


def _files_of(files: Any, principal: str) -> Any:
    return files.of(principal) if isinstance(files, PrincipalFiles) else files


def _files_for(files: Any, options: RunArguments | ResumeArguments) -> Any:
    """Return the filesystem for the principal of a run's session."""
    session = options.get("session")
    return _files_of(files, session.principal if isinstance(session, Session) else "")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded app: its source and its optional parts."""

    source: Source
    authenticate: Callable[..., Any] | None = None
    """A hook that returns the principal who sent a request; None if the app has none."""
    renderers: Path | None = None
    """The path of a script with renderers for the page; None if the app has none."""


def load(app: str, *, model: Model | None = None, approvals: Any = None, files: Any = None) -> Loaded:
    """Load an app: a module (`pkg.mod`, `pkg.mod:prompt`, `file.py`), a worker file, or a folder of workers.

    A module defines an agent or a prompt. Without a name after the colon, `prompt` is served, or else `agent`. A prompt
    also needs an `adapter`, unless `model` is given. A module may also define `state` (the types of the slices that
    clients see), `authenticate`, and `renderers` (the path of a script, relative to the module). Raises
    `DefinitionError` if the app can't be loaded, or if neither the app nor `model` says which model to use.
    """
    path = Path(app)
    if path.is_dir() or path.suffix == ".md":
        return Loaded(_worker_of(path, model, approvals, files))
    named, _, attribute = app.partition(":")
    module = load_app_module(named)
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
            f"{app} does not say which model to use. Define `adapter = Adapter(...)` in the module, or name a "
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


def load_app_module(named: str) -> ModuleType:
    """Import the module of an app.

    Raises `DefinitionError` if there is no such module, or if its code raises an error. A `HandrailError` that its code
    raises is not converted.
    """
    try:
        return load_module(named)
    except HandrailError:
        raise
    except Exception as error:  # importing the module runs the user's code
        raise DefinitionError(
            f"{named} can't be loaded: {with_place(error)}. Fix the error in that file."
        ) from error


def load_module(named: str) -> ModuleType:
    """Import a module, given its name or its file. Its folder is not added to `sys.path`: see `handrail.neighbours`.

    Raises `DefinitionError` if there is no such module or file, and otherwise whatever its code raises.
    """
    advice = "Give the path of a Python file, or a module name such as pkg.mod."
    if named.endswith(".py"):
        path = Path(named).resolve()
        if not path.is_file():
            raise DefinitionError(f"there is no file {named!r}. {advice}")
        search(path.parent)  # for the models that the app names as module:name
        return _load_file(path)
    search(Path.cwd())
    try:
        return import_app(named)
    except ModuleNotFoundError as error:
        if error.name != named and not named.startswith(f"{error.name}."):
            raise
        raise DefinitionError(f"there is no module {named!r}. {advice}") from None


def _load_file(path: Path) -> ModuleType:
    """Import a file under the name that it would have if it were imported from its own folder.

    Its types and its runs therefore have the same names however it is loaded. If another module already has that
    name, for example because the file is called `json.py`, the file gets a unique name, and other imports are
    unaffected.
    """
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"handrail_app_{path.stem}_{digest}" if _is_taken(path) else path.stem
    return load_file(path, name)


def _is_taken(path: Path) -> bool:
    """Return whether a different module, already imported or importable, has this file's name."""
    if path.stem in sys.modules:
        where = getattr(sys.modules[path.stem], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(path.stem)
        except (ImportError, ValueError):  # not a valid module name
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
        raise DefinitionError(
            f"{module.__name__}.renderers is {str(given)!r}, but there is no such file. Correct the path."
        )
    return path


def _worker_of(path: Path, model: Model | None, approvals: Any, files: Any) -> WorkersSource:
    from handrail.workers import WorkerRegistry

    worker = WorkerRegistry.worker_at(path)
    if model is None and worker.model is None:
        raise worker.without_model()  # raised now rather than on the first message
    return WorkersSource(worker.registry, worker.name, model=model, files=files, approvals=approvals)
