"""What the keeper is asked to run and what it replies: plain values sent as JSON."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

Isolation = Literal["user", "root", "none"]
"""How a command is isolated: namespaces under a user namespace, namespaces alone, or not at all."""
View = Literal["overlay", "bind", "plain"]
"""How the command sees its folder: through an overlay, as a copy mounted in its place, or directly."""


class Request(NamedTuple):
    """One command. Paths are absolute and resolved; `cwd` is relative to `root`."""

    isolation: Isolation
    argv: list[str]
    """Empty for a probe: the keeper then performs the operations that show whether an overlay works."""
    environment: dict[str, str]
    root: str
    cwd: str
    view: View
    lowers: list[str]
    """Topmost first. For a bind mount, the one folder to show at `root`."""
    upper: str
    work: str
    network: bool
    processes: int
    hidden: list[str]
    exposed: list[str]
    """Folders to show, read only, even where they lie below a folder that is private to the command."""

    def encode(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def decode(data: bytes) -> Request:
        return Request(**json.loads(data))


class Reply(NamedTuple):
    """How a command ended, or which step before it failed."""

    status: int | None = None
    """As `waitpid` returns it; None if the command never started."""
    mounted: str = ""
    """The type of filesystem at `root` just before the command started."""
    failed: str = ""
    """The step that failed: namespaces, layers, mounts, overlay, privileges, folder or exec."""
    error: int | None = None
    detail: str = ""

    def encode(self) -> bytes:
        """Encode the fields that are set as one line."""
        fields = {name: value for name, value in self._asdict().items() if value not in (None, "")}
        return json.dumps(fields).encode() + b"\n"

    @staticmethod
    def decode(data: bytes) -> Reply:
        """Merge all lines into one reply. The first line that sets a field wins."""
        fields: dict[str, Any] = {}
        for line in data.splitlines():
            for name, value in json.loads(line).items():
                fields.setdefault(name, value)
        return Reply(**fields)
