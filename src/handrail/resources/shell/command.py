"""One command from its beginning to its end, followed on a thread: fed, read, and ended when it must be."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
from collections.abc import Generator
from typing import NamedTuple

from handrail.clock import Clock
from handrail.errors import ShellError
from handrail.resources.shell.launcher import launch
from handrail.resources.shell.order import Answer, Order
from handrail.resources.shell.output import Output
from handrail.resources.shell.rules import shown

_CHUNK = 1 << 18
_END_SECONDS = 10.0
"""How long all that a command started may take to end once it has been killed."""

_turns = threading.Condition()
_busy: set[str] = set()


class Stopped(Exception):
    """Nobody wants the command any more."""


class Stop:
    """The wish, from any thread, that a command ends.

    Whoever runs the command enters it, and can then poll `descriptor` for the wish.
    """

    __slots__ = ("descriptor", "wished")

    def __init__(self) -> None:
        self.wished = False
        self.descriptor = -1

    def wish(self) -> None:
        with _turns:
            self.wished = True
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)
            _turns.notify_all()

    def check(self) -> None:
        if self.wished:
            raise Stopped

    def __enter__(self) -> None:
        with _turns:
            self.descriptor = os.eventfd(int(self.wished), os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __exit__(self, *error: object) -> None:
        with _turns:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


@contextlib.contextmanager
def turn(upper: str, stop: Stop) -> Generator[None]:
    """One command at a time for each upper layer; others wait. What two mounts do to one is undefined."""
    with _turns:
        _turns.wait_for(lambda: stop.wished or upper not in _busy)
        stop.check()
        _busy.add(upper)
    try:
        yield
    finally:
        with _turns:
            _busy.discard(upper)
            _turns.notify_all()


class Followed(NamedTuple):
    """What came of a command."""

    answer: Answer
    output: Output
    timed_out: bool
    seconds: float


def follow(order: Order, stdin: bytes, timeout: float, limit: int, stop: Stop, clock: Clock) -> Followed:
    """Run a command to its end. When this returns or raises, nothing that it started is left.

    Its output is read as it comes, so it never waits for us and is never held in memory whole.
    """
    with contextlib.ExitStack() as closing:
        following = _Following(order, stdin, limit, closing)
        began = clock.monotonic()
        timed_out = following.until(began + timeout, clock, stop)
        if not following.ended:
            following.kill()
            following.until(clock.monotonic() + _END_SECONDS, clock, None)
            if not following.ended:
                raise ShellError(shown(order.argv), "it was killed but has not ended: it waits in the kernel")
        following.read()
        if stop.wished:
            raise Stopped
        seconds = clock.monotonic() - began
        return Followed(Answer.decode(bytes(following.said)), following.output, timed_out, seconds)


class _Following:
    """The ends of a command's streams."""

    def __init__(self, order: Order, stdin: bytes, limit: int, closing: contextlib.ExitStack) -> None:
        self.output = Output(limit)
        self.said = bytearray()
        self.ended = False
        self._stdin = memoryview(stdin)
        self._closing = closing
        theirs: list[int] = []
        try:
            if stdin:
                read, self._writer = os.pipe()
                theirs.append(read)
                os.set_blocking(self._writer, False)
                self._close_writer = closing.enter_context(contextlib.ExitStack())
                self._close_writer.callback(os.close, self._writer)
            else:
                self._writer = -1
                theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            self._reader, write = os.pipe()
            theirs.append(write)
            closing.callback(os.close, self._reader)
            os.set_blocking(self._reader, False)
            self._control = closing.enter_context(launch(order, *theirs))
            self._control.setblocking(False)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._reader, select.POLLIN)
        if self._writer >= 0:
            self._poll.register(self._writer, select.POLLOUT)

    def until(self, deadline: float, clock: Clock, stop: Stop | None) -> bool:
        """Go on until it has ended (False), the deadline has passed (True) or nobody wants it any more (False)."""
        if stop is not None:
            self._poll.register(stop.descriptor, select.POLLIN)
        try:
            while not self.ended:
                left = deadline - clock.monotonic()
                if left <= 0:
                    return True
                # A day at most: the kernel takes milliseconds as a small number.
                ready = {
                    descriptor for descriptor, _ in self._poll.poll(math.ceil(min(left, 86400.0) * 1000))
                }
                if stop is not None and stop.wished:
                    return False
                if self._reader in ready and not self.read():
                    self._poll.unregister(self._reader)
                if self._writer in ready:
                    self._feed()
                if self._control.fileno() in ready:
                    self._listen()
            return False
        finally:
            if stop is not None:
                self._poll.unregister(stop.descriptor)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def read(self) -> bool:
        """Take what is there now; False at the end of the stream."""
        for _ in range(16):
            try:
                data = os.read(self._reader, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.output.feed(data)
        return True

    def _feed(self) -> None:
        try:
            self._stdin = self._stdin[os.write(self._writer, self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = self._stdin[:0]  # it does not read any more, which is its own affair
        if not self._stdin:
            self._poll.unregister(self._writer)
            self._writer = -1
            self._close_writer.close()

    def _listen(self) -> None:
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self.said += data
        self.ended = not data
