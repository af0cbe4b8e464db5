"""The walls around a command, put up from inside: namespaces, mounts, capabilities.

Order matters. The layers are opened before anything hides them. Then every mount there is becomes
read only, without devices and without set-user-id, in one system call; what may be written is mounted
over that; and at the end the list of mounts is read back and must show exactly this. The right to
change any of it is given up before the command begins, and namespaces of its own are refused to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Generator

from handrail.resources.shell import calls, kernel
from handrail.resources.shell.order import Order

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE: what root needs in order to
# handle files of others and to become somebody else. None of them changes a mount, a device or a kernel.
KEPT = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
PRIVATE = {"/tmp": "mode=1777,size=1g", "/var/tmp": "mode=1777,size=1g", "/run": "mode=755,size=64m"}
HOME = "/tmp/home"

_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV
_FILTER = calls.program()
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_O_PATH = os.O_PATH | os.O_CLOEXEC


class Failed(Exception):
    """A step did not succeed."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error}")
        self.step = step
        self.error = error


@contextlib.contextmanager
def step(name: str) -> Generator[None]:
    """Say which step an error belongs to."""
    try:
        yield
    except OSError as error:
        raise Failed(name, error) from error


# --- who it is -----------------------------------------------------------------------------------


def namespaces(walls: str, network: bool) -> int:
    """The kinds of namespaces a command gets, as flags."""
    if walls == "none":
        return 0
    kinds = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    return kinds | (0 if network else kernel.CLONE_NEWNET) | (kernel.CLONE_NEWUSER if walls == "user" else 0)


