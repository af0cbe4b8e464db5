"""A Python process with Handrail loaded, which forks a child for each program.

A program has its own process, streams, folder, environment and exit code, as if started by itself, and begins
in milliseconds instead of a second. Tests of Python's startup (its options, its encodings, what is loaded
first) and tests that send signals use a real process instead.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LOADED = (
    "handrail",
    "handrail.adapter",
    "handrail.cli.commands",
    "handrail.cli.run_command",
    "handrail.journal",
    "handrail.models.scripted",
    "handrail.resources.directory",
    "handrail.workers",
)


class _Server:
    """The forking process, started on first use and ended with this one."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.owner = os.getpid()
        atexit.register(self._close)

    def start(self, request: Mapping[str, Any], streams: Sequence[int]) -> None:
        body = json.dumps(request).encode()
        socket.send_fds(self._ours, [len(body).to_bytes(4, "big")], list(streams))
        self._ours.sendall(body)

    def ended(self) -> int:
        """Return the exit code of a started program."""
        code = _exactly(self._ours, 4)
        return int.from_bytes(code, "big", signed=True)

    def _close(self) -> None:
        if os.getpid() == self.owner:
            self._ours.close()
            self._process.wait()


_server: _Server | None = None
_lock = threading.Lock()


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """Run `python ARGUMENTS`, a script or `-m module` or `-c code`, to its end."""
    global _server
    with _lock:
        if _server is None or _server.owner != os.getpid():
            _server = _Server()
        server = _server
        given = [str(each) for each in arguments]
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        request = {
            "argv": given,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        server.start(request, (theirs_in, theirs_out, theirs_err))
        for each in (theirs_in, theirs_out, theirs_err):
            os.close(each)
        out: list[bytes] = []
        err: list[bytes] = []
        others = [
            threading.Thread(target=_write, args=(ours_in, stdin)),
            threading.Thread(target=_read, args=(ours_err, err)),
        ]
        for each in others:
            each.start()
        _read(ours_out, out)
        for each in others:
            each.join()
        return subprocess.CompletedProcess(given, server.ended(), b"".join(out), b"".join(err))


def _write(number: int, data: bytes) -> None:
    with os.fdopen(number, "wb") as pipe:
        try:
            pipe.write(data)
        except BrokenPipeError:
            pipe.detach()


def _read(number: int, into: list[bytes]) -> None:
    with os.fdopen(number, "rb") as pipe:
        into.append(pipe.read())


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise EOFError("the forking process has ended")
        found += more
    return found


# --- in the forking process ---------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    import importlib

    for name in _LOADED:
        importlib.import_module(name)
    sys.path.pop(0)  # this script's folder
    while True:
        length, streams, _, _ = socket.recv_fds(connection, 4, 3)
        if not length:
            return
        request = json.loads(_exactly(connection, int.from_bytes(length, "big")))
        child = os.fork()
        if child == 0:
            connection.close()
            _become(request, streams)
        for each in streams:
            os.close(each)
        _, status = os.waitpid(child, 0)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Become the program. Never returns."""
    import traceback

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        buffering = 1 if name == "stderr" else -1
        stream = open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    code = 1
    try:
        _run(request["argv"])
        code = 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            code = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


def _run(argv: list[str]) -> None:
    import runpy

    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if argv[0] == "-m":
        sys.path[:0] = [os.getcwd(), *path]
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.path[:0] = ["", *path]
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.path[:0] = [str(Path(argv[0]).resolve().parent), *path]
        sys.argv = list(argv)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
