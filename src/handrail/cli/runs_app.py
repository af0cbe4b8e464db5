"""The `handrail runs` app, and `command`, which registers a command that works on a journal."""

from __future__ import annotations

import asyncio
import functools
import inspect
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from handrail.cli import runs_view as view
from handrail.cli.command_options import (
    JournalFile,
    Json,
    prepare_journal,
    search_here,
    with_signature,
)
from handrail.cli.outcome import (
    CANCEL_NOTE,
    CANCELLED,
    DONE,
    Failure,
    UsageError,
    fail,
    journal_path,
    journal_url,
    print_json,
)
from handrail.journal.any_journal import open_by_name
from handrail.journal.location import former_journals

app = typer.Typer(name="runs", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

RunId = Annotated[str, typer.Argument(help="The run's id, or its beginning.")]


class Report:
    """The result of a command: data for programs, and text for people."""

    def __init__(self, data: dict[str, Any], *text: Any, code: int = DONE) -> None:
        self.data = data
        self.text = text
        self.code = code


Command = Callable[..., Awaitable[Report]]


def _shared(journal: JournalFile = None, as_json: Json = False) -> None:
    """Declare the options that every command has."""


def command(
    name: str, *, creates_journal: bool = False, app: typer.Typer = app
) -> Callable[[Command], Command]:
    """Return a decorator that registers a command. Each parameter after the journal becomes an argument or an option.

    With `creates_journal`, the command creates the journal if it does not exist.
    """

    def register(command: Command) -> Command:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        names = {each.name for each in own}
        shared = inspect.signature(_shared, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**given: Any) -> None:
            as_json = given["as_json"]
            arguments = {each: value for each, value in given.items() if each in names}
            raise typer.Exit(_run(command, given["journal"], arguments, as_json, creates_journal))

        app.command(name)(with_signature(run, [*own, *(each for each in shared if each.name not in names)]))
        return command

    return register


def _run(
    command: Command, journal: str | None, arguments: dict[str, Any], as_json: bool, creates_journal: bool
) -> int:
    """Run a command on its journal, print its report, and return the exit code."""
    try:
        search_here()
        named = journal_url(journal) or _journal_file(journal, creates_journal)

        async def run() -> Report:
            opened = open_by_name(named, watches=False)
            try:
                return await command(opened, **arguments)
            finally:
                opened.close()

        report = asyncio.run(run())
    except Exception as error:
        return fail(error, as_json=as_json)
    except KeyboardInterrupt:
        return fail(Failure(CANCELLED, "Cancelled", CANCEL_NOTE), as_json=as_json)
    if as_json:
        print_json({"ok": report.code == DONE, "exit_code": report.code, **report.data})
    else:
        for each in report.text:
            view.print_item(each)
    return report.code


def _journal_file(given: str | None, create: bool) -> Path:
    """Return the path of the journal's file. Raises `UsageError` if it does not exist and the command may not create it."""
    if create:
        return prepare_journal(given)
    path = journal_path(given)
    if not path.is_file():
        problem = f"there is no journal at {path}."
        for former in former_journals(Path.cwd()):
            problem += f" If this folder was moved, its runs are in its former journal: --journal {shlex.quote(str(former))}."
        raise UsageError(f"{problem} Name one with --journal FILE or HANDRAIL_JOURNAL.")
    return path
