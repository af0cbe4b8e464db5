"""`Cgroup`: limits a command's memory and processes through the kernel, if Handrail may create cgroups."""

from __future__ import annotations

import contextlib
import os
from itertools import count

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
