"""`handrail runs`: the commands that work on recorded runs, and `command`, which registers a command that works on a journal."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
import typer

from handrail import runs
from handrail.cli import runs_view as view
from handrail.cli.command_options import (
    JournalFile,
    Json,
    ModelName,
    StartupFiles,
    parse_approvals,
    prepare_journal,
    search_here,
    with_signature,
)
from handrail.cli.outcome import (
    CANCEL_NOTE,
    CANCELLED,
    DONE,
    FAILED,
    PARKED,
    Failure,
    UsageError,
    classify_stop,
    fail,
    journal_path,
    journal_url,
    print_json,
)
from handrail.cli.recorded_run import Program, RecordedRun, continuation
from handrail.cli.streams import terminal_environment
from handrail.clock import SYSTEM_CLOCK
from handrail.errors import RunError, RunParked
from handrail.journal.any_journal import AnyJournal, open_by_name
from handrail.journal.location import former_journals
from handrail.journal.records import OVER, When, queue_of
from handrail.question import Answer, Question
from handrail.runs.catalog import Standing, approval_json, standing_of
from handrail.text.rendering import counted, escape

if TYPE_CHECKING:
    from handrail.journal.protocol import Accounts

app = typer.Typer(name="runs", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

RunId = Annotated[str, typer.Argument(help="The run's id, or its beginning.")]
CallId = Annotated[str, typer.Argument(help="The call's id, as `show` prints it.")]
Principal = Annotated[
    str | None, typer.Option("--principal", metavar="NAME", help="Everything of this person, not of one run.")
]


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
            raise typer.Exit(run_report(command, given["journal"], arguments, as_json, creates_journal))

        app.command(name)(with_signature(run, [*own, *(each for each in shared if each.name not in names)]))
        return command

    return register


def run_report(
    command: Command, journal: str | None, arguments: dict[str, Any], as_json: bool, creates_journal: bool
) -> int:
    """Run a command on its journal, print its report, and return the exit code."""
    try:
        search_here()
        named = journal_url(journal) or journal_file(journal, creates_journal)

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


def journal_file(given: str | None, create: bool) -> Path:
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


STANDINGS = get_args(Standing)
_HOURS = {"h": 1, "d": 24, "w": 168}

Files = Annotated[
    Path | None,
    typer.Option(
        "--files",
        metavar="FOLDER",
        help="The folder the run works in. Default: the one it was recorded with.",
    ),
]
FirstFiles = Annotated[
    Path | None,
    typer.Option("--files", metavar="FOLDER", help="A folder as it was when the run began."),
]
App = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="APP",
        help="The code: module:name, a file (app.py:name), or a worker's file. Default: what the run began with.",
    ),
]
NewId = Annotated[
    str | None, typer.Option("--as", metavar="ID", help="The id of the new run. Default: a generated one.")
]


# --- showing runs ---


@command("list")
async def list_runs(
    journal: AnyJournal,
    standing: Annotated[
        list[str] | None,
        typer.Option(
            "--standing",
            "-s",
            metavar="STANDING",
            help=f"Only runs that are: {', '.join(STANDINGS)}; repeatable.",
        ),
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Only runs of this session.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, metavar="N", help="Maximum number of runs.")
    ] = 50,
) -> Report:
    """List runs, newest first."""
    wanted: Any = standing or []
    unknown = [each for each in wanted if each not in STANDINGS]
    if unknown:
        raise UsageError(f"--standing {unknown[0]!r} is not one of {', '.join(STANDINGS)}.")
    lines = await runs.list_runs(journal, session_id=session, standing=wanted, limit=limit)
    now = SYSTEM_CLOCK.now().timestamp()
    workers = await journal.queue.workers()
    data = [{**view.run_data(line), "waits_for": view.waits_for(line, workers, now)} for line in lines]
    return Report({"runs": data}, view.run_table(lines, now, workers))


@command("show")
async def show(
    journal: AnyJournal,
    run: RunId,
    full: Annotated[bool, typer.Option("--full", help="Don't shorten texts and diffs.")] = False,
) -> Report:
    """Show a run as a tree of answers, calls and questions, with times, cost and diffs."""
    recorded = await RecordedRun.find(journal, run)
    tree = await runs.show(journal, recorded.id)
    advice = [f"To give these changes up: {recorded.next_command('discard')} CALL"] if tree.unapplied else []
    return Report(view.tree_data(tree), view.run_tree(tree, full), *advice)


_LOOK_SECONDS = 0.5


@command("watch")
async def watch(journal: AnyJournal, run: RunId, as_json: Json = False) -> Report:
    """Follow a run until it ends, whichever process executes it, and show its questions. Ctrl-C leaves the run alone.

    With --json, prints what the run has done once it has ended.
    """
    from handrail.cli.run_lines import RunLines

    recorded = await RecordedRun.find(journal, run)
    lines = RunLines(journal.path)
    try:
        while True:
            seen = journal.queue.changes()
            tree = await runs.show(journal, recorded.id)
            for each in [] if as_json else lines.new(tree):
                view.print_item(each)
            sys.stdout.flush()
            if tree.standing in OVER:
                return Report(view.tree_data(tree), code=DONE if tree.standing == "done" else FAILED)
            await _next_look(journal, seen)
    except asyncio.CancelledError:
        return Report({"run_id": recorded.id}, "Not watched any more. The run goes on.", code=CANCELLED)


async def _next_look(journal: AnyJournal, seen: int | None) -> None:
    """Wait until the journal has changed, or for a moment if only its database knows. A lease that ended changes nothing in it."""
    for _ in range(10):
        await asyncio.sleep(_LOOK_SECONDS)
        if seen is None or journal.queue.changes() != seen:
            return


@command("diff")
async def diff(
    journal: AnyJournal,
    run: RunId,
    other: Annotated[str, typer.Argument(help="The run to compare it with.")],
) -> Report:
    """Compare two runs: where they first differ, and their calls, files and cost."""
    first, second = await RecordedRun.find(journal, run), await RecordedRun.find(journal, other)
    found = await runs.compare(journal, first.id, second.id)
    return Report(view.comparison_data(found), *view.comparison_items(found))


@command("verify")
async def verify(
    journal: AnyJournal,
    run: Annotated[str | None, typer.Argument(help="Only this run and its session. Default: all.")] = None,
) -> Report:
    """Check that the journal has not been altered from outside, and list the records that have been."""
    run_id = None if run is None else (await RecordedRun.find(journal, run)).id
    found = await journal.runs.verify(run_id)
    code = FAILED if found.altered else DONE
    return Report(view.verification_data(found), *view.verification_lines(found), code=code)


# --- continuing runs ---


@command("resume")
async def resume(
    journal: AnyJournal,
    run: RunId,
    model: ModelName = None,
    approve: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="What happens to calls that need approval. ask: ask at the terminal, park elsewhere; "
            "all: approve; strict: deny.",
        ),
    ] = "ask",
    app_: App = None,
    files: Files = None,
    startup_files: StartupFiles = None,
    mcp: Annotated[
        Path | None,
        typer.Option(
            "--mcp", metavar="FILE", help="The mcp.json to use in place of the one that the run began with."
        ),
    ] = None,
    as_json: Json = False,
) -> Report:
    """Continue a parked or interrupted run. Open questions are asked at the terminal; elsewhere they park it again."""
    from handrail.cli.activity import answer_text, attachment_line, attachments_data
    from handrail.environment import LaterEnvironment

    mode = parse_approvals(approve)
    recorded = await RecordedRun.find(journal, run)
    program, added, notes = await recorded.load_program(app_).with_servers(mcp, recorded.row.record)
    terminal = terminal_environment()
    attended = not as_json and terminal.run_mode == "user"
    environment: Any = terminal if attended else LaterEnvironment()
    try:
        async with recorded.open_folder(files, startup_files) as folder:
            given: Any = {"environment": environment, "filesystem": folder, "approvals": mode, "tools": added}
            if program.worker is not None:
                registry, name = program.worker.registry, program.worker.name
                models = program.models(model, recorded.row.record)
                response = await registry.resume(name, recorded.id, journal=journal, models=models, **given)
            else:
                adapter = program.adapter(model, recorded.row.record.model)
                response = await adapter.resume(recorded.id, program.prompt, journal=journal, **given)
    except RunParked as parked:
        return _parked_report(recorded, program, parked)
    tree = await runs.show(journal, recorded.id)
    denied = [call.tool for call in tree.calls if call.was_not_approved]
    code, note = classify_stop(response.stop_reason, denied)
    data = {
        "run_id": recorded.id,
        "status": "done",
        "text": response.text,
        "attachments": attachments_data(response),
        "stop_reason": response.stop_reason,
        "not_approved": denied,
        "code_changed": program.changed,
    }
    ending = [note] if note else []
    made = [attachment_line(each) for each in response.attachments]
    return Report(data, *program.notes, *notes, escape(answer_text(response)), *made, *ending, code=code)


def _parked_report(recorded: RecordedRun, program: Program, parked: RunParked) -> Report:
    data = {
        "run_id": recorded.id,
        "status": "parked",
        "questions": [view.question_data(question) for question in parked.questions],
        "code_changed": program.changed,
    }
    if any(question.secret for question in parked.questions):
        advice = f"Answer at a terminal with: {recorded.next_command('resume')}"
    else:
        advice = f"Answer with: {recorded.next_command('answer')}"
    lines = [view.question_text(question) for question in parked.questions]
    return Report(data, *program.notes, "The run waits for an answer:", *lines, advice, code=PARKED)


@command("answer")
async def answer(
    journal: AnyJournal,
    run: RunId,
    question: Annotated[
        str | None, typer.Argument(help="Which question; needed only if there are several.")
    ] = None,
    value: Annotated[str | None, typer.Option("--value", metavar="JSON", help="The answer, as JSON.")] = None,
    approve: Annotated[
        bool | None, typer.Option("--approve/--deny", help="The answer to an approval.")
    ] = None,
    reason: Annotated[
        str,
        typer.Option(
            "--reason",
            metavar="TEXT",
            help="The reason for --approve or --deny. The model sees it only if you deny.",
        ),
    ] = "",
    digest: Annotated[
        str,
        typer.Option(
            "--digest",
            metavar="HEX",
            help="The digest that `show` prints with the question; needed with --approve and --value.",
        ),
    ] = "",
) -> Report:
    """Answer a run's open question. Without --value, --approve or --deny, asks it at the terminal."""
    recorded = await RecordedRun.find(journal, run)
    asked = await recorded.find_question(question)
    if value is not None and approve is not None:
        raise UsageError("--value can't be combined with --approve or --deny. Pass only one of them.")
    if asked.secret:
        from handrail.journal.answers import secret_refused

        raise secret_refused(asked)  # raised before the user types a secret that would be refused
    if approve is not None and asked.kind != "approval":
        raise UsageError(f"the question {asked.name!r} is not an approval. Give its answer: --value JSON.")
    given: Any
    if approve is not None:
        given = {"approved": approve, **({"reason": reason} if reason else {})}
    elif value is not None:
        try:
            given = json.loads(value)
        except ValueError as error:
            raise UsageError(
                f"--value is not JSON: {error}. Text needs double quotes: '\"like this\"'."
            ) from None
    else:
        return await _record_answer(recorded, asked, await _ask_here(asked))
    if value is not None or approve:
        _check_seen(recorded, asked, digest)
    said = Answer(question_id=asked.id, digest=asked.digest, by=asked.principal, value=given, reason=reason)
    return await _record_answer(recorded, asked, said)


