"""Containment: a command can't reach other files, other processes, the network or secrets, and can't escape."""

import ctypes
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

from handrail.errors import DefinitionError
from handrail.resources.installation import interpreter_places
from handrail.resources.shell import CommandLimits, Support, command_process, probe
from handrail.resources.shell import execution as shell_module
from handrail.resources.shell.command_process import close_keeper
from handrail.resources.shell.execution import UNLIMITED
from handrail.resources.shell.shell_errors import CommandMissing
from support import ROOT
from support.folders import PYTHON, Folder, anything, outside_tmp

INTERPRETER = [place.path for place in interpreter_places()]
WALLS = ["user", "root"] if os.geteuid() == 0 else ["user"]


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip(f"not available here: {'; '.join(support.missing)}")
    return request.param


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    made.add("kept.txt", "kept\n")
    before = made.real()
    yield made
    assert made.real() == before


@pytest.fixture(params=WALLS)
def walls(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with every kind of isolation that the current user can have, not only with the default one.

    Skips the test if commands can't be contained here.
    """
    found = probe(tmp_path)
    if not found.contained:
        pytest.skip("; ".join(found.missing))
    monkeypatch.setattr(shell_module, "probe", lambda folder: Support(request.param, found.overlay))
    return request.param


# --- files ------------------------------------------------------------------------------------------

OUTSIDE = [
    "/",
    "/etc",
    "/home",
    "/root",
    "/usr",
    "/usr/bin",
    "/var",
    "/var/lib",
    "/opt",
    "/mnt",
    "/proc",
    "/sys",
    "/dev",
]


@pytest.mark.usefixtures("walls")
def test_nothing_outside_the_folder_can_be_written(folder: Folder, backend: str):
    """A command can't create or change a file of the host outside its own folder."""
    places = [place for place in OUTSIDE if os.path.isdir(place)]
    script = "".join(f"touch {place}/handrail-escape 2>/dev/null && echo {place}\n" for place in places)
    finished = folder.sh(anything(backend), script + "echo x >> /etc/passwd; chmod 777 /etc; true")
    refused = (
        "Read-only file system",
        "Permission denied",
    )  # "Permission denied" if the user who runs the tests may not write there
    assert sum(finished.output.count(words) for words in refused) == 2
    assert not [line for line in finished.output.splitlines() if line.startswith("/")]
    assert not [place for place in places if os.path.exists(f"{place}/handrail-escape")]


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/var/tmp", "/run"])
def test_its_temporary_folders_are_its_own(folder: Folder, backend: str, place: str):
    """A command's temporary folders are private, and their files are gone when it ends."""
    if not os.access(place, os.W_OK):
        pytest.skip(f"only root may write in {place}")
    shell = anything(backend)
    with tempfile.NamedTemporaryFile(dir=place, prefix="handrail-outside-") as outside:
        script = f"ls -A {place}; echo x > {place}/handrail-inside && echo written"
        finished = folder.sh(shell, script)
        assert finished.output.endswith("written\n")
        assert os.path.basename(outside.name) not in finished.output
    assert not os.path.exists(f"{place}/handrail-inside")
    assert "handrail-inside" not in folder.run(shell, "ls", "-A", place).output


def test_layers_themselves_can_not_be_written(folder: Folder, backend: str):
    """A command can't write to its layers through their paths on the host."""
    folder.sh(anything(backend), f"touch {folder.upper}/x {folder.base}/x {folder.base}/work/x")
    assert folder.caught() == []
    assert sorted(os.listdir(folder.base)) == ["root", "upper", "work"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
@pytest.mark.usefixtures("walls")
def test_a_stray_device_file_can_not_be_opened(backend: str):
    """A device file outside /dev can't be opened, whether it is in the command's folder or elsewhere."""
    with tempfile.TemporaryDirectory(dir=outside_tmp(), prefix=".shell-") as place:
        folder = Folder(Path(place))
        for path in (folder.root / "zero", folder.base / "zero"):
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        finished = folder.sh(
            anything(backend), "head -c 1 zero; head -c 1 ../zero; head -c 1 /dev/zero | wc -c"
        )
        assert finished.output.count("cannot open") == 2
        assert finished.output.endswith("\n1\n")


def test_a_folder_outside_tmp_is_held_the_same(backend: str):
    """Commands on a folder outside /tmp are contained like those on a folder inside it."""
    with tempfile.TemporaryDirectory(dir=outside_tmp(), prefix=".shell-") as place:
        folder = Folder(Path(place))
        folder.add("kept.txt", "kept\n")
        before = folder.real()
        python = [Path(each) for each in INTERPRETER if each.startswith("/tmp/")]
        listed = "\n".join(sorted({"home", *(each.parts[2] for each in python)}))
        finished = folder.sh(
            anything(backend), f"echo x >> kept.txt; touch {shlex.quote(place)}/out; pwd; ls /tmp"
        )
        assert (
            finished.output
            == f"touch: cannot touch '{place}/out': Read-only file system\n{folder.root}\n{listed}\n"
        )
        assert folder.caught() == [("written", "kept.txt")]
        assert folder.real() == before


# --- secrets ----------------------------------------------------------------------------------------


def test_the_environment_is_clean(folder: Folder, backend: str, monkeypatch: pytest.MonkeyPatch):
    """A command and the processes it sees have only harmless environment variables and those passed as `environment`."""
    for name in (
        "OPENAI_API_KEY",
        "GITHUB_TOKEN",
        "LC_SECRET_token",
        "SSH_AUTH_SOCK",
        "LD_PRELOAD_",
        "MY_VAR",
        "USER",
    ):
        monkeypatch.setenv(name, "hunter2")
    shell = anything(backend, environment={"GIVEN_TOKEN": "on purpose", "LANG": "C"})
    finished = folder.sh(shell, "env; cat /proc/*/environ | tr '\\0' '\\n'")
    assert "hunter2" not in finished.output
    names = {line.split("=")[0] for line in folder.run(shell, "env").output.splitlines()}
    assert names - {name for name in names if name.startswith("LC_")} <= {
        *("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "HOME", "TMPDIR", "PWD", "GIVEN_TOKEN")
    }
    assert folder.run(shell, "printenv", "GIVEN_TOKEN", "LANG", "HOME").output == "on purpose\nC\n/tmp/home\n"


def test_the_usual_places_of_secrets_are_empty(folder: Folder, backend: str, monkeypatch: pytest.MonkeyPatch):
    """To a command, common locations of keys and credentials, and the paths passed as `hidden`, appear empty or missing."""
    for path in ("home/.ssh/id", "home/.netrc", "home/.config/gh/hosts.yml", "home/plain", "mine/.env"):
        folder.add(path, "hunter2")
    before = folder.real()
    monkeypatch.setenv("HOME", str(folder.root / "home"))
    shell = anything(backend, hidden=[folder.root / "mine/.env", folder.root / "missing"])
    finished = folder.sh(
        shell,
        "cat home/.ssh/id home/.netrc home/.config/gh/hosts.yml mine/.env; cat home/plain; ls home/.ssh",
    )
    assert finished.output.count("hunter2") == 1
    if os.geteuid() == 0:
        assert "No such file" in folder.run(shell, "cat", "/etc/shadow").output
    assert folder.real() == before
    assert folder.caught() == []
    for path in ("home", "mine"):
        subprocess.run(["rm", "-r", str(folder.root / path)], check=True)


# --- processes --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("walls")
def test_it_sees_no_processes_but_its_own(folder: Folder, backend: str):
    """A command sees only its own processes and can't signal others."""
    finished = folder.sh(anything(backend), f"ls -d /proc/[0-9]* | wc -l; kill -0 {os.getpid()} || echo none")
    assert int(finished.output.split()[0]) <= 5
    assert finished.output.splitlines()[-1] == "none"


@pytest.mark.usefixtures("walls")
def test_it_sees_no_shared_memory_but_its_own(folder: Folder, backend: str):
    """A command can't see the System V message queues of other processes."""
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.msgget(0, 0o1666)
    assert queue >= 0
    try:
        assert len(Path("/proc/sysvipc/msg").read_text().splitlines()) > 1
        assert len(folder.run(anything(backend), "cat", "/proc/sysvipc/msg").output.splitlines()) == 1
    finally:
        libc.msgctl(queue, 0, None)


def test_it_has_no_descriptors_but_three(folder: Folder, backend: str):
    """A command has only the three standard file descriptors, and none of Handrail's or the keeper's."""
    code = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd'))[:-1], os.getsid(0) == os.getpid())"
    assert folder.run(anything(backend), PYTHON, "-c", code).output == "[0, 1, 2] True\n"


def test_processes_are_bounded(folder: Folder):
    """A fork bomb is killed at the command's own process limit, or fails to create more processes."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release < (6, 14) and os.geteuid() == 0:
        pytest.skip("this kernel does not count root's processes by namespace")
    code = """
        import os, signal
        n = 0
        try:
            while n < 2000:
                if os.fork() == 0:
                    signal.pause()
                n += 1
        except OSError as error:
            print(error.strerror)
        print(n)
    """
    finished = folder.run(anything(limits=CommandLimits(processes=100)), PYTHON, "-c", textwrap.dedent(code))
    if finished.limit:
        assert finished.limit == "100 processes and threads"
    else:
        assert finished.output.startswith("Resource temporarily unavailable\n")
        assert int(finished.output.split()[-1]) <= 400


# --- the network ------------------------------------------------------------------------------------


class Listener:
    """A server that listens on the loopback interface, on a socket file and on an abstract socket."""

    def __init__(self, path: Path) -> None:
        self.inet = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.inet.getsockname()[1]
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0handrail-{os.getpid()}")
        self.abstract.listen()
        self.path = socket.socket(socket.AF_UNIX)
        self.path.bind(str(path))
        self.path.listen()

    def close(self) -> None:
        for server in (self.inet, self.abstract, self.path):
            server.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with tempfile.TemporaryDirectory(dir="/run" if os.geteuid() == 0 else "/tmp") as place:
        made = Listener(Path(place) / "s")
        yield made
        made.close()


CONNECT = """
import socket, sys
port, name, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
for kind, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, "\\0" + name), (socket.AF_UNIX, path)):
    try:
        socket.socket(kind).connect(address); print("connected")
    except OSError as error:
        print(type(error).__name__)
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()); print("own loopback")
"""


@pytest.mark.usefixtures("walls")
def test_the_network_is_off(folder: Folder, backend: str, listener: Listener):
    """With the network off, a command reaches only its own loopback, and no abstract socket or socket file of the host."""
    arguments = [str(listener.port), f"handrail-{os.getpid()}", listener.path.getsockname()]
    finished = folder.run(anything(backend), PYTHON, "-c", CONNECT, *arguments)
    assert (
        finished.output == "ConnectionRefusedError\nConnectionRefusedError\nFileNotFoundError\nown loopback\n"
    )


def test_the_network_can_be_switched_on(folder: Folder, backend: str, listener: Listener):
    """With the network on, a command can use the machine's network.

    It still reaches no abstract socket and no socket file of the host.
    """
    arguments = [str(listener.port), f"handrail-{os.getpid()}", listener.path.getsockname()]
    finished = folder.run(anything(backend, network=True), PYTHON, "-c", CONNECT, *arguments)
    assert finished.output == "connected\nPermissionError\nFileNotFoundError\nown loopback\n"


SEND = """
import socket, sys
for make in (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]):
    try:
        make().sendto(b"hello", "\\0" + sys.argv[1]); print("sent")
    except OSError as error:
        print(error.strerror)
