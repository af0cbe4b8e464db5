"""What the keeper is asked to run, and what it answers: plain values that cross as JSON."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

Walls = Literal["user", "root", "none"]
"""What stands around a command: namespaces under a user namespace, namespaces alone, or nothing."""
View = Literal["overlay", "bind", "plain"]
"""How the folder is shown to it: as an overlay, as another folder in its place, or as it is."""


class Order(NamedTuple):
    """One command. Paths are absolute and resolved; `cwd` is relative to `root`."""

    walls: Walls
    argv: list[str]
    """Empty for a trial: then the keeper itself does what shows whether an overlay works."""
    environment: dict[str, str]
    root: str
    cwd: str
    view: View
    lowers: list[str]
    """Topmost first. For a bind: the one folder that is shown at `root`."""
    upper: str
    work: str
    network: bool
    processes: int
    hidden: list[str]
    exposed: list[str]
    """Folders shown read only although they lie below one that is private to the command."""

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def decode(data: bytes) -> Order:
        return Order(**json.loads(data))


class Answer(NamedTuple):
    """How a command ended, or which step towards it failed."""

    status: int | None = None
    """As `waitpid` gives it; None when the command was never begun."""
    mounted: str = ""
    """The kind of filesystem that was seen at `root` before the command began."""
    failed: str = ""
    """A step, by its name: namespaces, layers, mounts, overlay, privileges, folder, exec."""
    error: int | None = None
    detail: str = ""

    def encode(self) -> bytes:
        """One line with what it says."""
        said = {name: value for name, value in self._asdict().items() if value not in (None, "")}
        return json.dumps(said).encode() + b"\n"

    @staticmethod
    def decode(data: bytes) -> Answer:
        """All that was said, in lines, as one answer: whoever spoke first of a thing is right."""
        said: dict[str, Any] = {}
        for line in data.splitlines():
            for name, value in json.loads(line).items():
                said.setdefault(name, value)
        return Answer(**said)
