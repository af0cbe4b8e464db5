"""Command limits: a command that exceeds one is killed, its result names the limit, and nothing is left behind."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem
from handrail.errors import DefinitionError
from handrail.resources.shell import Allow, CommandLimits, Shell, command_process, probe, usage
from handrail.resources.shell.command_process import close_keeper
from handrail.resources.shell.execution import UNLIMITED, forget
from handrail.resources.shell.request import Limits
from handrail.resources.shell.usage import _parents, measure
from support import PATIENCE, ROOT
from support.folders import PYTHON, Folder, anything, processes_with

SMALL = CommandLimits(memory=96 << 20, cpu_seconds=30.0, disk=8 << 20, files=500, processes=60)
BRIEF = dataclasses.replace(SMALL, cpu_seconds=0.5)
GREEDY = {
    "memory": ("96 MiB of memory", "kept = []\nwhile True: kept.append(bytearray(1 << 20))"),
    "memory of many": (
        "96 MiB of memory",
        "import os, signal\nfor n in range(20):\n    if not os.fork(): kept = bytearray(16 << 20); signal.pause()\nsignal.pause()",
    ),
    "memory in /tmp": (
        "96 MiB of memory",
        "import signal\nfor place in ('tmp', 'dev/shm'): open(f'/{place}/x', 'wb').write(bytes(60 << 20))\nsignal.pause()",
    ),
    "memory that is shared": (
        "96 MiB of memory",
        "import mmap, signal\nkept = mmap.mmap(-1, 160 << 20)\nfor at in range(0, 160 << 20, 4096): kept[at] = 1\nsignal.pause()",
    ),
    "memory of detached segments": (
        "96 MiB of memory",
        "import ctypes, signal\nc = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p\n"
        "for n in range(10):\n    at = ctypes.c_void_p(c.shmat(c.shmget(0, 16 << 20, 0o1600), None, 0))\n"
        "    ctypes.memset(at, 1, 16 << 20); c.shmdt(at)\nsignal.pause()",
    ),
    "memory of messages": (
        "96 MiB of memory",
        "import ctypes, signal\nc = ctypes.CDLL(None)\nfor n in range(9000):\n    queue = c.msgget(0, 0o1600)\n"
        "    for m in range(2): c.msgsnd(queue, ctypes.create_string_buffer(b'x' * 8000), 7000, 0o4000)\nsignal.pause()",
    ),
    "memory of empty files": (
        "96 MiB of memory",
        "import signal\nfor n in range(60000): open(f'/tmp/{n}', 'x').close(); open(f'/dev/shm/{n}', 'x').close()\nsignal.pause()",
    ),
    "memory of a process whose first thread has ended": (
        "96 MiB of memory",
        "import ctypes, os, threading\nfrom time import sleep\nkept = []\n"
        "def fill():\n    for n in range(160): kept.append(bytearray(1 << 20)); sleep(0.002)\n    sleep(600)\n"
        "threading.Thread(target=fill).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)",
    ),
    "memory of page tables": (
        "96 MiB of memory",
        "import mmap, signal\nkept = mmap.mmap(-1, 80 << 30, flags=0x4022, prot=1)\nkept.madvise(15)\n"
        "for at in range(0, 80 << 30, 2 << 20): kept[at]\nsignal.pause()",
    ),
    "memory that no process has mapped": (
        "96 MiB of memory",
        "import os, signal\nfile = os.memfd_create('x')\nfor n in range(160): os.write(file, bytes(1 << 20))\nsignal.pause()",
    ),
    "disk": ("8 MiB of disk space", "file = open('x', 'wb')\nwhile True: file.write(bytes(1 << 18))"),
    "deleted files": (
        "8 MiB of disk space",
        "import os\nfile = open('x', 'wb'); os.unlink('x')\nwhile True: file.write(bytes(1 << 18))",
    ),
    "deleted files that are only mapped": (
        "8 MiB of disk space",
        "import mmap, os, signal\nfile = os.open('x', os.O_CREAT | os.O_RDWR); os.unlink('x'); os.truncate(file, 4096)\n"
        "kept = mmap.mmap(file, 4096); os.posix_fallocate(file, 0, 40 << 20); os.closerange(3, 100); signal.pause()",
    ),
    "deleted files on their way through a socket": (
        "8 MiB of disk space",
        "import os, signal, socket\nfile = os.open('x', os.O_CREAT | os.O_RDWR); os.unlink('x'); kept = socket.socketpair()\n"
        "os.posix_fallocate(file, 0, 40 << 20); socket.send_fds(kept[0], [b'x'], [file]); os.close(file); signal.pause()",
    ),
    "deleted files of an unreadable process": (
        "8 MiB of disk space",
        "import ctypes, os, signal\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
        "file = open('x', 'wb'); os.unlink('x'); file.write(bytes(40 << 20)); file.flush(); signal.pause()",
    ),
    "deleted files of one thread": (
        "8 MiB of disk space",
        "import ctypes, os, signal, threading\n"
        "def fill():\n    ctypes.CDLL(None).unshare(0x400)\n    file = open('x', 'wb'); os.unlink('x')\n"
        "    file.write(bytes(40 << 20)); file.flush(); signal.pause()\n"
        "threading.Thread(target=fill, daemon=True).start(); signal.pause()",
    ),
    "many files": ("500 files and folders", "n = 0\nwhile True: n += 1; open(f'{n}', 'w')"),
    "processes": (
        "60 processes and threads",
        "import os, signal\nfor n in range(59):\n    if not os.fork(): signal.pause()\nsignal.pause()",
    ),
    "threads": (
        "60 processes and threads",
        "import threading, signal\nfor n in range(59): threading.Thread(target=signal.pause, daemon=True).start()\nsignal.pause()",
    ),
    "CPU": ("0.5 seconds of CPU time", "while True: pass"),
    "CPU of children that nobody waits for": (
        "0.5 seconds of CPU time",
        "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    if not os.fork():\n        while True: pass\n    signal.pause()",
    ),
    "CPU of children that end between two checks": (
        "0.5 seconds of CPU time",
        "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor n in range(75):\n    if not os.fork():\n"
        "        while sum(os.times()[:2]) < 0.02: pass\n        os._exit(0)\n"
        "    try: os.wait()\n    except ChildProcessError: pass",
    ),
}
_WITHOUT = "from handrail.resources.shell import usage; usage._parents = dict\n"


@pytest.fixture(params=["cgroups", "sums"])
def means(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run each test with the machine's cgroups, if there are any, and without cgroups.

    Skips the test if there is no sandbox.
    """
    if not probe(tmp_path).contained:
        pytest.skip("no sandbox here")
    if request.param == "sums":
        close_keeper()
        monkeypatch.setattr(
            command_process, "_BOOT", command_process._BOOT.replace("main(int", _WITHOUT + "main(int")
        )
    yield request.param
    close_keeper()


