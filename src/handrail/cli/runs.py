"""`handrail runs`: its commands and their options. What they do is imported when one of them runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="runs",
    help="Look at recorded runs and go on with them: resume, answer, approvals, cancel, fork, undo, replay.",
    epilog="Exit codes: 0 done; 1 it could not be done, or the replay differs; 2 the command line is wrong; "
    "4 the run's deadline or budget was spent; 5 the run waits for an answer; 130 cancelled by Ctrl-C.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Run = Annotated[str, typer.Argument(help="The run's id, or how it begins.")]
Journal = Annotated[
    Path | None,
    typer.Option(
        "--journal", help="The journal's file. Default: $HANDRAIL_JOURNAL, else .handrail/runs.db here."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Files = Annotated[
    Path | None,
    typer.Option("--files", help="The folder the run works in. Default: the one it was recorded with."),
]
App = Annotated[
    str | None,
    typer.Option("--app", help="The prompt, as module:name. Default: the one the run was begun with."),
]
As = Annotated[str | None, typer.Option("--as", help="The id of the new run. Default: one made up.")]


def _do(name: str, journal: Path | None, as_json: bool, **given: Any) -> None:
    from handrail.cli import runs_doing

    command: Callable[..., Any] = getattr(runs_doing, name)
    raise typer.Exit(runs_doing.carry_out(command, journal, as_json, given))


@app.command("list")
def list_(
    standing: Annotated[
        list[str] | None,
        typer.Option(
            "--standing",
            "-s",
            help="Only those that are: running, parked, interrupted, done, failed, cancelled.",
        ),
    ] = None,
    session: Annotated[str | None, typer.Option("--session", help="Only those of this session.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 50,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """List runs, the newest first."""
    _do("list_", journal, as_json, standing=standing or [], session=session, limit=limit)


@app.command()
def show(
    run: Run,
    full: Annotated[bool, typer.Option("--full", help="Whole texts and diffs, also the long ones.")] = False,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Show a run as a tree: answers, calls, times, cost, diffs, questions."""
    _do("show", journal, as_json, run=run, full=full)


@app.command()
def resume(
    run: Run,
    model: Annotated[
        str | None, typer.Option(help="Another model: provider:name, or module:name of one of your own.")
    ] = None,
    approve: Annotated[
        str,
        typer.Option(
            help="What needs approval: ask whoever is there (nobody: it waits for `answer`), all, or strict (no)."
        ),
    ] = "ask",
    app_: App = None,
    files: Files = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that waits, or whose process ended."""
    _do(
        "resume",
        journal,
        as_json,
        run=run,
        model=model,
        approve=approve,
        app=app_,
        files=files,
        asks=not as_json,
    )


@app.command()
def answer(
    run: Run,
    question: Annotated[
        str | None, typer.Argument(help="Which question; may be left out where there is one.")
    ] = None,
    value: Annotated[str | None, typer.Option("--value", help="The answer, as JSON.")] = None,
    approve: Annotated[
        bool | None, typer.Option("--approve/--deny", help="The answer to an approval.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why; the model is told.")] = "",
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Answer a question that a run waits for. Without --value, --approve or --deny it is asked here."""
    _do("answer", journal, as_json, run=run, question=question, value=value, approve=approve, reason=reason)


@app.command()
def cancel(run: Run, journal: Journal = None, as_json: Json = False) -> None:
    """End a run. One that a process has is stopped by that process within seconds."""
    _do("cancel", journal, as_json, run=run)


@app.command()
def approvals(
    run: Run,
    revoke: Annotated[
        str | None, typer.Option("--revoke", help="Take this one back, by its number here or its id.")
    ] = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """List what was approved or denied for the whole session of a run, and take it back."""
    _do("approvals", journal, as_json, run=run, revoke=revoke)


@app.command()
def fork(
    run: Run,
    step: Annotated[int, typer.Argument(help="How many of the model's answers to keep; 0 begins anew.")],
    new: As = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Make another run with the same beginning. Files stay as they are."""
    _do("fork", journal, as_json, run=run, step=step, new=new)


@app.command()
def undo(
    run: Run,
    call: Annotated[str, typer.Argument(help="The call's id, as `show` has it.")],
    files: Files = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Take back what a call changed, unless something was built on it. The model is told."""
    _do("undo", journal, as_json, run=run, call=call, files=files)


@app.command()
def replay(
    run: Run,
    app_: App = None,
    files: Annotated[
        Path | None,
        typer.Option("--files", help="A folder as it was when the run began. Default: the run's own."),
    ] = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Go through a run with the code of today, and say what differs first. Nothing is changed."""
    _do("replay", journal, as_json, run=run, app=app_, files=files)


@app.command()
def export(
    run: Run,
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Write a run into one file, without secrets."""
    _do("export", journal, as_json, run=run, path=path)


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    new: As = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Bring a run in that was exported."""
    _do("import_", journal, as_json, path=path, new=new)


@app.command()
def forget(
    before: Annotated[
        str | None, typer.Option(help="Those that ended before: 30d, 12h, or 2026-01-31.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="All but the newest so many.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.")] = False,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Take runs that are over out of the journal, whole sessions at a time."""
    _do("forget", journal, as_json, before=before, keep=keep, dry=dry_run)
