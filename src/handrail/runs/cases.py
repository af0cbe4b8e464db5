"""Cases: recorded runs as files that tests and evals replay, without a journal and without a model."""

from __future__ import annotations

import base64
import contextlib
import copy
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec
import pydantic_core

from handrail.agent import Agent
from handrail.concurrency.threads import run_in_thread
from handrail.context import Approval, ToolContext, call_behind
from handrail.errors import RunError, ToolValidationError
from handrail.imports import import_app
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, RunCopy, WorkspaceFile, workspace_name
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import Model
from handrail.prompt import OPENER, Prompt
from handrail.protocols import ApprovalRequest, Environment
from handrail.question import Answer, Question
from handrail.resources.bindings import Binding
from handrail.resources.directory import DirectoryFilesystem
from handrail.resources.paths import is_reserved, on_disk, parse_file_path
from handrail.resources.workspace.workspace import is_ignored
from handrail.run.adapter import Adapter, model_of
from handrail.run.call import Attempt
from handrail.run.large_results import READER
from handrail.run.record.begin import RunBegin, decode_begin, prompt_of
from handrail.run.record.format import InnerCall, fingerprint, is_masked, read_result
from handrail.run.record.log import load_attachments
from handrail.run.record.recorded_session import load_resumed
from handrail.run.response import ANSWER_TOOL
from handrail.run.search import CALLER, SEARCHER
from handrail.runs.check import Divergence, Source, Tally, outer_policies_of, paths_of, replay
from handrail.runs.copies import add_copy, copy_of, write_file
from handrail.runs.tree import RunTree, show
from handrail.schema import to_json
from handrail.session import Session
from handrail.text.raised_errors import with_place
from handrail.text.secrets import is_secret_name
from handrail.tools import RunMode, Tool, ToolResult
from handrail.tools.result import whole_of

if TYPE_CHECKING:
    from handrail.workers import WorkerRegistry

FORMAT = 1
"""The version of the file format. A newer version is refused."""
SUFFIX = ".case.json"
LARGEST = 16 * 1024 * 1024
"""Maximum number of bytes of all files of a case together."""
_SHORTEST = 8
"""Minimum length of a value that counts as a secret. A shorter one may occur by chance."""
_LEFT_OUT = (
    *(".git", ".venv", "node_modules", "__pycache__"),
    *(".env", ".env.*", ".netrc", "*.pem", "*.key", "id_rsa", "id_ed25519"),
)
"""The names of files and folders that no case contains, because they are no inputs, or because they hold keys."""


class CaseFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a case, as it was when the run began."""

    lines: list[str] = []
    """The content, line by line, so that a changed case is easy to read in a diff."""
    base64: str = ""
    """The content in base64, if it is not valid UTF-8; otherwise ""."""
    executable: bool = False
    link: str = ""
    """The path that a link leads to; "" for a file."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded run as a test: its beginning, the model's answers, the results of the calls, and the files."""

    name: str
    app: str = ""
    """Where a replay finds the agent: `module:name` or a worker's file; "" if it has to be passed."""
    tools: Mapping[str, Source] = {}
    """Which tools a replay runs for real, and which it does not run although it could."""
    files: Mapping[str, CaseFile] | None = None
    """The run's files by path; None if they are not known. Calls that used files then have their recorded results."""
    left_out: list[str] = []
    """The paths of files that are not in the case, because they may hold keys. Calls that used them have their recorded results."""
    record: RunCopy

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Case:
        """Load a case from its file. Raises `RunError` if the file can't be read or is not a case."""
        name, hint = Path(path).name, "Export the run again: handrail runs export RUN PATH --case."
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
            if found.pop("handrail", None) != "case":
                raise RunError(name, "it is not a case", hint)
            if (version := found.pop("version", 0)) > FORMAT:
                problem = f"it has the format {version}, and this version of Handrail reads format {FORMAT}"
                raise RunError(name, problem, "Replay it with the version of Handrail that exported it.")
            case = msgspec.convert(_restored(found), cls, builtin_types=(bytes,))
            _ = case.begin  # raises an error if it is damaged
            return case
        except OSError as error:
            raise RunError(name, f"it can't be read: {error.strerror}", hint) from None
        except (ValueError, TypeError) as error:
            raise RunError(name, f"it is not a case, or is damaged: {error}", hint) from None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the case to a file as JSON that people can read and edit.

        Raises `RunError`, and writes nothing, if the case contains a secret of this process's environment.
        """
        plain = _readable(msgspec.to_builtins(self, builtin_types=(bytes,)))
        text = msgspec.json.encode({"handrail": "case", "version": FORMAT, **plain})
        for name, value in os.environ.items():
            is_long = len(value) >= _SHORTEST and not os.path.isabs(value)  # the path of a key is none
            if is_long and is_secret_name(name) and msgspec.json.encode(value)[1:-1] in text:
                problem = f"it contains the value of the environment variable {name}"
                raise RunError(
                    self.name, problem, "Record a run whose tools take it from a resource or as a secret."
                )
        write_file(self.name, path, [msgspec.json.format(text, indent=1), b"\n"])

    @property
    def begin(self) -> RunBegin:
        """How the run began: its message, its system text, its tools, and so on."""
        return decode_begin(self.record.row.record)

    @property
    def lacking(self) -> list[str]:
        """The calls that used files which the case lacks, as `tool (call id)`."""
        paths = None if self.files is None else {*self.left_out}
        return [
            f"{unit.tool} ({unit.call_id})"
            for unit in self.record.units
            if (used := paths_of(unit)) and (paths is None or not paths.isdisjoint(used))
        ]

    @contextlib.contextmanager
    def opened(self) -> Generator[DirectoryFilesystem | None]:
        """Write the case's files to a temporary folder, which is removed at the end of the block. Yields None if it has none.

        Raises `PathRefused` for a path that is not below the folder.
        """
        if self.files is None:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="handrail-case-") as folder:
            for path, file in sorted(
                self.files.items(), key=lambda each: each[1].link
            ):  # none is written through a link
                _write(Path(folder, on_disk(parse_file_path(path).path)), file)
            files = DirectoryFilesystem(folder)
            try:
                yield files
            finally:
                files.close()


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the replay of a case."""

    differences: list[Divergence]
    """How the replay differs from the record. With the recorded model, the replay ends at the first difference."""
    tree: RunTree
    """The recorded run; if another model has replaced the recorded one, the new run."""
    tally: Tally

    @property
    def text(self) -> str:
        """The final answer of the run in `tree`."""
        return self.tree.outcome.text

    def __str__(self) -> str:
        """The differences, each with the lines that differ."""
        return "\n".join(f"{each}\n{each.diff()}" for each in self.differences) or "No differences."


async def make_case(
    journal: Journal,
    run_id: str,
    *,
    app: str = "",
    files: str | PathLike[str] | None = None,
    tools: Mapping[str, Source] = {},
) -> Case:
    """Make a case of a recorded run.

    The files of a workspace are those with which the run began. Other files are not recorded: pass the folder as `files`, as it
    was then, or leave it out, so that calls which used files have their recorded results. `app` replaces the recorded one. `tools` marks tools,
    as in `replay`. Secrets are masked in the record, and files that usually hold keys are left out.

    Raises `RunError` if the run can't be a case: it has not begun, builds on a run that is not over, has secrets in its params, or
    has too many files.
    """
    record = await copy_of(journal, run_id)
    begin = decode_begin(record.row.record)
    if begin.params is not None and is_masked(begin.params):
        raise RunError(
            run_id,
            "its params contain a secret, which is not recorded",
            "Record a run whose tools take the secret from a resource or ask for it.",
        )
    if files is not None:
        found = await run_in_thread(lambda: _files_in(run_id, Path(files)))
    else:
        found = await _files_at_begin(journal, run_id, workspace_name(begin.folder))
    size = sum(len(data) for data, _ in (found or {}).values())
    if size > LARGEST:
        problem = f"its files have {size:,} bytes together, and a case takes at most {LARGEST:,}"
        raise RunError(run_id, problem, "Pass a folder with fewer files: --files FOLDER.")
    left_out = sorted(path for path in found or () if is_ignored(path, _LEFT_OUT))
    kept = None
    if found is not None:
        kept = {path: _case_file(*found[path]) for path in sorted(found.keys() - left_out)}
    named = _portable(app or record.row.record.app)
    return Case(name=run_id, app=named, tools=tools, files=kept, left_out=left_out, record=record)


