"""`handrail users` and `handrail audit`: who may use a server, and what they did."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import sys
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from handrail.cli.command_options import JournalFile, open_journal, prepare_journal
from handrail.cli.outcome import DONE, FAILED, UsageError, fail, journal_path, journal_url, print_error
from handrail.notify import Address
from handrail.serve.people import People, people_path
from handrail.text.rendering import counted, escape_line
from handrail.text.terminal import is_terminal

app = typer.Typer(name="users", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

_FIRST = "Restart servers that are already running: until then, they let people in by link or token, and no user can sign in."

Name = Annotated[str, typer.Argument(help="The user's name.")]
Addresses = Annotated[
    list[str] | None,
    typer.Option(
        "--notify",
        metavar="URL",
        help="Where to tell the user about questions that wait for them: a webhook, or a URL that apprise reaches; repeatable.",
    ),
]


@app.command()
def add(
    name: Name,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="viewer, user, approver, admin, or another role that a policy requires; repeatable. Default: user.",
        ),
    ] = None,
    password: Annotated[
        bool,
        typer.Option(
            "--password",
            help="Ask for a password, or read it from standard input, instead of generating a token.",
        ),
    ] = False,
    notify: Addresses = None,
    journal: JournalFile = None,
) -> None:
    """Add a user, and print their token unless --password is given. Only hashes of tokens and passwords are stored."""
    with _people(journal) as people:
        addresses = _checked(notify)
        is_first = not people.has_users()
        secret = people.add(name, roles or (), _read_password(name) if password else None, addresses)
        found = people.find(name)
        people.note("", "user added", user=name, roles=sorted(found.roles if found else ()))
        typer.echo(f"Added {name} with roles: {', '.join(sorted(found.roles if found else ()))}.")
        if not password:
            typer.echo(f"Their token, which will not be shown again: {secret}")
            typer.echo(
                f"Sign in on the page with it as the password. Programs send `Authorization: Bearer {name}:TOKEN`."
            )
        _echo_secrets(addresses, journal)
        if is_first:
            typer.echo(_FIRST)


@app.command()
def notify(
    name: Name,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="[URL]...", help="As for --notify of `users add`. None: tell them nothing."),
    ] = None,
    journal: JournalFile = None,
) -> None:
    """Replace the addresses at which a user is told about questions that wait for them."""
    with _people(journal) as people:
        addresses = _checked(urls)
        if not people.tell_at(name, addresses):
            raise UsageError(f"there is no user {name!r}. `handrail users list` shows the users.")
        shown = [str(each) for each in addresses]
        people.note("", "addresses changed", user=name, addresses=shown)
        typer.echo(f"{name} is told at {', '.join(shown)}." if shown else f"{name} is not told anything.")
        _echo_secrets(addresses, journal)


@app.command()
def copy(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A journal in a file, such as runs.db, or the file of its users."
        ),
    ],
    journal: JournalFile = None,
) -> None:
    """Copy the users of another journal, with their roles, tokens and passwords, for example from a file to PostgreSQL."""
    with _people(journal) as people:
        beside = people_path(Path(file))
        path = beside if beside.exists() else Path(file)
        if not path.is_file():
            raise UsageError(
                f"there is no file {str(beside)!r}. A server keeps its users beside its journal."
            )
        is_first = not people.has_users()
        with contextlib.closing(People(path)) as others:
            added = people.copy(others)
            left = [name for name, *_ in others.list() if name not in added]
        for name in added:
            found = people.find(name)
            people.note("", "user added", user=name, roles=sorted(found.roles if found else ()))
            typer.echo(f"Added {name}.")
        for name in left:
            typer.echo(f"Left {name} as they are, because there is already a user of this name.")
        if added and is_first:
            typer.echo(_FIRST)


@app.command(name="list")
def list_users(journal: JournalFile = None) -> None:
    """List the users, their roles, and their sessions."""
    with _people(journal) as people:
        sessions = people.sessions()
        users = people.list()
        if not users:
            typer.echo("There are no users. `handrail users add NAME` adds one.")
        addresses = people.addresses()
        for name, roles, _ in users:
            mine = [each for each in sessions if each.name == name]
            told = "".join(f"  {each}" for each in addresses.get(name, ()))
            typer.echo(f"{name}  {', '.join(sorted(roles))}  {counted(len(mine), 'session')}{told}")
        for each in sessions:
            until = datetime.fromtimestamp(each.ends_at, UTC)
            typer.echo(
                f"  session {each.id}  {each.name}  from {each.address} at {each.host}, until {until:%Y-%m-%d %H:%M} UTC"
            )


@app.command()
def remove(name: Name, journal: JournalFile = None) -> None:
    """Remove a user, and end their sessions. Their conversations stay in the journal."""
    with _people(journal) as people:
        if not people.remove(name):
            raise UsageError(f"there is no user {name!r}. `handrail users list` shows the users.")
        people.note("", "user removed", user=name)
        typer.echo(f"Removed {name}.")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="A user's name, `local`, or the id of a session.")],
    journal: JournalFile = None,
) -> None:
    """End all sessions of a user, or one session by its id. A running server refuses them from then on."""
    with _people(journal) as people:
        ended = people.revoke(name=name) or people.revoke(id=name)
        if not ended:
            raise UsageError(
                f"{name!r} has no session and is not the id of one. `handrail users list` shows the sessions."
            )
        people.note("", "sessions revoked", of=name, ended=ended)
        typer.echo(f"{counted(ended, 'session')} ended.")


def _checked(urls: list[str] | None) -> list[Address]:
    """Return addresses. Raises `DefinitionError` if one is invalid, or if apprise is needed for it and can't use it."""
    from handrail.notify.sender import check

    addresses = [Address(url) for url in urls or ()]
    for each in addresses:
        asyncio.run(check(each))
    return addresses


