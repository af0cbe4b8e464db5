"""`Support`: the sandbox features that this machine supports, found by trying them once."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from handrail.clock import SYSTEM_CLOCK
from handrail.errors import HandrailError
from handrail.resources.mount import remove_tree
from handrail.resources.shell.command_process import Stop, execute
from handrail.resources.shell.folder_copy import changes
from handrail.resources.shell.request import Isolation, Limits, Request, View

log = logging.getLogger("handrail.shell")

UNLIMITED = "buffers of pipes and sockets, files on their way through a socket, and what a command uses between two checks"
"""What the limits of a command do not cover unless the kernel enforces them."""
_WHY_UNLIMITED = (
    "this process can't create cgroups. Give it a writable cgroup with the memory controller, such as systemd's Delegate=yes, "
    "or run commands that you don't trust in a virtual machine."
)
_SECONDS = 30.0

_STEPS = {
    "namespaces": "namespaces (kernel 5.12 or later, not forbidden by a container)",
    "mounts": "private mounts",
    "overlay": "an overlay mount here",
    "privileges": "dropping privileges",
}


@dataclass(frozen=True, slots=True)
class Support:
    """The sandbox features that work for commands on a folder."""

    isolation: Isolation
    """`user` (namespaces under a user namespace), `root` (without one), or `none`."""
    overlay: bool
    """Whether an overlay mount can capture writes. If not, commands work on a copy."""
    missing: tuple[str, ...] = ()
    """Descriptions of the features that do not work on this machine, including those that have a fallback."""
    kernel_limits: bool = False
    """Whether the kernel limits the memory of commands. If not, `UNLIMITED` is not limited at all."""

    @property
    def contained(self) -> bool:
        return self.isolation != "none"


_known: dict[tuple[int, int], Support] = {}
_lock = threading.Lock()


def probe(folder: Path) -> Support:
    """Find out which sandbox works in `folder`. The result is cached for the folder's disk and the user.

    On Linux, a sandbox is tried with a real overlay, in which each kind of mark is created once. If only the overlay fails,
    the sandbox is tried without one.
    """
    if sys.platform != "linux":
        return Support("none", False, ("Linux",))
    key = os.stat(folder).st_dev, os.geteuid()
    with _lock:
        if key not in _known:
            found = _known[key] = _probe(folder)
            if found.contained and not found.kernel_limits:
                log.warning("the limits of commands do not cover %s: %s", UNLIMITED, _WHY_UNLIMITED)
        return _known[key]


def forget() -> None:
    """Clear the cache, so that the next probe tries again."""
    with _lock:
        _known.clear()


def _probe(folder: Path) -> Support:
    missing: list[str] = []
    kinds: tuple[Isolation, ...] = ("user", "root") if os.geteuid() == 0 else ("user",)
    for isolation in kinds:
        problem, limited = _try(folder, isolation, "overlay")
        if not problem:
            return Support(isolation, True, tuple(missing), limited)
        missing.append(problem)
        if problem.startswith(_STEPS["overlay"]):
            problem, limited = _try(folder, isolation, "bind")
            if not problem:
                return Support(isolation, False, tuple(missing), limited)
    return Support("none", False, tuple(missing))


def _try(folder: Path, isolation: Isolation, view: View) -> tuple[str, bool]:
    """Try one kind of sandbox. Returns the missing feature, or "" if the sandbox works, and whether the kernel limits memory."""
    place = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).resolve()
    try:
        for name in ("root/folder", "upper", "work"):
            (place / name).mkdir(parents=True)
        for name in ("root/file", "root/folder/file"):
            (place / name).touch()
        request = Request(
            isolation=isolation,
            argv=[],
            environment={},
            root=f"{place}/root",
            cwd=".",
            view=view,
            lowers=[f"{place}/root"],
            upper=f"{place}/upper",
            work=f"{place}/work",
            network=False,
            limits=Limits(1 << 28, 60.0, 1 << 20, 1000, 1024),
            hidden=[],
            exposed=[],
            kept=[],
        )
        stop = Stop()
        with stop:
            reply = execute(request, b"", _SECONDS, 1000, stop, SYSTEM_CLOCK).reply
        if reply.failed:
            return f"{_STEPS.get(reply.failed, reply.failed)}: {reply.detail}", False
        if reply.status != 0:
            return f"{_STEPS['namespaces']}: the probe ended with status {reply.status}", False
        if view == "overlay" and list(changes(place / "upper")) != [
            ("deleted", "file"),
            ("replaced", "folder"),
        ]:
            return f"{_STEPS['overlay']}: it does not mark deletions correctly", False
        return "", reply.limited == "kernel"
    except HandrailError as error:
        return str(error), False
    finally:
        remove_tree(place)
