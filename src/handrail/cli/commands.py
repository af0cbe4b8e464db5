"""The program's commands. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from handrail.cli.command_options import (
    FleetOptions,
    JournalFile,
    Json,
    KeepRuns,
    McpOptions,
    Message,
    ServeOptions,
    SpendCaps,
    WorkerOptions,
    takes_options,
)
from handrail.cli.outcome import EXIT_CODES

_EPILOG = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES) + "."

app = typer.Typer(
    name="handrail",
    help="Run agents, from Markdown files or Python modules, whose tool calls can be watched, approved and undone.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Attach = Annotated[
    list[Path] | None,
    typer.Option("--attach", "-a", metavar="FILE", help="A file to send with the message; repeatable."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from handrail import __version__

        typer.echo(f"handrail {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Declare the program's own options."""


@app.command(epilog=_EPILOG)
@takes_options(WorkerOptions)
def run(
    options: WorkerOptions,
    message: Message = None,
    attach: Attach = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object: answer, usage, cost, errors. Asks no questions."),
    ] = False,
) -> None:
    """Run a worker or an agent once. If standard output is piped, only the answer goes there."""
    from handrail.cli import run_command

    raise typer.Exit(run_command.run(options, message, attach or [], as_json))


@app.command(epilog=_EPILOG)
@takes_options(WorkerOptions)
def chat(options: WorkerOptions) -> None:
    """Talk with a worker or an agent. Ctrl-C cancels a run, Ctrl-D leaves, /help lists the commands."""
    from handrail.cli import chat_command

    raise typer.Exit(chat_command.chat(options))


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The folder to create. It must not exist yet.")],
) -> None:
    """Create a folder with two workers that are ready to run, their tools and a file to work on."""
    from handrail.cli import workers_commands

    raise typer.Exit(workers_commands.new(name))


@app.command()
def workers(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[show|check] PLACE",
            help="A folder; for `show` a worker; for `check` a folder or a worker's file. `check` lists mistakes by line.",
        ),
    ],
    imports: Annotated[
        bool, typer.Option("--import", help="For `check`: run tools.py, which finds more mistakes.")
    ] = False,
) -> None:
    """List, show or check workers. Without `show` or `check`, lists the workers of a folder.

    Their tools.py is parsed, and nothing in it runs.
    """
    from handrail.cli import workers_commands

    raise typer.Exit(workers_commands.workers(words, imports))


@app.command(epilog=_EPILOG)
@takes_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve an app, as a page for people and as AG-UI for programs. Ctrl-C stops it without losing anything."""
    from handrail.cli import serve_commands

    raise typer.Exit(serve_commands.serve(options))


@app.command(epilog=_EPILOG)
@takes_options(FleetOptions)
def worker(
    options: FleetOptions,
    dispatcher: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="The engine that starts runs: dbos or procrastinate, on the database that $HANDRAIL_DISPATCH_URL "
            "names. Default: workers take runs from the journal.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, metavar="N", help="Maximum runs to execute at once.")
    ] = 10,
    host: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="This host's name, which runs in a folder are pinned to."),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long runs may take to finish after SIGTERM."),
    ] = 30.0,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve /metrics and /health at this address, such as 127.0.0.1:9464, to everybody who can reach it.",
        ),
    ] = None,
    keep_runs: KeepRuns = None,
    spend: SpendCaps = None,
) -> None:
    """Execute an app's runs, which wait in a journal.

    Start as many workers as you like, on any machine that can open the journal.
    """
    from handrail.cli import fleet_commands

    raise typer.Exit(
        fleet_commands.work(options, dispatcher, limit, host, grace, listen, keep_runs or (), spend)
    )


@app.command(epilog=_EPILOG)
@takes_options(FleetOptions)
def submit(
    options: FleetOptions,
    message: Message = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When to begin: 2026-01-31T08:00 in this machine's time zone, or after 30s, 15m, 12h or 7d.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="SPAN", help="Submit it again every 30s, 15m, 12h or 7d, until you cancel the next run."
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(metavar="TEXT", help="Submitting with the same key again returns the first run.")
    ] = "",
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="The session to continue. Its runs take turns.")
    ] = None,
    attach: Attach = None,
    as_json: Json = False,
) -> None:
    """Leave a run in the journal for a worker to execute, and print its id."""
    from handrail.cli import fleet_commands

    raise typer.Exit(fleet_commands.submit(options, message, at, every, key, session, attach or [], as_json))


@app.command(epilog=_EPILOG)
@takes_options(McpOptions)
def mcp(options: McpOptions) -> None:
    """Serve an app's tools, agents and workers to MCP clients, over standard input and output or HTTP."""
    from handrail.cli import serve_commands

    raise typer.Exit(serve_commands.serve_mcp(options))


