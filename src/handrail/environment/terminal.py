"""`Terminal`: a person at a terminal, asked one question at a time."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from typing import Any, Protocol, TextIO, cast

from handrail.environment.approving import approve, asker
from handrail.environment.form import NOTHING, filled_in
from handrail.environment.ink import Ink, Style, is_terminal, wants_colour
from handrail.environment.keyboard import Keyboard
from handrail.environment.visible import laid_out, on_one_line, visible
from handrail.errors import Declined, QuestionCancelled
from handrail.question import Answer, Question
from handrail.tools import RunMode


class Screen(Protocol):
    """Whatever else is shown on the terminal. It waits while somebody is asked."""

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts, print nothing; show what came meanwhile afterwards."""
        ...


class Terminal:
    """An environment with somebody at a terminal; with nobody where there is none.

    - Somebody is there (`run_mode` is `user`) when both streams are terminals. Elsewhere it is `headless`, and
      nobody is asked anything.
    - Questions are asked one after the other. One that is withdrawn while it is shown ends and says so.
    - What is typed for a secret is not shown, neither then nor before it is sent.
    - What was typed before a question was shown does not answer it; Enter alone approves nothing; Ctrl-D declines.
    - Whatever a model, a tool or a file says is shown with its control characters written out.
    - The terminal is never put into raw mode, so it is as it was whenever this ends.
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
        there = is_terminal(self._in) and is_terminal(self._out)
        self._mode: RunMode = "user" if there else "headless"
        self._keyboard = Keyboard(cast(TextIO, self._in)) if there else None
        self._ink = Ink(wants_colour(self._out))
        self._turn = asyncio.Lock()
        self._given: dict[str, Any] = {}

    @property
    def run_mode(self) -> RunMode:
        return self._mode

    async def ask(self, question: Question, /) -> Answer:
        """Put one question to whoever is there, once those before it are over."""
        keyboard = self._keyboard
        if keyboard is None:
            raise QuestionCancelled(question.name)
        screen = self._screen
        async with self._turn:
            with screen.hold() if screen is not None else contextlib.nullcontext(), keyboard.echoing(True):
                keyboard.forget()
                sheet = _Sheet(self, keyboard)
                try:
                    return await self._asked(question, sheet)
                finally:
                    sheet.say()

    async def _asked(self, question: Question, sheet: _Sheet) -> Answer:
        sheet.say()
        try:
            if question.kind == "approval":
                value: Any = await approve(question, sheet, self._ink, _page())
            else:
                value = await self._form(question, sheet)
        except Declined as declined:
            sheet.say("  Declined.", "dim")
            return _answer(question, outcome="declined", reason=declined.reason)
        except asyncio.CancelledError:
            sheet.say("\n  This question was withdrawn: it needs no answer any more.", "yellow")
            raise
        return _answer(question, value=value)

    async def _form(self, question: Question, sheet: _Sheet) -> Any:
        ink = self._ink
        sheet.say(
            f"{ink('?', 'yellow', 'bold')} {ink('Please fill in:', 'bold')} {ink(on_one_line(question.name), 'bold')}"
        )
        if len(question.asked_by) > 1:
            sheet.say(f"  asked by {ink(asker(question), 'cyan')}")
        for line in visible(question.message).split("\n"):
            sheet.say(f"  {line}", "dim")
        if question.payload not in (None, {}, [], ""):
            for line in laid_out(question.payload, "    "):
                sheet.say(line)
        sheet.say("  Ctrl-D declines.", "dim")
        value = await filled_in(question.schema, sheet, self._given.get(question.id, NOTHING))
        self._given = {question.id: value}  # asked again because it did not fit, it starts with this
        return value

    def write(self, text: str) -> None:
        """Print, to whoever is there."""
        out = cast(TextIO, self._out)
        out.write(text)
        out.flush()

    def styled(self, text: str, *styles: Style) -> str:
        return self._ink(text, *styles)


class _Sheet:
    """The terminal as a form and an approval see it."""

    def __init__(self, terminal: Terminal, keyboard: Keyboard) -> None:
        self._terminal = terminal
        self._keyboard = keyboard

    def say(self, text: str = "", *styles: Style) -> None:
        self._terminal.write(f"{self._terminal.styled(text, *styles)}\n")

    async def line(self, prompt: str) -> str:
        self._terminal.write(prompt)
        return self._typed(await self._keyboard.line())

    async def hidden(self, prompt: str) -> str:
        self._terminal.write(prompt)
        with self._keyboard.echoing(False):
            typed = await self._keyboard.line()
        if typed is not None:
            self._terminal.write("\n")  # Enter was not shown either
        return self._typed(typed)

    def _typed(self, typed: str | None) -> str:
        if typed is None:
            self._terminal.write("\n")
            raise Declined("", "")
        return typed


def _answer(question: Question, **more: Any) -> Answer:
    return Answer(question_id=question.id, digest=question.digest, by=question.principal, **more)


def _page() -> int:
    """How many lines fit on the screen beside the prompt."""
    return max(shutil.get_terminal_size().lines - 2, 5)
