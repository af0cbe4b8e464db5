"""A Python process in which Handrail is already imported, and which forks a child for each program that a test runs.

A program has its own process, streams, folder, environment and exit code, as if it had been started directly, but it
starts in milliseconds instead of a second. Tests of how Python starts (its options, its encodings, what is imported
first) use a new process instead.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

LOADED = (
    "anyio._backends._asyncio",
    "anyio.lowlevel",
    "anyio.to_thread",
    "genai_prices.data",
    "handrail",
    "handrail.run.adapter",
    "handrail.run.entry",
    "handrail.run.record.begin",
    "handrail.cli.commands",
    "handrail.cli.run_command",
    "handrail.run.gate",
    "handrail.journal.sqlite",
    "handrail.models.scripted",
    "handrail.resources.directory",
    "handrail.serve.app",
    "handrail.serve.server",
    "handrail.workers",
    "http.client",
    "jinja2.sandbox",
    "typer._adapters",
    "unicodedata",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.h11_impl",
    "yaml",
)


class Program:
    """A program that runs in a child of the warm process, with the methods of a text-mode `subprocess.Popen` that tests use."""

    def __init__(
        self,
        argv: Sequence[str],
        pid: int,
        status: int,
        stdin: TextIO | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.args = list(argv)
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code if the program has ended, or None."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the program to end, and return its exit code. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, 32)
            os.close(self._status)
            if not said:
                raise EOFError("the process that runs programs has ended")
            self.returncode = int(said)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the program to end, and return its remaining output.

        Raises `subprocess.TimeoutExpired` if it does not end in time.
        """
        if self.stdin is not None:
            self.stdin.close()
        said: dict[int, str] = {}
        readers = [
            threading.Thread(target=_read, args=(number, stream, said), daemon=True)
            for number, stream in enumerate((self.stdout, self.stderr))
        ]
        for each in readers:
            each.start()
        for each in readers:
            each.join(timeout)
            if each.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill the program if it is still running, and close its streams."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def _read(number: int, stream: TextIO | None, into: dict[int, str]) -> None:
    into[number] = ""
    if stream is not None and not stream.closed:
        with stream:
            into[number] = stream.read()


class _Server:
    """The forking process, which is started on first use and ends with this process."""

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

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> tuple[int, int]:
        """Fork a child with these streams. Return its process id, and a pipe that receives its exit code."""
        ours, theirs = os.pipe()
        body = json.dumps(request).encode()
        try:
            socket.send_fds(self._ours, [len(body).to_bytes(4, "big")], [*streams, theirs])
        finally:
            os.close(theirs)
        self._ours.sendall(body)
        return int.from_bytes(_exactly(self._ours, 4), "big"), ours

    def _close(self) -> None:
        if os.getpid() == self.owner:
            self._ours.close()
            self._process.wait()


_server: _Server | None = None
_lock = threading.Lock()


def _fork(
    argv: Sequence[str],
    cwd: Path | None,
    env: Mapping[str, str] | None,
    streams: Sequence[int],
    *,
    terminal: bool = False,
) -> tuple[int, int]:
    global _server
    request = {
        "argv": list(argv),
        "cwd": str(cwd or Path.cwd()),
        "env": dict(os.environ if env is None else env),
        "terminal": terminal,
    }
    with _lock:
        if _server is None or _server.owner != os.getpid():
            _server = _Server()
        return _server.fork(request, streams)


def start(
    arguments: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Program:
    """Start `python ARGUMENTS` (a script, `-m module` or `-c code`) with pipes for its streams."""
    argv = [str(each) for each in arguments]
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    ours_err, theirs_err = os.pipe()
    theirs = theirs_in, theirs_out, theirs_err
    try:
        pid, status = _fork(argv, cwd, env, theirs)
    finally:
        for each in theirs:
            os.close(each)
    stdin, stdout, stderr = open(ours_in, "w"), open(ours_out), open(ours_err)  # noqa: SIM115  # closed by `Program`
    return Program(argv, pid, status, stdin, stdout, stderr)


def start_in_terminal(
    arguments: Sequence[str | Path], terminal: int, *, cwd: Path, env: Mapping[str, str]
) -> Program:
    """Start `python ARGUMENTS` in a terminal, which is its stdin, stdout and stderr."""
    argv = [str(each) for each in arguments]
    return Program(argv, *_fork(argv, cwd, env, (terminal,) * 3, terminal=True))


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """Run `python ARGUMENTS` to its end with this standard input."""
    program = start(arguments, cwd=cwd, env=env)
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None
    writer = threading.Thread(target=_write, args=(program.stdin, stdin))
    said: list[bytes] = []
    with program.stdout as out, program.stderr as err:
        reader = threading.Thread(target=lambda: said.append(err.buffer.read()))
        writer.start()
        reader.start()
        wrote = out.buffer.read()
        writer.join()
        reader.join()
    return subprocess.CompletedProcess(program.args, program.wait(), wrote, said[0])


def _write(pipe: TextIO, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.buffer.write(data)


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
    import gc
    import importlib

    for name in LOADED:
        with contextlib.suppress(ImportError):  # a missing module affects only the programs that import it
            importlib.import_module(name)
    bus: Any = importlib.import_module("handrail.session.bus")
    bus.SLOW = 300.0  # otherwise, programs on a busy machine would warn of slow subscribers
    sys.path.pop(0)  # removes this script's folder
    gc.freeze()  # otherwise, a garbage collection in a child would copy every page it touches
    ended, wake = os.pipe()
    for each in (ended, wake):
        os.set_blocking(each, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _reap(children)
        if connection in ready:
            length, streams, _, _ = socket.recv_fds(connection, 4, 4)
            if not length:
                return
            request = json.loads(_exactly(connection, int.from_bytes(length, "big")))
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection.close()
                for each in (ended, wake, *children.values(), streams[3]):
                    os.close(each)
                _become(request, streams[:3])
            for each in streams[:3]:
                os.close(each)
            children[child] = streams[3]
            connection.sendall(child.to_bytes(4, "big"))


def _reap(children: dict[int, int]) -> None:
    """Report the exit code of every child that has ended."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with contextlib.suppress(BrokenPipeError), open(children.pop(child), "w") as waiting:
            waiting.write(str(os.waitstatus_to_exitcode(status)))


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Run the requested program in this child process. Never returns."""
    import traceback

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["terminal"]:
        os.setsid()
        fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
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
