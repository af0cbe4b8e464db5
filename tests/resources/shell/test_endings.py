"""How commands end: on their own, after a timeout, when cancelled, with this process, or with the keeper."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail.resources.shell import Allow, CommandResult, Layers, Support, command_process, probe
from handrail.resources.shell import execution as shell_module
from handrail.resources.shell.shell_errors import CommandMissing, CommandRefused, ShellError
from handrail.testing import FakeShell
from support import PATIENCE
from support.folders import PYTHON, Folder, anything, processes_with

pytestmark = pytest.mark.once  # commands behave the same under every Python version

# This program is hard to kill: it ignores every signal that it can, and starts daemons. It connects to the test's `Line`.
STUBBORN = """
import os, signal, socket, sys, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
os.write(1, b"begun\\n")
for generation in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            break
        os._exit(0)
line.sendall(b"x")
while True: time.sleep(1000)
"""


class Line:
    """A server that commands connect to. A connection is closed once every process that holds it has died."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(PATIENCE)
        self.connections: list[socket.socket] = []
        self.port = str(self.server.getsockname()[1])

    def accept(self) -> socket.socket:
        connection, _ = self.server.accept()
        self.connections.append(connection)
        connection.settimeout(PATIENCE)
        return connection

    def close(self) -> None:
        for each in (self.server, *self.connections):
            each.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