@pytest.mark.usefixtures("means")
@pytest.mark.parametrize("what", GREEDY)
def test_a_greedy_command_is_ended(tmp_path: Path, what: str):
    """A command that exceeds a limit is killed, and its result names the limit. None of its processes, files or cgroups is left."""
    limit, code = GREEDY[what]
    folder = Folder(tmp_path)
    files = DirectoryFilesystem(folder.root)
    limits = BRIEF if "CPU" in what else SMALL
    if what == "memory of empty files":
        limits = dataclasses.replace(limits, files=1_000_000)
    shell = Shell([Allow(...)], limits=limits)
    fork = files.fork("call")
    finished = asyncio.run(shell.run_on(fork, [PYTHON, "-c", f"# {tmp_path.name}\n{code}"]))
    assert finished.limit == limit, finished.render()
    assert finished.exit_code < 0, "a command that exceeded a limit has not succeeded"
    assert not finished.ok
    assert not finished.timed_out
    assert f"because it used more than its limit of {finished.limit}" in finished.render()
    fork.drop()
    assert processes_with(tmp_path.name) == []
    assert [path.name for path in files.staging.rglob("*") if path.is_file()] == ["identity"]
    assert os.listdir(folder.root) == []
    files.close()
    keeper = command_process._keeper
    assert keeper is not None
    mine = f"handrail-{keeper._process}-"  # `os.walk` ignores cgroups that other processes have just removed
    assert not [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names if name.startswith(mine)]


def test_a_killed_keeper_s_cgroups_are_removed_by_the_next(tmp_path: Path):
    """A keeper removes the cgroups that a killed keeper has left."""
    places = _parents()
    if not probe(tmp_path).contained or not places:
        pytest.skip("no cgroups here")
    made = [Path(place) / "handrail-4194305-0" for place in places.values()]  # no process has this id
    for path in made:
        path.mkdir()
    close_keeper()
    Folder(tmp_path).run(Shell([Allow(...)]), "true")
    assert not [path for path in made if path.exists()]