mine, other = socket.socketpair(); mine.send(b"own pair"); print(other.recv(9).decode())
socket.socket(socket.AF_INET, socket.SOCK_DGRAM); print("network")
"""


@pytest.mark.usefixtures("walls")
@pytest.mark.parametrize("scoped", [True, False])
def test_no_abstract_socket_hears_it(folder: Folder, scoped: bool, monkeypatch: pytest.MonkeyPatch):
    """With the network on, Landlock keeps a command from sending to abstract sockets. Without Landlock, seccomp does."""
    if not scoped:
        close_keeper()  # the next keeper is started as if the kernel lacked Landlock
        monkeypatch.setattr(
            command_process, "_BOOT", command_process._BOOT.replace("main(int", _UNSCOPED + "main(int")
        )
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(f"\0handrail-heard-{os.getpid()}")
    heard.setblocking(False)
    try:
        finished = folder.run(anything(network=True), PYTHON, "-c", SEND, f"handrail-heard-{os.getpid()}")
        problem = "Operation not permitted" if scoped else "Address family not supported by protocol"
        assert finished.output == f"{problem}\n{problem}\nown pair\nnetwork\n"
        with pytest.raises(BlockingIOError):
            heard.recv(10)
    finally:
        heard.close()
        close_keeper()


_UNSCOPED = "from handrail.resources.shell import kernel; kernel.scope_abstract_sockets = lambda: False\n"


# --- files and programs of the host -----------------------------------------------------------------


@pytest.fixture
def outside() -> Iterator[Path]:
    """Provide a folder on the host, unrelated to any command, with a key and a program."""
    with tempfile.TemporaryDirectory(dir=outside_tmp(), prefix=".shell-") as place:
        found = Path(place)
        (found / "key").write_text("hunter2")
        (found / "bin").mkdir()
        (found / "bin" / "tool").write_text("#!/bin/sh\necho tool ran\n")
        (found / "bin" / "tool").chmod(0o755)
        yield found


@pytest.mark.usefixtures("walls")
def test_nothing_of_the_host_is_seen(folder: Folder, backend: str, outside: Path):
    """A command sees no home, logs or data of the host.

    Its root contains only system folders, its own folder and the interpreter's.
    """
    places = [
        place
        for place in ("/home", "/srv", "/mnt", "/media", "/opt", "/var/lib", "/var/log", "/sys")
        if os.path.isdir(place)
        and not any(f"{path}/".startswith(f"{place}/") for path in (str(folder.root), *INTERPRETER))
    ]
    finished = folder.sh(
        anything(backend),
        f"cat {quote(f'{outside}/key')}; ls -A {' '.join(places)} /run; cat /etc/shadow /etc/ssh/*; ls -A ~",
    )
    assert "hunter2" not in finished.output
    assert finished.output.count("No such file") == len(places) + 3
    shown = {*os.listdir("/usr"), "home"}
    roots = folder.run(anything(backend), "ls", "-A", "/").output.split()
    expected = {
        "bin",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "nix",
        "gnu",
        "proc",
        "run",
        "sbin",
        "tmp",
        "usr",
        "var",
    }
    expected |= {path.split("/")[1] for path in (str(folder.root), *INTERPRETER)}
    assert set(roots) <= expected, shown


def test_a_socket_in_the_folder_leads_nowhere(folder: Folder, backend: str):
    """A command can't connect to the socket of a server that listens in its folder."""
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder.root)
        try:
            server.bind("s")
        finally:
            os.chdir(here)
        server.listen()
        code = "import socket; socket.socket(socket.AF_UNIX).connect('s'); print('connected')"
        finished = folder.run(anything(backend), PYTHON, "-c", code)
        assert "connected" not in finished.output
    (folder.root / "s").unlink()


