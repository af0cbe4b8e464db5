"""`Source`: what a server serves, either a prompt with its adapter or a worker from a folder.

`PrincipalFiles` keeps a separate folder for each principal's files.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, cast

from handrail.agent import Agent
from handrail.errors import DefinitionError, HandrailError
from handrail.imports import import_app, load_file, search
from handrail.models.prices import tariff_of
from handrail.notify.settings import Notify
from handrail.prompt import Prompt
from handrail.run.adapter import Adapter, model_of
from handrail.run.limits import caps_of, check_price
from handrail.session import Session
from handrail.text.raised_errors import with_place

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from handrail.journal.protocol import Journal
    from handrail.journal.records import RunRecord, SpendCap
    from handrail.messages import Model
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.run.options import ResumeArguments, RunArguments
    from handrail.run.response import RunStream
    from handrail.workers import WorkerRegistry


class Source(ABC):
    """A prompt or a worker that a server's threads talk to."""

    name: str
    description: str
    model: str
    """The name of the model, or "" if the source names none."""
    app: str
    """The reference by which the source is found again: `module:name`, or a worker's file; "" if there is none."""
    prompt_name: str
    """The name of the prompt that the source's runs use."""
    files: Any
    """The files that the source's runs change, a filesystem or a `PrincipalFiles`; None if the runs have no files."""
    spend: tuple[SpendCap, ...] = ()
    """Caps on what the source's runs spend in a day, in addition to those of its adapter."""
    shown: Sequence[type[Any]] = ()
    """The types of the slices that clients see as the thread's state."""
    starters: Sequence[str] = ()
    """Messages that the page suggests for the start of a thread."""
    _approvals: Any

    def files_of(self, principal: str) -> Any:
        """Return the filesystem that this principal's runs change, or None if the runs have no files."""
        return files_of(self.files, principal)

    def with_files(self, files: Any) -> Self:
        """Return a copy of this source whose runs change the given files."""
        changed = copy.copy(self)
        changed.files = files
        return changed

    def owns(self, record: RunRecord) -> bool:
        """Return whether a recorded run belongs to this source. A journal may also contain other apps' runs."""
        return record.prompt == self.prompt_name and record.app == self.app

    @abstractmethod
    def check_spend(self) -> None:
        """Raise `DefinitionError` if there is a cap on money, and the price of the source's model is not known."""

    @abstractmethod
    def begin(self, message: str, **options: Unpack[RunArguments]) -> RunStream[Any]:
        """Return the stream of a new run with this message. The run starts when the stream is used."""

    @abstractmethod
    def resume(self, run_id: str, **options: Unpack[ResumeArguments]) -> RunStream[Any]:
        """Return the stream of a recorded run. The run is resumed when the stream is used."""

    def _with_own(self, options: RunArguments | ResumeArguments) -> Any:
        """Return a run's arguments with the files of its session's principal, and with the source's approvals."""
        session = options.get("session")
        files = self.files_of(session.principal if isinstance(session, Session) else "")
        caps = (*self.spend, *caps_of(options.get("spend") or ()))
        return {**options, "filesystem": files, "approvals": self._approvals, "spend": caps}


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