def test_an_ordinary_build_is_not_ended(tmp_path: Path):
    """The default limits allow many processes, a huge address space and a huge sparse file."""
    if not probe(tmp_path).contained:
        pytest.skip("no sandbox here")
    code = """
        import mmap, os
        reserved = mmap.mmap(-1, 1 << 40, flags=0x4022, prot=1)  # as node and Go do
        kept = bytearray(64 << 20)
        for _ in range(30):
            if not os.fork():
                os._exit(len(kept) != 64 << 20)
        print(sum(os.wait()[1] for _ in range(30)))
        os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 1 << 40)
    """
    finished = Folder(tmp_path).run(Shell([Allow(...)]), PYTHON, "-c", textwrap.dedent(code))
    assert (finished.output, finished.limit, finished.ok) == ("0\n", "", True)


@pytest.mark.usefixtures("means")
def test_memory_that_is_shared_counts_once(tmp_path: Path):
    """Memory that many processes share counts once: anonymous memory, a System V segment, and a file in `/dev/shm`."""
    code = """
        import ctypes, mmap, os, time
        size = 24 << 20
        c = ctypes.CDLL(None)
        c.shmat.restype = ctypes.c_void_p
        segment = ctypes.c_void_p(c.shmat(c.shmget(0, size, 0o1600), None, 0))
        file = os.open("/dev/shm/x", os.O_CREAT | os.O_RDWR)
        os.truncate(file, size)
        kept = [mmap.mmap(-1, size), mmap.mmap(file, size), (ctypes.c_char * size).from_address(segment.value)]
        for each in kept:
            for at in range(0, size, 4096): each[at] = b"x" if each is kept[2] else 1
        for _ in range(8):
            if not os.fork():
                for each in kept:
                    for at in range(0, size, 4096): each[at]
                time.sleep(0.5)
                os._exit(0)
        print(sum(os.wait()[1] for _ in range(8)))
    """
    limits = CommandLimits(memory=128 << 20)
    finished = Folder(tmp_path).run(Shell([Allow(...)], limits=limits), PYTHON, "-c", textwrap.dedent(code))
    assert (finished.output, finished.limit) == ("0\n", "")


def test_the_number_of_temporary_files_is_limited(tmp_path: Path):
    """None of a command's private folders can hold more files than the limit. A limit below 1024 counts as 1024."""
    if not probe(tmp_path).contained:
        pytest.skip("no sandbox here")
    code = """
        for place in ("/tmp", "/var/tmp", "/run", "/dev/shm"):
            try:
                for n in range(2000): open(f"{place}/{n}", "x").close()
            except OSError as error:
                print(n < 1100, error.errno)
    """
    finished = Folder(tmp_path).run(Shell([Allow(...)], limits=SMALL), PYTHON, "-c", textwrap.dedent(code))
    assert finished.output.splitlines() == ["True 28"] * 4


def test_a_command_near_its_processes_is_told(tmp_path: Path):
    """If a command comes close to its process limit, its result has a note about that limit."""
    if not probe(tmp_path).contained:
        pytest.skip("no sandbox here")
    code = "import os, sys\nfor n in range(50):\n    if not os.fork(): sys.stdin.read(); os._exit(0)\nsys.stdin.read()"
    folder, seconds, notes = Folder(tmp_path), 0.05, ""
    while "processes" not in notes and seconds < PATIENCE:
        seconds *= 10  # on a busy machine, the processes may start too late to be counted
        notes = " ".join(
            folder.run(anything(limits=SMALL), "sh", "-c", f"sleep {seconds} | {PYTHON} -c '{code}'").notes
        )
    assert "close to its limit of 60 processes" in notes


def test_a_command_that_fails_to_fork_before_the_first_check_is_told(tmp_path: Path):
    """If a command comes close to its process limit and ends early, its result still mentions the limit."""
    if not probe(tmp_path).contained:
        pytest.skip("no sandbox here")
    finished = Folder(tmp_path).run(
        Shell([Allow(...)], limits=SMALL), "sh", "-c", "for n in $(seq 58); do sleep 60 & done; exit 2"
    )
    assert finished.limit or any("close to its limit of 60 processes" in note for note in finished.notes)