@pytest.mark.usefixtures("walls")
def test_what_is_exposed_is_seen_and_not_written(folder: Folder, backend: str, outside: Path):
    """An exposed folder or file is visible read-only at its own path, and nothing beside it is visible."""
    shell = anything(backend, expose=[outside / "bin"])
    tool, new, key = (quote(f"{outside}/{name}") for name in ("bin/tool", "bin/x", "key"))
    finished = folder.sh(shell, f"{tool}; touch {new}; ls -A {quote(str(outside))}")
    assert finished.output.splitlines() == [
        "tool ran", f"touch: cannot touch '{outside}/bin/x': Read-only file system", "bin",
    ]  # fmt: skip
    shell = anything(backend, expose=[str(outside / "key")])
    finished = folder.sh(shell, f"cat {key}; ls {quote(str(outside))}")
    assert finished.output == "hunter2key\n"


def test_a_hidden_program_says_what_to_expose(
    folder: Folder, backend: str, outside: Path, monkeypatch: pytest.MonkeyPatch
):
    """Running a program from a hidden folder fails, and the error or a note in the result says what to expose.

    This holds whether the program is run by name, by path, from a shell or as a script's interpreter.
    """
    monkeypatch.setenv("PATH", f"{outside}/bin:{os.environ['PATH']}")
    wanted = re.escape(f"expose=['{outside}']")
    for program in ("tool", f"{outside}/bin/tool"):
        with pytest.raises(CommandMissing, match=wanted):
            folder.run(anything(backend), program)
    assert folder.run(anything(backend, expose=[outside]), "tool").output == "tool ran\n"
    finished = folder.sh(anything(backend), "tool")
    assert finished.exit_code == 127
    assert any(f"{outside}/bin" in note and "expose=" in note for note in finished.notes)
    if " " in str(outside):
        return  # a script's first line can't name a path with a space
    script = folder.add("s.sh", f"#!{outside}/bin/tool\n", mode=0o755)
    with pytest.raises(CommandMissing, match=wanted):
        folder.run(anything(backend), "./s.sh")
    script.unlink()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("~", "Pass a list"),
        (["x"], "which is relative"),
        (["/"], "commands have their own"),
        (["/tmp"], "commands have their own"),
        (["/nowhere"], "does not exist"),
    ],
)
def test_what_can_not_be_exposed_is_refused(given: Any, said: str):
    """A string in place of a list is refused, and so is a path that is relative, missing, or private to each command."""
    with pytest.raises(DefinitionError, match=said):
        anything(expose=given)