def _check_seen(recorded: RecordedRun, asked: Question, digest: str) -> None:
    """Raise `UsageError` unless `digest` is the question's digest or a prefix of it with at least 16 digits.

    The digest covers everything the user was shown.
    """
    show = recorded.next_command("show")
    if not digest:
        raise UsageError(f"--digest is missing. Pass the digest that `{show}` prints with the question.")
    if len(digest) < 16 or not asked.digest.startswith(digest):
        raise UsageError(f"--digest does not match the open question. Pass its first 16 digits: `{show}`.")


async def _ask_here(asked: Question) -> Answer:
    terminal = terminal_environment()
    if terminal.run_mode != "user":
        raise UsageError("there is no answer. Give --value JSON, or --approve or --deny for an approval.")
    return await terminal.ask(asked)


async def _record_answer(recorded: RecordedRun, asked: Question, answer: Answer) -> Report:
    recorded.journal.questions.answer(answer)
    left = len(await recorded.journal.questions.open(recorded.id))
    then = f"{left} more to answer." if left else continuation(recorded.row, recorded.next_command("resume"))
    data = {"run_id": recorded.id, "question": asked.id, "left": left}
    return Report(data, f"Answered {asked.name}. {then}")


# --- changing runs ---


@command("cancel")
async def cancel(journal: AnyJournal, run: RunId) -> Report:
    """Cancel a run. If it is running in another process, that process stops it within seconds."""
    row = await runs.cancel(journal, (await RecordedRun.find(journal, run)).id)
    data = {"run_id": row.record.id, "status": row.status, "stopping": row.stopping}
    if row.status in OVER:
        return Report(data, f"{row.record.id} is {row.status}.")
    return Report(
        data, f"{row.record.id}: process {row.owner} was asked to stop the run, which takes a few seconds."
    )


