"""What the commands of `handrail runs` do, each a function of a journal."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

from handrail import runs
from handrail.adapter.run_record import code_of, decode_begin, prompt_of
from handrail.cli import options
from handrail.cli import runs_view as view
from handrail.cli.codes import CANCELLED, DONE, FAILED, WAITS
from handrail.cli.ending import (
    Trouble,
    UsageError,
    complain,
    journal_path,
    print_json,
    refused,
    runs_command,
    stopped,
)
from handrail.cli.lines import answer_of
from handrail.clock import SYSTEM_CLOCK
from handrail.environment.text import escape
from handrail.errors import HandrailError, RunParked, RunUnknown
from handrail.journal.seal import not_heard
from handrail.journal.sqlite import SqliteJournal
from handrail.question import Answer, Question
from handrail.records import OVER, RunRow
from handrail.runs.deciding import approval_json
from handrail.runs.listing import Standing

STANDINGS = get_args(Standing)
_SPANS = {"h": 1.0, "d": 24.0, "w": 168.0}


class Said:
    """What a command has to say: for people, and for programs."""

    def __init__(self, data: dict[str, Any], *text: Any, code: int = DONE) -> None:
        self.data = data
        self.text = text
        self.code = code


def carry_out(command: Callable[..., Any], journal: Path | None, as_json: bool, given: dict[str, Any]) -> int:
    """Run one command on its journal, say what came of it, and give the exit code."""
    try:
        options.look_here()
        path = _path(journal, new=command is import_)

        async def run() -> Said:
            opened = SqliteJournal(path, watch=None)
            try:
                return await command(opened, **given)
            finally:
                opened.close()

        said = asyncio.run(run())
    except Exception as error:
        return refused(error, as_json=as_json)
    except KeyboardInterrupt:
        return _cancelled(as_json)
    if as_json:
        print_json({"ok": said.code == DONE, "exit_code": said.code, **said.data})
    else:
        for each in said.text:
            view.say(each)
    return said.code


def _cancelled(as_json: bool) -> int:
    found = Trouble(CANCELLED, "Cancelled", "Cancelled. What was under way was undone.")
    if as_json:
        print_json({"ok": False, "exit_code": found.code, "error": found.as_json()})
    else:
        complain(found.message, "yellow")
    return found.code


def _path(given: Path | None, new: bool) -> Path:
    """Where the journal is. None is made by looking for it."""
    path = journal_path(given)
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.is_file():
        how = "Name one: --journal FILE, or set HANDRAIL_JOURNAL."
        raise UsageError(f"there is no journal at {path}. {how}")
    return path


async def _find(journal: SqliteJournal, named: str) -> RunRow:
    """The run of this id, or the only one whose id begins like this."""
    try:
        return await journal.run(named)
    except RunUnknown:
        lines = await runs.list_runs(journal, limit=100_000)
        found = [line.id for line in lines if line.id.startswith(named)]
        if not named or len(found) != 1:
            if found:
                raise UsageError(
                    f"{len(found)} runs begin with {named!r}: {', '.join(found[:5])}. Write more of it."
                ) from None
            raise
        return await journal.run(found[0])


# --- looking --------------------------------------------------------------------------------------------


async def list_(journal: SqliteJournal, standing: list[str], session: str | None, limit: int) -> Said:
    unknown = [each for each in standing if each not in STANDINGS]
    if unknown:
        raise UsageError(f"--standing {unknown[0]!r} is none of {', '.join(STANDINGS)}. Give one of these.")
    wanted: Any = standing
    lines = await runs.list_runs(journal, session_id=session, standing=wanted, limit=limit)
    now = SYSTEM_CLOCK.now().timestamp()
    return Said({"runs": [view.line_data(line) for line in lines]}, view.run_list(lines, now))


async def show(journal: SqliteJournal, run: str, full: bool) -> Said:
    tree = await runs.show(journal, (await _find(journal, run)).record.id)
    return Said(view.tree_data(tree), view.run_tree(tree, full))


# --- going on -------------------------------------------------------------------------------------------


async def resume(
    journal: SqliteJournal,
    run: str,
    model: str | None,
    approve: str,
    app: str | None,
    files: Path | None,
    asks: bool,
) -> Said:
    from handrail.adapter import Adapter
    from handrail.environment import TerminalEnvironment
    from handrail.environment.unattended import LaterEnvironment

    mode = options.approvals(approve)
    row = await _find(journal, run)
    prompt, changed = _code(row, app)
    terminal = TerminalEnvironment()
    somebody = asks and terminal.run_mode == "user"
    folder = await _folder(journal, row, files)
    given: Any = {
        "environment": terminal if somebody else LaterEnvironment(),
        "filesystem": folder,
        "approvals": mode,
    }
    try:
        if _is_worker(named := app or row.record.app):
            registry, worker = _worker(named)
            models = registry.all_on(options.model(model))
            going = registry.resume(worker.name, row.record.id, journal=journal, models=models, **given)
        else:
            adapter = Adapter(options.model(model or row.record.model), journal=journal)
            going = adapter.resume(row.record.id, prompt, **given)
        response = await going
    except RunParked as parked:
        asked = [view.question_data(question) for question in parked.questions]
        secret = any(question.secret for question in parked.questions)
        how = _then(journal, "resume" if secret else "answer", row)
        data = {"run_id": row.record.id, "status": "parked", "questions": asked, "code_changed": changed}
        lines = [view.question_line(question) for question in parked.questions]
        return Said(
            data,
            *_about(changed),
            "It waits for an answer:",
            *lines,
            f"Answer {'at a terminal ' if secret else ''}with: {how}",
            code=WAITS,
        )
    finally:
        if folder is not None:
            folder.close()
    data = {
        "run_id": row.record.id,
        "status": "done",
        "text": response.text,
        "stop_reason": response.stop_reason,
    }
    code, note = stopped(response.stop_reason, [])
    lines = [*_about(changed), escape(answer_of(response)), *([note] if note else [])]
    return Said({**data, "code_changed": changed}, *lines, code=code)


def _code(row: RunRow, app: str | None) -> tuple[Any, bool]:
    """The prompt of a run, and whether its code is another than when it began."""
    named = app or row.record.app
    try:
        prompt = _worker(named)[1].prompt if _is_worker(named) else prompt_of(row.record.id, named)
        return prompt, bool(row.record.code) and code_of(named) != row.record.code
    except HandrailError:
        raise
    except Exception as error:  # whatever the user's own module does when it is imported
        raise UsageError(
            f"the code at {named!r} can't be loaded: {type(error).__name__}: {error}. "
            "Go to the folder it is imported from, or name it: --app module:name."
        ) from error


def _then(journal: SqliteJournal, command: str, row: RunRow) -> str:
    """The next command, as it has to be typed."""
    return runs_command(command, row.record.id, journal.path)


def _is_worker(app: str) -> bool:
    return app.endswith(".md")


def _worker(app: str) -> tuple[Any, Any]:
    from handrail.workers import WorkerRegistry

    return WorkerRegistry.of_file(app)


def _about(changed: bool) -> list[str]:
    return ["The code has changed since the run began."] if changed else []


async def _folder(journal: SqliteJournal, row: RunRow, files: Path | None) -> Any:
    """The folder a run works in: the one named, else the one it was recorded with."""
    from handrail.resources.directory import DirectoryFilesystem

    if files is None:
        recorded = decode_begin(row.record).folder if row.record.begin else ""
        root = recorded or next((unit.root for unit in await journal.load(row.record.id) if unit.root), "")
        return DirectoryFilesystem(root) if root and Path(root).is_dir() else None
    return options.filesystem(files, Path())


async def answer(
    journal: SqliteJournal,
    run: str,
    question: str | None,
    value: str | None,
    approve: bool | None,
    reason: str,
) -> Said:
    row = await _find(journal, run)
    asked = await _question(journal, row, question)
    if value is not None and approve is not None:
        raise UsageError("give --value, or --approve or --deny, not both")
    if asked.secret:
        raise not_heard(asked)  # before somebody types one for nothing
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
                f"--value is not JSON: {error}. A text is written with quotes: '\"like this\"'."
            ) from None
    else:
        return await _asked_here(journal, row, asked)
    return await _taken(
        journal,
        row,
        asked,
        Answer(question_id=asked.id, digest=asked.digest, by=asked.principal, value=given, reason=reason),
    )


async def _asked_here(journal: SqliteJournal, row: RunRow, asked: Question) -> Said:
    """Put it to whoever is at the terminal."""
    from handrail.environment import TerminalEnvironment

    terminal = TerminalEnvironment()
    if terminal.run_mode != "user":
        raise UsageError("there is no answer. Give --value JSON, or --approve or --deny for an approval.")
    return await _taken(journal, row, asked, await terminal.ask(asked))


async def _taken(journal: SqliteJournal, row: RunRow, asked: Question, answer: Answer) -> Said:
    journal.answer(answer)
    left = len(await journal.questions(row.record.id))
    then = f"{left} more to answer." if left else f"Go on with: {_then(journal, 'resume', row)}"
    return Said(
        {"run_id": row.record.id, "question": asked.id, "left": left}, f"Answered {asked.name}. {then}"
    )


async def _question(journal: SqliteJournal, row: RunRow, named: str | None) -> Question:
    waiting = await journal.questions(row.record.id)
    found = [each for each in waiting if named is None or named in (each.id, each.name)]
    if len(found) == 1:
        return found[0]
    if not waiting:
        raise UsageError(
            f"the run {row.record.id} waits for no answer. `{_then(journal, 'show', row)}` says how it stands."
        )
    ids = "\n".join(f"  {each.id}  {each.name}" for each in waiting)
    which = "say which question" if found else f"there is no question {named!r}. Name one by its id"
    raise UsageError(f"{which}:\n{ids}")


# --- changing -------------------------------------------------------------------------------------------


async def cancel(journal: SqliteJournal, run: str) -> Said:
    row = await runs.cancel(journal, (await _find(journal, run)).record.id)
    data = {"run_id": row.record.id, "status": row.status, "stopping": row.stopping}
    if row.status in OVER:
        return Said(data, f"{row.record.id} is {row.status}.")
    return Said(data, f"{row.record.id}: the process {row.owner} was told, and ends it within seconds.")


async def fork(journal: SqliteJournal, run: str, step: int, new: str | None) -> Said:
    row = await _find(journal, run)
    made = await runs.fork(journal, row.record.id, step, new)
    id = made.record.id
    return Said(
        {"run_id": id, "forked_from": row.record.id, "step": step},
        f"{id} has the first {step} of the model's answers. Files are as they are now, not as they were then.",
        f"Go on with: {_then(journal, 'resume', made)}",
    )


async def approvals(journal: SqliteJournal, run: str, revoke: str | None) -> Said:
    record = (await _find(journal, run)).record
    memory = await runs.approvals(journal, record.session_id, principal=record.principal)
    kept = memory.list()
    lines = [view.approval_line(number, each) for number, each in enumerate(kept, 1)]
    if revoke is not None:
        numbered = {str(number): each for number, each in enumerate(kept, 1)}
        found = numbered.get(revoke) or next((each for each in kept if each.id == revoke), None)
        if found is None:
            there = f"Give a number from 1 to {len(kept)}." if kept else "Nothing is remembered."
            raise UsageError(f"--revoke {revoke!r} is none of those remembered. {there}")
        memory.revoke(found.id)
        said = [view.approval_line(None, found), "Taken back: it is asked about again."]
        return Said({"session_id": record.session_id, "revoked": approval_json(found)}, *said)
    data = {"session_id": record.session_id, "approvals": [approval_json(each) for each in kept]}
    return Said(data, *(lines or ["Nothing is remembered in this session."]))


async def undo(journal: SqliteJournal, run: str, call: str, files: Path | None) -> Said:
    row = await _find(journal, run)
    folder = await _folder(journal, row, files)
    try:
        done = await runs.undo(journal, row.record.id, call, folder)
    finally:
        if folder is not None:
            folder.close()
    data = {"run_id": row.record.id, "call_id": call, "paths": list(done.paths), "slices": list(done.slices)}
    return Said({**data, "stands": list(done.stands)}, *view.undone(done))


def _params(row: RunRow, app: str | None) -> Any:
    """A worker's instructions as its file has them now; None for what was recorded."""
    named, message = app or row.record.app, decode_begin(row.record).message
    if not _is_worker(named):
        return None
    _, worker = _worker(named)
    return None if worker.attachments.count or message is None else worker.render(message)


