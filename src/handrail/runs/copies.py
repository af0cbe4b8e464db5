"""Copies of runs: forks, which continue independently, and exported files. And copies of files into workspaces and out of them.

Files are copied into a workspace by a run with a single call. So the copy is atomic, one run at a time writes to the
workspace, and `undo` reverses the copy.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from handrail.agent import Agent
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import run_in_thread
from handrail.context import ToolContext
from handrail.errors import FileError, RunError, WorkspaceNotFoundError
from handrail.ids import check_id, random_id, why_unfit
from handrail.journal.location import has_journal
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, Entry, RunCopy, RunRow, WorkspaceLine
from handrail.messages import ModelRequest, ToolMessage
from handrail.models.names import is_of_providers
from handrail.models.scripted import ScriptedModel
from handrail.resources.directory.content import version_of
from handrail.resources.mount import Layered
from handrail.resources.paths import RESERVED, is_reserved, join, spelled
from handrail.resources.staging import fork_behind
from handrail.resources.workspace import Workspace
from handrail.resources.workspace.cache import PERMISSIONS, WorkspaceCache
from handrail.resources.workspace.workspace import bring, check_size, is_ignored
from handrail.run.call import ToolCall
from handrail.run.place import RUN, Place, leading_call
from handrail.run.record.begin import RunBegin, check_begun, decode_begin
from handrail.run.record.lineage import Lineage, lineage_of
from handrail.run.record.log import Told
from handrail.runs.tree import answers_in
from handrail.session.serialization import under_id
from handrail.text.rendering import counted
from handrail.tools import tool


def detach(begin: RunBegin, lineage: Lineage, session_id: str, **changes: object) -> bytes:
    """Encode a run's beginning for a session with this id, so that it does not depend on other runs."""
    base = None if lineage.base is None else under_id(lineage.base, session_id)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(
            begin,
            base=base,
            events=lineage.events,
            said=lineage.said,
            shown=lineage.shown,
            logged=lineage.logged,
            denied=lineage.denied,
            compaction=lineage.compaction,
            **changes,
        )
    )


# --- forks ----------------------------------------------------------------------------------------


async def fork(
    journal: Journal, run_id: str, step: int, new_id: str | None = None, *, clock: Clock = SYSTEM_CLOCK
) -> RunRow:
    """Create a run with the first `step` model answers of another run, and the results of their calls.

    When the fork is resumed, open questions of these calls are asked again, and then the model is asked for the next answer.
    If the last of the answers ended the original run, it ends the fork too. The fork has its own session, which starts like
    the original run's. Files are not changed: the fork sees them as they are now, whatever the shared calls did to them.

    Raises `RunError` if the run has not begun or has no such step, if an earlier run of its session is not over, or if the
    journal already has a run with the id `new_id`.
    """
    row = await journal.runs.get(run_id)
    check_begun(row)
    record, begin = row.record, decode_begin(row.record)
    new_id = random_id() if new_id is None else new_id
    check_id("run id", new_id)
    entries, units = await journal.calls.entries(run_id), await journal.calls.load(run_id)
    kept = _calls_until(run_id, entries, step)
    now, lineage = clock.now().timestamp(), await lineage_of(journal, row)
    entries = list(_kept(entries, step, kept, units))
    last = max((entry.at for entry in entries), default=record.began_at)
    deadline = None if begin.deadline is None else begin.deadline + now - last
    copy = RunCopy(
        row=RunRow(
            record=msgspec.structs.replace(
                record,
                id=new_id,
                session_id=new_id,
                began_at=now,
                forked_from=f"{run_id}#{step}",
                begin=detach(begin, lineage, new_id, deadline=deadline),
            ),
            status="parked",
            changed_at=now,
        ),
        entries=entries,
        units=[_detach_unit(unit, new_id) for unit in units if (leading_call(unit.place) or 0) <= kept],
        steps=[
            (f"{new_id}{key.removeprefix(run_id)}", value)
            for key, value in await journal.steps.load(run_id)
            if key.startswith(run_id) and (leading_call(key.removeprefix(run_id)) or 0) <= kept
        ],
        blobs=await _blobs(journal, run_id, lineage),
        forked_from=f"{run_id}#{step}",
    )
    await journal.runs.add(copy)
    return await journal.runs.get(new_id)


