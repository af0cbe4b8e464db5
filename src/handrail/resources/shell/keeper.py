"""The keeper: a small process that starts commands, and ends when the process that started it ends.

    Handrail ── keeper ── first process of the namespaces ─╥─ the command
                                                           ╙─ everything the command starts

The keeper starts once and forks for every command, which is much cheaper than starting Python. It makes system calls
itself instead of running a tool for each. It watches the process that started it (the process, not one of its threads),
and ends with it. The first process of a sandbox dies with the keeper. The kernel then kills all other processes in its
PID namespace before it reports the death, even those that ignore signals or have moved to a different session.
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
from handrail.resources.shell.request import Reply, Request
from handrail.resources.shell.sandbox import (
    StepFailed,
    drop_privileges,
    enter_sandbox,
    limit,
    map_ids,
    namespaces,
    step,
)
from handrail.resources.shell.usage import SECONDS, Cgroup, Usage, sweep

REQUESTS = 3
"""The descriptor on which requests arrive. Each request contains the isolation, the network, two limits and three descriptors."""

_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Keeper:
    """The keeper's main loop.

    It accepts requests, kills abandoned commands and reports ended ones. It waits for a command only in `close`.
    """

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
        """Process id, pidfd and control socket of each command. The keys are the pidfd and the control socket's descriptor."""
        self.cgroups: dict[int, Cgroup] = {}
        """The cgroups of each command in a sandbox, by process id."""

    def serve(self) -> None:
        """Handle requests until the parent process ends or closes its end of the socket."""
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

    def close(self) -> None:
        """End all commands in sandboxes, and remove their cgroups.

        The first process of any other command notices that the keeper ends, and kills the processes of its command.
        """
        for process, watched, _ in set(self.commands.values()):
            if process in self.cgroups:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(watched, signal.SIGKILL)
                os.waitpid(process, 0)
                self.cgroups[process].close()

    def begin(self) -> bool:
        # `socket.recv_fds` is not used, because it ignores its `flags`, so that the command would inherit the descriptors.
        room = socket.CMSG_LEN(struct.calcsize("3i"))
        data, extra, _, _ = self.requests.recvmsg(64, room, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        if not extra:
            return True  # too many files are open to receive the descriptors, and the caller sees its socket closed
        descriptors = struct.unpack("3i", extra[0][2])
        with contextlib.ExitStack() as closing:
            for descriptor in descriptors[1:]:
                closing.callback(os.close, descriptor)
            self.start(data.decode(), socket.socket(fileno=descriptors[0]), descriptors[1:], closing)
        return True

    def start(
        self, request: str, control: socket.socket, streams: tuple[int, ...], closing: contextlib.ExitStack
    ) -> None:
        isolation, network, memory, processes = request.split()
        try:
            with step("namespaces"):
                ready, go = os.pipe()
                for descriptor in (ready, go):
                    closing.callback(os.close, descriptor)
                process, watched = kernel.fork_into(namespaces(isolation, network == "on"))
        except StepFailed as failed:
            _say(control, _failure(failed))
            control.close()
            return
        if not process:
            os.close(go)
            self.let_go()
            _first_process(isolation, control, ready, streams)
        self.commands[watched] = self.commands[control.fileno()] = process, watched, control
        self.poll.register(watched, select.POLLIN)
        if isolation != "none":
            self.poll.register(control, _HUNG_UP)
        try:
            if isolation != "none":
                cgroup = self.cgroups[process] = Cgroup(process, int(memory), int(processes))
                if cgroup.limits_memory:
                    _say(control, Reply(limited="kernel"))
            if isolation == "user":
                map_ids(process)
            os.write(go, b"1")
        except StepFailed as failed:
            _say(control, _failure(failed))
            signal.pidfd_send_signal(watched, signal.SIGKILL)

    def let_go(self) -> None:
        """In a child process, close the descriptors of the keeper and of other commands, so that the child does not keep them open."""
        for descriptor in (self.requests.fileno(), self.parent, *self.commands):
            os.close(descriptor)

    def end(self, process: int, watched: int, control: socket.socket) -> None:
        self.poll.unregister(watched)
        with contextlib.suppress(KeyError):
            self.poll.unregister(control)
        del self.commands[watched], self.commands[control.fileno()]
        # Usually the first process has already reported the command's status, and the first status counts. If the first process
        # was killed, it may have reported none, and its own status is used.
        status = os.waitpid(process, 0)[1]
        cgroup = self.cgroups.pop(process, None)
        _say(control, Reply(status=status, limit="memory" if cgroup is not None and cgroup.close() else ""))
        os.close(watched)
        control.close()


def main(parent: int) -> None:
    keeper = Keeper(parent)
    if os.getppid() == parent:
        gc.disable()
        gc.freeze()
        sweep()
        keeper.serve()
        keeper.close()


def _say(control: socket.socket, reply: Reply) -> None:
    with contextlib.suppress(OSError):
        control.sendall(reply.encode(), socket.MSG_NOSIGNAL)


def _failure(failed: StepFailed) -> Reply:
    error = failed.error
    detail = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return Reply(failed=failed.step, error=error.errno or 0, detail=detail)


def _first_process(isolation: str, control: socket.socket, ready: int, streams: tuple[int, ...]) -> NoReturn:
    """Enter the sandbox, if there is one, start the command and reap orphans until the command ends.

    A probe has no command, so the operations that an overlay must support are tried instead. In a sandbox, the kernel
    kills all processes of the command when this process exits.
    """
    try:
        if isolation != "none":
            kernel.die_with_parent()
        if os.read(ready, 1):
            os.close(ready)
            request = Request.decode(_receive(control))
            folder = os.open(
                request.upper if request.view == "overlay" else request.lowers[0],
                os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,
            )
            _set_up(request, control)
            with step("folder"):
                _enter(request)
            if request.argv:
                _say(control, Reply(status=_run(request, streams, control, folder)))
            else:
                with step("overlay"):
                    _try_overlay()
                _say(control, Reply(status=0))
    except StepFailed as failed:
        _say(control, _failure(failed))
    except BaseException as error:
        _say(control, Reply(failed="keeper", detail=f"{type(error).__name__}: {error}"))
    os._exit(0)


def _receive(control: socket.socket) -> bytes:
    with control.makefile("rb") as file:
        (size,) = struct.unpack("!I", file.read(4))
        return file.read(size)


def _set_up(request: Request, control: socket.socket) -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")  # when memory runs out, the kernel kills the command first
    if request.isolation == "none":
        kernel.adopt_orphans()
        limit(request)
    else:
        _say(control, Reply(mounted=enter_sandbox(request)))
        drop_privileges(request)


def _enter(request: Request) -> None:
    root = request.lowers[0] if request.view == "plain" else request.root
    os.chdir(root)
    os.chdir(request.cwd)
    here = os.getcwd()
    if here != root and not here.startswith(root + "/"):
        raise OSError(1, "it leads out of the folder", request.cwd)
    request.environment["PWD"] = here


def _run(request: Request, streams: tuple[int, ...], control: socket.socket, folder: int) -> int:
    stdin, output = streams
    os.umask(0o022)
    with step("exec"):
        kernel.keep_descriptors()
        command = _spawn(
            request, [(os.POSIX_SPAWN_DUP2, stdin, 0), *((os.POSIX_SPAWN_DUP2, output, n) for n in (1, 2))]
        )
    os.close(stdin)
    os.close(output)
    if request.isolation == "none":
        return _wait_unsandboxed(command, control)
    return _wait(command, Usage(request.limits, folder), control)


def _wait(command: int, usage: Usage, control: socket.socket) -> int:
    """Wait for the command and reap orphans. If the command exceeds a limit, report that and return immediately.

    When the calling process then exits, the kernel kills all processes of the command.
    """
    poll = select.poll()
    poll.register(os.pidfd_open(command), select.POLLIN)
    while True:
        ended = poll.poll(SECONDS * 1000)
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == command:
                _say(control, Reply(near=usage.near()))
                return status
            if not child:
                break
        limit, used = ("", "") if ended else usage.exceeded()
        if limit:
            _say(control, Reply(limit=limit, used=used))
            return signal.SIGKILL


def _spawn(request: Request, actions: list[tuple[int, int, int]]) -> int:
    """Start the command's program and return its process id. A name without `/` is looked up in the command's own PATH.

    Raises `OSError` if there is no such program or it can't be started.
    """
    program = request.argv[0]
    if "/" not in program:
        for folder in request.environment.get("PATH", "").split(":"):
            if os.access(f"{folder}/{program}", os.X_OK) and not os.path.isdir(f"{folder}/{program}"):
                program = f"{folder}/{program}"
                break
        else:
            raise FileNotFoundError(errno.ENOENT, "no such program", program)
    return os.posix_spawn(
        program,
        request.argv,
        request.environment,
        file_actions=actions,
        setsid=True,
        setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        setsigmask=[],
    )


def _wait_unsandboxed(command: int, control: socket.socket) -> int:
    """Wait until the command ends, its caller hangs up or the keeper ends. Then kill all of the command's descendants.

    Orphaned descendants become children of this process. If this process died with the keeper, they would survive. So it
    watches the keeper instead. Returns the command's wait status.
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
    """Perform each operation that leaves a mark in the upper layer, once."""
    os.unlink("file")
    os.unlink("folder/file")
    os.rmdir("folder")
    os.mkdir("folder")