async def replay(journal: SqliteJournal, run: str, app: str | None, files: Path | None) -> Said:
    from handrail.runs.replaying import Tally

    row = await _find(journal, run)
    prompt, changed = _code(row, app)
    folder = await _folder(journal, row, files)
    tally = Tally()
    try:
        found = await runs.replay(
            journal, row.record.id, prompt, params=_params(row, app), filesystem=folder, tally=tally
        )
    finally:
        if folder is not None:
            folder.close()
    data = {"run_id": row.record.id, "code_changed": changed, "ran": tally.ran, "taken": tally.taken}
    if found is None:
        about = f"Nothing differs: {tally.steps} steps, {tally.ran} calls run again, {tally.taken} taken from the record."
        return Said({**data, "divergence": None}, *_about(changed), about)
    return Said(
        {**data, "divergence": view.divergence_data(found)},
        *_about(changed),
        view.divergence(found),
        code=FAILED,
    )


# --- keeping --------------------------------------------------------------------------------------------


async def export(journal: SqliteJournal, run: str, path: Path) -> Said:
    row = await _find(journal, run)
    lines = await runs.export(journal, row.record.id, path)
    return Said(
        {"run_id": row.record.id, "path": str(path), "lines": lines}, f"{row.record.id} is in {path}."
    )


async def import_(journal: SqliteJournal, path: Path, new: str | None) -> Said:
    row = await runs.import_(journal, path, run_id=new)
    return Said({"run_id": row.record.id, "status": row.status}, f"{row.record.id} is here, {row.status}.")


async def forget(journal: SqliteJournal, before: str | None, keep: int | None, dry: bool) -> Said:
    gone = await runs.forget(journal, before=_time(before), keep=keep, dry=dry)
    word = "would go" if dry else "gone"
    return Said({"runs": list(gone), "dry_run": dry}, f"{len(gone)} runs {word}.", *(gone if dry else ()))


def _time(text: str | None) -> datetime | None:
    """A day, or a span before now."""
    if text is None:
        return None
    span = re.fullmatch(r"(\d+)([hdw])", text)
    if span is not None:
        return SYSTEM_CLOCK.now() - timedelta(hours=int(span[1]) * _SPANS[span[2]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--before {text!r} is no time. Write 30d, 12h, 2w, or a day: 2026-01-31.") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