async def _blobs(journal: Journal, run_id: str, lineage: Lineage) -> list[bytes]:
    """Return the blobs of a run, and the large results of earlier runs of its session that are still stored."""
    blobs = {digest: await journal.blobs.get(digest) for digest in await journal.blobs.list(run_id)}
    for digest in lineage.large_results():
        if digest not in blobs and await journal.blobs.has(digest):
            blobs[digest] = await journal.blobs.get(digest)
    return list(blobs.values())


def _calls_until(run_id: str, entries: Sequence[Entry], step: int) -> int:
    """Return how many calls the first `step` answers led to. Raises `RunError` if the run has no such step."""
    answers = answers_in(entries)
    if not 0 <= step <= len(answers):
        raise RunError(
            run_id, f"it has no step {step}", f"Pass a step from 0, its beginning, to {len(answers)}."
        )
    return sum(len(answers[RUN.answer(number)].calls) for number in range(1, step + 1))


def _kept(entries: Sequence[Entry], step: int, calls: int, units: Sequence[CommitUnit]) -> Iterator[Entry]:
    """Yield the entries of the first `calls` calls, and those that the run itself recorded before its answer `step + 1`."""
    places = {unit.call_id: unit.place for unit in units}
    after = ("model answer", str(RUN.answer(step + 1)))
    until = next((at for at, entry in enumerate(entries) if (entry.kind, entry.key) == after), len(entries))
    for at, entry in enumerate(entries):
        place = places.get(entry.key, "") if entry.kind in ("undone", "undoing") else entry.key
        call = leading_call(place)
        if at < until if call is None else call <= calls:
            yield _without_order(entry) if entry.kind == "remark" else entry


def _without_order(entry: Entry) -> Entry:
    """Return the record of what a model was told, without an order to pause or to stop, which the fork does not repeat."""
    told = msgspec.msgpack.decode(entry.body, type=Told)
    if told.order in (None, "wrap up"):
        return entry
    body = msgspec.msgpack.encode(msgspec.structs.replace(told, order=None))
    return msgspec.structs.replace(entry, body=body)


def _detach_unit(unit: CommitUnit, new_id: str) -> CommitUnit:
    """Return a committed call as a fork records it.

    Its files and paths are left out, because they belong to the original run.
    """
    return msgspec.structs.replace(
        unit,
        run_id=new_id,
        session_id=new_id,
        files=(),
        workspaces=(),
        root="",
        reads=[place for place in unit.reads if not place.startswith("file ")],
        writes=[place for place in unit.writes if not place.startswith("file ")],
    )


# --- files ----------------------------------------------------------------------------------------

_HINT = "Pass a file that `export` wrote."
FORMAT = 1
"""The version of the file format. A newer version is refused."""


_NOT_AT_PLACES = frozenset(("undoing", "undone", "emitted", "parked"))
"""The kinds of entries whose keys are not places. All other keys are checked."""


class _Head(msgspec.Struct):
    handrail: str
    version: int
    run_id: str = ""


async def export(journal: Journal, run_id: str, path: str | PathLike[str]) -> int:
    """Write a run to a file as lines of JSON, which only its owner can read. Returns the number of lines.

    The file contains the session as it was when the run began, so no other run is needed. It does not contain secrets (the
    journal masks them), questions (open ones are asked again), or data that folders keep for undo. Raises `RunError` if the
    run has not begun, if an earlier run of its session is not over, or if the file can't be written.
    """
    copy = await copy_of(journal, run_id)
    lines: list[Any] = [_Head("run", FORMAT, run_id), {"run": copy.row}]
    lines += [{"entry": entry} for entry in copy.entries]
    lines += [{"unit": unit} for unit in copy.units]
    lines += [{"step": step} for step in copy.steps]
    lines += [{"blob": data} for data in copy.blobs]
    write_file(run_id, path, (msgspec.json.encode(line) + b"\n" for line in lines))
    return len(lines)


def write_file(run_id: str, path: str | PathLike[str], lines: Iterable[bytes]) -> None:
    """Write a run to a file that only its owner can read, at once. Raises `RunError` if that fails."""
    target, unfinished = Path(path), ""
    try:
        opened, unfinished = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(opened, "wb") as file:
            file.writelines(lines)
        os.replace(unfinished, target)
    except OSError as error:
        problem = f"it can't be written to {target}: {error.strerror}"
        raise RunError(run_id, problem, "Pass a path in a writable folder.") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)


