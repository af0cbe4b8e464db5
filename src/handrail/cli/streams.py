"""Standard output and standard error, as all code but Handrail's own views sees them.

While a command runs, `sys.stdout` (if it is a terminal) and `sys.stderr` are `GuardedStream`s. Log lines of other libraries,
warnings, tracebacks and what tools print all go through them, however they are written, so none of them can control the
terminal, and none of them appears while a question is open. Handrail's own colours, bars and pictures are written to the
streams behind them, which `unguarded` returns.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

from handrail.text.rendering import escape
from handrail.text.secrets import hide_all
from handrail.text.terminal import is_terminal, terminal_size, wrap

if TYPE_CHECKING:
    from handrail.environment import Screen as Holder
    from handrail.environment import TerminalEnvironment

_MAX_HELD = 1_000_000
"""Maximum number of characters that are held back while a question is open. Text beyond it is dropped."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


class Screen:
    """What guarded streams write to a terminal: at once, above what a live view redraws, or after an open question."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while something is written. Code that also locks rich's console takes this lock first."""
        self._held: list[tuple[TextIO, str]] | None = None
        self._room = 0
        self._above: TextIO | None = None

    def write(self, stream: TextIO, text: str) -> None:
        with self.lock:
            if self._held is None:
                (self._above or stream).write(text)
            elif len(text) <= self._room:
                self._room -= len(text)
                self._held.append((stream, text))
            elif self._room:
                self._room = 0
                self._held.append((stream, "Further output was left out while the question was open.\n"))

    def flush(self, stream: TextIO) -> None:
        with self.lock:
            if self._held is None:
                (self._above or stream).flush()

    def print_above(self, file: TextIO | None) -> None:
        """From now on, write to `file`, which prints above what a live view redraws. With None, write to the streams again."""
        with self.lock:
            if self._above is not None:
                self._above.flush()
            self._above = file

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        """Hold back what is written inside this block, up to a limit, and write it afterwards."""
        with self.lock:
            outer, self._held, self._room = self._held, [], _MAX_HELD
        try:
            yield
        finally:
            with self.lock:
                held, self._held = self._held, outer
                for stream, text in held:
                    self.write(stream, text)
                for stream, _ in held[-1:]:
                    self.flush(stream)


SCREEN = Screen()


class GuardedStream:
    """A stream that escapes control characters, and drops colours. `hide` removes secrets from the text first.

    On a terminal, `SCREEN` determines when the text is written. All other attributes are those of the stream behind it.
    """

    def __init__(self, stream: TextIO, hide: Callable[[str], str] | None = None) -> None:
        self.unguarded = stream
        self._hide = hide
        self._is_terminal = is_terminal(stream)

    def write(self, text: str) -> int:
        shown = text if self._hide is None else self._hide(text)
        clean = escape(_COLOUR.sub("", shown))
        if self._is_terminal:
            SCREEN.write(self.unguarded, clean)
        else:
            self.unguarded.write(clean)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._is_terminal:
            SCREEN.flush(self.unguarded)
        else:
            self.unguarded.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def guard_streams() -> None:
    """Guard this process's standard streams, and name the logger of each record that no handler takes.

    Standard output that is not a terminal is left alone, because another program reads it.
    """
    sys.stderr = cast("TextIO", GuardedStream(sys.stderr, hide_all))
    if is_terminal(sys.stdout):
        sys.stdout = cast("TextIO", GuardedStream(sys.stdout))
    logging.lastResort = _log_handler(logging.WARNING)


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind a guarded one, for text whose untrusted parts are escaped already."""
    return stream.unguarded if isinstance(stream, GuardedStream) else stream


def terminal_environment(stdin: TextIO | None = None, screen: Holder = SCREEN) -> TerminalEnvironment:
    """Return an environment that asks at the terminal. A view is passed as `screen`; by itself, it holds back `SCREEN` too."""
    from handrail.environment import TerminalEnvironment

    return TerminalEnvironment(stdin=stdin, stdout=unguarded(sys.stdout), screen=screen)


class _LogFormatter(logging.Formatter):
    """Names the logger, and wraps further lines behind a bar, so that a record can't look like output of Handrail."""

    def format(self, record: logging.LogRecord) -> str:
        text = escape(hide_all(super().format(record)))  # hidden first, because a secret may be wrapped
        return "\n  │ ".join(
            wrap(text, terminal_size(sys.stderr).columns - 5) if is_terminal(sys.stderr) else text.split("\n")
        )


def _log_handler(level: int) -> logging.StreamHandler[TextIO]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)
    handler.setFormatter(_LogFormatter("%(name)s: %(message)s"))
    return handler


def configure_logging(verbose: bool) -> None:
    """With `verbose`, print log records from INFO on to standard error. Otherwise, discard Handrail's own, except warnings about telemetry.

    Does nothing if the root logger has a handler, as with `--log json`.
    """
    if logging.getLogger().handlers:
        return
    if verbose:
        logging.basicConfig(level=logging.INFO, handlers=[_log_handler(logging.INFO)])
    else:
        log = logging.getLogger("handrail")
        log.addHandler(logging.NullHandler())
        log.propagate = False
        logging.getLogger("handrail.telemetry").addHandler(_log_handler(logging.WARNING))
