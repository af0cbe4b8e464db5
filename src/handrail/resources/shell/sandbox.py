"""A command's sandbox: namespaces, a new root, limits, capabilities and a seccomp filter.

The first process in the namespaces sets it up. The privileges that could change the sandbox are dropped before the
command starts. In a user namespace, the command can't create further user namespaces, if the kernel lets `limit` forbid them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Generator

from handrail.resources.shell import kernel
from handrail.resources.shell.call_filter import call_filter
from handrail.resources.shell.request import Request
from handrail.resources.shell.view import View, mount_overlay, open_layers

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
