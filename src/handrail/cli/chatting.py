"""A conversation with a worker: a line is a message, a slash is a command."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

from rich.text import Text

from handrail.cli.codes import CANCELLED, DONE, USAGE
from handrail.cli.ending import complain
from handrail.cli.lines import answer_of, money, spending, summary
from handrail.cli.running import Ended, watched
from handrail.cli.screen import View
from handrail.cli.streams import nothing_printed
from handrail.clock import SYSTEM_CLOCK
from handrail.environment.text import escape, escape_line, is_terminal
from handrail.errors import HandrailError, UndoRefused
from handrail.messages import Usage
from handrail.session import Session

HELP = """\
/help            this
/approvals       what you approved or denied for the whole session
/approvals N     take number N back: it is asked about again
/undo            undo the newest call that changed files
/cost            what the conversation has cost so far
/quit            leave, as Ctrl-D does
A line that ends in \\ goes on in the next one. Ctrl-C cancels what is running; twice ends the program."""


class Chat:
    """The conversation, and what is asked of it beside messages."""

    def __init__(
        self,
        begin: Callable[[str, Session], Any],
        view: View,
        session: Session,
        files: Any,
        quiet: bool,
        journal: str = "",
    ) -> None:
        self._begin = begin
        self._view = view
        self._session = session
        self._files = files
        self._quiet = quiet
        self._journal = journal
        self._usage = Usage()
        self._cost: Decimal | None = Decimal(0)
        self._done: list[str] = []
        self._code = DONE
        self._there = is_terminal(sys.stdin) and is_terminal(sys.stdout)

    def talk(self) -> int:
        """Until they leave: the exit code."""
        there = self._there
        if there:
            _with_history()
        with asyncio.Runner() as runner:
            while True:
                try:
                    message = _message("› " if there else "")
                except EOFError:
                    if there:
                        sys.stdout.write("\n")
                    return DONE if there else self._code
                except KeyboardInterrupt:
                    if not there:
                        return CANCELLED
                    sys.stdout.write("\n")
                    self._view.note("Ctrl-D or /quit leaves.", "dim")
                    continue
                if message.startswith("/"):
                    if message.split()[0] in ("/quit", "/exit"):
                        return DONE
                    self._command(message)
                elif message.strip():
                    self._turn(runner, message)
                    if not there and self._code == USAGE:
                        return USAGE

    def _turn(self, runner: asyncio.Runner, message: str) -> None:
        started = SYSTEM_CLOCK.monotonic()
        with nothing_printed():
            ended = runner.run(
                watched(
                    lambda session: self._begin(message, session), self._session, self._view, self._journal
                )
            )
        self._code = ended.code
        self._done += self._view.ledger.done
        self._say(ended, SYSTEM_CLOCK.monotonic() - started)

    def _say(self, ended: Ended, spent: float) -> None:
        view = self._view
        if ended.response is not None:
            response = ended.response
            view.answer(answer_of(response))
            self._usage += response.usage
            known = self._cost is not None and response.cost is not None
            self._cost = self._cost + response.cost if known else None  # pyright: ignore[reportOperatorIssue]
            if ended.note:
                self._tell(ended.note, "yellow")
            if not self._quiet:
                view.note(summary(response.usage, response.cost, spent))
        elif ended.trouble is not None:
            style: Literal["red", "yellow"] = "yellow" if ended.code >= CANCELLED else "red"
            self._tell(ended.trouble.message, style)
        if self._there:
            view.note("")

    def _tell(self, message: str, style: Literal["red", "yellow"]) -> None:
        """What went wrong is said also where nothing else is."""
        if self._quiet:
            complain(message, style)
        else:
            self._view.note(message, style)

    # Commands.

    def _command(self, line: str) -> None:
        name, *rest = line.split()
        commands: dict[str, Callable[[list[str]], None]] = {
            "/help": self._help,
            "/approvals": self._approvals,
            "/undo": self._undo,
            "/cost": self._say_cost,
        }
        command = commands.get(name)
        if command is None:
            self._view.note(f"There is no {escape_line(name, 30)}. /help lists what there is.", "yellow")
        else:
            command(rest)

    def _help(self, rest: list[str]) -> None:
        self._view.note(HELP)

    def _say_cost(self, rest: list[str]) -> None:
        usage = self._usage
        nothing = f"Nothing was asked yet: {money(Decimal(0))}."
        self._view.note(spending(usage, self._cost) if usage.requests else nothing)

    def _approvals(self, rest: list[str]) -> None:
        kept = _remembered(self._session)
        if rest:
            self._revoke(kept, rest[0])
            return
        if not kept:
            self._view.note("Nothing is remembered: every call that needs approval is asked about.")
        for number, each in enumerate(kept, 1):
            verb = "approved" if each.approved else "denied"
            text = Text(f"{number}  {verb}  ", "green" if each.approved else "yellow")
            text.append(f"{escape_line(each.tool, 60)}: {escape_line(each.scope, 200)}", "default")
            self._view.note(text)
        if kept:
            self._view.note("/approvals N takes number N back.", "dim")

    def _revoke(self, kept: list[Any], which: str) -> None:
        if which not in map(str, range(1, len(kept) + 1)):
            there = f"There are {len(kept)}: /approvals lists them." if kept else "Nothing is remembered."
            self._view.note(f"No number {escape_line(which, 20)}. {there}", "yellow")
            return
        from handrail.guard import approvals_of

        approvals_of(self._session).revoke(kept[int(which) - 1].id)
        self._view.note("Taken back: it is asked about again.")

    def _undo(self, rest: list[str]) -> None:
        if self._files is None:
            self._view.note("There are no files here: --files FOLDER gives some.", "yellow")
            return
        while self._done:
            call_id = self._done.pop()
            try:
                paths = self._files.undo(call_id)
            except UndoRefused as refused:
                if refused.places:  # somebody has changed them since
                    self._done.append(call_id)
                    self._view.note(escape(str(refused)), "yellow")
                    return
                continue  # it changed no files
            except HandrailError as error:
                self._view.note(escape(str(error)), "red")
                return
            self._view.note(f"Undone: {', '.join(escape_line(path) for path in paths)}.")
            return
        self._view.note("Nothing to undo: no call has changed files.")


def _remembered(session: Session) -> list[Any]:
    """What was decided for the whole session, oldest first."""
    from handrail.guard import approvals_of

    return list(approvals_of(session).list())


def _message(prompt: str) -> str:
    """One message: a line, and those after it while they end in a backslash."""
    lines: list[str] = []
    while True:
        line = _line(prompt if not lines else "  " * bool(prompt))
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _line(prompt: str) -> str:
    if prompt:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _with_history() -> None:
    """Line editing and the lines before, where this Python has it."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)
