"""Our end of the keeper: started on first use, shared by all shells, restarted if it dies."""

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

from handrail.resources.shell.request import Request
from handrail.resources.shell.shell_errors import ShellUnavailable

_BOOT = """
import sys, types
for name in ("handrail", "handrail.resources", "handrail.resources.shell"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [sys.argv[2] + name.removeprefix("handrail").replace(".", "/")]
from handrail.resources.shell.keeper import main
main(int(sys.argv[1]))
"""
"""Loads the keeper without loading Handrail: the packages exist only as locations to import from."""

_PACKAGE = Path(__file__).parents[2]


class Keeper:
    """The running keeper: its process and the socket for requests."""

    __slots__ = ("_process", "_requests")

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-I", "-S", "-B", "-c", _BOOT, str(os.getpid()), str(_PACKAGE)]
        # Without our environment: a command must not find it in the keeper.
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
                f"Python can't be started as {sys.executable!r} ({error}), and every command needs a second interpreter",
                "Run under an ordinary Python interpreter.",
            ) from error
        finally:
            os.close(nothing)
            theirs.close()

    def send(self, request: Request, descriptors: list[int]) -> None:
        """Ask for a process and pass its descriptors. Raises `OSError` if the keeper is gone."""
        kind = f"{request.isolation} {'on' if request.network else 'off'}".encode()
        socket.send_fds(self._requests, [kind], descriptors, socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """End the keeper and every command that is still running."""
        self._requests.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


_keeper: Keeper | None = None
_lock = threading.Lock()


def launch(request: Request, stdin: int, output: int) -> socket.socket:
    """Start a command. The returned socket carries its reply; shutting it down ends the command.

    The command also ends when this process does, even by `kill -9`.
    """
    global _keeper
    ours, theirs = socket.socketpair()
    with theirs, _lock:
        descriptors = [theirs.fileno(), stdin, output]
        if _keeper is None:
            _keeper = Keeper()
        try:
            _keeper.send(request, descriptors)
        except OSError:
            _keeper.close()
            _keeper = Keeper()
            _keeper.send(request, descriptors)
    data = request.encode()
    with contextlib.suppress(ConnectionError):  # it did not start; the reply will say why
        ours.sendall(struct.pack("!I", len(data)) + data)
    return ours


def close() -> None:
    """End the keeper and all commands. The next command starts a new keeper."""
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
