"""Copies between workspaces and ordinary folders, and the list of workspaces.

Files are copied into a workspace by a run with a single call. So the copy is atomic, one run at a time writes to the
workspace, and `undo` reverses the copy.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

import msgspec

from handrail.agent import Agent
from handrail.context import ToolContext
from handrail.dispatch.turn import ToolCall
from handrail.errors import FileError, RunError, WorkspaceNotFoundError
from handrail.journals import Journal
from handrail.messages import ModelRequest, ToolMessage
from handrail.models.scripted import ScriptedModel
from handrail.rendering import counted
from handrail.resources.mount import Layered
from handrail.resources.paths import RESERVED, is_reserved, join, spelled
from handrail.resources.workspace import Workspace
from handrail.resources.workspace.cache import WorkspaceCache
from handrail.resources.workspace.workspace import bring, is_ignored
from handrail.threads import run_in_thread
from handrail.tools import tool

_CALL = "put"
"""The id of the call that copies files into a workspace."""


class WorkspaceLine(msgspec.Struct, frozen=True):
    """A workspace in a list of all workspaces."""

    name: str
    version: int
    """The number of commits and undos so far."""
    files: int
    """The number of files and links."""
    size: int
    """The number of bytes in all files together."""
    run_id: str
    """The run that has the workspace; "" if a new run could take it."""


async def list_workspaces(journal: Journal) -> Sequence[WorkspaceLine]:
    """Return the workspaces in a journal, sorted by name."""
    holders = await journal.workspaces.holders()
    lines: list[WorkspaceLine] = []
    for name in sorted(await journal.workspaces.names()):
        row = await journal.workspaces.get(name)
        found = (await journal.workspaces.files(name)).values()
        states = [state for state in found if state is not None and state.kind != "folder"]
        size = sum(state.size for state in states)
        lines.append(WorkspaceLine(name, row.version if row else 0, len(states), size, holders.get(name, "")))
    return lines


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
    does not exist, or is a single file that would be left out. Raises `WorkspaceBusy` while another run has the workspace, and
    `RunError` if the copy fails. Then nothing is copied.
    """
    at = Path(source).absolute()
    if not at.exists():
        raise FileError(str(source), "there is no such file or folder. Pass the path of one that exists")
    if not at.is_dir() and (
        not at.is_file() or is_reserved(at.name) or is_ignored(at.name, workspace.ignore)
    ):
        raise FileError(str(source), "a workspace does not record a file with this name or of this kind")
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

    @tool(effect="staged")
    def copy_files(source: str, *, context: ToolContext) -> str:
        """Copy files of this host into the workspace. `source` is the path of `at` as it is shown."""
        files = context.filesystem
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
    """Copy a file, or the content of a folder, to a folder."""
    if not source.is_dir():
        _copy_one(source, target / source.name, source.stat())
        return
    pending = [("", "")]
    modes: list[tuple[Path, int]] = []
    while pending:
        folder, path = pending.pop()
        with os.scandir(source / folder) as entries:
            for entry in entries:
                inner = join(path, spelled(entry.name))
                if is_reserved(entry.name) or is_left_out(inner):
                    continue
                name, status = os.path.join(folder, entry.name), entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    (target / name).mkdir()
                    modes.append((target / name, stat.S_IMODE(status.st_mode)))
                    pending.append((name, inner))
                else:
                    _copy_one(source / name, target / name, status)
    for at, mode in reversed(modes):  # a folder may forbid its owner to write
        at.chmod(mode)


def _copy_one(source: Path, target: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        target.symlink_to(os.readlink(source))
    elif stat.S_ISREG(status.st_mode):
        shutil.copyfile(source, target)
        target.chmod(stat.S_IMODE(status.st_mode))


# --- out of a workspace -----------------------------------------------------------------------------


async def get_files(journal: Journal, name: str, folder: str | PathLike[str]) -> Sequence[str]:
    """Copy a workspace's recorded files to a new or empty folder, and return their paths, sorted.

    A run that has the workspace is not disturbed. Changes that its calls have not committed yet are not copied. Raises
    `WorkspaceNotFoundError` if there is no such workspace, and `FileError` if the target exists and is not an empty folder.
    """
    row = await journal.workspaces.get(name)
    if row is None:
        raise WorkspaceNotFoundError(name)
    target = Path(folder).absolute()
    _check_empty(target)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=RESERVED, dir=target) as scratch:
        cache = await run_in_thread(lambda: WorkspaceCache.claim(Path(scratch), lambda path: False))
        try:
            await bring(cache, journal.workspaces, row)
        finally:
            cache.close()
        return await run_in_thread(lambda: _deliver(cache, target))


def _check_empty(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        raise FileError(str(target), "it exists and is not an empty folder. Name a new folder")


def _deliver(cache: WorkspaceCache, target: Path) -> Sequence[str]:
    for each in cache.root.iterdir():
        os.rename(each, target / each.name)
    return sorted(
        f"{path}/" if entry.state.kind == "folder" else path for path, entry in cache.entries.items()
    )