async def copy_of(journal: Journal, run_id: str) -> RunCopy:
    """Return a copy of a run that refers to no other run, and to no process, folder or workspace.

    Raises `RunError` if the run has not begun, or if an earlier run of its session is not over.
    """
    row = await journal.runs.get(run_id)
    check_begun(row)
    record, lineage = row.record, await lineage_of(journal, row)
    begin = detach(decode_begin(record), lineage, record.session_id)
    return RunCopy(
        row=msgspec.structs.replace(
            row,
            record=msgspec.structs.replace(record, begin=begin),
            owner="",
            leased_until=0.0,
            questions=0,
        ),
        entries=await journal.calls.entries(run_id),
        units=[
            msgspec.structs.replace(unit, files=(), workspaces=(), root="")
            for unit in await journal.calls.load(run_id)
        ],
        steps=await journal.steps.load(run_id),
        blobs=await _blobs(journal, run_id, lineage),
    )


async def import_(
    journal: Journal, path: str | PathLike[str], *, run_id: str | None = None, session_id: str | None = None
) -> RunRow:
    """Import an exported run, and return its row. It keeps its id unless `run_id` is passed.

    Without `session_id`, it keeps the id of its session, or gets a new session if the journal already has that
    one. What the file names as the run's app, MCP servers, and models in modules is left out, so that resuming the run loads no code
    that the file chose. Raises `RunError` if the file can't be read, is damaged or is not an exported run of a known format, if an id
    contains characters that can't be printed, or if the journal already has a run with this id.
    """
    return await add_copy(journal, _read(Path(path)), Path(path).name, run_id=run_id, session_id=session_id)


async def add_copy(
    journal: Journal, copy: RunCopy, name: str, *, run_id: str | None = None, session_id: str | None = None
) -> RunRow:
    """Add the copy of a run in the file `name` to a journal, as `import_` does."""
    was, record = copy.row.record.id, copy.row.record
    new_id = was if run_id is None else run_id
    for what, id in (
        ("id", new_id),
        ("session's id", record.session_id if session_id is None else session_id),
    ):
        problem = why_unfit(id)
        if problem:
            raise RunError(name, f"the {what} {problem}", "Give the run and its session other ids.")
    if session_id is None:
        taken = await journal.runs.list(session_id=record.session_id)
        session_id = new_id if taken else record.session_id
    try:
        begin = decode_begin(record)
    except ValueError as error:
        raise RunError(name, f"it is not an exported run: {error}", _HINT) from None
    # The original run's permission to change startup files does not apply in this journal. Nor is any code loaded or started
    # because the file names it: whoever resumes the run names its app, its servers, and models in modules.
    again = detach(
        begin,
        Lineage(
            begin.base, begin.events, begin.said, begin.shown, begin.logged, begin.denied, begin.compaction
        ),
        session_id,
        startup_files=[],
        sources={},
        models={worker: name for worker, name in begin.models.items() if is_of_providers(name)},
    )
    record = msgspec.structs.replace(
        record,
        id=new_id,
        session_id=session_id,
        app="",
        code="",
        model=record.model if is_of_providers(record.model) else record.model.rpartition(":")[2],
        begin=again,
    )
    status = "parked" if copy.row.status == "running" else copy.row.status
    await journal.runs.add(
        RunCopy(
            row=msgspec.structs.replace(copy.row, record=record, status=status),
            entries=copy.entries,
            units=[
                # Like `export`, this leaves out what a call has changed in folders and workspaces, which are not this journal's.
                msgspec.structs.replace(
                    unit, run_id=new_id, session_id=session_id, files=(), workspaces=(), root=""
                )
                for unit in copy.units
            ],
            steps=[(f"{new_id}{key.removeprefix(was)}", value) for key, value in copy.steps],
            blobs=copy.blobs,
        )
    )
    return await journal.runs.get(new_id)


