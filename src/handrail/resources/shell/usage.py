"""A command's usage of memory, CPU time, disk and processes, measured from inside its sandbox.

The first process in the sandbox sees the command's processes and no others. If Handrail may create cgroups, the
kernel limits memory and processes too.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import stat
from collections.abc import Container, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from handrail.resources.shell.request import INODE, Limits

SECONDS = 0.1
"""Seconds between two checks."""
_TICKS = os.sysconf("SC_CLK_TCK")
_CORES = os.cpu_count() or 1
_ENDED = ("Z", "X")
"""The states of a thread that has ended."""
_TEMPORARY = ("/tmp", "/var/tmp", "/run", "/dev/shm")
_MOST = 4 << 20
"""Maximum bytes to read from a `/proc` file. Only `smaps` files can be longer."""
_SYSTEM_V = {"shm": {14: 1, 15: 1}, "msg": {3: 1, 4: 64}, "sem": {3: 128}}
"""For each file in `/proc/sysvipc`, the columns to add up, each with the bytes that one unit in it stands for."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PER_CHECK = 2000
"""After a walk that found N files, the next walk is N / `_PER_CHECK` checks later, or at the next check if N is small. So walking stays cheap.

The same holds for reading N descriptors. A walk comes sooner if so much more of the disk is in use that the command may exceed its limit.
"""


class Usage:
    """Compares a command's resource usage with its limits."""

    def __init__(self, limits: Limits, folder: int) -> None:
        self._limits = limits
        self._folder = folder
        """The descriptor of the folder that the command's writes go to."""
        self._times: dict[tuple[int, str], float] = {}
        self._disk_before = measure(folder)[0]
        self._free_before = _used(folder)
        self._checks = self._next_walk = self._next_scan = 0
        self._grown, self._room = 0, limits.disk
        """How much more of the disk was in use after the last walk, and how much more of it the command might use."""
        self._open = Open()
        self._peak = 0

    def near(self) -> str:
        """Return the limit on processes, as text, if the command came close to it and a fork may have failed; otherwise "".

        Processes that the command has left running count too.
        """
        tasks, _, _ = self._processes()
        most = self._limits.processes
        return f"{most} processes and threads" if max(self._peak, tasks) * 4 > most * 3 else ""

    def exceeded(self) -> tuple[str, str]:
        """Return the name of the exceeded limit and its value as text, or two empty strings if no limit is exceeded."""
        limits = self._limits
        self._checks += 1
        tasks, memory, seconds = self._processes()
        self._peak = max(self._peak, tasks)
        if tasks >= limits.processes:
            return "processes", f"{limits.processes} processes and threads"
        if self._checks >= self._next_scan:
            self._open = Open.scan()
            self._next_scan = self._checks + self._open.number // _PER_CHECK
        kept = sum(_used(path) + _inodes(path) for path in _TEMPORARY) + _system_v()
        kept += sum(self._open.memory.values())
        if memory + kept > limits.memory and _proportional(memory, self._open.memory) + kept > limits.memory:
            return "memory", f"{_size(limits.memory)} of memory"
        if seconds > limits.cpu_seconds:
            return "cpu", f"{limits.cpu_seconds:g} seconds of CPU time"
        return self._exceeded_on_disk()

    def _processes(self) -> tuple[int, int, float]:
        """Return the command's number of threads, its bytes of memory and its CPU seconds so far, over all its processes.

        Memory that processes share counts once for each of them. Page tables count as memory.
        """
        tasks, memory, ended = 0, 0, resource.getrusage(resource.RUSAGE_CHILDREN)
        reaped = ended.ru_utime + ended.ru_stime
        begun: list[tuple[int, str]] = []
        for process, place in _living():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = _stat(f"/proc/{process}")
                own = (int(fields[11]) + int(fields[12])) / _TICKS
                reaped += own + (int(fields[13]) + int(fields[14])) / _TICKS
                tasks += int(fields[17])
                key = process, fields[19]  # the start time distinguishes processes that had the same id
                if key not in self._times and _is_running(process):
                    begun.append(key)
                self._times[key] = own
                memory += _sum(_read(f"{place}/status"), "RssAnon:", "RssShmem:", "VmPTE:")
        # The kernel does not count children whose parent ignores SIGCHLD, so the last known times of processes are kept. Most
        # of them that end before the next check are never seen, so one that is seen to run stands for those that were not.
        for key in begun:
            self._times[key] = max(self._times[key], SECONDS * min(1.0, _CORES / len(begun)))
        return tasks, memory, max(reaped, sum(self._times.values()))

    def _exceeded_on_disk(self) -> tuple[str, str]:
        limit, most_files = self._limits.disk, self._limits.files
        grown = _used(self._folder) - self._free_before
        if self._checks < self._next_walk and grown - self._grown <= self._room:
            return "", ""
        size, files, complete = measure(self._folder, self._disk_before + limit, most_files)
        used = size - self._disk_before
        if (
            grown > limit >= used
        ):  # someone else may have used the space, so look for deleted files that the command still uses
            unnamed = Open.scan()
            hides = unnamed.hides or not complete or _maps_deleted()
            used = grown if hides else used + sum(unnamed.disk.values())
        self._next_walk = self._checks + files // _PER_CHECK
        self._grown, self._room = grown, limit - used
        if files > most_files:
            return "files", f"{most_files:,} files and folders"
        return ("disk", f"{_size(limit)} of disk space") if used > limit else ("", "")