async def replay_case(
    case: Case | str | PathLike[str],
    agent: Agent[Any] | Prompt[Any] | None = None,
    *,
    model: Model | str | None = None,
    params: object = None,
    resources: Iterable[Binding[Any]] = (),
    session: Session | None = None,
) -> CaseResult:
    """Replay a case with today's code, and return how that differs from the record. Nothing outside of the replay is changed.

    Without `model`, the recorded answers are replayed, as `replay` does. With one, the agent runs again on this model, and each
    call has the recorded result of a call with the same tool and arguments. A call without such a result is a difference, and the
    model is told that there is none. A recorded result is used once; that of a `pure` or `read` tool as often as it is asked for.
    Approvals are decided as they were, and policies decide again.

    `agent` replaces the agent that the case names. The other arguments are those of `replay`. Raises `RunError` if the case can't be
    replayed, and with a model, what a run raises.
    """
    case = case if isinstance(case, Case) else Case.load(case)
    code = _Code.of(case, agent)
    given: dict[str, Any] = {"params": code.params if params is None else params, "session": session}
    journal, tally = MemoryJournal(), Tally()
    try:
        run_id = (await add_copy(journal, case.record, case.name)).record.id
        with case.opened() as files:
            given |= {"filesystem": files, "resources": (*resources,)}
            if model is not None:
                return await _rerun(case, code, model_of(model), journal, given)
            given |= {"tools": case.tools, "lacking": case.left_out, "tally": tally}
            found = await replay(journal, run_id, code.prompt, **given)
        differences = [] if found is None else [found]
        return CaseResult(differences=differences, tree=await show(journal, run_id), tally=tally)
    finally:
        journal.close()


# --- the agent of a case --------------------------------------------------------------------------------


class _Code(msgspec.Struct, frozen=True):
    """The code that a case runs."""

    prompt: Prompt[Any]
    adapter: Adapter | None = None
    params: Any = None
    """A worker's instructions, rendered from its current file; None for the recorded params."""
    worker: tuple[WorkerRegistry, str] | None = None
    """The registry and the name of a worker; None if it is none."""

    @classmethod
    def of(cls, case: Case, agent: Agent[Any] | Prompt[Any] | None) -> _Code:
        if agent is not None:
            return cls(agent.prompt, agent.adapter) if isinstance(agent, Agent) else cls(agent)
        if not case.app:
            hint = "Pass the agent: replay_case(case, agent), or export the run with --app module:name."
            raise RunError(case.name, "it does not name its agent", hint)
        try:
            if not case.app.endswith(".md"):
                hint = "Correct the `app` in the case, or pass the agent: replay_case(case, agent)."
                return cls(prompt_of(case.name, case.app, hint), adapter_at(case.app))
            from handrail.workers import WorkerRegistry  # its libraries may not be installed

            registry, worker = WorkerRegistry.of_file(case.app)
            message, is_plain = case.begin.message, not worker.attachments.count
            return cls(
                worker.prompt,
                None,
                worker.render(message) if is_plain and message is not None else None,
                (registry, worker.name),
            )
        except RunError:
            raise
        except Exception as error:  # importing the user's module can raise anything
            problem = f"its agent {case.app!r} can't be loaded: {with_place(error)}"
            raise RunError(case.name, problem, "Correct the code, or the `app` in the case.") from error


def adapter_at(app: str) -> Adapter | None:
    """Return the adapter of the agent that an app's name refers to, or the one beside its prompt; None if there is none."""
    module, _, name = app.partition(":")
    found = import_app(module)
    named: Any = getattr(found, name, None)
    beside: Any = named.adapter if isinstance(named, Agent) else getattr(found, "adapter", None)
    return beside if isinstance(beside, Adapter) else None


def _portable(app: str) -> str:
    """Return a worker's file relative to the current folder, if it is below it."""
    with contextlib.suppress(ValueError):
        return str(Path(app).relative_to(Path.cwd())) if os.path.isabs(app) else app
    return app


# --- another model --------------------------------------------------------------------------------------


async def _rerun(
    case: Case, code: _Code, model: Model, journal: Journal, given: dict[str, Any]
) -> CaseResult:
    """Run the agent of a case on another model, with the recorded results."""
    recorded, own = RecordedCalls(case, journal), MemoryJournal()
    run_id, params = case.record.row.record.id, given.pop("params")
    resumed = await load_resumed(journal, await journal.runs.get(run_id), given["session"], own.clock)
    begin = resumed.begin
    given |= {"journal": own, "session": resumed.session, "run_id": run_id, "history": begin.history or None}
    given |= {"environment": recorded, "approvals": recorded}
    given["outer_policies"] = outer_policies_of(resumed.row)
    try:
        if code.worker is not None:
            registry, name = code.worker
            await registry.run(
                name, begin.message or "", models={name: model}, attachments=begin.attachments, **given
            )
        else:
            adapter = Adapter(model) if code.adapter is None else code.adapter.with_model(model)
            values = resumed.params() if params is None else params
            given |= {"message": begin.message, "attachments": begin.attached, "opened": begin.opened}
            await adapter.evaluate(code.prompt, values, **given)
        tree = await show(own, run_id)
        recorded.tally.steps = tree.steps
        return CaseResult(differences=recorded.differences, tree=tree, tally=recorded.tally)
    finally:
        own.close()


