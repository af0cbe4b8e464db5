"""Hosts on one machine: a network namespace each, whose link can be cut, and a clock each, which can be set wrong.

Only root can create them. The clock is Handrail's: `obey` makes it follow the host's. Debian's `faketime` is not used,
because `time.sleep` failed under it on Python 3.11 if the monotonic clock was left alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

from handrail.clock import SystemClock

_CLOCK = "CHAOS_CLOCK"
"""The variable that names the file with the error of the host's clock, in seconds."""


def can_make() -> bool:
    """Return whether this process can create hosts."""
    return os.geteuid() == 0 and all(shutil.which(each) for each in ("ip", "unshare"))


class Host:
    """A host with a name, and a link to this machine, which it reaches as `address`. Remove it with `close`."""

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
        return ["ip", "netns", "exec", self._space, *inside, "sh", "-c", shell, "sh", *command]

    def environment(self) -> dict[str, str]:
        """Return the variables by which a process finds the host's clock."""
        return {_CLOCK: str(self._clock)}

    def cut(self, is_cut: bool) -> None:
        """Cut the host's link, or restore it."""
        _ip("link", "set", self._link, "down" if is_cut else "up")
        self.is_cut = is_cut

    def skew(self, seconds: int) -> None:
        """Set the host's clock this many seconds ahead, or behind if the number is negative."""
        new = self._clock.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._clock)

    def close(self) -> None:
        """Remove the host. Its processes must have ended."""
        subprocess.run(["ip", "link", "delete", self._link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", self._space], check=False, capture_output=True)


def obey(clock: type[SystemClock]) -> None:
    """Make a clock follow the host's clock, if this process is on a host."""
    path, right = os.environ.get(_CLOCK), clock.now
    if path is not None:

        def now(self: SystemClock) -> datetime:
            return right(self) + timedelta(seconds=int(Path(path).read_text()))

        clock.now = now


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