class Open(NamedTuple):
    """The files without a name that the command has open."""

    memory: Mapping[int, int] = MappingProxyType({})
    """The bytes of each `memfd` file, by inode, whether or not a process has mapped it."""
    disk: Mapping[tuple[int, int], int] = MappingProxyType({})
    """The bytes of each deleted file, by device and inode. Those in private folders such as `/tmp` are omitted."""
    hides: bool = False
    """Whether there may be more: files on their way through a socket, or those of a process that can't be read."""
    number: int = 0
    """The number of descriptors that were read."""

    @staticmethod
    def scan() -> Open:
        """Read the descriptors of every thread, because threads need not share them."""
        memory: dict[int, int] = {}
        disk: dict[tuple[int, int], int] = {}
        private = {os.stat(path).st_dev for path in _TEMPORARY if os.path.exists(path)}
        hides, count = False, 0
        for place in _tasks():
            try:
                names = os.listdir(f"{place}/fd")
            except (FileNotFoundError, ProcessLookupError):
                continue
            except OSError:
                hides = True
                continue
            count += len(names)
            for name in names:
                with contextlib.suppress(OSError):
                    facts = os.stat(f"{place}/fd/{name}")
                    if stat.S_ISSOCK(facts.st_mode):
                        hides |= _passes_files(f"{place}/fdinfo/{name}")
                    elif stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                        if _device(facts.st_dev) == _SHARED_DEVICE:
                            memory[facts.st_ino] = facts.st_blocks * 512
                        elif facts.st_dev not in private:
                            disk[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
        return Open(memory, disk, hides, count)


def measure(folder: int, most: float = math.inf, most_files: float = math.inf) -> tuple[int, int, bool]:
    """Measure an open folder at any depth: bytes on disk, number of entries, and whether every folder could be read.

    Ends early, with the folder that exceeds them, if there are more than `most` bytes or `most_files` entries.
    """
    size, files, complete = 0, 0, True
    linked: set[int] = set()
    stack: list[tuple[int, list[str]]] = []
    here: int | None = os.dup(folder)
    while here is not None:
        inner: list[str] = []
        stack.append((here, inner))
        with os.scandir(here) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    files += 1
                    if stat.S_ISDIR(facts.st_mode):
                        inner.append(entry.name)
                    elif facts.st_nlink > 1:
                        if facts.st_ino in linked:
                            continue
                        linked.add(facts.st_ino)
                    size += facts.st_blocks * 512
        here = None
        is_enough = size > most or files > most_files
        while stack and here is None:
            above, names = stack[-1]
            if is_enough or not names:
                os.close(stack.pop()[0])
                continue
            try:
                here = os.open(names.pop(), _FOLDER, dir_fd=above)
            except FileNotFoundError:
                continue
            except OSError:  # no permission, or too many nested folders are open at once
                complete = False
    return size, files, complete


def _ids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1")


def _used(place: str | int) -> int:
    try:
        facts = os.statvfs(place)
    except OSError:
        return 0
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def _inodes(place: str) -> int:
    """Return the bytes of kernel memory that the files in a tmpfs take besides their content."""
    try:
        facts = os.statvfs(place)
    except OSError:
        return 0
    return (facts.f_files - facts.f_ffree) * INODE


def _system_v() -> int:
    """Return the bytes of the command's System V segments, messages and semaphores, which can outlive their processes."""
    total = 0
    for kind, columns in _SYSTEM_V.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in _read(f"/proc/sysvipc/{kind}").splitlines()[1:]:
                fields = line.split()
                total += sum(int(fields[column]) * size for column, size in columns.items())
    return total


def _proportional(otherwise: int, counted: Container[int]) -> int:
    """Return the command's bytes of memory, with shared pages divided among their users, or `otherwise` if unknown.

    System V segments, files in private folders such as `/tmp`, and the `memfd` files `counted`, by inode, are omitted, because
    they are counted separately. For a process with very many mappings, they are included.
    """
    total = 0
    for _, place in _living():
        try:
            total += _sum(_read(f"{place}/status"), "VmPTE:")
            text = _read(f"{place}/smaps_rollup")
            total += _sum(text, "Pss_Anon:")
            if shared := _sum(text, "Pss_Shmem:"):
                maps = _read(f"{place}/smaps")
                total += (
                    _shared(maps, counted) if len(maps) < _MOST else shared
                )  # parsing a long `smaps` file would delay the checks
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return otherwise
    return total


def _shared(maps: str, counted: Container[int]) -> int:
    """Return the bytes of anonymous shared memory and `memfd` files listed in a `smaps` file, without the inodes `counted`."""
    total, counts = 0, False
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(
            ":"
        ):  # the first line of a mapping: its range, mode, offset, device, inode and path
            is_counted = words[-1].startswith("/SYSV") or int(words[4]) in counted
            counts = words[3] == _SHARED_DEVICE and not is_counted
        elif counts and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


def _sum(text: str, *names: str) -> int:
    """Return the total bytes on the lines of a `/proc` file that start with these names."""
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(names))


