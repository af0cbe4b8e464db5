"""What this machine can do, found out by doing it once."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from handrail.clock import SYSTEM_CLOCK
from handrail.errors import HandrailError
from handrail.resources.shell.command import Stop, follow
from handrail.resources.shell.copying import changes, discard
from handrail.resources.shell.order import Order, View, Walls

_SECONDS = 30.0

_STEPS = {
    "namespaces": "namespaces of its own (kernel 5.12 or later, and not forbidden by a container)",
    "mounts": "mounts of its own",
    "overlay": "an overlay mount here",
    "privileges": "giving up privileges",
}


@dataclass(frozen=True, slots=True)
class Support:
    """What can be had for commands on a folder."""

    walls: Walls
    """`user` (namespaces under a user namespace), `root` (without one), or `none`."""
    overlay: bool
    """Whether writes can be caught by an overlay mount; otherwise by a copy."""
    missing: tuple[str, ...] = ()
    """What is not there, in words; also what was got round."""

    @property
    def contained(self) -> bool:
        return self.walls != "none"


_known: dict[tuple[int, int], Support] = {}
_lock = threading.Lock()


def probe(folder: Path) -> Support:
    """Try out, in `folder`, what commands could be held in by; the answer is kept for its filesystem.

    A real overlay is mounted and each kind of mark is left in it once, so that what is said to work does.
    """
    if sys.platform != "linux":
        return Support("none", False, ("Linux",))
    key = os.stat(folder).st_dev, os.geteuid()
    with _lock:
        if key not in _known:
            _known[key] = _probe(folder)
        return _known[key]


def forget() -> None:
    """Try again at the next probe."""
    with _lock:
        _known.clear()


def _probe(folder: Path) -> Support:
    missing: list[str] = []
    kinds: tuple[Walls, ...] = ("user", "root") if os.geteuid() == 0 else ("user",)
    for walls in kinds:
        problem = _try(folder, walls, "overlay")
        if problem is None:
            return Support(walls, True, tuple(missing))
        missing.append(problem)
        if problem.startswith(_STEPS["overlay"]) and _try(folder, walls, "bind") is None:
            return Support(walls, False, tuple(missing))
    return Support("none", False, tuple(missing))


def _try(folder: Path, walls: Walls, view: View) -> str | None:
    """What is missing for this, or None."""
    place = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).resolve()
    try:
        for name in ("root/folder", "upper", "work"):
            (place / name).mkdir(parents=True)
        for name in ("root/file", "root/folder/file"):
            (place / name).touch()
        order = Order(
            walls=walls,
            argv=[],
            environment={},
            root=f"{place}/root",
            cwd=".",
            view=view,
            lowers=[f"{place}/root"],
            upper=f"{place}/upper",
            work=f"{place}/work",
            network=False,
            processes=1024,
            hidden=[],
            exposed=[],
        )
        stop = Stop()
        with stop:
            answer = follow(order, b"", _SECONDS, 1000, stop, SYSTEM_CLOCK).answer
        if answer.failed:
            return f"{_STEPS.get(answer.failed, answer.failed)}: {answer.detail}"
        if answer.status != 0:
            return f"{_STEPS['namespaces']}: it ended with status {answer.status}"
        if view == "overlay" and list(changes(place / "upper")) != [
            ("deleted", "file"),
            ("replaced", "folder"),
        ]:
            return f"{_STEPS['overlay']}: it does not mark deletions as it should"
        return None
    except HandrailError as error:
        return str(error)
    finally:
        discard(str(place))
