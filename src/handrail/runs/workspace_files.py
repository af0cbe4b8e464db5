"""Copies between workspaces and ordinary folders, and the list of workspaces.

Files are copied into a workspace by a run with a single call. So the copy is atomic, one run at a time writes to the
workspace, and `undo` reverses the copy.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

import msgspec

from handrail.agent import Agent
from handrail.concurrency.threads import run_in_thread
from handrail.context import ToolContext
from handrail.errors import FileError, RunError, WorkspaceNotFoundError
from handrail.journal.location import has_journal
from handrail.journal.protocol import Journal
from handrail.journal.records import WorkspaceLine
from handrail.messages import ModelRequest, ToolMessage
from handrail.models.scripted import ScriptedModel
from handrail.resources.directory.content import version_of
from handrail.resources.mount import Layered
from handrail.resources.paths import RESERVED, is_reserved, join, spelled
from handrail.resources.staging import fork_behind
from handrail.resources.workspace import Workspace
from handrail.resources.workspace.cache import PERMISSIONS, WorkspaceCache
from handrail.resources.workspace.workspace import bring, check_size, is_ignored
from handrail.run.call import ToolCall
from handrail.text.rendering import counted
from handrail.tools import tool

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
        _make_empty(target)
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


def _make_empty(target: Path) -> None:
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