def _read(path: Path) -> RunCopy:
    name, hint = path.name, _HINT
    try:
        lines = path.read_bytes().splitlines()
        if not lines:
            raise RunError(name, "it is not an exported run: it is empty", hint)
        head = msgspec.json.decode(lines[0], type=_Head)
    except OSError as error:
        raise RunError(name, f"it can't be read: {error.strerror}", hint) from None
    except ValueError as error:
        raise RunError(name, f"it is not an exported run: {error}", hint) from None
    if head.handrail != "run":
        raise RunError(name, "it is not an exported run", hint)
    if head.version > FORMAT:
        raise RunError(
            head.run_id,
            f"it was exported in format {head.version}, and this version of Handrail reads format {FORMAT}",
            "Import it with the version of Handrail that exported it, or a newer one.",
        )
    found: dict[str, list[Any]] = {"run": [], "entry": [], "unit": [], "step": [], "blob": []}
    kinds: dict[str, Any] = {
        "run": RunRow,
        "entry": Entry,
        "unit": CommitUnit,
        "step": tuple[str, bytes | None],
        "blob": bytes,
    }
    for number, line in enumerate(lines[1:], 2):
        try:
            ((kind, body),) = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).items()
            found[kind].append(_with_place(msgspec.json.decode(body, type=kinds[kind])))
        except (ValueError, KeyError) as error:
            raise RunError(
                head.run_id, f"line {number} of {name} is damaged: {error}", "Export it again."
            ) from None
    if len(found["run"]) != 1:
        raise RunError(head.run_id, f"{name} is truncated", "Export it again.")
    return RunCopy(
        row=found["run"][0],
        entries=found["entry"],
        units=found["unit"],
        steps=found["step"],
        blobs=found["blob"],
    )


def _with_place(line: Any) -> Any:
    """Return a decoded line unchanged. Raises `ValueError` if it has a place that can't be parsed."""
    if isinstance(line, CommitUnit):
        Place.parse(line.place)
    elif isinstance(line, Entry) and line.kind not in _NOT_AT_PLACES:
        Place.parse(line.key)
    return line


_CALL = "put"
"""The id of the call that copies files into a workspace."""


async def list_workspaces(journal: Journal) -> Sequence[WorkspaceLine]:
    """Return the workspaces in a journal, sorted by name. An altered workspace is listed too, with a description of the alteration."""
    return await journal.workspaces.list()


# --- into a workspace -------------------------------------------------------------------------------


class FilesPut(msgspec.Struct, frozen=True):
    """Files that were copied into a workspace."""

    run_id: str
    """The run that copied them. `undo` of its only call restores what was there before."""
    call_id: str
    paths: Sequence[str]
    """The paths that the copy added or changed, sorted. The path of a folder ends in `/`."""


async def put_files(journal: Journal, workspace: Workspace, source: str | PathLike[str]) -> FilesPut:
    """Copy a file, or the content of a folder, into a workspace, which is created if it does not exist.

    Files that are in the way are replaced, and other files stay. Links and permissions are copied too. In a folder, pipes,
    sockets, devices, and names that are reserved or that the workspace ignores are left out. Raises `FileError` if the source
    does not exist or is a single file that would be left out, or if a file of the journal would be copied. Raises
    `WorkspaceBusy` while another run has the workspace, and `RunError` if the copy fails, for example because a file is
    changed meanwhile. In all these cases nothing is copied.
    """
    at = Path(source).absolute()
    if not at.exists():
        raise FileError(str(source), "there is no such file or folder. Pass the path of one that exists")
    if not at.is_dir() and (
        not at.is_file() or is_reserved(at.name) or is_ignored(at.name, workspace.ignore)
    ):
        raise FileError(
            str(source),
            "a workspace does not record a file with this name or of this kind. Choose another file",
        )
    if has_journal(str(at), journal.path):
        raise FileError(
            str(source), "the journal is there, and its key would be copied. Choose a path without it"
        )
    paths: list[str] = []
    shown = spelled(str(at))
    # Naming the files to copy counts as approval of the startup files among them.
    workspace = Workspace(
        workspace.name,
        cache=workspace.cache,
        ignore=workspace.ignore,
        limits=workspace.limits,
        startup_files=["**"],
    )

    @tool(
        effect="staged",
        description="Copy files of this host into the workspace. `source` is their path.",
    )
    def copy_files(source: str, *, context: ToolContext) -> str:
        files = fork_behind(context.filesystem)
        assert isinstance(files, Layered), "a workspace has layers"
        layers = files.layers()
        _copy(at, layers.upper, lambda path: is_ignored(path, workspace.ignore))
        paths[:] = files.absorb(layers.mounted_at)
        return f"Copied {counted(len(paths), 'path')}."

    failed: list[str] = []

    def answer(request: ModelRequest) -> ToolCall | str:
        results = [
            each
            for message in request.messages
            if isinstance(message, ToolMessage)
            for each in message.results
        ]
        failed[:] = [each.text for each in results if each.failed]
        return results[-1].text if results else ToolCall(copy_files.name, {"source": shown}, _CALL)

    agent = Agent(ScriptedModel(answer), "Copy files.", name="workspaces", tools=[copy_files])
    response = await agent.run(f"Copy {shown} to {workspace.address}.", journal=journal, filesystem=workspace)
    if failed:
        raise RunError(
            response.run_id, f"nothing was copied: {failed[0].rstrip('.')}", "The workspace is as before."
        )
    return FilesPut(response.run_id, _CALL, paths)


