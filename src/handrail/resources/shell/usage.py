"""A command's usage of memory, CPU time, disk and processes, measured from inside its sandbox.

The first process in the sandbox sees the command's processes and no others. If Handrail may create cgroups, the
kernel limits memory and processes too.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import stat
from collections.abc import Iterator

from handrail.resources.shell.request import INODE, Limits

SECONDS = 0.1
"""Seconds between two checks."""
_TICKS = os.sysconf("SC_CLK_TCK")
_TEMPORARY = ("/tmp", "/var/tmp", "/run", "/dev/shm")
_MOST = 4 << 20
"""Maximum bytes to read from a `/proc` file. Only `smaps` files can be longer."""
_SYSTEM_V = {"shm": {14: 1, 15: 1}, "msg": {3: 1, 4: 64}, "sem": {3: 128}}
"""For each file in `/proc/sysvipc`, the columns to add up, each with the bytes that one unit in it stands for."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PER_CHECK = 2000
"""After a walk that found N files, the next walk is N / `_PER_CHECK` checks later, or at the next check if N is small. So walking stays cheap."""


class Usage:
    """Compares a command's resource usage with its limits."""

    def __init__(self, limits: Limits, folder: int) -> None:
        self._limits = limits
        self._folder = folder
        """The descriptor of the folder that the command's writes go to."""
        self._times: dict[tuple[int, str], float] = {}
        self._disk_before, _, _ = measure(folder)
        self._free_before = _used(folder)
        self._checks = self._next_walk = 0
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
        tasks, memory, seconds = self._processes()
        self._peak = max(self._peak, tasks)
        if tasks >= limits.processes:
            return "processes", f"{limits.processes} processes and threads"
        kept = sum(_used(path) + _inodes(path) for path in _TEMPORARY) + _system_v()
        if memory + kept > limits.memory and _proportional(memory) + kept > limits.memory:
            return "memory", f"{_size(limits.memory)} of memory"
        if seconds > limits.cpu_seconds:
            return "cpu", f"{limits.cpu_seconds:g} seconds of CPU time"
        return self._exceeded_on_disk()

    def _processes(self) -> tuple[int, int, float]:
        """Return the command's number of threads, its bytes of memory and its CPU seconds so far, over all its processes.

        Memory that processes share counts once for each of them.
        """
        tasks, memory, ended = 0, 0, resource.getrusage(resource.RUSAGE_CHILDREN)
        reaped = ended.ru_utime + ended.ru_stime
        for process in _ids():
            if process == 1:
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = _read(f"/proc/{process}/stat").rpartition(")")[2].split()
                own = (int(fields[11]) + int(fields[12])) / _TICKS
                reaped += own + (int(fields[13]) + int(fields[14])) / _TICKS
                tasks += int(fields[17])
                self._times[process, fields[19]] = (
                    own  # the start time distinguishes processes that had the same id
                )
                memory += _sum(_read(f"/proc/{process}/status"), "RssAnon:", "RssShmem:")
        # The kernel does not count children whose parent ignores SIGCHLD, so the last known times of processes are kept.
        return tasks, memory, max(reaped, sum(self._times.values()))

    def _exceeded_on_disk(self) -> tuple[str, str]:
        limit, most_files = self._limits.disk, self._limits.files
        self._checks += 1
        if self._checks < self._next_walk:
            return "", ""
        size, files, complete = measure(self._folder)
        used = size - self._disk_before
        grown = _used(self._folder) - self._free_before
        if (
            grown > limit >= used
        ):  # someone else may have used the space, so look for deleted files that are still open
            used = grown if not complete else used + _unnamed()
        self._next_walk = self._checks + files // _PER_CHECK
        if files > most_files:
            return "files", f"{most_files:,} files and folders"
        return ("disk", f"{_size(limit)} of disk space") if used > limit else ("", "")


def measure(folder: int) -> tuple[int, int, bool]:
    """Measure an open folder at any depth: bytes on disk, number of entries, and whether every folder could be read."""
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
        while stack and here is None:
            above, names = stack[-1]
            if not names:
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
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


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


def _proportional(otherwise: int) -> int:
    """Return the command's bytes of memory, with shared pages divided among their users, or `otherwise` if unknown.

    System V segments, and files in private folders such as `/tmp`, are omitted, because they are counted separately. For a
    process with very many mappings, they are included.
    """
    total = 0
    for process in _ids():
        if process == 1:
            continue
        try:
            text = _read(f"/proc/{process}/smaps_rollup")
            total += _sum(text, "Pss_Anon:")
            if shared := _sum(text, "Pss_Shmem:"):
                maps = _read(f"/proc/{process}/smaps")
                total += (
                    _shared(maps) if len(maps) < _MOST else shared
                )  # parsing a long `smaps` file would delay the checks
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return otherwise
    return total


def _shared(maps: str) -> int:
    """Return the bytes of anonymous shared memory and `memfd` files listed in a `smaps` file."""
    total, counts = 0, False
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(
            ":"
        ):  # the first line of a mapping: its range, mode, offset, device, inode and path
            counts = words[3] == _SHARED_DEVICE and not words[-1].startswith("/SYSV")
        elif counts and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


def _sum(text: str, *names: str) -> int:
    """Return the total bytes on the lines of a `/proc` file that start with these names."""
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(names))


def _unnamed() -> int:
    """Return the bytes of files that were deleted but that the command still holds open."""
    seen: dict[tuple[int, int], int] = {}
    for process in _ids():
        if process == 1:
            continue
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    facts = os.stat(f"/proc/{process}/fd/{name}")
                    if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                        seen[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(seen.values())


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MOST).decode(errors="replace")


def _shared_device() -> str:
    """Return the device number of shared memory that has no file, as `/proc` shows it."""
    with mmap.mmap(-1, mmap.PAGESIZE), open("/proc/self/maps") as lines:
        found = [line.split()[3] for line in lines if "/dev/zero (deleted)" in line]
    return found[0]


_SHARED_DEVICE = _shared_device()


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
