"""`execute`: starts a command's process, writes its input, reads its output and ends it, all on one thread.

The keeper, a separate process, starts the commands. It is started on first use, shared by all shells, and restarted
if it dies.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from handrail.clock import Clock
from handrail.resources.shell.request import Reply, Request
from handrail.resources.shell.rules import shown
from handrail.resources.shell.shell_errors import ShellError, ShellUnavailable

_BOOT = """
import sys, types
for name in ("handrail", "handrail.resources", "handrail.resources.shell"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[2] + name.removeprefix("handrail").replace(".", "/")]
from handrail.resources.shell.keeper import main
main(int(sys.argv[1]))
"""
"""Code that runs the keeper without importing the rest of Handrail. Empty modules stand in for the keeper's parent packages."""

_PACKAGE = Path(__file__).parents[2]


class KeeperProcess:
    """The running keeper: its process, and the socket on which requests are sent to it.

    Raises `ShellUnavailable` if it can't be started.
    """

    __slots__ = ("_process", "_requests")

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, str(os.getpid()), str(_PACKAGE)]
        # The keeper gets only this environment variable, so no command can read the others from the keeper.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, nothing, target) for target in (0, 1)]
            self._process = os.posix_spawn(
                sys.executable,
                argv,
                environment,
                file_actions=[*actions, (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)],
                setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
                setsigmask=[],
            )
        except (OSError, TypeError) as error:
            self._requests.close()
            raise ShellUnavailable(
                f"Python can't be started as {sys.executable!r} ({error}), but commands need a second interpreter",
                "Run under an ordinary Python interpreter.",
            ) from error
        finally:
            os.close(nothing)
            theirs.close()

    def send(self, request: Request, descriptors: list[int]) -> None:
        """Ask the keeper to start a process with these file descriptors. Raises `OSError` if the keeper has died."""
        limits = request.limits
        network = "on" if request.network else "off"
        kind = f"{request.isolation} {network} {limits.most_memory} {limits.most_processes}".encode()
        socket.send_fds(self._requests, [kind], descriptors, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """End the keeper and all its commands."""
        self._requests.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


_keeper: KeeperProcess | None = None
_lock = threading.Lock()


def launch(request: Request, stdin: int, output: int) -> socket.socket:
    """Start a command. Returns a socket that receives the keeper's reply; shutting it down ends the command.

    The command also ends when this process ends, even by `kill -9`. Raises `ShellUnavailable` if the keeper can't be
    started.
    """
    global _keeper
    ours, theirs = socket.socketpair()
    with theirs, _lock:
        descriptors = [theirs.fileno(), stdin, output]
        if _keeper is None:
            _keeper = KeeperProcess()
        try:
            _keeper.send(request, descriptors)
        except OSError:
            _keeper.close()
            _keeper = KeeperProcess()
            _keeper.send(request, descriptors)
    data = request.encode()
    with contextlib.suppress(ConnectionError):  # the command did not start, and the reply will say why
        ours.sendall(struct.pack("!I", len(data)) + data)
    return ours


def close_keeper() -> None:
    """End the keeper and all its commands. The next command starts a new keeper."""
    global _keeper
    with _lock:
        if _keeper is not None:
            _keeper.close()
            _keeper = None


def _after_fork() -> None:
    global _keeper, _lock
    _keeper = None  # the keeper belongs to the parent process
    _lock = threading.Lock()


atexit.register(close_keeper)
os.register_at_fork(after_in_child=_after_fork)


_CHUNK = 1 << 18
_END_SECONDS = 10.0
"""Maximum seconds to wait for the processes of a killed command to end."""

_turns = threading.Condition()
_busy: set[str] = set()


class CommandStopped(Exception):
    """Raised if a command is stopped before it has finished."""


class Stop:
    """A request to stop a command, which any thread can make.

    The thread that runs the command enters it as a context manager and can then poll `descriptor`.
    """

    __slots__ = ("descriptor", "requested")

    def __init__(self) -> None:
        self.requested = False
        self.descriptor = -1

    def request(self) -> None:
        with _turns:
            self.requested = True
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)
            _turns.notify_all()

    def check(self) -> None:
        if self.requested:
            raise CommandStopped

    def __enter__(self) -> None:
        with _turns:
            self.descriptor = os.eventfd(int(self.requested), os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __exit__(self, *error: object) -> None:
        with _turns:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


@contextlib.contextmanager
def turn(upper: str, stop: Stop) -> Generator[None]:
    """Wait until no other command uses an upper layer, and then reserve it while the block runs.

    Mounting one upper layer twice is undefined behaviour. Raises `CommandStopped` if `stop` is requested first.
    """
    with _turns:
        _turns.wait_for(lambda: stop.requested or upper not in _busy)
        stop.check()
        _busy.add(upper)
    try:
        yield
    finally:
        with _turns:
            _busy.discard(upper)
            _turns.notify_all()


class Output:
    """A buffer that accepts any number of bytes. `read` returns at most `limit` of them, half from the start and half from the end."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        """Number of bytes received so far."""

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if (
            len(self._tail) > 2 * self._tail_limit + 65536
        ):  # the buffer is cut rarely, so that each byte is moved only about once
            del self._tail[: len(self._tail) - self._tail_limit]

    def read(self) -> tuple[str, int]:
        """Return the text and the number of bytes that were cut from its middle.

        Invalid bytes are escaped, as in `\\xff`. No character is cut in half.
        """
        tail = bytes(self._tail[max(0, len(self._tail) - self._tail_limit) :])
        if len(self._head) + len(tail) == self.total:
            return (bytes(self._head) + tail).decode(errors="backslashreplace"), 0
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        head = decoder.decode(bytes(self._head))
        begun = len(decoder.getstate()[0])
        cut = 0
        while cut < min(3, len(tail)) and tail[cut] & 0xC0 == 0x80:
            cut += 1
        omitted = self.total - len(self._head) - len(tail) + begun + cut
        text = tail[cut:].decode(errors="backslashreplace")
        return f"{head}\n… {omitted} bytes left out …\n{text}", omitted


class Outcome(NamedTuple):
    """The reply and the output of a process that has ended, whether it timed out, and the seconds it took."""

    reply: Reply
    output: Output
    timed_out: bool
    seconds: float


def execute(request: Request, stdin: bytes, timeout: float, limit: int, stop: Stop, clock: Clock) -> Outcome:
    """Run a command until it ends, and then end everything that it started.

    The command is killed after `timeout` seconds, or when `stop` is requested. Raises `CommandStopped` if `stop` was
    requested. Raises `ShellError` instead if the command has not ended some seconds after the kill, because it is stuck in
    the kernel. Output is read as it arrives, and at most `limit` bytes of it are kept.
    """
    with contextlib.ExitStack() as closing:
        process = _Process(request, stdin, limit, closing)
        began = clock.monotonic()
        timed_out = process.until(began + timeout, clock, stop)
        if not process.ended:
            process.kill()
            process.until(clock.monotonic() + _END_SECONDS, clock, None)
            if not process.ended:
                raise ShellError(
                    shown(request.argv), "it was killed but has not ended, because it is stuck in the kernel"
                )
        process.read()
        if stop.requested:
            raise CommandStopped
        seconds = clock.monotonic() - began
        return Outcome(Reply.decode(bytes(process.reply)), process.output, timed_out, seconds)


class _Process:
    """Handrail's side of a running command: its streams, and the socket that controls it."""

    def __init__(self, request: Request, stdin: bytes, limit: int, closing: contextlib.ExitStack) -> None:
        self.output = Output(limit)
        self.reply = bytearray()
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
            self._control = closing.enter_context(launch(request, *theirs))
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
        """Read and write the streams until the command ends.

        Returns True if the deadline passed, or False if the command ended or was asked to stop.
        """
        if stop is not None:
            self._poll.register(stop.descriptor, select.POLLIN)
        try:
            while not self.ended:
                left = deadline - clock.monotonic()
                if left <= 0:
                    return True
                # The poll timeout is at most a day, because the kernel takes milliseconds as a C int.
                ready = {
                    descriptor for descriptor, _ in self._poll.poll(math.ceil(min(left, 86400.0) * 1000))
                }
                if stop is not None and stop.requested:
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
        """Read up to 4 MiB of the output that is available now. Returns False at the end of the stream."""
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
            self._stdin = self._stdin[:0]  # a command may close its input
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
        self.reply += data
        self.ended = not data
