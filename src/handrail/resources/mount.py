"""The folders an overlay is mounted from: the layers below, and the one that takes the writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Layers:
    """A folder and the writes over it, in Linux overlay format.

    A regular file is its content, a character device 0:0 marks a deletion, and a folder with the
    attribute `user.overlay.opaque` set to `y` hides the layers below it.
    """

    lowers: tuple[Path, ...]
    """Read only, topmost first; the last one is the real folder."""
    upper: Path
    """The folder for writes. It may hold earlier ones."""
    work: Path
    """A private folder on the same filesystem as `upper`."""
    mounted_at: int = 0
    """The disk's clock when these were created, in nanoseconds: later changes may not have been seen."""

    @property
    def root(self) -> Path:
        """The real folder."""
        return self.lowers[-1]


@runtime_checkable
class Layered(Protocol):
    """Files that a command can work on, such as a fork of a real folder."""

    def layers(self) -> Layers:
        """Return the layers to mount, so that a command sees these files and writes into them."""
        ...

    def absorb(self, mounted_at: int) -> tuple[str, ...]:
        """Take over what the command wrote, and return its paths."""
        ...
