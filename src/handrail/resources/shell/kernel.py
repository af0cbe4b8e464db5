"""System calls that the standard library lacks, for mounts, namespaces and capabilities.

A function raises `OSError` if its system call fails, unless it says otherwise. This module imports no other module
of Handrail, because it runs in the keeper, which stays small so that forking it is cheap.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_CLONE3 = 435  # these system calls have the same numbers on all common architectures
_CLOSE_RANGE = 436
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE_RULESET = 444
_LANDLOCK_RESTRICT_SELF = 446
_SCOPE_ABSTRACT_UNIX_SOCKET = 1
_MNT_DETACH = 2
_CLONE_PIDFD = 0x1000
_CLOSE_RANGE_CLOEXEC = 4
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc_here = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL during calls


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), what)
    return result


_before_fork = ctypes.pythonapi.PyOS_BeforeFork
_after_fork_here = ctypes.pythonapi.PyOS_AfterFork_Parent
_after_fork_there = ctypes.pythonapi.PyOS_AfterFork_Child
for _function in (_before_fork, _after_fork_here, _after_fork_there):
    _function.restype = None
    _function.argtypes = ()


def fork_into(namespaces: int) -> tuple[int, int]:
    """Fork a child into new namespaces. Returns its process id and pidfd. In the child, returns zeros.

    Raises `OSError` if the kernel refuses.

    Like `os.fork`, it is safe only in a process with one thread. `unshare` would need a second fork, because a process
    never enters a new PID namespace itself.
    """
    descriptor = ctypes.c_int(-1)
    arguments = (ctypes.c_uint64 * 8)(
        namespaces | _CLONE_PIDFD, ctypes.addressof(descriptor), 0, 0, signal.SIGCHLD, 0, 0, 0
    )
    _before_fork()
    child = _libc_here.syscall(
        ctypes.c_long(_CLONE3), ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments))
    )
    if child == 0:
        _after_fork_there()
        return 0, 0
    error = ctypes.get_errno()
    _after_fork_here()
    if child < 0:
        raise OSError(error, os.strerror(error), "clone3")
    return child, descriptor.value


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode(),
            ctypes.c_ulong(flags),
            os.fsencode(options) or None,
        ),
        f"mount {kind or 'bind'} on {target}",
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    )


def change_mount(target: str, *, add: int = 0, remove: int = 0, below: bool = False) -> None:
    """Change the flags of a mount and, with `below`, of every mount under it, in one system call."""
    attributes = _MountAttributes(add, remove, 0, 0)
    _checked(
        _libc.syscall(
            ctypes.c_long(_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(target),
            ctypes.c_uint(_AT_RECURSIVE if below else 0),
            ctypes.byref(attributes),
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        ),
        f"mount_setattr on {target}",
    )


def _control(what: int, value: int = 0, name: str = "prctl") -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(what), ctypes.c_ulong(value), zero, zero, zero), name)


def die_with_parent() -> None:
    """Make the kernel kill this process as soon as its parent ends."""
    _control(_PR_SET_PDEATHSIG, 9, "set the parent death signal")


def forbid_tracing() -> None:
    """Prevent processes without CAP_SYS_PTRACE from inspecting this one."""
    _control(_PR_SET_DUMPABLE, 0, "set dumpable")


def keep_descriptors() -> None:
    """Let programs that this process starts inherit only the three standard streams."""
    first, last = ctypes.c_uint(3), ctypes.c_uint(0xFFFFFFFF)
    _checked(
        _libc.syscall(ctypes.c_long(_CLOSE_RANGE), first, last, ctypes.c_uint(_CLOSE_RANGE_CLOEXEC)),
        "close_range",
    )


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _control(_PR_SET_CHILD_SUBREAPER, 1, "become a subreaper")


def drop_privileges(keep: int, *, until_exec: int = 0) -> None:
    """Permanently drop all capabilities except those in the bit masks. `exec` restores none, and drops those in `until_exec`."""
    _control(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, "clear ambient capabilities")
    with open("/proc/sys/kernel/cap_last_cap", "rb", buffering=0) as file:
        last = int(file.read(16))
    for capability in range(last + 1):
        if not keep >> capability & 1:
            _control(_PR_CAPBSET_DROP, capability, "drop a capability")
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    mine = keep | until_exec
    low, high = mine & 0xFFFFFFFF, mine >> 32
    # The kernel takes (effective, permitted, inheritable) twice: for the low 32 bits and for the high 32 bits.
    data = struct.pack("6I", low, low, 0, high, high, 0)
    _checked(_libc.capset(header, data), "capset")
    _control(_PR_SET_NO_NEW_PRIVS, 1, "set no_new_privs")


def replace_root() -> None:
    """Make the current folder, which must be a mount, the root of this process, and detach the old root."""
    _checked(_libc.pivot_root(b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)), "detach the old root")


def scope_abstract_sockets() -> bool:
    """Keep this process and its children from reaching abstract unix sockets that others created.

    Returns False if the kernel does not support this.
    """
    rules = struct.pack("QQQ", 0, 0, _SCOPE_ABSTRACT_UNIX_SOCKET)
    found = _libc.syscall(
        ctypes.c_long(_LANDLOCK_CREATE_RULESET), rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0)
    )
    if found < 0:
        return False  # Linux is older than 6.12, or has no Landlock
    try:
        _checked(
            _libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), ctypes.c_int(found), ctypes.c_uint(0)),
            "restrict abstract sockets",
        )
    finally:
        os.close(found)
    return True


def filter_calls(program: bytes) -> None:
    """Apply this seccomp filter to every system call of this process and its children, permanently."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _checked(
        _libc.prctl(
            ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0)
        ),
        "filter system calls",
    )


def raise_loopback() -> None:
    """Bring up `lo`, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))
