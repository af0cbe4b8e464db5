"""`handrail chat`: messages from a person, and commands that start with a slash."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from handrail.cli.activity import answer_text, format_money, format_spending, format_summary
from handrail.cli.command_options import WorkerOptions
from handrail.cli.outcome import CANCELLED, DONE, USAGE, divert_stdout, fail, is_debugging, print_error
from handrail.cli.run_command import Conversation, Subject, TurnOutcome
from handrail.cli.streams import configure_logging
from handrail.errors import HandrailError, MessageRefused, RunUnknown, UndoRefused
from handrail.guard import approvals_of
from handrail.journal.records import CallKey, When
from handrail.run.conversation import root_conversation
from handrail.run.options import RunFiles
from handrail.run.place import Place
from handrail.runs.reversal import built_on
from handrail.text.rendering import escape, escape_line

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.resources.workspace import Workspace
    from handrail.run.response import RunStream

HELP = """\
/help            show this help
/approvals       list what you approved or denied for the whole session
/approvals N     forget decision N, so that you are asked again
/undo            undo the newest call that changed files
/compact         send less of the conversation to the model from now on; nothing is lost
/cost            show what the conversation has cost so far
/quit            leave, like Ctrl-D
While a run works, a line is told to it before its next step:
/now TEXT        tell it now, and stop its current answer
/later TEXT      tell it when it would be done
/withdraw        take back the newest line that it was not told yet
End a line with \\ to continue it on the next. Ctrl-C cancels a run; pressed twice, it ends the program."""


_WHEN: Mapping[str, When] = {"/now": "now", "/later": "afterwards"}


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
        self._unsaid: list[str] = []
        """Lines that were typed while a run worked, and that came too late for it."""
        self._run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "/help": lambda rest: self._view.note(HELP),
            "/approvals": self._approvals,
            "/undo": self._undo,
            "/compact": self._compact,
            "/cost": self._show_cost,
            "/now": self._say,
            "/later": self._say,
            "/withdraw": lambda rest: self._view.note("Nothing waits to be told.", "yellow"),
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
                    message = self._next_message(attended)
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

    def _next_message(self, attended: bool) -> str:
        """Return what came too late for the last run, or else read a message, which begins with what was typed meanwhile."""
        if self._unsaid:
            message = self._unsaid.pop(0)
            self._view.note(Text(f"› {escape(message)}"))
            return message
        return _read_message("› " if attended else "", self._view.editor.take())

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
            hear = self._hear if self._conversation.is_attended else None
            outcome = self._run(self._conversation.turn(message, hear))
        self._code = outcome.code
        activity = self._view.activity
        self._done += activity.done
        self._print_outcome(outcome)
        for each in activity.queued.values():
            self._view.note(f"Not told yet: {escape_line(each.text)}", "dim")
        if outcome.code >= CANCELLED:
            self._view.editor.text = "\n".join([*self._unsaid, self._view.editor.text])
            self._unsaid.clear()

    async def _hear(self, stream: RunStream[Any] | None, line: str) -> None:
        """Tell a run what was typed while it worked, or carry out a command."""
        name, _, rest = line.partition(" ")
        when = _WHEN.get(name)
        if not line.strip():
            return
        if name == "/withdraw":
            await self._withdraw_newest(stream)
        elif name in ("/help", "/cost", "/approvals", "/compact"):
            self._command(line)
        elif name.startswith("/") and when is None:
            self._view.note(f"{escape_line(name, 30)} has to wait until the run is over.", "yellow")
        else:
            text = line if when is None else rest
            try:
                if stream is None:
                    self._unsaid.append(text)
                else:
                    self._view.activity.accept(await stream.send(text, when=when or "next step"))
            except (MessageRefused, RunUnknown):
                self._unsaid.append(text)  # the run is over
            except HandrailError as error:
                self._view.note(escape(str(error)), "red")

    async def _withdraw_newest(self, stream: RunStream[Any] | None) -> None:
        waiting = list(self._view.activity.queued)
        if stream is None or not waiting:
            self._view.note("Nothing waits to be told.", "yellow")
            return
        try:
            await stream.withdraw(waiting[-1])
        except HandrailError as error:
            self._view.note(escape(str(error)), "yellow")

    def _print_outcome(self, outcome: TurnOutcome) -> None:
        view, response = self._view, outcome.response
        if response is not None:
            view.answer(answer_text(response), literal=not isinstance(response.output, str | None))
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

    def _say(self, rest: list[str]) -> None:
        """Send a message that was meant for a run, because none works."""
        self._unsaid += [" ".join(rest)] if rest else []

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


def _read_message(prompt: str, begun: str = "") -> str:
    """Read a message, which begins with the text `begun`. A line that ends in a backslash continues on the next one. Raises `EOFError` at the end of input."""
    lines: list[str] = []
    while True:
        line = _read_line(prompt if not lines else "  " * bool(prompt), begun if not lines else "")
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _read_line(prompt: str, begun: str) -> str:
    if prompt:
        with _typed_before(begun):
            return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextlib.contextmanager
def _typed_before(text: str) -> Generator[None]:
    """Let the next line that is read begin with this text, if this Python has readline."""
    if not text:
        yield
        return
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        yield
    finally:
        readline.set_startup_hook()


def _enable_history() -> None:
    """Enable line editing and history, if this Python has readline."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)
