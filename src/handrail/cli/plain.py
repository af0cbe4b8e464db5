"""A run where nobody watches: a line each on standard error, the answer alone on standard output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

from rich.console import Console
from rich.text import Text

from handrail.cli.flow import TextFlow
from handrail.cli.ledger import Ledger, progress_words
from handrail.cli.lines import indent
from handrail.clock import Clock
from handrail.environment.text import escape, escape_line, is_terminal, wants_colour
from handrail.events import MessageAdded, Progress
from handrail.messages import AssistantMessage

_EVERY = 5.0
"""Seconds between two lines about the progress of one call."""


class PlainView:
    """Lines without a cursor: no spinner, nothing redrawn, colour only where it is asked for.

    The answer goes to standard output, whole and once; all else to standard error.
    """

    def __init__(self, clock: Clock, *, verbose: bool = False, quiet: bool = False) -> None:
        self._clock = clock
        self._verbose = verbose
        self._quiet = quiet
        self.ledger = Ledger(clock, verbose)
        colour = wants_colour(sys.stderr)
        self._console = Console(
            file=sys.stderr,
            force_terminal=colour,
            no_color=not colour,
            color_system="standard" if colour else None,
            highlight=False,
            markup=False,
            emoji=False,
            width=None if is_terminal(sys.stderr) else 10_000,  # a log breaks its lines itself
        )
        self._told: dict[str, float] = {}
        self._held: list[Text] | None = None

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        self.ledger = Ledger(self._clock, self._verbose)
        self._told = {}
        yield

    def show(self, event: object) -> None:
        lines = self.ledger.take(event)
        if isinstance(event, Progress):
            lines = self._progress(event)
        elif isinstance(event, MessageAdded):
            lines = self._said(event)
        if not self._quiet:
            self._print(lines)

    def _progress(self, event: Progress) -> list[Text]:
        row, now = self.ledger.rows.get(event.call_id), self._clock.monotonic()
        if row is None or now - self._told.get(event.call_id, -_EVERY) < _EVERY:
            return []
        self._told[event.call_id] = now
        said = progress_words(row).replace("━", "").replace("─", "").strip()
        return [Text(f"{indent(row.path)}· {escape_line(row.name, 60)}: {said}", "dim")]

    def _said(self, event: MessageAdded) -> list[Text]:
        """What a model says before it calls a tool; its last word is the answer, and not said here."""
        message = event.message
        if event.run_id != self.ledger.root or not isinstance(message, AssistantMessage):
            return []
        if not message.calls or not message.text.strip():
            return []
        flow = TextFlow(10_000)
        return [Text(line) for line in [*flow.feed(message.text.strip()), *flow.end()]]

    def note(self, text: Text | str, style: str = "") -> None:
        if not self._quiet:
            self._print([text if isinstance(text, Text) else Text(text, style)])

    def answer(self, text: str) -> None:
        if text:
            sys.stdout.write(escape(text) + ("" if text.endswith("\n") else "\n"))
            sys.stdout.flush()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """While this lasts nothing is printed; what came meanwhile follows."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            self._print(held)

    def _print(self, lines: list[Text]) -> None:
        if self._held is not None:
            self._held += lines
            return
        for line in lines:
            self._console.print(line, soft_wrap=True)