class RecordedCalls(Environment):
    """An environment whose tools return what is recorded in a case, and in which approvals are decided as they were."""

    run_mode: RunMode = "user"
    _own: ClassVar = frozenset((OPENER, ANSWER_TOOL, READER, SEARCHER, CALLER))
    """The tools of the run itself, which are not recorded results of anything else."""

    def __init__(self, case: Case, journal: Journal) -> None:
        self._case = case
        self._journal = journal
        self.differences: list[Divergence] = []
        self.tally = Tally()
        self._units: dict[str, list[CommitUnit]] = defaultdict(list)
        self._used: set[str] = set()
        """The ids of the calls whose results were used."""
        self._inner: dict[str, list[InnerCall]] = defaultdict(list)
        for unit in case.record.units:
            self._units[unit.tool].append(unit)
        for entry in case.record.entries:
            if entry.kind == "inner call":
                inner = msgspec.msgpack.decode(entry.body, type=InnerCall)
                self._inner[inner.verb].append(inner)
        self.stand_in = self._stand_in

    async def ask(self, question: Question, /) -> Answer:
        asked: Any = {"question_id": question.id, "digest": question.digest, "by": question.principal}
        return Answer(
            **asked, outcome="declined", reason="nobody answers, because a recorded run is being replayed"
        )

    async def decide(self, request: ApprovalRequest, /) -> Approval:
        arguments = pydantic_core.from_json(to_json(request.arguments))
        unit = next((each for each in self._units[request.tool] if _arguments(each) == arguments), None)
        approved = self._case.tools.get(request.tool) != "real" if unit is None else unit.status != "denied"
        why = "" if approved else "it was not approved when the run was recorded"
        return Approval(approved, why, "the record", "approved" if approved else "denied")

    def _stand_in(self, tool: Tool[Any, Any]) -> Tool[Any, Any]:
        """Return a tool that has recorded results in place of its handler. A script calls such tools itself."""
        if tool.spans or tool.name in self._own or self._case.tools.get(tool.name) == "real":
            return tool
        made = copy.copy(tool)
        fields = {"handler": partial(self._result, tool), "is_async": True, "context_type": ToolContext}
        fields |= {"needs": frozenset[str](), "result_class": None, "compensate": None, "probe": None}
        for field, value in fields.items():
            object.__setattr__(made, field, value)
        return made

    async def _result(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> ToolResult[Any]:
        attempt = call_behind(context)
        written = self._find(tool, params, attempt)
        if written is None:
            return self._differs(tool, params, attempt)
        self.tally.taken += 1
        result = read_result(tool, written)
        await load_attachments(self._journal, self._case.record.row.record.id, result.attachments, some=True)
        if (whole := whole_of(result)) is not None:  # the run shortens it again
            text = (await self._journal.blobs.get(whole.digest)).decode()
            result = msgspec.structs.replace(result, text=text)
        return result if result.success else ToolResult.error(result.text, attachments=result.attachments)

    def _find(self, tool: Tool[Any, Any], params: Any, attempt: Attempt) -> bytes | None:
        """Return the recorded result of a call with these arguments; None if there is none that was not used."""
        if attempt.parent is not None and (inner := self._inner[fingerprint(attempt)]):
            return inner.pop(0).result
        arguments = pydantic_core.from_json(tool.dump(params))
        same = [each for each in self._units[tool.name] if _parsed(tool, each) == arguments]
        fresh = [each for each in same if each.call_id not in self._used]
        repeats = same[-1:] if tool.effect in ("pure", "read") else []
        unit = next(iter([*fresh, *repeats]), None)
        if unit is not None:
            self._used.add(unit.call_id)
        return None if unit is None else unit.result

    def _differs(self, tool: Tool[Any, Any], params: Any, attempt: Attempt) -> ToolResult[Any]:
        evaluation = attempt.run.model.evaluation
        step = 0 if evaluation is None else evaluation.answers
        was = "\n".join(each.arguments for each in self._units[tool.name])
        where, now = f"{tool.name} ({attempt.id})", tool.dump(params).decode()
        self.differences.append(
            Divergence(step=step, what="call", where=where, recorded=was, now=now, call_id=attempt.id)
        )
        return ToolResult.error(
            f"{tool.name} has no result for these arguments, because a recorded run is being replayed. Do without it."
        )


def _arguments(unit: CommitUnit) -> Any:
    return pydantic_core.from_json(unit.arguments) if unit.arguments else None


def _parsed(tool: Tool[Any, Any], unit: CommitUnit) -> Any:
    """Return the recorded arguments of a call as the tool takes them now, or as they are if it refuses them."""
    try:
        return pydantic_core.from_json(tool.dump(tool.parse(unit.arguments)))
    except ToolValidationError:
        return _arguments(unit)


# --- files ------------------------------------------------------------------------------------------------


_Files = Mapping[str, tuple[bytes, WorkspaceFile]]
"""The content of each file, or the path that a link leads to, and the file's state, by path."""


def _files_in(run_id: str, folder: Path) -> _Files:
    """Return the files in a folder. Links are not followed."""
    if not folder.is_dir():
        raise RunError(run_id, f"there is no folder {str(folder)!r}", "Pass the folder that it worked in.")
    found: dict[str, tuple[bytes, WorkspaceFile]] = {}
    for at, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not is_ignored(each, _LEFT_OUT) and not is_reserved(each)]
        links = [each for each in folders if Path(at, each).is_symlink()]
        for name in (*names, *links):
            each = Path(at, name)
            path = each.relative_to(folder).as_posix()
            if each.is_symlink():
                found[path] = os.readlink(each).encode(), WorkspaceFile("link", 0)
            elif each.is_file() and not is_reserved(name):
                found[path] = each.read_bytes(), WorkspaceFile("file", each.stat().st_mode & 0o777)
    return found