def test_the_interpreter_that_runs_handrail_is_there(folder: Folder, backend: str):
    """A command can use the interpreter that runs Handrail, wherever that is installed."""
    finished = folder.run(anything(backend), sys.executable, "-c", "import msgspec, sys; print(sys.prefix)")
    assert finished.output == f"{sys.prefix}\n"


# --- escapes ----------------------------------------------------------------------------------------

SYSCALL = "import ctypes, os, sys; libc = ctypes.CDLL(None, use_errno=True); "

# Each script succeeds (exit code 0) only if it escapes or does something that the sandbox must prevent.
ESCAPES = {
    "remount the root": "mount -o remount,rw / && touch /etc/handrail-escape",
    "remount a folder": "mount -o remount,bind,rw /etc && touch /etc/handrail-escape",
    "remount the folder's lower": 'mount -o remount,bind,rw "$PWD"',
    "unmount the folder": 'cd / && umount "$OLDPWD"',
    "unmount the folder lazily": 'cd / && umount -l "$OLDPWD"',
    "unmount /tmp": "umount -l /tmp",
    "unmount /proc": "umount -l /proc",
    "bind over": "mount --bind /etc /mnt",
    "bind into the folder": "mkdir e && mount --bind /etc e",
    "mount a tmpfs": "mkdir t && mount -t tmpfs none t",
    "mount the disk": 'mkdir d && mount -t ext4 "$(awk \'$5 == "/" {print $3; exit}\' /proc/self/mountinfo)" d',
    "mount a proc": "mkdir p && mount -t proc none p",
    "mount an overlay": "mkdir o u w && mount -t overlay none -o lowerdir=/etc,upperdir=u,workdir=w o",
    "user namespace, then remount": "unshare -Urm sh -c 'mount -o remount,bind,rw / && touch /etc/handrail-escape'",
    "user namespace, then unmount": 'cd / && unshare -Urm umount -l "$OLDPWD"',
    "mount namespace": "unshare -m true",
    "enter the first process": "nsenter -t 1 -m -p true",
    "enter through its own": "nsenter --mount=/proc/1/ns/mnt true",
    "the first process's root": "touch /proc/1/root/etc/handrail-escape",
    "look at the first process's root": "ls /proc/1/root/ /proc/1/cwd/",
    "the first process's descriptors": "for f in /proc/1/fd/*; do readlink $f && exit 0; done; exit 1",
    "open the first process's descriptors": "for f in 0 1 2 4 5; do : <> /proc/1/fd/$f && exit 0; done; exit 1",
    "the first process's memory": "head -c 1 /proc/1/mem",
    "kill the first process": "kill -9 1; sleep 0; test ! -d /proc/1",
    "a block device": "mknod d b $(stat -c '%Hd %Ld' /) && head -c 1 d",
    "the memory device": "mknod m c 1 1 && head -c 1 m",
    "a device that is there": "for d in /dev/vd* /dev/sd* /dev/nvme* /dev/mem /dev/kmsg; do test -e $d && exit 0; done; exit 1",
    "change the root": "chroot /proc/1/root true",
    "change the root and climb": "mkdir c && chroot c true || chroot . true",
    "move the root": SYSCALL + "sys.exit(libc.pivot_root(b'.', b'.') != 0)",
    "mount by new calls": SYSCALL + "sys.exit(libc.syscall(430, b'tmpfs', 0) < 0)",
    "clone a mount": SYSCALL + "sys.exit(libc.syscall(428, -100, b'/etc', 1) < 0)",
    "change mount attributes": SYSCALL
    + "a = (ctypes.c_uint64 * 4)(0, 1, 0, 0); sys.exit(libc.syscall(442, -100, b'/', 0, a, 32) != 0)",
    "trace the first process": SYSCALL + "sys.exit(libc.ptrace(16, 1, 0, 0) != 0)",
    "open by handle": SYSCALL
    + "h = (ctypes.c_uint32 * 40)(128, 0); m = ctypes.c_int();"
    + "libc.name_to_handle_at(-100, b'/etc/hostname', h, ctypes.byref(m), 0);"
    + "f = os.open('/etc', os.O_RDONLY); sys.exit(libc.open_by_handle_at(f, h, os.O_RDWR) < 0)",
    "load a module": SYSCALL
    + "libc.syscall(105 if os.uname().machine == 'aarch64' else 175, 0, 0, b''); sys.exit(ctypes.get_errno() not in (0, 14))",
    "load a program into the kernel": SYSCALL
    + "a = (ctypes.c_uint64 * 16)(2, 4, 4, 8); sys.exit(libc.syscall(280 if os.uname().machine == 'aarch64' else 321, 0, a, 128) < 0)",
    "set the clock": "date -s '1999-01-01' >/dev/null",
    "set the host name": "hostname escaped",
    "write through a descriptor": "exec 3</etc/hostname && echo x > /proc/self/fd/3",
    "write through a link": "ln -s /etc/handrail-escape l && echo x > l",
    "write through a hard link": "ln /etc/hostname h",
    "make the folder a link": 'mv "$PWD" "$PWD.old"',
    "core pattern": "echo '|/tmp/x' > /proc/sys/kernel/core_pattern",
    "sysrq": "echo h > /proc/sysrq-trigger",
    "make /proc writable": "mount -o remount,rw /proc && echo h > /proc/sysrq-trigger",
    "drop caches": "echo 1 > /proc/sys/vm/drop_caches",
    "panic on oom": "echo 1 > /proc/sys/vm/panic_on_oom",
    "a cgroup": "for d in /sys/fs/cgroup /sys/fs/cgroup/*/; do mkdir $d/handrail-escape && exit 0; done; exit 1",
    "kernel settings": "for f in /sys/kernel/*; do test -f $f && : >> $f && exit 0; done; exit 1",
    "set-user-id": "grep -q 'NoNewPrivs:.0' /proc/self/status",
    "capabilities": f"test $((0x$(awk '/CapBnd/ {{print $2}}' /proc/self/status) & ~0x4fb)) -ne 0 {'#' if os.geteuid() else ''}",
    "immutable files": "chattr +i /etc/hostname",
    "the terminal": SYSCALL
    + "import fcntl, termios; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), termios.TIOCSTI, b'x')",
    "nice": "nice -n -5 sh -c 'test $(nice) -lt 0'",
    "raise limits": "ulimit -Hc 1000 || exit 1",
    "a socket to the host of the machine": SYSCALL + "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "a socket to the kernel's ciphers": SYSCALL + "import socket; socket.socket(38, socket.SOCK_SEQPACKET)",
    "io_uring": SYSCALL + "sys.exit(libc.syscall(425, 8, (ctypes.c_uint32 * 40)()) < 0)",
    "keys": SYSCALL + "sys.exit(libc.syscall(219 if os.uname().machine == 'aarch64' else 250, 0, -3, 1) < 0)",
    "raw sockets": SYSCALL + "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
}