def map_ids(process: int) -> None:
    """Say, from outside, who is who in the user namespace of that process.

    Ids stay what they are. Root gets every id, so that files of others can be copied and keep their
    owner; anybody else, and a root that may not, gets its own.
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


# --- what it sees --------------------------------------------------------------------------------


def enclose(order: Order) -> str:
    """Put up the mounts, as the first process of the new namespaces; the kind of filesystem at the root."""
    with step("layers"):
        opened = [os.open(path, _O_PATH | os.O_DIRECTORY) for path in _folders(order)]
        exposed = {path: os.open(path, _O_PATH | os.O_DIRECTORY) for path in _exposed(order)}
    with step("namespaces"):
        if not order.network:
            kernel.raise_loopback()
        limit(order)
    with step("mounts"):
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    with step("overlay"):
        # Before all is read only: an overlay does not take an upper layer that is.
        shown = _lay_over(order, opened) if order.view == "overlay" else opened[0]
    with step("mounts"):
        names = _names()
        kernel.change_mount("/", add=kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV, below=True)
        kernel.mount("proc", "/proc", "proc", _SAFE | kernel.MS_RDONLY | kernel.MS_NOEXEC)
        writable = [path for path in PRIVATE if os.path.isdir(path) and not os.path.islink(path)]
        for path in writable:
            kernel.mount("tmpfs", path, "tmpfs", _SAFE, PRIVATE[path])
        writable += _make_devices()
        _restore_names(names)
        _expose(exposed)
        os.makedirs(HOME, exist_ok=True)
        os.makedirs(order.root, exist_ok=True)  # it may lie below one of those just hidden
        kernel.mount(f"/proc/self/fd/{shown}", order.root, "", kernel.MS_BIND)
        kernel.change_mount(order.root, remove=kernel.ATTR_RDONLY)
        _hide(order)
        kind = _check_mounts({*writable, order.root}, order)
    for descriptor in {*opened, *exposed.values(), shown}:
        os.close(descriptor)
    return kind


def _folders(order: Order) -> list[str]:
    return [*order.lowers, order.upper, order.work] if order.view == "overlay" else order.lowers[:1]


def _exposed(order: Order) -> list[str]:
    """The folders to show again after a private folder has hidden them; never a private folder itself."""
    return [
        path
        for path in order.exposed
        if path not in PRIVATE and any(_is_below(path, private) for private in PRIVATE) and os.path.isdir(path)
    ]


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder + "/")


def _expose(descriptors: dict[str, int]) -> None:
    """Mount these folders again where they were, outermost first. A bind mount stays read only."""
    for path, descriptor in sorted(descriptors.items()):
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", path, "", kernel.MS_BIND)


def _lay_over(order: Order, opened: list[int]) -> int:
    # By descriptor: a path may hold ':' or ',', and many of them may be more than the kernel takes.
    *lowers, upper, work = (f"/proc/self/fd/{descriptor}" for descriptor in opened)
    options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},userxattr,volatile"
    kernel.mount("overlay", order.root, "overlay", _SAFE, options)
    return os.open(order.root, _O_PATH | os.O_DIRECTORY)


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
    with contextlib.suppress(OSError):  # a kernel without terminals of one's own: then there are none
        options = "newinstance,ptmxmode=0666,mode=0620"
        kernel.mount("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    os.mkdir("/dev/.nothing", 0o555)
    _touch("/dev/.nothing/file")
    os.mkdir("/dev/.nothing/folder", 0o555)
    kernel.change_mount("/dev", add=kernel.ATTR_RDONLY)
    return ["/dev/shm", "/dev/pts"]


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))


def _hide(order: Order) -> None:
    """Put nothing in the place of what is not to be seen."""
    for path in order.hidden:
        if order.root == path or _is_below(order.root, path) or not os.path.exists(path):
            continue
        kind = "folder" if os.path.isdir(path) else "file"
        kernel.mount(f"/dev/.nothing/{kind}", path, "", kernel.MS_BIND)


def _names() -> tuple[str, bytes] | None:
    """Where the names of hosts are looked up, if that file is about to be hidden."""
    path = os.path.realpath("/etc/resolv.conf")
    if not path.startswith("/run/"):
        return None
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return path, file.read()
    return None


def _restore_names(names: tuple[str, bytes] | None) -> None:
    if names is not None:
        path, content = names
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _check_mounts(writable: set[str], order: Order) -> str:
    """Read the mounts back: the folder is what it should be, and nothing else can be written."""
    kind = ""
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields = line.split(b" ")
            place = os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), fields[4]))
            if place == order.root:
                kind = fields[fields.index(b"-") + 1].decode()
            if b"ro" not in fields[5].split(b",") and place not in writable:
                raise OSError(errno.EPERM, "a mount was left writable", place)
    if not kind or (order.view == "overlay" and kind != "overlay"):
        raise OSError(
            errno.EPERM, f"not an {order.view} is mounted there, but {kind or 'nothing'}", order.root
        )
    return kind


# --- what it may do ------------------------------------------------------------------------------


def limit(order: Order) -> None:
    """Bound what it can use up: processes, where the kernel counts them by namespace; no cores, no namespaces."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    release = tuple(
        int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2]
    )
    if release >= (6, 14) and order.walls != "none":
        # From 6.14 on this belongs to the PID namespace; before, it is the whole machine's.
        with contextlib.suppress(OSError):
            _put("/proc/sys/kernel/pid_max", str(order.processes + 300))
    if order.walls == "user":
        with contextlib.suppress(OSError):  # read only in some containers; it is a second wall, not the first
            _put("/proc/sys/user/max_user_namespaces", "0")
    if release >= (5, 14) and order.walls == "user":
        # From 5.14 on it counts within the user namespace; root is not counted at all.
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        wanted = order.processes if hard == resource.RLIM_INFINITY else min(order.processes, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted, wanted))


def give_up_privileges() -> None:
    """From here on nothing that was put up can be taken down again."""
    with step("privileges"):
        kernel.give_up_privileges(KEPT if os.geteuid() == 0 else 0)
        kernel.forbid_tracing()
        kernel.die_with_parent()
        if _FILTER is not None:
            kernel.filter_calls(_FILTER)
