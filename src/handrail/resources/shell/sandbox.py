"""A command's sandbox: namespaces, a new root, limits, capabilities and a seccomp filter.

The first process in the namespaces sets it up. The privileges that could change the sandbox are dropped before the
command starts. In a user namespace, the command can't create further user namespaces, if the kernel lets `limit` forbid them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import struct
from collections.abc import Generator

from handrail.resources.shell import kernel
from handrail.resources.shell.request import Request
from handrail.resources.shell.view import View, mount_overlay, open_layers

_LOAD = 0x20
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER = 0x25
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_FOREIGN = 0x3FFFFFFF
"""Highest system call number of the native calling convention.

Higher numbers belong to a different calling convention, which has its own table of system calls.
"""

_UNIX = 1
_NETWORKS = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK
_DATAGRAM, _KINDS = 2, 0xF

# For each machine: the architecture number, the numbers of `socket` and `socketpair`, and the numbers of add_key,
# request_key, keyctl, perf_event_open, bpf and userfaultfd.
_MACHINES = {
    "x86_64": (0xC000003E, 41, 53, (248, 249, 250, 298, 321, 323)),
    "aarch64": (0xC00000B7, 198, 199, (217, 218, 219, 241, 280, 282)),
}
_IO_URING = (425, 426, 427)

Line = tuple[int, int, int, int]


def call_filter(*, unix: bool) -> bytes | None:
    """Build the filter, or return None on a machine whose system call numbers are not known.

    The filter allows only IP, netlink and unix sockets. Other kinds can reach past a network namespace, for example to
    hardware or to the host of a virtual machine. Without `unix`, a command can use unix sockets only as connected pairs, and
    not for datagrams. The filter also refuses `io_uring`, which can open any socket without the filtered calls, and calls for
    keys, tracing and kernel programs, which no namespace isolates. Programs for a different architecture can make no
    system calls.
    """
    known = _MACHINES.get(os.uname().machine)
    if known is None:
        return None
    architecture, socket, pair, refused = known
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        _fail(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_GREATER, 0, 1, _FOREIGN),
        _fail(errno.ENOSYS),
    ]
    for number in (*refused, *_IO_URING):
        lines += [(_JUMP_IF_EQUAL, 0, 1, number), _fail(errno.ENOSYS)]
    if not unix:
        # A datagram socket from a connected pair could send to any address.
        kinds: list[Line] = [
            (_LOAD, 0, 0, _SECOND_ARGUMENT),
            (_AND, 0, 0, _KINDS),
            (_JUMP_IF_EQUAL, 0, 1, _DATAGRAM),
            _fail(errno.EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ]
        lines += [(_JUMP_IF_EQUAL, 0, len(kinds), pair), *kinds]
    families = (_UNIX, *_NETWORKS) if unix else _NETWORKS
    # Every call except `socket` jumps to the end.
    lines += [(_JUMP_IF_EQUAL, 0, len(families) + 2, socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_JUMP_IF_EQUAL, len(families) - at, 0, family) for at, family in enumerate(families)]
    lines += [_fail(errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _fail(error: int) -> Line:
    return _RETURN, 0, 0, _FAIL | error


# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE: root keeps these, for example to handle
# other users' files and to switch to other users. None of them changes a mount, a device or the kernel.
KEPT_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10

# The first process needs it to measure processes that have made themselves unreadable. The command does not get it.
_SYS_PTRACE = 1 << 19


class StepFailed(Exception):
    """Raised if a step of setting up the sandbox fails."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error}")
        self.step = step
        self.error = error


@contextlib.contextmanager
def step(name: str) -> Generator[None]:
    """Convert an `OSError` inside this block to a `StepFailed` with the step's name."""
    try:
        yield
    except OSError as error:
        raise StepFailed(name, error) from error


# --- identity -----------------------------------------------------------------------------------