@pytest.fixture(params=["overlay", "copy", "no walls"])
def shells(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    support = probe(tmp_path)
    if request.param == "no walls":
        monkeypatch.setattr(shell_module, "probe", lambda folder: Support("none", False, ("walls",)))
        return "auto"
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip("; ".join(support.missing))
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.add("kept.txt", "kept\n")
    return made


def read_until(connection: socket.socket, size: int) -> None:
    while size:
        got = connection.recv(size)
        assert got
        size -= len(got)


def assert_gone(line: Line, connection: socket.socket) -> None:
    """Assert that the connection is closed and that every process that held it has died."""
    connection.setblocking(False)
    while connection.recv(1000):
        pass
    assert processes_with(f" {line.port} stubborn") == []


def test_a_command_out_of_time_is_gone_with_all_it_started(folder: Folder, shells: str, line: Line):
    """After a timeout, every process of the command is dead, even a daemon that ignores signals. The output is kept."""
    shell, seconds = anything(shells, network=True, contained=False), 3
    command = [PYTHON, "-c", STUBBORN, line.port, "stubborn"]
    while not (finished := folder.run(shell, *command, timeout=seconds)).output:
        seconds *= 10  # on a busy machine, a short timeout may pass before the command has begun
    assert (finished.timed_out, finished.exit_code, finished.signal) == (True, -9, 9)
    assert finished.output == "begun\n"
    assert finished.ending.startswith("stopped after ")
    assert float(finished.ending.split()[2]) >= 3  # the timeout, or longer on a busy machine
    assert_gone(line, line.accept())


def test_daemons_end_with_their_command(folder: Folder, shells: str, line: Line):
    """A finished command leaves no daemon behind, and is not delayed by its daemons."""
    code = """
        import os, sys
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.dup2(writer, 1)
            exec(sys.argv[3])
        os.read(reader, 1)  # wait until the daemon has begun
    """
    shell = anything(shells, network=True, contained=False, timeout=PATIENCE)
    finished = folder.run(shell, PYTHON, "-c", textwrap.dedent(code), line.port, "stubborn", STUBBORN)
    assert (finished.exit_code, finished.timed_out) == (0, False)
    assert_gone(line, line.accept())


def test_a_timeout_of_one_run_counts_for_it(folder: Folder):
    """A timeout passed to one run replaces the shell's default timeout."""
    assert folder.run(anything(timeout=PATIENCE), "sleep", "40", timeout=0.1).timed_out
    assert not folder.run(anything(timeout=0.1), "sleep", "0.2", timeout=PATIENCE).timed_out


async def test_cancelling_ends_the_command_first(folder: Folder, shells: str, line: Line):
    """Cancelling a run kills the command before `CancelledError` is raised, and leaves the folder unchanged."""
    shell = anything(shells, network=True, contained=False)
    before = folder.real()

    argv = [PYTHON, "-c", STUBBORN, line.port, "stubborn"]
    task = asyncio.create_task(shell.run(argv, folder.layers))
    connection = await asyncio.to_thread(line.accept)
    await asyncio.to_thread(read_until, connection, 4)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # a second cancel has no effect
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_gone(line, connection)
    assert folder.real() == before
    assert list((folder.base / "work").iterdir()) == []
    answer = await anything(shells, contained=False).run(["echo", "next"], folder.layers)
    assert answer.output == "next\n"


async def test_a_cancelled_copy_is_not_made_to_its_end(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """Cancelling a command stops the copying of its folder."""
    for number in range(50):
        folder.add(f"{number}/file", "x")
    copied: list[str] = []
    shell = anything("copy")
    real = shell_module.Copy._begin_folder  # pyright: ignore[reportPrivateUsage]

    loop = asyncio.get_running_loop()
    reached = asyncio.Event()

    def slow(self: Any, stack: Any, target: str, path: str) -> Any:
        copied.append(path)
        if len(copied) == 5:
            loop.call_soon_threadsafe(reached.set)
            run_stops.wait(PATIENCE)
        return real(self, stack, target, path)

    run_stops = threading.Event()
    monkeypatch.setattr(shell_module.Copy, "_begin_folder", slow)
    task = asyncio.create_task(shell.run(["true"], folder.layers))
    await asyncio.wait_for(reached.wait(), PATIENCE)
    task.cancel()
    await asyncio.sleep(0)
    loop.call_later(0, run_stops.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(copied) < 10
    assert list((folder.base / "work").iterdir()) == []


WAIT = "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); c.sendall(sys.argv[2].encode()); sys.exit(c.recv(1) != b'.')"


async def test_shells_on_different_layers_run_at_the_same_time(tmp_path: Path, line: Line):
    """Commands on different layers run at the same time."""
    shell = anything(network=True)
    one, two = Folder(tmp_path / "one"), Folder(tmp_path / "two")

    tasks = [
        asyncio.create_task(shell.run([PYTHON, "-c", WAIT, line.port, "x"], f.layers)) for f in (one, two)
    ]
    connections = [await asyncio.to_thread(line.accept) for _ in tasks]
    for connection in connections:
        connection.sendall(b".")
    assert [(await task).exit_code for task in tasks] == [0, 0]


@pytest.mark.parametrize("first", [0, 1, 2])
async def test_a_command_ends_while_others_go_on(tmp_path: Path, line: Line, first: int):
    """One of three concurrent commands can end, and its result is returned, while the others still run."""
    shell = anything(network=True)
    folders = [Folder(tmp_path / str(number)) for number in range(3)]

    tasks: list[asyncio.Task[CommandResult]] = []
    connections: list[socket.socket] = []
    for folder in folders:
        tasks.append(asyncio.create_task(shell.run([PYTHON, "-c", WAIT, line.port, "x"], folder.layers)))
        connections.append(await asyncio.to_thread(line.accept))
    connections[first].sendall(b".")
    assert (await tasks[first]).ok
    for number, task in enumerate(tasks):
        if number != first:
            assert not task.done()
            connections[number].sendall(b".")
            assert (await task).ok


async def test_shells_on_one_layer_take_turns(tmp_path: Path, line: Line):
    """A second command on the same layer waits for the first, and never starts if it is cancelled while it waits."""
    shell = anything(network=True)
    folder, other = Folder(tmp_path / "one"), Folder(tmp_path / "two")
    said: list[bytes] = []

    async def begin(name: str) -> asyncio.Task[CommandResult]:
        script = f'{PYTHON} -c "{WAIT}" {line.port} {name} && cat trace; echo {name} >> trace'
        return asyncio.create_task(shell.run(["sh", "-c", script], folder.layers, timeout=PATIENCE))

    first = await begin("a")
    connection = await asyncio.to_thread(line.accept)
    said.append(await asyncio.to_thread(connection.recv, 1))
    second, third = await begin("b"), await begin("c")
    assert (
        await shell.run(["true"], other.layers)
    ).ok  # long enough for the waiting commands to start, if they could
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    assert not second.done()
    line.server.setblocking(False)
    with pytest.raises(BlockingIOError):
        line.server.accept()
    line.server.settimeout(PATIENCE)
    connection.sendall(b".")
    assert (await first).ok
    connection = await asyncio.to_thread(line.accept)
    said.append(await asyncio.to_thread(connection.recv, 1))
    connection.sendall(b".")
    assert (await second).output == "a\n"
    assert said == [b"a", b"b"]
    assert (folder.upper / "trace").read_text() == "a\nb\n"


US = """
import asyncio, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # background programs of a shell ignore it
from pathlib import Path
from handrail.resources.shell import Allow, Layers, Shell, Support, execution
base = Path(sys.argv[1])
layers = Layers((base / "root",), base / "upper", base / "work")
shell = Shell([Allow(...)], network=True, contained=False)
if sys.argv[5] == "no walls":
    execution.probe = lambda folder: Support("none", False, ("walls",))
def work():
    asyncio.run(shell.run([sys.argv[2], "-c", sys.argv[3], sys.argv[4], "stubborn"], layers))
first = threading.Thread(target=lambda: asyncio.run(shell.run(["true"], layers)))
first.start(); first.join()  # the keeper must outlive the thread that started it
work()
"""


@pytest.mark.parametrize("walls", ["walls", "no walls"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_ends_with_us(folder: Folder, line: Line, how: signal.Signals, walls: str):
    """If a signal, even SIGKILL, ends the process that runs a command, the command and its daemons die too."""
    argv = [sys.executable, "-c", US, str(folder.base), PYTHON, STUBBORN, line.port, walls]
    us = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        connection = line.accept()
        read_until(connection, 4)
        us.send_signal(how)
        us.wait()
        # The connection is closed once every process that holds it has died, so nothing else needs to be awaited.
        assert connection.recv(1000) == b""
    finally:
        us.kill()
        us.wait()


async def test_a_dead_keeper_is_said_and_replaced(folder: Folder, line: Line, shells: str):
    """If the keeper dies, its command dies too, and the next command gets a new keeper."""
    shell = anything(shells, network=True, contained=False)

    task = asyncio.create_task(shell.run([PYTHON, "-c", STUBBORN, line.port, "stubborn"], folder.layers))
    connection = await asyncio.to_thread(line.accept)
    await asyncio.to_thread(read_until, connection, 4)
    keeper = command_process._keeper
    assert keeper is not None
    os.kill(keeper._process, signal.SIGKILL)
    if shells == "auto":  # without a sandbox, a different process reports the end
        assert (await task).signal == signal.SIGKILL
    else:
        with pytest.raises(ShellError, match="the process that controls it died"):
            await task
    assert connection.recv(1000) == b""
    assert (await shell.run(["echo", "again"], folder.layers)).output == "again\n"


def test_a_forked_process_has_a_keeper_of_its_own(folder: Folder):
    """A forked child starts its own keeper instead of using its parent's."""
    code = """
        import asyncio, os, sys
        from pathlib import Path
        from handrail.resources.shell import Allow, Layers, Shell, command_process
        base = Path(sys.argv[1])
        layers = Layers((base / "root",), base / "upper", base / "work")
        def say(word):
            print(asyncio.run(Shell([Allow(...)]).run(["echo", word], layers)).output, end="", flush=True)
        say("parent")
        child = os.fork()
        if child == 0:
            assert command_process._keeper is None
            say("child")
            sys.exit()
        os.waitpid(child, 0)
        say("parent again")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(folder.base)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "parent\nchild\nparent again\n"


@pytest.mark.virtual_time
async def test_commands_run_in_virtual_time_too(folder: Folder):
    """On an event loop with virtual time, a command still runs in real time."""
    shell = anything()

    assert (
        await shell.run(["sh", "-c", "sleep 0.3; echo done"], folder.layers, timeout=PATIENCE)
    ).output == "done\n"


def test_descriptors_are_given_back(folder: Folder):
    """Commands leave no file descriptor open in this process, even if they time out or can't be found."""
    shell = anything()
    folder.run(shell, "true", stdin="x")
    gc.collect()  # closes what earlier tests have left open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        folder.run(shell, "true", stdin="x")
        folder.run(shell, "sleep", "9", timeout=0.05)
        with pytest.raises(CommandMissing):
            folder.run(shell, "no-such-program")
    assert len(os.listdir("/proc/self/fd")) == before


# --- the fake shell ------------------------------------------------------------------------------


def test_a_fake_shell_says_what_it_was_told(tmp_path: Path):
    """A fake shell applies its rules, and gives the answer for the longest matching prefix.

    Other allowed commands are not found.
    """
    folder = Folder(tmp_path)

    def write(argv: tuple[str, ...], layers: Layers) -> str:
        (layers.upper / "made").write_text(" ".join(argv))
        return "wrote"

    fake = FakeShell(
        {"git": 1, "git status": "clean\n", "make": write, "slow": CommandResult(argv=(), timed_out=True)},
        [Allow("git", "*"), Allow("make", ...), Allow("slow"), Allow("other")],
    )
    assert folder.run(fake, "git", "status").output == "clean\n"
    assert folder.run(fake, "git", "log").exit_code == 1
    assert folder.run(fake, "make", "all").output == "wrote"
    assert folder.caught() == [("written", "made")]
    assert folder.run(fake, "slow").timed_out
    with pytest.raises(CommandMissing):
        folder.run(fake, "other")
    with pytest.raises(CommandRefused):
        folder.run(fake, "rm")
    assert fake.ran == [("git", "status"), ("git", "log"), ("make", "all"), ("slow",), ("other",)]