_TOLD_BY: Mapping[When, str] = {
    "now": "now, and its current answer is stopped",
    "next step": "before its next step",
    "afterwards": "when it would be done",
}
_TOLD_IN: Mapping[Standing, str] = {
    "parked": "after the run's questions are answered",
    "queued": "once the run has begun",
    "interrupted": "once the run is resumed",
}


@command("send")
async def send(
    journal: AnyJournal,
    run: RunId,
    text: Annotated[
        str | None, typer.Argument(help="What to say; with --edit, the message's new text.")
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="When the model is told. now: stop its current answer; next-step: before its next step, "
            "which is the default; afterwards: when it would be done.",
        ),
    ] = None,
    edit: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Change this message, which the model was not told yet."),
    ] = None,
    withdraw: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Take this message back, which the model was not told yet."),
    ] = None,
) -> Report:
    """Say something to a run while it works, in any process, or change or take back what its model was not told yet."""
    recorded = await RecordedRun.find(journal, run)
    moment: Any = when and when.replace("-", " ")
    if withdraw is not None:
        if edit is not None or text is not None or when is not None:
            raise UsageError("--withdraw takes a message back as it is. Leave out TEXT, --when and --edit.")
        await runs.withdraw(journal, recorded.id, withdraw)
        return Report({"run_id": recorded.id, "message": {"id": withdraw}}, f"Withdrawn: {escape(withdraw)}.")
    if edit is not None:
        await runs.edit(journal, recorded.id, edit, text, when=moment)
        message = next(each for each in await runs.messages(journal, recorded.id) if each.id == edit)
    elif text is None:
        raise UsageError("TEXT is missing. Say something.")
    else:
        message = (await runs.send(journal, recorded.id, text, when=moment or "next step")).message
    told = _TOLD_IN.get(standing_of(recorded.row)) or _TOLD_BY[message.when]
    data = {"run_id": recorded.id, "message": msgspec.structs.asdict(message)}
    return Report(data, view.message_text(message), f"The model is told {told}.")