def _copy(source: Path, target: Path, is_left_out: Callable[[str], bool]) -> None:
    """Copy a file, or the content of a folder, to a folder.

    Below `source`, no link is followed, even if somebody puts one in the place of a folder or a file meanwhile.
    """
    if not source.is_dir():
        _copy_file(os.path.realpath(source), target / source.name, spelled(source.name))
        return
    modes: list[tuple[Path, int]] = []
    for at, folders, files, opened in os.fwalk(source, onerror=_fail):
        folder = Path(at).relative_to(source)
        path = "/".join(spelled(part) for part in folder.parts)
        names = [*folders, *files]
        folders.clear()
        for name in names:
            inner, new = join(path, spelled(name)), target / folder / name
            if is_reserved(name) or is_left_out(inner):
                continue
            status = os.stat(name, dir_fd=opened, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                new.mkdir()
                modes.append((new, status.st_mode & PERMISSIONS))
                folders.append(name)
            elif stat.S_ISLNK(status.st_mode):
                new.symlink_to(os.readlink(name, dir_fd=opened))
            elif stat.S_ISREG(status.st_mode):
                _copy_file(name, new, inner, opened)
    for new, mode in reversed(modes):  # set last, because a mode may forbid writing to the folder
        new.chmod(mode)


def _fail(error: OSError) -> None:
    raise error


def _copy_file(source: str, target: Path, path: str, folder: int | None = None) -> None:
    """Copy a file's bytes and permissions. `source` is relative to the open `folder`, if there is one.

    Raises `FileLimitReached` if the file is too large for a workspace, and `FileError` if it changes while it is read, or is
    not a regular file. If somebody has put a pipe in its place, opening the pipe does not block.
    """
    number = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(number, "rb") as file:
        before = os.fstat(number)
        check_size(path, before.st_size)
        data = file.read(before.st_size + 1) if stat.S_ISREG(before.st_mode) else b""
        is_same = len(data) == before.st_size and version_of(os.fstat(number)) == version_of(before)
    if not is_same or not stat.S_ISREG(before.st_mode):
        raise FileError(path, "it was changed while it was copied. Try again when no program writes to it")
    target.write_bytes(data)
    target.chmod(before.st_mode & PERMISSIONS)


# --- out of a workspace -----------------------------------------------------------------------------


async def get_files(journal: Journal, name: str, folder: str | PathLike[str]) -> Sequence[str]:
    """Copy a workspace's recorded files to a new or empty folder, and return their paths, sorted.

    The path of a folder ends in `/`. A run that is using the workspace is not disturbed. Changes that its calls
    have not committed yet are not copied. Raises `WorkspaceNotFoundError` if there is no such workspace, and
    `FileError` if the target exists and is not an empty folder, or can't be written.
    """
    row = await journal.workspaces.get(name)
    if row is None:
        raise WorkspaceNotFoundError(name)
    target = Path(folder).absolute()
    try:
        make_empty(target)
        with tempfile.TemporaryDirectory(prefix=".", suffix=RESERVED, dir=target) as scratch:
            cache = await run_in_thread(lambda: WorkspaceCache.claim(Path(scratch), lambda path: False))
            try:
                await bring(cache, journal.workspaces, row)
            finally:
                cache.close()
            return await run_in_thread(lambda: _deliver(cache, target))
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            str(target), f"the files can't be written there: {error}. Name another folder"
        ) from error


def make_empty(target: Path) -> None:
    """Create a folder, unless an empty one exists. Raises `FileError` if the path is taken, or is below a file."""
    try:
        if target.is_dir() and any(target.iterdir()):
            raise FileError(str(target), "it is not empty. Name a new folder, or delete what is in it")
        target.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise FileError(str(target), "it exists and is not a folder. Name a new folder") from None
    except NotADirectoryError:
        raise FileError(str(target), "it is below a file. Name a new folder") from None


def _deliver(cache: WorkspaceCache, target: Path) -> Sequence[str]:
    for each in cache.root.iterdir():
        os.rename(each, target / each.name)
    return sorted(
        f"{path}/" if entry.state.kind == "folder" else path for path, entry in cache.entries.items()
    )
