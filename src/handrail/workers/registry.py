"""`WorkerRegistry`: a folder of workers."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from handrail.agent import strongest
from handrail.clock import SYSTEM_CLOCK
from handrail.concurrency.operation import Operation
from handrail.content import Attachment
from handrail.context import MessageCallback, RegistryView
from handrail.errors import DefinitionError, ResourceError, ToolValidationError, WorkerError
from handrail.messages import Model
from handrail.models.names import model_named
from handrail.prompt import Prompt
from handrail.prompt.section import walk
from handrail.protocols import Filesystem, SessionView
from handrail.run.adapter import Adapter
from handrail.run.options import ResumeArguments, RunArguments, RunFiles, RunOptions, check_names
from handrail.run.response import PromptResponse, RunStream
from handrail.run.run import Run
from handrail.text.spelling import checked_arguments
from handrail.tools import Effect, Tool
from handrail.workers.attachments import NO_ATTACHMENTS, accept, message_with, visible_to
from handrail.workers.creation import WorkerCreated, check_rights, creation_tools
from handrail.workers.front_matter import (
    CreationDefaults,
    Finder,
    WorkerProblem,
    has_front_matter,
    read_text,
    refuse,
    suggest,
)
from handrail.workers.functions import Functions, ParsedFunctions
from handrail.workers.worker import Draft, Rendered, Worker, rule_of
from handrail.workers.worker_run import Reach, WorkerRun, WorkerSettings, tool_for

_MOST_KEPT = 256
"""Maximum number of created workers to keep in memory, across all sessions."""


class WorkerArguments(TypedDict, total=False):
    """Arguments for running or resuming a worker, in addition to those of the adapter."""

    model: Model | str | None
    """The model for this worker if neither `models` nor its file names one. None stands for the model of `adapter`."""
    models: Mapping[str, Model | str] | None
    """Models by worker name. They take precedence over those in the files."""
    adapter: Adapter | None
    message_callback: MessageCallback | None
    """A function that is called with every message of this worker and of the workers that it calls; None for none."""


class WorkerResumeArguments(WorkerArguments, ResumeArguments, total=False):
    """Arguments of `resume` and `resume_stream`."""


class WorkerRunArguments(WorkerArguments, RunArguments, total=False):
    """Arguments of `run` and `stream`."""

    attachments: Sequence[Attachment | Path | str]
    """The attachments, each a path on disk (`Path`), the path of one of the run's files (`str`), or an `Attachment`."""


FILE_SUFFIXES = (".md", ".py")
"""The suffixes of workers' files and of modules. `handrail new` refuses to create a folder whose name ends in one."""


