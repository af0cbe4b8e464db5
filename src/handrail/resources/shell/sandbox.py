"""The sandbox of a command, set up from inside: namespaces, mounts, capabilities, a call filter.

Order matters. The layers are opened before anything hides them. One system call then makes every
mount read-only, without devices and without set-user-id. Writable mounts go on top, and at the end
the list of mounts is read back and must show exactly this. The right to change any of it is dropped
before the command starts, and the command can't create namespaces of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import struct
from collections.abc import Generator

from handrail.resources.shell import kernel
from handrail.resources.shell.request import Request

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE: root needs these to handle
# the files of other users and to become one. None of them changes a mount, a device or the kernel.
KEPT_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PRIVATE = {"/tmp": "mode=1777,size=1g", "/var/tmp": "mode=1777,size=1g", "/run": "mode=755,size=64m"}
HOME = "/tmp/home"

_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_O_PATH = os.O_PATH | os.O_CLOEXEC


class StepFailed(Exception):
    """Raised if a step of the setup failed."""

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
    """Return the flags of the namespaces a command gets."""
    if isolation == "none":
        return 0
    kinds = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    return (
        kinds | (0 if network else kernel.CLONE_NEWNET) | (kernel.CLONE_NEWUSER if isolation == "user" else 0)
    )


def map_ids(process: int) -> None:
    """Map the ids of a process's user namespace, from outside.

    Every id maps to itself. Root gets all of them, so that files of other users can be copied and
    keep their owner. An ordinary user, or a root user that may not do this, gets only its own.
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


# --- mounts --------------------------------------------------------------------------------


def enter_sandbox(request: Request) -> str:
    """Set up the mounts as the first process of the namespaces. Returns the filesystem type at the root."""
    with step("layers"):
        opened = [os.open(path, _O_PATH | os.O_DIRECTORY) for path in _layers(request)]
        exposed = {path: os.open(path, _O_PATH | os.O_DIRECTORY) for path in _exposed(request)}
    with step("namespaces"):
        if not request.network:
            kernel.raise_loopback()
        limit(request)
    with step("mounts"):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with step("overlay"):
        # Before everything becomes read-only: an overlay rejects a read-only upper layer.
        shown = _mount_overlay(request, opened) if request.view == "overlay" else opened[0]
    with step("mounts"):
        resolver = _read_resolver()
        kernel.change_mount("/", add=kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV, below=True)
        kernel.mount("proc", "/proc", "proc", _SAFE | kernel.MS_RDONLY | kernel.MS_NOEXEC)
        writable = [path for path in PRIVATE if os.path.isdir(path) and not os.path.islink(path)]
        for path in writable:
            kernel.mount("tmpfs", path, "tmpfs", _SAFE, PRIVATE[path])
        writable += _make_devices()
        _restore_resolver(resolver)
        _expose(exposed)
        os.makedirs(HOME, exist_ok=True)
        os.makedirs(request.root, exist_ok=True)  # the root may be below a folder that was just hidden
        kernel.mount(f"/proc/self/fd/{shown}", request.root, "", kernel.MS_BIND)
        kernel.change_mount(request.root, remove=kernel.ATTR_RDONLY)
        _hide(request)
        kind = _check_mounts({*writable, request.root}, request)
    for descriptor in {*opened, *exposed.values(), shown}:
        os.close(descriptor)
    return kind


def _layers(request: Request) -> list[str]:
    return [*request.lowers, request.upper, request.work] if request.view == "overlay" else request.lowers[:1]


def _exposed(request: Request) -> list[str]:
    """Return the folders, other than private ones, to show again after a private folder has hidden them."""
    return [
        path
        for path in request.exposed
        if path not in PRIVATE
        and any(_is_below(path, private) for private in PRIVATE)
        and os.path.isdir(path)
    ]


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def _expose(descriptors: dict[str, int]) -> None:
    """Mount these folders again where they were, outermost first. A bind mount stays read-only."""
    for path, descriptor in sorted(descriptors.items()):
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", path, "", kernel.MS_BIND)


def _mount_overlay(request: Request, opened: list[int]) -> int:
    # Layers are given by descriptor: a path may contain ':' or ',', and many paths may exceed the kernel's limit.
    *lowers, upper, work = (f"/proc/self/fd/{descriptor}" for descriptor in opened)
    options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},userxattr,volatile"
    kernel.mount("overlay", request.root, "overlay", _SAFE, options)
    return os.open(request.root, _O_PATH | os.O_DIRECTORY)


def _make_devices() -> list[str]:
    devices = {name: os.open(f"/dev/{name}", _O_PATH) for name in DEVICES if os.path.exists(f"/dev/{name}")}
    kernel.mount("tmpfs", "/dev", "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "mode=755,size=64k")
    for name, descriptor in devices.items():
        _touch(f"/dev/{name}")
        kernel.mount(f"/proc/self/fd/{descriptor}", f"/dev/{name}", "", kernel.MS_BIND)
        kernel.change_mount(f"/dev/{name}", remove=kernel.ATTR_NODEV)
        os.close(descriptor)
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    os.mkdir("/dev/shm")
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", _SAFE, "mode=1777,size=64m")
    os.mkdir("/dev/pts")
    os.symlink("pts/ptmx", "/dev/ptmx")
    with contextlib.suppress(OSError):  # without private terminals, the command has no terminals
        options = "newinstance,ptmxmode=0666,mode=0620"
        kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    os.mkdir("/dev/.nothing", 0o555)
    _touch("/dev/.nothing/file")
    os.mkdir("/dev/.nothing/folder", 0o555)
    kernel.change_mount("/dev", add=kernel.ATTR_RDONLY)
    return ["/dev/shm", "/dev/pts"]


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))