Words = Annotated[str, typer.Argument(help="What its model is told with that.")]


@command("pause")
async def pause(journal: AnyJournal, run: RunId, text: Words = "") -> Report:
    """Pause a run before its next step, until `continue` continues it. It takes no process meanwhile, if it can be parked."""
    return await _order(journal, run, text, runs.pause)


@command("stop")
async def stop(journal: AnyJournal, run: RunId, text: Words = "") -> Report:
    """End a run after its current step, with what it has done. Its session's next run reads TEXT."""
    return await _order(journal, run, text, runs.stop)


@command("wrap-up")
async def wrap_up(journal: AnyJournal, run: RunId, text: Words = "") -> Report:
    """Give a run's model one last turn, in which it can't call tools."""
    return await _order(journal, run, text, runs.wrap_up)


@command("continue")
async def go_on(journal: AnyJournal, run: RunId, text: Words = "") -> Report:
    """Continue a paused run. A run that no process executes then also needs `resume`."""
    recorded = await RecordedRun.find(journal, run)
    await runs.go_on(journal, recorded.id, text)
    return Report({"run_id": recorded.id}, f"{recorded.id} is not paused any more.")


async def _order(journal: AnyJournal, run: str, text: str, give: Any) -> Report:
    recorded = await RecordedRun.find(journal, run)
    message = (await give(journal, recorded.id, text)).message
    told = _TOLD_IN.get(standing_of(recorded.row)) or _TOLD_BY["next step"]
    data = {"run_id": recorded.id, "message": msgspec.structs.asdict(message)}
    return Report(data, view.message_text(message), f"The run comes to it {told}.")


