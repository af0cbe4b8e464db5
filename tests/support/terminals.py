"""A terminal for tests: a pseudo-terminal, and a screen on which pyte draws its output."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TextIO

import pyte

from support import PATIENCE, warm_python


class Window:
    """A pseudo-terminal, with methods to type on its keyboard and to read its screen."""

    def __init__(self, columns: int = 100, rows: int = 45) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self._screen = pyte.HistoryScreen(columns, rows, history=2000)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self.child: warm_python.Program | None = None

    def start(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Any) -> None:
        """Run a program in the window, as a shell in a terminal would."""
        python, *arguments = command
        assert python == sys.executable
        self.child = warm_python.start_in_terminal(arguments, self.slave, cwd=cwd, env=env)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    @property
    def unread(self) -> int:
        """The number of typed bytes, in complete lines, that no program has read yet."""
        return struct.unpack("i", fcntl.ioctl(self.slave, termios.FIONREAD, b"\0" * 4))[0]

    def take(self, seconds: float = 0.0) -> bool:
        """Read some of the pending output, after waiting for it for at most this many seconds. Return whether there was any."""
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            with contextlib.suppress(OSError):  # the program has ended
                data = os.read(self.master, 65536)
                self.raw += data
                self._stream.feed(data)
        return bool(ready)

    def text(self) -> str:
        """Return all lines, including those that have scrolled off the screen."""
        gone = [
            "".join(line[at].data for at in range(self._screen.columns)) for line in self._screen.history.top
        ]
        return "\n".join(line.rstrip() for line in [*gone, *self._screen.display]).rstrip()

    def shown(self) -> str:
        """Return the text that is on the screen now."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip()

    def line_colours(self, part: str) -> set[str]:
        """Return the colours in which this text is shown, on the last line of the screen that contains it.

        Raises `AssertionError` if no line does.
        """
        for row in range(self._screen.lines - 1, -1, -1):
            if part in self._screen.display[row]:
                at = self._screen.display[row].index(part)
                return {self._screen.buffer[row][at + each].fg for each in range(len(part))}
        raise AssertionError(f"{part!r} is not on the screen:\n{self.shown()}")

    @property
    def cursor_hidden(self) -> bool:
        return self._screen.cursor.hidden

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.slave)[3] & termios.ECHO)

    def wait_for(self, part: str, times: int = 1) -> None:
        """Wait until this part occurs in the terminal's text at least this many times."""
        until = time.monotonic() + PATIENCE
        while self.text().count(part) < times:
            assert time.monotonic() < until, f"{part!r} was not written {times} times:\n{self.text()}"
            if self.child is not None and self.child.poll() is not None:
                self.take(0.2)
                assert self.text().count(part) >= times, (
                    f"the program ended ({self.child.returncode}) without {part!r}:\n{self.text()}"
                )
                return
            self.take(0.05)

    async def until(self, part: str, times: int = 1) -> None:
        """Wait for this text as `wait_for` does, while other tasks of this event loop run."""
        end = time.monotonic() + PATIENCE
        while self.text().count(part) < times:
            assert time.monotonic() < end, f"{part!r} was not written {times} times:\n{self.text()}"
            self.take()
            await asyncio.sleep(0.005)

    def end(self) -> int:
        """Wait for the program to end, and return its exit code."""
        assert self.child is not None
        until = time.monotonic() + PATIENCE
        while self.child.poll() is None:
            assert time.monotonic() < until, f"the program does not end:\n{self.text()}"
            self.take(0.05)
        while self.take(0.05):
            pass
        return self.child.wait()

    def close(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)
            self.child.wait()
        os.close(self.master)
        os.close(self.slave)

    @contextlib.contextmanager
    def streams(self) -> Generator[tuple[TextIO, TextIO]]:
        """Yield two text streams on the terminal, for a program's standard input and output."""
        with (
            os.fdopen(os.dup(self.slave), "r") as stdin,
            os.fdopen(os.dup(self.slave), "w") as stdout,
        ):
            yield stdin, stdout


@contextlib.contextmanager
def window(columns: int = 100, rows: int = 45) -> Generator[Window]:
    made = Window(columns, rows)
    try:
        yield made
    finally:
        made.close()