def test_a_folder_with_many_links_is_measured_as_soon_as_the_disk_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A folder that takes long to walk is walked less often, but at once when so much more is in use that the limit may be exceeded."""
    taken = 0
    monkeypatch.setattr(usage, "_used", lambda place: taken)
    walks: list[int] = []

    def measured(folder: int, *most: float) -> tuple[int, int, bool]:
        walks.append(folder)
        return taken, 96_000, True

    monkeypatch.setattr(usage, "measure", measured)
    measuring = usage.Usage(Limits(1 << 30, 60.0, 8 << 20, 1_000_000, 100), 0)
    for grown, number, limit in ((0, 2, ""), (1 << 20, 2, ""), (8 << 20, 2, ""), (9 << 20, 3, "disk")):
        taken = grown
        measuring._checks += 1
        assert (measuring._exceeded_on_disk()[0], len(walks)) == (limit, number)


def test_a_walk_ends_early(tmp_path: Path):
    """A folder is not walked any further when it exceeds a limit."""
    for name in range(20):
        (tmp_path / f"{name}/inner").mkdir(parents=True)
    folder = os.open(tmp_path, os.O_RDONLY)
    assert measure(folder)[1] == 40
    assert measure(folder, most_files=10)[1] == 20
    os.close(folder)


@pytest.mark.parametrize("name", ["memory", "cpu_seconds", "disk", "files", "processes"])
def test_a_limit_is_above_zero(name: str):
    """A limit of zero is refused when the limits are created."""
    with pytest.raises(DefinitionError, match=f"limit {name!r} is 0"):
        CommandLimits(**{name: 0})


def test_unreadable_and_shared_files_are_measured(tmp_path: Path):
    """`measure` counts the size of a file with two names once, and only the blocks of a sparse file.

    If a folder can't be read, the result is incomplete.
    """
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "a", tmp_path / "b")
    os.truncate(os.open(tmp_path / "sparse", os.O_CREAT | os.O_RDWR), 1 << 30)
    folder = os.open(tmp_path, os.O_RDONLY)
    size, files, complete = measure(folder)
    assert (100_000 <= size < 200_000, files, complete) == (True, 3, True)
    if os.geteuid():
        (tmp_path / "closed").mkdir(0o000)
        assert measure(folder)[2] is False
    os.close(folder)


AS_WHOM = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
AS_NOBODY = """
import asyncio, json, sys, tempfile
from pathlib import Path
from handrail.resources.shell import Allow, CommandLimits, Layers, Shell, probe

place = Path(tempfile.mkdtemp())
for name in ("root", "upper", "work"):
    (place / name).mkdir()
if not probe(place).contained:
    sys.exit("MISSING")
layers = Layers((place / "root",), place / "upper", place / "work")
for code, seconds in json.loads(sys.argv[1]):
    limits = CommandLimits(memory=96 << 20, cpu_seconds=seconds, disk=8 << 20, files=500, processes=60)
    shell = Shell([Allow(...)], limits=limits)
    print(asyncio.run(shell.run(["/usr/bin/python3", "-c", code], layers)).limit, list((place / "work").iterdir()))
"""


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="needs root")
def test_an_ordinary_user_s_command_is_ended_the_same():
    """An unprivileged user's commands are killed at the same limits."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    names = (
        "memory",
        "memory that is shared",
        "memory of detached segments",
        "memory of a process whose first thread has ended",
        "memory of page tables",
        "disk",
        "deleted files",
        "deleted files of an unreadable process",
        "processes",
        "CPU",
    )
    wanted = {name: GREEDY[name] for name in names}
    commands = [(code, 0.5 if name == "CPU" else 30.0) for name, (_, code) in wanted.items()]

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*AS_WHOM, "/usr/bin/python3", "-c", code, *arguments],
            env={"PYTHONPATH": ":".join([str(ROOT / "src"), *packages]), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    imported = run("import handrail.resources.shell")
    if imported.returncode:
        pytest.skip(f"an ordinary user can't import Handrail here: {imported.stderr[-300:]}")
    done = run(AS_NOBODY, json.dumps(commands))
    if done.stderr == "MISSING\n":
        pytest.skip("an ordinary user has no sandbox here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{limit} []" for limit, _ in wanted.values()]


@pytest.mark.parametrize("has_cgroups", [True, False])
def test_what_is_not_limited_is_said_at_the_start(
    has_cgroups: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """If the kernel does not limit the memory of commands, the first probe says once what their limits do not cover."""
    if not probe(tmp_path).contained or (has_cgroups and not probe(tmp_path).kernel_limits):
        pytest.skip("no sandbox or no cgroups here")
    if not has_cgroups:
        boot = command_process._BOOT.replace("main(int", _WITHOUT + "main(int")
        monkeypatch.setattr(command_process, "_BOOT", boot)
    for clear in (close_keeper, forget, caplog.clear):
        clear()
    found = [probe(tmp_path) for _ in range(2)]
    assert {each.kernel_limits for each in found} == {has_cgroups}
    assert [UNLIMITED in each.getMessage() for each in caplog.records] == [True] * (not has_cgroups)
    close_keeper()
    forget()
