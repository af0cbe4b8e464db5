"""`TerminalEnvironment`: a person at a terminal, who is asked one question at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Generator
from typing import Any, Protocol, TextIO, cast

from handrail.environment.form import NOTHING, describe, fill_in, fill_in_approval
from handrail.errors import Declined, QuestionCancelled
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.text.spelling import checked_arguments
from handrail.text.terminal import Style, Styler, is_terminal, terminal_size, wants_colour, wrap
from handrail.tools import RunMode

_READ_BYTES = 64 * 1024


class Keyboard:
    """Reads typed lines asynchronously, so that waiting for one can be cancelled.

    The terminal stays in its normal line mode, except inside `heard`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._typed = b""

    async def line(self) -> str | None:
        """Read the next line, without its line ending. Returns None for Ctrl-D or a closed terminal."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._typed:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._fd, _wake, ready)
            try:
                await ready
            finally:
                loop.remove_reader(self._fd)
            try:
                more = os.read(self._fd, _READ_BYTES)
            except OSError:
                more = b""  # the terminal was closed
            if not more:
                self._typed = b""
                return None
            self._typed += more
        typed, _, self._typed = self._typed.partition(b"\n")
        return typed.decode("utf-8", "replace").rstrip("\r")

    def clear(self) -> None:
        """Discard everything typed so far, so that it does not answer a question that was not shown yet."""
        import termios

        self._typed = b""
        with contextlib.suppress(termios.error, OSError):
            termios.tcflush(self._fd, termios.TCIFLUSH)

    @contextlib.contextmanager
    def echo(self, on: bool) -> Generator[None]:
        """Show or hide what is typed inside this block, and restore the earlier setting afterwards.

        Does nothing if the terminal's settings can't be read.
        """
        import termios

        with self._local_modes(*((termios.ECHO, 0) if on else (0, termios.ECHO))):
            yield

    @contextlib.contextmanager
    def heard(self, hear: Callable[[bytes], None], *, by_key: bool) -> Generator[None]:
        """Pass on what is typed inside this block. With `by_key`, each key is passed on as it is typed, and not shown; otherwise each line.

        Ctrl-C stays a signal. The earlier settings of the terminal are restored afterwards.
        """
        import termios

        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                typed = os.read(self._fd, _READ_BYTES)
            except OSError:
                typed = b""
            if typed:
                hear(typed)
            else:
                loop.remove_reader(self._fd)  # the terminal was closed, or an empty line ended with Ctrl-D

        with self._local_modes(0, termios.ECHO | termios.ICANON if by_key else 0):
            loop.add_reader(self._fd, read)
            try:
                yield
            finally:
                loop.remove_reader(self._fd)

    @contextlib.contextmanager
    def _local_modes(self, on: int, off: int) -> Generator[None]:
        import termios

        try:
            before = termios.tcgetattr(self._fd)
        except (termios.error, OSError):
            yield
            return
        changed = [*before]
        changed[3] = (changed[3] | on) & ~off
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self._fd, termios.TCSANOW, changed)
        try:
            yield
        finally:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._fd, termios.TCSANOW, before)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


class Screen(Protocol):
    """Another writer to the same terminal. It must pause while a question is asked."""

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Hold back other output inside this block, and print it afterwards."""
        ...