class PromptSource(Source):
    """Serves a prompt with an adapter.

    Each message in a thread starts a run. Raises `DefinitionError` if the prompt takes params, or if a starter is not a text.
    """

    def __init__(
        self,
        prompt: Prompt[Any],
        adapter: Adapter,
        *,
        shown: Sequence[type[Any]] = (),
        starters: Sequence[str] = (),
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
        for each in [starters] if isinstance(starters, str) else starters:
            if isinstance(starters, str) or not isinstance(each, str) or not each.strip():  # pyright: ignore[reportUnnecessaryIsInstance]  # apps might not be type-checked
                raise DefinitionError(
                    f"`starters` is {starters!r}. Pass a list of messages to suggest, such as ['Sort the inbox.']."
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
        self.starters = tuple(starters)

    def check_spend(self) -> None:
        settings = self._adapter.settings()
        check_price((*self.spend, *self._adapter.options.spend), settings.model, settings.tariff)

    def begin(self, message: str, **options: Unpack[RunArguments]) -> RunStream[Any]:
        given: Any = {**self._with_own(options), "app": self.app}
        return self._adapter.stream(self._prompt, message, **given)

    def resume(self, run_id: str, **options: Unpack[ResumeArguments]) -> RunStream[Any]:
        return self._adapter.resume_stream(run_id, self._prompt, **self._with_own(options))


class WorkersSource(Source):
    """Serves a worker from a folder, together with the workers that it may call."""

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

    def check_spend(self) -> None:
        if self.spend:
            chosen: Any = self._models.get(self.name) or self._registry[self.name].find_model()
            model = model_of(chosen)
            check_price(self.spend, model, tariff_of(model.name, model.traits))

    def begin(self, message: str, **options: Unpack[RunArguments]) -> RunStream[Any]:
        given = self._with_own(options)
        return self._registry.stream(self.name, message, models=self._models, **given)

    def resume(self, run_id: str, **options: Unpack[ResumeArguments]) -> RunStream[Any]:
        given = self._with_own(options)
        return self._registry.resume_stream(self.name, run_id, models=self._models, **given)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded app: its source and its optional parts."""

    source: Source
    authenticate: Callable[..., Any] | None = None
    """A hook that returns the principal who sent a request; None if the app has none."""
    renderers: Path | None = None
    """The path of a script with renderers for the page; None if the app has none."""
    notify: Notify | None = None
    """Who else is told about the app's questions, and when; None if the app does not say."""


def load(app: str, *, model: Model | None = None, approvals: Any = None, files: Any = None) -> Loaded:
    """Load an app: a module (`pkg.mod`, `pkg.mod:prompt`, `file.py`), a worker file, or a folder of workers.

    A module defines an agent or a prompt. Without a name after the colon, `prompt` is served, or else `agent`. A prompt
    also needs an `adapter`, unless `model` is given. A module may also define `state` (the types of the slices that
    clients see), `starters` (messages that the page suggests), `authenticate`, `notify` (a `Notify`), and
    `renderers` (the path of a script, relative to the module). Raises
    `DefinitionError` if the app can't be loaded, or if neither the app nor `model` says which model to use.
    """
    path = Path(app)
    if path.is_dir() or path.suffix == ".md":
        return Loaded(_worker_of(path, model, approvals, files))
    named, _, attribute = app.partition(":")
    module = load_app_module(named)
    attribute = attribute or _default_name(module)
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
        starters=getattr(module, "starters", ()),
        approvals=approvals,
        files=files,
        app=f"{module.__name__}:{attribute}",
        description=description or (module.__doc__ or "").strip().partition("\n")[0],
    )
    notify = getattr(module, "notify", None)  # it may as well be a tool of this name
    return Loaded(
        source,
        getattr(module, "authenticate", None),
        _renderers_of(module),
        notify if isinstance(notify, Notify) else None,
    )


def recorded_name(app: str) -> str:
    """Return the name that runs record for an app. A file, `app.py:name`, has the name under which it is imported.

    Raises `DefinitionError` if the file can't be loaded.
    """
    named, _, attribute = app.partition(":")
    if not named.endswith(".py"):
        return app
    module = load_app_module(named)
    return f"{module.__name__}:{attribute or _default_name(module)}"


def _default_name(module: ModuleType) -> str:
    return "prompt" if hasattr(module, "prompt") else "agent"


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
    """Import a module, given its name or its file. Its folder is not added to `sys.path`: see `handrail.imports`.

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


# --- the files of each principal ----------------------------------------------------------------------


PLACEHOLDER = "{principal}"
_PLAIN = re.compile(r"[a-z0-9_@-]")
_MOST = 200


def folder_name(principal: str) -> str:
    """Return the name of a principal's folder. It is unique, even on disks that ignore case.

    Lowercase letters, digits and `_ @ -` are kept, and so are dots, except at the start. Other characters are written
    as `%` and two hexadecimal digits for each of their UTF-8 bytes. A long name is shortened and ends with a digest.
    """
    written = "".join(
        char
        if _PLAIN.fullmatch(char) or (char == "." and place)
        else "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))
        for place, char in enumerate(principal)
    )
    if len(written) <= _MOST:
        return written
    return f"{written[:100]}={hashlib.sha256(principal.encode('utf-8', 'surrogatepass')).hexdigest()}"


class PrincipalFiles:
    """A folder for each principal, named by a pattern such as `work/{principal}`. It is created when it is first used.

    Raises `DefinitionError` if the pattern is invalid, or if the folder that contains the others does not exist.
    """

    def __init__(self, pattern: str, startup_files: Collection[str] = ()) -> None:
        path = Path(pattern)
        name = path.name
        if name.count(PLACEHOLDER) != 1 or PLACEHOLDER in str(path.parent):
            raise DefinitionError(
                f"{pattern!r} must contain {PLACEHOLDER} exactly once, in its last folder's name."
            )
        if not path.parent.is_dir():
            raise DefinitionError(
                f"{str(path.parent)!r} is not a folder. Create it first, or give another path."
            )
        self.root = path.parent.resolve()
        """The folder that contains the principals' folders."""
        self._before, _, self._after = name.partition(PLACEHOLDER)
        self._open: dict[Path, DirectoryFilesystem] = {}
        self._startup_files = startup_files

    def of(self, principal: str) -> DirectoryFilesystem:
        """Return the filesystem of one principal. Creates the folder if it does not exist.

        Raises `OSError` if the folder can't be created, and `DefinitionError` if it is a symbolic link or can't be opened.
        """
        path = self.root / f"{self._before}{folder_name(principal)}{self._after}"
        path.mkdir(mode=0o700, exist_ok=True)
        return self._at(path)

    async def recover(self, journal: Journal, /) -> None:
        """Finish the commits that an earlier process left unfinished, in every principal's folder."""
        for path in sorted(self.root.iterdir()):
            inside = path.name.startswith(self._before) and path.name.endswith(self._after)
            if inside and not path.name.startswith(".") and path.is_dir() and not path.is_symlink():
                await self._at(path).recover(journal)

    def _at(self, path: Path) -> DirectoryFilesystem:
        from handrail.resources.directory import DirectoryFilesystem

        if path.is_symlink():
            raise DefinitionError(f"{str(path)!r} is a symbolic link. Replace it with a folder.")
        found = self._open.get(path)
        if found is None:
            found = self._open[path] = DirectoryFilesystem(path, startup_files=self._startup_files)
        return found


def files_of(files: Any, principal: str) -> Any:
    """Return a principal's filesystem. Files that are not a `PrincipalFiles` are everybody's."""
    return files.of(principal) if isinstance(files, PrincipalFiles) else files