def namespaces(isolation: str, network: bool) -> int:
    """Return the flags of the namespaces that a command gets."""
    if isolation == "none":
        return 0
    kinds = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    return (
        kinds | (0 if network else kernel.CLONE_NEWNET) | (kernel.CLONE_NEWUSER if isolation == "user" else 0)
    )


def map_ids(process: int) -> None:
    """Map the ids of a process's user namespace, from outside.

    Every id maps to itself. Root maps all ids, so that other users' files can be copied and keep their owners. Any other
    user maps only its own ids, and so does root if it may not map all.
    """
    with step("namespaces"):
        if os.geteuid() == 0:
            with contextlib.suppress(OSError):
                for kind in ("gid_map", "uid_map"):
                    _put(f"/proc/{process}/{kind}", _own_map(f"/proc/self/{kind}"))
                return
        user, group = os.geteuid(), os.getegid()
        _put(f"/proc/{process}/setgroups", "deny")
        _put(f"/proc/{process}/gid_map", f"{group} {group} 1")
        _put(f"/proc/{process}/uid_map", f"{user} {user} 1")


def _own_map(path: str) -> str:
    with open(path) as file:
        lines = [line.split() for line in file]
    return "".join(f"{inside} {inside} {count}\n" for inside, _, count in lines)


def _put(path: str, content: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(content.encode())


# --- setup ---------------------------------------------------------------------------------


def enter_sandbox(request: Request) -> str:
    """Set up the sandbox, as the first process of the namespaces. Returns the filesystem type of the command's folder.

    Raises `StepFailed` if a step fails.
    """
    os.umask(0o022)
    with step("layers"):
        opened = open_layers(request)
        view = View(request)
    with step("namespaces"):
        if not request.network:
            kernel.raise_loopback()
        limit(request)
    with step("mounts"):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with step("overlay"):
        folder = mount_overlay(request, opened) if request.view == "overlay" else opened[0]
    with step("mounts"):
        kind = view.enter(folder)
    for descriptor in {*opened, folder}:
        os.close(descriptor)
    return kind


# --- limits and privileges ------------------------------------------------------------------------------


def limit(request: Request) -> None:
    """Forbid core dumps, and limit the number of processes where the kernel counts them per namespace.

    In a user namespace, further user namespaces are forbidden too, if the kernel allows that.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    release = tuple(
        int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2]
    )
    if release >= (6, 14) and request.isolation != "none":
        # Since Linux 6.14 this limit belongs to the PID namespace. Before that, it applied to the whole machine.
        with contextlib.suppress(OSError):
            _put("/proc/sys/kernel/pid_max", str(request.limits.most_processes + 300))
    if request.isolation == "user":
        with contextlib.suppress(
            OSError
        ):  # the file is read-only in some containers, and this limit is only a second line of defence
            _put("/proc/sys/user/max_user_namespaces", "0")
    if release >= (5, 14) and request.isolation == "user":
        # Since Linux 5.14 the processes of each user namespace are counted separately. Root's are never limited.
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = request.limits.most_processes
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted, wanted))


def drop_privileges(request: Request) -> None:
    """Permanently drop the privileges that could undo the sandbox, and filter system calls.

    Raises `StepFailed` if that fails, or if abstract sockets of the host's network can't be blocked.
    """
    with step("privileges"):
        kernel.drop_privileges(KEPT_CAPABILITIES if os.geteuid() == 0 else 0, until_exec=_SYS_PTRACE)
        kernel.forbid_tracing()
        kernel.die_with_parent()
        # Abstract sockets belong to a network namespace. If that is the host's, Landlock or the seccomp filter must block them.
        filter = _FILTERS[not request.network or kernel.scope_abstract_sockets()]
        if filter is not None:
            kernel.filter_calls(filter)
        elif request.network:
            raise OSError(errno.ENOSYS, "abstract unix sockets can't be blocked on this machine")


_FILTERS = {unix: call_filter(unix=unix) for unix in (True, False)}
