"""`RecordedRun`: finds a run in its journal, loads its code and opens its folder."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from handrail import runs
from handrail.cli.command_options import find_model, open_files
from handrail.cli.outcome import UsageError, runs_command
from handrail.errors import DefinitionError, HandrailError, RunUnknown
from handrail.journal.any_journal import AnyJournal
from handrail.journal.records import RunRecord, RunRow
from handrail.text.raised_errors import with_place

if TYPE_CHECKING:
    from handrail.messages import Model
    from handrail.question import Question
    from handrail.run.adapter import Adapter


class Program(NamedTuple):
    """The code that a recorded run executes: a worker, or a module's agent or prompt."""

    prompt: Any
    changed: bool
    """Whether the code has changed since the run began; False if the record does not say which code that was."""
    worker: Any = None
    own: Adapter | None = None
    """The adapter of the module's agent, or the one beside its prompt; None if there is none."""

    @property
    def notes(self) -> list[str]:
        return ["The code has changed since the run began."] if self.changed else []

    def adapter(self, model: str | None, recorded: str) -> Adapter:
        """Return an adapter for the given model, or else for the recorded one.

        If the module has an adapter with this model, that adapter is returned. If its adapter has a different model, a
        copy with this model is returned.
        """
        from handrail.models.names import reference_to
        from handrail.run.adapter import Adapter

        own, wanted = self.own, model or recorded
        if own is not None and wanted in (own.model.name, reference_to(own.model)):
            return own
        found = self.find_model(model, recorded)
        if own is None:
            return Adapter(found)
        adapter = copy.copy(own)
        adapter.model = found
        return adapter

    def find_model(self, model: str | None, recorded: str) -> Model:
        """Return the model with the given name, or else the one that the run began with.

        Raises `UsageError` if the recorded model can't be found, and `DefinitionError` if the given one can't.
        """
        from handrail.models.names import give, model_named

        folder = None if self.worker is None else self.worker.registry.folder
        if model is not None:
            return find_model(model, folder)
        try:
            # Whoever began the run named the model. A run that was imported has no such name.
            give(recorded)
            return model_named(recorded, folder)
        except DefinitionError as error:
            problem = str(error).partition(". ")[0]
            raise UsageError(
                f"the run began with the model {recorded!r}, which can't be found by that name ({problem}). Name the "
                "one to continue with: --model provider:name, or module:name for the model, adapter or agent in a module."
            ) from error

    def models(self, model: str | None, record: RunRecord) -> dict[str, Model]:
        """Return the models that replace those in workers' files, by worker: the recorded ones, or `model` for every worker."""
        from handrail.run.record.begin import decode_begin

        registry = self.worker.registry
        if model is not None:
            return registry.all_on(self.find_model(model, ""))
        named = {**decode_begin(record).models}
        if record.model != self.worker.model:
            named.setdefault(self.worker.name, record.model)
        return {worker: self.find_model(None, each) for worker, each in named.items()}

    async def with_servers(
        self, servers: Path | None, record: RunRecord
    ) -> tuple[Program, list[Any], list[str]]:
        """Load the MCP servers that the run began with, or those in the file `servers`, if it is given.

        Returns the program, the tools to add to a worker's own, and notes for the user. An agent or a prompt gets the
        tools in its prompt instead. Raises `UsageError` if a file can't be used, and `ServerUnavailable` if a worker's
        server can't be used.
        """
        from handrail.run.record.begin import decode_begin

        recorded = decode_begin(record).sources if record.begin else {}
        paths = list(recorded) if servers is None else [str(servers)]
        if not paths:
            return self, [], []
        from handrail.guard import CapabilityPolicy
        from handrail.mcp import load_servers

        options: dict[str, Any] = {} if self.worker is not None else {"policies": [CapabilityPolicy()]}
        try:
            sections = [each for path in paths for each in load_servers(path, **options)]
        except DefinitionError as error:
            raise UsageError(
                f"the MCP servers of the run can't be used: {error} Correct that, or name a different file: "
                "--mcp mcp.json."
            ) from None
        now = {each.server.source for each in sections} - {None}
        notes = [
            f"{source.path} has changed since the run began."
            for source in now
            if source is not None and recorded.get(source.path, source.digest) != source.digest
        ]
        if self.worker is None:
            return self._replace(prompt=self.prompt.extended(sections)), [], notes
        tools: list[Any] = []
        for section in sections:
            await section.connect(record.principal)
            tools += section.current_tools(record.principal)
        return self, tools, notes

    def render(self, message: str | None) -> Any:
        """Render a worker's instructions from its current file, as params for a replay. Returns None for the recorded params.

        These are used for a run without a worker or without a message, and for a worker that takes attachments.
        """
        if self.worker is None or self.worker.attachments.count or message is None:
            return None
        return self.worker.render(message)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run and the journal it is recorded in."""

    journal: AnyJournal
    row: RunRow

    @classmethod
    async def find(cls, journal: AnyJournal, named: str) -> RecordedRun:
        """Find a run by its id, or by a prefix of its id.

        Raises `RunUnknown` if there is no such run, and `UsageError` if several ids have the prefix.
        """
        try:
            return cls(journal, await journal.runs.get(named))
        except RunUnknown:
            lines = await runs.list_runs(journal, limit=100_000)
            found = [line.id for line in lines if line.id.startswith(named)]
            if not named or not found:
                raise
            if len(found) > 1:
                shown = ", ".join(found[:5])
                raise UsageError(
                    f"{len(found)} runs begin with {named!r}: {shown}. Type more of the id."
                ) from None
            return cls(journal, await journal.runs.get(found[0]))

    @property
    def id(self) -> str:
        return self.row.record.id

    def next_command(self, verb: str) -> str:
        """Return the `handrail runs` command with this verb, for the user to type next."""
        return runs_command(verb, self.id, self.journal.path)

    def load_program(self, app: str | None) -> Program:
        """Load the code that `app` names, or else the code that is now at the name recorded with the run.

        Raises `UsageError` or a `HandrailError` if it can't be loaded.
        """
        from handrail.run.record.begin import code_of, prompt_of
        from handrail.runs.cases import adapter_at

        record = self.row.record
        named = record.app
        if app:
            from handrail.serve.sources import recorded_name

            named = recorded_name(app)
        try:
            worker = None
            if named.endswith(".md"):
                from handrail.workers import WorkerRegistry

                _, worker = WorkerRegistry.of_file(named)
            prompt = prompt_of(record.id, named) if worker is None else worker.prompt
            own = None if worker is not None else adapter_at(named)
            return Program(prompt, bool(record.code) and code_of(named) != record.code, worker, own)
        except HandrailError:
            raise
        except Exception as error:  # importing the user's module can raise anything
            raise UsageError(
                f"can't load the code at {named!r}: {with_place(error)}. "
                "Correct the code, or name different code: --app module:name."
            ) from error

    @contextlib.asynccontextmanager
    async def open_folder(
        self, files: Path | None, startup_files: Sequence[str] | None = None
    ) -> AsyncGenerator[Any]:
        """Open the given folder, or the one recorded with the run.

        Yields a filesystem, or a `Workspace` if the files are in one. Yields None if no folder is recorded, or if the
        recorded one does not exist. Raises `UsageError` if the given folder does not exist, or if a different folder is at
        the recorded path now. Unless `startup_files` is given, the recorded ones are allowed.
        """
        from handrail.resources.directory import DirectoryFilesystem
        from handrail.resources.workspace import Workspace
        from handrail.run.record.begin import decode_begin

        begin = decode_begin(self.row.record) if self.row.record.begin else None
        if startup_files is None:
            startup_files = begin.startup_files if begin is not None else ()
        if files is not None:
            folder = open_files(files, None, startup_files)
        else:
            units = [unit for unit in await self.journal.calls.load(self.id) if unit.root]
            recorded = begin.folder if begin is not None else ""
            root = recorded or next((unit.root for unit in units), "")
            workspace = Workspace.named(root, startup_files=startup_files)
            if workspace is not None:
                yield workspace
                return
            is_there = root and Path(root).is_dir()
            folder = DirectoryFilesystem(root, startup_files=startup_files) if is_there else None
            ids = {unit.root_id for unit in units if unit.root == root} - {""}
            if folder is not None and ids and folder.folder_id not in ids:
                folder.close()
                raise UsageError(
                    f"the folder at {root!r} is not the one that the run worked in, or its staging folder was removed. "
                    "Name the run's folder: --files FOLDER."
                )
        try:
            yield folder
        finally:
            if isinstance(folder, DirectoryFilesystem):
                folder.close()

    async def find_question(self, named: str | None) -> Question:
        """Return the open question with this id or name. If `named` is None, returns the only open question.

        Raises `UsageError` if there is no such question, or more than one.
        """
        waiting = await self.journal.questions.open(self.id)
        found = [each for each in waiting if named is None or named in (each.id, each.name)]
        if len(found) == 1:
            return found[0]
        if not waiting:
            show = self.next_command("show")
            raise UsageError(f"the run {self.id} is not waiting for an answer. See `{show}`.")
        ids = "\n".join(f"  {each.id}  {each.name}" for each in waiting)
        problem = (
            "say which question, by its id"
            if found
            else f"there is no question {named!r}; name one by its id"
        )
        raise UsageError(f"{problem}:\n{ids}")


def continuation(row: RunRow, resume: str) -> str:
    """Return a sentence that says how an answered run continues: by a worker, or with the command `resume`."""
    return "A `handrail worker` of its app continues it." if row.queue else f"Continue with: {resume}"
