"""`handrail journal`: backups of a journal, and upgrades from earlier releases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from handrail.cli.command_options import JournalFile, Json
from handrail.cli.outcome import DONE, UsageError, fail, journal_path, journal_url, print_json, print_line
from handrail.cli.runs_commands import Report, command, journal_file
from handrail.journal.any_journal import AnyJournal
from handrail.journal.sql.upgrade import Upgrade
from handrail.journal.upgrade import upgrade as upgrade_journal
from handrail.notify import Address
from handrail.text.rendering import counted, escape_line

app = typer.Typer(name="journal", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@command("backup", app=app)
async def backup(
    journal: AnyJournal,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to create.")],
) -> Report:
    """Copy the journal to a new folder while it is in use, with workspaces, and of a file also its key and its users."""
    from handrail.journal.backup import back_up

    back_up(journal.path, folder)
    return Report(
        {"folder": str(folder)}, f"Backed up to {escape_line(str(folder))}. It is as secret as the journal."
    )


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `backup` made.")],
    journal: JournalFile = None,
) -> None:
    """Create a journal from a backup. One that exists is not replaced."""
    from handrail.journal.backup import restore

    try:
        named = journal_url(journal) or str(journal_path(journal))
        restore(folder, named)
    except Exception as error:
        raise typer.Exit(fail(error)) from None
    print_line(
        "Restored. Calls made after the backup are not in it, and may be made again: before you start workers, look at "
        "`handrail runs list`, and cancel what must not go on."
    )
    raise typer.Exit(DONE)


@command("webhook-secret", app=app)
async def webhook_secret(
    journal: AnyJournal,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The URL of a webhook, exactly as it was given to Handrail.")
    ],
) -> Report:
    """Print the secret with which the receiver at a URL verifies notifications. It follows from the journal's key."""
    address = Address(url)
    if not address.is_webhook:
        raise UsageError(f"{address} is not a webhook, so nothing is signed. Pass an https:// URL.")
    secret = address.secret(journal.key)
    return Report({"secret": secret}, secret)


@app.command()
def upgrade(
    check: Annotated[
        bool, typer.Option("--check", help="Verify the journal and say what would be done. Writes nothing.")
    ] = False,
    journal: JournalFile = None,
    as_json: Json = False,
) -> None:
    """Upgrade a journal that an earlier release wrote. Stop every process that uses it first.

    Everything is verified before anything is written, and a journal that was altered is refused. A file is copied before it is changed;
    back up a database yourself. A journal that needs no upgrade is left as it is.
    """
    try:
        found = upgrade_journal(journal_url(journal) or journal_file(journal, create=False), check=check)
    except Exception as error:
        raise typer.Exit(fail(error, as_json=as_json)) from None
    if as_json:
        print_json({"ok": True, "exit_code": DONE, "check": check, **msgspec.to_builtins(found)})
    else:
        print_line(_shown(found, check))


def _shown(found: Upgrade, check: bool) -> str:
    name = escape_line(found.journal)
    if found.found == found.version:
        return f"{name} has schema {found.found} and needs no upgrade."
    runs = ", ".join(f"{number} {status}" for status, number in found.runs.items())
    total = counted(sum(found.runs.values()), "run")
    seen = f"{total}{f' ({runs})' if runs else ''} and {counted(found.records, 'record')}, all verified"
    copy = escape_line(found.copy)
    if check:
        backup = (
            f"It will be copied to {copy} first." if copy else "Back it up first, for example with pg_dump."
        )
        return f"{name} can be upgraded from schema {found.found} to {found.version}: {seen}. {backup} Nothing was written."
    kept = f" It was copied to {copy} before." if copy else ""
    return f"{name} was upgraded from schema {found.found} to {found.version}: {seen}.{kept}"