async def _files_at_begin(journal: Journal, run_id: str, workspace: str) -> _Files | None:
    """Return the files of a workspace as they were when a run began; None if it did not work in one."""
    if not workspace:
        return None
    states = {**await journal.workspaces.files(workspace)}
    units = await journal.calls.load(run_id)
    since = (units[0], *await journal.calls.later(units[0])) if units else ()
    deltas = [delta for unit in since for delta in unit.workspaces if delta.name == workspace]
    for delta in sorted(deltas, key=lambda each: each.base, reverse=True):
        states.update((change.path, change.old) for change in delta.changes)
    there = {path: state for path, state in states.items() if state is not None and state.kind != "folder"}
    contents = await journal.workspaces.fetch({state.digest for state in there.values()})
    return {path: (contents[state.digest], state) for path, state in there.items()}


def _case_file(data: bytes, state: WorkspaceFile) -> CaseFile:
    if state.kind == "link":
        return CaseFile(link=data.decode(errors="surrogateescape"))
    executable = bool(state.mode & 0o100)
    try:
        return CaseFile(lines=data.decode().splitlines(keepends=True), executable=executable)
    except UnicodeDecodeError:
        return CaseFile(base64=base64.b64encode(data).decode(), executable=executable)


def _write(path: Path, file: CaseFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.link:
        path.symlink_to(file.link)
        return
    path.write_bytes(base64.b64decode(file.base64) if file.base64 else "".join(file.lines).encode())
    path.chmod(0o755 if file.executable else 0o644)


# --- bytes as data that people can read -------------------------------------------------------------------

_FORMS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], bytes]]] = {
    "$json": (msgspec.json.decode, msgspec.json.encode),
    "$msgpack": (msgspec.msgpack.decode, msgspec.msgpack.encode),
    "$text": (bytes.decode, str.encode),
    "$base64": (lambda data: base64.b64encode(data).decode(), base64.b64decode),
}
"""How bytes are shown in JSON, and how they are read again, by the only key of the object in their place."""


def _readable(value: Any) -> Any:
    """Return plain data in which bytes have the first form from which exactly these bytes can be read again."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: _readable(each) for key, each in fields.items()}
    if isinstance(value, list | tuple):
        return [*map(_readable, cast("Sequence[Any]", value))]
    if not isinstance(value, bytes):
        return value
    shown: Any = None
    for form, (read, _) in _FORMS.items():
        with contextlib.suppress(ValueError, TypeError):
            shown = {form: _readable(read(value))}
            if _restored(msgspec.json.decode(msgspec.json.encode(shown))) == value:
                break
    return shown


def _restored(value: Any) -> Any:
    """Return what `_readable` was given."""
    if isinstance(value, list):
        return [*map(_restored, cast("Sequence[Any]", value))]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    form = next(iter(fields), "") if len(fields) == 1 else ""
    if form in _FORMS:
        return _FORMS[form][1](_restored(fields[form]))
    return {key: _restored(each) for key, each in fields.items()}
