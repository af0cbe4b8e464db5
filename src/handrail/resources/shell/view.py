"""The files that a command sees: a new root with the system's programs, the command's folder and the exposed paths.

The new root contains only the paths that are put there, so no list of secrets has to be complete. Every source is opened
before a mount can hide it. The new root is built on a tmpfs and made read-only with one system call. It then replaces
the old root, which is detached. Finally, the list of mounts is read back and checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
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
