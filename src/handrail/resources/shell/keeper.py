"""The keeper: a small process of ours that begins commands, and ends with us.

    us ── keeper ─╥─ first process of the namespaces ── the command
                  ╙─ everything the command starts

It is started once and forked for every command, which costs a fraction of starting Python, and makes
the system calls itself instead of running a tool for each. Its ends are tied together: the keeper
watches the process that started it (the process, not one of its threads), the first process dies with
the keeper, and when it dies the kernel kills all the others in its PID namespace, whatever they ignore
and whatever session they moved to, before anybody is told that it is dead.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import struct
from typing import NoReturn

from handrail.resources.shell import kernel
from handrail.resources.shell.enclosure import (
    Failed,
    enclose,
    give_up_privileges,
    limit,
    map_ids,
    namespaces,
    step,
)
from handrail.resources.shell.order import Answer, Order

REQUESTS = 3
"""The descriptor requests come in on: each the walls wanted, with control, standard input and output."""

_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Keeper:
    """The loop: takes requests, ends what nobody wants any more, says what has ended. It never waits."""

    def __init__(self, parent: int) -> None:
        os.setsid()
        os.chdir("/")
        os.closerange(REQUESTS + 1, 1 << 20)
        os.set_inheritable(REQUESTS, False)
        self.requests = socket.socket(fileno=REQUESTS)
        self.parent = os.pidfd_open(parent)
        self.poll = select.poll()
        self.poll.register(self.requests, select.POLLIN)
        self.poll.register(self.parent, select.POLLIN)
        self.commands: dict[int, tuple[int, int, socket.socket]] = {}
        """By both descriptors of a command: its process, the descriptor of that, and its control."""

    def serve(self) -> None:
        """Go on until whoever started this ends, or closes the other end."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.parent:
                    return
                if descriptor == self.requests.fileno():
                    if not self.begin():
                        return
                elif command := self.commands.get(descriptor):
                    process, watched, control = command
                    if descriptor == watched:
                        self.end(process, watched, control)
                    else:
                        self.poll.unregister(control)
                        with contextlib.suppress(ProcessLookupError):
                            signal.pidfd_send_signal(watched, signal.SIGKILL)

    def begin(self) -> bool:
        # Not `socket.recv_fds`: it drops its flags, and the command would inherit what came.
        room = socket.CMSG_LEN(struct.calcsize("3i"))
        data, extra, _, _ = self.requests.recvmsg(16, room, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        if not extra:
            return True  # there was no room for its descriptors: whoever asked sees the other end closed
        descriptors = struct.unpack("3i", extra[0][2])
        with contextlib.ExitStack() as closing:
            for descriptor in descriptors[1:]:
                closing.callback(os.close, descriptor)
            self.start(data.decode(), socket.socket(fileno=descriptors[0]), descriptors[1:], closing)
        return True

    def start(
        self, request: str, control: socket.socket, streams: tuple[int, ...], closing: contextlib.ExitStack
    ) -> None:
        walls, network = request.split()
        try:
            with step("namespaces"):
                ready, go = os.pipe()
                for descriptor in (ready, go):
                    closing.callback(os.close, descriptor)
                process, watched = kernel.fork_into(namespaces(walls, network == "on"))
        except Failed as failed:
            _say(control, _failure(failed))
            control.close()
            return
        if not process:
            os.close(go)
            self.let_go()
            _first_process(walls, control, ready, streams)
        self.commands[watched] = self.commands[control.fileno()] = process, watched, control
        self.poll.register(watched, select.POLLIN)
        if walls != "none":
            self.poll.register(control, _HUNG_UP)
        try:
            if walls == "user":
                map_ids(process)
            os.write(go, b"1")
        except Failed as failed:
            _say(control, _failure(failed))
            signal.pidfd_send_signal(watched, signal.SIGKILL)

    def let_go(self) -> None:
        """Close, in a child, what belongs to the keeper and to other commands: their end must show when it comes."""
        for descriptor in (self.requests.fileno(), self.parent, *self.commands):
            os.close(descriptor)

    def end(self, process: int, watched: int, control: socket.socket) -> None:
        self.poll.unregister(watched)
        with contextlib.suppress(KeyError):
            self.poll.unregister(control)
        del self.commands[watched], self.commands[control.fileno()]
        # The first process has said how the command ended, unless it was killed: then that is how.
        _say(control, Answer(status=os.waitpid(process, 0)[1]))
        os.close(watched)
        control.close()


def main(parent: int) -> None:
    keeper = Keeper(parent)
    if os.getppid() == parent:
        gc.disable()
        gc.freeze()
        keeper.serve()


def _say(control: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(OSError):
        control.sendall(answer.encode(), socket.MSG_NOSIGNAL)


def _failure(failed: Failed) -> Answer:
    error = failed.error
    detail = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return Answer(failed=failed.step, error=error.errno or 0, detail=detail)


def _first_process(walls: str, control: socket.socket, ready: int, streams: tuple[int, ...]) -> NoReturn:
    """Put up the walls, start the command, take in orphans until it ends. Then all else is killed."""
    try:
        if walls != "none":
            kernel.die_with_parent()
        if os.read(ready, 1):
            os.close(ready)
            order = Order.decode(_receive(control))
            _put_up(order, control)
            with step("folder"):
                _enter(order)
            if order.argv:
                _say(control, Answer(status=_run(order, streams, control)))
            else:
                with step("overlay"):
                    _try_overlay()
                _say(control, Answer(status=0))
    except Failed as failed:
        _say(control, _failure(failed))
    except BaseException as error:
        _say(control, Answer(failed="keeper", detail=f"{type(error).__name__}: {error}"))
    os._exit(0)


def _receive(control: socket.socket) -> bytes:
    with control.makefile("rb") as file:
        (size,) = struct.unpack("!I", file.read(4))
        return file.read(size)


def _put_up(order: Order, control: socket.socket) -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")  # out of memory: rather this than what runs beside it
    if order.walls == "none":
        kernel.adopt_orphans()
        limit(order)
    else:
        _say(control, Answer(mounted=enclose(order)))
        give_up_privileges()


def _enter(order: Order) -> None:
    root = order.lowers[0] if order.view == "plain" else order.root
    os.chdir(root)
    os.chdir(order.cwd)
    here = os.getcwd()
    if here != root and not here.startswith(root + "/"):
        raise OSError(1, "it leads out of the folder", order.cwd)
    order.environment["PWD"] = here


def _run(order: Order, streams: tuple[int, ...], control: socket.socket) -> int:
    stdin, output = streams
    os.umask(0o022)
    with step("exec"):
        kernel.keep_descriptors()
        command = _spawn(
            order, [(os.POSIX_SPAWN_DUP2, stdin, 0), *((os.POSIX_SPAWN_DUP2, output, n) for n in (1, 2))]
        )
    os.close(stdin)
    os.close(output)
    if order.walls == "none":
        return _wait_without_walls(command, control)
    while True:
        child, status = os.wait()
        if child == command:
            return status


def _spawn(order: Order, actions: list[tuple[int, int, int]]) -> int:
    """Start the program by its path, or by its name from the folders of the command's own PATH."""
    program = order.argv[0]
    if "/" not in program:
        for folder in order.environment.get("PATH", "").split(":"):
            if os.access(f"{folder}/{program}", os.X_OK) and not os.path.isdir(f"{folder}/{program}"):
                program = f"{folder}/{program}"
                break
        else:
            raise FileNotFoundError(errno.ENOENT, "no such program", program)
    return os.posix_spawn(
        program,
        order.argv,
        order.environment,
        file_actions=actions,
        setsid=True,
        setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        setsigmask=[],
    )


def _wait_without_walls(command: int, control: socket.socket) -> int:
    """Wait for the command or for the wish to end it, then kill its descendants: they are our children now.

    It does not die with the keeper, since they would not, but watches it instead.
    """
    poll = select.poll()
    poll.register(os.pidfd_open(command), select.POLLIN)
    poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
    poll.register(control, _HUNG_UP)
    poll.poll()
    me, found = os.getpid(), None
    while True:
        with open(f"/proc/{me}/task/{me}/children") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            child, status = os.wait()
        except ChildProcessError:
            return 9 if found is None else found
        if child == command:
            found = status


def _try_overlay() -> None:
    """Do once what leaves each kind of mark in the upper layer."""
    os.unlink("file")
    os.unlink("folder/file")
    os.rmdir("folder")
    os.mkdir("folder")