@app.command()
def audit(
    who: Annotated[
        str | None, typer.Option("--who", metavar="NAME", help="Only what this person did.")
    ] = None,
    after: Annotated[
        int, typer.Option("--after", min=0, metavar="N", help="Only entries after this number.")
    ] = 0,
    journal: JournalFile = None,
) -> None:
    """Print a server's audit log: who signed in, saw, answered or undid what. Each line is a JSON object."""
    from handrail.cli import users_commands

    raise typer.Exit(users_commands.audit(journal, who, after))


@app.command()
def usage(
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Divide by day, person, app, model or tool; repeatable. Default: day and model.",
        ),
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Begin 12h, 30d or 4w ago, or at a date: 2026-01-31.")
    ] = "30d",
    who: Annotated[str | None, typer.Option(metavar="NAME", help="Only this person's runs.")] = None,
    zone: Annotated[
        str, typer.Option(metavar="ZONE", help="The time zone of the days, such as Europe/Berlin.")
    ] = "UTC",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    journal: JournalFile = None,
    as_json: Json = False,
) -> None:
    """Print what runs have used and spent: requests, tokens, cost and calls. Every record is verified."""
    from handrail.cli import usage_command

    raise typer.Exit(usage_command.show(journal, by or (), as_csv, as_json, since=since, who=who, zone=zone))


@app.command()
def models(as_json: Json = False) -> None:
    """List the models that work here, and say what the others need: a key, a server or a package."""
    from handrail.cli import models_commands

    raise typer.Exit(models_commands.models(as_json))


@app.command()
def doctor(
    app: Annotated[
        str | None,
        typer.Argument(metavar="[APP]", help="An app to load, as for `serve`. Its code is executed."),
    ] = None,
    journal: JournalFile = None,
    network: Annotated[
        bool, typer.Option("--network", help="Also ask the servers of models, which others may see.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    as_json: Json = False,
) -> None:
    """Check Python, extras, sandbox, journal, key, clock, database and models, and say what to do about problems.

    Exits with 1 if there is a problem. Nothing is created or changed.
    """
    from handrail.cli import doctor_command

    raise typer.Exit(doctor_command.doctor(app, journal, network, strict, as_json))


class _Group(TyperGroup):
    """A group whose commands are in a module of their own, which is loaded only when they are needed."""

    def _load(self) -> Any:
        module = "models" if self.name == "model" else self.name
        return typer.main.get_command(import_module(f"handrail.cli.{module}_commands").app)

    def list_commands(self, ctx: Any) -> list[str]:
        return self._load().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._load().get_command(ctx, cmd_name)


def _add_group(name: str, help: str, epilog: str | None = None) -> None:
    app.add_typer(
        typer.Typer(
            name=name,
            cls=_Group,
            help=help,
            epilog=epilog,
            no_args_is_help=True,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"]},
        )
    )


_add_group("model", "Serve the embedded model to other programs.")
_add_group(
    "runs",
    "Look at recorded runs and continue them. A run is named by its id, or by the beginning of its id.",
    "Exit codes: 0 done; 1 the command failed, or the replay differs; 2 the command line is wrong; "
    "4 the run reached its deadline or budget; 5 the run waits for an answer; 130 cancelled by Ctrl-C.",
)
_add_group(
    "users",
    "Manage a server's users and their sessions, which are stored beside the journal.",
)
_add_group(
    "workspaces",
    "Copy files into workspaces and out of them. A run works in one with --files workspace:NAME.",
)
_add_group(
    "journal",
    "Back up a journal while it is in use, restore it, and upgrade one that an earlier release wrote.",
)