@checked_arguments
class TerminalEnvironment(Environment):
    """A person at a terminal, or nobody if there is no terminal.

    - `run_mode` is `user` if both streams are terminals. Otherwise it is `headless`, and every question is cancelled.
    - Questions are asked one after the other. If a question is withdrawn while it is shown, a note says so.
    - Secrets are hidden while they are typed, and masked when the answer is shown before it is sent.
    - What was typed before a question appeared does not answer it. Enter alone approves nothing. Ctrl-D declines.
    - Text from a model, a tool or a file is escaped. A question's message, arguments and diff are wrapped behind a bar,
      so that they can't imitate a question.
    - The terminal is never put into raw mode. Only its echo is changed, and restored afterwards.
    """

    def __init__(
        self,
        *,
        stdin: TextIO | None = None,
        stdout: TextIO | None = None,
        screen: Screen | None = None,
    ) -> None:
        self._in: TextIO | None = stdin if stdin is not None else sys.stdin
        self._out: TextIO | None = stdout if stdout is not None else sys.stdout
        self._screen = screen
        attended = is_terminal(self._in) and is_terminal(self._out)
        self.run_mode: RunMode = "user" if attended else "headless"
        self._keyboard = Keyboard(cast(TextIO, self._in)) if attended else None
        self._style = Styler(wants_colour(self._out))
        self._lock = asyncio.Lock()
        self._last: dict[str, Any] = {}

    async def ask(self, question: Question, /) -> Answer:
        """Ask a question after all earlier ones are over, and return the answer.

        If the person declines, the answer's outcome is `declined`. Raises `QuestionCancelled` if there is no terminal.
        """
        keyboard = self._keyboard
        if keyboard is None:
            raise QuestionCancelled(question.name)
        screen = self._screen
        async with self._lock:
            with screen.hold() if screen is not None else contextlib.nullcontext(), keyboard.echo(True):
                keyboard.clear()
                dialog = TerminalDialog(cast(TextIO, self._out), keyboard, self._style, self._size().columns)
                try:
                    return await self._ask(question, dialog)
                finally:
                    dialog.say()

    async def _ask(self, question: Question, dialog: TerminalDialog) -> Answer:
        dialog.say()
        try:
            if question.kind == "approval":
                value: Any = await fill_in_approval(question, dialog, self._style, self._size())
            else:
                value = await self._fill_in(question, dialog)
        except Declined as declined:
            dialog.say("  Declined.", "dim")
            return _answer(question, outcome="declined", reason=declined.reason)
        except asyncio.CancelledError:
            dialog.say()
            dialog.say("  This question was withdrawn and no longer needs an answer.", "yellow")
            raise
        return _answer(question, value=value)

    def _size(self) -> os.terminal_size:
        return terminal_size(cast(TextIO, self._out))

    async def _fill_in(self, question: Question, dialog: TerminalDialog) -> Any:
        style = self._style
        first, *lines = describe(question, "? {name}", self._size().columns, whole=True)
        dialog.say(f"{style('?', 'yellow', 'bold')}{style(first[1:], 'bold')}")
        for line in lines:
            dialog.say(line)
        dialog.say("  Ctrl-D declines.", "dim")
        value = await fill_in(question.schema, dialog, self._last.get(question.id, NOTHING))
        self._last = {question.id: value}  # offered again if the answer is refused
        return value


class TerminalDialog:
    """The terminal as a `Dialog` for forms."""

    def __init__(self, out: TextIO, keyboard: Keyboard, style: Styler, width: int) -> None:
        self._out = out
        self._keyboard = keyboard
        self._style = style
        self._width = width

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def say(self, text: str = "", *styles: Style) -> None:
        for line in self._lines(text):
            self._write(f"{self._style(line, *styles)}\n")

    def _lines(self, text: str) -> list[str]:
        """Wrap text that is too long for a line. A bar marks each continuation, so that it can't look like a new line.

        A line with styles inside is not wrapped, because the form has already laid it out.
        """
        if "\x1b" in text or len([*wrap(text, self._width)]) == 1:
            return [text]
        first, *more = wrap(text, self._width - 5)
        return [first, *(f"  │ {line}" for line in more)]

    async def line(self, prompt: str) -> str:
        self._write("\n".join(self._lines(prompt)))
        return self._checked(await self._keyboard.line())

    async def hidden_line(self, prompt: str) -> str:
        self._write("\n".join(self._lines(prompt)))
        with self._keyboard.echo(False):
            typed = await self._keyboard.line()
        if typed is not None:
            self._write("\n")  # Enter was not echoed, because echo was off
        return self._checked(typed)

    def _checked(self, typed: str | None) -> str:
        if typed is None:
            self._write("\n")
            raise Declined("", "")
        return typed


def _answer(question: Question, **more: Any) -> Answer:
    return Answer(question_id=question.id, digest=question.digest, by=question.principal, **more)
