"""Hosts on one machine. Each has its own network namespace, whose link can be cut, and its own clock, which can be set wrong.

Only root can create them. The clock of a host's processes is set wrong by Debian's `faketime`, and stays right if that
is not installed. The monotonic clock stays right, as it does when somebody sets the time of a real machine.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

_LIBRARY = "faketime/libfaketimeMT.so.1"
_CLOCK = "FAKETIME_TIMESTAMP_FILE"
"""The environment variable with the path of the file that holds the error of the host's clock."""


def can_make() -> bool:
    """Return whether this process can create hosts."""
    return os.geteuid() == 0 and all(shutil.which(each) for each in ("ip", "unshare"))


@cache
def faketime() -> Path | None:
    """Return the library that sets the clocks of processes wrong, or None if it is not installed."""
    found = sorted(Path("/usr/lib").glob(f"*/{_LIBRARY}"))
    return found[0] if found else None


class Host:
    """A host with a name and a link to this machine. This machine's address on that link is `address`. `close` removes the host."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"worker{number}"
        self.is_cut = False
        self._space = f"hr{os.getpid()}-{number}"
        self._link = f"hr{os.getpid() % 100_000}h{number}"
        self._clock = folder / f"{self.name}.clock"
        self.skew(0)
        net = f"10.{os.getpid() % 250}.{number}"
        self.address = f"{net}.1"
        inside = f"{self._link}i"
        _ip("netns", "add", self._space)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", inside, "netns", self._space)
        _ip("address", "add", f"{self.address}/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        _ip("-n", self._space, "address", "add", f"{net}.2/30", "dev", inside)
        _ip("-n", self._space, "link", "set", inside, "up")
        _ip("-n", self._space, "link", "set", "lo", "up")

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs this command on the host, with its own PID and UTS namespaces."""
        shell = f'hostname {self.name} && exec "$@"'
        inside = ["unshare", "--pid", "--uts", "--mount-proc", "--fork", "--kill-child", "--"]
        return [
            "ip",
            "netns",
            "exec",
            self._space,
            *inside,
            "sh",
            "-c",
            shell,
            "sh",
            *self._clocked(),
            *command,
        ]

    def _clocked(self) -> list[str]:
        """Return the words to put before a command so that it uses the host's clock, or [] without `faketime`."""
        if faketime() is None:
            return []
        variables = {
            "LD_PRELOAD": faketime(),
            _CLOCK: self._clock,
            "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
            "NO_FAKE_STAT": 1,
        }
        return ["env", *(f"{name}={value}" for name, value in variables.items())]

    def cut(self, is_cut: bool) -> None:
        """Cut the host's link, or restore it."""
        _ip("link", "set", self._link, "down" if is_cut else "up")
        self.is_cut = is_cut

    def skew(self, seconds: int) -> None:
        """Set the host's clock this many seconds ahead, or behind if the number is negative."""
        new = self._clock.with_suffix(".new")
        new.write_text(f"{seconds:+}s\n")
        new.replace(self._clock)

    def close(self) -> None:
        """Remove the host. Its processes must have ended."""
        subprocess.run(["ip", "link", "delete", self._link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", self._space], check=False, capture_output=True)


def obey() -> None:
    """Make `time.sleep` work under `faketime`, whose `clock_nanosleep` fails for a monotonic clock that it does not change."""
    if _CLOCK in os.environ:

        def sleep(seconds: float) -> None:
            select.select([], [], [], seconds)

        time.sleep = sleep


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
