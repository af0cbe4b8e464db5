"""`handrail workspaces`: list workspaces, and copy files into them and out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from handrail import runs
from handrail.cli.outcome import DONE, FAILED, runs_command
from handrail.cli.runs_commands import Report, command
from handrail.content import shown_size
from handrail.journal.any_journal import AnyJournal
from handrail.journal.records import WorkspaceLine
from handrail.resources.workspace import Workspace
from handrail.text.rendering import counted, escape_line

app = typer.Typer(
    name="workspaces", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The workspace's name.")]


@command("list", app=app)
async def list_workspaces(journal: AnyJournal) -> Report:
    """List the workspaces, with the number and size of their files, and the runs that use them."""
    lines = await runs.list_workspaces(journal)
    text = [_shown(each) for each in lines]
    is_altered = any(each.altered for each in lines)
    if is_altered:
        text.append("`handrail runs verify` lists every altered record.")
    return Report(
        {"workspaces": msgspec.to_builtins(lines)},
        *(text or ["There are no workspaces in this journal."]),
        code=FAILED if is_altered else DONE,
    )


def _shown(line: WorkspaceLine) -> str:
    name = escape_line(line.name)
    if line.altered:
        return f"{name}  altered: {escape_line(line.altered)}"
    user = f", in use by the run {escape_line(line.run_id)}" if line.run_id else ""
    return f"{name}  {counted(line.files, 'file')}, {shown_size(line.size)}{user}"


@command("put", creates_journal=True, app=app)
async def put(
    journal: AnyJournal,
    name: Name,
    source: Annotated[
        Path, typer.Argument(metavar="PATH", help="A file, or a folder whose content is copied.")
    ],
) -> Report:
    """Copy files into a workspace. Files in the way are replaced, and other files stay."""
    done = await runs.put_files(journal, Workspace(name), source)
    undo = runs_command("undo", f"{done.run_id} {done.call_id}", str(journal.path))
    return Report(
        msgspec.to_builtins(done),
        f"Copied {counted(len(done.paths), 'path')} to workspace:{name}. To undo it: {undo}",
    )


@command("get", app=app)
async def get(
    journal: AnyJournal,
    name: Name,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or an empty folder.")],
) -> Report:
    """Copy the recorded files of a workspace to a folder."""
    paths = await runs.get_files(journal, name, folder)
    return Report({"paths": paths}, f"Copied {counted(len(paths), 'path')} to {escape_line(str(folder))}.")