def _echo_secrets(addresses: list[Address], journal: str | None) -> None:
    """Print the secrets with which the receivers of webhooks verify messages."""
    webhooks = [each for each in addresses if each.is_webhook]
    if webhooks:
        with contextlib.closing(open_journal(journal)) as opened:
            for each in webhooks:
                typer.echo(
                    f"Messages to {each} are signed. Its receiver verifies them with: {each.secret(opened.key)}"
                )


def audit(journal: str | None, who: str | None, after: int) -> int:
    """Print the audit log as JSON lines, and return the exit code. An error is printed."""
    try:
        path = people_path(journal_path(journal))
        if journal_url(journal) is None and not path.exists():
            raise UsageError(f"there is no audit log at {path}. A server writes one beside its journal.")
        with _open(journal) as people:
            for entry in people.audit(who=who, after=after):
                at = datetime.fromtimestamp(entry["at"], UTC).isoformat()
                sys.stdout.write(json.dumps({**entry, "at": at}) + "\n")
    except Exception as error:
        return fail(error)
    return DONE


@contextlib.contextmanager
def _people(journal: str | None) -> Generator[People]:
    """Open the users of a journal. An error inside this block is printed and ends the command."""
    try:
        with _open(journal) as people:
            yield people
    except typer.Exit:
        raise
    except Exception as error:
        raise typer.Exit(fail(error)) from None


@contextlib.contextmanager
def _open(journal: str | None) -> Generator[People]:
    """Open the users of a journal, in its database or in the file beside it. The journal itself is opened only for a database."""
    with contextlib.ExitStack() as during:
        opened = None
        if journal_url(journal) is None:
            file = people_path(prepare_journal(journal))
        else:
            file = people_path(journal_path(journal))
            opened = during.enter_context(contextlib.closing(open_journal(journal)))
        yield during.enter_context(contextlib.closing(People.of(opened, file)))


def _read_password(name: str) -> str:
    if not is_terminal(sys.stdin):
        return sys.stdin.readline().rstrip("\n")
    first = getpass.getpass(f"Password for {escape_line(name)}: ")
    if getpass.getpass("Repeat the password: ") != first:
        print_error("the two passwords differ. No user was added.")
        raise typer.Exit(FAILED)
    return first
