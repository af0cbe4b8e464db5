"""A command's sandbox: namespaces, a new root, limits, capabilities and a seccomp filter.

The first process in the namespaces sets it up. The privileges that could change the sandbox are dropped before the
command starts. In a user namespace, the command can't create further user namespaces, if the kernel lets `limit` forbid them.

The new root contains only the paths that are put there (the system's programs, the command's folder and the exposed paths),
so no list of secrets has to be complete. Every source is opened before a mount can hide it. The new root is built on a
tmpfs and made read-only with one system call. It then replaces the old root, which is detached. Finally, the list of
mounts is read back and checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import stat
import struct
from collections.abc import Generator, Iterable, Iterator

from handrail.resources.installation import is_below, resolve
from handrail.resources.shell import kernel
from handrail.resources.shell.request import Request

SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/gnu/store"),
)
"""The folders that hold the system's programs and libraries."""
SETTINGS = (
    *("alternatives", "bash.bashrc", "bindresvport.blacklist", "ca-certificates", "ca-certificates.conf"),
    *("crypto-policies", "debian_version", "ethertypes", "fonts", "gai.conf", "group", "host.conf"),
    *("hostname", "hosts", "inputrc", "java-8-openjdk", "java-11-openjdk", "java-17-openjdk"),
    *("java-21-openjdk", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf"),
    *("localtime", "login.defs", "lsb-release", "magic", "magic.mime", "mime.types", "mke2fs.conf"),
    *("netconfig", "networks", "nsswitch.conf", "os-release", "passwd", "perl", "pki/ca-trust"),
    *("pki/tls/certs", "pki/tls/cert.pem", "profile", "protocols", "redhat-release", "resolv.conf"),
    *("rpc", "services", "shells", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf", "terminfo"),
    *("timezone", "vim", "xattr.conf"),
)
"""Names in `/etc` that programs need and that contain no secrets."""
PRIVATE = {"/tmp": "mode=1777", "/var/tmp": "mode=1777", "/run": "mode=755"}
"""Folders that start empty for every command and are discarded afterwards, with their mount options."""
HOME = "/tmp/home"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

_SAFE = kernel.MS_NOSUID | kernel.MS_NODEV
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_O_PATH = os.O_PATH | os.O_CLOEXEC
_BASES = ("/tmp", "/run", "/mnt", "/var/tmp")
_COPIED = 1 << 20
_NOT_THERE = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ELOOP)
"""Errors that mean that a path does not exist, may not be opened, or crosses a link that is not followed."""


class View:
    """Builds a command's root: opens its parts, mounts them and checks the result."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._links: dict[str, str] = {}
        self._copies: dict[str, bytes] = {}
        self._open: dict[str, int] = {}
        """The descriptor of each path that is shown at the same path in the new root."""
        for path in SYSTEM:
            self._take(path)
        for name in SETTINGS:
            self._take(f"/etc/{name}")
        # What a link in the folder leads to is never shown, because a command may have put the link there.
        exposed = {
            path: each.real
            for each in request.exposed
            if not each.leads_through(request.root)
            for path in (each.path, each.real)
        }
        for path, real in sorted(exposed.items()):
            if not any(is_below(path, shown) for shown in (*self._open, request.root)):
                with _if_readable():
                    self._open[path] = _open_plainly(real)
        self._devices = {
            name: os.open(f"/dev/{name}", _O_PATH) for name in DEVICES if os.path.exists(f"/dev/{name}")
        }

    def _take(self, path: str) -> None:
        """Open one of the system's paths, if it exists. A link that leads through the command's folder is left out."""
        try:
            if not stat.S_ISLNK(os.lstat(path).st_mode):
                self._open[path] = os.open(path, _O_PATH | os.O_NOFOLLOW)
                return
            place = resolve(path)
            if place.leads_through(self._request.root):
                return
            if any(is_below(place.real, folder) for folder in SYSTEM):
                self._links[path] = os.readlink(path)
            elif not path.startswith("/etc/"):
                self._open[path] = _open_plainly(place.real)
            elif stat.S_ISREG(
                os.stat(place.real).st_mode
            ):  # the file that the link leads to may not be shown, so it is copied
                with open(place.real, "rb") as file:
                    self._copies[path] = file.read(_COPIED)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise

    def enter(self, folder: int) -> str:
        """Make this view the root of the process, with the command's folder at its real path.

        Returns the type of the filesystem that is mounted at the folder.
        """
        request = self._request
        base = next(path for path in _BASES if os.path.isdir(path))
        kernel.mount("tmpfs", base, "tmpfs", _SAFE, "mode=755,size=16m")
        for path, options in PRIVATE.items():
            os.makedirs(base + path)
            kernel.mount("tmpfs", base + path, "tmpfs", _SAFE, f"{options},{self._most()}")
        self._make_small(base)
        writable = [*PRIVATE, *self._make_devices(base + "/dev")]
        if "" not in request.kept:
            writable.append(request.root)
        os.mkdir(base + "/proc")
        kernel.mount("proc", base + "/proc", "proc", _SAFE | kernel.MS_RDONLY | kernel.MS_NOEXEC)
        for path, descriptor in sorted(self._open.items()):  # outermost first
            _show(descriptor, base + path)
        os.makedirs(base + HOME, exist_ok=True)
        _show(folder, base + request.root)
        kept = self._keep(base)
        kernel.change_mount(base, add=kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV, below=True)
        for path in writable:
            kernel.change_mount(base + path, remove=kernel.ATTR_RDONLY)
        for name in (*self._devices, *(["pts"] if "/dev/pts" in writable else [])):
            kernel.change_mount(f"{base}/dev/{name}", remove=kernel.ATTR_NODEV)
        os.chdir(base)
        kernel.replace_root()
        os.chdir("/")
        _hide(request)
        self._close()
        return self._check(set(writable), kept)

    def _keep(self, base: str) -> set[str]:
        """Mount each path that the command can't change over itself, and return these mounts, which become read-only with all others.

        A link can't be kept this way, nor can a path that crosses one. Changes to it are refused when the command has ended.
        """
        found: set[str] = set()
        root = self._request.root
        for path in filter(None, self._request.kept):
            with _if_readable():
                descriptor = _open_plainly(path, base + root)
                try:
                    place = f"/proc/self/fd/{descriptor}"
                    kernel.mount(place, place, "", kernel.MS_BIND | kernel.MS_REC)
                finally:
                    os.close(descriptor)
                found.add(f"{root}/{path}")
        return found

    def _make_small(self, base: str) -> None:
        for path, target in {**self._links, "/var/run": "/run", "/etc/mtab": "/proc/self/mounts"}.items():
            os.makedirs(os.path.dirname(base + path), exist_ok=True)
            os.symlink(target, base + path)
        for path, content in self._copies.items():
            os.makedirs(os.path.dirname(base + path), exist_ok=True)
            with open(base + path, "wb") as file:
                file.write(content)

    def _most(self) -> str:
        """Return the mount options that limit the size of a private folder and the number of files in it."""
        limits = self._request.limits
        return f"size={limits.memory},nr_inodes={limits.most_temporary_files}"

    def _make_devices(self, place: str) -> list[str]:
        os.mkdir(place)
        kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "mode=755,size=64k")
        for name, descriptor in self._devices.items():
            _show(descriptor, f"{place}/{name}")
        for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
            os.symlink(f"/proc/self/fd{target}", f"{place}/{name}")
        os.mkdir(f"{place}/shm")
        kernel.mount("tmpfs", f"{place}/shm", "tmpfs", _SAFE, f"mode=1777,{self._most()}")
        os.mkdir(f"{place}/pts")
        os.symlink("pts/ptmx", f"{place}/ptmx")
        writable = ["/dev/shm"]
        with contextlib.suppress(OSError):  # without this mount, the command has no pseudoterminals
            options = "newinstance,ptmxmode=0666,mode=0620"
            kernel.mount("devpts", f"{place}/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
            writable.append("/dev/pts")
        os.mkdir(f"{place}/.nothing", 0o555)
        _touch(f"{place}/.nothing/file")
        os.mkdir(f"{place}/.nothing/folder", 0o555)
        return writable

    def _close(self) -> None:
        for descriptor in (*self._open.values(), *self._devices.values()):
            os.close(descriptor)

    def _check(self, writable: set[str], kept: set[str]) -> str:
        """Check the list of mounts, and return the type of the filesystem that is mounted at the command's folder.

        Raises `OSError` if a command could see or write a mount that it must not, or if its folder is not mounted as requested.
        """
        request, kind, missing = self._request, "", set(kept)
        shown = {"/", "/proc", "/dev", *writable, *(f"/dev/{name}" for name in self._devices)}
        for place, flags, filesystem in _mounts():
            if place == request.root:
                kind = filesystem
            missing.discard(place)
            known = place in shown or any(is_below(place, path) for path in (*self._open, request.root))
            if not known and place not in request.hidden:
                raise OSError(errno.EPERM, "a mount was left that a command must not see", place)
            if b"ro" not in flags and place not in writable:
                raise OSError(errno.EPERM, "a mount was left writable", place)
        if missing:
            raise OSError(errno.EPERM, "a path was not made read-only", min(missing))
        if not kind or (request.view == "overlay" and kind != "overlay"):
            raise OSError(
                errno.EPERM, f"expected a mount ({request.view}), found {kind or 'nothing'}", request.root
            )
        return kind


def mount_overlay(request: Request, layers: Iterable[int]) -> int:
    """Mount a command's layers over its folder, and return a descriptor of the mount."""
    # Layers are passed as descriptors, because a path may contain ':' or ',' and many paths may exceed the kernel's limit.
    *lowers, upper, work = (f"/proc/self/fd/{descriptor}" for descriptor in layers)
    options = f"lowerdir={':'.join(lowers)},upperdir={upper},workdir={work},userxattr,volatile"
    kernel.mount("overlay", request.root, "overlay", _SAFE, options)
    return os.open(request.root, _O_PATH | os.O_DIRECTORY)


def open_layers(request: Request) -> list[int]:
    layers = [*request.lowers, request.upper, request.work]
    paths = layers if request.view == "overlay" else request.lowers[:1]
    return [os.open(path, _O_PATH | os.O_DIRECTORY) for path in paths]


@contextlib.contextmanager
def _if_readable() -> Generator[None]:
    """Ignore the error if a path does not exist, crosses a link or may not be opened."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise


def _open_plainly(path: str, above: str = "/") -> int:
    """Open a path below a folder without following links. Raises `OSError` if it is or crosses a link."""
    here = os.open(above, _O_PATH)
    for name in filter(None, path.split("/")):
        outer = here
        try:
            here = os.open(name, _O_PATH | os.O_NOFOLLOW, dir_fd=outer)
        finally:
            os.close(outer)
    if stat.S_ISLNK(os.fstat(here).st_mode):
        os.close(here)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return here


def _show(descriptor: int, target: str) -> None:
    """Mount an open file or folder, with the mounts below it, at a path. The path is created if necessary."""
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _touch(target)
    # The mounts below are included, because a process in a user namespace is not allowed to uncover what they hide.
    kernel.mount(f"/proc/self/fd/{descriptor}", target, "", kernel.MS_BIND | kernel.MS_REC)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))


def _hide(request: Request) -> None:
    """Mount an empty file or folder over each hidden path, except those that contain the command's folder."""
    for path in request.hidden:
        if request.root == path or is_below(request.root, path) or not os.path.exists(path):
            continue
        kind = "folder" if os.path.isdir(path) else "file"
        kernel.mount(f"/dev/.nothing/{kind}", path, "", kernel.MS_BIND)


def _mounts() -> Iterator[tuple[str, list[bytes], str]]:
    """Yield the path, the flags and the filesystem type of every mount of this process."""
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields = line.split(b" ")
            place = os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), fields[4]))
            yield place, fields[5].split(b","), fields[fields.index(b"-") + 1].decode()


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
