"""Lines typed at a terminal, awaited: whoever waits can be cancelled, and the terminal stays as it was.

The terminal is never put into raw mode: its own line editing is used, so there is nothing to leave
behind. While a run is shown, what is typed is not echoed into it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Generator
from typing import TextIO

_MOST = 64 * 1024


class Keyboard:
    """The lines of one terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._fd = stream.fileno()
        self._typed = b""

    async def line(self) -> str | None:
        """The next line, without its end; None where it was ended with Ctrl-D: only Enter sends what was typed."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._typed:
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._fd, _wake, ready)
            try:
                await ready
            finally:
                loop.remove_reader(self._fd)
            try:
                more = os.read(self._fd, _MOST)
            except OSError:
                more = b""  # the terminal has gone
            if not more:
                self._typed = b""
                return None
            self._typed += more
        typed, _, self._typed = self._typed.partition(b"\n")
        return _text(typed)

    def forget(self) -> None:
        """Drop what was typed so far: it was not meant for a question nobody had seen."""
        import termios

        self._typed = b""
        with contextlib.suppress(termios.error, OSError):
            termios.tcflush(self._fd, termios.TCIFLUSH)

    @contextlib.contextmanager
    def echoing(self, on: bool) -> Generator[None]:
        """While this lasts, what is typed is shown, or not; afterwards it is as it was."""
        import termios

        try:
            before = termios.tcgetattr(self._fd)
        except (termios.error, OSError):
            yield
            return
        changed = [*before]
        changed[3] = changed[3] | termios.ECHO if on else changed[3] & ~termios.ECHO
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


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").rstrip("\r")