@checked_arguments
class WorkerRegistry:
    """The workers in a folder: each `*.md` is one, and the `tools.py` beside them contains their functions.

    Hidden files are ignored, and so is a README without front matter. The folder is read once, on first use.
    `check()` returns every problem in it. A worker with a problem can't be used, but the others can. If the only problem
    is an unknown model, the worker can run on another model. Raises `WorkerError` if there is no such folder.

    With `parsed`, `tools.py` is parsed, and nothing in it runs. The workers can then be listed and checked, but not run.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        creation_defaults: CreationDefaults | Mapping[str, Any] | None = None,
        parsed: bool = False,
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise WorkerError(
                f"there is no folder {str(folder)!r}. Pass a folder that contains workers (*.md)."
            )
        given = creation_defaults or {}
        self._defaults = (
            given if isinstance(given, CreationDefaults) else CreationDefaults.model_validate(dict(given))
        )
        self._parsed = parsed
        self._functions = ParsedFunctions(self.folder) if parsed else Functions(self.folder)
        self._tools: dict[str, Tool[Any, Any]] = {}
        self._made: dict[tuple[str, str, str], Worker] = {}

    @classmethod
    def of_file(cls, path: str | Path) -> tuple[WorkerRegistry, Worker]:
        """Return the registry of a file's folder, and the worker in the file.

        Raises `WorkerError` if there is no such file, if its name does not end in `.md`, or if the worker has a problem.
        """
        registry, draft = cls._draft_at(path)
        return registry, registry._worker_of(draft)

    @classmethod
    def check_file(cls, path: str | Path, *, parsed: bool = False) -> list[WorkerProblem]:
        """Return every problem in a worker's file.

        Problems in the `tools.py` beside it are included if the worker lists tools by name, or has a problem itself.

        Raises `WorkerError` if there is no such file, or if its name does not end in `.md`.
        """
        unknown: list[WorkerProblem] = []
        try:
            registry, draft = cls._draft_at(path, parsed)
            unknown = draft.unknown_models()
            registry._worker_of(draft)
        except WorkerError as error:
            if not error.problems:
                raise
            return _in_order([*error.problems, *unknown])
        return unknown

    @classmethod
    def _draft_at(cls, path: str | Path, parsed: bool = False) -> tuple[WorkerRegistry, Draft]:
        file = Path(path)
        if not file.is_file() or file.suffix != ".md":
            raise WorkerError(f"{str(path)!r} is not a worker's file. Pass the path of a file NAME.md.")
        registry = cls(file.parent, parsed=parsed)
        draft = next((each for each in registry._drafts if each.path.name == file.name), None)
        if draft is None:
            find = Finder(file)
            find.add(
                1,
                "it has no front matter",
                "Begin the file with a line `---`, its settings, and another `---`.",
            )
            raise refuse(find.problems)
        return registry, draft

    @classmethod
    def worker_at(cls, path: str | Path, *, parsed: bool = False) -> Worker:
        """Return the worker at a path.

        The path is the worker's file, a folder and the worker's name (`folder/main`), or a folder that has a worker `main`
        or only one worker. Raises `WorkerError` if there is no such worker, or if it has a problem.
        """
        place = Path(path)
        if place.is_file():
            registry, draft = cls._draft_at(place, parsed)
            return registry._worker_of(draft)
        if place.is_dir():
            return cls(place, parsed=parsed)._standing_for_all()
        if place.parent.is_dir() and (registry := cls(place.parent, parsed=parsed)).names:
            return registry[place.name.removesuffix(".md")]
        name = starter_name(place.parts[0] if place.parts else "")
        new = f"; `handrail new {name}` creates one" if name else ""
        raise WorkerError(f"there is no {path}. Name a worker's file, or a folder with workers{new}.")

    def _standing_for_all(self) -> Worker:
        if self.main:
            return self[self.main]
        here = str(self.folder)
        if not self.names:
            raise WorkerError(
                f"there is no worker (NAME.md) in {here!r}. Name another folder, or, to serve a module, its "
                f"file: {self.folder / 'app.py'}. `handrail new demo` creates a folder with workers."
            )
        raise WorkerError(
            f"{here} has several workers: {', '.join(self.names)}. Name one of them, for example "
            f"{self.folder / self.names[0]}."
        )

    # Contents.

    @cached_property
    def _drafts(self) -> tuple[Draft, ...]:
        drafts: list[Draft] = []
        for path in sorted(self.folder.glob("*.md")):
            if path.name.startswith(".") or not path.is_file():
                continue
            find = Finder(path)
            text = read_text(path, find)
            if text is None or path.stem.lower() != "readme" or has_front_matter(text):
                drafts.append(Draft(path, text, find))
        for draft in drafts:
            draft.equip(self._functions)
            draft.check_against(drafts, self._functions)
        return tuple(drafts)

    @cached_property
    def _workers(self) -> Mapping[Path, Worker]:
        made = {draft.path: self._finish(draft, self._effect_of(draft)) for draft in self._drafts}
        return {path: worker for path, worker in made.items() if worker is not None}

    def _finish(self, draft: Draft, effect: Effect) -> Worker | None:
        known = {each.name for each in self._drafts}
        listed = [name for name in draft.listed(self.names) if name in known]
        tools = {name: self.tool(name) for name in listed}
        return draft.finish(
            self, tools, effect, lambda own: creation_tools(self, draft.name, own), self._defaults
        )

    def _effect_of(self, draft: Draft) -> Effect:
        """Return a worker's effect, which depends on its tools and on those of all workers that it can reach."""
        reached, ahead = {draft.path}, [draft]
        effects: list[Effect] = []
        while ahead:
            here = ahead.pop()
            effects += here.effects
            for other in self._drafts:
                if other.name in here.listed(self.names) and other.path not in reached:
                    reached.add(other.path)
                    ahead.append(other)
        return strongest(effects)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all workers, including those with problems."""
        return tuple(dict.fromkeys(draft.name for draft in self._drafts))

    @property
    def main(self) -> str:
        """The name of the folder's main worker, which is `main` or its only worker, or "" if there is neither."""
        names = self.names
        return "main" if "main" in names else names[0] if len(names) == 1 else ""

    @property
    def locked(self) -> frozenset[str]:
        """The names of locked workers, and of files that can't be read or have invalid front matter.

        No created worker may take one of them.
        """
        return frozenset(
            draft.name for draft in self._drafts if draft.text is None or draft.text.front.locked
        )

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The workers without problems, by name. An unknown model, or a `tools.py` that can't be loaded, is not counted as a problem."""
        return {worker.name: worker for worker in self._workers.values()}

    def __getitem__(self, name: str) -> Worker:
        drafts = [draft for draft in self._drafts if draft.name == name]
        if not drafts:
            hint = suggest(name, self.names)
            raise WorkerError(f"there is no worker {name!r} in {str(self.folder)!r}. {hint}")
        return self._worker_of(drafts[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def _worker_of(self, draft: Draft) -> Worker:
        worker = self._workers.get(draft.path)
        if worker is None:
            raise refuse([*draft.find.problems, *self._functions.problems().problems])
        broken = self._functions.problems().problems
        if (
            broken
            and draft.text is not None
            and any(isinstance(each, str) for each in draft.text.front.tools)
        ):
            raise refuse(broken)
        return worker

    def check(self) -> list[WorkerProblem]:
        """Return every problem in the folder, sorted by file and line."""
        _ = self._workers  # some problems are found only when the workers are created
        found = [problem for draft in self._drafts for problem in draft.find.problems]
        found += [problem for draft in self._drafts for problem in draft.unknown_models()]
        found += self._functions.problems().problems
        return _in_order(found)

    def view(self, names: Sequence[str]) -> RegistryView:
        """Return a read-only view of the workers with these names. Unknown names are left out."""
        said = {draft.name: draft.description for draft in self._drafts}
        return RegistryView({name: said[name] for name in names if name in said})

    # Workers as tools.

    def tool(self, name: str) -> Tool[Any, Any]:
        """Return a tool that calls a worker. It has the worker's name and can be used in any prompt.

        Raises `WorkerError` if there is no worker with this name.
        """
        made = self._tools.get(name)
        if made is None:
            draft = next((each for each in self._drafts if each.name == name), None)
            if draft is None:
                self[name]  # raises an error with the known names
                raise AssertionError(name)
            made = self._tools[name] = tool_for(
                name,
                draft.description,
                NO_ATTACHMENTS if draft.text is None else rule_of(draft.text.front),
                self._effect_of(draft),
                lambda: self[name],
            )
        return made

    def open(self, run: Run, /) -> None:
        """Let a run call every worker in the folder, as in `Adapter(model, workers=registry)`.

        Raises `DefinitionError` if a tool of the prompt has a worker's name, but does not run an agent or a worker.
        """
        prompt: Any = run.model.prompt
        offered = (
            [] if prompt is None else [*prompt.tools, *(t for _, s in walk(prompt.sections) for t in s.tools)]
        )
        for tool in offered:
            if tool.name in self.names and not tool.delegates:
                raise DefinitionError(
                    f"the prompt has a tool {tool.name!r}, and {str(self.folder)!r} has a worker of the same "
                    "name. Rename one of them."
                )
        run.workers = Reach(self, None, WorkerSettings())

    @asynccontextmanager
    async def enter(self, run: Run, /) -> AsyncGenerator[None]:
        """Let a run call every worker in the folder, as `open` does. Nothing is undone when the run ends."""
        self.open(run)
        yield

    # Workers created in a session.

    def created(self, maker: Worker, name: str, session: SessionView) -> Worker | None:
        """Return the worker with this name that `maker` created in this session.

        Returns None if there is none, if the name is locked, or if `maker` may not create workers. Raises
        `ToolValidationError` if the worker is no longer valid or allowed.
        """
        if not maker.create or name in self.locked:
            return None
        found = session[WorkerCreated].get((maker.name, name))
        return None if found is None else self.from_text(maker, name, found.text)

    def from_text(self, maker: Worker, name: str, text: str) -> Worker:
        """Return the worker described by `text`, which `maker` wrote.

        Raises `ToolValidationError` if the text has problems, or if `check_rights` does not allow the worker.
        """
        key = (maker.name, name, text)
        made = self._made.get(key)
        if made is not None:
            return made
        path = Path(f"{name}.md")
        draft = Draft(path, text, Finder(path))
        if draft.find.problems:
            raise ToolValidationError("; ".join(map(str, draft.find.problems)))
        draft.equip(self._functions)
        if draft.text is not None:
            check_rights(maker, draft.text.front)
            if draft.name != name:
                raise ToolValidationError(
                    f"the worker created as {name!r} is named {draft.name!r} in its text. Leave `name` out."
                )
        made = None if draft.find.problems else self._finish(draft, self._effect_of(draft))
        if made is None:
            raise ToolValidationError("; ".join(map(str, draft.find.problems)))
        if len(self._made) >= _MOST_KEPT:
            self._made.clear()
        self._made[key] = made
        return made

    # Runs.

    def all_on(self, model: Model | str | None) -> dict[str, Model | str]:
        """Return a `models=` mapping that runs every worker in the folder on one model. For None, the mapping is empty."""
        return {} if model is None else dict.fromkeys(self.names, model)

    def run(
        self,
        name: str,
        input: str,
        **arguments: Unpack[WorkerRunArguments],
    ) -> Operation[PromptResponse[Any]]:
        """Run a worker until it ends.

        `model` runs this worker if its file names no model. `models` has models by worker name, which take precedence
        over the files. A called worker without a model of its own runs on its caller's model. An attachment is a path on
        disk (`Path`), the path of one of the run's files (`str`), or an `Attachment`. `message_callback` receives every
        message of this worker and of the workers that it calls. With a `journal` the run is recorded, and `resume` can
        continue it in another process.

        Raises `WorkerError` at once if the worker does not exist, has a problem, has no model, or may not be given one
        of the attachments, or if its instructions can't be rendered. Raises `DefinitionError` at once if a model is unknown, or
        if a `Path` can't be read.
        """
        check_names("run", WorkerRunArguments, arguments)
        runner, prompt, rendered, rest = self._prepare(name, input, arguments)
        return runner.evaluate(prompt, rendered, **rest)

    def stream(
        self,
        name: str,
        input: str,
        **arguments: Unpack[WorkerRunArguments],
    ) -> RunStream[Any]:
        """Return a run of a worker as a stream of its events. Takes the arguments of `run`, and raises the same errors.

        A second run on the same session continues the conversation.
        """
        check_names("stream", WorkerRunArguments, arguments)
        runner, prompt, rendered, rest = self._prepare(name, input, arguments)
        return runner.stream(prompt, rendered, **rest)

    def resume(
        self, name: str, run_id: str, **arguments: Unpack[WorkerResumeArguments]
    ) -> Operation[PromptResponse[Any]]:
        """Resume a recorded run of a worker, with the attachments with which the run began."""
        check_names("resume", WorkerResumeArguments, arguments)
        worker = self[name]
        runner, _, rest = self._runner(worker, arguments)
        return runner.resume(run_id, worker.prompt, **rest)

    def resume_stream(
        self, name: str, run_id: str, **arguments: Unpack[WorkerResumeArguments]
    ) -> RunStream[Any]:
        """Resume a recorded run and return a stream of its events, from where the record ends."""
        check_names("resume_stream", WorkerResumeArguments, arguments)
        worker = self[name]
        runner, _, rest = self._runner(worker, arguments)
        return runner.resume_stream(run_id, worker.prompt, **rest)

    def _prepare(
        self, name: str, input: str, arguments: WorkerRunArguments
    ) -> tuple[Adapter, Prompt[Any], Rendered, dict[str, Any]]:
        """Return the adapter that runs a worker, its prompt, its params, and the remaining arguments of the run."""
        worker = self[name]
        runner, files, rest = self._runner(worker, arguments, arguments.get("attachments", ()))
        rest.pop("attachments", None)
        given = {limit: rest.get(limit) for limit in ("deadline", "budget")}
        limits = RunOptions().updated("run", RunArguments, given)
        limits = limits.tightened(deadline=worker.deadline(SYSTEM_CLOCK), budget=worker.budget())
        shown = visible_to(runner.model, files)
        rest |= {"deadline": limits.deadline, "budget": limits.budget, "attachments": shown}
        rest["message"] = message_with(input, files, shown)
        rest.setdefault("app", str(worker.path.resolve()))
        return runner, worker.prompt, worker.render(input, [each.name for each in files]), rest

    def _runner(
        self,
        worker: Worker,
        arguments: WorkerRunArguments | WorkerResumeArguments,
        attached: Sequence[Attachment | Path | str] = (),
    ) -> tuple[Adapter, tuple[Attachment, ...], dict[str, Any]]:
        """Return the adapter that runs a worker, its attachments, and the remaining arguments.

        Raises `WorkerError` if there is no model, if an attachment is not allowed, or if `tools.py` was only parsed.
        """
        if self._parsed:
            raise WorkerError(
                f"{worker.name} can't run, because its tools.py was only parsed. Leave out parsed=True."
            )
        given = WorkerSettings(worker.name, arguments.get("models") or {}, arguments.get("message_callback"))
        adapter = arguments.get("adapter")
        chosen = (
            given.models.get(worker.name)
            or worker.find_model()
            or arguments.get("model")
            or (adapter and adapter.model)
        )
        if chosen is None:
            raise worker.without_model()
        chosen = model_named(chosen) if isinstance(chosen, str) else chosen
        runner = adapter or Adapter(chosen)
        disk = arguments.get("filesystem") or runner.filesystem

        def files() -> Filesystem:
            if disk is None:
                raise ResourceError("Filesystem", "the run has no files", "Pass a filesystem.")
            if isinstance(disk, RunFiles):
                problem = "the files of a workspace are only open inside the run"
                raise ResourceError("Filesystem", problem, "Attach the file itself: Path('plot.png').")
            return disk

        read = [Attachment(each) if isinstance(each, Path) else each for each in attached]
        try:
            found = accept(worker.name, worker.attachments, read, files)
        except ToolValidationError as error:
            raise WorkerError(str(error)) from None
        inside = WorkerRun(worker, found, given, (worker.name,))
        rest = {
            name: value for name, value in arguments.items() if name not in WorkerArguments.__annotations__
        }
        return runner.with_workers(inside, chosen, worker.limits.depth), found, rest


def _in_order(problems: Iterable[WorkerProblem]) -> list[WorkerProblem]:
    """Return each problem once, sorted by file and line."""
    return sorted(dict.fromkeys(problems), key=lambda each: (each.file, each.line))


def starter_name(missing: str) -> str:
    """Return the folder name to suggest for `handrail new` if a path is missing; "" if something with that name exists.

    The suffix of a worker's file or of a module is left out.
    """
    name = Path(missing).stem if Path(missing).suffix in FILE_SUFFIXES else missing
    return "" if not name or os.path.lexists(name) else name