def _hide(request: Request) -> None:
    """Mount an empty file or folder over each hidden path."""
    for path in request.hidden:
        if request.root == path or _is_below(request.root, path) or not os.path.exists(path):
            continue
        kind = "folder" if os.path.isdir(path) else "file"
        kernel.mount(f"/dev/.nothing/{kind}", path, "", kernel.MS_BIND)


def _read_resolver() -> tuple[str, bytes] | None:
    """Return the resolver configuration if it is in a folder that is about to be hidden."""
    path = os.path.realpath("/etc/resolv.conf")
    if not path.startswith("/run/"):
        return None
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return path, file.read()
    return None


def _restore_resolver(resolver: tuple[str, bytes] | None) -> None:
    if resolver is not None:
        path, content = resolver
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _check_mounts(writable: set[str], request: Request) -> str:
    """Read the mounts back: the folder must be mounted as requested, and nothing else writable."""
    kind = ""
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields = line.split(b" ")
            place = os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), fields[4]))
            if place == request.root:
                kind = fields[fields.index(b"-") + 1].decode()
            if b"ro" not in fields[5].split(b",") and place not in writable:
                raise OSError(errno.EPERM, "a mount was left writable", place)
    if not kind or (request.view == "overlay" and kind != "overlay"):
        raise OSError(
            errno.EPERM, f"expected an {request.view} mount, found {kind or 'nothing'}", request.root
        )
    return kind


# --- limits and privileges ------------------------------------------------------------------------------


def limit(request: Request) -> None:
    """Limit processes if the kernel counts them by namespace, and forbid core dumps and namespaces."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    release = tuple(
        int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2]
    )
    if release >= (6, 14) and request.isolation != "none":
        # Since Linux 6.14 this limit belongs to the PID namespace; before, to the whole machine.
        with contextlib.suppress(OSError):
            _put("/proc/sys/kernel/pid_max", str(request.processes + 300))
    if request.isolation == "user":
        with contextlib.suppress(
            OSError
        ):  # read-only in some containers; this is only a second line of defence
            _put("/proc/sys/user/max_user_namespaces", "0")
    if release >= (5, 14) and request.isolation == "user":
        # Since Linux 5.14 this counts within the user namespace; root is never counted.
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        wanted = request.processes if hard == resource.RLIM_INFINITY else min(request.processes, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted, wanted))


def drop_privileges() -> None:
    """Permanently drop the privileges that could undo the sandbox."""
    with step("privileges"):
        kernel.drop_privileges(KEPT_CAPABILITIES if os.geteuid() == 0 else 0)
        kernel.forbid_tracing()
        kernel.die_with_parent()
        if _CALL_FILTER is not None:
            kernel.filter_calls(_CALL_FILTER)


# --- system calls ---------------------------------------------------------------------------------

_LOAD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER = 0x25
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000

_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_FOREIGN = 0x3FFFFFFF
"""Highest call number of the native calling convention.

Higher numbers belong to another one with its own table.
"""

# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
FAMILIES = (1, 2, 10, 16)

# By machine: the architecture number, `socket`, and add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd.
_MACHINES = {
    "x86_64": (0xC000003E, 41, (248, 249, 250, 298, 321, 323)),
    "aarch64": (0xC00000B7, 198, (217, 218, 219, 241, 280, 282)),
}
_IO_URING = (425, 426, 427)


def call_filter() -> bytes | None:
    """Build the seccomp filter, or return None on a machine whose call numbers are unknown here.

    Some kinds of sockets reach past a network namespace (to the host of a virtual machine, to
    hardware), `io_uring` opens any socket without the filtered call, and keys, tracing and kernel
    programs belong to the whole machine. No namespace covers these, so they fail as if the kernel
    did not have them. Programs of a foreign architecture do not run at all.
    """
    known = _MACHINES.get(os.uname().machine)
    if known is None:
        return None
    architecture, socket, refused = known
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_IF_EQUAL, 1, 0, architecture), _fail(errno.ENOSYS)]
    lines += [(_LOAD, 0, 0, _NUMBER), (_JUMP_IF_GREATER, 0, 1, _FOREIGN), _fail(errno.ENOSYS)]
    for number in (*refused, *_IO_URING):
        lines += [(_JUMP_IF_EQUAL, 0, 1, number), _fail(errno.ENOSYS)]
    # Every call but `socket` jumps over what follows, to the end.
    lines += [(_JUMP_IF_EQUAL, 0, len(FAMILIES) + 2, socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    lines += [(_JUMP_IF_EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
    lines += [_fail(errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _fail(error: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, _FAIL | error


_CALL_FILTER = call_filter()