@command("adopt")
async def adopt(
    journal: AnyJournal,
    run: RunId,
    app_: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", help="The app to move the run to. Default: the run's own."),
    ] = None,
) -> Report:
    """Move a run to the app's current code, so that workers with that version continue it."""
    from handrail.fleet import FleetApp
    from handrail.run.record.begin import code_of

    recorded = await RecordedRun.find(journal, run)
    row = recorded.row
    if not row.queue:
        raise UsageError(
            f"{recorded.id} was not submitted. Continue it with: {recorded.next_command('resume')}"
        )
    if row.status in OVER:
        raise UsageError(f"{recorded.id} is {row.status}, so there is nothing left to execute.")
    named = row.record.app if app_ is None else FleetApp.load(app_).name
    try:
        code = code_of(named)
    except ImportError as error:
        raise UsageError(
            f"the app of {recorded.id} is {named!r}, which isn't here: {error}. Go to the folder that it is in, "
            "or name the app that the run moves to: --app module:name."
        ) from error
    if row.record.has_begun:
        prompt = FleetApp.load(named).source.prompt_name
        if prompt != row.record.prompt:
            raise UsageError(
                f"{recorded.id} began with the prompt {row.record.prompt!r}, and that of {named} is now {prompt!r}. "
                "Give it its former name, or name another app: --app module:name."
            )
        # Whether this code reads what the session's runs have recorded. The error names the class and the field.
        await runs.session(journal, row.record.session_id, principal=row.record.principal)
    await journal.queue.adopt(recorded.id, queue_of(named, code))
    data = {"run_id": recorded.id, "app": named, "code": code, "queue": queue_of(named, code)}
    changed = "" if code != row.queue.rpartition("@")[2] else " It had this version before."
    return Report(data, f"{recorded.id} now waits for a worker with version {code[:12]} of {named}.{changed}")


@command("approvals")
async def approvals(
    journal: AnyJournal,
    run: RunId,
    revoke: Annotated[
        str | None, typer.Option("--revoke", metavar="N", help="Forget this decision, by its number or id.")
    ] = None,
) -> Report:
    """List what was approved or denied for a run's whole session. --revoke forgets one of these decisions."""
    record = (await RecordedRun.find(journal, run)).row.record
    memory = await runs.approvals(journal, record.session_id, principal=record.principal)
    kept = memory.list()
    if revoke is None:
        lines = [view.approval_line(number, each) for number, each in enumerate(kept, 1)]
        data = {"session_id": record.session_id, "approvals": [approval_json(each) for each in kept]}
        return Report(data, *(lines or ["Nothing is remembered in this session."]))
    found = next(
        (each for number, each in enumerate(kept, 1) if revoke in (str(number), each.id)),
        None,
    )
    if found is None:
        advice = f"Pass a number from 1 to {len(kept)}." if kept else "Nothing is remembered."
        raise UsageError(f"--revoke {revoke!r} matches no decision. {advice}")
    memory.revoke(found.id)
    data = {"session_id": record.session_id, "revoked": approval_json(found)}
    return Report(
        data, view.approval_line(None, found), "Forgotten: the next such call needs approval again."
    )


@command("fork")
async def fork(
    journal: AnyJournal,
    run: RunId,
    step: Annotated[int, typer.Argument(help="Number of the model's answers to keep; 0 starts over.")],
    new: NewId = None,
) -> Report:
    """Create a new run that begins like this one. Files are not changed."""
    source = await RecordedRun.find(journal, run)
    made = RecordedRun(journal, await runs.fork(journal, source.id, step, new))
    return Report(
        {"run_id": made.id, "forked_from": source.id, "step": step},
        f"{made.id} keeps the first {step} of the model's answers. Files are as they are now, not as they were then.",
        f"Continue with: {made.next_command('resume')}",
    )


@command("undo")
async def undo(
    journal: AnyJournal,
    run: RunId,
    call: CallId,
    files: Files = None,
) -> Report:
    """Undo what a call changed, unless later changes build on it. The model is told about it in its next turn."""
    recorded = await RecordedRun.find(journal, run)
    async with recorded.open_folder(files) as folder:
        done = await runs.undo(journal, recorded.id, call, folder)
    data = {"run_id": recorded.id, "call_id": call, "paths": list(done.paths), "slices": list(done.slices)}
    return Report({**data, "stands": list(done.stands)}, *view.undo_lines(done))


