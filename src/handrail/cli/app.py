"""The commands and their options. What they do is imported when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from handrail.cli.asked import Asked, Files, JournalFile, Model, takes_asked
from handrail.cli.codes import CODES
from handrail.cli.runs import app as recorded_runs

_EPILOG = "Exit codes: " + "; ".join(f"{code} {words}" for code, words in CODES) + "."

app = typer.Typer(
    name="handrail",
    help="Run agents kept in Markdown files, with tools whose every call can be approved, watched and undone.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from handrail import __version__

        typer.echo(f"handrail {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """The options of the program itself."""


@app.command(epilog=_EPILOG)
@takes_asked
def run(
    asked: Asked,
    given: Annotated[
        str | None,
        typer.Argument(metavar="INPUT", help="What to say to it; - or nothing reads standard input."),
    ] = None,
    attach: Annotated[
        list[Path] | None, typer.Option("--attach", "-a", help="A file to hand over; may be repeated.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: answer, usage, cost, errors. Nobody is asked."),
    ] = False,
) -> None:
    """Run a worker once. The answer goes to standard output; piped, everything else to standard error."""
    from handrail.cli import commands

    raise typer.Exit(commands.run(asked, given, attach or [], as_json))


@app.command(epilog=_EPILOG)
@takes_asked
def chat(asked: Asked) -> None:
    """Talk with a worker. Ctrl-C cancels what is running, Ctrl-D leaves, /help says more."""
    from handrail.cli import commands

    raise typer.Exit(commands.chat(asked))


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The folder to make. It must not be there yet.")],
) -> None:
    """Make a starter folder that runs at once: two workers, their tools, files to work on."""
    from handrail.cli import starting

    raise typer.Exit(starting.new(name))


@app.command()
def workers(
    words: Annotated[
        list[str], typer.Argument(metavar="[show|check] PLACE", help="A folder; with show, a worker.")
    ],
) -> None:
    """List the workers of a folder; `show` one in full; `check` a folder: all that is wrong, by file and line."""
    from handrail.cli import registry

    raise typer.Exit(registry.workers(words))


@app.command(epilog=_EPILOG)
def serve(
    served: Annotated[
        str,
        typer.Argument(
            metavar="APP",
            help="A module (pkg.mod, pkg.mod:prompt, app.py), a worker's file, or a folder with workers.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Where to listen. Any address but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8600,
    token: Annotated[
        str | None,
        typer.Option(help="What a client has to know. Better kept in $HANDRAIL_TOKEN, where nobody sees it."),
    ] = None,
    model: Model = None,
    files: Files = None,
    journal: JournalFile = None,
    approve: Annotated[
        str, typer.Option(help="What needs approval: ask on the page, all (yes), or strict (no).")
    ] = "ask",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name this server is reached by, as proxy.example; may be repeated."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A page elsewhere that may use it, as https://chat.example; may be repeated."),
    ] = None,
) -> None:
    """Serve an app: a page for people, AG-UI for programs. Ctrl-C stops it and loses nothing."""
    from handrail.cli import serving

    asked = serving.ServeAsked(
        app=served,
        host=host,
        port=port,
        token=token,
        model=model,
        files=files,
        journal=journal,
        approve=approve,
        open=open_browser,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
    )
    raise typer.Exit(serving.serve(asked))


app.add_typer(recorded_runs)