def _passes_files(path: str) -> bool:
    """Return whether files wait in a socket for a process to receive them."""
    return any(line.startswith("scm_fds:") and line.split()[1] != "0" for line in _read(path).splitlines())


def _maps_deleted() -> bool:
    """Return whether the command has mapped a deleted file that is on a disk, so that the file needs no descriptor."""
    private = {
        _SHARED_DEVICE,
        *(_device(os.stat(path).st_dev) for path in _TEMPORARY if os.path.exists(path)),
    }
    for _, place in _living():
        try:
            lines = _read(f"{place}/maps").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return True
        if any(line.endswith(" (deleted)") and line.split()[3] not in private for line in lines):
            return True
    return False


def _tasks() -> Iterator[str]:
    """Yield the folder in `/proc` of each of the command's threads."""
    for process in _ids():
        with contextlib.suppress(OSError):
            yield from (f"/proc/{process}/task/{task}" for task in os.listdir(f"/proc/{process}/task"))


def _living() -> Iterator[tuple[int, str]]:
    """Yield each of the command's processes, and the folder in `/proc` of a thread that lives.

    The first thread of a process may end before the others, and then says nothing about the memory that they share.
    """
    for process in _ids():
        with contextlib.suppress(OSError, IndexError):
            place = f"/proc/{process}"
            if _stat(place)[0] in _ENDED:
                tasks = (f"{place}/task/{task}" for task in os.listdir(f"{place}/task"))
                place = next((task for task in tasks if _stat(task)[0] not in _ENDED), place)
            yield process, place


def _is_running(process: int) -> bool:
    tasks = os.listdir(f"/proc/{process}/task")
    return any(_stat(f"/proc/{process}/task/{task}")[0] == "R" for task in tasks)


def _stat(place: str) -> list[str]:
    """Return the fields of a process or thread, from its state on."""
    return _read(f"{place}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MOST).decode(errors="replace")


def _shared_device() -> str:
    """Return the device number of shared memory that has no file, as `/proc` shows it."""
    with mmap.mmap(-1, mmap.PAGESIZE), open("/proc/self/maps") as lines:
        found = [line.split()[3] for line in lines if "/dev/zero (deleted)" in line]
    return found[0]


def _device(number: int) -> str:
    """Return a device number as `/proc` shows it."""
    return f"{os.major(number):02x}:{os.minor(number):02x}"


_SHARED_DEVICE = _shared_device()


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


_ROOT = "/sys/fs/cgroup"
_numbers = count()


class Cgroup:
    """One command's cgroups, of version 1 or 2. Limits nothing if this process can't create cgroups."""

    def __init__(self, process: int, memory: int, processes: int) -> None:
        self._folders: dict[str, str] = {}
        """The folder of each controller that limits the command."""
        name = f"handrail-{os.getpid()}-{next(_numbers)}"
        for controller, parent in _parents().items():
            self._join(controller, f"{parent}/{name}", process, memory, processes)

    def _join(self, controller: str, folder: str, process: int, memory: int, processes: int) -> None:
        settings = {
            "": {"memory.max": memory, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": processes},
            "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory},
            "pids": {"pids.max": processes},
        }
        try:
            os.mkdir(folder)
            first, *others = settings[controller].items()
            _put(f"{folder}/{first[0]}", first[1])
            for file, value in others:
                with contextlib.suppress(OSError):  # not every kernel has the other settings
                    _put(f"{folder}/{file}", value)
            _put(f"{folder}/cgroup.procs", process)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        else:
            self._folders[controller] = folder

    @property
    def limits_memory(self) -> bool:
        return not self._folders.keys().isdisjoint(("", "memory"))

    def close(self) -> bool:
        """Remove the cgroups, which must be empty. Returns whether the kernel killed a process in them for lack of memory."""
        killed = False
        for controller, folder in self._folders.items():
            file = {"": "memory.events", "memory": "memory.oom_control"}.get(controller)
            with contextlib.suppress(OSError, ValueError):
                if file is not None:
                    with open(f"{folder}/{file}") as lines:
                        found = dict(line.split() for line in lines)
                    killed |= int(found.get("oom_kill", 0)) > 0
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        self._folders = {}
        return killed


def sweep() -> None:
    """Remove the cgroups of keepers that were killed."""
    for parent in _parents().values():
        for name in os.listdir(parent):
            words = name.split("-")
            if words[0] == "handrail" and len(words) == 3 and not os.path.exists(f"/proc/{words[1]}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{parent}/{name}")


def _parents() -> dict[str, str]:
    """Return the folder of this process's own cgroup for each controller it may use. The controller "" means version 2."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                place = f"{_ROOT}/{controller}" if controller else _ROOT
                if controller in ("", "memory", "pids") and os.access(f"{place}{path}/cgroup.procs", os.W_OK):
                    found[controller] = place + path.rstrip("/")
    return found


def _put(path: str, value: int) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(str(value).encode())