@command("discard")
async def discard(
    journal: AnyJournal,
    run: RunId,
    call: CallId,
) -> Report:
    """Give up a call's recorded file changes that can't be applied, for example because their folder is gone.

    The model is told about it in its next turn.
    """
    recorded = await RecordedRun.find(journal, run)
    paths = await runs.discard(journal, recorded.id, call)
    data = {"run_id": recorded.id, "call_id": call, "paths": paths}
    lines = f"Discarded the recorded changes of {call}: {', '.join(map(escape, paths))}. The model is told about it in its next turn."
    return Report(data, lines)


@command("replay")
async def replay(
    journal: AnyJournal,
    run: RunId,
    app_: App = None,
    files: FirstFiles = None,
) -> Report:
    """Replay a run with today's code and report the first difference. Nothing is changed."""
    from handrail.runs.check import Tally

    recorded = await RecordedRun.find(journal, run)
    program = recorded.load_program(app_)
    tally = Tally()
    from handrail.run.record.begin import decode_begin

    params = program.render(decode_begin(recorded.row.record).message)
    async with recorded.open_folder(files) as folder:
        found = await runs.replay(
            journal, recorded.id, program.prompt, params=params, filesystem=folder, tally=tally
        )
    data = {
        "run_id": recorded.id,
        "code_changed": program.changed,
        "ran": tally.ran,
        "taken": tally.taken,
        "divergence": None if found is None else view.divergence_data(found),
    }
    if found is not None:
        return Report(data, *program.notes, view.divergence_text(found), code=FAILED)
    calls = f"{counted(tally.ran, 'call')} run again, {tally.taken} taken from the record"
    return Report(data, *program.notes, f"No differences: {counted(tally.steps, 'step')}, {calls}.")


# --- moving and forgetting runs ---


@command("export")
async def export(
    journal: AnyJournal,
    run: Annotated[
        str, typer.Argument(help="The run's id, or its beginning. With --principal: the folder to write.")
    ],
    path: Annotated[Path | None, typer.Argument(help="The file to write.")] = None,
    principal: Principal = None,
    case: Annotated[
        bool,
        typer.Option("--case", help="Write a case, which pytest replays if its name ends in .case.json."),
    ] = False,
    app_: App = None,
    files: FirstFiles = None,
    real: Annotated[
        list[str] | None,
        typer.Option("--real", metavar="TOOL", help="A tool that the case really runs; repeatable."),
    ] = None,
) -> Report:
    """Export a run to a file, without secrets, or with --principal everything of a person to a new folder."""
    if principal is not None:
        return await _export_person(journal, principal, path, run)
    if path is None:
        raise UsageError("PATH is missing. Name the file to write.")
    row = (await RecordedRun.find(journal, run)).row
    id = row.record.id
    if not case:
        if app_ or files or real:
            raise UsageError("--app, --files and --real are options of a case. Add --case.")
        lines = await runs.export(journal, id, path)
        return Report({"run_id": id, "path": str(path), "lines": lines}, f"Exported {id} to {path}.")
    if not (app_ or row.record.app):
        problem = "it began without a reference to its agent, which a case needs"
        raise RunError(id, problem, "Name the agent: --app module:name.")
    from handrail.serve.sources import recorded_name

    made = await runs.make_case(
        journal, id, app=recorded_name(app_ or ""), files=files, tools=dict.fromkeys(real or (), "real")
    )
    made.save(path)
    lacking = made.lacking
    notes = ["The case lacks files, so these calls have their recorded results:", *map(escape, lacking)]
    data = {"run_id": id, "path": str(path), "lacking": lacking, "left_out": made.left_out}
    return Report(data, f"Exported {id} to {path} as a case.", *(notes if lacking else ()))


async def _export_person(journal: AnyJournal, principal: str, path: Path | None, folder: str) -> Report:
    if path is not None:
        raise UsageError("with --principal, name only the folder to write, and no run.")
    with _accounts(journal) as accounts:
        done = await runs.export_person(journal, principal, folder, accounts=accounts)
    lines = [f"{run_id} is left out: {escape(why)}" for run_id, why in done.left_out]
    files = f"{counted(len(done.runs), 'run')} and {counted(len(done.workspaces), 'workspace')}"
    text = f"Exported {files} of {escape(principal)} to {escape(done.folder)}."
    return Report(msgspec.to_builtins(done), text, *lines, code=FAILED if done.left_out else DONE)


