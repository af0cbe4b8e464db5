"""`run` and `chat`: what they put together, and how they end."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic_core
from rich.text import Text

from handrail.cli import options
from handrail.cli.asked import Asked
from handrail.cli.chatting import Chat
from handrail.cli.codes import DONE
from handrail.cli.ending import (
    Trouble,
    UsageError,
    complain,
    debugging,
    print_json,
    refused,
    show_traceback,
)
from handrail.cli.lines import answer_of, summary
from handrail.cli.plain import PlainView
from handrail.cli.running import Ended, watched
from handrail.cli.screen import LiveScreen, View
from handrail.cli.streams import nothing_printed
from handrail.clock import SYSTEM_CLOCK
from handrail.environment import TerminalEnvironment
from handrail.environment.text import escape, escape_line, is_terminal
from handrail.schema import to_json
from handrail.session import Session

if TYPE_CHECKING:
    from handrail.journal.sqlite import SqliteJournal
    from handrail.workers import Worker


def run(asked: Asked, given: str | None, attached: list[Path], as_json: bool) -> int:
    """One run of a worker; the exit code."""
    _logging(asked.verbose)
    try:
        with nothing_printed(as_json):
            worker = options.find_worker(asked.worker)
        message = options.read_input(given)
        files = options.filesystem(asked.files, worker.registry.folder)
        view, terminal = _view(asked, silent_answer=as_json)
        journal = options.journal(asked.journal, asked.no_journal)
        begin = _begin(asked, worker, files, terminal, journal, tuple(_attachment(path) for path in attached))
        session = Session()
        started = SYSTEM_CLOCK.monotonic()
        with asyncio.Runner() as runner, nothing_printed(as_json):
            runner.run(_recover(files, journal))
            ended = runner.run(
                watched(lambda session: begin(message, session), session, view, _path_of(journal))
            )
    except Exception as error:
        return refused(error, as_json=as_json, verbose=asked.verbose)
    if as_json:
        print_json(_as_json(ended, view))
    else:
        _say(ended, view, asked.quiet, SYSTEM_CLOCK.monotonic() - started)
    if ended.error is not None:
        show_traceback(ended.error, asked.verbose)
    return ended.code


def chat(asked: Asked) -> int:
    """A conversation with a worker; the exit code."""
    _logging(asked.verbose)
    try:
        with nothing_printed():
            worker = options.find_worker(asked.worker)
        files = options.filesystem(asked.files, worker.registry.folder)
        view, terminal = _view(asked)
        journal = options.journal(asked.journal, asked.no_journal)
        asyncio.run(_recover(files, journal))
        begin = _begin(asked, worker, files, terminal, journal, ())
        if terminal.run_mode == "user" and not asked.quiet:
            _greet(worker, asked, files, view)
        return Chat(begin, view, Session(), files, asked.quiet, _path_of(journal)).talk()
    except Exception as error:
        return refused(error, verbose=asked.verbose)


def _greet(worker: Worker, asked: Asked, files: Any, view: View) -> None:
    text = Text(escape_line(worker.name), "bold")
    text.append(f"  {escape_line(worker.description or '', 120)}", "default")
    view.note(text)
    model = asked.model or worker.model or "no model"
    where = f" · files in {escape_line(_from_here(files.root))}" if files is not None else ""
    view.note(f"{escape_line(str(model))}{where} · /help says what can be typed", "dim")


def _from_here(path: Path) -> str:
    """A path as it is shortest from where the program runs."""
    here = Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _path_of(journal: SqliteJournal | None) -> str:
    return "" if journal is None else journal.path


async def _recover(files: Any, journal: Any) -> None:
    """Finish what a process that was killed had recorded and not applied, before the folder is used."""
    if files is not None and journal is not None:
        await files.recover(journal)


def _begin(
    asked: Asked,
    worker: Worker,
    files: Any,
    terminal: TerminalEnvironment,
    journal: Any,
    attachments: tuple[Any, ...],
) -> Callable[[str, Session], Any]:
    """How a turn is begun. Each has its own deadline; a budget is for all of them together."""
    from handrail.limits import BudgetTracker

    bounds = options.budget(asked.tokens, asked.money, asked.requests, asked.calls)
    options.deadline(asked.deadline)  # what is wrong with it is said before anything runs
    tracker = None if bounds is None else BudgetTracker(bounds)
    model = options.model(asked.model)
    approvals = options.approvals(asked.approve, can_wait=True)
    environment: Any = terminal
    if asked.approve == "later":
        if journal is None:
            raise UsageError("--approve later leaves questions in a journal. Give one: --journal FILE.")
        from handrail.environment.unattended import LaterEnvironment

        environment = LaterEnvironment()

    def begin(message: str, session: Session) -> Any:
        return worker.registry.stream(
            worker.name,
            message,
            attachments=attachments,
            models=worker.registry.all_on(model),
            session=session,
            journal=journal,
            environment=environment,
            approvals=approvals,
            filesystem=files,
            deadline=options.deadline(asked.deadline),
            budget=tracker,
        )

    return begin


def _attachment(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"--attach {path}: no such file. Name one that is there.")
    return path


def _view(asked: Asked, silent_answer: bool = False) -> tuple[View, TerminalEnvironment]:
    """The screen for a terminal, plain lines elsewhere; and who is there."""
    import os

    there = is_terminal(sys.stdin) and is_terminal(sys.stdout) and not silent_answer
    view: LiveScreen | PlainView
    if there and os.environ.get("TERM", "dumb") not in ("dumb", "") and not asked.quiet:
        view = LiveScreen(SYSTEM_CLOCK, verbose=asked.verbose)
    else:
        view = PlainView(SYSTEM_CLOCK, verbose=asked.verbose, quiet=asked.quiet)
    if silent_answer:  # only a program reads this: nobody is asked
        return view, TerminalEnvironment(stdin=_nowhere(), screen=view)
    return view, TerminalEnvironment(screen=view)


def _nowhere() -> Any:
    import io

    return io.StringIO()


# How it ends.


def _say(ended: Ended, view: View, quiet: bool, spent: float) -> None:
    response = ended.response
    if response is None:
        if ended.trouble is not None:
            complain(ended.trouble.message)
        return
    view.answer(answer_of(response))
    if ended.note:
        complain(ended.note, "yellow")
    if not quiet:
        view.note(summary(response.usage, response.cost, spent))


def _as_json(ended: Ended, view: View) -> dict[str, Any]:
    response = ended.response
    said: dict[str, Any] = {"ok": ended.code == DONE, "exit_code": ended.code}
    if response is None:
        found = ended.trouble or Trouble(ended.code, "", "")
        return {**said, "run_id": view.ledger.root or None, "error": found.as_json()}
    output = None if response.output is None else pydantic_core.from_json(to_json(response.output))
    usage = response.usage
    return {
        **said,
        "text": response.text,
        "output": output,
        "stop_reason": response.stop_reason,
        "not_approved": view.ledger.denied,
        "usage": {
            "input": usage.input,
            "output": usage.output,
            "cached": usage.cached,
            "requests": usage.requests,
        },
        "cost": None if response.cost is None else str(response.cost),
        "run_id": response.run_id,
    }


class _VisibleFormatter(logging.Formatter):
    """Of a log too, nothing moves the cursor: it has what models and tools said, and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return escape(super().format(record))


def _logging(verbose: bool) -> None:
    """What the package logs is for whoever looks for it; the view says what a person needs."""
    if verbose or debugging():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_VisibleFormatter("%(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    else:
        log = logging.getLogger("handrail")
        log.addHandler(logging.NullHandler())
        log.propagate = False
