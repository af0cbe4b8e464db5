"""The folders an overlay is made of: what lies below, and where the writes go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Layers:
    """A folder and the writes over it, in the format of Linux overlay mounts.

    A regular file is its content, a character device 0:0 is a deletion, and a folder with the
    attribute `user.overlay.opaque` set to `y` hides what lies below it.
    """

    lowers: tuple[Path, ...]
    """Read only, the topmost first; the last one is the real folder."""
    upper: Path
    """Where writes go. It may hold earlier ones."""
    work: Path
    """A folder of nobody else's, on the same filesystem as `upper`."""
    mounted_at: int = 0
    """The disk's own time when these were made, in nanoseconds: what is newer may not have been seen."""

    @property
    def root(self) -> Path:
        """The real folder."""
        return self.lowers[-1]


@runtime_checkable
class Layered(Protocol):
    """Files that a command can work on: a fork of a real folder."""

    def layers(self) -> Layers:
        """What an overlay is to be mounted from, so that a command sees these files and writes into them."""
        ...

    def absorb(self, mounted_at: int) -> tuple[str, ...]:
        """Take what the command wrote as written here, and say which paths."""
        ...