@pytest.mark.usefixtures("walls")
@pytest.mark.parametrize("escape", ESCAPES)
def test_there_is_no_way_out(folder: Folder, escape: str):
    """No script in `ESCAPES` succeeds, and the names in /etc and /mnt and the content of /etc/hostname do not change."""
    text = ESCAPES[escape]
    before = {place: sorted(os.listdir(place)) for place in ("/etc", "/mnt")}
    hostname = Path("/etc/hostname").read_bytes()
    argv = (
        [PYTHON, "-c", text]
        if text.startswith(SYSCALL)
        else ["sh", "-c", f"PATH=$PATH:/usr/sbin:/sbin; {text}"]
    )
    finished = folder.run(anything(), *argv)
    assert finished.exit_code not in (0, 127), finished.output
    assert "SyntaxError" not in finished.output
    assert "not found" not in finished.output
    assert {place: sorted(os.listdir(place)) for place in before} == before
    assert Path("/etc/hostname").read_bytes() == hostname


# --- commands of an ordinary user -------------------------------------------------------------------

AS_NOBODY = """
import asyncio, sys, tempfile
from pathlib import Path
from handrail.resources.shell import Allow, Layers, Shell, probe

place = Path(tempfile.mkdtemp())
for name in ("root/docs", "upper", "work"):
    (place / name).mkdir(parents=True)
(place / "root/docs/kept").write_text("kept")
(place / "root/locked").mkdir(0o000)
support = probe(place)
if not support.contained:
    sys.exit("MISSING " + "; ".join(support.missing))
layers = Layers((place / "root",), place / "upper", place / "work")
shell = Shell([Allow(...)], backend=sys.argv[1])
script = "id -u; echo x > new; rm -r docs; mkdir docs; touch /var/tmp/x /etc/x; grep CapEff /proc/self/status; unshare -Ur true"
finished = asyncio.run(shell.run(["sh", "-c", script], layers))
print(finished.output, finished.backend, (place / "root/docs/kept").read_text(), sorted(p.name for p in (place / "upper").iterdir()))
print(list((place / "work").iterdir()))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="needs root and a common Python"
)
def test_an_ordinary_user_is_held_the_same(backend: str, tmp_path: Path):
    """An ordinary user's command is contained too.

    It runs with the user's id and without capabilities, and its writes are kept.
    """
    packages = [path for path in sys.path if path.endswith("site-packages")]
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    )
    if version.stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("the Python that ordinary users can run has another version")
    source = ROOT / "src"
    done = subprocess.run(
        [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "/usr/bin/python3",
            "-c",
            AS_NOBODY,
            backend,
        ],
        env={
            "PYTHONPATH": ":".join([str(source), *packages]),
            "PATH": os.environ["PATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if "MISSING" in done.stderr:
        pytest.skip(done.stderr)
    assert [line for line in done.stderr.splitlines() if UNLIMITED not in line] == []
    lines = done.stdout.splitlines()
    assert lines[0] == "65534"
    assert lines[1] == "touch: cannot touch '/etc/x': Read-only file system"
    assert lines[2].split() == ["CapEff:", "0000000000000000"]
    assert lines[3].startswith("unshare: ")
    assert lines[-2:] == [f" {backend} kept ['docs', 'new']", "[]"]


# --- the probe and the keeper ------------------------------------------------------------------------


def test_the_probe_finds_what_the_machine_has(tmp_path: Path):
    """If util-linux can mount an overlay in a user namespace, the probe reports that overlays are available."""
    folder = Folder(tmp_path)
    options = f"lowerdir={folder.root},upperdir={folder.upper},workdir={folder.layers.work},userxattr"
    command = [
        "unshare",
        "-r",
        "-m",
        "-p",
        "-f",
        "-n",
        "--mount-proc",
        "mount",
        "-t",
        "overlay",
        "none",
        "-o",
        options,
    ]
    if subprocess.run([*command, str(folder.root)], capture_output=True, check=False).returncode:
        pytest.skip("no overlay in a user namespace here")
    found = probe(tmp_path)
    assert found == Support("user", True, (), found.kernel_limits)


def test_the_probe_says_what_is_missing(tmp_path: Path):
    """Where user namespaces can't be created, the probe reports no isolation and says what is missing."""
    if os.geteuid() != 0 or probe(tmp_path).isolation != "user":
        pytest.skip("needs root and user namespaces, to forbid them")
    folder = Folder(tmp_path)
    shutil.copytree(ROOT / "src", folder.root / "src")  # the checkout itself may be hidden from commands
    # The probe runs inside the sandbox, where namespaces can't be created.
    code = (
        "import sys; from pathlib import Path; from handrail.resources.shell import probe; "
        "found = probe(Path('.')); print(found.isolation, found.overlay, found.contained); print(*found.missing, sep='\\n')"
    )
    finished = folder.run(
        anything(environment={"PYTHONPATH": str(folder.root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}),
        sys.executable,
        "-c",
        code,
    )
    assert finished.ok, finished.output
    first, *missing = finished.output.splitlines()
    assert first == "none False False"
    assert len(missing) == 2
    assert all(line.startswith("namespaces (kernel") and "clone3" in line for line in missing)


def test_shells_in_many_threads_share_one_keeper(folder: Folder):
    """Event loops in several threads can run commands at the same time with one keeper."""
    said: list[str] = []

    def work(number: int) -> None:
        mine = Folder(folder.base / f"thread{number}")
        said.append(mine.run(anything(), "echo", str(number)).output)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [f"{number}\n" for number in range(6)]
