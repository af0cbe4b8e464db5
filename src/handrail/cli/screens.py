"""Views of a run: a live screen on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text
from rich.theme import Theme

from handrail.cli.activity import Activity, format_progress, indent, queued_line
from handrail.cli.line_editor import LineEditor
from handrail.cli.streams import SCREEN, unguarded
from handrail.clock import Clock
from handrail.content import Attachment, guess_type
from handrail.environment.terminal import Keyboard
from handrail.events import (
    AttachmentDelta,
    MessageAdded,
    MessageQueued,
    ModelFailed,
    ModelResponded,
    Progress,
    TextDelta,
    ToolInvoked,
    ToolResumed,
    ToolStarted,
)
from handrail.messages import AssistantMessage
from handrail.text.rendering import escape, escape_line
from handrail.text.terminal import is_terminal, wants_colour

if TYPE_CHECKING:
    from handrail.cli.markdown import MarkdownFlow

Protocol = Literal["kitty", "iterm"]

_TERMINALS: Mapping[str, Protocol] = {
    "iterm.app": "iterm",
    "wezterm": "iterm",
    "mintty": "iterm",
    "ghostty": "kitty",
    "kitty": "kitty",
}
"""The protocol of each terminal, by its `TERM_PROGRAM` in lower case."""
_TYPES: Mapping[Protocol, frozenset[str]] = {
    "kitty": frozenset({"image/png"}),
    "iterm": frozenset({"image/png", "image/jpeg", "image/gif"}),
}
_ROWS = 16
"""Height of a picture in lines of text."""
_MOST_BYTES = 4_000_000
_CHUNK = 4096
"""Maximum length of the base64 text in one of kitty's escape sequences. kitty refuses longer ones."""


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """Return the protocol that the terminal's environment variables suggest, or None if it is unknown.

    Inside a multiplexer, such as tmux, it is None, because pictures do not reach the terminal.
    """
    term = environment.get("TERM", "")
    if environment.get("TMUX") or environment.get("STY") or term.startswith(("screen", "tmux")):
        return None
    known = _TERMINALS.get(environment.get("TERM_PROGRAM", "").lower())
    if known is not None:
        return known
    if environment.get("KITTY_WINDOW_ID") or term in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    return "iterm" if environment.get("LC_TERMINAL", "").lower() == "iterm2" else None


class Picture:
    """A picture that rich can print. The cursor is below it afterwards."""

    def __init__(self, sequence: str) -> None:
        self.sequence = sequence

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        yield Segment(self.sequence, None, [(ControlType.CARRIAGE_RETURN,)])  # rich writes controls unchanged
        yield Segment.line()


def pictures_in(attachments: Iterable[Attachment], protocol: Protocol | None) -> list[Picture]:
    """Return a picture for each attachment that the terminal can draw and that is not too large.

    Without a protocol, there are no pictures.
    """
    if protocol is None:
        return []
    draw = _kitty if protocol == "kitty" else _iterm
    return [
        Picture(draw(each))
        for each in attachments
        if each.is_here and each.size <= _MOST_BYTES and guess_type(each.content) in _TYPES[protocol]
    ]


def _kitty(attachment: Attachment) -> str:
    data = base64.b64encode(attachment.content).decode()
    chunks = [data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK)]
    keys = f"a=T,f=100,q=2,r={_ROWS},"  # send and show a PNG, and ask the terminal for no reply
    sequences: list[str] = []
    for number, chunk in enumerate(chunks, 1):
        sequences.append(f"\x1b_G{keys}m={int(number < len(chunks))};{chunk}\x1b\\")
        keys = ""
    return "".join(sequences)


def _iterm(attachment: Attachment) -> str:
    name = base64.b64encode(attachment.filename.encode(errors="replace")).decode()
    data = base64.b64encode(attachment.content).decode()
    how = f"name={name};size={attachment.size};height={_ROWS};preserveAspectRatio=1;inline=1"
    return f"\x1b]1337;File={how}:{data}\x07"


THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.h1": "bold underline",
        **{f"markdown.h{level}": "bold" for level in range(2, 7)},
        "markdown.block_quote": "dim",
        "markdown.item.number": "bold",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
"""Styles that can be read on a light and on a dark background: none has a background, and colours are the terminal's own."""

_REFRESH_SECONDS = 0.1
_PROGRESS_SECONDS = 5.0
"""Minimum seconds between two progress lines of one call in a plain view."""
_UNLIMITED = 10_000


def make_console(stream: TextIO, *, live: bool = False, width: int | None = None) -> Console:
    """Create a console that interprets no markup. It uses colour if `wants_colour` is true for the stream."""
    colour = wants_colour(stream)
    automatic = live or (colour and is_terminal(stream))
    return Console(
        file=unguarded(stream),
        force_terminal=True if live or colour else None,
        no_color=not colour,
        color_system="auto" if automatic else "standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        width=width,
        theme=THEME,
    )


class View:
    """Base class of views. A view shows one run after another. Subclasses define how a line is printed."""

    def __init__(self, console: Console, clock: Clock, *, verbose: bool = False) -> None:
        self.console = console
        self._clock = clock
        self._verbose = verbose
        self.activity = Activity(clock, verbose)
        self.hear: Callable[[str], None] | None = None
        """Called with each line that is typed while a run is shown; None if what is typed is not heard."""
        self.editor = LineEditor()
        self._held: list[Text | Picture] | None = None
        self._keyboard = Keyboard(sys.stdin) if is_terminal(sys.stdin) else None
        self._ears: contextlib.ExitStack | None = None
        """While a run is shown, what restores the terminal's settings."""

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        """Show one run's events inside this block."""
        self.activity = Activity(self._clock, self._verbose)
        with contextlib.ExitStack() as self._ears:
            self._listen()
            try:
                yield
            finally:
                ears, self._ears = self._ears, None
                ears.close()

    def _listen(self, *, by_key: bool = False) -> None:
        """Pass on each line that is typed to `hear`, until `_ears` is closed."""
        if self._keyboard is not None and self._ears is not None and self.hear is not None:
            self._ears.enter_context(self._keyboard.heard(self._typed, by_key=by_key))

    def _typed(self, typed: bytes) -> None:
        for line in self.editor.feed(typed):
            if self.hear is not None:
                self.hear(line)

    def show(self, event: object) -> None:
        """Show one of the run's events."""
        self._print(self.activity.update(event))

    def note(self, text: Text | str, style: str = "") -> None:
        """Print a line that is not about one of the run's events."""
        self._print([text if isinstance(text, Text) else Text(text, style)])

    def answer(self, text: str, *, literal: bool = False) -> None:
        """Print a run's answer, unless it was streamed already. A `literal` one is not Markdown."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Restore the terminal at once, because the process is about to end."""
        raise NotImplementedError

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Hold back output inside this block, and print it afterwards."""
        self._held = []
        if self._ears is not None:
            self._ears.close()
        try:
            with SCREEN.hold():
                yield
        finally:
            if self._ears is not None:
                self._listen()
            held, self._held = self._held, None
            self._print(held)

    def _print(self, lines: Sequence[Text | Picture]) -> None:
        if self._held is not None:
            self._held += lines
            return
        for line in lines:
            self._print_line(line)

    def _print_line(self, line: Text | Picture) -> None:
        raise NotImplementedError


class PlainView(View):
    """A view that prints plain lines: the answer to standard output, and everything else to standard error.

    With `quiet`, only the answer is printed.
    """

    def __init__(self, clock: Clock, *, verbose: bool = False, quiet: bool = False) -> None:
        width = None if is_terminal(sys.stderr) else _UNLIMITED  # log viewers wrap lines themselves
        super().__init__(make_console(sys.stderr, width=width), clock, verbose=verbose)
        self._quiet = quiet
        self._reported: dict[str, float] = {}

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        self._reported = {}
        with super().begin():
            yield

    def show(self, event: object) -> None:
        lines = self.activity.update(event)
        if isinstance(event, Progress):
            lines = self._progress(event)
        elif isinstance(event, MessageAdded):
            lines = self._message(event)
        elif isinstance(event, MessageQueued) and event.message.id in self.activity.queued:
            lines = [queued_line(event.message)]
        self._print(lines)

    def _progress(self, event: Progress) -> list[Text]:
        row, now = self.activity.rows.get(event.call_id), self._clock.monotonic()
        if row is None or now - self._reported.get(event.call_id, -_PROGRESS_SECONDS) < _PROGRESS_SECONDS:
            return []
        self._reported[event.call_id] = now
        progress = format_progress(row, bar=False)
        return [Text(f"{indent(row.path)}· {escape_line(row.name, 60)}: {progress}", "dim")]

    def _message(self, event: MessageAdded) -> list[Text]:
        """Return the lines of a message in which the outermost run's model wrote text and called tools.

        Returns no lines for any other message. A message without calls is the answer, which is printed separately.
        """
        message = event.message
        if event.run_id != self.activity.root or not isinstance(message, AssistantMessage):
            return []
        if not message.calls or not message.text.strip():
            return []
        return [Text(line) for line in escape(message.text.strip()).split("\n")]

    def answer(self, text: str, *, literal: bool = False) -> None:
        if text:
            sys.stdout.write(escape(text) + ("" if text.endswith("\n") else "\n"))
            sys.stdout.flush()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()

    def _print_line(self, line: Text | Picture) -> None:
        if not self._quiet:
            shown = (
                indented(line, self.console) if isinstance(line, Text) and self.console.is_terminal else line
            )
            self.console.print(shown, soft_wrap=True)


_INDENT = re.compile(r" *(?:[^\w\s] )?")


def indented(text: Text, console: Console) -> Text:
    """Wrap the lines of a text so that what follows has the indent of its line, without the mark that the line begins with."""
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        found = _INDENT.match(line.plain)
        indent = 0 if found is None else cell_len(found[0])
        if line.cell_len <= console.width or indent > console.width // 2:
            lines.append(line)
            continue
        first, *more = line[indent:].wrap(console, console.width - indent, overflow="fold")
        lines += [line[:indent] + first, *(Text(" " * indent) + each for each in more)]
    return Text("\n").join(lines)


class LiveView(View):
    """A view for a terminal.

    Finished lines are printed once and never changed. Work in progress is redrawn below them ten times a second.
    Nothing is drawn while a question is asked, and lines that arrive in the meantime are printed afterwards. The
    pictures that a call returned, or the model made, are drawn below their lines, if the terminal can draw pictures.
    """

    def __init__(self, clock: Clock, *, verbose: bool = False) -> None:
        super().__init__(make_console(sys.stdout, live=True), clock, verbose=verbose)
        self._pictures: Protocol | None = protocol_of(os.environ)
        self._live: Live | None = None
        self._flow = self._new_flow()
        self._streamed = ""
        self._has_answered = False
        """Whether the text of the newest message of the outermost run's model, which called nothing, has been streamed."""

    @contextlib.contextmanager
    def begin(self) -> Generator[None]:
        self._flow = self._new_flow()
        self._streamed, self._has_answered = "", False
        with super().begin():
            drawing = asyncio.get_running_loop().create_task(self._draw())
            self._start()
            try:
                yield
            finally:
                drawing.cancel()
                self._end_text()
                self._stop()
                if self._keyboard is not None and self.hear is None:
                    self._keyboard.clear()

    def _listen(self, *, by_key: bool = True) -> None:
        super()._listen(by_key=by_key)
        if self._keyboard is not None and self._ears is not None and self.hear is None:
            self._ears.enter_context(self._keyboard.echo(False))

    def _typed(self, typed: bytes) -> None:
        super()._typed(typed)
        self._refresh()

    def show(self, event: object) -> None:
        if isinstance(event, TextDelta) and event.run_context.run_id == self.activity.root:
            self._streamed += event.text
            self._flow.resize(self.console.width)
            self._print(self.activity.update(event))
            self._print(self._flow.feed(event.text))
            return
        if isinstance(event, MessageAdded) and event.run_id == self.activity.root:
            message = event.message
            answers = isinstance(message, AssistantMessage) and not message.calls
            self._has_answered = answers and bool(message.text) and self._streamed.endswith(message.text)
        if isinstance(event, ToolStarted | ToolResumed | ModelResponded | ModelFailed):
            if event.run_context.run_id == self.activity.root:
                self._end_text()
                if isinstance(event, ModelFailed):
                    self._streamed = ""
        elif self._flow.tail and (lines := self.activity.update(event)):
            self._end_text()
            self._print([*lines, *self._drawn(event)])
            return
        self._print([*self.activity.update(event), *self._drawn(event)])

    def _drawn(self, event: object) -> list[Picture]:
        if isinstance(event, AttachmentDelta) and event.run_context.run_id == self.activity.root:
            return pictures_in([event.attachment], self._pictures)
        return pictures_in(event.result.attachments, self._pictures) if isinstance(event, ToolInvoked) else []

    def note(self, text: Text | str, style: str = "") -> None:
        self._end_text()
        super().note(text, style)

    def answer(self, text: str, *, literal: bool = False) -> None:
        if text and not self._has_answered:
            self._print(self._new_flow().whole(text, literal=literal))

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._stop()
            self.console.show_cursor(True)
            if self._ears is not None:
                self._ears.close()

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        self._end_text()
        self._stop()
        with super().hold():
            try:
                yield
            finally:
                if self._ears is not None:
                    self._start()

    def _print(self, lines: Sequence[Text | Picture]) -> None:
        with SCREEN.lock:
            super()._print(lines)
            self._refresh()

    def _print_line(self, line: Text | Picture) -> None:
        shown = indented(line, self.console) if isinstance(line, Text) else line
        self.console.print(shown, soft_wrap=False, overflow="fold", crop=isinstance(line, Text))

    def _new_flow(self) -> MarkdownFlow:
        from handrail.cli.markdown import MarkdownFlow

        return MarkdownFlow(self.console, self.console.width)

    def _end_text(self) -> None:
        self._print(self._flow.end())

    def _start(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                get_renderable=self._below,
                vertical_overflow="crop",
                redirect_stdout=False,
                redirect_stderr=False,
            )
            with SCREEN.lock:
                self._live.start()
                SCREEN.print_above(cast("TextIO", FileProxy(self.console, self.console.file)))

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with SCREEN.lock:
                SCREEN.print_above(None)
                live.stop()

    def _below(self) -> Group:
        """Return what is drawn below the finished lines: the lines being written, the work in progress, and what is said to the run."""
        lines = self.activity.live_lines(max(self.console.height // 2, 3))
        lines += [queued_line(each) for each in self.activity.queued.values()]
        lines += [self._typed_line()] if self.editor.text else []
        room = max(
            self.console.height - len(lines) - 1, 1
        )  # if there is more, its end is what is being written
        return Group(*self._flow.tail[-room:], *lines)

    def _typed_line(self) -> Text:
        """Return the end of the line that is being typed, as far as it fits."""
        text = escape(self.editor.text.replace("\n", "↵"))
        while cell_len(text) > max(self.console.width - 4, 1):
            text = text[1:]
        return Text.assemble(("» ", "cyan"), text, ("▏", "dim"))

    def _refresh(self) -> None:
        with SCREEN.lock:
            if self._live is not None and self._held is None:
                self._live.refresh()

    async def _draw(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            if self.activity.rows or self.activity.thinking:
                self._refresh()