@command("import", creates_journal=True)
async def import_(
    journal: AnyJournal,
    path: Annotated[Path, typer.Argument(help="A file that `export` wrote.")],
    new: Annotated[
        str | None,
        typer.Option("--as", metavar="ID", help="A new id for the run. Default: the exported one."),
    ] = None,
) -> Report:
    """Import a run from a file that `export` wrote."""
    row = await runs.import_(journal, path, run_id=new)
    data = {"run_id": row.record.id, "status": row.status}
    return Report(data, f"Imported {row.record.id}, which is {row.status}.")


@command("forget")
async def forget(
    journal: AnyJournal,
    before: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Delete runs that ended before: 30d, 12h, or 2026-01-31."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Keep this many of the newest runs.")
    ] = None,
    standing: Annotated[
        list[str] | None,
        typer.Option(
            "--standing",
            "-s",
            metavar="STANDING",
            help="Only runs that are done, failed or cancelled; repeatable.",
        ),
    ] = None,
    app_: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", help="Only runs of this app, as `list --json` names it."),
    ] = None,
    principal: Principal = None,
    cancel_: Annotated[
        bool, typer.Option("--cancel", help="With --principal: cancel their unfinished runs first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--check", help="Only say what would be deleted.")
    ] = False,
) -> Report:
    """Delete finished runs from the journal, or with --principal everything of a person. Runs of one session are deleted together."""
    wanted: Any = standing or []
    unknown = [each for each in wanted if each not in OVER]
    if unknown:
        raise UsageError(f"--standing {unknown[0]!r} is not one of {', '.join(sorted(OVER))}.")
    if principal is not None:
        if before is not None or keep is not None or wanted or app_ is not None:
            raise UsageError(
                "--principal deletes everything of a person. Leave out --before, --keep, --standing and --app."
            )
        return await _erase(journal, principal, cancel_, dry_run)
    if cancel_:
        raise UsageError("--cancel needs --principal NAME. `handrail runs cancel RUN` cancels one run.")
    gone = await runs.forget(
        journal, before=parse_time(before), keep=keep, standing=wanted, app=app_, dry=dry_run
    )
    verb = "would be forgotten" if dry_run else "forgotten"
    count = counted(len(gone), "run")
    return Report({"runs": list(gone), "dry_run": dry_run}, f"{count} {verb}.", *(gone if dry_run else ()))


async def _erase(journal: AnyJournal, principal: str, cancel_first: bool, dry: bool) -> Report:
    with _accounts(journal) as accounts:
        done = await runs.erase(journal, principal, cancel=cancel_first, dry=dry, accounts=accounts)
    held = done.holdings
    if not done.has_any and held.erased_at is None:
        raise UsageError(f"there is nothing of {principal!r} in this journal. Check the name.")
    data = {**msgspec.to_builtins(done), "dry_run": dry}
    return Report(data, *view.erasure_lines(done, dry), code=DONE if done.is_compact else FAILED)


@contextlib.contextmanager
def _accounts(journal: AnyJournal) -> Generator[Accounts | None]:
    """Open the users of a server whose journal is a file, if it has any. Those of a journal in PostgreSQL are the journal's own."""
    from handrail.serve.people import AccountsFile, people_path

    path = people_path(Path(journal.path))
    if journal.accounts is not None or not path.is_file():
        yield None
        return
    with contextlib.closing(AccountsFile(path)) as accounts:
        yield accounts


def parse_time(text: str | None, option: str = "--before") -> datetime | None:
    """Parse a date or time, in UTC by default, or a duration that is subtracted from the current time. None stays None.

    Raises `UsageError` if the text is neither.
    """
    if text is None:
        return None
    duration = re.fullmatch(r"(\d+)([hdw])", text)
    if duration is not None:
        return SYSTEM_CLOCK.now() - timedelta(hours=int(duration[1]) * _HOURS[duration[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not a time. Write 30d, 12h, 2w or a date: 2026-01-31."
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
