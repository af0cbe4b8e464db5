"""Our end of the keeper: it is started when first needed, shared by all shells, and started anew if it died."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

from handrail.errors import ShellUnavailable
from handrail.resources.shell.order import Order

_BOOT = """
import sys, types
for name in ("handrail", "handrail.resources", "handrail.resources.shell"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[2] + name.removeprefix("handrail").replace(".", "/")]
from handrail.resources.shell.keeper import main
main(int(sys.argv[1]))
"""
"""Loads the keeper without loading Handrail: its packages are there only as places to import from."""

_PACKAGE = Path(__file__).parents[2]


class Keeper:
    """The running keeper: its process, and the socket that requests go through."""

    __slots__ = ("_process", "_requests")

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, str(os.getpid()), str(_PACKAGE)]
        # Without our environment: it is not the keeper's, and it must not be found there.
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
                f"Python itself can't be started as {sys.executable!r} ({error}), and a command needs a second one",
                "Run under an ordinary Python interpreter.",
            ) from error
        finally:
            os.close(nothing)
            theirs.close()

    def send(self, order: Order, descriptors: list[int]) -> None:
        """Ask for a process for this order and hand over its descriptors; `OSError` when the keeper is gone."""
        request = f"{order.walls} {'on' if order.network else 'off'}".encode()
        socket.send_fds(self._requests, [request], descriptors, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """End it, and with it every command that still runs."""
        self._requests.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


_keeper: Keeper | None = None
_lock = threading.Lock()


def launch(order: Order, stdin: int, output: int) -> socket.socket:
    """Begin a command; what is returned carries its answer, and ends it when it is shut down.

    Whatever happens to this process, also `kill -9`, ends the command too.
    """
    global _keeper
    ours, theirs = socket.socketpair()
    with theirs, _lock:
        descriptors = [theirs.fileno(), stdin, output]
        if _keeper is None:
            _keeper = Keeper()
        try:
            _keeper.send(order, descriptors)
        except OSError:
            _keeper.close()
            _keeper = Keeper()
            _keeper.send(order, descriptors)
    data = order.encode()
    with contextlib.suppress(ConnectionError):  # it was not begun: why is what will be read
        ours.sendall(struct.pack("!I", len(data)) + data)
    return ours


def close() -> None:
    """End the keeper and all commands. The next command starts another."""
    global _keeper
    with _lock:
        if _keeper is not None:
            _keeper.close()
            _keeper = None


def _after_fork() -> None:
    global _keeper, _lock
    _keeper = None  # it belongs to the parent
    _lock = threading.Lock()


atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)
