"""`handrail chat`: messages from a person, and commands that start with a slash."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from handrail.cli.activity import answer_text, format_money, format_spending, format_summary
from handrail.cli.command_options import WorkerOptions
from handrail.cli.outcome import CANCELLED, DONE, USAGE, divert_stdout, fail, is_debugging, print_error
from handrail.cli.run_command import Conversation, Subject, TurnOutcome
from handrail.cli.streams import configure_logging
from handrail.errors import HandrailError, UndoRefused
from handrail.guard import approvals_of
from handrail.journal.records import CallKey
from handrail.run.conversation import root_conversation
from handrail.run.options import RunFiles
from handrail.run.place import Place
from handrail.runs.reversal import built_on
from handrail.text.rendering import escape, escape_line

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.workspace import Workspace

HELP = """\
/help            show this help
/approvals       list what you approved or denied for the whole session
/approvals N     forget decision N, so that you are asked again
/undo            undo the newest call that changed files
/compact         send less of the conversation to the model from now on; nothing is lost
/cost            show what the conversation has cost so far
/quit            leave, like Ctrl-D
End a line with \\ to continue it on the next. Ctrl-C cancels a run; pressed twice, it ends the program."""


def chat(options: WorkerOptions) -> int:
    """Chat with a worker or an agent until the user leaves, and return the exit code."""
    configure_logging(options.verbose or is_debugging())
    try:
        with divert_stdout():
            subject = Subject.find(options)
        conversation = Conversation(subject, options)
        asyncio.run(conversation.recover())
        return Chat(conversation).talk()
    except Exception as error:
        return fail(error, verbose=options.verbose)


class Chat:
    """A conversation at a prompt, or with messages read from standard input."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._view = conversation.view
        self._quiet = conversation.options.quiet
        self._done: list[tuple[str, str]] = []
        self._code = DONE
        self._run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "/help": lambda rest: self._view.note(HELP),
            "/approvals": self._approvals,
            "/undo": self._undo,
            "/compact": self._compact,
            "/cost": self._show_cost,
        }

    def talk(self) -> int:
        attended = self._conversation.is_attended
        if attended:
            _enable_history()
            if not self._quiet:
                self._greet()
        with asyncio.Runner() as runner:
            self._run = runner.run
            while True:
                try:
                    message = _read_message("› " if attended else "")
                except EOFError:
                    if attended:
                        sys.stdout.write("\n")
                    return DONE if attended else self._code
                except KeyboardInterrupt:
                    if not attended:
                        return CANCELLED
                    sys.stdout.write("\n")
                    self._view.note("Ctrl-D or /quit leaves.", "dim")
                    continue
                if message.startswith("/"):
                    if message.split()[0] in ("/quit", "/exit"):
                        return DONE
                    self._command(message)
                elif message.strip():
                    self._turn(message)
                    if not attended and self._code == USAGE:
                        return USAGE

    def _greet(self) -> None:
        subject, files = self._conversation.subject, self._conversation.files
        text = Text(escape_line(subject.name), "bold")
        text.append(f"  {escape_line(subject.description, 120)}", "default")
        self._view.note(text)
        where = "" if files is None else f" · files in {escape_line(_named(files))}"
        self._view.note(f"{escape_line(subject.model)}{where} · /help lists the commands", "dim")
        said = root_conversation(self._conversation.session).messages
        if len(said):
            self._view.note(f"continues a conversation of {len(said)} messages", "dim")

    def _turn(self, message: str) -> None:
        with divert_stdout():
            outcome = self._run(self._conversation.turn(message))
        self._code = outcome.code
        self._done += self._view.activity.done
        self._print_outcome(outcome)

    def _print_outcome(self, outcome: TurnOutcome) -> None:
        view, response = self._view, outcome.response
        if response is not None:
            view.answer(answer_text(response))
            if outcome.note:
                self._warn(outcome.note, "yellow")
            if not self._quiet:
                view.note(format_summary(response.usage, response.cost, outcome.seconds), "dim")
        elif outcome.failure is not None:
            self._warn(outcome.failure.message, "yellow" if outcome.code >= CANCELLED else "red")
        if self._conversation.is_attended:
            view.note("")

    def _warn(self, message: str, style: Literal["red", "yellow"]) -> None:
        """Print a problem, even with `--quiet`."""
        if self._quiet:
            print_error(message, style)
        else:
            self._view.note(message, style)

    # --- commands ---

    def _command(self, line: str) -> None:
        name, *rest = line.split()
        command = self._commands.get(name)
        if command is None:
            self._view.note(
                f"There is no command {escape_line(name, 30)}. /help lists the commands.", "yellow"
            )
        else:
            command(rest)

    def _show_cost(self, rest: list[str]) -> None:
        activity = self._view.activity
        nothing = f"No requests yet: {format_money(Decimal(0))}."
        spent = format_spending(activity.usage, activity.cost)
        self._view.note(spent if activity.usage.requests or activity.cost is None else nothing)

    def _compact(self, rest: list[str]) -> None:
        session = self._conversation.session
        if len(root_conversation(session).messages):
            session.compact()
            self._view.note("The conversation will be compacted before the next request.")
        else:
            self._view.note("Nothing has been said yet.")

    def _approvals(self, rest: list[str]) -> None:
        memory = approvals_of(self._conversation.session)
        kept = list(memory.list())
        if rest:
            number = rest[0]
            if number not in map(str, range(1, len(kept) + 1)):
                hint = f"/approvals lists all {len(kept)}." if kept else "Nothing is remembered."
                self._view.note(f"There is no decision {escape_line(number, 20)}. {hint}", "yellow")
                return
            memory.revoke(kept[int(number) - 1].id)
            self._view.note("Forgotten: you will be asked again.")
            return
        if not kept:
            self._view.note("Nothing is remembered: you are asked about every call that needs approval.")
        for number, each in enumerate(kept, 1):
            verb = "approved" if each.approved else "denied"
            text = Text(f"{number}  {verb}  ", "green" if each.approved else "yellow")
            text.append(f"{escape_line(each.tool, 60)}: {escape_line(each.scope, 200)}", "default")
            self._view.note(text)
        if kept:
            self._view.note("/approvals N forgets decision N.", "dim")

    def _undo(self, rest: list[str]) -> None:
        files, journal = self._conversation.files, self._conversation.journal
        if files is None:
            self._view.note("This worker has no files. Give it some: --files FOLDER.", "yellow")
            return
        try:
            if journal is not None:
                paths, later = self._run(
                    self._undo_recorded(journal, None if isinstance(files, RunFiles) else files)
                )
            else:
                paths, later = () if isinstance(files, RunFiles) else self._undo_unrecorded(files), ()
        except UndoRefused as refused:
            self._view.note(escape(str(refused)), "yellow")
        except HandrailError as error:
            self._view.note(escape(str(error)), "red")
        else:
            done = ", ".join(escape_line(path) for path in paths)
            also = f" Later calls that had used it are undone too: {', '.join(later)}." if later else ""
            self._view.note(f"Undone: {done}.{also}" if done else "Nothing to undo.")

    async def _undo_recorded(
        self, journal: Journal, files: DirectoryFilesystem | None
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Undo the newest recorded call that changed files and was not undone. Returns the restored paths; () if there is none.

        Later calls of the conversation that have used what it changed are undone first. Their names are returned too. The
        session drops all these calls, and its model is told in the next turn. Raises `UndoRefused`, and changes nothing, if one
        of them had a lasting effect, or if other conversations have used the files.
        """
        from handrail import runs

        session = self._conversation.session
        rows = await journal.runs.list(session_id=session.id, principal=session.principal)
        own, marks = {row.record.id for row in rows}, await journal.calls.marks(session.id)
        undone = {(run_id, each.key) for run_id, each in marks if each.kind == "undone"}
        for target in reversed(await journal.calls.load_session(session.id)):
            changed = any(place.startswith("file ") for place in target.writes)
            is_open = target.run_id in own and (target.run_id, target.call_id) not in undone
            if changed and is_open and Place.parse(target.place).kind == "call":
                break
        else:
            return (), ()
        going = [target]
        for unit in await journal.calls.later(target):
            if any(built_on(each, unit) for each in going):
                going.append(unit)
        later = going[1:]
        if all(unit.run_id in own and not unit.effects for unit in later):
            if files is not None:
                files.check_undo([CallKey(target.call_id, target.run_id, target.place, journal.id)])
            for unit in reversed(later):
                await runs.undo(journal, unit.run_id, unit.call_id, files, session=session)
        done = await runs.undo(journal, target.run_id, target.call_id, files, session=session)
        return done.paths, [escape_line(unit.tool) for unit in later]

    def _undo_unrecorded(self, files: DirectoryFilesystem) -> Sequence[str]:
        """Undo the newest call of this chat whose changes to files are kept. Returns the restored paths; () if there is none."""
        while self._done:
            run_id, call_id = self._done.pop()
            try:
                return files.undo(call_id, run_id=run_id)
            except UndoRefused as refused:
                if refused.places:  # the files have changed since the call
                    self._done.append((run_id, call_id))
                    raise
                # This call changed no files, or its changes are no longer kept.
        return ()


def _named(files: DirectoryFilesystem | Workspace) -> str:
    from handrail.resources.directory import DirectoryFilesystem

    return _relative(files.root) if isinstance(files, DirectoryFilesystem) else files.address


def _relative(path: Path) -> str:
    """Return a path relative to the current folder if it is inside that folder, and unchanged otherwise."""
    here = Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _read_message(prompt: str) -> str:
    """Read a message. A line that ends in a backslash continues on the next one. Raises `EOFError` at the end of input."""
    lines: list[str] = []
    while True:
        line = _read_line(prompt if not lines else "  " * bool(prompt))
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _read_line(prompt: str) -> str:
    if prompt:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _enable_history() -> None:
    """Enable line editing and history, if this Python has readline."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)
