"""A run on a terminal: text as it is written, calls as they happen, one line each when they are over."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Generator
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from handrail.cli.flow import Markdown, TextFlow
from handrail.cli.ledger import Ledger
from handrail.clock import Clock
from handrail.environment.terminal import Keyboard
from handrail.environment.text import is_terminal, wants_colour
from handrail.events import ModelFailed, ModelResponded, TextDelta, ToolStarted

_REFRESH = 0.1


class View(Protocol):
    """Where a run is shown."""

    ledger: Ledger

    def begin(self) -> contextlib.AbstractContextManager[None]:
        """For one run: what is under way is shown while this lasts."""
        ...

    def show(self, event: object) -> None: ...
    def note(self, text: Text | str, style: str = "") -> None:
        """Say something about the run that is none of its events."""
        ...

    def answer(self, text: str) -> None:
        """The answer of a run, whole, at its end; one that was streamed is not printed again."""
        ...

    def abandon(self) -> None:
        """Leave the terminal as it was found, at once: the process is about to end."""
        ...


class LiveScreen:
    """The view for a terminal.

    What is over is printed and never touched again; below it, what is under way is drawn anew ten times
    a second. While somebody is asked nothing is drawn, and what comes meanwhile is printed afterwards.
    """

    def __init__(self, clock: Clock, *, verbose: bool = False) -> None:
        colour = wants_colour(sys.stdout)
        self.console = Console(
            no_color=not colour, highlight=False, markup=False, emoji=False, force_terminal=True
        )
        self._clock = clock
        self._verbose = verbose
        self.ledger = Ledger(clock, verbose)
        self._keyboard = Keyboard(sys.stdin) if is_terminal(sys.stdin) else None
        self._live: Live | None = None
        self._flow = TextFlow(self.console.width)
        self._markdown = Markdown()
        self._held: list[Text] | None = None
        self._streamed = ""
        self._echo: contextlib.ExitStack | None = None

    # A run.

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        self.ledger = Ledger(self._clock, self._verbose)
        self._flow, self._markdown = TextFlow(self.console.width), Markdown()
        self._streamed = ""
        with contextlib.ExitStack() as stack:
            self._echo = stack
            if self._keyboard is not None:
                stack.enter_context(self._keyboard.echo(False))
            drawing = asyncio.get_running_loop().create_task(self._draw())
            self._start()
            try:
                yield
            finally:
                drawing.cancel()
                self._end_text()
                self._stop()
                if self._keyboard is not None:
                    self._keyboard.clear()

    def show(self, event: object) -> None:
        if isinstance(event, TextDelta) and event.run_context.run_id == self.ledger.root:
            self._streamed += event.text
            self._flow.width = max(self.console.width, 10)
            self.ledger.take(event)
            self._print([self._markdown.line(line) for line in self._flow.feed(event.text)])
            return
        if isinstance(event, ToolStarted | ModelResponded | ModelFailed):
            ours = event.run_context.run_id == self.ledger.root
            if ours:
                self._end_text()
            if ours and isinstance(event, ModelFailed):
                self._streamed = ""
        elif self._flow.tail and (said := self.ledger.take(event)):
            self._end_text()
            self._print(said)
            return
        self._print(self.ledger.take(event))

    def note(self, text: Text | str, style: str = "") -> None:
        self._end_text()
        self._print([text if isinstance(text, Text) else Text(text, style)])

    def answer(self, text: str) -> None:
        if text and not self._streamed.endswith(text):
            flow, markdown = TextFlow(self.console.width), Markdown()
            self._print([markdown.line(line) for line in [*flow.feed(text), *flow.end()]])

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._stop()
            self.console.show_cursor(True)
            if self._echo is not None:
                self._echo.close()

    # Printing and drawing.

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """While this lasts nothing is printed; what came meanwhile follows."""
        self._end_text()
        self._stop()
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            if self._echo is not None:
                self._start()
            self._print(held)

    def _print(self, lines: list[Text]) -> None:
        if self._held is not None:
            self._held += lines
            return
        for line in lines:
            self.console.print(line, soft_wrap=False, overflow="fold")
        self._refresh()

    def _end_text(self) -> None:
        self._print([self._markdown.line(line) for line in self._flow.end()])

    def _start(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                get_renderable=self._below,
                vertical_overflow="crop",
            )
            self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _below(self) -> Group:
        """What is drawn below what is over: the line being written, and what is under way."""
        tail = [self._markdown.peek(self._flow.tail)] if self._flow.tail else []
        return Group(*tail, *self.ledger.live(max(self.console.height // 2, 3)))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    async def _draw(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH)
            if self.ledger.rows or self.ledger.thinking:
                self._refresh()
